"""Slots of tokens whose rows lie in two tiers: in step, on the host alone, or in a request's device buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.allocators import lengths
from kvdock.allocators.base import Shortfall, Together
from kvdock.allocators.mapped import Share
from kvdock.allocators.ring import Mark
from kvdock.allocators.tiers import TieredAllocator

if TYPE_CHECKING:
    import torch


class TierState(NamedTuple):
    """What `HiSparseAllocator.backup_state` returns."""

    mark: Mark
    sides: tuple[Any, Any, Any]
    buffers: int
    host: int


class HiSparseAllocator(TieredAllocator):
    """Numbers every token in full slots; few of them have their rows on the device, most on the host alone.

    `logical_to_device` sends a full slot to its device slot, 0 where its rows are not there, and is written page
    by page. Device pages come three ways:

    * in step with full pages (`alloc`, `alloc_extend`, `alloc_decode`), until `free_device_rows` gives back those
      of tokens that were copied to the host. What has a device page is always a request's newest tokens.
    * not at all: `alloc_logical_extend` numbers tokens that are written to the host directly.
    * as a request's buffer (`alloc_device_buffer`): pages that its steps read from, which map to nothing, since
      each layer keeps other rows there, and a page for its newest tokens, which is mapped. Its tokens have no
      device pages of their own from then on: `alloc_decode` lays them into the newest page, which moves on to the
      next full page when it is full. Rows that leave it are on the host by then.

    Host slots are a request's own (`reserve_host`), one a token, in the order of its tokens. Buffers and host
    slots stand in tables by request row, and go back together in `release`. Requests are known by the request
    pool that this allocator was built with; `owners` are requests of it, not names for messages alone.
    """

    features = frozenset({"hisparse", "disaggregation"})

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Sequence[int] | torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return the full slots of a batch that grows, each with a device slot; ``None`` if either side is short.

        Raises:
            SlotError: lengths that contradict each other or `extend_num_tokens`, another number of requests in
                one argument than in the others, or a request with a device buffer; with debug, device lengths
                other than the host's, or a `last_loc` that is not where the request's last token can be, or
                whose rows are not on the device. Nothing is taken.
        """
        growth = lengths.extend_growth((prefix_lens_cpu, seq_lens_cpu), extend_num_tokens, self.page_size)
        self._refuse_buffered(owners)
        self.verify_growth(growth, {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "last_loc": last_loc}, owners)
        batch = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, owners)
        share = Share(growth.page_count, self._page_owners(owners, growth))
        return self._grown(growth, lambda: self.full.alloc_extend(*batch), share)

    def alloc_logical_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Sequence[int] | torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return the full slots of a batch whose rows go to the host directly; ``None`` if there are too few.

        No device slot is taken and the new pages map to 0, as if their device pages had been given back: the
        `device_starts` of such a row is where it ends. Its host slots are reserved by `reserve_host`.

        Raises:
            SlotError: what `alloc_extend` refuses, but for rows that are not on the device. Nothing is taken.
        """
        growth = lengths.extend_growth((prefix_lens_cpu, seq_lens_cpu), extend_num_tokens, self.page_size)
        self._refuse_buffered(owners)
        on_device = {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "last_loc": last_loc}
        self.full.verify_growth(growth, on_device, owners)
        batch = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, owners)
        share = Share(0, words=lambda pages: pages.new_zeros(growth.page_count))
        return self._grown(growth, lambda: self.full.alloc_extend(*batch), share)

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return one full slot a request, each with a device slot; ``None`` if either side is short.

        A request with a device buffer takes no new device page: a new full page maps to its newest page, and
        the full page that was there to nothing. `owners` names the requests, which is needed while any holds a buffer.

        Raises:
            SlotError: a length below 1, and what `alloc_extend` refuses; `owners` are missing; a request with a
                buffer goes on in a page that its newest page does not hold (`map_newest`), or would lose rows
                for which it reserved no host slots. Nothing is taken.
        """
        growth = lengths.decode_growth(seq_lens_cpu, self.page_size)
        placed = self._buffers.place(growth, owners)
        leaves = placed.heads[placed.is_held]
        for request, tokens in zip(placed.requests, growth.prefix[leaves].tolist(), strict=True):
            self._host_slots.require(request, tokens)
        self.verify_growth(growth, {"seq_lens": seq_lens, "last_loc": last_loc}, owners)
        own = placed.heads[~placed.is_held].tolist()
        names = [owners[i] for i in own] if owners is not None and self.parts.debug else None
        pages = (growth.prefix[leaves] // self.page_size).tolist()
        left = leaves[self._buffers.holds(placed.requests, [page - 1 for page in pages])]
        last = last_loc.index_select(0, lengths.to_device(left, last_loc.device))
        gone = self._pages_of(last).to(self._map.dtype)
        share = Share(len(own), names, lambda pages: self._buffers.words(placed, pages))
        before = self.backup_state()
        slots = self._grown(growth, lambda: self.full.alloc_decode(seq_lens, seq_lens_cpu, last_loc, owners), share)
        if slots is not None and placed.requests:
            self._unmap(gone, before)
            self._buffers.move_on(placed.requests, pages)
            self._freed()
        return slots

    def _unmap(self, pages: torch.Tensor, before: TierState) -> None:
        """Map pages that a newest page left to nothing, or go back to `before`, when they still held it."""
        words = None
        try:
            words = self._mapped(pages)
            self._erase(pages)
        except BaseException:
            self.restore_state(before)
            if words is not None:
                self._write(pages, words)
            raise

    def free_pages(self, pages: torch.Tensor, has_device: bool = True) -> None:
        """Give back full pages; `has_device` says whether all of them or none have device pages of their own.

        Raises:
            SlotError: more pages than are live; nothing changes.
        """
        lengths.require_integers("pages", pages)
        pages = pages.to(self._map.dtype)
        self._free_both(pages, pages if has_device else pages[:0])

    def free_rows(
        self,
        table: torch.Tensor,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        device_starts: Sequence[int] | None = None,
    ) -> None:
        """Give back the tokens ``starts[i] … ends[i]`` of request rows, and device pages that are their own.

        `device_starts` is where `free_device_rows` ended for each row, or a logical extend did (default:
        `starts`): pages that begin before it have none. Neither have those of a request with a buffer.

        Raises:
            SlotError: a range outside the table, or more pages than are live; nothing changes.
        """
        ranges = lengths.checked_ranges(table.shape, rows, starts, ends)
        live = self._live_bounds(ranges, starts if device_starts is None else device_starts)
        self._free_bounds(table, ranges.page_bounds(self.page_size), live)

    def free_device_pages(self, pages: torch.Tensor) -> None:
        """Give back the device pages of full pages that have one of their own; never waits for the device."""
        lengths.require_integers("pages", pages)
        self._free_side_of(pages.to(self._map.dtype))

    def free_device_rows(
        self, table: torch.Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Give back the device pages of the tokens ``starts[i] … ends[i]``; their full slots stay, and map to 0.

        For tokens that were copied to the host; those of a request with a buffer have none. A page of which any token is in the range goes back whole, so
        an end is a page bound unless the request gets a buffer next. Never waits for the device.

        Raises:
            SlotError: a range outside the table, or more pages than are live; nothing changes.
        """
        ranges = lengths.checked_ranges(table.shape, rows, starts, ends)
        # What begins inside a page gives back that page: the rest of it stays with nobody.
        begins = ranges.starts // self.page_size * self.page_size
        self._free_side_of(self._live_bounds(ranges, begins).pages(table, self.parts.kernels))

    def full_available_size(self) -> int:
        """Return the free full slots."""
        return self.full.available_size()

    def device_available_size(self) -> int:
        """Return the free device slots."""
        return self.device.available_size()

    def host_available_size(self) -> int:
        """Return the free host slots."""
        return self.host.available_size()

    def shortfall(self, pages: int, device_pages: int | None = None, host_pages: int = 0) -> tuple[Shortfall, ...]:
        """Say which tier lacks how many slots for `pages` full pages, `device_pages` on the device (default: all), and host pages."""
        on_device = pages if device_pages is None else device_pages
        return self.full.shortfall(pages) + self.device.shortfall(on_device) + self.host.shortfall(host_pages)

    def backup_state(self) -> TierState:
        """Return a token of the present allocations of all tiers."""
        sides = self.full.backup_state(), self.device.backup_state(), self.host.backup_state()
        return TierState(self._journal.mark(), sides, self._buffers.mark(), self._host_slots.mark())

    def restore_state(self, state: Any) -> None:
        """Take back what was handed out since `state`, what requests reserved and grew included.

        Raises:
            SlotError: something was freed since, a request got a buffer or its newest page moved on, or `state`
                is not of this allocator; nothing changes.
        """
        with Together(self):
            self._journal.rewind(state.mark if isinstance(state, TierState) else None)
            for side, before in zip((self.full, self.device, self.host), state.sides, strict=True):
                side.restore_state(before)
        self._buffers.undo(state.buffers)
        self._host_slots.undo(state.host)
