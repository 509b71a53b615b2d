"""The kernel set in plain torch: runs on every device that torch serves and defines the results.

Views are ``[pages, page_size, *shape]`` with any strides. Locations are widened to int64 before any
arithmetic, and no method reads a value back to the host: it runs on meta tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.kernels.interface import Kernels


class ReferenceKernels(Kernels):
    """Stores, gathers and page arithmetic as torch operations."""

    def store(self, view: torch.Tensor, loc: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values[i]`` to slot ``loc[i]``; of a slot named twice, either value may stay."""
        target, index = _addressed(view, loc)
        target[index] = values

    def store_kv(
        self, k_view: torch.Tensor, v_view: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write keys, then values, of the same slots."""
        self.store(k_view, loc, k)
        self.store(v_view, loc, v)

    def store_mla(self, view: torch.Tensor, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Write `latent` to the first columns and `rope` to the last ones; ``[n, dim]`` or ``[n, 1, dim]`` each."""
        heads = view.shape[2:-1]
        lora, rest = latent.shape[-1], rope.shape[-1]
        self.store(view[..., :lora], loc, latent.reshape(-1, *heads, lora))
        self.store(view[..., view.shape[-1] - rest :], loc, rope.reshape(-1, *heads, rest))

    def gather(self, view: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows at `loc`."""
        source, index = _addressed(view, loc)
        return source[index] if isinstance(index, tuple) else source.index_select(0, index)

    def move(self, views: Sequence[torch.Tensor], tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots within each view; overlapping moves are safe, since the sources are gathered first."""
        for view in views:
            self.store(view, tgt_loc, self.gather(view, src_loc))

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        new_pages: torch.Tensor,
        page_size: int,
        extend_num_tokens: int,
    ) -> torch.Tensor:
        """Return the slots of an extend, page by page.

        Each request has one segment for the rest of its last page (often empty), then one a new page; the
        slots of a segment are consecutive, so only two operations are as long as the tokens.
        """
        prefix, seq = prefix_lens.to(torch.int64), seq_lens.to(torch.int64)
        pages_before, pages_after = _ceil_div(prefix, page_size), _ceil_div(seq, page_size)
        pages = pages_after - pages_before
        batch, count = prefix.shape[0], new_pages.shape[0]
        request = torch.arange(batch, device=prefix.device)
        head = pages.cumsum(0) - pages + request
        of_page = torch.repeat_interleave(request, pages, output_size=count)

        base = new_pages.new_empty(batch + count, dtype=torch.int64)
        base[head] = last_loc.to(torch.int64) + 1
        base[torch.arange(1, count + 1, device=prefix.device) + of_page] = new_pages.to(torch.int64) * page_size

        lengths = torch.full_like(base, page_size)
        lengths[head + pages] = seq - (pages_after - 1) * page_size
        lengths[head] = torch.minimum(seq, pages_before * page_size) - prefix

        shift = base - (lengths.cumsum(0) - lengths)
        slots = torch.repeat_interleave(shift, lengths, output_size=extend_num_tokens)
        return slots.add_(torch.arange(extend_num_tokens, device=prefix.device))

    def alloc_decode(
        self, seq_lens: torch.Tensor, last_loc: torch.Tensor, new_pages: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        """Return each request's next slot: the one after its last, or the first of the next new page."""
        following = last_loc.to(torch.int64) + 1
        if new_pages.shape[0] == 0:
            return following
        starts_page = (seq_lens.to(torch.int64) - 1) % page_size == 0
        turn = (starts_page.cumsum(0) - 1).clamp_(min=0)
        return torch.where(starts_page, new_pages.to(torch.int64)[turn] * page_size, following)

    def write_rows(self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``slots[i]`` to ``table[rows[i], columns[i]]`` in one scatter; rows and columns exist."""
        row, column, words = rows.to(torch.int64), columns.to(torch.int64), slots.to(table.dtype)
        if table.is_contiguous():
            table.view(-1).scatter_(0, row * table.shape[1] + column, words)
        else:
            table[row, column] = words

    def translate(self, mapping: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
        """Return ``mapping[loc]`` as int64; −1 stays −1."""
        wide = loc.to(torch.int64)
        found = mapping.index_select(0, wide.clamp(min=0).reshape(-1)).view(wide.shape)
        return torch.where(wide < 0, wide, found.to(torch.int64))


def _ceil_div(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (lens + (page_size - 1)) // page_size


def _addressed(
    view: torch.Tensor, loc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """Return a tensor and an index into it that reach the slots `loc` of `view`.

    A view whose pages follow each other without gaps is addressed by row, which saves the division.
    """
    slot = loc.to(torch.int64)
    page_size = view.shape[1]
    if page_size == 1:
        return view[:, 0], slot
    if view.stride(0) == page_size * view.stride(1):
        return view.flatten(0, 1), slot
    return view, _page_and_offset(slot, page_size)


def _page_and_offset(slot: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    if page_size & (page_size - 1):
        return slot // page_size, slot % page_size
    return slot >> (page_size.bit_length() - 1), slot & (page_size - 1)
