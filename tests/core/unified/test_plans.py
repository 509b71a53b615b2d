"""Plans of unified memory: what the buffer measures, what each space numbers, and what is told of it."""

from pathlib import Path

import kvdock
import pytest
from kvdock.errors import UnsupportedCombination
from kvdock.planner import CachePlan
from kvdock.storages import bytes_of
from kvdock.unified.geometry import page_bytes

MODELS = Path(__file__).parents[2] / "models"


def line_of(plan):
    return plan.outline.line(plan.spaces)


def test_the_buffer_is_all_that_layers_read_and_tables_lie_beside_it(small):
    plan = small.plan("linear", budget_bytes=65_536)
    line = line_of(plan)
    # a page: 4 tokens of 8 floats for keys and values; a state: 2 layers of 16 · 2 inputs (128) and 2 · 8 · 4 floats (256)
    assert page_bytes(plan.outline.buffers, plan.outline.spaces) == {"state": 768, "full": 256}
    kv = sum(buffer.nbytes for group in plan.groups for buffer in group.buffers)
    assert kv == line.high == (plan.spaces["full"] // 4 + 1 + 3) * 256  # 3 pages of padding for the states
    assert plan.total_bytes == kv + sum(b.nbytes for b in plan.tables if b.memory == "device") <= 65_536
    tables = {b.name for b in plan.tables if b.owner == "allocator full"}
    assert tables == {"free_ring", "page_offsets", "page_of", "owner_of", "holes"}


def test_either_side_may_number_the_whole_buffer(small):
    plan = small.plan("linear")
    line = line_of(plan)
    full, states = plan.spaces["full"] // 4, plan.spaces["state"]
    assert line.fits({"full": full}) and line.fits({"state": states})
    assert full * 256 <= line.high - line.low < (full + 1) * 256
    assert states * 768 <= line.high - line.low < (states + 1) * 768


@pytest.mark.parametrize(
    ("kind", "options", "share"),
    [
        ("linear", {"state_memory_ratio": 0.5}, lambda n: {"state": n // 4 * 256 // 2 // 768}),
        ("linear", {"max_state_slots": 9}, lambda n: {"state": 9}),
        ("linear", {"max_running_requests": 4, "prefix_cache": False}, lambda n: {"state": 4}),
        ("sliding", {"swa_full_tokens_ratio": 0.5}, lambda n: {"swa": n // 2 // 4}),
        ("sliding", {}, lambda n: {"swa": n * 8 // 10 // 4}),
        (
            "three",
            {"swa_full_tokens_ratio": 0.5, "state_memory_ratio": 0.25},
            lambda n: {"swa": n // 2 // 4, "state": (n // 4 * 256 + n // 8 * 512) // 4 // 384},
        ),
    ],
)
def test_the_tokens_are_what_all_sides_hold_at_once_by_the_ratio(small, kind, options, share):
    plan = small.plan(kind, **options)
    tokens, line = plan.max_total_num_tokens, line_of(plan)
    assert line.fits({"full": tokens // 4, **share(tokens)})
    assert tokens < plan.spaces["full"]
    # eight pages more by the same ratio do not fit
    more = tokens + 32
    assert not line.fits({"full": more // 4, **share(more)})


def test_stated_slots_are_the_most_that_states_number(small):
    plan = small.plan("linear", max_state_slots=9)
    assert plan.spaces["state"] == 9
    assert plan.max_running_requests == 3  # a request may hold three
    unlimited = small.plan("linear")
    assert unlimited.spaces["state"] > 9


def test_a_cap_on_tokens_caps_what_is_there_at_once(small):
    plan = small.plan("linear", max_total_tokens=128, state_memory_ratio=0.5)
    assert plan.max_total_num_tokens == 128
    assert plan.spaces["full"] == 192  # half as many bytes again may be states or tokens


def test_questions_count_what_sides_hold_together(small):
    plan = small.plan("linear", max_running_requests=30, prefix_cache=False)
    count = plan.concurrency(20)
    line = line_of(plan)
    assert line.fits({"full": 5 * count, "state": count}) or count == 30
    assert not line.fits({"full": 5 * (count + 1), "state": count + 1}) or count == 30
    length = plan.max_length(10)
    assert line.fits({"full": 10 * -(-length // 4), "state": 10})


def test_bytes_per_token_are_those_of_the_buffer(small):
    plan = small.plan("linear", state_memory_ratio=0.5)
    assert plan.bytes_per_token.kv == 64 * 1.5
    buffers = [b for b in plan.outline.buffers if b.memory == "device"]
    parts = bytes_of(buffers, plan.outline.spaces, plan.spaces)
    assert sum(parts) == plan.total_bytes
    costs = plan.costs
    slots = sum((c.kv + c.bookkeeping) * plan.spaces[space] for space, c in costs.per_slot.items())
    assert costs.fixed_bytes + slots == plan.total_bytes
    # a state: 2 layers of 128 and 256 bytes; a page: 4 tokens of 64, which the slots of full pay for
    assert costs.shared_pages == {"state": 768, "full": 256}
    assert (costs.per_slot["state"].kv, costs.per_slot["full"].kv) == (0, 64)
    split = small.plan("linear", unified_memory=False)
    assert (split.costs.shared_pages, split.costs.per_slot["state"].kv) == ({}, 768)


def test_a_plan_file_brings_the_same_plan_back(small):
    plan = small.plan("three")
    again = CachePlan.from_json(plan.to_json())
    assert (again.spaces, again.total_bytes) == (plan.spaces, plan.total_bytes)
    assert "in unified memory" in plan.explain()


def test_what_has_one_space_is_refused():
    with pytest.raises(UnsupportedCombination, match="nothing to share out"):
        kvdock.plan(MODELS / "llama-3.1-8b.json", device="cpu", options={"unified_memory": True}, budget_bytes=2**30)


def test_pipeline_stages_are_refused():
    with pytest.raises(UnsupportedCombination, match="different numbers of pages"):
        kvdock.plan(
            MODELS / "gpt-oss-20b.json",
            device="cpu",
            options={"unified_memory": True},
            parallel={"pp_size": 2},
            budget_bytes=2**30,
        )
