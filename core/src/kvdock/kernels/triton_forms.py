"""How a view's rows lie in memory, in bytes: what the kernels of `kvdock.kernels.triton_rows` are told of a view.

Kernels copy words, not elements: the widest integer of which every row and every distance is made, so one kernel
serves all data types and 8-bit rows move as fast as 64-bit ones.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Bytes of a word → its type in a kernel."""
TILE = 1024
"""Words that a program copies at a time: 8 a thread in 4 warps of 32."""


class Form(NamedTuple):
    """Rows of `nbytes`, found at ``page · page_stride + place in the page · slot_stride``; in bytes.

    A row is made of runs of `run` bytes, each `run_stride` after the last: one run where it is contiguous, and
    several where the view is a part of each head, or the window of a longer one.
    """

    nbytes: int
    page_stride: int
    slot_stride: int
    page_size: int
    run: int
    run_stride: int
    word: int
    """The widest word, at most 8 bytes, that divides all of these."""

    @property
    def is_flat(self) -> bool:
        """Whether rows are contiguous."""
        return self.run == self.nbytes


def form_of(view: torch.Tensor) -> Form | None:
    """Return how the rows of `view` ``[pages, page_size, *shape]`` lie; ``None`` for rows of runs within runs."""
    return _form(view.shape, view.stride(), view.dtype.itemsize)


@functools.lru_cache(maxsize=4096)
def _form(shape: torch.Size, strides: tuple[int, ...], item: int) -> Form | None:
    runs = [(1, 1)]
    for extent, stride in reversed(list(zip(shape[2:], strides[2:], strict=True))):
        length, apart = runs[-1]
        if extent == 1:
            continue
        if stride == length * apart:
            runs[-1] = (length * extent, apart)
        else:
            runs.append((extent, stride))
    if len(runs) > 2:
        return None
    run, nbytes = runs[0][0] * item, shape[2:].numel() * item
    # The stride of one page, or of pages of one slot, is never used and may be any number.
    page_stride, slot_stride = (item * strides[dim] if shape[dim] > 1 else 0 for dim in (0, 1))
    run_stride = runs[1][1] * item if len(runs) == 2 else 0
    word = _lowest_bit(8 | nbytes | page_stride | slot_stride | run | run_stride)
    return Form(nbytes, page_stride, slot_stride, shape[1], run, run_stride, word)


def shared_word(forms: Sequence[Form], tensors: Sequence[torch.Tensor], *distances: int) -> int:
    """Return the bytes of the widest word for rows of all `forms`, at the addresses of `tensors`."""
    together = 8
    for form in forms:
        together |= form.word
    for tensor in tensors:
        together |= tensor.data_ptr()
    for distance in distances:
        together |= distance
    return _lowest_bit(together)


def tile(words: int) -> tuple[int, int]:
    """Return the rows and the words a row, both powers of two, that a program copies at a time."""
    width = min(1 << max(words - 1, 0).bit_length(), TILE // 2)
    return min(TILE // width, 64), width


def ceil_div(count: int, size: int) -> int:
    """Return how many pieces of `size` hold `count`."""
    return -(-count // size)


def _lowest_bit(value: int) -> int:
    return value & -value
