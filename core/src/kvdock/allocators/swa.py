"""Full and sliding slots in step: one numbering for requests, and a map to the sliding layers' slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.allocators import lengths
from kvdock.allocators.base import Allocator, Shortfall
from kvdock.allocators.debug import named_holders
from kvdock.allocators.paged import PagedAllocator
from kvdock.allocators.ring import Journal, Mark
from kvdock.errors import BuildError, PlanError, SlotError
from kvdock.layout import FULL, SWA, Buffer, Unit
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery

if TYPE_CHECKING:
    import torch


class SWAState(NamedTuple):
    """What `SWAAllocator.backup_state` returns."""

    mark: Mark
    full: Any
    swa: Any


class SWAAllocator(Allocator):
    """Hands out a full and a sliding slot for each token; requests are numbered in full slots.

    Both sides get the same layout, so a full page pairs with one sliding page and a slot keeps its offset.
    `full_to_swa` maps slot to slot; 0 (padding) where the sliding slot was given back.

    Tokens leave the window from the oldest on. A sliding page goes back whole, together with its *last*
    token: a page that is partly visible is kept and stays mapped. `free_swa_rows` therefore takes each row's
    ranges in order, each starting where the one before ended, and never one twice; `free_rows` is told in
    `swa_starts` how far that went. Neither waits for the device. The token forms `free` and `free_swa` look
    at the map instead, and wait once.

    After `restore_state` the map of slots that are not live is left as it is; a slot's entry is written when
    it is handed out. The inner allocators are driven by this class alone.
    """

    def __init__(self, query: AllocatorQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.page_size = _common_page_size(query)
        self.full, self.swa = parts.allocators[FULL], parts.allocators[SWA]
        self.size = self.full.size
        self.full_to_swa = parts.tensors.rows("full_to_swa")
        if self.full_to_swa.shape[0] != self.size + self.page_size:
            raise BuildError(
                f"the map full_to_swa has {self.full_to_swa.shape[0]} rows for {self.size} full slots and one padding "
                f"page of {self.page_size}; build with the plan's own sizes"
            )
        self._map_by_page = self.full_to_swa.view(-1, self.page_size)
        self._journal = Journal("spaces 'full' and 'swa'")
        self._grouping = False
        self.full_to_swa.zero_()

    @classmethod
    def buffers(cls, query: AllocatorQuery) -> tuple[Buffer, ...]:
        """Declare the map, 8 bytes a full slot; the inner allocators declare their own.

        Raises:
            PlanError: the spaces are not ``full`` and ``swa``, or have different page sizes.
        """
        page_size = _common_page_size(query)
        return (
            Buffer(
                name="full_to_swa",
                role="map",
                space=FULL,
                unit=Unit.SLOT,
                guard=page_size,
                shape=(),
                dtype="int64",
            ),
        )

    def alloc(self, need_size: int, owner: Any = None) -> torch.Tensor | None:
        """Return `need_size` full slots, each mapped to a sliding one; ``None`` if either side is short."""
        if need_size > self.available_size():
            return None
        return self._pair(self.full.alloc(need_size, owner), self.swa.alloc(need_size, owner))

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
        growth = lengths.extend_growth((prefix_lens_cpu, seq_lens_cpu), extend_num_tokens, self.page_size)
        on_device = {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "last_loc": last_loc}
        swa_last = self._verify_growth(growth, on_device, owners)
        if int(growth.new_pages.sum()) * self.page_size > self.available_size():
            return None
        batch = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu)
        full = self.full.alloc_extend(*batch, last_loc, extend_num_tokens, owners)
        swa = self.swa.alloc_extend(*batch, swa_last, extend_num_tokens, owners)
        return self._pair(full, swa)

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
        swa_last = self._verify_growth(growth, {"seq_lens": seq_lens, "last_loc": last_loc}, owners)
        if int(growth.new_pages.sum()) * self.page_size > self.available_size():
            return None
        full = self.full.alloc_decode(seq_lens, seq_lens_cpu, last_loc, owners)
        swa = self.swa.alloc_decode(seq_lens, seq_lens_cpu, swa_last, owners)
        return self._pair(full, swa)

    def translate(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the sliding slots of full slots: −1 for −1, 0 where the sliding slot was given back."""
        return self.parts.kernels.translate(self.full_to_swa, loc)

    def free(self, indices: torch.Tensor) -> None:
        """Give back the full pages of these tokens, and their sliding pages where there still are any.

        Waits for the device once.
        """
        _verify_slots(self.full, indices)
        numbers, mapped = self._looked_up(self._pages_of(indices.reshape(-1).to(self.full_to_swa.dtype)))
        pages, swa_pages = (lengths.to_device(found, indices.device) for found in (numbers, mapped[mapped != 0]))
        _verify(self.swa, swa_pages)
        if self._grouping:
            # Several token frees of one group may name one full page; the inner group reduces them at its end.
            self.full.free(indices)
        else:
            self.full.free_pages(pages)
        self._drop(pages, swa_pages)

    def free_pages(self, pages: torch.Tensor, has_swa: bool = True) -> None:
        """Give back full pages; `has_swa` says whether all of them or none still have a sliding page.

        Raises:
            SlotError: more pages than are live; nothing changes.
        """
        pages = pages.to(self.full_to_swa.dtype)
        self._free_both(pages, self._mapped_pages(pages) if has_swa else pages[:0])

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
        pages = whole.pages(table)
        if swa_starts is None:
            self._free_both(pages, self._mapped_pages(pages))
            return
        live = whole.from_tokens(_checked_swa_starts(ranges, swa_starts))
        chosen = lengths.to_device(live.positions_in(whole), table.device)
        self._free_both(pages, self._mapped_pages(pages[chosen]))

    def free_swa(self, indices: torch.Tensor) -> None:
        """Give back the sliding pages whose last token is among these full slots; those without one are skipped.

        Waits for the device once.
        """
        slots = indices.reshape(-1).to(self.full_to_swa.dtype)
        is_last = slots % self.page_size == self.page_size - 1
        # Page 0 has no sliding page, so a token that is not the last of its page is skipped as well.
        pages, swa_pages = self._looked_up(self._pages_of(slots) * is_last)
        found = lengths.to_device(pages[swa_pages != 0], indices.device)
        self._free_swa_of(found)

    def free_swa_pages(self, pages: torch.Tensor) -> None:
        """Give back the sliding pages of full pages that still have one; never waits for the device."""
        self._free_swa_of(pages.to(self.full_to_swa.dtype))

    def free_swa_rows(
        self, table: torch.Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Give back the sliding pages whose last token is in ``starts[i] … ends[i]``; never waits for the device.

        Ranges of one row follow each other: a start that is no page bound continues the range before it.

        Raises:
            SlotError: a range outside the table, or more pages than are live; nothing changes.
        """
        bounds = lengths.checked_ranges(table.shape, rows, starts, ends).finished_page_bounds(self.page_size)
        self._free_swa_of(bounds.pages(table))

    def available_size(self) -> int:
        """Return the slots that both sides could hand out now."""
        return min(self.full_available_size(), self.swa_available_size())

    def full_available_size(self) -> int:
        """Return the free slots of the full side."""
        return self.full.available_size()

    def swa_available_size(self) -> int:
        """Return the free slots of the sliding side."""
        return self.swa.available_size()

    def pages_needed(self, prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
        """Return the new pages, the same on both sides."""
        return self.full.pages_needed(prefix_lens, seq_lens)

    def shortfall(self, pages: int) -> tuple[Shortfall, ...]:
        """Say which side lacks how many slots."""
        return self.full.shortfall(pages) + self.swa.shortfall(pages)

    def verify_live(self, slots: torch.Tensor) -> None:
        """With debug, verify that full `slots` may be written: handed out, or padding."""
        if isinstance(self.full, PagedAllocator):
            self.full.verify_live(slots)

    def free_group_begin(self) -> None:
        """Collect the frees that follow; sliding pages are looked up when they are queued."""
        self.full.free_group_begin()
        self.swa.free_group_begin()
        self._grouping = True

    def free_group_end(self) -> None:
        """Give back what was collected, on both sides."""
        self._grouping = False
        try:
            self.full.free_group_end()
        finally:
            self.swa.free_group_end()

    def backup_state(self) -> SWAState:
        """Return a token of the present allocations of both sides."""
        return SWAState(self._journal.mark(), self.full.backup_state(), self.swa.backup_state())

    def restore_state(self, state: Any) -> None:
        """Take back what both sides handed out since `state`; the map keeps what it held.

        Raises:
            SlotError: something was freed on either side since, or `state` is not of this allocator.
        """
        self._journal.rewind(state.mark if isinstance(state, SWAState) else state)
        self.full.restore_state(state.full)
        self.swa.restore_state(state.swa)

    def clear(self) -> None:
        """Make every slot of both sides free again and map nothing."""
        self.full.clear()
        self.swa.clear()
        self._forget()

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Change the usable slots of ``full``, ``swa`` or both.

        Raises:
            SlotError: a side has live slots or a size exceeds its buffers; neither side changes.
        """
        unknown = sorted(set(sizes) - {FULL, SWA})
        if unknown:
            raise SlotError(f"resize names {unknown}; this allocator holds 'full' and 'swa'")
        before = self.full.size
        self.full.resize({FULL: sizes.get(FULL, before)})
        try:
            self.swa.resize({SWA: sizes.get(SWA, self.swa.size)})
        except SlotError:
            self.full.resize({FULL: before})
            raise
        self.size = self.full.size
        self._forget()

    def check(self, held: torch.Tensor | None = None) -> None:
        """Verify both sides, and that the live sliding pages are exactly those that live full pages map to.

        Raises:
            SlotError: names the slots that leaked, are free twice, or are held but free.
        """
        import torch

        self.full.check(held)
        if held is not None:
            pages = torch.unique(held.to(torch.int64) // self.page_size)
        elif isinstance(self.full, PagedAllocator):
            pages = torch.tensor(self.full.live_pages(), dtype=torch.int64, device=self.full_to_swa.device)
        else:
            self.swa.check()
            return
        mapped = self._map_by_page[pages, 0]
        mapped = mapped[mapped != 0]
        if torch.unique(mapped).numel() != mapped.numel():
            raise SlotError("two full pages map to one sliding page; the map full_to_swa is damaged")
        self.swa.check(mapped)

    def _pair(self, full: torch.Tensor | None, swa: torch.Tensor | None) -> torch.Tensor | None:
        """Map `full` to `swa`; both were checked to be there before either side was asked."""
        if full is None or swa is None:
            raise SlotError(
                "a side handed out less than its available_size: it is also driven by somebody else; "
                "allocate through the composite alone"
            )
        self.full_to_swa.scatter_(0, full.to(self.full_to_swa.dtype), swa.to(self.full_to_swa.dtype))
        self._journal.position += 1
        return full

    def _verify_growth(
        self, growth: lengths.Growth, on_device: Mapping[str, torch.Tensor], owners: Sequence[Any] | None
    ) -> torch.Tensor:
        """Verify a growth on both sides before either takes a page; return the last slots of the sliding side."""
        lengths.check_batch(len(growth.seq), owners, **on_device)
        _verify_growth(self.full, growth, on_device)
        swa_last = self.translate(on_device["last_loc"])
        _verify_growth(self.swa, growth, {**on_device, "last_loc": swa_last})
        return swa_last

    def _looked_up(self, pages: torch.Tensor) -> tuple[lengths.Ints, lengths.Ints]:
        """Return each full page once, and its sliding page (0: none), on the host; waits for the device once."""
        import torch

        both = lengths.to_host(torch.stack((pages, self._mapped_pages(pages)))).reshape(2, -1)
        once = lengths.first_of_each(both[0])
        return both[0][once], both[1][once]

    def _mapped_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the sliding page of each full page, 0 where it was given back."""
        return self._pages_of(self._map_by_page[:, 0].index_select(0, pages))

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        return lengths.pages_of_slots(slots, self.page_size)

    def _free_both(self, pages: torch.Tensor, swa_pages: torch.Tensor) -> None:
        _verify(self.full, pages)
        self._verify_mapped(pages, swa_pages)
        _verify(self.swa, swa_pages)
        self.full.free_pages(pages)
        self._drop(pages, swa_pages)

    def _free_swa_of(self, pages: torch.Tensor) -> None:
        if self.parts.debug:
            _verify(self.full, pages)
        swa_pages = self._mapped_pages(pages)
        self._verify_mapped(pages, swa_pages)
        self._drop(pages, swa_pages)

    def _drop(self, pages: torch.Tensor, swa_pages: torch.Tensor) -> None:
        """Give back sliding pages and unmap the full pages `pages`."""
        if not pages.shape[0]:
            return
        self.swa.free_pages(swa_pages)
        self._map_by_page.index_fill_(0, pages, 0)
        self._journal.freed()

    def _verify_mapped(self, pages: torch.Tensor, swa_pages: torch.Tensor) -> None:
        """With debug, verify that none of the sliding pages of `pages` (or of some of them) went back before."""
        if not self.parts.debug or not bool((swa_pages == 0).any()):
            return
        unmapped = pages[self._mapped_pages(pages) == 0]
        named = named_holders(self.parts.request_pool, lengths.to_host(unmapped), self.page_size)
        raise SlotError(
            f"sliding slots{named} are freed twice: some of these tokens left the window before; say so with "
            "hold_prefix(request, evicted=…), or pass swa_starts to free_rows, has_swa=False to free_pages, and "
            "each range once to free_swa_rows"
        )

    def _forget(self) -> None:
        self.full_to_swa.zero_()
        self._grouping = False
        self._journal.freed()


def _common_page_size(query: AllocatorQuery) -> int:
    sizes = {space.name: space.page_size for space in query.spaces}
    if set(sizes) != {FULL, SWA}:
        raise PlanError(f"SWAAllocator keeps the spaces 'full' and 'swa' in step, not {sorted(sizes)}")
    if sizes[FULL] != sizes[SWA]:
        raise PlanError(
            f"the spaces 'full' and 'swa' have pages of {sizes[FULL]} and {sizes[SWA]} slots; "
            "SWAAllocator needs one page_size for both"
        )
    return sizes[FULL]


def _checked_swa_starts(ranges: lengths.Ranges, swa_starts: Sequence[int]) -> lengths.Ints:
    starts = lengths.on_host(swa_starts, "swa_starts")
    if len(starts) != len(ranges.ends):
        raise SlotError(f"{len(starts)} swa_starts for {len(ranges.ends)} rows; give one of each a request")
    if (starts > ranges.ends).any() or (starts < 0).any():
        raise SlotError(f"swa_starts {starts.tolist()} lie outside the rows that end at {ranges.ends.tolist()}")
    return starts


def _verify(inner: Allocator, pages: torch.Tensor) -> None:
    if isinstance(inner, PagedAllocator):
        inner.verify_pages(pages)


def _verify_growth(inner: Allocator, growth: lengths.Growth, on_device: Mapping[str, torch.Tensor]) -> None:
    if isinstance(inner, PagedAllocator):
        inner.verify_growth(growth, on_device)


def _verify_slots(inner: Allocator, slots: torch.Tensor) -> None:
    if isinstance(inner, PagedAllocator):
        inner.verify_slots(slots)
