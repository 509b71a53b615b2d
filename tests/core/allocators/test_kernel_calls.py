"""What an allocator asks of the kernel set when rows are freed: their pages, once, however many rows there are."""

import msgspec
import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402


class Counted(ReferenceKernels):
    """Notes how many rows were read at each call."""

    def __init__(self):
        self.read = []

    def read_pages(self, table, rows, firsts, lasts, page_size):
        self.read.append(len(rows))
        return super().read_pages(table, rows, firsts, lasts, page_size)


def counted(allocator):
    kernels = Counted()
    allocator.parts = msgspec.structs.replace(allocator.parts, kernels=kernels)
    return allocator, kernels.read


def table_of(allocator, rows, device="cpu"):
    slots = allocator.alloc(rows * 8)
    return torch.cat((torch.zeros(8, dtype=torch.int64, device=device), slots)).view(rows + 1, 8).to(torch.int32)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["single", "swa", "pure"])
def test_pages_of_all_freed_rows_are_read_in_one_call(make, kind, device):
    sizes = (64, 64) if kind == "swa" else (64,)
    allocator, read = counted(getattr(make, kind)(*sizes, page_size=4, device=device))
    table = table_of(allocator, 3, device)
    allocator.free_rows(table, [1, 2, 3], [0, 0, 0], [8, 8, 5])
    assert (read, allocator.available_size()) == ([3], 64)


def test_a_row_that_left_its_window_is_read_once_for_both_sides(make):
    allocator, read = counted(make.swa(64, 64, page_size=4))
    table = table_of(allocator, 3)
    allocator.free_swa_rows(table, [1, 2], [0, 0], [4, 8])
    assert (read, allocator.full_available_size(), allocator.swa_available_size()) == ([2], 40, 52)
    allocator.free_rows(table, [1, 2, 3], [0, 0, 0], [8, 8, 8], swa_starts=[4, 8, 0])
    assert (read, allocator.full_available_size(), allocator.swa_available_size()) == ([2, 3], 64, 64)
