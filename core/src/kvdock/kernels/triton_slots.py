# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Page arithmetic of a batch in Triton: slots of an extend and of a decode, request rows, maps between spaces.

What comes before a request in its batch is summed by each program for itself, a chunk at a time: one launch, and
no size but those that the host gives. Inputs may be 32-bit; they are widened before any arithmetic.
"""

import torch
import triton
import triton.language as tl

from kvdock.kernels.triton_forms import ceil_div

CHUNK = 1024
"""Requests, tokens or slots that a program treats at a time."""
_SPLITS = 16
"""Programs that share the tokens of one request, at most."""


@triton.jit
def _pages(tokens, PAGE_SIZE: tl.constexpr):
    return (tokens + (PAGE_SIZE - 1)) // PAGE_SIZE


@triton.jit(do_not_specialize=["count", "total", "splits"])
def extend_kernel(
    prefix_lens, seq_lens, last_loc, new_pages, out, count, total, splits,
    PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the slots of one request's new tokens: the rest of its last page, then whole new ones."""
    request = tl.program_id(0).to(tl.int64)
    first_token = tl.zeros([], tl.int64)
    first_page = tl.zeros([], tl.int64)
    for start in range(0, tl.program_id(0), CHUNK):
        earlier = start.to(tl.int64) + tl.arange(0, CHUNK)
        there = earlier < request
        prefix_of = tl.load(prefix_lens + earlier, mask=there, other=0).to(tl.int64)
        seq_of = tl.load(seq_lens + earlier, mask=there, other=0).to(tl.int64)
        first_token += tl.sum(seq_of - prefix_of, 0)
        first_page += tl.sum(_pages(seq_of, PAGE_SIZE) - _pages(prefix_of, PAGE_SIZE), 0)
    prefix = tl.load(prefix_lens + request).to(tl.int64)
    length = tl.load(seq_lens + request).to(tl.int64) - prefix
    last = tl.load(last_loc + request).to(tl.int64)
    pages_before = _pages(prefix, PAGE_SIZE)
    for start in range(tl.program_id(1) * CHUNK, length, splits * CHUNK):
        token = start.to(tl.int64) + tl.arange(0, CHUNK)
        position = prefix + token
        page = position // PAGE_SIZE - pages_before
        turn = first_page + page
        # Lengths that ask for more than the host took reach neither past the pages nor past the end.
        inside = (token < length) & (first_token + token < total)
        taken = tl.load(new_pages + turn, mask=inside & (page >= 0) & (turn < count), other=0).to(tl.int64)
        slots = tl.where(page < 0, last + 1 + token, taken * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(out + first_token + token, slots, mask=inside)


@triton.jit(do_not_specialize=["batch", "count"])
def decode_kernel(
    seq_lens, last_loc, new_pages, out, batch, count, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Write each request's next slot: the one after its last, or the first of the next new page."""
    before = tl.zeros([], tl.int64)
    for start in range(0, tl.program_id(0) * CHUNK, CHUNK):
        earlier = start.to(tl.int64) + tl.arange(0, CHUNK)
        before += tl.sum(((tl.load(seq_lens + earlier).to(tl.int64) - 1) % PAGE_SIZE == 0).to(tl.int64), 0)
    request = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    there = request < batch
    seq = tl.load(seq_lens + request, mask=there, other=0).to(tl.int64)
    starts_page = there & ((seq - 1) % PAGE_SIZE == 0)
    turn = before + tl.cumsum(starts_page.to(tl.int64), 0) - 1
    takes = starts_page & (turn < count)
    page = tl.load(new_pages + turn, mask=takes, other=0).to(tl.int64)
    following = tl.load(last_loc + request, mask=there, other=0).to(tl.int64) + 1
    tl.store(out + request, tl.where(takes, page * PAGE_SIZE, following), mask=there)


@triton.jit(do_not_specialize=["n"])
def words_kernel(table, rows, columns, slots, n, row_stride, column_stride, CHUNK: tl.constexpr):
    """Write ``slots[i]`` to ``table[rows[i], columns[i]]``."""
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    there = i < n
    row = tl.load(rows + i, mask=there, other=0).to(tl.int64)
    column = tl.load(columns + i, mask=there, other=0).to(tl.int64)
    slot = tl.load(slots + i, mask=there, other=0).to(table.dtype.element_ty)
    tl.store(table + row * row_stride + column * column_stride, slot, mask=there)


@triton.jit(do_not_specialize=["n"])
def translate_kernel(mapping, loc, out, n, stride, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Write the slots to which `mapping`, page to page, sends `loc`."""
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    there = i < n
    slot = tl.load(loc + i, mask=there, other=-1).to(tl.int64)
    is_slot = slot >= 0
    page = tl.load(mapping + slot // PAGE_SIZE * stride, mask=is_slot, other=0).to(tl.int64)
    found = tl.where(page == 0, page, page * PAGE_SIZE + slot % PAGE_SIZE)
    tl.store(out + i, tl.where(is_slot, found, slot), mask=there)


def extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    new_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
) -> torch.Tensor:
    """Return the int64 slots of an extend in one launch."""
    # Where the lengths on the device ask for fewer tokens than the host took, the rest is padding.
    out = last_loc.new_zeros(extend_num_tokens, dtype=torch.int64)
    batch = prefix_lens.shape[0]
    if batch and extend_num_tokens:
        splits = min(ceil_div(extend_num_tokens, CHUNK), _SPLITS)
        lens = [tensor.contiguous() for tensor in (prefix_lens, seq_lens, last_loc, new_pages)]
        extend_kernel[(batch, splits)](
            *lens, out, new_pages.shape[0], extend_num_tokens, splits, PAGE_SIZE=page_size, CHUNK=CHUNK
        )
    return out


def decode(seq_lens: torch.Tensor, last_loc: torch.Tensor, new_pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return each request's next int64 slot in one launch."""
    batch = seq_lens.shape[0]
    out = last_loc.new_empty(batch, dtype=torch.int64)
    if batch:
        lens = [tensor.contiguous() for tensor in (seq_lens, last_loc, new_pages)]
        decode_kernel[(ceil_div(batch, CHUNK),)](*lens, out, batch, new_pages.shape[0], PAGE_SIZE=page_size, CHUNK=CHUNK)
    return out


def write_words(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``slots[i]`` to ``table[rows[i], columns[i]]`` in one launch."""
    n = slots.shape[0]
    if n:
        places = [tensor.contiguous() for tensor in (rows, columns, slots)]
        words_kernel[(ceil_div(n, CHUNK),)](table, *places, n, *table.stride(), CHUNK=CHUNK)


def translate(mapping: torch.Tensor, loc: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the int64 slots, shaped as `loc`, to which `mapping` sends `loc`; in one launch."""
    out = torch.empty(loc.shape, dtype=torch.int64, device=loc.device)
    n = loc.numel()
    if n:
        translate_kernel[(ceil_div(n, CHUNK),)](
            mapping, loc.contiguous(), out, n, mapping.stride(0), PAGE_SIZE=page_size, CHUNK=CHUNK
        )
    return out
