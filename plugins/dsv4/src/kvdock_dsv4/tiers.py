"""Full, sliding and device slots in step, where compressed rows of ratio 4 lie on the host and few on the device."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec
from kvdock.allocators import Shortfall, SWAAllocator, Together, lengths, window
from kvdock.allocators.held import HeldPages
from kvdock.allocators.mapped import MappedAllocator
from kvdock.allocators.ring import Journal, Mark
from kvdock.demand import decode_extra_rows
from kvdock.errors import SlotError
from kvdock.layout import DEVICE, FULL, REQUESTS, SWA, Buffer, Unit
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery

from kvdock_dsv4.allocators import DSV4Allocator
from kvdock_dsv4.sizing import device_buffer_slots

if TYPE_CHECKING:
    import torch

MAP, TABLE = "c4_to_device", "req_to_device_buffer"


class TierState(NamedTuple):
    """What `DSV4HiSparseAllocator.backup_state` returns."""

    mark: Mark
    logical: Any
    device: Any
    buffers: int


class DSV4HiSparseAllocator(MappedAllocator):
    """Wraps the allocator of full and sliding slots, and gives each new page a page of compressed rows on the device.

    A page of tokens here is a page of ``page_size / 4`` compressed slots there: `c4_to_device` maps page to page, 0
    where the rows are on the host alone. A page's rows leave the device together with its sliding page, so they are
    copied to the host before their tokens leave the window (`HiSparsePackedPool.offload`, as they are written). There
    a row has the compressed slot that it always has: the host holds all of them, and nothing is reserved.
    A prompt that arrives (`alloc_extend_swa_tail`) has rows on the device for its tail, and the others on the host alone.

    A request whose steps read from the host holds a buffer of device slots, which map to nothing, since each layer
    keeps other rows there; it goes back in `release`. Inner allocators are driven by this class alone.
    """

    features: ClassVar[frozenset[str]] = frozenset({"hisparse", "disaggregation"})
    logical_cls: ClassVar[type[SWAAllocator]] = DSV4Allocator
    """What keeps full and sliding slots in step."""

    def __init__(self, query: AllocatorQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.logical = self.logical_cls(_logical(query), parts)
        self.device = parts.allocators[DEVICE]
        self.full, self.swa, self.full_to_swa = self.logical.full, self.logical.swa, self.logical.full_to_swa
        self.numbering, self.side = self.logical, self.device
        self._tiers = {FULL: self.logical, DEVICE: self.device}
        self.page_size, self.size = self.logical.page_size, self.logical.size
        self.slot_dtype = self.logical.slot_dtype
        self.c4_to_device: torch.Tensor = parts.tensors.rows(MAP)
        """Page of tokens → page of compressed rows on the device, int64; 0: on the host alone."""
        self._map = self.c4_to_device
        self._buffers = HeldPages("the device buffer", self.device, parts.tensors.rows(TABLE))
        self._journal = Journal("spaces 'full', 'swa' and 'device'")
        self._erase()

    @classmethod
    def buffers(cls, query: AllocatorQuery) -> tuple[Buffer, ...]:
        """Declare the maps, 8 bytes a full page each, and the table of device buffers by request row, those that arrive included."""
        table, rows = (device_buffer_slots(query),), 1 + decode_extra_rows(query)
        return (
            *cls.logical_cls.buffers(_logical(query)),
            Buffer(name=MAP, role="map", space=FULL, unit=Unit.PAGE, shape=(), dtype="int64"),
            Buffer(name=TABLE, role="table", space=REQUESTS, shape=table, dtype="int64", guard=rows),
        )

    @property
    def req_to_device_buffer(self) -> torch.Tensor:
        """Device slots of each request's buffer ``[rows + 1, slots of a whole buffer]`` int64; 0: none."""
        return self._buffers.table

    @property
    def max_device_buffers(self) -> int:
        """Whole buffers that the device could hold, a page of rows beside each."""
        return self.device.size // (int(self._buffers.table.shape[1]) + self.device.page_size)

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
        """Return the full slots of a batch that grows; ``None`` if a space is short.

        Raises:
            SlotError: what `SWAAllocator.alloc_extend` refuses. Nothing is taken.
        """
        growth = lengths.extend_growth((prefix_lens_cpu, seq_lens_cpu), extend_num_tokens, self.page_size)
        self.verify_growth(growth, {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "last_loc": last_loc}, owners)
        batch = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, owners)
        share = window.sliding_share(growth, None, owners, self.parts.debug)
        return self._grown(growth, lambda: self.logical.alloc_extend(*batch), share)

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

        A tail has its compressed rows on the device as well; those of the tokens before it lie on the host alone, where
        they arrive (`HiSparsePackedPool.set_host_kv_buffer`). ``None`` if a space is short.

        Raises:
            SlotError: what `SWAAllocator.alloc_extend_swa_tail` refuses. Nothing is taken.
        """
        growth = lengths.extend_growth((prefix_lens_cpu, seq_lens_cpu), extend_num_tokens, self.page_size)
        tails = window.tail_growth(growth, swa_tail_lens)
        self.verify_growth(growth, {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "last_loc": last_loc}, owners)
        lens = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens)
        share = window.sliding_share(growth, tails, owners, self.parts.debug)
        take = lambda: self.logical.alloc_extend_swa_tail(*lens, swa_tail_lens, owners)  # noqa: E731
        return self._grown(growth, take, share)

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return one full slot a request; ``None`` if a space is short.

        Raises:
            SlotError: what `SWAAllocator.alloc_decode` refuses. Nothing is taken.
        """
        growth = lengths.decode_growth(seq_lens_cpu, self.page_size)
        self.verify_growth(growth, {"seq_lens": seq_lens, "last_loc": last_loc}, owners)
        batch = (seq_lens, seq_lens_cpu, last_loc, owners)
        share = window.sliding_share(growth, None, owners, self.parts.debug)
        return self._grown(growth, lambda: self.logical.alloc_decode(*batch), share)

    def available_size(self) -> int:
        """Return the full slots that all spaces could hand out now."""
        return min(
            self.logical.available_size(), self.device.available_size() // self.device.page_size * self.page_size
        )

    def full_available_size(self) -> int:
        """Return the free slots of the full side."""
        return self.logical.full_available_size()

    def swa_available_size(self) -> int:
        """Return the free slots of the sliding side."""
        return self.logical.swa_available_size()

    def device_available_size(self) -> int:
        """Return the free device slots, each a compressed row."""
        return self.device.available_size()

    def swa_pages_needed(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], swa_tail_lens: Sequence[int]
    ) -> int:
        """Return the new sliding pages that `alloc_extend_swa_tail` takes, and as many on the device.

        Raises:
            SlotError: what `alloc_extend_swa_tail` refuses of these lengths.
        """
        return self.logical.swa_pages_needed(prefix_lens, seq_lens, swa_tail_lens)

    def shortfall(
        self, pages: int, swa_pages: int | None = None, device_pages: int | None = None
    ) -> tuple[Shortfall, ...]:
        """Say which space lacks how many slots for `pages` full pages, and so many of the others (default: all)."""
        on_device = pages if device_pages is None else device_pages
        return self.logical.shortfall(pages, swa_pages) + self.device.shortfall(on_device)

    def translate(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the sliding slots of full slots: −1 for −1, 0 where the sliding page is not there."""
        return self.logical.translate(loc)

    def translate_to_device(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the device slots of compressed slots: −1 for −1, 0 where the rows are on the host alone."""
        return self.parts.kernels.translate(self.c4_to_device, loc, self.device.page_size)

    def verify_growth(
        self, growth: lengths.Growth, on_device: Mapping[str, torch.Tensor], owners: Sequence[Any] | None = None
    ) -> None:
        """Raise what an extend or decode would raise for its device tensors, by name, and change nothing."""
        self.logical.verify_growth(growth, on_device, owners)

    def verify_gone(self, slots: torch.Tensor, request: Any) -> None:
        """With debug, verify that no sliding slot lies beside `slots`, those of whole pages."""
        self.logical.verify_gone(slots, request)

    def free(self, indices: torch.Tensor) -> None:
        """Give back the pages of these tokens in every space where they still have any; waits for the device."""
        self.logical.verify_slots(indices)
        numbers, mapped = self._looked_up(self._pages_of(indices.reshape(-1).to(self._map.dtype)))
        pages, device = (lengths.to_device(found, indices.device) for found in (numbers, mapped[mapped != 0]))
        self.device.verify_pages(device)
        self._give(pages, device, lambda: self.logical.free(indices))

    def free_pages(self, pages: torch.Tensor, has_swa: bool = True) -> None:
        """Give back full pages; `has_swa` says whether all or none are still in the window, and so on the device."""
        lengths.require_row("pages", pages)
        pages = pages.to(self._map.dtype)
        device = self._verified(pages, pages if has_swa else pages[:0])
        self._give(pages, device, lambda: self.logical.free_pages(pages, has_swa))

    def free_rows(
        self,
        table: torch.Tensor,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        swa_starts: Sequence[int] | None = None,
    ) -> None:
        """Give back the tokens ``starts[i] … ends[i]`` of request rows in every space.

        `swa_starts` is where `free_swa_rows` ended for each row (default: `starts`). Never waits for the device.

        Raises:
            SlotError: a range outside the table, or more pages than are live; nothing changes.
        """
        ranges = lengths.checked_ranges(table.shape, rows, starts, ends)
        whole = ranges.page_bounds(self.page_size)
        begins = ranges.starts if swa_starts is None else lengths.on_host(swa_starts, "swa_starts")
        pages = whole.pages(table, self.parts.kernels).to(self._map.dtype)
        chosen = lengths.to_device(whole.from_tokens(begins).positions_in(whole), pages.device)
        device = self._verified(pages, pages.index_select(0, chosen))
        self._give(pages, device, lambda: self.logical.free_rows(table, rows, starts, ends, swa_starts))

    def free_swa(self, indices: torch.Tensor) -> None:
        """Give back sliding pages whose last token is among these slots, and their rows on the device; waits."""
        lengths.require_integers("slots", indices)
        slots = indices.reshape(-1).to(self._map.dtype)
        is_last = slots % self.page_size == self.page_size - 1
        pages, mapped = self._looked_up(self._pages_of(slots) * is_last)
        self.free_swa_pages(lengths.to_device(pages[mapped != 0], indices.device))

    def free_swa_pages(self, pages: torch.Tensor) -> None:
        """Give back the sliding pages of full pages that still have one, and their rows on the device; never waits."""
        lengths.require_row("pages", pages)
        pages = pages.to(self._map.dtype)
        self._free_side_of(pages, lambda: self.logical.free_swa_pages(pages))

    def free_swa_rows(
        self, table: torch.Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Give back sliding pages whose last token is in ``starts[i] … ends[i]``, and their rows on the device.

        These rows are on the host by now. Ranges follow each other as in `SWAAllocator.free_swa_rows`; never waits.
        """
        bounds = lengths.checked_ranges(table.shape, rows, starts, ends).finished_page_bounds(self.page_size)
        self.free_swa_pages(bounds.pages(table, self.parts.kernels))

    def alloc_device_buffer(self, request: Hashable, slots: int | None = None) -> torch.Tensor | None:
        """Give a request a device buffer of `slots` slots (default: a whole one) and return them; ``None`` if short.

        Raises:
            SlotError: the request has no row, or a buffer already; `slots` is more than a buffer. Nothing changes.
        """
        if request in self._buffers:
            raise SlotError(f"request {request!r} holds a device buffer already; grow_device_buffer makes it larger")
        if len(self._buffers) >= self.max_device_buffers:
            return None
        return self._add(request, self._buffer_pages(slots))

    def grow_device_buffer(self, request: Hashable, slots: int) -> torch.Tensor | None:
        """Make a request's buffer `slots` slots large and return the new ones; ``None`` if there are too few.

        Raises:
            SlotError: the request has no buffer, or `slots` is more than a whole one. Nothing changes.
        """
        if request not in self._buffers:
            raise SlotError(f"request {request!r} holds no device buffer; alloc_device_buffer gives it one")
        return self._add(request, max(0, self._buffer_pages(slots) - self._buffers.count(request)))

    def release(self, request: Hashable) -> None:
        """Give back a request's device buffer, if it has one; never waits."""
        if request in self._buffers:
            self._buffers.free(request)
            self._has_queued |= self._grouping
            self._freed()

    def backup_state(self) -> TierState:
        """Return a token of the present allocations of all spaces."""
        sides = self.logical.backup_state(), self.device.backup_state()
        return TierState(self._journal.mark(), *sides, self._buffers.mark())

    def restore_state(self, state: Any) -> None:
        """Take back what was handed out since `state`, buffers included.

        Raises:
            SlotError: something was freed since, or `state` is not of this allocator; nothing changes.
        """
        with Together(self):
            self._journal.rewind(state.mark if isinstance(state, TierState) else None)
            self.logical.restore_state(state.logical)
            self.device.restore_state(state.device)
        self._buffers.undo(state.buffers)

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Change the usable slots of one space or several; raises as the core's, and none changes then."""
        chosen = lengths.new_sizes(sizes, (FULL, SWA, DEVICE), self._journal.name)
        if len(self._buffers):
            raise SlotError(f"{self._journal.name}: {len(self._buffers)} requests hold device buffers; release them")
        before = self.device.size
        self.device.resize({DEVICE: chosen.pop(DEVICE, before)})
        try:
            self.logical.resize(chosen)
        except BaseException:
            self.device.resize({DEVICE: before})
            raise
        self.size = self.logical.size
        self._forget()

    def check(self, held: torch.Tensor | None = None) -> None:
        """Verify every space: live device pages are those that live full pages map to, and those of buffers, once each.

        Raises:
            SlotError: names the slots that leaked, are free twice, or are held but free.
        """
        import torch

        self.logical.check(held)
        live = self.live_pages() if held is None else (lengths.to_host(held) // self.page_size).tolist()
        if live is None:
            self.device.check()
            return
        pages = torch.tensor(sorted(set(live)), dtype=torch.int64, device=self._map.device)
        mapped = self._mapped(pages)
        owned = torch.cat((mapped[mapped != 0], self._buffers.pages(self._buffers.rows())))
        if torch.unique(owned).numel() != owned.numel():
            raise SlotError(f"a device page has two owners; the map {MAP} is damaged")
        self.device.check(owned * self.device.page_size)

    def _add(self, request: Hashable, pages: int) -> torch.Tensor | None:
        """Return the slots of `pages` more pages that a request holds from now on, or ``None``."""
        pool = self.parts.request_pool
        row = None if pool is None else pool.row_of(request)
        if row is None:
            raise SlotError(f"request {request!r} has no row in the request table; admit it first")
        slots = self._buffers.take(request, row, pages)
        self._journal.position += slots is not None
        return slots

    def _buffer_pages(self, slots: int | None) -> int:
        whole = int(self._buffers.table.shape[1])
        asked = whole if slots is None else lengths.whole_count(slots, "slots")
        if not 1 <= asked <= whole:
            raise SlotError(f"a device buffer has 1 … {whole} slots, not {asked}; nothing was taken")
        return -(-asked // self.device.page_size)

    def _has_room(self, pages: int, side_pages: int) -> bool:
        """Return whether all spaces have room: a page of rows on the device comes together with a sliding page."""
        return not self.shortfall(pages, side_pages, side_pages)

    def _verified(self, pages: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """Return the device pages of `beside`, those of `pages` that have one; the others left the window before."""
        self.logical.full.verify_pages(pages)
        device = self._mapped(beside)
        self._verify_mapped(beside, device)
        self.device.verify_pages(device)
        return device

    def _mapped(self, pages: torch.Tensor) -> torch.Tensor:
        return self.c4_to_device.index_select(0, pages)

    def _write(self, pages: torch.Tensor, words: torch.Tensor) -> None:
        self.c4_to_device.scatter_(0, pages, words.to(self.c4_to_device.dtype))

    def _erase(self, pages: torch.Tensor | None = None) -> None:
        if pages is None:
            self.c4_to_device.zero_()
        else:
            self.c4_to_device.index_fill_(0, pages, 0)

    def _freed(self) -> None:
        super()._freed()
        self._buffers.settle()

    def _forget(self) -> None:
        self._buffers.clear()
        super()._forget()

    def _freed_before(self, named: str) -> SlotError:
        return SlotError(
            f"device slots{named} are freed twice: some of these tokens left the window before; say so with "
            "hold_prefix(request, evicted=…), or pass swa_starts to free_rows, has_swa=False to free_pages, and "
            "each range once to free_swa_rows"
        )


def _logical(query: AllocatorQuery) -> AllocatorQuery:
    """Return the same question for full and sliding slots alone."""
    spaces = tuple(space for space in query.spaces if space.name in (FULL, SWA))
    return msgspec.structs.replace(query, spaces=spaces)
