"""One space numbers the tokens of requests, another lies beside it: pages in step, and a map from one to the other."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.allocators import lengths
from kvdock.allocators.base import Allocator, Together, Undo
from kvdock.allocators.debug import named_holders
from kvdock.allocators.ring import Journal
from kvdock.errors import SlotError
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery

if TYPE_CHECKING:
    import torch


class Share(NamedTuple):
    """What an allocation takes of the side: pages, their owners, and `words`: these pages among all new ones.

    Without `words` every new page gets one, in order; a word of 0 stands for a page that gets none.
    """

    page_count: int
    owners: Sequence[Any] | None = None
    words: Callable[[torch.Tensor], torch.Tensor] | None = None


class MappedAllocator(Allocator):
    """Hands out a page of the side with each page of the numbering; a page of the side may be given back earlier.

    Both sides have pages of one size, so a slot keeps its place in its page, unless a subclass overrides what depends
    on that (`available_size`, `verify_growth`). A subclass keeps the map and says
    how it is read, written and erased, page by page; it maps to 0 what has no page beside it. The inner
    allocators are driven by this class alone, through the interface of `Allocator`.
    """

    numbering: Allocator
    side: Allocator
    _tiers: dict[str, Allocator]
    """Every inner allocator by the name of its space."""
    _map: torch.Tensor
    _journal: Journal
    _grouping = _has_queued = False
    _erased: list[tuple[torch.Tensor, torch.Tensor]]
    """Pages that went back since pages were handed out last, and what they mapped to."""

    def __init__(self, query: AllocatorQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self._erased = []

    @abc.abstractmethod
    def _mapped(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the side's page of each page, 0 where there is none."""

    @abc.abstractmethod
    def _write(self, pages: torch.Tensor, words: torch.Tensor) -> None:
        """Map pages, each named once, to pages of the side."""

    @abc.abstractmethod
    def _erase(self, pages: torch.Tensor | None = None) -> None:
        """Map pages (default: all) to none."""

    @abc.abstractmethod
    def translate(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the side's slots of slots: −1 for −1, 0 where there is none."""

    def alloc(self, need_size: int, owner: Any = None) -> torch.Tensor | None:
        """Return `need_size` slots, each with one beside it; ``None`` if either side is short.

        Raises:
            SlotError: `need_size` is negative or no multiple of the page size.
        """
        count = lengths.whole_pages(need_size, self.page_size, self._journal.name)
        need_size = count * self.page_size
        if not self._has_room(count, count):
            return None
        share = Share(count, None if owner is None else [owner] * count)
        take = lambda: self.numbering.alloc(need_size, owner)  # noqa: E731
        return self._in_step(take, lambda slots: self._pages_of(slots[:: self.page_size]), share)

    def alloc_pages(self, count: int, owners: Sequence[Any] | None = None) -> torch.Tensor | None:
        """Return `count` pages, each with one beside it; ``None`` if either side is short."""
        count = lengths.whole_count(count, "count")
        if not self._has_room(count, count):
            return None
        return self._in_step(
            lambda: self.numbering.alloc_pages(count, owners), lambda pages: pages, Share(count, owners)
        )

    def free(self, indices: torch.Tensor) -> None:
        """Give back the pages of these tokens, and those beside them where there still are any.

        Waits for the device once.
        """
        self.numbering.verify_slots(indices)
        numbers, mapped = self._looked_up(self._pages_of(indices.reshape(-1).to(self._map.dtype)))
        pages, side_pages = (lengths.to_device(found, indices.device) for found in (numbers, mapped[mapped != 0]))
        self.side.verify_pages(side_pages)
        if not self._grouping:
            self.numbering.verify_pages(pages)
            self._give(pages, side_pages, lambda: self.numbering.free_pages(pages))
        else:
            # Several token frees of one group may name one page; the inner group reduces them at its end.
            self._give(pages, side_pages, lambda: self.numbering.free(indices))

    def available_size(self) -> int:
        """Return the slots that both sides could hand out now."""
        return min(self.numbering.available_size(), self.side.available_size())

    def pages_needed(self, prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
        """Return the new pages, the same on both sides."""
        return self.numbering.pages_needed(prefix_lens, seq_lens)

    def verify_pages(self, pages: torch.Tensor) -> None:
        """Raise what `free_pages` would raise for `pages`, and change nothing."""
        lengths.require_row("pages", pages)
        pages = pages.to(self._map.dtype)
        self._verified(pages, pages)

    def verify_slots(self, indices: torch.Tensor) -> None:
        """With debug, raise what `free` would raise for slots, and change nothing. Without, do nothing."""
        self.numbering.verify_slots(indices)

    def verify_live(self, slots: torch.Tensor) -> None:
        """With debug, verify that `slots` may be written: handed out, or padding."""
        self.numbering.verify_live(slots)

    def verify_gone(self, slots: torch.Tensor, request: Any) -> None:
        """With debug, verify that nothing lies beside `slots`, those of whole pages. Without, do nothing.

        Raises:
            SlotError: names the slots that still have one beside them.
        """
        if self.parts.debug and len(left := lengths.to_host(slots[self.translate(slots) != 0])):
            raise SlotError(
                f"request {request!r} says that the slots beside {left[:8].tolist()} ({len(left)} in all) were given "
                "back before, but they are still there; give them back with evict. Nothing was changed"
            )

    def verify_growth(
        self, growth: lengths.Growth, on_device: Mapping[str, torch.Tensor], owners: Sequence[Any] | None = None
    ) -> None:
        """Raise what an extend or decode would raise for its device tensors, on either side, and change nothing.

        Raises:
            SlotError: another number of requests than the host's; with debug, lengths other than the host's,
                or last slots that are not live where a page goes on.
        """
        lengths.check_batch(len(growth.seq), owners, **on_device)
        self.numbering.verify_growth(growth, on_device, owners)
        if self.parts.debug:
            last = self.translate(on_device["last_loc"])
            self.side.verify_growth(growth, {**on_device, "last_loc": last}, owners)

    def live_pages(self) -> list[int] | None:
        """Return the pages that are handed out, ascending, or ``None`` where the numbering cannot tell."""
        return self.numbering.live_pages()

    def free_group_begin(self) -> None:
        """Collect the frees that follow; pages of the side are looked up when they are queued."""
        with Together(*self._tiers.values()):
            for tier in self._tiers.values():
                tier.free_group_begin()
        self._grouping = True

    def free_group_end(self) -> None:
        """Give back what was collected, in every tier, also where one of them refuses.

        After an error that is no refusal the group is open in every tier as before.
        """
        self._enter()
        undo = self.checkpoint()
        if self._has_queued:
            self._freed()  # one side may have given back alone, and a restore is for both or neither
        self._grouping = self._has_queued = False
        try:
            with ExitStack() as ends:  # the last that is put on it goes first
                for tier in reversed(self._tiers.values()):
                    ends.callback(tier.free_group_end)
        except SlotError:
            raise
        except BaseException:
            undo()
            raise

    def checkpoint(self) -> Undo:
        """Return what undoes every free, restore and end of a free group since now, in every tier and the map."""
        undo_tiers = [tier.checkpoint() for tier in self._tiers.values()]
        flags, position, count = (self._grouping, self._has_queued), self._journal.position, len(self._erased)

        def undo() -> None:
            for part in undo_tiers:
                part()
            (self._grouping, self._has_queued), self._journal.position = flags, position
            while len(self._erased) > count:
                self._write(*self._erased.pop())

        return undo

    def clear(self) -> None:
        """Make every slot of all tiers free again and map nothing."""
        for tier in self._tiers.values():
            tier.clear()
        self._forget()

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Change the usable slots of one space or several.

        Raises:
            SlotError: a space has live slots, a free group is open, or a size is no whole number or exceeds its
                buffers; none changes.
        """
        chosen = lengths.new_sizes(sizes, self._tiers, self._journal.name)
        if self._grouping:
            raise SlotError(f"{self._journal.name}: a free group is open; end it before a resize")
        before = {name: tier.size for name, tier in self._tiers.items()}
        changed: list[str] = []
        try:
            for name, tier in self._tiers.items():
                tier.resize({name: chosen.get(name, before[name])})
                changed.append(name)
        except BaseException:
            for name in changed:
                self._tiers[name].resize({name: before[name]})
                self._freed()
            raise
        self.size = self.numbering.size
        self._forget()

    def _grown(
        self, growth: lengths.Growth, take: Callable[[], torch.Tensor | None], share: Share | None = None
    ) -> torch.Tensor | None:
        """Return the slots that `take` gets for a verified growth, its new pages mapped; ``None`` if a side is short."""
        pages, part = growth.page_count, share or Share(growth.page_count)
        if not self._has_room(pages, part.page_count):
            return None
        if not pages:
            return take()
        return self._in_step(take, lambda slots: self._new_pages(slots, growth), part)

    def _has_room(self, pages: int, side_pages: int) -> bool:
        """Return whether both sides can hand out so many pages, together."""
        own, beside = self.numbering.available_size(), self.side.available_size()
        return pages * self.page_size <= own and side_pages * self.side.page_size <= beside

    def _in_step(
        self,
        take: Callable[[], torch.Tensor | None],
        to_pages: Callable[[torch.Tensor], torch.Tensor],
        share: Share,
    ) -> torch.Tensor | None:
        """Return what `take` gets of the numbering, and map its pages to the side's; both sides or neither."""
        self._erased.clear()
        before = self.numbering.backup_state(), self.side.backup_state()
        try:
            found, side_pages = take(), self.side.alloc_pages(share.page_count, share.owners)
            if found is None or side_pages is None:
                raise SlotError(
                    "a side handed out less than its available_size: it is also driven by somebody else; "
                    "allocate through the composite alone"
                )
            words = side_pages if share.words is None else share.words(side_pages)
            self._write(to_pages(found).to(self._map.dtype), words)
        except BaseException:
            self.numbering.restore_state(before[0])
            self.side.restore_state(before[1])
            raise
        self._journal.position += 1
        return found

    def _enter(self) -> None:
        """With debug, refuse a call from another thread, before anything changes."""
        if self.parts.debug:
            self.available_size()

    def _freed(self) -> None:
        """Note that something was given back: what was allocated before cannot be taken back any more."""
        self._journal.freed()

    def _new_pages(self, slots: torch.Tensor, growth: lengths.Growth) -> torch.Tensor:
        """Return the new pages among the new slots of a batch, from one slot a page."""
        if self.page_size == 1:
            return slots
        heads = lengths.to_device(growth.page_heads(), slots.device)
        return self._pages_of(slots.index_select(0, heads))

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        return lengths.pages_of_slots(slots, self.page_size)

    def _looked_up(self, pages: torch.Tensor) -> tuple[lengths.Ints, lengths.Ints]:
        """Return each page once, and the side's page that goes with it (0: none), on the host; waits once."""
        import torch

        both = lengths.to_host(torch.stack((pages, self._mapped(pages)))).reshape(2, -1)
        once = lengths.first_of_each(both[0])
        return both[0][once], both[1][once]

    def _free_bounds(self, table: torch.Tensor, whole: lengths.PageBounds, live: lengths.PageBounds) -> None:
        """Give back the pages `whole` of request rows, and what lies beside those of them that are `live` there."""
        pages = whole.pages(table, self.parts.kernels)
        chosen = lengths.to_device(live.positions_in(whole), table.device)
        self._free_both(pages, pages.index_select(0, chosen))

    def _free_both(self, pages: torch.Tensor, beside: torch.Tensor) -> None:
        """Give back `pages`, and what lies beside those of them that have a page there: `beside`."""
        side_pages = self._verified(pages, beside)
        self._give(pages, side_pages, lambda: self.numbering.free_pages(pages))

    def _give(self, pages: torch.Tensor, side_pages: torch.Tensor, free: Callable[[], None]) -> None:
        """Give back what lies beside `pages`, then those by `free`; after an error both are as they were."""
        if not pages.shape[0]:
            return
        words = side_pages if side_pages.shape[0] == pages.shape[0] else self._mapped(pages)
        self._freed()  # also where it fails: the sides' own marks may be void then
        try:
            with Together(self.side, self.numbering):
                self._erase(pages)
                self.side.free_pages(side_pages)
                free()
        except BaseException:
            self._write(pages, words)
            raise
        self._erased.append((pages, words))
        self._has_queued |= self._grouping

    def _verified(self, pages: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """Return the side's pages of `beside`, those of `pages` that have one, after verifying both sides."""
        self.numbering.verify_pages(pages)  # before the map is read at numbers that may not exist
        side_pages = self._mapped(beside)
        self._verify_mapped(pages, side_pages)
        self.side.verify_pages(side_pages)
        return side_pages

    def _free_side_of(self, pages: torch.Tensor, more: Callable[[], None] = lambda: None) -> None:
        """Give back what lies beside live `pages`, all of which have a page there, then what `more` gives back."""
        if self.parts.debug:
            self.numbering.verify_pages(pages)
        side_pages = self._mapped(pages)
        self._verify_mapped(pages, side_pages)
        self._give(pages, side_pages, more)

    def _verify_mapped(self, pages: torch.Tensor, side_pages: torch.Tensor) -> None:
        """With debug, verify that none of the side's pages of `pages` (or of some of them) went back before."""
        if not self.parts.debug or not bool((side_pages == 0).any()):
            return
        unmapped = pages[self._mapped(pages) == 0]
        raise self._freed_before(named_holders(self.parts.request_pool, lengths.to_host(unmapped), self.page_size))

    def _forget(self) -> None:
        """Map nothing, and drop an open group."""
        self._erase()
        self._erased.clear()
        self._grouping = self._has_queued = False
        self._freed()

    @abc.abstractmethod
    def _freed_before(self, named: str) -> SlotError:
        """Return the error for a page of the side that was given back before; `named` says whose, or nothing."""
