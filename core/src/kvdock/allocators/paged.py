"""Pages of one space: any page size, a free ring of page numbers, counts on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvdock.allocators import lengths
from kvdock.allocators.base import Allocator, Shortfall, Together, Undo
from kvdock.allocators.debug import Ledger, held_pages
from kvdock.allocators.freelist import FreeList
from kvdock.allocators.group import FreeGroup
from kvdock.allocators.ring import PageRing
from kvdock.errors import BuildError, PlanError, SlotError
from kvdock.layout import Buffer, Space, Unit
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvdock.allocators.window import TailGrowth


class PagedAllocator(Allocator):
    """Hands out whole pages of one space; slots of a page are consecutive.

    Freeing follows one rule: any token of a page gives back the whole page, once. `free` takes tokens and
    may wait for the device once; `free_pages` and `free_rows` take what the host knows and never wait. In
    a free group, pages are recorded when they are queued, and several token frees may name one page.

    Under decode-context parallelism the ranks share each request's tokens, and all ranks number alike: a page
    here is a page on every rank, so `page_size` and `size` (and the sizes of a resize) are the plan's of one
    rank times the ranks.
    """

    features = frozenset({"dcp", "hisparse"})
    """Pages and capacity count the tokens of all ranks of decode-context parallelism; any space of a host tier is served."""

    def __init__(self, query: AllocatorQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        space = only_space(query)
        self.space = space.name
        self.page_size = space.page_size
        self.size = parts.sizes[space.name] * query.parallel.dcp_size
        self._ring = self._make_free_list(parts)
        self._group: FreeGroup | None = None
        name, capacity = self._ring.journal.name, self._ring.capacity
        self._ledger = Ledger(name, self.page_size, capacity, parts.request_pool) if parts.debug else None
        if self.page_size > 1:
            self._offsets = _offsets(parts, self.page_size)

    @classmethod
    def buffers(cls, query: AllocatorQuery) -> tuple[Buffer, ...]:
        """Declare the free ring (8 bytes a page) and the offsets inside a page of several slots."""
        space = only_space(query)
        offsets = Buffer(name="page_offsets", role="offsets", shape=(space.page_size,), dtype="int64")
        return (free_ring(space), offsets) if space.page_size > 1 else (free_ring(space),)

    def alloc(self, need_size: int, owner: Any = None) -> torch.Tensor | None:
        """Return `need_size` slots, whole pages in order.

        Raises:
            SlotError: `need_size` is negative or no multiple of the page size, or `owner` cannot be hashed.
        """
        lengths.check_owners([owner])
        count = lengths.whole_pages(need_size, self.page_size, self._name)
        return self._handed(count, None if owner is None else [owner] * count, self._slots_of)

    def alloc_pages(self, count: int, owners: Sequence[Any] | None = None) -> torch.Tensor | None:
        """Return `count` page numbers in order; `owners` names a holder of each for debug messages.

        Raises:
            SlotError: `count` is negative, or there is another number of owners, or one cannot be hashed.
        """
        lengths.check_owners(owners)
        count = lengths.natural(count, "count")
        if owners is not None and len(owners) != count:
            raise SlotError(f"{self._name}: {len(owners)} owners for {count} pages; give one of each, or none")
        return self._take(count, owners)

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
        """Return the slots of a batch that grows; `owners` name the requests for debug messages.

        Raises:
            SlotError: lengths that contradict each other or `extend_num_tokens`, or another number of requests
                in one argument than in the others; with debug, device lengths other than the host's, or a
                `last_loc` that is not where the request's last token can be. Nothing is taken.
        """
        extend_num_tokens = lengths.whole_count(extend_num_tokens, "extend_num_tokens")
        growth = lengths.extend_growth((prefix_lens_cpu, seq_lens_cpu), extend_num_tokens, self.page_size)
        self.verify_growth(growth, {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "last_loc": last_loc}, owners)
        kernels, size = self.parts.kernels, self.page_size
        return self._grown(
            growth,
            owners,
            lambda pages: kernels.alloc_extend(prefix_lens, seq_lens, last_loc, pages, size, extend_num_tokens),
        )

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return one slot a request; `owners` name the requests for debug messages.

        Raises:
            SlotError: a length below 1, and what `alloc_extend` refuses. Nothing is taken.
        """
        growth = lengths.decode_growth(seq_lens_cpu, self.page_size)
        self.verify_growth(growth, {"seq_lens": seq_lens, "last_loc": last_loc}, owners)
        kernels, size = self.parts.kernels, self.page_size
        return self._grown(growth, owners, lambda pages: kernels.alloc_decode(seq_lens, last_loc, pages, size))

    def free(self, indices: torch.Tensor) -> None:
        """Give back the pages of these tokens; waits for the device once (in a group: at its end)."""
        self.verify_slots(indices)
        slots = indices if indices.dim() == 1 else indices.reshape(-1)
        if not slots.numel():
            return
        if self._group is None:
            self._give(lengths.distinct_pages(slots, self.page_size))
            return
        numbers = None if self._ledger is None else lengths.to_host(slots)
        self._ring.journal.freed()
        self._group.add(slots)
        if self._ledger is not None and numbers is not None:
            self._ledger.queue_slots(numbers)

    def free_pages(self, pages: torch.Tensor) -> None:
        """Give back pages by number, each named once; never waits for the device."""
        self.verify_pages(pages)
        self._give(pages)

    def free_rows(self, table: torch.Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Give back the pages of these token ranges; reads one word of `table` a page, never waits.

        Raises:
            SlotError: a range outside the table, or more pages than are live; nothing changes.
        """
        bounds = lengths.checked_ranges(table.shape, rows, starts, ends).page_bounds(self.page_size)
        self.free_pages(bounds.pages(table, self.parts.kernels))

    def verify_pages(self, pages: torch.Tensor) -> None:
        """Raise what `free_pages` would raise for `pages`, and change nothing.

        Raises:
            SlotError: no tensor of whole numbers in one dimension, or more pages than are live; with debug, pages
                that are not live or named twice.
        """
        lengths.require_row("pages", pages)
        if self._ledger is not None:
            self._ledger.guard.enter()
            self._ledger.verify(pages)
        self._require_live(pages.shape[0])

    def verify_slots(self, indices: torch.Tensor) -> None:
        """Raise what `free` would raise for `indices`, and change nothing; without debug by their type alone.

        Raises:
            SlotError: no tensor of whole numbers; with debug, names the slots that are not live or named twice.
        """
        lengths.require_integers("slots", indices)
        if self._ledger is not None:
            self._ledger.guard.enter()
            self._ledger.verify_slots(indices)

    def verify_live(self, slots: torch.Tensor) -> None:
        """With debug, verify that `slots` may be written: handed out, or padding. Without, do nothing.

        Raises:
            SlotError: names the slots and their last owner.
        """
        if self._ledger is not None:
            self._ledger.guard.enter()
            self._ledger.verify_live(slots)

    def verify_gone(self, slots: torch.Tensor, request: Any) -> None:
        """With debug, verify that none of `slots` is live and was handed out for `request`. Without, do nothing.

        Raises:
            SlotError: names the slots.
        """
        if self._ledger is not None:
            self._ledger.verify_gone(slots, request)

    def verify_growth(
        self, growth: lengths.Growth, on_device: Mapping[str, torch.Tensor], owners: Sequence[Any] | None = None
    ) -> None:
        """Raise what an extend or decode would raise for its device tensors, by name, and change nothing.

        Raises:
            SlotError: another number of requests than the host's; with debug, lengths other than the host's,
                or last slots that are not live where a page goes on.
        """
        lengths.check_batch(len(growth.seq), owners, **on_device)
        if self._ledger is not None:
            self._ledger.guard.enter()
            self._ledger.verify_growth(growth, on_device)

    def available_size(self) -> int:
        """Return the free slots, in whole pages; frees that wait in a group are not counted."""
        self._enter()
        return self._ring.free * self.page_size

    def pages_needed(self, prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
        """Return the new pages of requests that grow; each request needs pages of its own.

        Raises:
            SlotError: a prefix longer than its sequence, or lists of different lengths.
        """
        prefix, seq = lengths.on_host(prefix_lens, "prefix_lens"), lengths.on_host(seq_lens, "seq_lens")
        return int(lengths.grown_pages(prefix, seq, self.page_size).sum())

    def shortfall(self, pages: int) -> tuple[Shortfall, ...]:
        """Say how many slots are missing for `pages` pages."""
        needed = lengths.natural(pages, "pages") * self.page_size
        lacks = Shortfall(space=self.space, needed=needed, available=self.available_size())
        return (lacks,) if lacks.missing else ()

    def free_group_begin(self) -> None:
        """Collect the frees that follow.

        Raises:
            SlotError: a group is open already.
        """
        self._enter()
        if self._group is not None:
            raise SlotError(f"{self._name}: a free group is open already; end it before the next one begins")
        self._group = FreeGroup(self.page_size)

    def free_group_end(self) -> None:
        """Give back what was collected; waits for the device once if tokens were freed.

        After an error that is no refusal the group is open as before.

        Raises:
            SlotError: no group is open, or it holds more pages than are live: then the group is dropped
                and nothing is freed.
        """
        self._enter()
        if self._group is None:
            raise SlotError(f"{self._name}: no free group is open; call free_group_begin first")
        undo = self.checkpoint()
        group, self._group = self._group, None
        try:
            self._ring.commit(group.pages())
            if self._ledger is not None:
                self._ledger.close_group()
        except SlotError:
            raise
        except BaseException:
            undo()
            raise

    def backup_state(self) -> Any:
        """Return a token of the present allocations."""
        self._enter()
        return self._ring.journal.mark()

    def restore_state(self, state: Any) -> None:
        """Take back every page handed out since `state`.

        Raises:
            SlotError: something was freed (or queued in a group) since, or `state` is not of this allocator.
        """
        self._enter()
        if self._ledger is None:
            self._ring.rewind(state)
            return
        with Together(self):
            taken = self._ring.rewind(state)
            self._ledger.give(lengths.to_host(self._ring.peek(taken)))

    def checkpoint(self) -> Undo:
        """Return what undoes every free, restore and end of a free group since now."""
        group, undo_ring = self._group, self._ring.checkpoint()
        undo_group = None if group is None else group.checkpoint()
        undo_ledger = None if self._ledger is None else self._ledger.checkpoint()

        def undo() -> None:
            undo_ring()
            self._group = group
            for part in (undo_group, undo_ledger):
                if part is not None:
                    part()

        return undo

    def clear(self) -> None:
        """Make every page free again and drop an open group."""
        self._enter()
        self._reset(self._ring.capacity)

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Change the usable slots to ``sizes[space]``.

        Raises:
            SlotError: slots are live, a free group is open, the size is no whole number of pages, or the buffers are
                smaller; nothing changes.
        """
        self._enter()
        size = self._checked_size(sizes)
        if self._group is not None:
            raise SlotError(f"{self._name}: a free group is open; end it before a resize")
        if self._ring.live:
            raise SlotError(f"{self._name}: {self._ring.live} pages are live; free them before a resize")
        self._reset(size // self.page_size)
        self.size = size

    def check(self, held: torch.Tensor | None = None) -> None:
        """Verify the ring, and that exactly the pages of the slots `held` are live; O(capacity).

        What an open free group holds may be among `held` or not.

        Raises:
            SlotError: names the slots, also those of `held` that do not exist or are named twice.
        """
        import numpy as np

        self._enter()
        live = self._live_pages()
        if self._ledger is not None:
            self._refuse(np.setxor1d(live, self._ledger.live_pages()), "differ between the ring and the debug ledger")
        if held is not None:
            expected = held_pages(held, self.page_size, self._ring.capacity, self._name)
            known = np.concatenate((expected, self._waiting_pages()))
            self._refuse(np.setdiff1d(live, known), "are live but held by nobody (leaked)")
            self._refuse(np.setdiff1d(expected, live), "are held but free")

    def live_pages(self) -> list[int]:
        """Return the numbers of the pages that are handed out, ascending; slow, for checks.

        Raises:
            SlotError: the free ring is damaged.
        """
        pages: list[int] = self._live_pages().tolist()
        return pages

    @property
    def _name(self) -> str:
        return self._ring.journal.name

    def _make_free_list(self, parts: Parts) -> FreeList:
        ids = parts.tensors.rows("free_ring")
        return PageRing(f"space {self.space!r}", ids, self._planned_pages(int(ids.shape[0])))

    def _planned_pages(self, rows: int) -> int:
        if self.size < self.page_size or self.size % self.page_size or rows != self.size // self.page_size:
            raise BuildError(
                f"space {self.space!r}: size {self.size} is not what the plan allocated: {rows} pages of "
                f"{self.page_size} slots; build with the plan's own sizes"
            )
        return rows

    def _enter(self) -> None:
        if self._ledger is not None:
            self._ledger.guard.enter()

    def _take(self, count: int, owners: Sequence[Any] | None) -> torch.Tensor | None:
        self._enter()
        pages = self._ring.take(count)
        if self._ledger is not None and pages is not None:
            try:
                self._ledger.take(pages, owners)
            except BaseException:
                self._ring.rewind(self._ring.journal.mark(count))
                raise
        return pages

    def _grown(
        self,
        growth: lengths.Growth | TailGrowth,
        owners: Sequence[Any] | None,
        to_slots: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor | None:
        """Return the slots of a growth."""
        return self._handed(growth.page_count, self._owners_of_pages(owners, growth), to_slots)

    def _handed(
        self, count: int, owners: Sequence[Any] | None, to_slots: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        """Return the slots of `count` new pages; where they cannot be told, the pages go back."""
        pages = self._take(count, owners)
        try:
            return None if pages is None else to_slots(pages)
        except BaseException:
            self.restore_state(self._ring.journal.mark(count))
            raise

    def _give(self, pages: torch.Tensor) -> None:
        if not pages.numel():
            return
        numbers = None if self._ledger is None else lengths.to_host(pages)  # first: it may fail
        if self._group is None:
            self._ring.give(pages)
            if self._ledger is not None and numbers is not None:
                self._ledger.give(numbers)
            return
        self._ring.stage(pages)
        if self._ledger is not None and numbers is not None:
            self._ledger.queue(numbers)

    def _require_live(self, count: int) -> None:
        self._ring.require_live(self._ring.staged + count)

    def _owners_of_pages(self, owners: Sequence[Any] | None, growth: lengths.Growth | TailGrowth) -> list[Any] | None:
        noted = None if self._ledger is None else owners
        return None if noted is None else lengths.owners_of_pages(noted, growth.new_pages)

    def _slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        if self.page_size == 1:
            return pages
        import torch

        return torch.add(self._offsets, pages.unsqueeze(1), alpha=self.page_size).view(-1)

    def _reset(self, pages: int) -> None:
        self._ring.reset(pages)
        self._group = None
        if self._ledger is not None:
            self._ledger.reset(pages)

    def _checked_size(self, sizes: Mapping[str, int]) -> int:
        size = lengths.new_sizes(sizes, (self.space,), self._name).get(self.space, self.size)
        most = self._ring.max_capacity * self.page_size
        if size % self.page_size or not self.page_size <= size <= most:
            raise SlotError(
                f"{self._name}: size {size} is no whole number of pages of {self.page_size} slots up to {most}, "
                "which is what was allocated"
            )
        return size

    def _waiting_pages(self) -> NDArray[np.int64]:
        """Return the pages that an open free group holds."""
        import numpy as np

        tokens = None if self._group is None else self._group.pages()
        parts = [self._ring.staged_pages()] if tokens is None else [self._ring.staged_pages(), tokens]
        return np.concatenate([lengths.to_host(part) for part in parts])

    def _live_pages(self) -> NDArray[np.int64]:
        import numpy as np

        free = self._ring.peek(self._ring.capacity - self._ring.live).cpu().numpy()
        outside = free[(free < 1) | (free > self._ring.capacity)]
        self._refuse(outside, "are in the free ring but do not exist")
        times = np.bincount(free, minlength=self._ring.capacity + 1)
        self._refuse(np.flatnonzero(times > 1), "are free twice")
        return np.flatnonzero(times[1:] == 0) + 1

    def _refuse(self, pages: NDArray[np.int64], what: str) -> None:
        if len(pages):
            slots = [int(page) * self.page_size for page in pages[:8]]
            named = "" if self._ledger is None else self._ledger.named(pages)
            raise SlotError(f"{self._name}: {len(pages)} pages, at slots {slots}{named}, {what}")


def only_space(query: AllocatorQuery) -> Space:
    """Return the one space of a query, its pages as large as the allocator's: over all ranks that share tokens.

    Raises:
        PlanError: the query asks for several spaces, which is a composite's work.
    """
    if len(query.spaces) != 1:
        names = [space.name for space in query.spaces]
        raise PlanError(f"this allocator serves one space, not {names}; claim a composite such as SWAAllocator")
    space = query.spaces[0]
    return msgspec.structs.replace(space, page_size=space.page_size * query.parallel.dcp_size)


def _offsets(parts: Parts, page_size: int) -> torch.Tensor:
    import torch

    offsets: torch.Tensor = parts.tensors.rows("page_offsets").view(-1)
    torch.arange(page_size, out=offsets)
    return offsets


def free_ring(space: Space) -> Buffer:
    """Return the buffer of a space's free ring: one int64 page number a usable page."""
    return Buffer(
        name="free_ring", role="free_ring", space=space.name, unit=Unit.PAGE, guard=0, shape=(), dtype="int64"
    )
