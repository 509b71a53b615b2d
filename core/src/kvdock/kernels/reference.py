"""The kernel set in plain torch: runs on every device that torch serves and defines the results.

Views are ``[pages, page_size, *shape]`` with any strides. Locations are widened to int64 before any
arithmetic, and no method reads a value back to the host: it runs on meta tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvdock.errors import SlotError
from kvdock.kernels import blocks, slots
from kvdock.kernels.interface import Kernels


class ReferenceKernels(Kernels):
    """Stores, gathers and page arithmetic as torch operations."""

    def store(self, view: torch.Tensor, loc: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values[i]`` to slot ``loc[i]``."""
        check_values(view, loc.shape[0], values)
        _store(view, loc, values)

    def store_kv(
        self, k_view: torch.Tensor, v_view: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write keys, then values, of the same slots."""
        check_values(k_view, loc.shape[0], k)
        check_values(v_view, loc.shape[0], v)
        index = _store(k_view, loc, k)
        _store(v_view, loc, v, index)

    def store_mla(self, view: torch.Tensor, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Write `latent` to the first columns and `rope` to the last ones; ``[n, dim]`` or ``[n, 1, dim]`` each."""
        heads = view.shape[2:-1]
        lora, rest = latent.shape[-1], rope.shape[-1]
        first, last = view[..., :lora], view[..., view.shape[-1] - rest :]
        self.store_kv(first, last, loc, latent.reshape(-1, *heads, lora), rope.reshape(-1, *heads, rest))

    def gather(self, view: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows at `loc`."""
        rows = _rows(view.shape, view.stride(), view.storage_offset(), view.dtype)
        if rows is None:
            return _bits(view)[_page_and_offset(loc.to(torch.int64), view.shape[1])].view(view.dtype)
        found = rows.table(view).index_select(
            0, _index(rows, view.shape[1], loc if loc.dim() == 1 else loc.reshape(-1))
        )
        return found.view(view.dtype).view(*loc.shape, *view.shape[2:])

    def move(self, views: Sequence[torch.Tensor], tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots within each view; overlapping moves are safe, since the sources are gathered first."""
        for view in views:
            self.store(view, tgt_loc, self.gather(view, src_loc))

    def clear(self, views: Sequence[torch.Tensor], loc: torch.Tensor) -> None:
        """Zero the slots `loc` of each view, in place."""
        for view in views:
            rows = _rows(view.shape, view.stride(), view.storage_offset(), view.dtype)
            if rows is None:
                _bits(view)[_page_and_offset(loc.to(torch.int64), view.shape[1])] = 0
            else:
                rows.table(view).index_fill_(0, _index(rows, view.shape[1], loc), 0)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        new_pages: torch.Tensor,
        page_size: int,
        extend_num_tokens: int,
    ) -> torch.Tensor:
        """Return the slots of an extend, page by page; on the host by numpy."""
        form = slots.extend_slots_on_host if last_loc.is_cpu else slots.extend_slots
        return form(prefix_lens, seq_lens, last_loc, new_pages, page_size, extend_num_tokens)

    def alloc_decode(
        self, seq_lens: torch.Tensor, last_loc: torch.Tensor, new_pages: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        """Return each request's next slot: the one after its last, or the first of the next new page."""
        form = slots.decode_slots_on_host if last_loc.is_cpu else slots.decode_slots
        return form(seq_lens, last_loc, new_pages, page_size)

    def write_rows(self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``slots[i]`` to ``table[rows[i], columns[i]]`` in one scatter; rows and columns exist."""
        row, column, words = rows.to(torch.int64), columns.to(torch.int64), slots.to(table.dtype)
        if table.is_contiguous():
            table.view(-1).scatter_(0, row * table.shape[1] + column, words)
        else:
            table[row, column] = words

    def translate(self, mapping: torch.Tensor, loc: torch.Tensor, page_size: int = 1) -> torch.Tensor:
        """Return the slots to which `mapping`, page to page, sends `loc`, as int64; −1 stays −1, page 0 is slot 0."""
        wide = _wide(loc)
        page, offset = (wide, None) if page_size == 1 else _page_and_offset(wide, page_size)
        page = page.clamp(min=0)
        found = mapping.index_select(0, page if page.dim() == 1 else page.reshape(-1))
        found = _wide(found if page.dim() == 1 else found.view(wide.shape))
        if offset is not None:
            found = torch.where(found == 0, found, found * page_size + offset)
        return torch.where(wide < 0, wide, found)

    def quantize_blocks(self, values: torch.Tensor, dtype: str, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bytes and scales; `kvdock.kernels.blocks` says how they are found."""
        return blocks.quantize(values, dtype, block)

    def dequantize_blocks(self, data: torch.Tensor, scales: torch.Tensor, dtype: str, block: int) -> torch.Tensor:
        """Return the values as float32."""
        return blocks.dequantize(data, scales, dtype, block)

    def copy_rows(
        self, tgt_view: torch.Tensor, tgt_loc: torch.Tensor, src_view: torch.Tensor, src_loc: torch.Tensor
    ) -> None:
        """Gather where the source is, and store where the target is."""
        rows = self.gather(src_view, src_loc.to(src_view.device))
        self.store(tgt_view, tgt_loc.to(tgt_view.device), rows.to(tgt_view.device))


class _Rows(NamedTuple):
    """How the slots of a view are rows of one tensor: `total` of them, `apart` words from each other.

    `word` is the widest integer that rows are made of: copied 64 bits at a time, they take half the time of
    16, and torch indexes integers on every device, floats of 8 bits not on the host. `gap` is what a page number adds
    to a slot where pages do not follow each other.
    """

    word: torch.dtype
    total: int
    words: int
    apart: int
    gap: int

    def table(self, view: torch.Tensor) -> torch.Tensor:
        """Return the rows of a view of this form, ``[total, words]``."""
        words = view if self.word is view.dtype else view.view(self.word)
        return words.as_strided((self.total, self.words), (self.apart, 1))

    def words_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return rows ``[n, elements]`` as words; a copy of those that do not start and end on words."""
        if self.word is values.dtype:
            return values
        ratio = self.word.itemsize // values.dtype.itemsize
        are_words = ratio == 1 or (
            values.stride(1) == 1 and values.stride(0) % ratio == 0 and values.storage_offset() % ratio == 0
        )
        return (values if are_words else values.clone(memory_format=torch.contiguous_format)).view(self.word)


@functools.lru_cache(maxsize=4096)
def _rows(shape: torch.Size, strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> _Rows | None:
    """Return the rows of a view of this form; ``None`` where they are not contiguous or pages lie at odd distances."""
    elements = 1
    for extent, stride in zip(reversed(shape[2:]), reversed(strides[2:]), strict=True):
        if extent != 1 and stride != elements:
            return None
        elements *= extent
    (pages, page_size), (apart, row) = shape[:2], strides[:2]
    if page_size == 1:
        apart, row = apart, apart
    if not elements or not row or apart % row:
        return None
    gap = apart // row - page_size
    count = pages * page_size + max(0, pages - 1) * gap
    last = shape[-1] if len(shape) > 2 else 1
    item = dtype.itemsize
    for nbytes, word in _WORDS.items():
        if nbytes > item and all(extent * item % nbytes == 0 for extent in (last, *strides[: len(shape) - 1], offset)):
            return _Rows(word, count, elements * item // nbytes, row * item // nbytes, gap)
    return _Rows(_WORDS.get(item, dtype), count, elements, row, gap)


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as integers of its own width, whatever its strides."""
    return tensor.view(_WORDS.get(tensor.dtype.itemsize, tensor.dtype))


def _index(rows: _Rows, page_size: int, loc: torch.Tensor) -> torch.Tensor:
    """Return the row that each slot is."""
    slot = _wide(loc)
    return slot + _page(slot, page_size) * rows.gap if rows.gap else slot


def _wide(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers as int64: what is that already as it is, without a call that copies nothing."""
    return numbers if numbers.dtype is torch.int64 else numbers.to(torch.int64)


class _Indexed(NamedTuple):
    """Rows that were found for some slots in views of `page_size` and `gap`."""

    page_size: int
    gap: int
    slots: torch.Tensor


def _store(
    view: torch.Tensor, loc: torch.Tensor, values: torch.Tensor, known: _Indexed | None = None
) -> _Indexed | None:
    """Write `values` to the slots `loc`; return the rows that they are, for a view whose pages lie alike."""
    rows = _rows(view.shape, view.stride(), view.storage_offset(), view.dtype)
    if rows is None:
        place = _page_and_offset(loc.to(torch.int64), view.shape[1])
        _bits(view)[place] = _bits(values).reshape(loc.shape[0], *view.shape[2:])
        return None
    page_size = view.shape[1]
    if known is None or known.page_size != page_size or known.gap != rows.gap:
        known = _Indexed(page_size, rows.gap, _index(rows, page_size, loc))
    words = rows.words_of(values.reshape(loc.shape[0], view.shape[2:].numel()))
    rows.table(view).index_copy_(0, known.slots, words)
    return known


def check_values(view: torch.Tensor, n: int, values: torch.Tensor) -> None:
    """Refuse what is not `n` rows for `view`.

    Raises:
        SlotError: another number of rows, or rows of another type or length.
    """
    wanted = view.shape[2:].numel()
    if values.dtype is not view.dtype or values.shape[0] != n or values.numel() != n * wanted:
        raise SlotError(
            f"values of shape {list(values.shape)} in {values.dtype} for {n} slots of a view {list(view.shape)} in "
            f"{view.dtype}; give {n} rows of {wanted} elements of the view's type"
        )


def _page(slot: torch.Tensor, page_size: int) -> torch.Tensor:
    return slot // page_size if page_size & (page_size - 1) else slot >> (page_size.bit_length() - 1)


def _page_and_offset(slot: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    offset = slot % page_size if page_size & (page_size - 1) else slot & (page_size - 1)
    return _page(slot, page_size), offset
