"""The engine's figures: every tensor, and every count once the buffer list is edited to what the engine charges."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
from kvdock import dtypes
from kvdock.costs import slot_bytes
from kvdock.errors import BudgetError, PlanError, UnsupportedCombination
from kvdock.sizing import token_factors

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "engine.json").read_text(encoding="utf-8"))["cases"]
}
SERVED = sorted(name for name in CASES if not name.startswith("fail-"))
SETTINGS = {
    "deepseek-v4-flash-state-bf16": {"state_dtype": "bf16"},
    "deepseek-v4-flash-online-c128": {"online_compress": True},
}
ALIKE = ("page_size", "kv_cache_dtype", "max_running_requests", "max_total_tokens", "swa_full_tokens_ratio")


def plan_of(plan, flash, case, budget_bytes=None, **changed):
    given = case["options"]
    options = {name: given[name] for name in ALIKE if name in given} | changed
    if case["name"] in SETTINGS:
        options["plugin_options"] = {"dsv4": SETTINGS[case["name"]]}
    parallel = {"pp_size": given.get("pp", 1), "pp_rank": given.get("pp_rank", 0)}
    return plan(flash, budget_bytes or given["budget_bytes"], parallel=parallel, **options)


def stated_plan_of(plan, flash, case):
    found = case["result"]
    return plan_of(plan, flash, case, 2**44, max_total_tokens=found["tokens"], max_running_requests=found["requests"])


def tensors(plan):
    """Rows and bytes of each tensor of rows and index keys; a row of bytes is padded beyond its declared shape."""
    return Counter(
        {
            (buffer.shape[0], buffer.nbytes // buffer.tensors): buffer.tensors
            for buffer in plan.buffers
            if buffer.is_kv and buffer.dtype == "uint8"
        }
    )


def engines(case):
    found = [tensor for tensor in case["result"]["kv_pool"].values() if tensor["dtype"] == "uint8"]
    return Counter({(t["shape"][0], t["bytes"] // t["tensors"]): t["tensors"] for t in found})


@pytest.mark.parametrize("name", SERVED)
def test_rows_and_index_keys_are_the_engines(plan, flash, name):
    theirs = engines(CASES[name])
    assert len(theirs) == 4
    assert tensors(stated_plan_of(plan, flash, CASES[name])) == theirs


@pytest.mark.parametrize("name", SERVED)
def test_states_of_requests_have_the_engines_bytes_and_those_of_pages_half_its_rows(plan, flash, name):
    planned = stated_plan_of(plan, flash, CASES[name])
    pools = CASES[name]["result"]["kv_pool"]
    states = pools["compress_state_pools[*].kv_score_buffer.kv_score"]
    index = pools["indexer_compress_state_pools[*].kv_score_buffer.kv_score"]
    own = {group.name: group.buffers[0] for group in planned.groups}
    itemsize = dtypes.find(states["dtype"]).bits // 8
    rows, pages = states["shape"][0], planned.spaces["swa"] // 256
    assert rows == -(-(2 * pages * 8 + 8 + 1) // 4) * 4  # the engine has a ring for each 128 slots, and uses each other
    assert own["c4.state"].shape[0] == -(-(pages * 8 + 8 + 1) // 4) * 4
    assert own["c4.state"].shape[1] == states["shape"][1] == 2048
    assert own["c4.index_state"].shape == (own["c4.state"].shape[0], index["shape"][1])
    assert {own["c4.state"].dtype, own["c4.index_state"].dtype} == {states["dtype"]}
    # What is left of the engine's sum are the states of requests.
    by_request = states["bytes"] - own["c4.state"].tensors * rows * 2048 * itemsize
    assert own["c128.state"].nbytes == by_request


def test_states_of_pages_take_what_they_reach_and_no_more(plan, flash):
    planned = stated_plan_of(plan, flash, CASES["deepseek-v4-flash"])
    states = [group.buffers[0].nbytes for group in planned.groups if group.space == "c4_state"]
    assert sum(states) == 3_510_312_960  # the engine: 7,018,045,440


def charged(buffer):
    """A buffer as the engine counts it: no padding rows, pages unpadded, a ring of states for each 128 slots."""
    shape = buffer.shape
    if buffer.space == "c4_state":
        shape = (2 * shape[0],)
    return msgspec.structs.replace(buffer, shape=shape, guard=0, round_rows_to=1, row_bytes_align=1)


def cell_of(outline):
    factors = token_factors(outline.spaces)
    buffers = [charged(b) for b in outline.buffers if b.is_kv and b.space != "c128_state"]
    return sum((slot_bytes(b, outline.spaces) * factors[b.space] for b in buffers), Fraction(0))


def request_states(outline, requests):
    found = [b for b in outline.buffers if b.space == "c128_state"]
    ring = outline.spaces["c128_state"].page_size
    return sum(b.tensor_nbytes(requests * ring) * b.tensors for b in found)


def engine_tokens(outline, case):
    """The engine's sum: what the states of requests leave, over the cost of a token; they are those of an estimate."""
    given = case["options"]
    cell, budget = cell_of(outline), given["budget_bytes"]
    requests = given.get("max_running_requests")
    if requests is None:
        unreduced = int(budget // cell) // 256 * 256
        requests = min(max(int(Fraction(unreduced, outline.model.context_length) * 512), 2048), 4096)
    tokens = int((budget - request_states(outline, requests)) // cell)
    return min(tokens, given.get("max_total_tokens", tokens)) // 256 * 256


@pytest.mark.parametrize("name", [n for n in SERVED if "pp2" not in n])
def test_tokens_are_the_engines_with_its_approximations(plan, flash, name):
    case = CASES[name]
    outline = plan_of(plan, flash, case).outline
    assert float(cell_of(outline)) == pytest.approx(case["result"]["cell_bytes"], abs=1e-6)
    assert engine_tokens(outline, case) == case["result"]["tokens"]


def test_a_stage_has_the_engines_tokens(plan, flash):
    case = CASES["deepseek-v4-flash-pp2-rank0"]
    ranks = [{**case, "options": {**case["options"], "pp_rank": rank}} for rank in (0, 1)]
    tokens = [engine_tokens(plan_of(plan, flash, rank).outline, rank) for rank in ranks]
    assert tokens == [11_530_240, 10_619_392]
    assert min(tokens) == case["result"]["tokens"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("fail-deepseek-v4-page-size-64", UnsupportedCombination, "page_size=64 does not divide into groups of 128"),
        ("fail-deepseek-v4-bf16", PlanError, "kv_cache_dtype='bf16' cannot hold packed rows"),
        ("fail-deepseek-v4-budget-below-c128-state", BudgetError, "max_running_requests=4096 needs"),
    ],
)
def test_what_the_engine_refuses_is_refused(plan, flash, name, error, message):
    with pytest.raises(error, match=message):
        plan_of(plan, flash, CASES[name])


def test_pages_of_128_are_refused_where_the_kernels_read_256(plan, flash):
    case = CASES["fail-deepseek-v4-page-size-128"]
    with pytest.raises(UnsupportedCombination, match="page_size=128 is not what kernels on test read"):
        plan(flash, case["options"]["budget_bytes"], device_type="cuda", page_size=128)
    assert plan_of(plan, flash, case).spaces["c4"] % 32 == 0  # the CPU's kernels read any


def test_every_case_has_a_term():
    assert len(CASES) == 10
    assert len(SERVED) == 6
