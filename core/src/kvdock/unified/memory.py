"""The byte buffer that several spaces share: who owns what of it, when pages move, and what is free."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvdock.allocators.base import Shortfall
from kvdock.allocators.debug import ThreadGuard
from kvdock.allocators.lengths import natural
from kvdock.errors import BuildError, SlotError
from kvdock.unified.geometry import Line, Window
from kvdock.unified.segment import Event, Owned, Segment

if TYPE_CHECKING:
    import torch

    from kvdock.kernels.interface import Kernels
    from kvdock.pools.storage import Tensors

MOVED_BYTES = 2**24
"""Bytes that one call of `compact` moves, unless it is told: far less than a decode step reads."""
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
    * After an error every page holds what it held, and as many are handed out; what had moved by then stays there.
    * A query changes nothing.

    Owned by one thread; nothing locks. With `debug` calls from another one are refused.
    """

    def __init__(
        self, line: Line, raw: torch.Tensor, kernels: Kernels, is_lazy: bool = True, debug: bool = False
    ) -> None:
        self.line = line
        self.is_lazy = is_lazy
        """Whether holes stay until `compact` or an allocation needs them; else a free closes them."""
        self._raw = raw
        self._kernels = kernels
        self._segments: dict[str, Segment] = {}
        self._guard = ThreadGuard("unified memory") if debug else None
        self._holds: dict[object, str] = {}
        self._pending: dict[int, Event] = {}
        self._released: list[tuple[Segment, torch.Tensor, Owned | None]] | None = None
        self.failure: Exception | None = None
        """What kept the last free from closing its holes: it is done, and they wait for the next call. ``None``: nothing."""
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
        home = stretch.places if stretch is self.line.stretches[-1] else 0
        return self._segments.setdefault(space, Segment(stretch, tables, pages, self._kernels, home))

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
        """Forbid to move pages until `open_gate` of the ticket that this returns; `what` is named where that matters.

        Raises:
            SlotError: `what` is no text.
        """
        self._enter()
        if not isinstance(what, str) or not what:
            raise SlotError(f"a gate closed for {what!r}; say in words what holds pages, such as 'a transfer'")
        ticket = object()
        self._holds[ticket] = what
        return ticket

    def open_gate(self, ticket: object) -> None:
        """Take back one `close_gate`.

        Raises:
            SlotError: it was taken back before, or is no ticket of `close_gate`.
        """
        self._enter()
        if not any(ticket is held for held in self._holds):
            raise SlotError("this gate is open already, or was never closed; give what close_gate returned, once")
        del self._holds[ticket]

    @contextlib.contextmanager
    def forward(self, event: Event | None = None) -> Iterator[None]:
        """Forbid to move pages while a forward pass is launched, and let later moves wait for `event`, its end.

        Without an event the pass is over when the context ends, as on a device that the host waits for.

        Raises:
            SlotError: `event` has no `query` and `wait`.
        """
        if event is not None and (isinstance(event, type) or not isinstance(event, Event)):
            raise SlotError(
                f"event={event!r} does not tell when a forward pass is over; give one with query() and wait(), such as "
                "torch.cuda.Event(), or none"
            )
        try:
            with self.gate("a forward pass in flight"):
                yield
        finally:
            if event is not None:
                self._follow(event)

    def require_open(self) -> None:
        """Refuse to go on while somebody may still read or write pages.

        Raises:
            SlotError: names what closed a gate, or that a forward pass was not ended.
        """
        if self._holds:
            raise SlotError(
                f"unified memory is still held by {', '.join(self._holds.values())}; open each gate, and end each forward"
            )

    # What is free.

    def free_now(self, space: str) -> int:
        """Return the pages that a space could take without moving any."""
        return self._joined(space).holes + self.line.gap(space, self._windows())

    def free_after(self, space: str) -> int:
        """Return the pages that a space could take once the holes of the others are closed."""
        live = self.live()
        self._joined(space)
        return max(0, self.line.room(space, live) - live[space])

    def available(self, space: str) -> int:
        """Return the pages that `secure` could get for a space as things are."""
        return self.free_after(space) if self.can_move else self.free_now(space)

    def live(self) -> dict[str, int]:
        """Return the pages of each space that are handed out."""
        self._enter()
        return {space: segment.live for space, segment in self._segments.items()}

    def shares(self) -> tuple[Share, ...]:
        """Return what each space has, and could have."""
        return tuple(
            Share(space, segment.live, self.free_now(space), self.free_after(space))
            for space, segment in self._segments.items()
        )

    def together(self, spaces: tuple[str, ...], most: int, more: Mapping[str, int] | None = None) -> int:
        """Return how many pages, up to `most`, each of `spaces` could take in step as things are, beside `more` of others."""

        def is_short(count: int) -> bool:
            return not self._fits({**beside, **dict.fromkeys(spaces, count)})

        beside = self._counted(more or {})
        most = min(natural(most, "pages"), 1 + min(self._joined(space).stretch.places for space in spaces))
        return bisect.bisect_left(range(1, most + 1), True, key=is_short) if is_short(most) else most

    def fits(self, more: Mapping[str, int]) -> bool:
        """Return whether each space could take so many more pages, all of them together, as things are."""
        return self._fits(self._counted(more))

    def _fits(self, more: Mapping[str, int]) -> bool:
        if self.can_move:
            return self.line.fits(self._with(more))
        return self.line.grown(self._windows(), self._beyond_holes(more)) is not None

    def shortfall(self, more: Mapping[str, int], numbers: Mapping[str, int] | None = None) -> tuple[Shortfall, ...]:
        """Return what so many more pages of each space lack, all of them together; empty: nothing.

        What exceeds `numbers`, those that a numbering has left, its own space alone can give. Else the first space lacks
        what does not fit beside the others' share, and every other that could give enough alone is named.
        """
        more, numbers = self._counted(more), numbers or {}
        full = [space for space, count in more.items() if count > numbers.get(space, count)]
        if not full and self._fits(more):
            return ()
        wanted, sizes = self._with(more), {name: part.stretch.page_size for name, part in self._segments.items()}
        held = () if full or not self.line.fits(wanted) else tuple(dict.fromkeys(self._holds.values()))
        lacking = full or [space for space, count in more.items() if count][:1]
        givers = [
            (name, self._to_give(wanted, name)) for name in wanted if name not in lacking and not full and not held
        ]
        found = {s: min(self.together((s,), more[s], more), numbers.get(s, more[s])) for s in lacking}
        return tuple(
            Shortfall(
                space=space,
                needed=more[space] * sizes[space],
                available=found[space] * sizes[space],
                givers=tuple((name, count * sizes[name]) for name, count in givers if count is not None),
                held_by=held,
            )
            for space in lacking
        )

    def _with(self, more: Mapping[str, int]) -> dict[str, int]:
        return {space: count + more.get(space, 0) for space, count in self.live().items()}

    def _to_give(self, wanted: Mapping[str, int], space: str) -> int | None:
        """Return the fewest pages that one space must give for others to have what they want."""
        most = self._segments[space].live
        given = bisect.bisect_left(
            range(most + 1), True, key=lambda count: self.line.fits({**wanted, space: wanted[space] - count})
        )
        return given if given <= most else None

    # Taking and giving.

    def secure(self, more: Mapping[str, int]) -> bool:
        """Make holes for so many more pages of each space, or change nothing and return ``False``.

        Takes gaps first, and closes holes of others only where gaps are too small and pages may move.

        Raises:
            SlotError: a space that does not share the buffer, or a number that is negative or not whole.
        """
        self._enter()
        more = self._counted(more)
        lacking = self._beyond_holes(more)
        if not lacking:
            return True
        windows = self.line.grown(self._windows(), lacking)
        if windows is None and self.can_move:
            windows = self.line.windows(self._windows(), self._with(more))
        if windows is None:
            return False
        before = [(segment, segment.backup()) for segment in self._segments.values()]
        try:
            self._shift(windows)
        except BaseException:
            for segment, owned in before:
                segment.retract(owned, 0)
            raise
        return True

    def release(self, space: str, pages: torch.Tensor, owned: Owned | None = None) -> None:
        """Make holes of the places of virtual pages ``[n]``, or raise and change nothing.

        Without lazy compaction holes are closed at once, if pages may move; where that fails they wait for the next
        call, and `failure` says why. With `owned` it is an allocation since then that is taken back, and what the space
        grew for it: nothing moves.
        """
        self._enter()
        segment = self._joined(space)
        segment.release(pages)
        if self._released is None:
            self._settle(segment, pages, owned)
        else:
            self._released.append((segment, pages, owned))

    @contextlib.contextmanager
    def whole(self, keeps_refused: bool = False) -> Iterator[None]:
        """Let all pages that are released inside come back, or after an error none of them.

        With `keeps_refused` what came back before a refusal stays. Inside another such block it is that one's part.
        """
        if self._released is not None:
            yield
            return
        released = self._released = []
        try:
            yield
        except BaseException as error:
            while released and not (keeps_refused and isinstance(error, SlotError)):
                segment, pages, _ = released.pop()
                segment.back(pages)
            raise
        finally:
            self._released = None
            for found in released:
                self._settle(*found)

    def _settle(self, segment: Segment, pages: torch.Tensor, owned: Owned | None) -> None:
        """Give up what a space does not need now that these pages came back."""
        try:
            if not segment.live:
                segment.drop()
            elif owned is not None:
                segment.retract(owned, pages.shape[0])
            elif not self.is_lazy and self.can_move:
                self._close(segment, segment.holes)
        except Exception as error:
            self.failure = error

    def compact(self, max_bytes: int = MOVED_BYTES, headroom_bytes: int | None = None) -> int:
        """Close holes at a quiescent point, and return the bytes that moved: up to `max_bytes`, or one page if that is more.

        Stops where `headroom_bytes` (default: a part of the buffer) lie between the spaces. Does nothing while pages
        may not move, or with ``max_bytes=0``.

        Raises:
            SlotError: a number that is negative, or not whole.
        """
        self._enter()
        limit = natural(max_bytes, "max_bytes")
        goal = self.line.high // HEADROOM if headroom_bytes is None else natural(headroom_bytes, "headroom_bytes")
        before = self.bytes_moved
        if not self.can_move or not limit:
            return 0
        for segment in sorted(self._segments.values(), key=lambda part: -part.holes * part.stretch.page_nbytes):
            page, moved = segment.stretch.page_nbytes, self.bytes_moved - before
            lacking = -(-(goal - self.gap_bytes()) // page)
            # A page that is larger than the limit moves as the first one of a call, or never.
            count = min(segment.holes, lacking, max((limit - moved) // page, int(not moved)))
            if count > 0:
                self._close(segment, count)
        return self.bytes_moved - before

    def gap_bytes(self) -> int:
        """Return the bytes that no space owns."""
        owned = sum((s.window.high - s.window.low) * s.stretch.page_nbytes for s in self._segments.values())
        return self.line.high - self.line.low - owned

    def copy(self, space: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all that virtual pages ``[n]`` of a space hold to others; every source is read before a target is written."""
        self._enter()
        self._wait()
        self._joined(space).copy(source, target)

    def zero(self) -> None:
        """Zero the whole buffer, whoever owns its pages."""
        self._raw.zero_()

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

    def _joined(self, space: str) -> Segment:
        if space not in self._segments:
            raise SlotError(f"space {space!r} does not share this buffer; {', '.join(self._segments)} do")
        return self._segments[space]

    def _counted(self, more: Mapping[str, int]) -> dict[str, int]:
        """Return numbers of pages of spaces that share the buffer, each whole and not negative."""
        for space in more:
            self._joined(space)
        return {space: natural(count, f"pages of {space!r}") for space, count in more.items()}

    def _windows(self) -> dict[str, Window]:
        return {space: segment.window for space, segment in self._segments.items()}

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
        segment.narrow(window)
        self.passes += 1
        self.failure = None

    def _follow(self, event: Event) -> None:
        """Let moves wait for an event, and look after two earlier ones: those that are over are forgotten."""
        self._pending.pop(id(event), None)
        self._pending[id(event)] = event
        for key, earlier in list(itertools.islice(self._pending.items(), 2)):
            is_over = earlier.query()
            del self._pending[key]
            if not is_over:
                self._pending[key] = earlier

    def _wait(self) -> None:
        """Let what is launched from now on wait for the forward passes that were launched before."""
        for event in self._pending.values():
            if not event.query():
                event.wait()
        self._pending.clear()

    def _enter(self) -> None:
        if self._guard is not None:
            self._guard.enter()

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
