"""Nothing on the hot paths reads a value back: they run on tensors that have none."""

import pytest

torch = pytest.importorskip("torch")

from kvdock.allocators import SortedAllocator  # noqa: E402

BATCH, COLUMNS = 3, 64


def meta(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype).to("meta")


def drive(allocator, page_size):
    """Call every hot path; return the table that rows are freed from."""
    table = torch.zeros(BATCH + 1, COLUMNS, dtype=torch.int32, device="meta")
    assert allocator.alloc(2 * page_size).device.type == "meta"
    prefix, seq = [0, 0, 5], [9, 0, 5]
    got = allocator.alloc_extend(
        meta(*prefix, dtype=torch.int32), prefix, meta(*seq, dtype=torch.int32), seq, meta(-1, -1, 7), 9
    )
    assert (got.shape, got.dtype, got.device.type) == ((9,), torch.int64, "meta")
    decoded = allocator.alloc_decode(meta(10, 1, 6), [10, 1, 6], meta(3, -1, 4))
    assert (decoded.shape, decoded.dtype) == ((3,), torch.int64)
    return table


@pytest.mark.parametrize("cls", [None, SortedAllocator])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_single_allocators_never_wait(make, page_size, cls):
    allocator = make.single(64 * page_size, page_size, device="meta", cls=cls)
    state = allocator.backup_state()
    table = drive(allocator, page_size)
    allocator.restore_state(state)
    allocator.alloc(20 * page_size)
    allocator.free_pages(meta(1, 2))
    allocator.free_rows(table, [1], [0], [page_size])
    allocator.free_rows(table, [1, 3], [0, 0], [page_size, page_size])
    allocator.free_group_begin()
    allocator.free_pages(meta(7))
    allocator.free_rows(table, [2, 3], [0, 0], [page_size, page_size])
    allocator.free_group_end()
    assert allocator.available_size() == (64 - 20 + 2 + 1 + 2 + 1 + 2) * page_size


def test_token_frees_never_wait(make):
    allocator = make.single(64, device="meta")
    allocator.free(allocator.alloc(8))
    assert allocator.available_size() == 64


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_sliding_composite_never_waits(make, page_size):
    allocator = make.swa(64 * page_size, 64 * page_size, page_size, device="meta")
    table = drive(allocator, page_size)
    allocator.clear()
    allocator.alloc(20 * page_size)
    allocator.free_swa_rows(table, [1], [0], [2 * page_size])
    allocator.free_swa_rows(table, [2, 3], [0, page_size], [page_size, 2 * page_size])
    allocator.free_swa_pages(meta(9))
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (44 * page_size, 49 * page_size)
    allocator.free_rows(table, [1], [0], [3 * page_size], swa_starts=[2 * page_size])
    allocator.free_rows(table, [2, 3], [0, 0], [page_size, 3 * page_size], swa_starts=[page_size, 2 * page_size])
    allocator.free_rows(table, [1], [3 * page_size], [4 * page_size])
    allocator.free_pages(meta(9), has_swa=False)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (53 * page_size, 52 * page_size)
    assert allocator.translate(meta(4, -1)).device.type == "meta"
