"""Block formats, sparse, hybrid and page-major models: every tensor of a plan of stated sizes is the engine's.

Sizes are the engine's own, given outright, so that rows are compared as well as shapes.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from kvdock import dtypes
from kvdock.device import DeviceInfo
from kvdock.edge import read_models
from kvdock.options import make_options, make_parallelism
from kvdock.planner import plan_from
from kvdock.startup import core_only

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "tensors.json").read_text(encoding="utf-8"))["cases"]
}
DEVICE = DeviceInfo(device_type="cpu", name="oracle", total_bytes=2**44, free_before_load_bytes=2**44, free_bytes=2**44)
SAME_NAME = (
    "page_size",
    "kv_cache_dtype",
    "max_running_requests",
    "context_length",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
)
OTHER_NAME = {
    "speculative_eagle_topk": "speculative_topk",
    "enable_page_major_kv_layout": "page_major",
    "enable_linear_replayssm": "replay_rings",
    "disaggregation_decode_extra_slots": "decode_extra_slots",
    "disaggregation_mode": "role",
}


def plan_of(case):
    given, result = case["options"], case["result"]
    values = {name: given[name] for name in SAME_NAME if name in given}
    values |= {ours: given[theirs] for theirs, ours in OTHER_NAME.items() if theirs in given}
    values["prefix_cache"] = not given.get("disable_radix_cache", False)
    values["max_running_requests"] = result["max_running_requests"]
    values["max_total_tokens"] = result["max_total_num_tokens"]
    if result.get("state"):
        values["max_state_slots"] = slots_of(result)
    if case.get("draft_hf_config", case["hf_config"]) != case["hf_config"]:
        values["draft"] = case["draft_hf_config"]
    parallel = {
        name: given[short]
        for name, short in (("tp_size", "tp"), ("pp_size", "pp"), ("pp_rank", "pp_rank"))
        if short in given
    }
    registry = core_only()
    options = make_options(values)
    models, _ = read_models(case["hf_config"], options, registry)
    return plan_from(models, DEVICE, options, make_parallelism(parallel), registry, budget_bytes=2**43)


def slots_of(result):
    """State slots without the padding row: the engine may have more than its report says (disaggregated decode)."""
    return result["state_pool"]["mamba_cache.temporal"]["shape"][1] - 1


def is_scale(name):
    return "scale" in name and "index" not in name


def ours(plan, worker):
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


@pytest.mark.parametrize("name", [name for name in CASES if "page-major" not in name])
def test_every_tensor_is_the_engines(name):
    case = CASES[name]
    result = case["result"]
    plan = plan_of(case)
    assert ours(plan, "target") == theirs({**result["kv_pool"], **result["state_pool"]})
    if "draft_pool" in result:
        assert ours(plan, "draft") == theirs(result["draft_pool"])


@pytest.mark.parametrize("name", [name for name in CASES if "page-major" in name])
def test_byte_buffers_are_as_large_as_the_engines(name):
    case = CASES[name]
    plan = plan_of(case)
    sums = sorted(sum(buffer.nbytes for buffer in group.buffers) for group in plan.groups)
    assert sums == sorted(tensor["bytes"] for tensor in case["result"]["kv_pool"].values())


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["result"].get("state")])
def test_bytes_of_a_state_slot_are_the_engines(name):
    case = CASES[name]
    state = case["result"]["state"]
    plan = plan_of(case)
    rings = [b for b in plan.buffers if b.name.startswith("replay")]
    share = 1 if "pp" not in case["options"] else 2  # the engine reports all layers, whatever the stage owns
    per_slot = plan.costs.per_slot["state"].kv - sum(b.nbytes // b.shape[1] for b in rings if b.is_kv)
    assert per_slot * share == state["cache_per_req_bytes"]
