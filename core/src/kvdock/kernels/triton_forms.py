"""How a view's rows lie in memory, in bytes: what the kernels of `kvdock.kernels.triton_rows` are told of a view.

Kernels copy words, not elements: the widest integer of which every row and every distance is made, so one kernel
serves all data types and 8-bit rows move as fast as 64-bit ones. Distances are counted in units of up to 16 bytes,
the most that a thread moves at once: a kernel that multiplies them knows how its addresses are aligned.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
"""Bytes of a unit → the type of its words in a kernel."""
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
    unit: int
    """The largest power of two, at most 16, that divides all of these."""

    @property
    def is_flat(self) -> bool:
        """Whether rows are contiguous."""
        return self.run == self.nbytes

    def distances(self, unit: int) -> tuple[int, int, int, int]:
        """Return the strides of page and slot, and the runs, in units."""
        return self.page_stride // unit, self.slot_stride // unit, self.run // unit, self.run_stride // unit


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
    unit = _lowest_bit(16 | nbytes | page_stride | slot_stride | run | run_stride)
    return Form(nbytes, page_stride, slot_stride, shape[1], run, run_stride, unit)


def shared_unit(sides: Iterable[tuple[torch.Tensor, Form]]) -> int:
    """Return the bytes of the widest unit for rows of all these tensors, where they lie."""
    together = 16
    for tensor, form in sides:
        together |= form.unit | tensor.data_ptr()
    return _lowest_bit(together)


def steps(unit: int) -> int:
    """Return how many words a unit has."""
    return 2 if unit == 16 else 1


def tile(words: int) -> tuple[int, int]:
    """Return the rows and the words a row, both powers of two, that a program copies at a time."""
    width = min(power_of_two(words), TILE // 2)
    return min(TILE // width, 64), width


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()


def ceil_div(count: int, size: int) -> int:
    """Return how many pieces of `size` hold `count`."""
    return -(-count // size)


def launch(kernel: Any, grid: tuple[int, ...], home: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch `kernel` on the device of `home`, whichever device is the current one."""
    index = home.device.index
    active: Any = driver.active if index is not None else None
    current = index if active is None else active.get_current_device()
    if index == current:
        kernel[grid](*arguments, **constants)
        return
    active.set_current_device(index)
    try:
        kernel[grid](*arguments, **constants)
    finally:
        active.set_current_device(current)


def is_interpreted() -> bool:
    """Return whether kernels are interpreted on the host, as ``TRITON_INTERPRET=1`` asks."""
    return bool(triton.knobs.runtime.interpret)


def _lowest_bit(value: int) -> int:
    return value & -value
