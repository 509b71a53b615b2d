"""Spans of request rows: what a kernel set does for them without a launch of its own, and who asks for it."""

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402

KERNELS = ReferenceKernels()


def numbers(*values):
    return np.array(values, dtype=np.int64)


def test_spans_are_written_one_after_the_other():
    table = torch.zeros(3, 6, dtype=torch.int32)
    KERNELS.write_spans(table, numbers(2, 0, 2), numbers(1, 4, 4), numbers(3, 4, 6), torch.tensor([7, 8, 9, 10]))
    assert table.tolist() == [[0] * 6, [0] * 6, [0, 7, 8, 0, 9, 10]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pages_are_read_from_their_first_words(dtype):
    table = torch.tensor([[0] * 8, [12, 13, 14, 15, 24, 25, 26, 27], [40, 41, 42, 43, 8, 9, 10, 11]], dtype=dtype)
    several = KERNELS.read_pages(table, numbers(2, 1, 2), numbers(1, 2, 0), numbers(2, 2, 1), 4)
    one = KERNELS.read_pages(table, numbers(1), numbers(0), numbers(2), 4)
    none = KERNELS.read_pages(table, numbers(), numbers(), numbers(), 4)
    assert (several.tolist(), one.tolist(), none.tolist()) == ([2, 10], [3, 6], [])
    assert {found.dtype for found in (several, one, none)} == {torch.int64}


def test_spans_never_wait_for_the_device():
    table = torch.zeros(3, 8, dtype=torch.int32, device="meta")
    KERNELS.write_spans(table, numbers(1, 2), numbers(0, 2), numbers(2, 4), torch.zeros(4, device="meta"))
    assert KERNELS.read_pages(table, numbers(1, 2), numbers(0, 0), numbers(1, 2), 4).shape == (3,)
    assert KERNELS.read_pages(table, numbers(2), numbers(0), numbers(2), 4).shape == (2,)
