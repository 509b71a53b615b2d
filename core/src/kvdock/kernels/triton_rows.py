# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rows of views in Triton: stores, gathers and copies from view to view, one launch each.

Offsets are 64-bit from the first operation on, and count words (`kvdock.kernels.triton_forms`). A negative slot is
no slot: nothing is written for it, and it reads zeros.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvdock.kernels.triton_forms import WORDS, Form, ceil_div, shared_word, tile


@triton.jit
def slot_offsets(loc, i, inside, page_stride, slot_stride, PAGE_SIZE: tl.constexpr):
    """Offsets of the slots ``loc[i]``, and which of them are slots."""
    slot = tl.load(loc + i, mask=inside, other=-1).to(tl.int64)
    return slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride, slot >= 0


@triton.jit
def in_row(element, run, run_stride, FLAT: tl.constexpr):
    """Offset of each word of a row from the row's start."""
    if FLAT:
        offset = element
    else:
        offset = element // run * run_stride + element % run
    return offset


@triton.jit
def _exchange(
    view, rows, loc, n, words, part, page_stride, slot_stride, row_stride, run, run_stride,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FLAT: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Copy one tile between slots of `view` and dense `rows`."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = part.to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    at, is_slot = slot_offsets(loc, i, i < n, page_stride, slot_stride, PAGE_SIZE)
    there = view + (at[:, None] + in_row(element, run, run_stride, FLAT)[None, :])
    here = rows + (i[:, None] * row_stride + element[None, :])
    columns = (element < words)[None, :]
    mask = is_slot[:, None] & columns
    if READ:
        tl.store(here, tl.load(there, mask=mask, other=0), mask=(i < n)[:, None] & columns)
    else:
        tl.store(there, tl.load(here, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["n"])
def rows_kernel(
    view, rows, loc, n, words, page_stride, slot_stride, row_stride, run, run_stride,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FLAT: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Store `rows` to the slots `loc` of `view`, or read them."""
    _exchange(
        view, rows, loc, n, words, tl.program_id(1), page_stride, slot_stride, row_stride, run, run_stride,
        PAGE_SIZE, ROWS, WIDTH, FLAT, READ,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def pair_kernel(
    a_view, a_rows, b_view, b_rows, loc, n,
    a_words, a_page_stride, a_slot_stride, a_row_stride, a_run, a_run_stride,
    b_words, b_page_stride, b_slot_stride, b_row_stride, b_run, b_run_stride,
    A_PARTS: tl.constexpr, A_PAGE_SIZE: tl.constexpr, A_WIDTH: tl.constexpr, A_FLAT: tl.constexpr,
    B_PAGE_SIZE: tl.constexpr, B_WIDTH: tl.constexpr, B_FLAT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store rows of two views to the same slots: the first programs of a row are of the first view."""
    part = tl.program_id(1)
    if part < A_PARTS:
        _exchange(
            a_view, a_rows, loc, n, a_words, part, a_page_stride, a_slot_stride, a_row_stride, a_run, a_run_stride,
            A_PAGE_SIZE, ROWS, A_WIDTH, A_FLAT, False,
        )  # fmt: skip
    else:
        _exchange(
            b_view, b_rows, loc, n, b_words, part - A_PARTS,
            b_page_stride, b_slot_stride, b_row_stride, b_run, b_run_stride,
            B_PAGE_SIZE, ROWS, B_WIDTH, B_FLAT, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def between_kernel(
    target, target_loc, source, source_loc, n, words,
    t_page_stride, t_slot_stride, t_run, t_run_stride, s_page_stride, s_slot_stride, s_run, s_run_stride,
    T_PAGE_SIZE: tl.constexpr, T_FLAT: tl.constexpr, S_PAGE_SIZE: tl.constexpr, S_FLAT: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy slots of one view to slots of another one."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    t_at, is_target = slot_offsets(target_loc, i, i < n, t_page_stride, t_slot_stride, T_PAGE_SIZE)
    s_at, is_source = slot_offsets(source_loc, i, i < n, s_page_stride, s_slot_stride, S_PAGE_SIZE)
    columns = (element < words)[None, :]
    row = tl.load(
        source + (s_at[:, None] + in_row(element, s_run, s_run_stride, S_FLAT)[None, :]),
        mask=is_source[:, None] & columns,
        other=0,
    )
    there = target + (t_at[:, None] + in_row(element, t_run, t_run_stride, T_FLAT)[None, :])
    tl.store(there, row, mask=is_target[:, None] & columns)


class Dense(NamedTuple):
    """Rows ``[n, elements]`` beside a view of which they are stored or read, and how both lie."""

    view: torch.Tensor
    form: Form
    rows: torch.Tensor

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next."""
        return self.rows.stride(0) * self.rows.dtype.itemsize

    @property
    def word(self) -> int:
        """Bytes of the widest word for both sides."""
        return shared_word([self.form], [self.view, self.rows], self.row_stride)

    def pointers(self, word: int) -> tuple[object, object]:
        """Return both sides as words."""
        return triton.reinterpret(self.view, WORDS[word]), triton.reinterpret(self.rows, WORDS[word])

    def distances(self, word: int) -> tuple[int, ...]:
        """Return the words of a row, strides of page, slot and dense row, and the runs; in words."""
        form = self.form
        found = (form.nbytes, form.page_stride, form.slot_stride, self.row_stride, form.run, form.run_stride)
        return tuple(nbytes // word for nbytes in found)


def launch_rows(dense: Dense, loc: torch.Tensor, *, read: bool) -> None:
    """Store the dense rows to the slots `loc`, or fill them from there; in one launch."""
    n, word, form = loc.shape[0], dense.word, dense.form
    words = form.nbytes // word
    if not n or not words:
        return
    height, width = tile(words)
    rows_kernel[(ceil_div(n, height), ceil_div(words, width))](
        *dense.pointers(word), loc, n, *dense.distances(word),
        PAGE_SIZE=form.page_size, ROWS=height, WIDTH=width, FLAT=form.is_flat, READ=read,
    )  # fmt: skip


def launch_pair(a: Dense, b: Dense, loc: torch.Tensor) -> None:
    """Store the rows of two views to the same slots in one launch."""
    n, a_word, b_word = loc.shape[0], a.word, b.word
    a_words, b_words = a.form.nbytes // a_word, b.form.nbytes // b_word
    if not n or not a_words + b_words:
        return
    height = min(tile(a_words)[0], tile(b_words)[0])
    a_width, b_width = tile(a_words)[1], tile(b_words)[1]
    parts = ceil_div(a_words, a_width)
    pair_kernel[(ceil_div(n, height), parts + ceil_div(b_words, b_width))](
        *a.pointers(a_word), *b.pointers(b_word), loc, n, *a.distances(a_word), *b.distances(b_word),
        A_PARTS=parts, A_PAGE_SIZE=a.form.page_size, A_WIDTH=a_width, A_FLAT=a.form.is_flat,
        B_PAGE_SIZE=b.form.page_size, B_WIDTH=b_width, B_FLAT=b.form.is_flat, ROWS=height,
    )  # fmt: skip


class Side(NamedTuple):
    """Slots `loc` of a view, and how it lies."""

    view: torch.Tensor
    form: Form
    loc: torch.Tensor

    def distances(self, word: int) -> tuple[int, ...]:
        """Return the strides of page and slot, and the runs; in words."""
        form = self.form
        return tuple(nbytes // word for nbytes in (form.page_stride, form.slot_stride, form.run, form.run_stride))


def launch_between(target: Side, source: Side) -> None:
    """Copy the slots of `source` to those of `target` in one launch; rows of both have the same bytes."""
    n, word = target.loc.shape[0], shared_word([target.form, source.form], [target.view, source.view])
    words = target.form.nbytes // word
    if not n or not words:
        return
    height, width = tile(words)
    between_kernel[(ceil_div(n, height), ceil_div(words, width))](
        triton.reinterpret(target.view, WORDS[word]), target.loc,
        triton.reinterpret(source.view, WORDS[word]), source.loc, n, words,
        *target.distances(word), *source.distances(word),
        T_PAGE_SIZE=target.form.page_size, T_FLAT=target.form.is_flat,
        S_PAGE_SIZE=source.form.page_size, S_FLAT=source.form.is_flat, ROWS=height, WIDTH=width,
    )  # fmt: skip
