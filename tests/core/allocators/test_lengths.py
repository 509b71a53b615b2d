"""From slots to pages on the host: each page once, and which of them are there as a whole."""

import random

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.allocators import lengths  # noqa: E402


def slots(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("given", "page_size", "pages"),
    [
        ((4, 5, 6, 7, 8), 4, [1, 2]),
        ((8, 4, 9, 5), 4, [1, 2]),
        ((31, 30, 3, 4), 3, [1, 10]),
        ((5, 3, 3, 9), 1, [3, 5, 9]),
        ((7,), 4, [1]),
        ((), 4, []),
    ],
)
def test_each_page_is_named_once(given, page_size, pages, dtype):
    assert lengths.distinct_pages(slots(*given, dtype=dtype), page_size).tolist() == pages


def test_whole_pages_are_told_from_pages_in_part():
    """Page 4: pages 2 and 1 are whole; 5 ends early, 3 comes in two pieces around a token of 7."""
    whole, partial = lengths.whole_and_partial(slots(8, 9, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 28, 14, 15).numpy(), 4)
    assert whole.tolist() == [2, 1]
    assert partial.tolist() == [5, 3, 7, 3]


def test_whole_pages_alone_leave_nothing_in_part():
    whole, partial = lengths.whole_and_partial(slots(15, 14, 13, 12, 4, 6, 5, 7).numpy(), 4)
    assert (whole.tolist(), partial) == ([3, 1], None)
    assert lengths.whole_and_partial(slots(9, 3).numpy(), 1)[0].tolist() == [9, 3]


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_slots_loses_a_page(page_size, seed):
    chance = random.Random(100 * page_size + seed)
    given = chance.sample(range(page_size, 40 * page_size), 15 * page_size)
    if seed % 2:
        given.sort()
    pages = sorted({slot // page_size for slot in given})
    assert lengths.distinct_pages(slots(*given), page_size).tolist() == pages
    whole, partial = lengths.whole_and_partial(slots(*given).numpy(), page_size)
    found = whole.tolist() + ([] if partial is None else sorted({*partial.tolist()}))
    assert sorted(found) == pages
    assert all(set(range(p * page_size, (p + 1) * page_size)) <= set(given) for p in whole.tolist())


def test_pages_in_order_are_no_view_of_the_slots():
    given = slots(4, 5, 6)
    found = lengths.distinct_pages(given, 1)
    given.zero_()
    assert found.tolist() == [4, 5, 6]


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_step_takes_a_page_at_each_bound(page_size):
    """Lengths 1 … 9, the new token counted: a page at 1, 1 + page_size, …"""
    step = lengths.decode_growth(list(range(1, 10)), page_size)
    at_bound = [int((n - 1) % page_size == 0) for n in range(1, 10)]
    assert step.new_pages.tolist() == at_bound
    assert step.page_count == sum(at_bound)
    assert step.page_heads().tolist() == [i for i, starts in enumerate(at_bound) if starts]
    assert step.prefix.tolist() == list(range(9))
