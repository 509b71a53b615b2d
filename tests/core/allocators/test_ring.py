"""The free ring and its journal."""

import pytest
from kvdock.errors import BuildError, SlotError

torch = pytest.importorskip("torch")

from kvdock.allocators.ring import PageRing  # noqa: E402


def ring(capacity):
    return PageRing("ring", torch.zeros(capacity, dtype=torch.int64), capacity)


def test_pages_come_in_ascending_order_from_one():
    assert ring(4).take(3).tolist() == [1, 2, 3]


def test_a_take_that_wraps_joins_both_ends():
    r = ring(4)
    first = r.take(3)
    r.give(first)
    assert r.take(4).tolist() == [4, 1, 2, 3]


def test_a_give_that_wraps_lands_on_both_ends():
    r = ring(5)
    r.take(2)
    r.give(torch.tensor([2]))
    held = r.take(4)
    assert held.tolist() == [3, 4, 5, 2]
    r.give(held)
    assert r.peek(r.free).tolist() == [3, 4, 5, 2]
    assert r.live == 1


def test_a_take_beyond_the_free_pages_changes_nothing():
    r = ring(4)
    r.take(3)
    assert r.take(2) is None
    assert (r.free, r.live) == (1, 3)
    assert r.take(1).tolist() == [4]


def test_giving_more_than_is_live_is_refused():
    r = ring(4)
    r.take(1)
    with pytest.raises(SlotError, match="2 pages are freed but only 1 are handed out"):
        r.give(torch.tensor([1, 1]))
    assert r.free == 3


def test_a_ring_cannot_outgrow_its_tensor():
    with pytest.raises(BuildError, match="5 pages do not fit a ring of 4"):
        PageRing("ring", torch.zeros(4, dtype=torch.int64), 5)


def test_rewinding_hands_out_the_same_pages_again():
    r = ring(6)
    r.take(1)
    mark = r.journal.mark()
    assert r.take(3).tolist() == [2, 3, 4]
    assert r.rewind(mark) == 3
    assert r.peek(3).tolist() == [2, 3, 4]
    assert r.take(2).tolist() == [2, 3]


def test_a_mark_serves_again_and_again():
    r = ring(6)
    mark = r.journal.mark()
    for _ in range(3):
        assert r.take(6).tolist() == [1, 2, 3, 4, 5, 6]
        r.rewind(mark)
    assert r.free == 6


def test_nested_marks_rewind_from_the_inner_to_the_outer():
    r = ring(6)
    outer = r.journal.mark()
    r.take(2)
    inner = r.journal.mark()
    r.take(2)
    r.rewind(inner)
    assert r.live == 2
    r.take(1)
    r.rewind(inner)
    r.rewind(outer)
    assert r.live == 0


def test_an_older_rewind_retires_newer_marks():
    r = ring(8)
    outer = r.journal.mark()
    r.take(2)
    inner = r.journal.mark()
    r.rewind(outer)
    r.take(4)
    with pytest.raises(SlotError, match="an older state was restored"):
        r.rewind(inner)
    assert r.live == 4
    later = r.journal.mark()
    r.take(1)
    r.rewind(later)
    with pytest.raises(SlotError, match="an older state was restored"):
        r.rewind(inner)


def test_a_free_retires_every_mark():
    r = ring(8)
    mark = r.journal.mark()
    r.give(r.take(2))
    with pytest.raises(SlotError, match="slots were freed after this state was made"):
        r.rewind(mark)


@pytest.mark.parametrize("state", [None, 3, "x", ring(2).journal.mark()])
def test_a_foreign_state_is_refused(state):
    with pytest.raises(SlotError, match="not made by this allocator"):
        ring(8).rewind(state)


def test_staged_pages_wait_behind_the_free_ones_until_they_are_committed():
    r = ring(5)
    held = r.take(4)
    r.stage(held[:3])
    assert (r.free, r.staged, r.live) == (1, 3, 4)
    assert r.take(2) is None
    assert r.take(1).tolist() == [5]
    r.commit(held[3:])
    assert (r.free, r.staged) == (4, 0)
    assert r.take(4).tolist() == [1, 2, 3, 4]


def test_a_commit_of_more_than_is_live_frees_nothing():
    r = ring(4)
    held = r.take(2)
    r.stage(held[:1])
    with pytest.raises(SlotError, match="3 pages are freed but only 2"):
        r.stage(torch.tensor([2, 2]))
    assert r.staged == 1
    with pytest.raises(SlotError, match="3 pages are freed but only 2"):
        r.commit(torch.tensor([2, 2]))
    assert (r.free, r.staged) == (2, 0)
    r.commit()
    assert r.free == 2


def test_staging_retires_marks():
    r = ring(4)
    held = r.take(2)
    mark = r.journal.mark()
    r.stage(held[:0])
    r.rewind(mark)
    r.stage(held[:1])
    with pytest.raises(SlotError, match="slots were freed"):
        r.rewind(mark)


def test_a_mark_before_what_was_taken_last_gives_it_back():
    r = ring(4)
    r.take(1)
    r.take(2)
    assert r.rewind(r.journal.mark(2)) == 2
    assert r.take(3).tolist() == [2, 3, 4]
