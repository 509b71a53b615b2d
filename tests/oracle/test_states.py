"""States per request: the engine's slots and bytes, and what kvdock counts beside them."""

from fractions import Fraction

import pytest
from kvdock.demand import state_slots_per_request
from kvdock.layout import REQUESTS, STATE

from .engine import CASES, budget_of, engine_sizes, has_states, outline_of, plan_of, sizing_options, state_bytes
from .terms import EQUAL

STATEFUL = sorted(name for name in EQUAL if has_states(CASES[name]))
BY_SHARE = [
    name for name in STATEFUL if sizing_options(CASES[name]) and "max_mamba_cache_size" not in CASES[name]["options"]
]
DRAFTING = [name for name in STATEFUL if "speculative_algorithm" in CASES[name]["options"]]


@pytest.mark.parametrize("name", STATEFUL)
def test_bytes_of_a_state_slot_are_the_engines(name):
    assert state_bytes(CASES[name]) == CASES[name]["result"]["state_bytes"]


@pytest.mark.parametrize("name", BY_SHARE)
def test_slots_are_what_the_share_pays_for_with_their_snapshots(name):
    case = CASES[name]
    each = state_slots_per_request(outline_of(case).request_pool.query)
    drafts = case["options"].get("speculative_num_draft_tokens", 0)
    share = Fraction(9, 19) * budget_of(case)  # 0.9 bytes of states for each byte of KV
    slots = int(share // (case["result"]["state_bytes"] * (1 + Fraction(drafts, each))))
    assert engine_sizes(case)[STATE] == case["result"]["state_slots"] == slots


@pytest.mark.parametrize("name", DRAFTING)
def test_bytes_of_a_requests_snapshots_are_the_engines(name):
    case = CASES[name]
    rows = case["result"]["req_to_token"][0]
    pool = case["result"]["state_pool"]
    kept = sum(pool[key]["bytes"] for key in pool if "intermediate" in key)
    buffers = outline_of(case).buffers
    ours = sum(b.row_nbytes * len(b.layers) for b in buffers if b.space == REQUESTS and b.is_kv)
    assert ours * rows == kept


def test_requests_take_what_they_hold_unless_the_share_is_asked_for():
    case = CASES["qwen3-next-80b-a3b-tp4"]
    assert plan_of(case).sizes[STATE] == 384  # 128 requests, 3 slots each
    by_share = plan_of(case, {"state_sizing": "ratio"})
    assert by_share.sizes[STATE] == 788  # the engine's 789, less the padding row
    assert by_share.total_bytes <= budget_of(case)


def test_slots_of_requests_that_still_arrive_are_paid_for():
    case = CASES["qwen3-next-decode-disagg-no-radix"]
    plan = plan_of(case)
    assert engine_sizes(case)[STATE] == 64  # the engine sizes for the running ones, then allocates for all
    assert plan.sizes[STATE] == 64 + 128 == case["result"]["state_pool"]["mamba_cache.temporal"]["shape"][1] - 1
    assert plan.total_bytes <= budget_of(case)


def test_a_stage_pays_for_its_own_layers():
    case = CASES["qwen3-next-pp2-rank0"]
    # 18 of 36 layers: 15,258,436,454 // 38,633,472 = 394, one of them padding; the engine charges 77,266,944 a slot.
    assert plan_of(case, {"state_sizing": "ratio"}).sizes[STATE] == 393
    assert case["result"]["state_slots"] == 197


def test_rings_are_paid_for_with_their_slots():
    case = CASES["qwen3-next-linear-replayssm"]
    # A slot takes 19,316,736 bytes of states and 36 · (65,536 + 32,768 + 512) of rings: 22,874,112 in all.
    assert plan_of(case, {"state_sizing": "ratio"}).sizes[STATE] == 15_258_436_454 // 22_874_112 - 1 == 666


def test_snapshots_are_paid_for_as_they_lie():
    case = CASES["qwen3-next-mtp-tp4"]
    # 36 · (2048 · 6 · 2 + 4 · 524,288) bytes a request; 339 · 19,316,736 + 113 · 76,382,208 is within the share, and
    # one slot more, with the row of its 113th request, is not.
    snapshots, share = 36 * (2048 * 6 * 2 + 4 * 524_288), 15_258_436_454
    assert 339 * 19_316_736 + 113 * snapshots <= share < 340 * 19_316_736 + 114 * snapshots
    assert plan_of(case, {"state_sizing": "ratio"}).sizes[STATE] == 338
