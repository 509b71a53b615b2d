"""What requests hold in two tiers: a map from their numbering to the device, device buffers, host slots."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.allocators import lengths
from kvdock.allocators.debug import named_holders
from kvdock.allocators.held import DeviceBuffers, HeldPages, HostSlots
from kvdock.allocators.mapped import MappedAllocator
from kvdock.allocators.ring import Journal
from kvdock.demand import decode_extra_rows, device_slots_per_request, request_columns
from kvdock.errors import BuildError, PlanError, SlotError
from kvdock.layout import DEVICE, FULL, HOST, REQUESTS, Buffer
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery

if TYPE_CHECKING:
    import torch

    from kvdock.requests.base import RequestPool


class _Taken(NamedTuple):
    """Device pages for a buffer, the one of the newest tokens apart, and those of the request that it has no room for."""

    newest: torch.Tensor
    read: torch.Tensor
    left: torch.Tensor


class TieredAllocator(MappedAllocator):
    """Keeps the map `logical_to_device` and the tables of what requests hold in each tier; a subclass hands out slots."""

    def __init__(self, query: AllocatorQuery, parts: Parts) -> None:
        import torch

        super().__init__(query, parts)
        self.page_size = _common_page_size(query)
        self.full, self.device, self.host = (parts.allocators[name] for name in (FULL, DEVICE, HOST))
        self.numbering, self.side = self.full, self.device
        self._tiers = {FULL: self.full, DEVICE: self.device, HOST: self.host}
        self.size = self.full.size
        rows = parts.tensors.rows
        self.logical_to_device: torch.Tensor = rows("logical_to_device")
        if self.logical_to_device.shape[0] != self.size + self.page_size:
            raise BuildError(
                f"the map logical_to_device has {self.logical_to_device.shape[0]} rows for {self.size} full slots and "
                f"a padding page of {self.page_size}; build with the plan's own sizes"
            )
        self._map = self.logical_to_device.view(-1, self.page_size)
        self._offsets: torch.Tensor = rows("page_offsets").view(-1)
        self._buffers = DeviceBuffers(self.device, rows("req_to_device_buffer"))
        self._host_slots = HostSlots(self.host, rows("req_to_host"))
        self._journal = Journal("spaces 'full', 'device' and 'host'")
        torch.arange(self.page_size, out=self._offsets)
        self._erase()

    @classmethod
    def buffers(cls, query: AllocatorQuery) -> tuple[Buffer, ...]:
        """Declare the map, 8 bytes a full slot, and the tables of requests: device slots (int64), host slots (int32).

        Raises:
            PlanError: the spaces are not ``full``, ``device`` and ``host``, or have different page sizes.
        """
        page, rows = _common_page_size(query), 1 + decode_extra_rows(query)
        per_request = (device_slots_per_request(query),)

        def table(name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
            return Buffer(name=name, role="table", space=REQUESTS, shape=shape, dtype=dtype, guard=rows)

        return (
            Buffer(name="logical_to_device", role="map", space=FULL, shape=(), dtype="int64", guard=page),
            table("req_to_device_buffer", per_request, "int64"),
            table("req_to_host", (request_columns(query),), "int32"),
            Buffer(name="page_offsets", role="offsets", shape=(page,), dtype="int64"),
        )

    @property
    def req_to_device_buffer(self) -> torch.Tensor:
        """Device slots of each request's buffer ``[rows + 1, device_slots_per_request]`` int64, 0: none; the newest page last."""
        return self._buffers.table

    @property
    def req_to_host(self) -> torch.Tensor:
        """Host slot of each token of each request ``[rows + 1, columns]`` int32, 0: none."""
        return self._host_slots.table

    @property
    def device_slots_per_request(self) -> int:
        """Device slots of a whole buffer: what a step reads from, and the newest page."""
        return int(self._buffers.table.shape[1])

    @property
    def max_device_buffers(self) -> int:
        """Requests that may hold a buffer at once."""
        return self.device.size // self.device_slots_per_request

    def alloc_device_buffer(
        self, request: Hashable, device_start: int, slots: int | None = None
    ) -> torch.Tensor | None:
        """Give a request a device buffer of `slots` slots (default: a whole one) and return them, the newest page last.

        It takes over the device pages that the request's tokens have from `device_start` on (where
        `free_device_rows` ended, and behind a prefix that is another's): the page that is partly filled becomes its
        newest page and stays mapped, the others come first, in the order of the tokens, map to nothing, and those
        beyond the buffer go back. A partly filled page without a device page is mapped to a fresh one: swap in
        what `map_newest` names. ``None`` if `max_device_buffers` are held, or there are too few device slots.

        Raises:
            SlotError: the request has no row, or a buffer already; `slots` is more than a buffer, or
                `device_start` no token of its row; with debug, another request holds these pages too. Nothing changes.
        """
        import torch

        row, tokens = self._row(request), self._length(request)
        pages = self._buffers.checked_pages(slots)
        if request in self._buffers:
            raise SlotError(f"request {request!r} holds a device buffer already; grow_device_buffer makes it larger")
        self._buffers.check_row(request, row)
        table = self._requests.req_to_token
        ranges = lengths.checked_ranges(table.shape, [row], [device_start], [tokens])
        logical = self._live_bounds(ranges, [device_start]).pages(table, self.parts.kernels)
        own = self._mapped(logical)
        self._verify_mapped(logical, own)
        self._verify_lone(request, logical)
        if len(self._buffers) >= self.max_device_buffers:
            return None
        before, undo, taken = self.device.backup_state(), self.device.checkpoint(), None
        try:
            taken = self._divided(own, pages, tokens % self.page_size != 0, request)
            if taken is None:
                return None
            given = self._slots_of(torch.cat((taken.read, taken.newest)))
            self._hold_buffer(request, row, logical, taken)
        except BaseException:
            if taken is not None and taken.left.shape[0]:  # then its own pages were enough, and none was taken
                undo()
            else:
                self.device.restore_state(before)
            raise
        self._has_queued |= self._grouping and taken.left.shape[0] > 0
        self._freed()
        return given

    def grow_device_buffer(self, request: Hashable, slots: int) -> torch.Tensor | None:
        """Make a request's buffer `slots` slots large and return the new ones, or ``None`` if there are too few.

        What it has stays as it is, the page that is being filled included; a buffer that is as large gets none.

        Raises:
            SlotError: the request has no buffer, or `slots` is more than a whole one.
        """
        pages = self._buffers.checked_pages(slots)
        if request not in self._buffers:
            raise SlotError(f"request {request!r} holds no device buffer; alloc_device_buffer gives it one")
        missing = max(0, pages - self._buffers.slots(request) // self.page_size)
        return self._held(self._buffers, request, missing)

    def map_newest(self, request: Hashable) -> tuple[torch.Tensor, torch.Tensor]:
        """Map the page in which a request's tokens end to its newest device page, and return what to swap in there.

        That are the host slots and the device slots of the tokens in that page, for the pool's `swap_in`; none
        where the tokens end with a page. For a buffer that began without that page, and after tokens were cut off.

        Raises:
            SlotError: the request has no row, no buffer, or no host slots for these tokens; nothing changes.
        """
        tokens = self._length(request)
        if request not in self._buffers:
            raise SlotError(f"request {request!r} holds no device buffer; alloc_device_buffer gives it one")
        start = tokens // self.page_size * self.page_size
        on_host = self.host_slots(request, start, tokens) if start < tokens else self._offsets[:0].clone()
        on_device = self._slots_of(self._buffers.newest_pages([request]))[: tokens - start]
        self._place_newest(request)
        self._freed()
        return on_host, on_device

    def reserve_host(self, request: Hashable, tokens: int) -> torch.Tensor | None:
        """Make sure that a request has host slots for its first `tokens` tokens, and return the new ones.

        Ask for the prompt and all that it may write, when it is admitted. ``None``, and nothing changes, if there
        are too few; what is reserved already is never given up.

        Raises:
            SlotError: the request has no row, or its row has fewer columns.
        """
        row = self._row(request)
        (count,) = lengths.on_host([tokens], "tokens").tolist()
        columns = int(self.req_to_host.shape[1])
        if not 0 <= count <= columns:
            raise SlotError(
                f"request {request!r} cannot have host slots for {count} tokens: a row has {columns} columns"
            )
        self._host_slots.check_row(request, row)
        return self._held(
            self._host_slots, request, max(0, -(-count // self.page_size) - self._host_slots.count(request))
        )

    def host_slots(self, request: Hashable, start: int, end: int) -> torch.Tensor:
        """Return the host slots of the tokens ``start … end`` of a request, ``[n]`` int64.

        Raises:
            SlotError: it reserved fewer, or that is no range.
        """
        return self._host_slots.slots(request, start, end)

    def release(self, request: Hashable) -> None:
        """Give back a request's device buffer and host slots; a request with neither has none. Never waits.

        Free its row first, while this allocator knows that the device pages of its tokens are the buffer's.

        Raises:
            SlotError: with debug, slots that are not live; nothing changes.
        """
        if request not in self._buffers and request not in self._host_slots:
            return
        self._has_queued |= self._grouping
        self._freed()  # first: after an error the tiers' own marks may be void, and a second call does what is left
        self._unmap_newest(request)
        self._buffers.free(request)
        self._host_slots.free(request)

    def translate(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the device slots of full slots: −1 for −1, 0 where the rows are not on the device."""
        return self.parts.kernels.translate(self.logical_to_device, loc)

    def check(self, held: torch.Tensor | None = None) -> None:
        """Verify every tier: live device pages are those that live full pages map to and those of buffers, once each.

        Raises:
            SlotError: names the slots that leaked, are free twice, or are held but free, or the request that lost its
                row without a release.
        """
        import torch

        self.full.check(held)
        self._check_holders()
        self.host.check(self._slots_of(self._host_slots.pages(self._host_slots.rows())))
        live = self.live_pages() if held is None else lengths.to_host(held) // self.page_size
        if live is None:
            self.device.check()
            return
        pages = torch.unique(torch.as_tensor(live, dtype=torch.int64)).to(self._map.device)
        requests = list(self._buffers.rows())
        mapped, newest = self._checked_map(pages), self._buffers.newest_pages(requests)
        own = mapped[~torch.isin(mapped, newest)]
        owned = torch.cat((own, self._buffers.pages(requests)))
        if torch.unique(mapped).numel() != mapped.numel() or torch.unique(owned).numel() != owned.numel():
            raise SlotError("a device page has two owners; the map logical_to_device is damaged")
        self.device.check(self._slots_of(owned))

    @property
    def _requests(self) -> RequestPool:
        """The request pool.

        Raises:
            SlotError: this allocator was built without one.
        """
        pool = self.parts.request_pool
        if pool is None:
            raise SlotError("this allocator was built without a request pool, so no request can hold slots in a tier")
        return pool

    def _row(self, request: Hashable) -> int:
        row = self._requests.row_of(request)
        if row is None:
            raise SlotError(f"request {request!r} has no row in the request table; admit it first")
        return row

    def _length(self, request: Hashable) -> int:
        return int(self._requests.lengths[self._row(request)])

    def _live_bounds(self, ranges: lengths.Ranges, device_starts: Sequence[int] | lengths.Ints) -> lengths.PageBounds:
        """Return the pages of `ranges` that have device pages of their own.

        Raises:
            SlotError: not one start a range, or one that is no token of it.
        """
        begins = lengths.on_host(list(device_starts), "device_starts")
        if len(begins) != len(ranges.ends):
            raise SlotError(f"{len(begins)} device_starts for {len(ranges.ends)} rows; give one of each a request")
        if (begins < 0).any() or (begins > ranges.ends).any():
            raise SlotError(
                f"device_starts {begins.tolist()} lie outside the rows that end at {ranges.ends.tolist()}; nothing was "
                "changed"
            )
        whole = ranges.page_bounds(self.page_size)
        first = lengths.pages_of(begins, self.page_size)
        for i, row in enumerate(ranges.rows.tolist()):
            if self._buffers.holder_of(row) is not None:
                first[i] = whole.last[i]
        return whole.from_tokens(first * self.page_size)

    def _verify_lone(self, request: Hashable, pages: torch.Tensor) -> None:
        """With debug, verify that no other request holds any of `pages`, whose device pages would become a buffer."""
        if not self.parts.debug:
            return
        held = named_holders(self.parts.request_pool, lengths.to_host(pages), self.page_size, besides=request)
        if held:
            raise SlotError(
                f"request {request!r} cannot take the device pages of tokens that others hold too{held}: give the end of "
                "the shared prefix as device_start, or let a request that lent its tokens keep them on the device. "
                "Nothing was changed"
            )

    def _hold_buffer(self, request: Hashable, row: int, logical: torch.Tensor, taken: _Taken) -> None:
        """Note a request's buffer, whose tokens no longer have device pages of their own, and give back what is left."""
        import torch

        mark, end = self._buffers.mark(), self._length(request) // self.page_size
        touched = (
            torch.cat((logical, self._logical_page(row, end))) if self._length(request) % self.page_size else logical
        )
        words = self._mapped(touched)
        try:
            self._buffers.add(request, row, self._slots_of(taken.read))
            self._buffers.add(request, row, self._slots_of(taken.newest), self._buffers.newest_base)
            self._erase(logical)
            self._place_newest(request)
            self.device.free_pages(taken.left)
        except BaseException:
            self._write(touched, words)
            self._buffers.undo(mark)
            raise

    def _divided(self, own: torch.Tensor, pages: int, is_open: bool, request: Hashable) -> _Taken | None:
        """Return how a buffer of `pages` pages is made of `own` and of fresh pages; ``None`` if there are too few.

        `is_open` says whether the request's last page is partly filled: if it is among `own`, it is the last there.
        """
        import torch

        has_newest = is_open and own.shape[0] > 0
        newest, rest = (own[-1:], own[:-1]) if has_newest else (own[:0], own)
        read, left = rest[: pages - 1], rest[pages - 1 :]
        if not has_newest:
            newest, left = left[:1], left[1:]
        lacking = pages - newest.shape[0] - read.shape[0]
        fresh = self.device.alloc_pages(lacking, [request] * lacking)
        if fresh is None:
            return None
        if not newest.shape[0]:
            newest, fresh = fresh[:1], fresh[1:]
        return _Taken(newest, torch.cat((read, fresh)), left)

    def _held(self, book: HeldPages, request: Hashable, pages: int) -> torch.Tensor | None:
        """Return the slots of `pages` more pages that a request holds from now on, or ``None``."""
        slots = book.take(request, self._row(request), pages)
        self._journal.position += slots is not None
        return slots

    def _place_newest(self, request: Hashable) -> None:
        """Map the page in which a request's tokens end to its newest page, and the one that was mapped to nothing."""
        row, (page, used) = self._row(request), divmod(self._length(request), self.page_size)
        at = self._buffers.newest_at.get(request)
        touched = [self._logical_page(row, place) for place in (at, page if used else None) if place is not None]
        words = [self._mapped(pages) for pages in touched]
        try:
            self._unmap_newest(request)
            if used:
                self._write(touched[-1], self._buffers.newest_pages([request]))
        except BaseException:
            for pages, before in zip(touched, words, strict=True):
                self._write(pages, before)
            raise
        self._buffers.place_newest(request, page if used else None)

    def _unmap_newest(self, request: Hashable) -> None:
        """Map to nothing what still maps to a request's newest page: its full page may be another's by now."""
        at = self._buffers.newest_at.get(request)
        if at is None:
            return
        pages, newest = self._logical_page(self._buffers.rows()[request], at), self._buffers.newest_pages([request])
        words = self._mapped(pages)
        self._write(pages, words.masked_fill(words == newest, 0))

    def _logical_page(self, row: int, page: int) -> torch.Tensor:
        start = page * self.page_size
        return self._pages_of(self._requests.req_to_token[row, start : start + 1]).to(self._map.dtype)

    def _refuse_buffered(self, owners: Sequence[Any] | None) -> None:
        held = [owner for owner in owners or () if owner in self._buffers]
        if held:
            raise SlotError(
                f"request {held[0]!r} holds a device buffer, in which one token at a time finds its place; grow it with "
                "alloc_decode. Nothing was taken"
            )

    def _looked_up(self, pages: torch.Tensor) -> tuple[lengths.Ints, lengths.Ints]:
        """Return each page once, and its own device page (0: none, or a buffer's), on the host; waits once."""
        import numpy as np
        import torch

        newest = self._buffers.newest_pages(list(self._buffers.rows()))
        found = lengths.to_host(torch.cat((pages, self._mapped(pages), newest)))
        count = pages.shape[0]
        once = lengths.first_of_each(found[:count])
        mapped = found[count : 2 * count][once]
        return found[:count][once], np.where(np.isin(mapped, found[2 * count :]), 0, mapped)

    def _mapped(self, pages: torch.Tensor) -> torch.Tensor:
        return self._pages_of(self._map[:, 0].index_select(0, pages))

    def _write(self, pages: torch.Tensor, words: torch.Tensor) -> None:
        slots = self._slots_of(words).view(-1, self.page_size)
        self._map.index_copy_(0, pages, slots.masked_fill((words == 0).unsqueeze(1), 0))

    def _erase(self, pages: torch.Tensor | None = None) -> None:
        if pages is None:
            self._map.zero_()
        else:
            self._map.index_fill_(0, pages, 0)

    def _freed(self) -> None:
        super()._freed()
        self._buffers.settle()
        self._host_slots.settle()

    def _freed_before(self, named: str) -> SlotError:
        return SlotError(
            f"device slots{named} are freed twice: the rows of some of these tokens left the device before; pass "
            "device_starts to free_rows, has_device=False to free_pages, and each range once to free_device_rows"
        )

    def _forget(self) -> None:
        self._buffers.clear()
        self._host_slots.clear()
        super()._forget()

    def _slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.add(self._offsets, pages.unsqueeze(1), alpha=self.page_size).view(-1)

    def _page_owners(self, owners: Sequence[Any] | None, growth: lengths.Growth) -> Sequence[Any] | None:
        return lengths.owners_of_pages(owners, growth.new_pages) if owners is not None and self.parts.debug else None

    def _checked_map(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the device pages that `pages` map to, those without one left out.

        Raises:
            SlotError: the slots of a page do not map to the slots of one page in order, or page 0 maps to something.
        """
        import torch

        words = self._mapped(pages)
        expected = self._slots_of(words).view(-1, self.page_size).masked_fill((words == 0).unsqueeze(1), 0)
        wrong = pages[(self._map.index_select(0, pages) != expected).any(1)]
        if wrong.numel() or bool(self._map[0].any()):
            first = int(torch.cat((wrong, wrong.new_zeros(1)))[0]) * self.page_size
            raise SlotError(
                f"the slots of the page from {first} map to no one device page; logical_to_device is damaged"
            )
        return words[words != 0]

    def _check_holders(self) -> None:
        for book in (self._buffers, self._host_slots):
            for request, row in book.rows().items():
                if self._requests.row_of(request) != row:
                    raise SlotError(
                        f"request {request!r} holds {book.what}, but lost row {row} of the request table; release it"
                    )


def _common_page_size(query: AllocatorQuery) -> int:
    sizes = {space.name: space.page_size for space in query.spaces}
    if set(sizes) != {FULL, DEVICE, HOST}:
        raise PlanError(f"this allocator keeps the spaces 'full', 'device' and 'host', not {sorted(sizes)}")
    if len(set(sizes.values())) > 1:
        raise PlanError(
            f"the spaces 'full', 'device' and 'host' have pages of {sizes[FULL]}, {sizes[DEVICE]} and {sizes[HOST]} "
            "slots; one page_size for all of them is needed"
        )
    return sizes[FULL]
