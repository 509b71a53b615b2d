"""Free runs: which pages a request gets, against a plain set, and how many words a call touches."""

import math

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
        np.zeros(room + 1, dtype=np.int32),
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
    capacity = data.draw(st.sampled_from([1, 13, 14, 15, 30, 64, 300]))
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


POOL = 2**20
CHURN, WORST = 16, 50
"""Words of 64 bits that a call may touch for each page and each doubling of the pool: in a churn of requests,
and where every page lies in tree nodes of its own, which on 5 levels are searched (8 words) and set (9)."""


def within(free, count, factor):
    return free.touched <= factor * (count + math.log2(POOL))


def test_a_long_churn_never_touches_more_than_the_pages_of_the_call():
    rng = np.random.default_rng(7)
    free, held = runs_of(POOL), []
    for _ in range(4000):
        count = int(2 ** rng.uniform(0, 13))
        if count <= free.free and rng.random() < 0.6:
            held.append(free.take(count))
            assert within(free, count, CHURN)
            assert len(held[-1]) == count
        elif held:
            pages = rng.permutation(held.pop(int(rng.integers(len(held)))))
            keep_back = len(pages) // 3 if rng.random() < 0.3 else 0
            free.give(pages[keep_back:])
            assert within(free, len(pages) - keep_back, CHURN)
            if keep_back:
                held.append(pages[:keep_back])
    assert free.free + sum(map(len, held)) == POOL


@pytest.mark.parametrize("stride", [2, 16, 17, 256, 4096])
@pytest.mark.parametrize("count", [1, 16, 256, 4096])
def test_scattered_pages_touch_no_more_than_their_number_asks_for(stride, count):
    free = runs_of(POOL)
    free.take(POOL)
    pages = np.arange(1, 1 + stride * count, stride)
    pages = pages[pages <= POOL]
    free.give(pages)
    assert within(free, len(pages), WORST)
    for part in (1, len(pages) // 2, len(pages) - 1 - len(pages) // 2):
        got = free.take(part)
        assert within(free, part, WORST)
        assert lengths_of(got.tolist()) == [1] * part
