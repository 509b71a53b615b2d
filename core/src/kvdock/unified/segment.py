"""The pages of one space in a shared byte buffer: which virtual page lies where, and which places are free.

Three tables of int32, in places of the space's stretch: `page_of` (virtual page → page of the grid, the kernels' map),
`owner_of` (place → virtual page, or −1 − n for the n-th of `holes`), and `holes`, the free places in no order. Every
call costs what it touches, whatever the space's size; counts are the host's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from kvdock.errors import SlotError
from kvdock.layout import Buffer, Unit
from kvdock.unified.geometry import Stretch, Window

if TYPE_CHECKING:
    import torch

    from kvdock.kernels.interface import Kernels
    from kvdock.pools.storage import Tensors

_TABLES = ("page_of", "owner_of", "holes")
MOVED_AT_ONCE = 2**24
"""Bytes of pages that one copy of a compaction holds beside the buffer."""


@runtime_checkable
class Event(Protocol):
    """Work on a device that will be finished, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether it is finished."""

    def wait(self) -> object:
        """Let what is launched from now on wait for it; the host goes on."""


def table_buffers(space: str) -> tuple[Buffer, ...]:
    """Declare the tables of a space, 12 bytes a page."""
    page_of = Buffer(name="page_of", role="map", space=space, unit=Unit.PAGE, shape=(), dtype="int32")
    names = ("owner_of", "map"), ("holes", "free_ring")
    return (
        page_of,
        *(
            Buffer(name=name, role=role, space=space, unit=Unit.PAGE, shape=(), dtype="int32", guard=0)
            for name, role in names
        ),
    )


class Owned(NamedTuple):
    """What a space owned at some time, and how often it had given something up by then."""

    window: Window
    narrowed: int


class Segment:
    """What one space owns of the buffer: the places `window`, of which `holes` are free.

    `UnifiedMemory` alone changes windows; whoever hands out virtual pages backs and releases them. A call that fails
    half-way, in a copy or a write, leaves all as it was: a hole and what lies outside the window may hold anything, and
    counts change last. On the host tables are read and written through numpy, which starts each step in a third of the
    time; both forms run the same lines.
    """

    def __init__(self, stretch: Stretch, tables: Tensors, pages: torch.Tensor, kernels: Kernels, home: int = 0) -> None:
        self.stretch = stretch
        self.space = stretch.space
        self.page_of = tables.rows("page_of")
        """Page of the grid of each virtual page; 0, the padding, for page 0 and those that are not live."""
        self._is_host = self.is_host(self.page_of)
        self._page_of, self._owner_of, self._holes = (self._array(tables.rows(n)) for n in _TABLES)
        self._pages = pages
        self._apart: list[torch.Tensor] = []
        self._kernels = kernels
        self.bytes_moved = self.pages_moved = self._narrowed = 0
        self._home = home  # the place at which it owns nothing
        self.reset(Window(home, home))

    @staticmethod
    def is_host(table: torch.Tensor) -> bool:
        """Return whether a table is read and written through numpy."""
        return bool(table.is_cpu)

    @property
    def live(self) -> int:
        """Pages that are backed."""
        return self.window.high - self.window.low - self.holes

    def reset(self, window: Window) -> None:
        """Own the places of a window without a live page, which are all holes."""
        self.page_of.zero_()
        self.drop()
        self.window = Window(window.low, window.low)
        self.widen(window)

    def drop(self) -> None:
        """Own nothing, at the end at which the space begins, now that no page is live."""
        self.window, self.holes = Window(self._home, self._home), 0
        self._narrowed += 1

    @contextlib.contextmanager
    def emptied(self) -> Iterator[None]:
        """Own nothing once what is done inside succeeded."""
        low, high = self.window
        try:
            self.page_of.zero_()
            yield
        except BaseException:
            owners, pages = self._owner_of[low:high], self._numbers(low, high, 1) + self.stretch.first
            self._page_of[owners[owners >= 0]] = pages[owners >= 0]
            raise
        self.drop()

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return where virtual slots lie: −1 for −1, and slot 0 for those of the padding. Never waits."""
        return self._kernels.translate(self.page_of, slots, self.stretch.page_size)

    def move_along(self, views: Sequence[torch.Tensor]) -> None:
        """Let views ``[pages, page_size, …]`` of this space that lie apart from its pages move with them."""
        self._apart += [view.unsqueeze(1) for view in views]

    def back(self, pages: torch.Tensor) -> None:
        """Give virtual pages ``[n]`` a place each, from the holes, of which there are enough; `release` is the opposite."""
        numbers, start = self._array(pages), self.holes - pages.shape[0]
        places = self._holes[start : self.holes]
        try:
            self._bind(numbers, places)
        except BaseException:
            self._unbind(numbers, places, start)
            raise
        self.holes = start

    def release(self, pages: torch.Tensor) -> None:
        """Make holes of the places of virtual pages ``[n]``."""
        numbers, end = self._array(pages), self.holes + pages.shape[0]
        places = self._page_of[numbers] - self.stretch.first
        try:
            self._unbind(numbers, places, self.holes)
        except BaseException:
            self._bind(numbers, places)
            raise
        self.holes = end

    def widen(self, window: Window) -> None:
        """Own a window that holds the present one; what is new are holes."""
        old, end = self.window, self.holes
        for low, high in ((window.low, min(old.low, window.high)), (max(old.high, window.low), window.high)):
            if high > low:
                end = self._list(self._numbers(low, high, 1), end)
        self.window, self.holes = window, end

    def backup(self) -> Owned:
        """Return what is owned now, for `retract`."""
        return Owned(self.window, self._narrowed)

    def retract(self, owned: Owned, taken: int) -> None:
        """Own what was owned then, where it only grew since and the `taken` pages came back; else do nothing.

        Whatever lies outside is a hole then, and stands among those that changed since, so nothing has to wait.
        """
        old, window = self.window, owned.window
        grown = (old.high - old.low) - (window.high - window.low)
        if owned.narrowed != self._narrowed or not grown:
            return
        start = self.holes - grown - min(taken, self.holes - grown)
        changed = self._holes[start : self.holes] + 0
        try:
            self._list(changed[self._inside_first((changed < window.low) | (changed >= window.high))], start)
        except BaseException:
            self._list(changed, start)
            raise
        self.window, self.holes = window, self.holes - grown

    def _inside_first(self, is_outside: Any) -> Any:
        """Return the order that puts what is inside first."""
        if self._is_host:
            return is_outside.argsort(kind="stable")
        return is_outside.to(self.page_of.dtype).argsort(stable=True)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all that virtual pages ``[n]`` hold to others."""
        pages = (self.page_of.index_select(0, found).long() for found in (target, source))
        self._kernels.move([self._pages, *self._apart], *pages)

    def narrow(self, window: Window) -> None:
        """Own a window that leaves out one end of the present one: pages there move into holes, of which there are enough.

        Costs what lies outside, of which the list of holes loses its end: holes there that stay take the places in the
        list of those that lie outside, and the others are filled. Waits for the device for the counts of these.
        """
        old = self.window
        outside = slice(old.low, window.low) if window.low > old.low else slice(window.high, old.high)
        owners, left = self._owner_of[outside], self.holes - (outside.stop - outside.start)
        live, tail = self._where(owners >= 0), self._holes[left : self.holes]
        inside = tail.take(self._where(tail >= window.low if window.low > old.low else tail < window.high))
        vacant = ~owners.take(self._where(owners < 0))
        vacant = vacant.take(self._where(vacant < left))
        kept, targets = inside[: vacant.shape[0]], inside[vacant.shape[0] :]
        try:
            self._holes[self._wide(vacant)], self._owner_of[self._wide(kept)] = kept, ~vacant
            if count := targets.shape[0]:
                self._copy(live + outside.start, targets)
                self._bind(owners.take(live), targets)
        except BaseException:
            self._undo(outside, left)
            raise
        self.window, self.holes = window, left
        self._narrowed += 1
        self.pages_moved += count
        self.bytes_moved += count * self.stretch.page_nbytes

    def _undo(self, outside: slice, left: int) -> None:
        """Undo what `narrow` began: what lies outside still says whose it is, or where it was in the list of holes."""
        places, owners = self._numbers(outside.start, outside.stop, 1), self._owner_of[outside]
        self._holes[-1 - owners[owners < 0]] = places[owners < 0]
        self._list(self._holes[left : self.holes], left)
        self._page_of[owners[owners >= 0]] = places[owners >= 0] + self.stretch.first

    def owned(self, view: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a view ``[pages, …]`` of this space's grid that are its own: the padding, its window."""
        first = self.stretch.first
        return [view[:1], view[first + self.window.low : first + self.window.high]]

    def check(self) -> None:
        """Verify that tables and counts agree; O(places).

        Raises:
            SlotError: names the space and what is wrong.
        """
        import torch

        low, high = self.window
        owners, holes = self._tensor(self._owner_of[low:high]), self._tensor(self._holes[: self.holes])
        is_live = owners >= 0
        named = torch.cat((holes, (self.page_of[self.page_of != 0] - self.stretch.first).long()))
        if not torch.equal(named.sort().values, torch.arange(low, high, device=named.device)):
            raise SlotError(f"space {self.space!r}: a place is lost, or is two pages' or a page's and free")
        backed = owners[is_live]
        places = is_live.nonzero().view(-1) + low + self.stretch.first
        if not torch.equal(self.page_of[backed].long(), places) or (backed == 0).any():
            raise SlotError(f"space {self.space!r}: the maps of pages to places and back differ")
        if not torch.equal(-1 - self._tensor(self._owner_of)[holes], torch.arange(self.holes, device=holes.device)):
            raise SlotError(f"space {self.space!r}: the list of holes is damaged")

    def check_live(self, pages: Sequence[int]) -> None:
        """Verify that exactly these virtual pages (in ascending order) have a place.

        Raises:
            SlotError: names the others.
        """
        backed = self.page_of.nonzero().view(-1).tolist()
        if wrong := sorted(set(backed).symmetric_difference(pages)):
            raise SlotError(
                f"space {self.space!r}: pages {wrong[:8]} ({len(wrong)} in all) have a place but are handed out to "
                "nobody, or the other way round"
            )

    def _bind(self, pages: Any, places: Any) -> None:
        self._page_of[self._wide(pages)] = self._short(places) + self.stretch.first
        self._owner_of[self._wide(places)] = self._short(pages)

    def _unbind(self, pages: Any, places: Any, start: int) -> None:
        self._list(places, start)
        self._page_of[pages] = 0

    def _list(self, places: Any, start: int) -> int:
        """Let the holes from `start` on be these, and return their end."""
        end = start + int(places.shape[0])
        self._holes[start:end] = places
        self._owner_of[self._wide(places)] = self._numbers(-1 - start, -1 - end, -1)
        return end

    def _copy(self, source: Any, target: Any) -> None:
        """Copy what lies at places to others."""
        pages = [self._tensor(places) + self.stretch.first for places in (target, source)]
        at_once = max(1, MOVED_AT_ONCE // self.stretch.page_nbytes)
        for start in range(0, len(source), at_once):
            self._kernels.move([self._pages, *self._apart], *(found[start : start + at_once] for found in pages))

    def _array(self, values: torch.Tensor) -> Any:
        return values.numpy() if self._is_host else values

    def _tensor(self, values: Any) -> torch.Tensor:
        import torch

        found: torch.Tensor = torch.from_numpy(values) if self._is_host else values
        return found.long()

    def _where(self, chosen: Any) -> Any:
        """Return the positions that are chosen; waits for the device."""
        return chosen.nonzero()[0] if self._is_host else chosen.nonzero().view(-1)

    def _wide(self, values: Any) -> Any:
        """Return numbers in the type that the host reads indices in: half the time of a write."""
        return values.astype("intp", copy=False) if self._is_host else values

    def _short(self, values: Any) -> Any:
        """Return numbers in the type of the tables."""
        return values.astype("int32", copy=False) if self._is_host else values.to(self.page_of.dtype)

    def _numbers(self, start: int, stop: int, step: int) -> Any:
        if self._is_host:
            import numpy as np

            return np.arange(start, stop, step, dtype=np.int32)
        import torch

        return torch.arange(start, stop, step, dtype=torch.int32, device=self.page_of.device)
