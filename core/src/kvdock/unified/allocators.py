"""Allocators of unified memory: virtual pages are handed out as ever, and each is backed by a page of the buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvdock.allocators import lengths
from kvdock.allocators.base import Shortfall, Undo
from kvdock.allocators.freelist import FreeList
from kvdock.allocators.paged import PagedAllocator
from kvdock.allocators.pure_swa import PureSWAAllocator
from kvdock.allocators.ring import PageRing
from kvdock.allocators.swa import SWAAllocator
from kvdock.errors import BuildError, SlotError
from kvdock.layout import FULL, SWA, Buffer
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery
from kvdock.unified.memory import UnifiedMemory
from kvdock.unified.segment import Owned, Segment, table_buffers

if TYPE_CHECKING:
    import torch


class Taken(NamedTuple):
    """What was taken, and what its space owned, at some time."""

    mark: Any
    owned: Owned


class BackedRing(PageRing):
    """Free virtual pages, each of which has a page of the shared buffer while it is handed out.

    `free` counts numbers alone. A call that fails half-way changed nothing, pages that moved meanwhile aside.
    """

    def __init__(self, space: str, parts: Parts, capacity: int) -> None:
        self._memory = memory_of(parts)
        self.segment = self._memory.join(space, parts.tensors)
        super().__init__(f"space {space!r}", parts.tensors.rows("free_ring"), capacity)
        self._before = self.backup()

    def reset(self, capacity: int) -> None:
        """Hold the pages ``1 … capacity`` again, all free."""
        with self.segment.emptied():
            super().reset(capacity)

    def take(self, count: int) -> torch.Tensor | None:
        """Return `count` virtual pages, each backed; ``None`` where the buffer or the numbering has no room."""
        before = self.backup()
        if count > self.free or not self._memory.secure({self.segment.space: count}):
            return None
        try:
            pages = super().take(count)
            if pages is not None:
                self.segment.back(pages)
        except BaseException:
            super().rewind(before.mark)
            self.segment.retract(before.owned, 0)
            raise
        self._before = before
        return pages

    def give(self, pages: torch.Tensor) -> None:
        """Take back pages and their places."""
        self.commit(pages)

    def commit(self, more: torch.Tensor | None = None) -> None:
        """Take back what was staged, and `more`, with their places."""
        before = self.staged
        try:
            if more is not None:
                self.stage(more)
            if self.staged:
                self._memory.release(self.segment.space, self.staged_pages() if before or more is None else more)
        except SlotError:
            self.unstage()
            raise
        except BaseException:
            self.staged = before
            raise
        super().commit()

    def backup(self) -> Taken:
        """Return the present point, for `rewind`."""
        return Taken(self.journal.mark(), self.segment.backup())

    def rewind(self, mark: object) -> int:
        """Take back every page handed out since `mark`, wherever it lies by now, and what the space grew for it.

        Costs what it takes back. Of a mark without windows those of the last `take` are known.
        """
        point, owned = mark if isinstance(mark, Taken) else (mark, None)
        taken = super().rewind(point)
        if point == self._before.mark:
            owned = owned or self._before.owned
        try:
            if taken:
                self._memory.release(self.segment.space, self.peek(taken), owned)
        except BaseException:
            super().take(taken)
            raise
        return taken


class UnifiedAllocator(PagedAllocator):
    """Hands out virtual pages of one space of unified memory; requests never see where they lie.

    `available_size` is what can be had at this moment, if need be by closing holes of other spaces, so it falls when
    they grow. An `alloc` that closes holes waits for the device; one that finds a gap does not. A restore costs
    what it takes back.
    """

    features: ClassVar[frozenset[str]] = frozenset({"unified_memory"})
    options: ClassVar[frozenset[str]] = frozenset({"lazy_compaction"})

    @classmethod
    def buffers(cls, query: AllocatorQuery) -> tuple[Buffer, ...]:
        """Declare the free ring of virtual pages, offsets, and the tables: 20 bytes a page."""
        return (*super().buffers(query), *table_buffers(query.spaces[0].name))

    @property
    def memory(self) -> UnifiedMemory:
        """The buffer that this space shares."""
        return memory_of(self.parts)

    @property
    def segment(self) -> Segment:
        """What this space owns of it."""
        return self._backed.segment

    @property
    def numbers(self) -> int:
        """Pages that have a number left, whatever the buffer holds."""
        return self._backed.free

    def available_size(self) -> int:
        """Return the slots that could be handed out now, those of others' holes included where pages may move."""
        return min(super().available_size(), self.memory.available(self.space) * self.page_size)

    def backup_state(self) -> Any:
        """Return a token of the present allocations, and of what the space owns."""
        self._enter()
        return self._backed.backup()

    def checkpoint(self) -> Undo:
        """Return what undoes what happens since now in a block of `UnifiedMemory.whole`, which brings places back."""
        return super().checkpoint()

    def restore_state(self, state: Any) -> None:
        """Take back every page handed out since `state`, with its place."""
        with self.memory.whole():
            super().restore_state(state)

    def shortfall(self, pages: int, swa_pages: int | None = None) -> tuple[Shortfall, ...]:
        """Say what is missing for `pages` pages, and which other space could give it."""
        self._enter()
        count = lengths.natural(pages if swa_pages is None else swa_pages, "pages")
        return self.memory.shortfall({self.space: count}, {self.space: self.numbers})

    def check(self, held: torch.Tensor | None = None) -> None:
        """Verify the ring, that exactly the pages of `held` are live, and the tables of every space; O(capacity).

        Raises:
            SlotError: names the slots, or the space whose tables are damaged.
        """
        super().check(held)
        self.segment.check_live(self.live_pages())
        self.memory.check()

    def _make_free_list(self, parts: Parts) -> FreeList:
        rows = int(parts.tensors.rows("free_ring").shape[0])
        self._backed = BackedRing(self.space, parts, self._planned_pages(rows))
        return self._backed


class UnifiedPureSWAAllocator(UnifiedAllocator, PureSWAAllocator):
    """The same where every attention layer slides, and requests are numbered in sliding slots."""


class UnifiedSWAAllocator(SWAAllocator):
    """Full and sliding pages in step, both from one buffer: what one side takes the other cannot have."""

    features: ClassVar[frozenset[str]] = frozenset({"unified_memory"})
    options: ClassVar[frozenset[str]] = frozenset({"lazy_compaction"})

    @property
    def memory(self) -> UnifiedMemory:
        """The buffer that both sides share."""
        return memory_of(self.parts)

    def available_size(self) -> int:
        """Return the slots that both sides could hand out together."""
        most = super().available_size() // self.page_size
        return self.memory.together((FULL, SWA), most) * self.page_size

    def shortfall(self, pages: int, swa_pages: int | None = None) -> tuple[Shortfall, ...]:
        """Say which numbering lacks how many slots, or what both sides lack together and who could give it."""
        self._enter()
        counts = [lengths.natural(count, "pages") for count in (pages, pages if swa_pages is None else swa_pages)]
        numbers = {name: side.numbers for name, side in self._tiers.items() if isinstance(side, UnifiedAllocator)}
        return self.memory.shortfall(dict(zip((FULL, SWA), counts, strict=True)), numbers)

    def free_group_end(self) -> None:
        """Give back what was collected; after an error that is no refusal the group is open on both sides as before."""
        with self.memory.whole(keeps_refused=True):
            super().free_group_end()

    def restore_state(self, state: Any) -> None:
        """Take back what both sides handed out since `state`, or after an error nothing."""
        with self.memory.whole():
            super().restore_state(state)

    def _give(self, pages: torch.Tensor, side_pages: torch.Tensor, free: Callable[[], None]) -> None:
        """Give back pages and what lies beside them, or after an error neither."""
        with self.memory.whole():
            super()._give(pages, side_pages, free)

    def _has_room(self, pages: int, side_pages: int) -> bool:
        return super()._has_room(pages, side_pages) and self.memory.fits({FULL: pages, SWA: side_pages})


def memory_of(parts: Parts) -> UnifiedMemory:
    """Return the shared buffer that a class was given.

    Raises:
        BuildError: it was given none.
    """
    if not isinstance(parts.memory, UnifiedMemory):
        raise BuildError("this plan has no shared byte buffer; plan with unified_memory=true")
    return parts.memory
