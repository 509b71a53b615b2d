"""Request pools of a decode worker: rows for those who run, and more for those whose KV is still arriving."""

import pytest
from kvdock.allocators.window import swa_tail_tokens
from kvdock.errors import PlanError, SlotError
from kvdock.requests import (
    DecodeReqToTokenPool,
    HybridDecodeReqToTokenPool,
    HybridReqToTokenPool,
    ReqToTokenPool,
)

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

NOTHING = torch.zeros(0, dtype=torch.int64)


@pytest.fixture
def make_decode(make_pool):
    return lambda requests, extra, **options: make_pool(
        DecodeReqToTokenPool, requests, role="decode", decode_extra_slots=extra, **options
    )


def test_rows_are_those_of_the_requests_and_the_arriving_and_one_for_padding(make_decode):
    pool = make_decode(4, 3)
    assert pool.req_to_token.shape[0] == pool.generation.shape[0] == pool.lengths.shape[0] == 8
    assert (pool.size, pool.row_count, pool.available_size(), pool.available_to_arrive()) == (4, 7, 4, 7)


@pytest.mark.parametrize(("limit", "given", "extra"), [(32, None, 64), (33, None, 0), (32, 10, 10), (33, 10, 10)])
def test_the_rule_for_extra_rows(make_pool, limit, given, extra):
    """G-04: 64 for 32 requests, none for 33, or what is given."""
    pool = make_pool(DecodeReqToTokenPool, limit, role="decode", max_running_requests=limit, decode_extra_slots=given)
    assert pool.req_to_token.shape[0] == limit + extra + 1


def test_at_most_size_run_and_at_most_all_rows_are_taken(make_decode):
    pool = make_decode(2, 3)
    assert pool.alloc(["a", "b", "c"]) is None
    assert pool.alloc(["a", "b"]) == [1, 2]
    assert pool.alloc(["c"]) is None
    assert pool.alloc(["c", "d", "e"], arriving=True) == [3, 4, 5]
    assert pool.alloc(["f"], arriving=True) is None
    assert (pool.running, pool.arriving(), pool.available_size(), pool.available_to_arrive()) == (2, tuple("cde"), 0, 0)
    pool.check()


def test_an_arriving_request_runs_when_another_ended(make_decode):
    pool = make_decode(2, 3)
    pool.alloc(["a", "b"])
    pool.alloc(["c", "d"], arriving=True)
    assert pool.start(["c"]) is None
    assert pool.arriving() == ("c", "d")
    pool.free("a")
    assert pool.start(["c", "d"]) is None
    assert pool.arriving() == ("c", "d")
    assert pool.start(["b", "c"]) == [2, 3]
    assert (pool.running, pool.arriving()) == (2, ("d",))
    assert pool.start(["b", "c"]) == [2, 3]


def test_arriving_requests_may_take_the_rows_that_nobody_runs_in(make_decode):
    pool = make_decode(2, 1)
    assert pool.alloc(["a", "b", "c"], arriving=True) == [1, 2, 3]
    assert (pool.running, pool.available_size()) == (0, 0)
    assert pool.start(["a", "b"]) == [1, 2]
    assert pool.start(["c"]) is None


def test_a_request_keeps_its_row_and_how_it_is(make_decode):
    pool = make_decode(1, 2)
    pool.alloc(["a"], arriving=True)
    assert pool.alloc(["a"]) == [1]
    assert pool.arriving() == ("a",)
    pool.start(["a"])
    assert pool.alloc(["a"], arriving=True) == [1]
    assert pool.arriving() == ()
    assert pool.alloc(["b", "a"], arriving=True) == [2, 1]
    assert pool.arriving() == ("b",)


def test_who_has_no_row_cannot_start(make_decode):
    pool = make_decode(2, 1)
    pool.alloc(["a"], arriving=True)
    with pytest.raises(SlotError, match=r"requests \['x'\] have no row"):
        pool.start(["a", "x"])
    assert pool.arriving() == ("a",)


def test_an_arriving_request_is_freed_like_any(make_decode):
    pool = make_decode(1, 1)
    pool.alloc(["a", "b"], arriving=True)
    pool.free("a")
    with pytest.raises(SlotError, match="request 'a' has no row"):
        pool.free("a")
    assert (pool.arriving(), pool.alloc(["c"])) == (("b",), [1])
    pool.clear()
    assert (pool.arriving(), pool.running, pool.available_to_arrive()) == ((), 0, 2)
    pool.check()


def test_random_traces_keep_both_limits(make_decode):
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    calls = st.tuples(st.sampled_from(["run", "arrive", "start", "free"]), st.lists(st.integers(0, 7), max_size=4))

    @hypothesis.settings(max_examples=60, deadline=None, print_blob=True)
    @hypothesis.given(st.lists(calls, max_size=25))
    def trace(operations):
        pool, running, arriving = make_decode(2, 3), set(), set()
        for call, names in operations:
            live = running | arriving
            if call in ("run", "arrive"):
                new = set(names) - live
                fits = len(live | new) <= 5 and (call == "arrive" or len(running | new) <= 2)
                assert (pool.alloc(names, arriving=call == "arrive") is not None) == fits
                (running if call == "run" else arriving).update(new if fits else ())
            elif call == "start":
                names = [name for name in names if name in live]
                fits = len(running | set(names)) <= 2
                assert (pool.start(names) is not None) == fits
                if fits:
                    running.update(names)
                    arriving.difference_update(names)
            else:
                for name in set(names) & live:
                    pool.free(name)
                    running.discard(name)
                    arriving.discard(name)
            assert (pool.running, set(pool.arriving())) == (len(running), arriving)
            assert sorted(pool.live_rows().values()) == sorted(running | arriving)
            assert pool.available_size() == min(5 - len(running | arriving), 2 - len(running))
            pool.check()

    trace()


def test_both_have_rows_and_states_for_all(make_pool):
    """States are the slots of (requests + extra) requests; those of an arriving one are written by the transfer."""
    pool = make_pool(HybridDecodeReqToTokenPool, 2, 15, role="decode", decode_extra_slots=3, state_extra_buffer="on")
    assert (pool.row_to_state.shape, pool.track_slots.shape) == ((6,), (6, 2))
    assert pool.alloc(["a", "b"]) == [1, 2]
    assert pool.alloc(["c"]) is None
    assert pool.alloc(["c", "d", "e"], arriving=True) == [3, 4, 5]
    assert pool.available_states() == 0
    assert pool.row_to_state.tolist() == [0, 1, 4, 7, 10, 13]
    assert list(pool.due_states()[0].fresh) == [1, 2, 3, 4, 5, 6, 8, 9, 11, 12, 14, 15]
    assert pool.alloc(["f"], arriving=True) is None
    pool.free("b")
    assert pool.start(["d"]) == [4]
    pool.free("d")
    assert (pool.available_states(), pool.available_size(), pool.available_to_arrive()) == (6, 1, 2)
    pool.check(held_states=[])
    pool.clear()
    assert (pool.available_states(), pool.arriving(), pool.running) == (15, (), 0)


def test_a_state_that_is_missing_keeps_an_arriving_request_out(make_pool):
    pool = make_pool(HybridDecodeReqToTokenPool, 2, 3, role="decode", decode_extra_slots=3, prefix_cache=False)
    assert pool.alloc(["a", "b"], arriving=True) == [1, 2]
    assert pool.alloc(["c", "d"], arriving=True) is None
    assert (pool.arriving(), pool.available_states(), pool.available_to_arrive()) == (("a", "b"), 1, 1)
    pool.check(held_states=[])


@pytest.mark.parametrize(
    ("model", "role", "expected"),
    [
        ("mha", "none", ReqToTokenPool),
        ("mha", "prefill", ReqToTokenPool),
        ("mha", "decode", DecodeReqToTokenPool),
        ("hybrid", "none", HybridReqToTokenPool),
        ("hybrid", "prefill", HybridReqToTokenPool),
        ("hybrid", "decode", HybridDecodeReqToTokenPool),
    ],
)
def test_the_role_and_the_states_choose_the_request_pool(make_cache, model, role, expected):
    cache = make_cache(model, role=role)
    assert type(cache.req_to_token_pool) is expected
    assert cache.allocated_bytes() == cache.plan.total_bytes
    assert cache.host_bytes() == cache.plan.host_bytes


@pytest.mark.parametrize("model", ["mha", "hybrid"])
def test_extra_rows_are_counted_in_bytes(make_plan, model):
    """G-04: a row of 256 + 4 columns of four bytes, and with states the maps' and the states' own words."""
    few, more = (make_plan(model, role="decode", decode_extra_slots=extra, max_total_tokens=64) for extra in (0, 5))
    states = 15 * 3 * (8 * 3 * 2 + 16 * 4) if model == "hybrid" else 0
    assert more.total_bytes - few.total_bytes == 5 * 260 * 4 + (5 * 4 + states if model == "hybrid" else 0)
    assert few.max_running_requests == more.max_running_requests == 4


def test_extra_rows_need_the_role(make_plan):
    with pytest.raises(PlanError, match="nothing in this plan reads decode_extra_slots=5"):
        make_plan("mha", decode_extra_slots=5)


@pytest.mark.parametrize(
    ("length", "window", "page", "expected"),
    [(1000, 128, 64, 168), (100, 128, 64, 100), (128, 128, 64, 128), (129, 128, 64, 129), (1024, 128, 256, 256)],
)
@pytest.mark.parametrize("model", ["sliding", "all sliding"])
def test_an_arriving_request_takes_sliding_slots_for_its_tail_alone(make_cache, model, length, window, page, expected):
    """G-03: tokens = length − floor(max(0, length − window) / page) · page, in whole pages; the full side has all."""
    cache = make_cache(model, role="decode", page_size=page, context_length=2048, max_total_tokens=4096)
    allocator = cache.token_to_kv_pool_allocator
    full, swa = allocator.full_available_size(), allocator.swa_available_size()
    assert swa_tail_tokens(length, window, page) == expected
    slots = cache.admit("a", length, arriving=True)
    pages = -(-expected // page) * page
    assert swa - allocator.swa_available_size() == pages
    assert full - allocator.full_available_size() == (pages if model == "all sliding" else -(-length // page) * page)
    assert allocator.translate(slots).ge(page).tolist() == [False] * (length - expected) + [True] * expected
    assert cache.req_to_token_pool.start(["a"]) is not None
    cache.evict(["a"], [length - 1])
    cache.release("a")
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (full, swa)
    cache.close()


def test_where_nothing_arrives_a_request_cannot(make_cache):
    cache = make_cache("mha")
    before = cache.token_to_kv_pool_allocator.available_size()
    with pytest.raises(SlotError, match=r"request 'a' cannot arrive: the plan is not of role='decode'"):
        cache.admit("a", 5, arriving=True)
    assert cache.token_to_kv_pool_allocator.available_size() == before
    cache.check(held=NOTHING)


def test_admission_respects_the_running_limit(make_cache):
    cache = make_cache("mha", role="decode", decode_extra_slots=1, max_running_requests=1)
    assert cache.admit("a", 5) is not None
    before = cache.token_to_kv_pool_allocator.available_size()
    assert cache.admit("b", 5) is None
    assert cache.token_to_kv_pool_allocator.available_size() == before
    assert cache.admit("b", 5, arriving=True) is not None
    cache.release("a")
    assert cache.req_to_token_pool.start(["b"]) == [2]
    cache.release("b")
    cache.close()
