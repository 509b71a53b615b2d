"""The request table with states: a row and its slots together, tracks in turn, what a prefix cache takes over."""

import pytest
from kvdock.errors import SlotError
from kvdock.requests import HybridReqToTokenPool

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

ON = {"state_extra_buffer": "on"}
LAZY = {"state_extra_buffer": "lazy"}
SINGLE = {"state_extra_buffer": "on", "overlap_schedule": False}
CACHE_OFF = {"prefix_cache": False}


@pytest.fixture
def make_hybrid(make_pool):
    return lambda *sizes, **options: make_pool(HybridReqToTokenPool, *sizes, **options)


def take_fresh(pool):
    """Return the slots that are to be cleared, as if they were now."""
    (due,) = pool.due_states()
    fresh = list(due.fresh)
    due.fresh.clear()
    return fresh


def take_copies(pool):
    """Return sources and targets of the copies that are due, as if they were done now."""
    (due,) = pool.due_states()
    targets, sources = list(due.copies), list(due.copies.values())
    due.copies.clear()
    return sources, targets


def maps(pool):
    tracks = None if pool.track_slots is None else pool.track_slots.tolist()
    return pool.row_to_state.tolist(), tracks


@pytest.mark.parametrize(
    ("options", "tracks"), [(CACHE_OFF, 0), ({}, 0), (ON, 2), (LAZY, 1), (SINGLE, 1), (ON | CACHE_OFF, 0)]
)
def test_maps_are_sized_by_rows_and_the_ring_by_states(make_hybrid, options, tracks):
    pool = make_hybrid(4, 20, **options)
    declared = {b.name: (b.space, b.guard, b.shape, b.dtype, b.memory) for b in pool.buffers(pool.query)}
    assert declared["row_to_state"] == ("requests", 1, (), "int32", "device")
    assert declared["free_states"] == ("state", 0, (), "int64", "host")
    assert declared.get("track_slots") == (("requests", 1, (2,), "int64", "device") if tracks else None)
    assert pool.tracks_per_request == tracks


def test_fewer_states_than_rows(make_hybrid):
    """H-01: 8 state slots, 16 rows; the maps have a word for every row, and row 15 is refused a state."""
    pool = make_hybrid(16, 8, **CACHE_OFF)
    assert pool.row_to_state.shape == (17,)
    for i in range(8):
        assert pool.alloc([i]) == [i + 1]
    before = maps(pool), pool.generation.tolist()
    for name in range(8, 16):
        assert pool.alloc([name]) is None
        assert pool.row_of(name) is None
    assert (maps(pool), pool.generation.tolist()) == before
    assert maps(pool)[0] == [0, *range(1, 9), *[0] * 8]
    pool.check(held_states=[])


def test_the_last_row_gets_its_state_when_there_is_one(make_hybrid):
    """H-01: rows move on while states are few: row 15 and 16 are reached, and written inside the map."""
    pool = make_hybrid(16, 8, **CACHE_OFF)
    for i in range(16):
        assert pool.alloc([i]) == [i + 1]
        assert pool.row_to_state[i + 1] == pool.state_of(i) == i % 8 + 1
        pool.free(i)
    assert maps(pool)[0] == [0] * 17


@pytest.mark.parametrize(("options", "each"), [(ON, 3), (LAZY, 2), (SINGLE, 2), ({}, 1)])
def test_padding_is_never_handed_out(make_hybrid, options, each):
    """A-12: not as a state nor as a track, also after clear."""
    pool = make_hybrid(3, 3 * each, **options)
    for _ in range(2):
        assert pool.alloc(["a", "b", "c"]) == [1, 2, 3]
        assert sorted(take_fresh(pool)) == list(range(1, 3 * each + 1))
        assert (pool.available_size(), pool.available_states()) == (0, 0)
        assert [pool.row_to_state[0], int(pool.row_to_state.ne(0).sum())] == [0, 3]
        pool.clear()
    assert maps(pool)[0] == [0] * 4
    assert (pool.available_size(), pool.available_states()) == (3, 3 * each)


def test_an_admission_takes_all_or_nothing(make_hybrid):
    """H-08: one slot is missing for the second request's tracks."""
    pool = make_hybrid(4, 5, **ON)
    assert pool.states_needed(["a", "b"]) == 6
    assert pool.alloc(["a", "b"]) is None
    assert (pool.row_of("a"), pool.available_states(), take_fresh(pool), maps(pool)[0]) == (None, 5, [], [0] * 5)
    assert pool.alloc(["a"]) == [1]
    assert pool.available_size() == 0
    assert pool.alloc(["a", "b"]) is None
    assert maps(pool) == ([0, 1, 0, 0, 0], [[0, 0], [2, 3], [0, 0], [0, 0], [0, 0]])
    pool.check(held_states=[])


def test_without_a_row_no_state_is_taken(make_hybrid):
    pool = make_hybrid(1, 8, **CACHE_OFF)
    pool.alloc(["a"])
    assert pool.alloc(["b"]) is None
    assert (pool.available_states(), take_fresh(pool)) == (7, [1])


def test_a_request_keeps_what_it_has(make_hybrid):
    pool = make_hybrid(4, 12, **ON)
    rows = pool.alloc(["a", "b"])
    before = maps(pool)
    assert pool.alloc(["b", "a", "b"]) == [rows[1], rows[0], rows[1]]
    assert maps(pool) == before
    assert pool.available_states() == 6


def test_states_of_a_batch_come_from_the_host(make_hybrid):
    pool = make_hybrid(4, 12, **ON)
    pool.alloc(["a", "b"])
    found = pool.states_of(["b", "a"])
    assert (found.tolist(), found.dtype) == ([4, 1], torch.int64)
    assert pool.row_to_state[[pool.row_of("b"), pool.row_of("a")]].tolist() == [4, 1]
    with pytest.raises(SlotError, match="request 'c' has no row in the request table"):
        pool.states_of(["a", "c"])


def test_tracks_are_written_in_turn(make_hybrid):
    pool = make_hybrid(4, 12, **ON)
    pool.alloc(["a", "b"])
    assert pool.tracks_of(["a", "b"]).tolist() == [2, 5]
    pool.swap_tracks(["b"])
    assert pool.tracks_of(["a", "b"]).tolist() == [2, 6]
    pool.swap_tracks(["a", "b"])
    assert pool.tracks_of(["a", "b"]).tolist() == [3, 5]
    with pytest.raises(SlotError, match="request 'c' has no row"):
        pool.swap_tracks(["a", "c"])
    assert pool.tracks_of(["a"]).tolist() == [3]


def test_one_track_is_its_own_other(make_hybrid):
    pool = make_hybrid(4, 8, **SINGLE)
    pool.alloc(["a"])
    pool.swap_tracks(["a"])
    assert pool.tracks_of(["a"]).tolist() == [2]
    assert maps(pool)[1][1] == [2, 0]


def test_a_track_passes_to_the_prefix_cache_and_is_replaced(make_hybrid):
    pool = make_hybrid(4, 8, **ON)
    pool.alloc(["a"])
    take_fresh(pool)
    pool.swap_tracks(["a"])
    assert pool.donate("a") == 2
    assert maps(pool)[1][1] == [4, 3]
    assert pool.tracks_of(["a"]).tolist() == [3]
    pool.check(held_states=[2])
    with pytest.raises(SlotError, match=r"slots \[2\] \(left by request 'a'\) are live but held by nobody"):
        pool.check(held_states=[])
    pool.free("a")
    assert pool.available_states() == 7
    pool.check(held_states=[2])
    pool.free_states([2])
    pool.check(held_states=[])


@pytest.mark.parametrize("options", [ON, SINGLE, LAZY, {}])
def test_a_donation_without_a_fresh_slot_changes_nothing(make_hybrid, options):
    each = {"on": 3, "lazy": 2}.get(options.get("state_extra_buffer"), 1) - (options == SINGLE)
    pool = make_hybrid(4, each, **options)
    pool.alloc(["a"])
    take_fresh(pool)
    before = maps(pool)
    assert pool.donate("a") is None
    assert (maps(pool), take_copies(pool)) == (before, ([], []))
    pool.check(held_states=[])
    given = pool.donate("a", replace=False)
    assert given == each
    pool.free("a")
    pool.check(held_states=[given])


def test_a_lazy_second_track_goes_back_with_the_donation(make_hybrid):
    pool = make_hybrid(2, 4, **LAZY)
    pool.alloc(["a", "b"])
    take_fresh(pool)
    assert maps(pool)[1][1:] == [[2, 0], [4, 0]]
    assert pool.take_second_track(["a", "b"]) is None
    assert maps(pool)[1][1:] == [[2, 0], [4, 0]]
    pool.free("b")
    assert pool.take_second_track(["a"]) == [3]
    assert pool.take_second_track(["a"]) == [3]
    assert take_fresh(pool) == [3]
    pool.swap_tracks(["a"])
    assert pool.donate("a") == 2
    assert maps(pool)[1][1] == [3, 0]
    assert pool.tracks_of(["a"]).tolist() == [3]
    pool.check(held_states=[2])


def test_without_tracks_a_snapshot_is_donated(make_hybrid):
    pool = make_hybrid(4, 4)
    pool.alloc(["a"])
    take_fresh(pool)
    assert pool.donate("a") == 2
    assert (take_copies(pool), take_fresh(pool)) == (([1], [2]), [])
    assert pool.state_of("a") == 1
    assert pool.donate("a", replace=False) == 1
    assert maps(pool)[0] == [0] * 5
    with pytest.raises(SlotError, match="request 'a' left its state to a prefix cache"):
        pool.state_of("a")
    pool.check(held_states=[1, 2])
    assert pool.alloc(["a"]) == [1]
    assert (pool.state_of("a"), take_fresh(pool)) == (3, [3])
    pool.free("a")
    pool.free_states(torch.tensor([1, 2]))
    pool.check(held_states=[])


def test_what_was_never_written_is_not_donated(make_hybrid):
    for options in (ON, {}):
        pool = make_hybrid(4, 8, **options)
        pool.alloc(["a"])
        with pytest.raises(SlotError, match=r"nothing was written to state slot \d yet"):
            pool.donate("a")
        pool.check(held_states=[])


def test_a_track_that_does_not_exist_is_refused(make_hybrid):
    pool = make_hybrid(4, 8)
    pool.alloc(["a"])
    for call in (pool.swap_tracks, pool.take_second_track, pool.tracks_of):
        with pytest.raises(SlotError, match=r"request 'a' has no track slot \(state_extra_buffer is off\)"):
            call(["a"])


@pytest.mark.parametrize(
    ("freed", "message"),
    [
        ([4], "state slot 4 belongs to request 'b'; release that instead"),
        ([2, 1], "state slot 1 belongs to request 'a'"),
        ([2, 8], r"slots \[8\] are not handed out but freed"),
        ([2, 2], r"slots \[2\] .* appear twice"),
        ([2.5], "no whole numbers"),
    ],
)
def test_only_what_was_donated_is_freed_by_slot(make_hybrid, freed, message):
    pool = make_hybrid(4, 8, **SINGLE)
    pool.alloc(["a", "b"])
    take_fresh(pool)
    assert pool.donate("a") == 2
    with pytest.raises(SlotError, match=message):
        pool.free_states(freed)
    pool.check(held_states=[2])


def test_fresh_slots_are_named_once_and_not_after_they_went_back(make_hybrid):
    """H-09: cleared on first use, not on free."""
    pool = make_hybrid(9, 8, **CACHE_OFF)
    pool.alloc(["a", "b", "c"])
    pool.free("b")
    assert take_fresh(pool) == [1, 3]
    assert take_fresh(pool) == []
    pool.free("a")
    pool.alloc([*"defghi"])
    assert take_fresh(pool) == [4, 5, 6, 7, 8, 2]
    pool.alloc(["h", "j"])
    assert take_fresh(pool) == [1]
    pool.clear()
    pool.alloc(["a"])
    assert take_fresh(pool) == [1]


def test_a_fork_is_copied_instead_of_cleared(make_hybrid):
    pool = make_hybrid(4, 8, **SINGLE)
    pool.alloc(["a"])
    take_fresh(pool)
    cached = pool.donate("a")
    pool.alloc(["b"])
    assert pool.fork_state("b", cached) == (2, 4)
    assert take_copies(pool) == ([2], [4])
    assert sorted(take_fresh(pool)) == [3, 5]
    assert pool.states.owner_of(cached).request == "a"
    pool.check(held_states=[cached])


def test_copies_read_before_they_write(make_hybrid):
    """A cached slot that is still to be filled is read from where it is filled from, and may go at once."""
    pool = make_hybrid(4, 8)
    pool.alloc(["a"])
    take_fresh(pool)
    cached = pool.donate("a")
    pool.alloc(["b", "c"])
    assert pool.fork_state("b", cached) == (1, 3)
    pool.free_states([cached])
    assert pool.fork_state("c", 3) == (1, 4)
    pool.free("b")
    assert take_copies(pool) == ([1], [4])


@pytest.mark.parametrize(
    ("request_", "cached", "message"),
    [
        ("b", 7, "request 'b' cannot begin with state slot 7, which nobody holds"),
        ("b", 0, "state slot 0, which nobody holds"),
        ("b", 5, "state slot 5, which is its own"),
        ("b", 3, "nothing was written to state slot 3 yet"),
        ("z", 2, "request 'z' has no row"),
    ],
)
def test_a_fork_that_cannot_be_changes_nothing(make_hybrid, request_, cached, message):
    pool = make_hybrid(4, 8, **SINGLE)
    pool.alloc(["a"])
    take_fresh(pool)
    pool.donate("a")
    pool.alloc(["b"])
    with pytest.raises(SlotError, match=message):
        pool.fork_state(request_, cached)
    assert take_copies(pool) == ([], [])
    assert sorted(take_fresh(pool)) == [3, 4, 5]


def test_what_arrives_from_elsewhere_is_not_cleared(make_hybrid):
    pool = make_hybrid(4, 8, **SINGLE)
    pool.alloc(["a", "b"])
    pool.expect_states(["a"])
    assert take_fresh(pool) == [2, 3, 4]


def test_no_call_waits_for_the_device(make_hybrid):
    pool = make_hybrid(8, 40, device="meta", **ON)
    pool.alloc(["a", "b", "c"])
    take_fresh(pool)
    pool.swap_tracks(["a"])
    cached = pool.donate("a")
    pool.alloc(["d"])
    pool.fork_state("d", cached)
    pool.take_second_track(["a"])
    assert pool.states_of(["a", "d"]).device.type == pool.tracks_of(["a"]).device.type == "meta"
    pool.free("b")
    pool.free_states([cached])
    pool.clear()
    pool.check(held_states=[])


def test_a_damaged_book_is_found(make_hybrid):
    pool = make_hybrid(4, 8, **SINGLE)
    pool.alloc(["a", "b"])
    pool.states.free([3])
    with pytest.raises(SlotError, match=r"request 'b' lost its row or its state slots \[3\]"):
        pool.check()
