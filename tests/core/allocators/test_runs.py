"""Free runs: which pages a request gets, against a plain set."""

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kvdock.allocators.runs import FANOUT, LEVEL_GUARD_BYTES, FreeRuns, level_words  # noqa: E402
from kvdock.errors import SlotError  # noqa: E402
from kvdock.layout import round_up  # noqa: E402


def runs_of(capacity, room=None):
    room = capacity if room is None else room
    free = FreeRuns(
        "runs",
        np.zeros(round_up(room + 2, FANOUT), dtype=np.int32),
        level_words(np.zeros(round_up(room + LEVEL_GUARD_BYTES, FANOUT), dtype=np.uint8)),
    )
    free.reset(capacity)
    return free


def keep(capacity, *stretches):
    """Return runs of which only the pages `first … last` of each stretch are free."""
    free = runs_of(capacity)
    free.take(capacity)
    for first, last in stretches:
        free.give(np.arange(first, last + 1))
    return free


def lengths_of(pages):
    """Return the lengths of the runs that `pages`, ascending, are made of."""
    found = []
    for before, page in zip([None, *pages], pages):  # noqa: B905
        if before is not None and page == before + 1:
            found[-1] += 1
        else:
            found.append(1)
    return found


def test_pages_come_in_ascending_order_from_one():
    free = runs_of(40)
    assert free.take(3).tolist() == [1, 2, 3]
    assert free.take(2).tolist() == [4, 5]
    assert free.free == 35


def test_the_lowest_run_that_is_long_enough_serves_a_request():
    free = keep(60, (2, 3), (10, 14), (20, 29), (40, 44))
    assert free.take(4).tolist() == [10, 11, 12, 13]
    assert free.take(5).tolist() == [20, 21, 22, 23, 24]
    assert free.take(2).tolist() == [2, 3]
    assert free.take(1).tolist() == [14]


def test_without_a_long_run_the_longest_serve_and_the_last_is_cut():
    free = keep(80, (2, 2), (5, 7), (10, 14), (20, 21), (30, 37), (50, 54))
    # One run of 8; of the runs of 4 to 7 pages the lowest first: 10 … 14, then two of 50 … 54.
    assert free.take(15).tolist() == [*range(10, 15), *range(30, 38), 50, 51]
    assert free.peek(free.free).tolist() == [2, 5, 6, 7, 20, 21, 52, 53, 54]


def test_a_page_joins_the_runs_on_both_sides():
    free = keep(30, (4, 5), (7, 9))
    free.give(np.array([6]))
    assert free.take(6).tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("order", [1, -1])
def test_many_stretches_join_every_other_page(order):
    free = keep(64, *((page, page) for page in range(2, 65, 2)))
    free.give(np.arange(1, 64, 2)[::order])
    assert free.take(64).tolist() == list(range(1, 65))


def test_a_peek_changes_nothing():
    free = keep(30, (2, 3), (7, 9))
    assert free.peek(4).tolist() == free.peek(4).tolist() == [2, 3, 7, 8]
    assert free.take(4).tolist() == [2, 3, 7, 8]


def test_nothing_is_taken_and_given_without_a_trace():
    free = runs_of(8)
    assert free.take(0).tolist() == []
    free.give(np.zeros(0, dtype=np.int64))
    assert free.take(8).tolist() == list(range(1, 9))


def test_fewer_pages_than_there_is_room_for():
    free = runs_of(300, room=5000)
    assert free.take(300).tolist() == list(range(1, 301))
    free.give(np.array([300]))
    free.reset(5000)
    assert free.take(5000).tolist() == list(range(1, 5001))


@pytest.mark.parametrize("pages", [[0], [9], [-1], [2, 40]])
def test_pages_that_do_not_exist_are_refused(pages):
    free = runs_of(8)
    free.take(4)
    with pytest.raises(SlotError, match=r"there are only 1 … 8"):
        free.give(np.array(pages))
    assert free.peek(4).tolist() == [5, 6, 7, 8]


def test_a_page_named_twice_in_one_call_is_refused():
    free = runs_of(8)
    free.take(4)
    with pytest.raises(SlotError, match=r"pages \[2\] appear twice"):
        free.give(np.array([2, 3, 2]))
    assert (free.free, free.peek(4).tolist()) == (4, [5, 6, 7, 8])


def test_runs_that_do_not_hold_what_was_counted_say_so():
    free = runs_of(8)
    free.take(8)
    free.give(np.array([3]))
    free.give(np.array([3]))  # twice: counted as two pages, of which one exists
    with pytest.raises(SlotError, match=r"do not hold 2 pages although 2 are counted as free"):
        free.take(2)
    assert free.take(1).tolist() == [3]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_runs_hold_what_a_set_holds(data):
    capacity = data.draw(st.sampled_from([1, 13, 22, 23, 30, 95, 190, 300, 800]))
    free, model, live = runs_of(capacity), set(range(1, capacity + 1)), []
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            count = data.draw(st.integers(0, len(model)))
            got = free.take(count).tolist()
            assert_is_good(got, sorted(model), count)
            model.difference_update(got)
            live.extend(got)
        else:
            data.draw(st.randoms(use_true_random=False)).shuffle(live)
            cut = data.draw(st.integers(0, len(live)))
            free.give(np.array(live[:cut], dtype=np.int64))
            model.update(live[:cut])
            live = live[cut:]
        assert free.free == len(model)
        assert free.peek(len(model)).tolist() == sorted(model)


def assert_is_good(got, ordered, count):
    """`got` are `count` of the free pages `ordered`: ascending, one run if one holds them, else few."""
    assert got == sorted(got)
    assert len(got) == len(set(got)) == count
    assert set(got) <= set(ordered)
    lengths = lengths_of(ordered)
    if not count:
        return
    if max(lengths) >= count:
        lowest = next(page for i, page in enumerate(ordered) if ordered[i : i + count][-1] == page + count - 1)
        assert got == list(range(lowest, lowest + count))
        return
    assert len(lengths_of(got)) <= len(lengths_of(ordered[:count]))
    fewest, held = 0, 0
    for length in sorted(lengths, reverse=True):
        fewest += held < count
        held += length
    assert len(lengths_of(got)) <= 2 * fewest


def test_runs_longer_than_a_node_can_say_are_told_apart():
    # Nodes say 65,535 of all of them.
    free = keep(2**20, (5, 70_004), (100_001, 165_536), (200_001, 300_000), (400_001, 400_010))
    assert free.take(70_001).tolist() == list(range(200_001, 270_002))
    assert free.take(65_536).tolist() == list(range(5, 65_541))
    assert free.take(65_536).tolist() == list(range(100_001, 165_537))
    assert free.take(30_001).tolist() == [*range(65_541, 65_543), *range(270_002, 300_001)]
    assert free.take(9).tolist() == list(range(65_543, 65_552))


def test_the_longest_runs_are_found_where_several_are_needed():
    free = keep(2**20, (5, 70_004), (100_001, 165_536), (200_001, 300_000), (400_001, 400_010))
    # All have 17 bits but the last: the lowest three, of which the third is cut.
    assert lengths_of(free.take(200_000).tolist()) == [70_000, 65_536, 64_464]
    assert lengths_of(free.peek(free.free).tolist()) == [35_536, 10]


def test_every_other_page_of_a_deep_pool_is_handed_out_in_order():
    free = runs_of(5000)
    free.take(5000)
    free.give(np.arange(1, 5001, 2))
    assert free.take(1000).tolist() == list(range(1, 2001, 2))
    free.give(np.arange(2, 2001, 2))
    # 2, 4, … 1,998 and 2,003, 2,005, … stand alone; 2,000 and 2,001 are the one run of two.
    assert free.take(5).tolist() == [2, 4, 6, 2000, 2001]
    assert free.free == 1000 + 1500 - 5
