"""The byte buffer that several spaces share: who owns what of it, when pages move, and what is free."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvdock.allocators.base import Shortfall
from kvdock.errors import BuildError, SlotError
from kvdock.unified.geometry import Line, Window
from kvdock.unified.segment import Event, Segment

if TYPE_CHECKING:
    import torch

    from kvdock.kernels.interface import Kernels
    from kvdock.pools.storage import Tensors

MOVED_BYTES = 2**24
"""Bytes that one call of `compact` moves at most, unless it is told: far less than a decode step reads."""
HEADROOM = 16
"""`compact` stops where a part of this many of the buffer lies between the spaces, ready for whoever grows."""


class Share(NamedTuple):
    """Pages of one space: handed out, free now, and free once holes are closed."""

    space: str
    live: int
    free_now: int
    free_after: int


class UnifiedMemory:
    """Gives each space the pages that it asks for, from holes of its own, from gaps, or after closing others' holes.

    * With no gate closed and no forward pass in flight, `secure` fails only if the whole pages of all spaces, paddings
      and grids counted, plus those asked for exceed the buffer.
    * Virtual pages stay valid whatever moves; what a page holds moves with it.
    * No page moves while a gate is closed (`gate`) or a forward pass is in flight (`forward`).
    * A call costs the pages that it hands over, or that another space has to give up for them; never the buffer.

    Owned by one thread; nothing locks.
    """

    def __init__(self, line: Line, raw: torch.Tensor, kernels: Kernels, is_lazy: bool = True) -> None:
        self.line = line
        self.is_lazy = is_lazy
        """Whether holes stay until `compact` or an allocation needs them; else a free closes them."""
        self._raw = raw
        self._kernels = kernels
        self._segments: dict[str, Segment] = {}
        self._holds: dict[object, str] = {}
        self._pending: list[Event] = []
        self.passes = 0
        """Compactions that moved pages, or would have if there had been any outside."""

    @property
    def bytes_moved(self) -> int:
        """Bytes that compactions copied so far."""
        return sum(segment.bytes_moved for segment in self._segments.values())

    def join(self, space: str, tables: Tensors) -> Segment:
        """Return the segment of a space, on tables of its own.

        Raises:
            BuildError: the space does not share this buffer, or has joined.
        """
        import torch

        stretch = next((found for found in self.line.stretches if found.space == space), None)
        if stretch is None or space in self._segments:
            named = ", ".join(found.space for found in self.line.stretches)
            raise BuildError(f"space {space!r} cannot join a buffer of {named} (once each); build with the plan's own")
        words = self._raw[: self.line.high].view(torch.int64)
        first, page = stretch.start - stretch.first * stretch.page_nbytes, stretch.page_nbytes // 8
        shape = ((self.line.high - first) // stretch.page_nbytes, 1, page)
        pages = words.as_strided(shape, (page, page, 1), first // 8)
        segment = self._segments[space] = Segment(stretch, tables, pages, self._kernels)
        segment.reset(self._nothing(space))
        return segment

    def segment(self, space: str) -> Segment | None:
        """Return what a space owns; ``None`` for one that does not share this buffer."""
        return self._segments.get(space)

    # When pages may move.

    @property
    def can_move(self) -> bool:
        """Whether no gate is closed and no forward pass is in flight."""
        return not self._holds

    @contextlib.contextmanager
    def gate(self, what: str = "a gate") -> Iterator[None]:
        """Forbid to move pages, as long as a transfer holds some of them; gates may be closed in any number."""
        ticket = self.close_gate(what)
        try:
            yield
        finally:
            self.open_gate(ticket)

    def close_gate(self, what: str = "a gate") -> object:
        """Forbid to move pages until `open_gate` of the ticket that this returns; `what` is named where that matters."""
        ticket = object()
        self._holds[ticket] = what
        return ticket

    def open_gate(self, ticket: object) -> None:
        """Take back one `close_gate`.

        Raises:
            SlotError: it was taken back before.
        """
        if self._holds.pop(ticket, None) is None:
            raise SlotError("this gate is open already; open each gate once")

    @contextlib.contextmanager
    def forward(self, event: Event | None = None) -> Iterator[None]:
        """Forbid to move pages while a forward pass is launched, and let later moves wait for `event`, its end.

        Without an event the pass is over when the context ends, as on a device that the host waits for.
        """
        ticket = self.close_gate("a forward pass in flight")
        try:
            yield
        finally:
            self.open_gate(ticket)
            if event is not None:
                self._pending.append(event)

    # What is free.

    def free_now(self, space: str) -> int:
        """Return the pages that a space could take without moving any."""
        return self._segments[space].holes + self.line.gap(space, self._windows())

    def free_after(self, space: str) -> int:
        """Return the pages that a space could take once the holes of the others are closed."""
        live = self.live()
        return max(0, self.line.room(space, live) - live[space])

    def available(self, space: str) -> int:
        """Return the pages that `secure` could get for a space as things are."""
        return self.free_after(space) if self.can_move else self.free_now(space)

    def live(self) -> dict[str, int]:
        """Return the pages of each space that are handed out."""
        return {space: segment.live for space, segment in self._segments.items()}

    def shares(self) -> tuple[Share, ...]:
        """Return what each space has, and could have."""
        return tuple(
            Share(space, segment.live, self.free_now(space), self.free_after(space))
            for space, segment in self._segments.items()
        )

    def together(self, spaces: tuple[str, ...], most: int) -> int:
        """Return how many pages, up to `most`, each of several spaces could take in step as things are."""
        if self._fits(_each(spaces, most)):
            return most
        return bisect.bisect_left(range(1, most + 1), True, key=lambda n: not self._fits(_each(spaces, n)))

    def _fits(self, more: Mapping[str, int]) -> bool:
        if self.can_move:
            return self.line.fits({space: count + more.get(space, 0) for space, count in self.live().items()})
        return self.line.grown(self._windows(), self._beyond_holes(more)) is not None

    def shortfall(self, space: str, pages: int) -> Shortfall | None:
        """Return what `pages` pages of a space lack, and which other space could give it; ``None``: nothing."""
        available, size = self.available(space), self._segments[space].stretch.page_size
        if pages <= available:
            return None
        live = self.live()
        wanted = {**live, space: live[space] + pages}
        held = tuple(dict.fromkeys(self._holds.values())) if self.line.fits(wanted) else ()
        givers = [(name, self._to_give(wanted, name)) for name in live if name != space and not held]
        sizes = {name: segment.stretch.page_size for name, segment in self._segments.items()}
        return Shortfall(
            space=space,
            needed=pages * size,
            available=available * size,
            givers=tuple((name, count * sizes[name]) for name, count in givers if count is not None),
            held_by=held,
        )

    def _to_give(self, wanted: Mapping[str, int], space: str) -> int | None:
        """Return the fewest pages that one space must give for others to have what they want."""
        most = wanted[space]
        given = bisect.bisect_left(
            range(most + 1), True, key=lambda count: self.line.fits({**wanted, space: most - count})
        )
        return given if given <= most else None

    # Taking and giving.

    def secure(self, more: Mapping[str, int]) -> bool:
        """Make holes for so many more pages of each space, or change nothing and return ``False``.

        Takes gaps first, and closes holes of others only where gaps are too small and pages may move.
        """
        lacking = self._beyond_holes(more)
        if not lacking:
            return True
        windows = self.line.grown(self._windows(), lacking)
        if windows is None and self.can_move:
            wanted = {space: count + more.get(space, 0) for space, count in self.live().items()}
            windows = self.line.windows(self._windows(), wanted)
        if windows is None:
            return False
        self._shift(windows)
        return True

    def freed(self, space: str) -> None:
        """Note that pages of a space became holes: without lazy compaction they are closed, if pages may move."""
        segment = self._segments[space]
        if not segment.live or (not self.is_lazy and self.can_move):
            self._close(segment, segment.holes)

    def compact(self, max_bytes: int = MOVED_BYTES, headroom_bytes: int | None = None) -> int:
        """Close holes at a quiescent point, within `max_bytes` of pages, and return the bytes that moved.

        Stops where `headroom_bytes` (default: a part of the buffer) lie between the spaces. Does nothing while pages
        may not move.
        """
        before = self.bytes_moved
        goal = self.line.high // HEADROOM if headroom_bytes is None else headroom_bytes
        if not self.can_move:
            return 0
        for segment in sorted(self._segments.values(), key=lambda part: -part.holes * part.stretch.page_nbytes):
            page = segment.stretch.page_nbytes
            lacking = min(goal - self.gap_bytes(), max_bytes - (self.bytes_moved - before))
            count = min(segment.holes, -(-lacking // page) if lacking >= page else 0)
            if count > 0:
                self._close(segment, count)
        return self.bytes_moved - before

    def gap_bytes(self) -> int:
        """Return the bytes that no space owns."""
        owned = sum((s.window.high - s.window.low) * s.stretch.page_nbytes for s in self._segments.values())
        return self.line.high - self.line.low - owned

    def copy(self, space: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all that virtual pages ``[n]`` of a space hold to others; every source is read before a target is written."""
        self._wait()
        self._segments[space].copy(source, target)

    def zero(self) -> None:
        """Zero the whole buffer, whoever owns its pages."""
        self._raw.zero_()

    def reset(self, space: str) -> None:
        """Let a space own nothing."""
        self._segments[space].reset(self._nothing(space))

    def check(self) -> None:
        """Verify the tables of every space, and that what they own does not overlap.

        Raises:
            SlotError: names what is wrong.
        """
        end = self.line.low
        for stretch in self.line.stretches:
            segment = self._segments[stretch.space]
            segment.check()
            if segment.window.high > segment.window.low:
                if stretch.at(segment.window.low) < end or segment.window.high > stretch.places:
                    raise SlotError(f"space {stretch.space!r} owns bytes of another in the shared buffer")
                end = stretch.at(segment.window.high)
        if end > self.line.high:
            raise SlotError("the spaces own more bytes than the shared buffer has")

    def _nothing(self, space: str) -> Window:
        is_last = space == self.line.stretches[-1].space
        end = self.line.stretches[-1].places if is_last else 0
        return Window(end, end)

    def _windows(self) -> dict[str, Window]:
        return {
            stretch.space: self._segments[stretch.space].window
            if stretch.space in self._segments
            else self._nothing(stretch.space)
            for stretch in self.line.stretches
        }

    def _beyond_holes(self, more: Mapping[str, int]) -> dict[str, int]:
        lacking = {space: count - self._segments[space].holes for space, count in more.items()}
        return {space: count for space, count in lacking.items() if count > 0}

    def _close(self, segment: Segment, count: int) -> None:
        """Give up `count` places at the end at which a space grows."""
        low, high = segment.window
        is_last = segment.stretch is self.line.stretches[-1]
        self._narrow(segment, Window(low + count, high) if is_last else Window(low, high - count))

    def _narrow(self, segment: Segment, window: Window) -> None:
        self._wait()
        self.passes += 1
        segment.narrow(window)

    def _wait(self) -> None:
        """Let what is launched from now on wait for the forward passes that were launched before."""
        for event in self._pending:
            if not event.query():
                event.wait()
        self._pending.clear()

    def _shift(self, windows: Mapping[str, Window]) -> None:
        """Let every space own its window: what goes up first, from the top; then what goes down, from the bottom.

        So a place is given up before another space takes it. A space that owns nothing takes its window at the end.
        """
        segments = [self._segments[stretch.space] for stretch in self.line.stretches]
        owning = [segment for segment in segments if segment.window.high > segment.window.low]
        for segment in reversed(owning):
            (low, high), to = segment.window, windows[segment.stretch.space]
            if to.high > high:
                segment.widen(Window(low, to.high))
            if to.low > low:
                self._narrow(segment, Window(to.low, segment.window.high))
        for segment in owning:
            (low, high), to = segment.window, windows[segment.stretch.space]
            if to.low < low:
                segment.widen(Window(to.low, high))
            if to.high < high:
                self._narrow(segment, Window(segment.window.low, to.high))
        for space, to in windows.items():
            if self._segments[space] not in owning:
                self._segments[space].widen(to)


def _each(spaces: tuple[str, ...], count: int) -> dict[str, int]:
    return dict.fromkeys(spaces, count)
