"""How many slots per-request states get, and what that leaves for requests; by hand for one small model."""

import pytest
from kvdock.demand import state_slots_per_request, track_slots
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.model import ConvBlock, ConvParams, LayerSpec, MHAParams, ModelSpec, StateParams
from kvdock.options import DEFAULTS, CacheOptions, Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.queries import Query
from kvdock.startup import core_only

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**34, free_before_load_bytes=2**34, free_bytes=2**34)
ATTENTION = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=16, v_head_dim=16))
CONV = ConvParams(blocks=(ConvBlock(heads=4, head_dim=16),), kernel=4)
LINEAR = LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(4, 8, 8)))
SLOT = 3 * (64 * 3 * 2 + 4 * 8 * 8 * 4)
"""Bytes of a slot: 3 layers of 64 channels of 3 inputs in 16 bits, and 4 states of 8 x 8 in 32."""
MODEL = ModelSpec(
    name="m", architecture="A", layers=(LINEAR, LINEAR, LINEAR, ATTENTION), context_length=1024, dtype="bfloat16"
)


def plan(budget=2**26, parallel=None, **options):
    registry = core_only()
    return plan_from((MODEL,), CPU, make_options(options), parallel or Parallelism(), registry, budget_bytes=budget)


def query(**options):
    return Query(model=MODEL, options=CacheOptions(**{**DEFAULTS, **options}), parallel=Parallelism(), device=CPU)


def test_a_slot_costs_what_its_layers_keep():
    made = plan(max_state_slots=10)
    assert made.costs.per_slot["state"].kv == SLOT == 4224
    assert sum(b.nbytes for b in made.buffers if b.space == "state" and b.is_kv) == 11 * SLOT  # a padding slot


@pytest.mark.parametrize(
    ("options", "each", "tracks"),
    [
        ({"prefix_cache": False}, 1, 0),
        ({}, 3, 0),
        ({"state_extra_buffer": "on"}, 5, 2),
        ({"state_extra_buffer": "on", "overlap_schedule": False}, 4, 1),
        ({"state_extra_buffer": "lazy"}, 4, 1),
        ({"state_extra_buffer": "on", "prefix_cache": False}, 1, 0),
    ],
)
def test_slots_of_a_request_follow_the_prefix_cache_and_the_tracks(options, each, tracks):
    assert state_slots_per_request(query(**options)) == each
    assert track_slots(query(**options)) == tracks


def test_lazy_tracks_need_an_overlapping_schedule():
    with pytest.raises(PlanError, match="state_extra_buffer='lazy' takes its second slot between overlapping steps"):
        plan(state_extra_buffer="lazy", overlap_schedule=False)


def test_slots_that_are_given_are_kept_and_bound_the_requests():
    made = plan(max_state_slots=10)
    assert made.spaces["state"] == 10
    assert made.max_running_requests == 3
    assert (made.limits[1].factor, made.limits[1].raised_by) == ("state slots // 3", ("max_state_slots",))


def test_a_request_limit_above_the_slots_gives_way_with_a_warning_that_works():
    made = plan(max_state_slots=10, max_running_requests=8)
    assert made.max_running_requests == 3
    assert any("8 asked for, 3 fit" in warning and "max_state_slots=24 serves" in warning for warning in made.warnings)
    again = plan(max_state_slots=24, max_running_requests=8)
    assert (again.max_running_requests, again.warnings) == (8, ())


def test_slots_follow_a_request_limit():
    assert plan(max_running_requests=8).spaces["state"] == 24
    assert plan(max_running_requests=8, prefix_cache=False).spaces["state"] == 8
    assert plan(max_running_requests=8, prefix_cache=False, role="decode").spaces["state"] == 24  # 16 still arrive


def test_the_ratio_is_a_share_of_the_budget():
    """0.9 bytes of states for each of KV: 0.9 / 1.9 of the budget, the padding slot in it."""
    made = plan(budget=2**26)
    share = 2**26 * 9 // 19
    taken = sum(b.nbytes for b in made.buffers if b.space == "state" and b.memory == "device")
    assert share - SLOT < taken <= share
    assert made.spaces["state"] == share // SLOT - 1
    assert plan(budget=2**26, request_table_share=1.0).max_running_requests == made.spaces["state"] // 3 == 2508
    assert made.total_bytes <= 2**26
    forced = plan(budget=2**26, max_running_requests=8, state_sizing="ratio")
    assert (forced.spaces["state"], forced.max_running_requests) == (made.spaces["state"], 8)


def test_a_decode_worker_keeps_the_slots_that_it_was_given():
    # H-03 (a): 18 slots stated, 36 requests still arriving; the requests follow the slots
    made = plan(max_state_slots=18, role="decode", decode_extra_slots=36)
    assert (made.spaces["state"], made.max_running_requests) == (18, 6)


def test_slots_of_a_request_limit_are_counted_in_slots():
    # H-03 (b): 40 requests, none arriving, 3 slots each
    made = plan(max_running_requests=40, role="decode", decode_extra_slots=0)
    assert (made.spaces["state"], made.max_running_requests) == (120, 40)


@pytest.mark.parametrize(("buffer", "each", "requests"), [("lazy", 4, 10), ("on", 5, 8)])
def test_the_request_limit_follows_from_the_slots_that_a_request_holds(buffer, each, requests):
    # H-04: 40 slots, a strategy that holds 4, or 4 and a transient one of each request; draft snapshots beside them
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    for options in ({}, drafts):
        made = plan(max_state_slots=40, max_running_requests=40, state_extra_buffer=buffer, **options)
        assert (made.spaces["state"], made.max_running_requests) == (40, requests)
        assert f"since a request may hold {each} of the 40 state slots" in made.warnings[0]
        assert made.limits[1].factor == f"state slots // {each}"
        snapshots = [b for b in made.buffers if b.space == "requests" and b.is_kv]
        assert {b.shape[1] for b in snapshots} == ({requests + 1} if options else set())  # a padding row


def test_slots_are_divided_over_the_workers_of_attention():
    parallel = Parallelism(tp_size=2, dp_size=2, dp_attention=True)
    assert plan(max_state_slots=20, parallel=parallel).spaces["state"] == 10
    with pytest.raises(
        PlanError, match="max_state_slots=4 leaves 2 for a worker, but a request may hold 3; give at least 6"
    ):
        plan(max_state_slots=4, parallel=parallel)


def test_a_model_without_states_has_no_use_for_slots():
    registry = core_only()
    model = ModelSpec(name="m", architecture="A", layers=(ATTENTION,), context_length=1024, dtype="bfloat16")
    with pytest.raises(PlanError, match="nothing in this plan reads max_state_slots=4"):
        plan_from((model,), CPU, make_options({"max_state_slots": 4}), Parallelism(), registry, budget_bytes=2**24)


def test_speculation_over_states_has_to_say_how_many_tokens_it_drafts():
    with pytest.raises(
        PlanError, match="snapshot of the states for each draft token; give speculative_num_draft_tokens"
    ):
        plan(speculative_algorithm="NGRAM")
    assert plan(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4).max_running_requests > 0


def test_the_ratio_pays_for_snapshots_and_slots_together():
    drafts = 4
    made = plan(2**26, speculative_algorithm="NGRAM", speculative_num_draft_tokens=drafts)
    snapshots = [buffer for buffer in made.buffers if buffer.role == "snapshot"]
    each = sum(buffer.nbytes for buffer in snapshots) // snapshots[0].shape[1]  # [layers, rows, ...]
    share = 2**26 * 9 // 19
    slots = made.spaces["state"]
    paid = (slots + 1) * SLOT + (slots // 3 + 1) * each  # a row of padding each
    more = (slots + 2) * SLOT + ((slots + 1) // 3 + 1) * each
    assert paid <= share < more
    assert made.max_running_requests <= slots // 3  # fewer where tables reach their own share
