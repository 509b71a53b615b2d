"""Allocators of unified memory: virtual pages are handed out as ever, and each is backed by a page of the buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvdock.allocators import lengths
from kvdock.allocators.base import Shortfall
from kvdock.allocators.freelist import FreeList
from kvdock.allocators.paged import PagedAllocator
from kvdock.allocators.pure_swa import PureSWAAllocator
from kvdock.allocators.ring import PageRing
from kvdock.allocators.swa import SWAAllocator
from kvdock.errors import BuildError
from kvdock.layout import FULL, SWA, Buffer
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery
from kvdock.unified.memory import UnifiedMemory
from kvdock.unified.segment import Owned, Segment, table_buffers

if TYPE_CHECKING:
    import torch


class BackedRing:
    """A free list of virtual pages, each of which has a page of the shared buffer while it is handed out.

    `free` is what the buffer and the numbering allow at this moment, so it changes with what other spaces hold.
    """

    def __init__(self, ring: PageRing, memory: UnifiedMemory, space: str) -> None:
        self._ring = ring
        self._memory = memory
        self._space = space
        segment = memory.segment(space)
        if segment is None:
            raise BuildError(f"space {space!r} has not joined the shared buffer; build with the plan's own parts")
        self.segment: Segment = segment
        self.journal = ring.journal

    @property
    def capacity(self) -> int:
        """Pages that can be numbered."""
        return self._ring.capacity

    @property
    def free(self) -> int:
        """Pages that could be handed out now, others' holes included where pages may move."""
        return min(self._ring.free, self._memory.available(self._space))

    @property
    def staged(self) -> int:
        """Pages that wait for `commit`; they keep their places until then."""
        return self._ring.staged

    @property
    def live(self) -> int:
        """Pages that are handed out."""
        return self._ring.live

    @property
    def max_capacity(self) -> int:
        """Pages that the tables have room for."""
        return self._ring.max_capacity

    def reset(self, capacity: int) -> None:
        """Hold the pages ``1 … capacity`` again, all free."""
        self._ring.reset(capacity)
        self._memory.reset(self._space)

    def take(self, count: int) -> torch.Tensor | None:
        """Return `count` virtual pages, each backed; ``None`` where the buffer or the numbering has no room."""
        if count > self._ring.free or not self._memory.secure({self._space: count}):
            return None
        before = self.journal.mark()
        pages = self._ring.take(count)
        if pages is None:
            return None
        try:
            self.segment.back(pages)
        except BaseException:
            self._ring.rewind(before)
            raise
        return pages

    def give(self, pages: torch.Tensor) -> None:
        """Take back pages and their places."""
        self._ring.give(pages)
        self._release(pages)

    def stage(self, pages: torch.Tensor) -> None:
        """Copy pages, to be taken back by `commit`."""
        self._ring.stage(pages)

    def commit(self, more: torch.Tensor | None = None) -> None:
        """Take back what was staged, and `more`, with their places."""
        import torch

        parts = [self._ring.staged_pages(), *([] if more is None else [more])]
        self._ring.commit(more)
        self._release(torch.cat(parts))

    def unstage(self) -> None:
        """Forget what was staged."""
        self._ring.unstage()

    def staged_pages(self) -> torch.Tensor:
        """Return what was staged, for checks."""
        return self._ring.staged_pages()

    def require_live(self, count: int) -> None:
        """Refuse to take back more pages than are handed out."""
        self._ring.require_live(count)

    def rewind(self, mark: object) -> int:
        """Take back every page handed out since `mark`, wherever it lies by now; costs what it takes back."""
        taken = self._ring.rewind(mark)
        self._release(self._ring.peek(taken))
        return taken

    def peek(self, count: int) -> torch.Tensor:
        """Return the free pages that come next."""
        return self._ring.peek(count)

    def _release(self, pages: torch.Tensor) -> None:
        if pages.shape[0]:
            self.segment.release(pages)
            self._memory.freed(self._space)


class Taken(NamedTuple):
    """What `UnifiedAllocator.backup_state` returns."""

    mark: Any
    owned: Owned


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

    def backup_state(self) -> Any:
        """Return a token of the present allocations."""
        return Taken(super().backup_state(), self.segment.backup())

    def restore_state(self, state: Any) -> None:
        """Take back every page handed out since `state`, and what the space grew for them unless pages moved since.

        Raises:
            SlotError: something was freed (or queued in a group) since, or `state` is not of this allocator.
        """
        if not isinstance(state, Taken):
            super().restore_state(state)
            return
        before = self._ring.live
        super().restore_state(state.mark)
        self.segment.retract(state.owned, before - self._ring.live)

    def shortfall(self, pages: int, swa_pages: int | None = None) -> tuple[Shortfall, ...]:
        """Say what is missing for `pages` pages, and which other space could give it."""
        lacks = self.memory.shortfall(
            self.space, lengths.whole_count(pages if swa_pages is None else swa_pages, "pages")
        )
        return () if lacks is None else (lacks,)

    def check(self, held: torch.Tensor | None = None) -> None:
        """Verify the ring, that exactly the pages of `held` are live, and the tables of every space; O(capacity).

        Raises:
            SlotError: names the slots, or the space whose tables are damaged.
        """
        super().check(held)
        self.memory.check()

    def _make_free_list(self, parts: Parts) -> FreeList:
        memory, ids = memory_of(parts), parts.tensors.rows("free_ring")
        memory.join(self.space, parts.tensors)
        ring = PageRing(f"space {self.space!r}", ids, self._planned_pages(int(ids.shape[0])))
        self._backed = BackedRing(ring, memory, self.space)
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
        """Say which side lacks how many slots; where each would have its own, what both lack together."""
        found = super().shortfall(pages, swa_pages)
        sliding = pages if swa_pages is None else swa_pages
        if found or self._has_room(pages, sliding):
            return found
        available = self.available_size()
        return (
            Shortfall(space=FULL, needed=pages * self.page_size, available=min(available, pages * self.page_size - 1)),
        )

    def _has_room(self, pages: int, side_pages: int) -> bool:
        return super()._has_room(pages, side_pages) and self.memory.secure({FULL: pages, SWA: side_pages})


def memory_of(parts: Parts) -> UnifiedMemory:
    """Return the shared buffer that a class was given.

    Raises:
        BuildError: it was given none.
    """
    if not isinstance(parts.memory, UnifiedMemory):
        raise BuildError("this plan has no shared byte buffer; plan with unified_memory=true")
    return parts.memory
