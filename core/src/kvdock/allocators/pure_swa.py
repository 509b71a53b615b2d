"""Where every layer slides: requests are numbered in sliding slots, so one pool and no map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdock.allocators import lengths, window
from kvdock.allocators.base import Shortfall
from kvdock.allocators.paged import PagedAllocator
from kvdock.allocators.sorted import SortedAllocator
from kvdock.allocators.token import TokenAllocator

if TYPE_CHECKING:
    import torch


class PureSWAAllocator(PagedAllocator):
    """Hands out sliding slots that are the requests' own; it has the interface of `SWAAllocator`.

    A token that leaves the window takes its slot along: its page goes back whole, together with its *last*
    token. What went back once is never freed again, so `free_rows` is told in `swa_starts` how far
    `free_swa_rows` (or a tail) went, and `free` gets slots that are still live.
    """

    def alloc_extend_swa_tail(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Sequence[int] | torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        swa_tail_lens: Sequence[int] | torch.Tensor,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return slots for the newest `swa_tail_lens` tokens of each request, and 0 (padding) for those before.

        The tail begins at a page bound (`swa_tail_start`); name it as `swa_starts` when the row is freed.

        Raises:
            SlotError: what `alloc_extend` refuses, and tails that do not fit the batch. Nothing is taken.
        """
        extend_num_tokens = lengths.whole_count(extend_num_tokens, "extend_num_tokens")
        growth = lengths.extend_growth((prefix_lens_cpu, seq_lens_cpu), extend_num_tokens, self.page_size)
        tails = window.tail_growth(growth, swa_tail_lens)
        self.verify_growth(growth, {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "last_loc": last_loc}, owners)
        kernels, size = self.parts.kernels, self.page_size

        def to_slots(pages: torch.Tensor) -> torch.Tensor:
            spread = window.among_new_pages(tails, pages)
            slots = kernels.alloc_extend(prefix_lens, seq_lens, last_loc, spread, size, extend_num_tokens)
            return slots.masked_fill_(slots < size, 0)

        return self._grown(tails, owners, to_slots)

    def free(self, indices: torch.Tensor) -> None:
        """Give back the pages of these tokens; 0, as before a tail, is none (with debug it is refused). Waits once."""
        lengths.require_integers("slots", indices)
        super().free(indices if self.parts.debug else indices[indices != 0])

    def translate(self, loc: torch.Tensor) -> torch.Tensor:
        """Return `loc` as int64: the slots of requests are the sliding slots; −1 stays −1."""
        return loc.long()

    def free_pages(self, pages: torch.Tensor, has_swa: bool = True) -> None:
        """Give back pages by number, each named once; none where `has_swa` says that they went back before."""
        if has_swa:
            super().free_pages(pages)

    def free_rows(
        self,
        table: torch.Tensor,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        swa_starts: Sequence[int] | None = None,
    ) -> None:
        """Give back the tokens ``starts[i] … ends[i]`` of request rows, but for pages wholly before `swa_starts`.

        `swa_starts` is where `free_swa_rows` ended for each row, or where its tail began (default: `starts`).

        Raises:
            SlotError: a range outside the table, or more pages than are live; nothing changes.
        """
        ranges = lengths.checked_ranges(table.shape, rows, starts, ends)
        bounds = ranges.page_bounds(self.page_size)
        if swa_starts is not None:
            bounds = bounds.from_tokens(window.checked_swa_starts(ranges, swa_starts))
        self.free_pages(bounds.pages(table, self.parts.kernels))

    def free_swa(self, indices: torch.Tensor) -> None:
        """Give back the pages whose last token is among these slots; padding is skipped. Waits for the device once."""
        import numpy as np

        lengths.require_integers("slots", indices)
        slots = lengths.to_host(indices)
        pages = slots[slots % self.page_size == self.page_size - 1] // self.page_size
        self.free_pages(lengths.to_device(np.unique(pages[pages > 0]), indices.device))

    def free_swa_pages(self, pages: torch.Tensor) -> None:
        """Give back pages by number; never waits for the device."""
        self.free_pages(pages)

    def free_swa_rows(
        self, table: torch.Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Give back the pages whose last token is in ``starts[i] … ends[i]``; never waits for the device.

        Ranges of one row follow each other: a start that is no page bound continues the range before it.

        Raises:
            SlotError: a range outside the table, or more pages than are live; nothing changes.
        """
        bounds = lengths.checked_ranges(table.shape, rows, starts, ends).finished_page_bounds(self.page_size)
        self.free_pages(bounds.pages(table, self.parts.kernels))

    def full_available_size(self) -> int:
        """Return the free slots, which are both sides' at once."""
        return self.available_size()

    def swa_available_size(self) -> int:
        """Return the free slots."""
        return self.available_size()

    def swa_pages_needed(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], swa_tail_lens: Sequence[int]
    ) -> int:
        """Return the new pages that `alloc_extend_swa_tail` takes.

        Raises:
            SlotError: what `alloc_extend_swa_tail` refuses of these lengths.
        """
        return window.tail_pages_needed(prefix_lens, seq_lens, swa_tail_lens, self.page_size)

    def shortfall(self, pages: int, swa_pages: int | None = None) -> tuple[Shortfall, ...]:
        """Say how many slots are missing for `pages` pages, of which a tail takes `swa_pages` alone."""
        return super().shortfall(pages if swa_pages is None else swa_pages)


class PureSWATokenAllocator(PureSWAAllocator, TokenAllocator):
    """The same for pages of one token, without page arithmetic."""


class PureSWASortedAllocator(PureSWAAllocator, SortedAllocator):
    """The same for caches that are sent away: pages in ascending order, in long runs."""
