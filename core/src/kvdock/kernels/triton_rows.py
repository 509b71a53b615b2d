# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rows of views in Triton: stores, gathers and copies from view to view, one launch each.

Offsets are 64-bit from the first operation on, and count words (`kvdock.kernels.triton_forms`). Slots are not checked.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvdock.kernels.triton_forms import WORDS, Form, ceil_div, form_of, launch, shared_unit, steps, tile


@triton.jit
def slot_offsets(loc, i, inside, page_stride, slot_stride, PAGE_SIZE: tl.constexpr):
    """Offsets of the slots ``loc[i]``; of the slots ``i`` without `loc`."""
    slot = i
    if loc is not None:
        slot = tl.load(loc + i, mask=inside, other=0).to(tl.int64)
    offset = slot * page_stride
    if PAGE_SIZE != 1:
        offset = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
    return offset


@triton.jit
def in_row(element, run, run_stride, STEPS: tl.constexpr, FLAT: tl.constexpr):
    """Offset of each word of a row from the row's start; runs and their distance are in units of `STEPS` words."""
    offset = element
    if not FLAT:
        # A distance may be 32-bit: what is 64-bit comes first.
        offset = element // (run * STEPS) * run_stride * STEPS + element % (run * STEPS)
    return offset


@triton.jit
def _copy_tile(
    target, target_loc, source, source_loc, n, units, part,
    t_page_stride, t_slot_stride, t_run, t_run_stride, s_page_stride, s_slot_stride, s_run, s_run_stride,
    T_PAGE_SIZE: tl.constexpr, T_FLAT: tl.constexpr, S_PAGE_SIZE: tl.constexpr, S_FLAT: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy one tile of rows of `source`, or zeros, to rows of `target`; distances are in units of `STEPS` words."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = part.to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = (i < n)[:, None] & (element < units * STEPS)[None, :]
    if source is None:
        row = tl.zeros([ROWS, WIDTH], target.dtype.element_ty)
    else:
        s_at = slot_offsets(source_loc, i, i < n, s_page_stride, s_slot_stride, S_PAGE_SIZE) * STEPS
        s_in = in_row(element, s_run, s_run_stride, STEPS, S_FLAT)
        row = tl.load(source + (s_at[:, None] + s_in[None, :]), mask=mask, other=0)
    t_at = slot_offsets(target_loc, i, i < n, t_page_stride, t_slot_stride, T_PAGE_SIZE) * STEPS
    t_in = in_row(element, t_run, t_run_stride, STEPS, T_FLAT)
    tl.store(target + (t_at[:, None] + t_in[None, :]), row, mask=mask)


@triton.jit(do_not_specialize=["n"])
def copy_kernel(
    target, target_loc, source, source_loc, n, units,
    t_page_stride, t_slot_stride, t_run, t_run_stride, s_page_stride, s_slot_stride, s_run, s_run_stride,
    T_PAGE_SIZE: tl.constexpr, T_FLAT: tl.constexpr, S_PAGE_SIZE: tl.constexpr, S_FLAT: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy slots of one view, or zeros, to slots of another one; a side without slots is dense."""
    _copy_tile(
        target, target_loc, source, source_loc, n, units, tl.program_id(1),
        t_page_stride, t_slot_stride, t_run, t_run_stride, s_page_stride, s_slot_stride, s_run, s_run_stride,
        T_PAGE_SIZE, T_FLAT, S_PAGE_SIZE, S_FLAT, STEPS, ROWS, WIDTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def pair_kernel(
    loc, n, a_view, a_rows, a_units, b_view, b_rows, b_units,
    a_page_stride, a_slot_stride, a_run, a_run_stride, a_row_stride, a_row_run, a_row_run_stride,
    b_page_stride, b_slot_stride, b_run, b_run_stride, b_row_stride, b_row_run, b_row_run_stride,
    A_PARTS: tl.constexpr, A_PAGE_SIZE: tl.constexpr, A_FLAT: tl.constexpr, A_ROW_FLAT: tl.constexpr,
    A_STEPS: tl.constexpr, A_WIDTH: tl.constexpr,
    B_PAGE_SIZE: tl.constexpr, B_FLAT: tl.constexpr, B_ROW_FLAT: tl.constexpr,
    B_STEPS: tl.constexpr, B_WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store dense rows of two views to the same slots: the first programs of a row are of the first view."""
    part = tl.program_id(1)
    if part < A_PARTS:
        _copy_tile(
            a_view, loc, a_rows, None, n, a_units, part,
            a_page_stride, a_slot_stride, a_run, a_run_stride, a_row_stride, 0, a_row_run, a_row_run_stride,
            A_PAGE_SIZE, A_FLAT, 1, A_ROW_FLAT, A_STEPS, ROWS, A_WIDTH,
        )  # fmt: skip
    else:
        _copy_tile(
            b_view, loc, b_rows, None, n, b_units, part - A_PARTS,
            b_page_stride, b_slot_stride, b_run, b_run_stride, b_row_stride, 0, b_row_run, b_row_run_stride,
            B_PAGE_SIZE, B_FLAT, 1, B_ROW_FLAT, B_STEPS, ROWS, B_WIDTH,
        )  # fmt: skip


class Side(NamedTuple):
    """Rows that are read or written: the slots `loc` of a view, or all rows in order, and how they lie."""

    view: torch.Tensor
    form: Form
    loc: torch.Tensor | None

    def pointer(self, unit: int) -> Any:
        """Return the view as words."""
        return triton.reinterpret(self.view, WORDS[unit])


def side_of(view: torch.Tensor, loc: torch.Tensor) -> Side | None:
    """Return the slots `loc` of a view; ``None`` where rows lie as no kernel here reads them."""
    form = form_of(view)
    return None if form is None else Side(view, form, loc.contiguous())


def dense(rows: torch.Tensor) -> Side:
    """Return rows ``[n, *shape]`` in order, as they lie, or a copy where no kernel here reads them so."""
    paged = rows.unsqueeze(1)
    form = form_of(paged)
    if form is None:
        return dense(rows.contiguous())
    return Side(paged, form, None)


def launch_copy(target: Side, source: Side | None, n: int, home: torch.Tensor) -> None:
    """Copy `n` rows of `source`, or zeros, to those of `target` in one launch on the device of `home`."""
    if not n or not target.form.nbytes:
        return
    other = target if source is None else source
    unit = shared_unit((side.view, side.form) for side in (target, other))
    units, step = target.form.nbytes // unit, steps(unit)
    height, width = tile(units * step)
    launch(
        copy_kernel, (ceil_div(n, height), ceil_div(units * step, width)), home,
        target.pointer(unit), target.loc, source and source.pointer(unit), source and source.loc, n, units,
        *target.form.distances(unit), *other.form.distances(unit),
        T_PAGE_SIZE=target.form.page_size, T_FLAT=target.form.is_flat,
        S_PAGE_SIZE=other.form.page_size, S_FLAT=other.form.is_flat, STEPS=step, ROWS=height, WIDTH=width,
    )  # fmt: skip


class _Half(NamedTuple):
    """One of two views and the rows for it, in words."""

    target: Side
    source: Side
    unit: int
    width: int

    @property
    def words(self) -> int:
        return self.target.form.nbytes // self.unit * steps(self.unit)

    def arguments(self) -> tuple[Any, ...]:
        return self.target.pointer(self.unit), self.source.pointer(self.unit), self.target.form.nbytes // self.unit

    def distances(self) -> tuple[int, ...]:
        row_stride, _, run, run_stride = self.source.form.distances(self.unit)
        return *self.target.form.distances(self.unit), row_stride, run, run_stride

    def constants(self, name: str) -> dict[str, Any]:
        found = {
            "PAGE_SIZE": self.target.form.page_size,
            "FLAT": self.target.form.is_flat,
            "ROW_FLAT": self.source.form.is_flat,
            "STEPS": steps(self.unit),
            "WIDTH": self.width,
        }
        return {f"{name}_{key}": value for key, value in found.items()}


def launch_pair(a: tuple[Side, Side], b: tuple[Side, Side], n: int) -> None:
    """Store the dense rows of two views (target, source) to the same slots in one launch."""
    first, second = _half(*a), _half(*b)
    if not n or not first.words + second.words:
        return
    height = min(tile(first.words)[0], tile(second.words)[0])
    parts = ceil_div(first.words, first.width)
    launch(
        pair_kernel, (ceil_div(n, height), parts + ceil_div(second.words, second.width)), a[0].view,
        a[0].loc, n, *first.arguments(), *second.arguments(), *first.distances(), *second.distances(),
        A_PARTS=parts, **first.constants("A"), **second.constants("B"), ROWS=height,
    )  # fmt: skip


def _half(target: Side, source: Side) -> _Half:
    unit = shared_unit((side.view, side.form) for side in (target, source))
    return _Half(target, source, unit, tile(target.form.nbytes // unit * steps(unit))[1])
