"""Full and sliding slots in step: one numbering for requests, and a map to the sliding layers' pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.allocators import lengths, window
from kvdock.allocators.base import Shortfall, Together
from kvdock.allocators.debug import held_pages
from kvdock.allocators.mapped import MappedAllocator
from kvdock.allocators.ring import Journal, Mark
from kvdock.errors import BuildError, SlotError
from kvdock.layout import FULL, SWA, Buffer, Unit
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery

if TYPE_CHECKING:
    import torch

    Lens = Sequence[int] | torch.Tensor
    Batch = tuple[torch.Tensor, Lens, torch.Tensor, Lens, torch.Tensor, int]


class SWAState(NamedTuple):
    """What `SWAAllocator.backup_state` returns."""

    mark: Mark
    full: Any
    swa: Any


class SWAAllocator(MappedAllocator):
    """Hands out a full and a sliding slot for each token; requests are numbered in full slots.

    Both sides get the same layout, so a full page pairs with one sliding page and a slot keeps its offset.
    `full_to_swa` maps page to page; 0 (padding) where the sliding page was given back or never taken, and
    every slot of such a page translates to slot 0. A page's word is written when it is handed out, so a
    request that grows inside a page writes nothing.

    Tokens leave the window from the oldest on. A sliding page goes back whole, together with its *last*
    token: a page that is partly visible is kept and stays mapped. `free_swa_rows` therefore takes each row's
    ranges in order, each starting where the one before ended, and never one twice; `free_rows` is told in
    `swa_starts` how far that went. Neither waits for the device. The token forms `free` and `free_swa` look
    at the map instead, and wait once.

    After `restore_state` the map of pages that are not live is left as it is. The inner allocators are driven
    by this class alone, through the interface of `Allocator`.
    """

    features = frozenset({"disaggregation"})
    """A decode worker takes tails; in which order pages come is the sides' own, and they are asked for it, too."""

    def __init__(self, query: AllocatorQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.page_size = window.common_page_size(query)
        self.full, self.swa = parts.allocators[FULL], parts.allocators[SWA]
        self.numbering, self.side = self.full, self.swa
        self.slot_dtype = self.full.slot_dtype
        self._tiers = {FULL: self.full, SWA: self.swa}
        self.size = self.full.size
        self.full_to_swa = self._map = parts.tensors.rows("full_to_swa")
        if self.full_to_swa.shape[0] != self.size // self.page_size + 1:
            raise BuildError(
                f"the map full_to_swa has {self.full_to_swa.shape[0]} rows for {self.size} full slots in pages of "
                f"{self.page_size} and a padding page; build with the plan's own sizes"
            )
        self._journal = Journal("spaces 'full' and 'swa'")
        self._erase()

    @classmethod
    def buffers(cls, query: AllocatorQuery) -> tuple[Buffer, ...]:
        """Declare the map, 8 bytes a full page; the inner allocators declare their own.

        Raises:
            PlanError: the spaces are not ``full`` and ``swa``, or have different page sizes.
        """
        window.common_page_size(query)
        return (Buffer(name="full_to_swa", role="map", space=FULL, unit=Unit.PAGE, shape=(), dtype="int64"),)

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
        """Return the full slots of a batch that grows; ``None`` if either side is short.

        Raises:
            SlotError: lengths that contradict each other or `extend_num_tokens`, or another number of requests
                in one argument than in the others; with debug, device lengths other than the host's, or a
                `last_loc` that is not where the request's last token can be. Nothing is taken.
        """
        batch = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens)
        return self._extended(batch, None, owners)

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
        """Return the full slots of a batch of which only the newest `swa_tail_lens` tokens get sliding slots.

        A tail begins at a page bound (`swa_tail_start`); the tokens before it translate to 0, as if they had
        left the window, so that is where `free_swa_rows` starts and what `swa_starts` names. What a request
        held on the sliding side before is left as it is. ``None`` if either side is short.

        Raises:
            SlotError: what `alloc_extend` refuses, a tail below 0, or one that starts behind the page in which
                its request goes on. Nothing is taken.
        """
        batch = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens)
        return self._extended(batch, swa_tail_lens, owners)

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return one full slot a request; ``None`` if either side is short.

        Raises:
            SlotError: a length below 1, and what `alloc_extend` refuses. Nothing is taken.
        """
        growth = lengths.decode_growth(seq_lens_cpu, self.page_size)
        self.verify_growth(growth, {"seq_lens": seq_lens, "last_loc": last_loc}, owners)
        batch = (seq_lens, seq_lens_cpu, last_loc, owners)
        share = window.sliding_share(growth, None, owners, self.parts.debug)
        return self._grown(growth, lambda: self.full.alloc_decode(*batch), share)

    def translate(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the sliding slots of full slots: −1 for −1, 0 where the sliding page is not there."""
        return self.parts.kernels.translate(self.full_to_swa, loc, self.page_size)

    def free_pages(self, pages: torch.Tensor, has_swa: bool = True) -> None:
        """Give back full pages; `has_swa` says whether all of them or none still have a sliding page.

        Raises:
            SlotError: more pages than are live; nothing changes.
        """
        lengths.require_row("pages", pages)
        pages = pages.to(self._map.dtype)
        self._free_both(pages, pages if has_swa else pages[:0])

    def free_rows(
        self,
        table: torch.Tensor,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        swa_starts: Sequence[int] | None = None,
    ) -> None:
        """Give back the tokens ``starts[i] … ends[i]`` of request rows, both sides.

        `swa_starts` is where `free_swa_rows` ended for each row (default: `starts`): the sliding pages that
        it gave back are not given back again.

        Raises:
            SlotError: a range outside the table, or more pages than are live; nothing changes.
        """
        ranges = lengths.checked_ranges(table.shape, rows, starts, ends)
        whole = ranges.page_bounds(self.page_size)
        if swa_starts is None:
            pages = whole.pages(table, self.parts.kernels)
            self._free_both(pages, pages)
        else:
            self._free_bounds(table, whole, whole.from_tokens(window.checked_swa_starts(ranges, swa_starts)))

    def free_swa(self, indices: torch.Tensor) -> None:
        """Give back the sliding pages whose last token is among these full slots; those without one are skipped.

        Waits for the device once.
        """
        lengths.require_integers("slots", indices)
        slots = indices.reshape(-1).to(self._map.dtype)
        is_last = slots % self.page_size == self.page_size - 1
        # Page 0 has no sliding page, so a token that is not the last of its page is skipped as well.
        pages, swa_pages = self._looked_up(self._pages_of(slots) * is_last)
        self._free_side_of(lengths.to_device(pages[swa_pages != 0], indices.device))

    def free_swa_pages(self, pages: torch.Tensor) -> None:
        """Give back the sliding pages of full pages that still have one; never waits for the device."""
        lengths.require_row("pages", pages)
        self._free_side_of(pages.to(self._map.dtype))

    def free_swa_rows(
        self, table: torch.Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Give back the sliding pages whose last token is in ``starts[i] … ends[i]``; never waits for the device.

        Ranges of one row follow each other: a start that is no page bound continues the range before it.

        Raises:
            SlotError: a range outside the table, or more pages than are live; nothing changes.
        """
        bounds = lengths.checked_ranges(table.shape, rows, starts, ends).finished_page_bounds(self.page_size)
        self._free_side_of(bounds.pages(table, self.parts.kernels))

    def full_available_size(self) -> int:
        """Return the free slots of the full side."""
        return self.full.available_size()

    def swa_available_size(self) -> int:
        """Return the free slots of the sliding side."""
        return self.swa.available_size()

    def swa_pages_needed(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], swa_tail_lens: Sequence[int]
    ) -> int:
        """Return the new sliding pages that `alloc_extend_swa_tail` takes; `pages_needed` is the full side.

        Raises:
            SlotError: what `alloc_extend_swa_tail` refuses of these lengths.
        """
        return window.tail_pages_needed(prefix_lens, seq_lens, swa_tail_lens, self.page_size)

    def shortfall(self, pages: int, swa_pages: int | None = None) -> tuple[Shortfall, ...]:
        """Say which side lacks how many slots for `pages` pages, `swa_pages` of them on the sliding side (default: all)."""
        return self.full.shortfall(pages) + self.swa.shortfall(pages if swa_pages is None else swa_pages)

    def backup_state(self) -> SWAState:
        """Return a token of the present allocations of both sides."""
        return SWAState(self._journal.mark(), self.full.backup_state(), self.swa.backup_state())

    def restore_state(self, state: Any) -> None:
        """Take back what both sides handed out since `state`; the map keeps what it held.

        Raises:
            SlotError: something was freed on either side since, or `state` is not of this allocator.
        """
        self._enter()
        with Together(self):
            self._journal.rewind(state.mark if isinstance(state, SWAState) else None)
            self.full.restore_state(state.full)
            self.swa.restore_state(state.swa)

    def check(self, held: torch.Tensor | None = None) -> None:
        """Verify both sides, and that the live sliding pages are exactly those that live full pages map to.

        What an open free group holds is mapped to nothing any more, and may be among `held` or not.

        Raises:
            SlotError: names the slots that leaked, are free twice, or are held but free.
        """
        import torch

        self.full.check(held)
        if held is not None:
            pages = torch.from_numpy(held_pages(held, self.page_size, self.size // self.page_size, self._journal.name))
        else:
            live = self.live_pages()
            if live is None:
                self.swa.check()
                return
            pages = torch.tensor(live, dtype=torch.int64)
        mapped = self.full_to_swa[pages.to(self.full_to_swa.device)]
        mapped = mapped[mapped != 0]
        if torch.unique(mapped).numel() != mapped.numel():
            raise SlotError("two full pages map to one sliding page; the map full_to_swa is damaged")
        self.swa.check(mapped * self.page_size)

    def _extended(self, batch: Batch, swa_tail_lens: Lens | None, owners: Sequence[Any] | None) -> torch.Tensor | None:
        prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, tokens = batch
        growth = lengths.extend_growth((prefix_lens_cpu, seq_lens_cpu), tokens, self.page_size)
        tails = None if swa_tail_lens is None else window.tail_growth(growth, swa_tail_lens)
        on_device = {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "last_loc": last_loc}
        self.verify_growth(growth, on_device, owners)
        share = window.sliding_share(growth, tails, owners, self.parts.debug)
        return self._grown(growth, lambda: self.full.alloc_extend(*batch, owners), share)

    def _mapped(self, pages: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa.index_select(0, pages)

    def _write(self, pages: torch.Tensor, words: torch.Tensor) -> None:
        self.full_to_swa.scatter_(0, pages, words)

    def _erase(self, pages: torch.Tensor | None = None) -> None:
        if pages is None:
            self.full_to_swa.zero_()
        else:
            self.full_to_swa.index_fill_(0, pages, 0)

    def _freed_before(self, named: str) -> SlotError:
        return SlotError(
            f"sliding slots{named} are freed twice: some of these tokens left the window before; say so with "
            "hold_prefix(request, evicted=…), or pass swa_starts to free_rows, has_swa=False to free_pages, and "
            "each range once to free_swa_rows"
        )
