# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Page arithmetic of a batch in Triton: slots of an extend and of a decode, request rows, maps between spaces.

What comes before a request in its batch is summed by each program for itself, a chunk at a time: one launch, and
no size but those that the host gives. Inputs may be 32-bit; they are widened before any arithmetic. Lengths on the
device that differ from the host's reach neither past the pages nor past the end: what they leave over is padding.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from kvdock.allocators.lengths import to_device
from kvdock.kernels.spans import Ints
from kvdock.kernels.triton_forms import ceil_div, launch

CHUNK = 1024
"""Requests, tokens or slots that a program treats at a time."""
SPLITS = 16
"""Programs that share the tokens of one request, at most."""


@triton.jit
def _pages(tokens, PAGE_SIZE: tl.constexpr):
    return (tokens + (PAGE_SIZE - 1)) // PAGE_SIZE


@triton.jit
def _grown(prefix, seq, PAGE_SIZE: tl.constexpr):
    """New tokens and new pages; none where a length shrinks."""
    pages = _pages(seq, PAGE_SIZE) - _pages(prefix, PAGE_SIZE)
    return tl.maximum(seq - prefix, 0), tl.maximum(pages, 0)


@triton.jit
def _before(prefix_lens, seq_lens, request, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """New tokens and new pages of the requests before one."""
    tokens = tl.zeros([CHUNK], tl.int64)
    pages = tl.zeros([CHUNK], tl.int64)
    start = request * 0
    while start < request:
        earlier = start + tl.arange(0, CHUNK)
        prefix = tl.load(prefix_lens + earlier, mask=earlier < request, other=0).to(tl.int64)
        seq = tl.load(seq_lens + earlier, mask=earlier < request, other=0).to(tl.int64)
        new_tokens, new_pages = _grown(prefix, seq, PAGE_SIZE)
        tokens += new_tokens
        pages += new_pages
        start += CHUNK
    return tl.sum(tokens, 0), tl.sum(pages, 0)


@triton.jit(do_not_specialize=["count", "total"])
def extend_kernel(
    prefix_lens, seq_lens, last_loc, new_pages, out, count, total, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Write the slots of one request's new tokens: the rest of its last page, then whole new ones."""
    request = tl.program_id(0).to(tl.int64)
    prefix = tl.load(prefix_lens + request).to(tl.int64)
    length = tl.load(seq_lens + request).to(tl.int64) - prefix
    is_last = request == tl.num_programs(0) - 1
    start = tl.program_id(1).to(tl.int64) * CHUNK
    if (start >= length) & (is_last == 0):
        return
    first_token, first_page = _before(prefix_lens, seq_lens, request, PAGE_SIZE, CHUNK)
    last = tl.load(last_loc + request).to(tl.int64)
    pages_before = _pages(prefix, PAGE_SIZE)
    # What the lengths of the batch leave over, the last request fills with slot 0.
    end = tl.where(is_last, total - first_token, tl.minimum(length, total - first_token))
    while start < end:
        token = start + tl.arange(0, CHUNK)
        position = prefix + token
        page = position // PAGE_SIZE - pages_before
        turn = first_page + page
        wants = (token < length) & (page >= 0)
        taken = tl.load(new_pages + turn, mask=wants & (turn < count), other=0).to(tl.int64)
        slots = tl.where(wants, taken * PAGE_SIZE + position % PAGE_SIZE, last + 1 + token)
        tl.store(out + first_token + token, tl.where(token < length, slots, 0), mask=token < end)
        start += tl.num_programs(1) * CHUNK


@triton.jit(do_not_specialize=["batch", "count"])
def decode_kernel(
    seq_lens, last_loc, new_pages, out, batch, count, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Write each request's next slot: the one after its last, or the first of the next new page."""
    first = tl.program_id(0).to(tl.int64) * CHUNK
    starting = tl.zeros([CHUNK], tl.int64)
    start = first * 0
    while start < first:
        earlier = tl.load(seq_lens + start + tl.arange(0, CHUNK)).to(tl.int64)
        starting += ((earlier - 1) % PAGE_SIZE == 0).to(tl.int64)
        start += CHUNK
    request = first + tl.arange(0, CHUNK)
    there = request < batch
    seq = tl.load(seq_lens + request, mask=there, other=0).to(tl.int64)
    starts_page = there & ((seq - 1) % PAGE_SIZE == 0)
    turn = tl.sum(starting, 0) + tl.cumsum(starts_page.to(tl.int64), 0) - 1
    page = tl.load(new_pages + turn, mask=starts_page & (turn < count), other=0).to(tl.int64)
    following = tl.load(last_loc + request, mask=there, other=0).to(tl.int64) + 1
    tl.store(out + request, tl.where(starts_page, page * PAGE_SIZE, following), mask=there)


@triton.jit(do_not_specialize=["n"])
def write_rows_kernel(table, rows, columns, slots, n, row_stride, column_stride, CHUNK: tl.constexpr):
    """Write ``slots[i]`` to ``table[rows[i], columns[i]]``."""
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    there = i < n
    row = tl.load(rows + i, mask=there, other=0).to(tl.int64)
    column = tl.load(columns + i, mask=there, other=0).to(tl.int64)
    slot = tl.load(slots + i, mask=there, other=0).to(table.dtype.element_ty)
    tl.store(table + row * row_stride + column * column_stride, slot, mask=there)


@triton.jit
def _span(spans):
    """Row, start, length and place among all words of the span of this program; `spans` are four rows of them."""
    span, count = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    start = tl.load(spans + count + span)
    length = tl.load(spans + 2 * count + span) - start
    return tl.load(spans + span), start, length, tl.load(spans + 3 * count + span)


@triton.jit
def write_spans_kernel(table, spans, slots, row_stride, column_stride, CHUNK: tl.constexpr):
    """Write one span's slots into its columns."""
    row, start, length, before = _span(spans)
    at = tl.program_id(1).to(tl.int64) * CHUNK
    while at < length:
        i = at + tl.arange(0, CHUNK)
        slot = tl.load(slots + before + i, mask=i < length, other=0).to(table.dtype.element_ty)
        tl.store(table + row * row_stride + (start + i) * column_stride, slot, mask=i < length)
        at += tl.num_programs(1) * CHUNK


@triton.jit
def read_pages_kernel(
    table, spans, out, row_stride, column_stride, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Read one span's pages, each from the word of its first column."""
    row, start, length, before = _span(spans)
    at = tl.program_id(1).to(tl.int64) * CHUNK
    while at < length:
        i = at + tl.arange(0, CHUNK)
        column = (start + i) * PAGE_SIZE
        slot = tl.load(table + row * row_stride + column * column_stride, mask=i < length, other=0).to(tl.int64)
        tl.store(out + before + i, slot // PAGE_SIZE, mask=i < length)
        at += tl.num_programs(1) * CHUNK


@triton.jit(do_not_specialize=["pages", "n"])
def translate_kernel(mapping, loc, out, pages, n, stride, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Write the slots to which `mapping`, page to page, sends `loc`."""
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    slot = tl.load(loc + i, mask=i < n, other=-1).to(tl.int64)
    number = slot // PAGE_SIZE
    is_slot = slot >= 0
    page = tl.load(mapping + number * stride, mask=is_slot & (number < pages), other=0).to(tl.int64)
    found = tl.where(page == 0, page, page * PAGE_SIZE + slot % PAGE_SIZE)
    tl.store(out + i, tl.where(is_slot, found, slot), mask=i < n)


def alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    new_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
) -> torch.Tensor:
    """Return the int64 slots of an extend; in one launch."""
    batch = prefix_lens.shape[0]
    if not batch:
        return last_loc.new_zeros(extend_num_tokens, dtype=torch.int64)
    out = last_loc.new_empty(extend_num_tokens, dtype=torch.int64)
    if extend_num_tokens:
        lens = [tensor.contiguous() for tensor in (prefix_lens, seq_lens, last_loc, new_pages)]
        grid = (batch, _splits(extend_num_tokens))
        launch(
            extend_kernel,
            grid,
            out,
            *lens,
            out,
            new_pages.shape[0],
            extend_num_tokens,
            PAGE_SIZE=page_size,
            CHUNK=CHUNK,
        )
    return out


def alloc_decode(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, new_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Return each request's next int64 slot; in one launch."""
    batch = seq_lens.shape[0]
    out = last_loc.new_empty(batch, dtype=torch.int64)
    if batch:
        lens = [tensor.contiguous() for tensor in (seq_lens, last_loc, new_pages)]
        grid = (ceil_div(batch, CHUNK),)
        launch(decode_kernel, grid, out, *lens, out, batch, new_pages.shape[0], PAGE_SIZE=page_size, CHUNK=CHUNK)
    return out


def write_rows(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``slots[i]`` to ``table[rows[i], columns[i]]``; in one launch."""
    n = slots.shape[0]
    if n:
        places = [tensor.contiguous() for tensor in (rows, columns, slots)]
        launch(write_rows_kernel, (ceil_div(n, CHUNK),), table, table, *places, n, *table.stride(), CHUNK=CHUNK)


def write_spans(table: torch.Tensor, rows: Ints, starts: Ints, ends: Ints, slots: torch.Tensor) -> None:
    """Write `slots`, span after span, to ``table[rows[i], starts[i]:ends[i]]``; in one launch."""
    if slots.shape[0]:
        spans = np.stack((rows, starts, ends, _before_each(ends - starts)))
        grid = (len(rows), _splits(int((ends - starts).max())))
        on_device = to_device(spans, table.device)
        launch(write_spans_kernel, grid, table, table, on_device, slots.contiguous(), *table.stride(), CHUNK=CHUNK)


def read_pages(table: torch.Tensor, rows: Ints, firsts: Ints, lasts: Ints, page_size: int) -> torch.Tensor:
    """Return the int64 numbers of the pages ``firsts[i] … lasts[i]`` of each row; in one launch."""
    counts = lasts - firsts
    out = torch.empty(int(counts.sum()), dtype=torch.int64, device=table.device)
    if out.shape[0]:
        on_device = to_device(np.stack((rows, firsts, lasts, _before_each(counts))), table.device)
        grid = (len(rows), _splits(int(counts.max())))
        launch(read_pages_kernel, grid, table, table, on_device, out, *table.stride(), PAGE_SIZE=page_size, CHUNK=CHUNK)
    return out


def translate(mapping: torch.Tensor, loc: torch.Tensor, page_size: int = 1) -> torch.Tensor:
    """Return the int64 slots, shaped as `loc`, to which `mapping` sends `loc`; in one launch.

    A slot beyond the mapping becomes slot 0.
    """
    out = torch.empty(loc.shape, dtype=torch.int64, device=loc.device)
    n = loc.numel()
    if n:
        sizes = mapping.shape[0], n, mapping.stride(0)
        grid = (ceil_div(n, CHUNK),)
        launch(translate_kernel, grid, out, mapping, loc.contiguous(), out, *sizes, PAGE_SIZE=page_size, CHUNK=CHUNK)
    return out


def _splits(most: int) -> int:
    """Return the programs for a request or span of at most so many words."""
    return min(ceil_div(most, CHUNK), SPLITS)


def _before_each(counts: Ints) -> Ints:
    """Return how many words stand before each span."""
    ends: Ints = counts.cumsum()
    return ends - counts
