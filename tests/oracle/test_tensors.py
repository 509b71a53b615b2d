"""Every tensor of a plan of the engine's sizes, rows included, is the engine's."""

from collections import Counter

import pytest
from kvdock import dtypes
from kvdock.errors import PlanError
from kvdock.layout import STATE
from kvdock.options import make_options

from .engine import CASES, stated_plan_of
from .terms import COUNTS_DIFFER, EQUAL, TENSORS_DIFFER

PAGE_MAJOR = frozenset(name for name in EQUAL if CASES[name]["options"].get("enable_page_major_kv_layout"))
DRAFTED = sorted(name for name in EQUAL if "draft_pool" in CASES[name]["result"])


def is_scale(name):
    return "scale" in name and "index" not in name


def ours(plan, worker="target"):
    """Tensors by count, shape and stored type; scales by count and bytes, since their order inside a page is free."""
    found = Counter()
    for buffer in plan.buffers:
        if not buffer.is_kv and "write" not in buffer.name and "workspace" not in buffer.role:
            continue
        if buffer.worker != worker or "global" in buffer.name:
            continue
        dtype = dtypes.find(buffer.dtype)
        shape = buffer.shape
        if dtype.bits == 4:
            shape = (*shape[:-1], shape[-1] // 2)
        stored = "float8" if buffer.role == "workspace" else dtypes.find(dtype.storage).name
        key = buffer.nbytes if is_scale(buffer.name) else (shape, stored)
        found[key] += buffer.tensors
    return found


def theirs(tensors):
    found = Counter()
    for name, tensor in tensors.items():
        dtype = dtypes.find(tensor["dtype"])
        stored = "float8" if "dq_" in name else dtypes.find(dtype.storage).name
        key = tensor["bytes"] if is_scale(name) else (tuple(tensor["shape"]), stored)
        found[key] += tensor["tensors"]
    return found


def of_target(case):
    return theirs({**case["result"]["kv_pool"], **case["result"].get("state_pool", {})})


@pytest.mark.parametrize("name", sorted(EQUAL - PAGE_MAJOR))
def test_every_tensor_is_the_engines(name):
    assert ours(stated_plan_of(CASES[name])) == of_target(CASES[name])


@pytest.mark.parametrize("name", sorted(PAGE_MAJOR))
def test_byte_buffers_are_as_large_as_the_engines(name):
    plan = stated_plan_of(CASES[name])
    sums = sorted(sum(buffer.nbytes for buffer in group.buffers) for group in plan.groups)
    assert sums == sorted(tensor["bytes"] for tensor in CASES[name]["result"]["kv_pool"].values())


@pytest.mark.parametrize("name", DRAFTED)
def test_every_tensor_of_a_draft_is_the_engines(name):
    assert ours(stated_plan_of(CASES[name]), "draft") == theirs(CASES[name]["result"]["draft_pool"])


# Tensors that differ: what, and by how much.


@pytest.mark.parametrize(
    "name", sorted({**COUNTS_DIFFER, **TENSORS_DIFFER}.keys() - {"qwen3-next-int8-mamba-checkpoint"})
)
def test_the_named_differences_are_still_there(name):
    assert ours(stated_plan_of(CASES[name])) != of_target(CASES[name])


def test_nothing_is_kept_where_the_engine_keeps_a_row():
    case = CASES["llama-prefill-only-noop-pool"]
    plan = stated_plan_of(case)
    assert sum(tensor["bytes"] for tensor in case["result"]["kv_pool"].values()) == 131_072
    assert sum(buffer.nbytes for group in plan.groups for buffer in group.buffers) < 8
    assert ours(plan) == Counter()


def test_snapshots_stand_where_the_engine_has_rings_of_drafts():
    case = CASES["qwen3-next-mtp-gdn-replayssm"]
    plan = stated_plan_of(case)
    # 36 layers, 64 rows and padding, 4 drafts, 8 heads of 128 x 128.
    assert ours(plan) - of_target(case) == {((36, 65, 4, 8, 128, 128), "float32"): 1}
    extra = of_target(case) - ours(plan)
    assert {shape[:2] for shape, _ in extra if len(shape) > 1} == {(36, plan.sizes[STATE] + 1)}
    with pytest.raises(PlanError, match="enable_gdn_replayssm_spec"):
        make_options({"enable_gdn_replayssm_spec": True})


def test_no_checkpoints_of_states_are_kept():
    case = CASES["qwen3-next-int8-mamba-checkpoint"]
    assert ours(stated_plan_of(case)) == of_target(case)
    assert sum(tensor["bytes"] for tensor in case["result"]["checkpoint_pool"].values()) == 8_381_988_864
    with pytest.raises(PlanError, match="enable_int8_mamba_checkpoint"):
        make_options({"enable_int8_mamba_checkpoint": True})
