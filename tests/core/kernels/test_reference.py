"""The torch kernels: strided views, 64-bit locations, reads before writes."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402

KERNELS = ReferenceKernels()


def layer_major(pages, page_size, *shape):
    return torch.zeros(pages, page_size, *shape)


def page_major(pages, page_size, *shape):
    """Two layers side by side in each page; the view of the second one."""
    return torch.zeros(pages, 2, page_size, *shape)[:, 1]


def token_major(pages, page_size, *shape):
    """Two layers side by side in each slot; the view of the second one."""
    return torch.zeros(pages, page_size, 2, *shape)[:, :, 1]


VIEWS = pytest.mark.parametrize("view_of", [layer_major, page_major, token_major])
PAGES = pytest.mark.parametrize("page_size", [1, 3, 4])
LOCS = pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64])


def at(view, slot):
    return view[slot // view.shape[1], slot % view.shape[1]].tolist()


@VIEWS
@PAGES
@LOCS
def test_a_store_reaches_the_slot_in_any_view(view_of, page_size, loc_dtype):
    view = view_of(12, page_size, 2, 3)
    values = torch.arange(1.0, 19.0).view(3, 2, 3)
    KERNELS.store(view, torch.tensor([5, 11, 0], dtype=loc_dtype), values)
    assert [at(view, slot) for slot in (5, 11, 0)] == values.tolist()
    assert float(view.sum()) == 171.0


@VIEWS
@PAGES
@LOCS
def test_a_gather_reads_the_slots_into_a_copy(view_of, page_size, loc_dtype):
    view = view_of(12, page_size, 2)
    view.copy_(torch.arange(view.numel(), dtype=torch.float32).view(view.shape))
    got = KERNELS.gather(view, torch.tensor([7, 2, 7], dtype=loc_dtype))
    assert got.tolist() == [[14.0, 15.0], [4.0, 5.0], [14.0, 15.0]]
    got.zero_()
    assert at(view, 7) == [14.0, 15.0]


@VIEWS
@PAGES
def test_a_move_reads_before_it_writes(view_of, page_size):
    views = [view_of(12, page_size, 1), view_of(12, page_size, 2)]
    for view in views:
        KERNELS.store(view, torch.arange(1, 5), torch.arange(1.0, 5.0).view(-1, 1).expand(4, view.shape[2]))
    KERNELS.move(views, torch.tensor([2, 3, 4, 1]), torch.tensor([1, 2, 3, 4]))
    for view in views:
        assert [at(view, slot)[-1] for slot in range(6)] == [0.0, 4.0, 1.0, 2.0, 3.0, 0.0]


@VIEWS
@PAGES
def test_keys_and_values_go_to_the_same_slots(view_of, page_size):
    keys, values = view_of(8, page_size, 1, 2), view_of(8, page_size, 1, 3)
    KERNELS.store_kv(keys, values, torch.tensor([4]), torch.full((1, 1, 2), 5.0), torch.full((1, 1, 3), 6.0))
    assert (at(keys, 4), at(values, 4)) == ([[5.0, 5.0]], [[6.0, 6.0, 6.0]])


@VIEWS
@PAGES
@pytest.mark.parametrize("heads", [(), (1,)])
def test_latents_come_first_and_rope_last(view_of, page_size, heads):
    view = view_of(8, page_size, *heads, 6)
    loc = torch.tensor([3, 7])
    KERNELS.store_mla(view, loc, torch.tensor([[1.0, 2.0, 3.0]] * 2), torch.tensor([[[8.0, 9.0]]] * 2))
    want = [1.0, 2.0, 3.0, 0.0, 8.0, 9.0]
    for slot in (3, 7):
        assert at(view, slot) == ([want] if heads else want)


@pytest.mark.parametrize("width", [4, 6])
def test_rows_are_written_one_word_a_token(width):
    table = torch.zeros(3, width, dtype=torch.int32)[:, :4]
    KERNELS.write_rows(table, torch.tensor([2, 1]), torch.tensor([0, 3], dtype=torch.int32), torch.tensor([70, 80]))
    assert table.tolist() == [[0, 0, 0, 0], [0, 0, 0, 80], [70, 0, 0, 0]]


@LOCS
def test_a_translation_keeps_minus_one(loc_dtype):
    mapping = torch.tensor([0, 30, 10, 20])
    assert KERNELS.translate(mapping, torch.tensor([[1, -1], [2, 3]], dtype=loc_dtype)).tolist() == [[30, -1], [10, 20]]
    got = KERNELS.translate(mapping, torch.tensor([3, -1, 0, 1], dtype=loc_dtype))
    assert (got.tolist(), got.dtype) == ([20, -1, 0, 30], torch.int64)


def test_pages_beyond_32_bits_of_slots_keep_their_numbers():
    """S-23: page 40,000,000 of 64 slots starts at slot 2,560,000,000; int32 inputs, 64-bit arithmetic."""
    page, first = 40_000_000, 2_560_000_000
    as_int32 = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    got = KERNELS.alloc_extend(as_int32(0), as_int32(3), as_int32(-1), as_int32(page), 64, 3)
    assert got.tolist() == [first, first + 1, first + 2]
    assert KERNELS.alloc_decode(as_int32(1), as_int32(-1), as_int32(page), 64).tolist() == [first]


def test_an_extend_joins_last_pages_and_new_ones():
    """A-09: page 4; a request that stays in its page, one of nothing, one over a bound, one that starts."""
    got = KERNELS.alloc_extend(
        torch.tensor([1, 4, 3, 0]),
        torch.tensor([3, 4, 9, 5]),
        torch.tensor([8, 15, 22, -1]),
        torch.tensor([7, 3, 9, 2]),
        4,
        13,
    )
    assert got.tolist() == [9, 10, 23, 28, 29, 30, 31, 12, 36, 37, 38, 39, 8]


def test_a_decode_hands_pages_to_requests_at_a_bound_in_order():
    got = KERNELS.alloc_decode(torch.tensor([4, 5, 1, 7]), torch.tensor([10, 19, -1, 33]), torch.tensor([6, 2]), 4)
    assert got.tolist() == [11, 24, 8, 34]


def test_nothing_waits_for_the_device():
    meta = lambda *values: torch.tensor(values).to("meta")  # noqa: E731
    view = torch.zeros(4, 4, 2, device="meta")
    KERNELS.move([view, view.transpose(0, 1)], meta(1, 2), meta(2, 3))
    KERNELS.store_mla(view, meta(1), torch.zeros(1, 1, device="meta"), torch.zeros(1, 1, device="meta"))
    KERNELS.write_rows(torch.zeros(2, 2, device="meta"), meta(1), meta(0), meta(5))
    assert KERNELS.translate(meta(0, 1), meta(-1)).shape == (1,)
    assert KERNELS.alloc_extend(meta(0, 3), meta(2, 9), meta(-1, 5), meta(1, 2, 3), 4, 8).shape == (8,)
    assert KERNELS.alloc_decode(meta(2, 5), meta(4, 9), meta(3), 4).shape == (2,)
