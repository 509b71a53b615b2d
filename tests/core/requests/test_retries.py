"""A call that fails half-way changes nothing, or does the rest when it is made again."""

import kvdock.requests.hybrid
import pytest
from kvdock.errors import SlotError
from kvdock.requests import HybridDecodeReqToTokenPool, HybridReqToTokenPool

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

NOTHING = torch.tensor([], dtype=torch.int64)
MODES = {"on": {"state_extra_buffer": "on"}, "lazy": {"state_extra_buffer": "lazy"}, "off": {}}


def gone(*arguments, **named):
    raise RuntimeError("the device is gone")


def fails(monkeypatch, owner, name, call, *arguments, **named):
    """Make a call while a function that it needs fails."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, gone)
        with pytest.raises(RuntimeError, match="the device is gone"):
            call(*arguments, **named)


def late(monkeypatch, owner, name, call, *arguments, **named):
    """Make a call while a function that it needs fails after it did its work."""
    real = getattr(owner, name)

    def fail(*given, **more):
        real(*given, **more)
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            call(*arguments, **named)


def no_memory(monkeypatch, call, *arguments, **named):
    fails(monkeypatch, kvdock.requests.hybrid, "to_device", call, *arguments, **named)


def books(pool):
    """Return all that a table with states knows."""
    due = [(list(part.copies.items()), list(part.fresh)) for part in pool.due_states()]
    tracks = None if pool.track_slots is None else pool.track_slots.tolist()
    kept = pool.live_rows(), pool.available_size(), pool.states.live_slots(), pool.available_states()
    return (*kept, pool.generation.tolist(), pool.row_to_state.tolist(), tracks, due)


@pytest.fixture
def make_table(make_pool):
    """Give the maker of a table with states in which "a" has run."""

    def table(mode, cls=HybridReqToTokenPool, **options):
        pool = make_pool(cls, 4, 12, **MODES[mode], **options)
        pool.alloc(["a"])
        pool.due_states()[0].fresh.clear()
        return pool

    return table


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("mode", ["on", "lazy"])
def test_a_donation_that_fails_loses_no_track(make_table, monkeypatch, mode, replace):
    pool = make_table(mode)
    before = books(pool)
    no_memory(monkeypatch, pool.donate, "a", replace=replace)
    assert books(pool) == before
    pool.check(held_states=[])
    given = pool.donate("a", replace=replace)
    assert given == {"on": 3, "lazy": 2}[mode]
    pool.check(held_states=[given])
    left = {"on": [2, 4] if replace else [2, 0], "lazy": [3, 0] if replace else [0, 0]}
    assert pool.track_slots[1].tolist() == left[mode]


def test_a_donation_that_fails_loses_no_state(make_table, monkeypatch):
    pool = make_table("off")
    before = books(pool)
    no_memory(monkeypatch, pool.donate, "a", replace=False)
    assert books(pool) == before
    assert pool.state_of("a") == 1
    assert pool.donate("a", replace=False) == 1
    pool.check(held_states=[1])


def test_a_second_track_that_was_not_mapped_is_not_held(make_table, monkeypatch):
    pool = make_table("lazy")
    before = books(pool)
    no_memory(monkeypatch, pool.take_second_track, ["a"])
    assert books(pool) == before
    assert pool.take_second_track(["a"]) == [3]
    assert pool.track_slots[1].tolist() == [2, 3]
    pool.check(held_states=[])


@pytest.mark.parametrize("cls", [HybridReqToTokenPool, HybridDecodeReqToTokenPool])
@pytest.mark.parametrize("mode", MODES)
def test_a_row_whose_states_were_not_mapped_is_not_handed_out(make_table, monkeypatch, mode, cls):
    pool = make_table(mode, cls, **({} if cls is HybridReqToTokenPool else {"role": "decode", "decode_extra_slots": 2}))
    before = books(pool)
    for call in (
        lambda: no_memory(monkeypatch, pool.alloc, ["a", "b", "c"]),
        lambda: fails(monkeypatch, pool.states, "alloc", pool.alloc, ["b", "c"]),
        lambda: late(monkeypatch, pool.states, "alloc", pool.alloc, ["b", "c"]),
        lambda: fails(monkeypatch, pool, "_with_slots", pool.alloc, ["b", "c"]),
    ):
        call()
        assert books(pool) == before
        pool.check(held_states=[])
    assert pool.alloc(["b", "c"]) == [2, 3]
    each = {"on": 3, "lazy": 2, "off": 1}[mode]
    assert pool.row_to_state.tolist()[:4] == [0, 1, each + 1, 2 * each + 1]
    assert list(pool.due_states()[0].fresh) == list(range(each + 1, 3 * each + 1))
    assert pool.generation[1:4].tolist() == [1, 1, 1]


def two_pools(make_cache, **options):
    """Return a cache whose target and draft keep states, and both pools; "old" left state 7 in slot `cached`."""
    cache = make_cache("hybrid", "hybrid", max_state_slots=8, budget=2**24, **options)
    pools = [pool for group in cache.pools.values() if hasattr(pool := group, "cleared")]
    cache.admit("old", 4)
    cache.prepare_states()
    cached = cache.req_to_token_pool.donate("old", replace=False)
    cache.release("old")
    for pool in pools:
        fill(pool, cached, 7)
        pool.cleared.clear()
    return cache, pools, cached


def fill(pool, slot, value):
    for layer_id in pool.layer_ids:
        pool.temporal_states(layer_id)[slot] = value


def value(pool, slot):
    (found,) = {float(number) for layer in pool.layer_ids for number in pool.temporal_states(layer)[slot].unique()}
    return found


@pytest.mark.parametrize("work", ["copy_slots", "clear_slots"])
@pytest.mark.parametrize("place", [0, 1])
def test_no_pool_does_twice_what_it_did(make_cache, monkeypatch, place, work):
    """A slot that was read is another's by the second call: what was copied is not copied again."""
    cache, pools, cached = two_pools(make_cache)
    assert len(pools) == 2
    table = cache.req_to_token_pool
    cache.admit("b", 4, cached_state=cached)
    table.free_states([cached])
    others = 0
    while cached not in table.states.live_slots():  # until the slot is handed out anew, as one to be cleared
        others += 1
        cache.admit(others, 4)
        if table.state_of(others) != cached:
            cache.release(others)
    fails(monkeypatch, pools[place], work, cache.prepare_states)
    cache.prepare_states()
    cache.prepare_states()
    b = table.state_of("b")
    assert [pool.copied for pool in pools] == [[([cached], [b])]] * 2
    assert [pool.cleared for pool in pools] == [[[cached]]] * 2
    assert [(value(pool, b), value(pool, cached)) for pool in pools] == [(7, 0)] * 2


def test_what_went_back_between_two_tries_is_not_made_ready(make_cache, monkeypatch):
    cache, pools, cached = two_pools(make_cache)
    cache.admit("b", 4, cached_state=cached)
    cache.admit("c", 4)
    fails(monkeypatch, pools[0], "copy_slots", cache.prepare_states)
    cache.release("b")
    cache.release("c")
    cache.prepare_states()
    assert [(pool.copied, pool.cleared) for pool in pools] == [([], [])] * 2


def test_a_state_that_arrives_between_two_tries_is_not_cleared(make_cache, monkeypatch):
    cache, pools, _ = two_pools(make_cache)
    table = cache.req_to_token_pool
    cache.admit("b", 4)
    fails(monkeypatch, pools[1], "clear_slots", cache.prepare_states)
    table.expect_states(["b"])
    fill(pools[1], table.state_of("b"), 3)
    cache.prepare_states()
    assert value(pools[1], table.state_of("b")) == 3


def test_a_fork_between_two_tries_reads_what_each_pool_has(make_cache, monkeypatch):
    """One pool filled the snapshot and the other did not: there it is read from where it is filled from."""
    cache, pools, cached = two_pools(make_cache)
    table = cache.req_to_token_pool
    cache.admit("a", 4, cached_state=cached)
    cache.prepare_states()
    snapshot = table.donate("a")
    fails(monkeypatch, pools[1], "copy_slots", cache.prepare_states)
    a = table.state_of("a")
    cache.admit("b", 4, cached_state=snapshot)
    b = table.state_of("b")
    cache.prepare_states()
    assert [pool.copied[1:] for pool in pools] == [[([a], [snapshot]), ([snapshot], [b])], [([a, a], [snapshot, b])]]
    assert [value(pool, b) for pool in pools] == [7, 7]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("model", ["mha", "sliding", "all sliding"])
@pytest.mark.parametrize("fail", [fails, late])
def test_what_a_failed_release_kept_stays_kept(make_cache, monkeypatch, model, fail, debug):
    cache = make_cache(model, debug=debug)
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    before = allocator.available_size()
    slots = cache.admit("a", 64)
    fail(monkeypatch, table, "free", cache.release, "a", kept=32)
    cache.release("a")
    cache.check(held=slots[:32])
    assert allocator.available_size() == before - 32


@pytest.mark.parametrize("model", ["mha", "sliding", "all sliding"])
def test_what_a_release_kept_stays_kept_when_its_tokens_could_not_go_back(make_cache, monkeypatch, model):
    cache = make_cache(model)
    slots = cache.admit("a", 64)
    fails(monkeypatch, cache.token_to_kv_pool_allocator, "free_rows", cache.release, "a", kept=32)
    cache.release("a")
    cache.check(held=slots[:32])


def test_a_refused_release_remembers_nothing(make_cache):
    """What is refused changed nothing, so the next call says anew what is kept."""
    cache = make_cache("mha")
    slots = cache.admit("a", 64)
    cache.admit("b", 64, prefix=slots)
    with pytest.raises(SlotError, match="request 'b' borrows"):
        cache.release("a", kept=32)
    cache.release("b")
    cache.release("a")
    cache.check(held=NOTHING)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("model", ["mha", "sliding"])
@pytest.mark.parametrize("fail", [fails, late])
def test_a_trim_that_failed_at_its_row_gives_back_once(make_cache, monkeypatch, model, fail, debug):
    cache = make_cache(model, debug=debug)
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    before = allocator.available_size()
    cache.admit("a", 64)
    cache.admit("c", 30)
    fail(monkeypatch, table, "truncate", cache.trim, ["c", "a"], [29, 10])
    assert table.lengths[1:3].tolist() == [64, 30]
    other = cache.admit("b", 48)
    assert cache.trim(["c", "a"], [29, 10]) == 52
    cache.release("a")
    cache.release("c")
    cache.check(held=other)
    assert allocator.available_size() == before - 48


@pytest.mark.parametrize("model", ["sliding", "all sliding"])
def test_debug_refuses_to_call_live_slots_evicted(make_cache, model):
    """A release would leave them behind."""
    cache = make_cache(model)
    cache.admit("a", 64)
    cache.evict(["a"], [10])
    for evicted in (12, 32, 64):
        with pytest.raises(SlotError, match=r"request 'a' says that the slots .* were given back before, but they are"):
            cache.hold_prefix("a", evicted=evicted)
    cache.hold_prefix("a", evicted=11)  # no page ends there
    cache.release("a")
    cache.check(held=NOTHING)


@pytest.mark.parametrize("model", ["sliding", "all sliding"])
def test_what_was_evicted_before_may_be_said(make_cache, model):
    """The slots that a prefix had may be live again, those of another or of the very request that takes it over."""
    cache = make_cache(model, max_running_requests=1, max_total_tokens=224)
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    first = cache.admit("a", 64)
    cache.evict(["a"], [32])
    cache.release("a", kept=64)
    (row,) = table.alloc(["d"])
    table.write([row], [0], [64], first)
    room = allocator.available_size()
    lens = torch.tensor([64]), [64], torch.tensor([64 + room]), [64 + room]
    table.write([row], [64], [64 + room], allocator.alloc_extend(*lens, first[-1:], room, owners=["d"]))
    assert (first[0] in table.req_to_token[row, 64:]) == (model == "all sliding")
    cache.hold_prefix("d", evicted=32)
    cache.release("d")
    cache.check(held=NOTHING)


def test_a_full_cache_may_be_told_what_it_never_evicts(make_cache):
    cache = make_cache("mha")
    cache.admit("a", 64)
    cache.hold_prefix("a", evicted=64)
    cache.release("a")
    cache.check(held=NOTHING)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.alloc(name for name in "bc"), "requests is a generator, which can be read once alone"),
        (lambda pool: pool.states_of("a"), "requests is the text 'a'"),
        (lambda pool: pool.tracks_of("a"), "requests is the text 'a'"),
        (lambda pool: pool.swap_tracks("a"), "requests is the text 'a'"),
        (lambda pool: pool.swap_tracks(["a", "a"]), "request 'a' is named twice in one call"),
        (lambda pool: pool.take_second_track("a"), "requests is the text 'a'"),
        (lambda pool: pool.expect_states("a"), "requests is the text 'a'"),
        (lambda pool: pool.states_arrived(iter(["a"])), "requests is a list_iterator"),
        (lambda pool: pool.states.resize(4.0), r"holds \[4.0\], which are no whole numbers"),
    ],
)
def test_requests_come_in_a_list_and_where_it_matters_once(make_table, call, message):
    pool = make_table("lazy")
    before = books(pool), pool.tracks_of(["a"]).tolist()
    with pytest.raises(SlotError, match=message):
        call(pool)
    assert (books(pool), pool.tracks_of(["a"]).tolist()) == before


@pytest.mark.parametrize("call", ["evict", "trim", "truncate"])
def test_requests_of_a_cache_come_in_a_list(make_cache, call):
    cache = make_cache("sliding")
    cache.admit("a", 64)
    with pytest.raises(SlotError, match="requests is a generator, which can be read once alone"):
        getattr(cache, call)((name for name in ["a"]), [32])
    assert cache.req_to_token_pool.lengths[1] == 64


@pytest.mark.parametrize("debug", [False, True])
def test_slots_are_written_in_one_dimension_and_fit_the_table(make_cache, debug):
    cache = make_cache("mha", debug=debug)
    table = cache.req_to_token_pool
    cache.admit("a", 4)
    before = table.req_to_token.tolist()
    wrong = [(torch.ones(2, 3, dtype=torch.int64), r"slots has the shape \[2, 3\]")]
    wrong += [(torch.tensor(3), r"slots has the shape \[\]")]
    if debug:
        wrong += [(torch.tensor([5, 2**31]), r"slots \[2147483648\] \(1 in all\) are none")]
        wrong += [(torch.tensor([5, -1]), r"slots \[-1\] \(1 in all\) are none")]
    for slots, message in wrong:
        with pytest.raises(SlotError, match=message):
            table.write([1], [4], [6], slots)
        assert (table.req_to_token.tolist(), int(table.lengths[1])) == (before, 4)
