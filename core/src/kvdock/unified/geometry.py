"""Where the pages of several spaces may lie in one byte buffer; numbers alone, no tensor.

The spaces lie one after the other. The first keeps its lower end and the last, which measures the buffer, its upper
one; those between may lie anywhere. The pages of each are on a grid of its own over the whole buffer, whose page 0 is
its padding; all paddings lie together below everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvdock.layout import Buffer, Space
from kvdock.storages import SHARED, WITHIN, PageLayout, block_nbytes, lay_pages


class Stretch(NamedTuple):
    """The `places` of one space, of `page_nbytes` each, the first `start` bytes after the buffer.

    Place q is page ``first + q`` of the grid.
    """

    space: str
    page_size: int
    page_nbytes: int
    start: int
    first: int
    places: int

    def at(self, place: int) -> int:
        """Return the byte at which a place begins."""
        return self.start + place * self.page_nbytes

    def place_from(self, byte: int) -> int:
        """Return the first place that begins at `byte` or later."""
        return max(0, -((self.start - byte) // self.page_nbytes))

    def place_to(self, byte: int) -> int:
        """Return the last end (exclusive) of places that all end at `byte` or earlier."""
        return min(self.places, (byte - self.start) // self.page_nbytes)


class Window(NamedTuple):
    """Places ``low … high`` (exclusive) that a space owns."""

    low: int
    high: int


class Line(NamedTuple):
    """Spaces in the order in which they lie, between the bytes `low` (the end of the paddings) and `high`."""

    stretches: tuple[Stretch, ...]
    low: int
    high: int

    def fits(self, pages: Mapping[str, int]) -> bool:
        """Return whether so many pages of each space (none of those not named) fit beside each other.

        Packed as low as they go, each on its grid, nothing is lost but what a grid begins later.
        """
        cursor = self.low
        *others, last = self.stretches
        for stretch in others:
            wanted = pages.get(stretch.space, 0)
            if wanted and stretch.place_from(cursor) + wanted > stretch.places:
                return False
            cursor = _packed_above(stretch, wanted, cursor)
        wanted = pages.get(last.space, 0)
        return not wanted or last.place_from(cursor) + wanted <= last.places

    def room(self, space: str, pages: Mapping[str, int]) -> int:
        """Return the most pages that a space could have beside `pages` of the others."""
        own = next(stretch for stretch in self.stretches if stretch.space == space)
        place = self.stretches.index(own)
        low, high = self.low, self.high
        for stretch in self.stretches[:place]:
            low = _packed_above(stretch, pages.get(stretch.space, 0), low)
        for stretch in reversed(self.stretches[place + 1 :]):
            high = _packed_below(stretch, pages.get(stretch.space, 0), high)
        return max(0, own.place_to(high) - own.place_from(low))

    def windows(self, now: Mapping[str, Window], pages: Mapping[str, int]) -> dict[str, Window] | None:
        """Return windows with at least `pages` places of each space, as near to those of `now` as that allows.

        A space keeps what it owns unless another needs it; ``None`` where they do not fit.
        """
        if not self.fits(pages):
            return None
        limits = self._latest(pages)
        found: dict[str, Window] = {}
        cursor = self.low
        for stretch, limit in zip(self.stretches, limits, strict=True):
            window = self._window(stretch, now[stretch.space], pages[stretch.space], (cursor, limit))
            found[stretch.space] = window
            if _holds(window):
                cursor = stretch.at(window.high)
        return found

    def grown(self, now: Mapping[str, Window], more: Mapping[str, int]) -> dict[str, Window] | None:
        """Return the windows of `now` with so many places `more` each, nothing moved; ``None`` where gaps are too small."""
        found = dict(now)
        for stretch in (self.stretches[0], *reversed(self.stretches[1:])):
            wanted = more.get(stretch.space, 0)
            if not wanted:
                continue
            low, high = self._gap(stretch, found)
            window = found[stretch.space]
            if high - low - (window.high - window.low) < wanted:
                return None
            found[stretch.space] = self._widened(stretch, window, wanted, Window(low, high))
        return found

    def gap(self, space: str, windows: Mapping[str, Window]) -> int:
        """Return the places beside those of a space that nobody owns."""
        stretch = next(found for found in self.stretches if found.space == space)
        low, high = self._gap(stretch, windows)
        return max(0, high - low - (windows[space].high - windows[space].low))

    def _gap(self, stretch: Stretch, windows: Mapping[str, Window]) -> Window:
        """Return the places between the neighbours of a space, its own among them."""
        place = self.stretches.index(stretch)
        ends = [s.at(windows[s.space].high) for s in self.stretches[:place] if _holds(windows[s.space])]
        starts = [s.at(windows[s.space].low) for s in self.stretches[place + 1 :] if _holds(windows[s.space])]
        low, high = max([self.low, *ends]), min([self.high, *starts])
        return Window(stretch.place_from(low), stretch.place_to(high))

    def _widened(self, stretch: Stretch, window: Window, wanted: int, gap: Window) -> Window:
        if stretch is self.stretches[0]:
            return Window(window.low, window.high + wanted)
        if stretch is self.stretches[-1]:
            return Window(window.low - wanted, window.high)
        if not _holds(window):
            low = (gap.low + gap.high - wanted) // 2  # room to grow on both sides
            return Window(low, low + wanted)
        above = min(wanted, gap.high - window.high)
        return Window(window.low - (wanted - above), window.high + above)

    def _latest(self, pages: Mapping[str, int]) -> list[int]:
        """Return the byte before which each space has to end, for those above it to fit."""
        limits, high = [], self.high
        for stretch in reversed(self.stretches):
            limits.append(high)
            high = _packed_below(stretch, pages[stretch.space], high)
        return limits[::-1]

    def _window(self, stretch: Stretch, now: Window, wanted: int, between: tuple[int, int]) -> Window:
        lowest, highest = stretch.place_from(between[0]), stretch.place_to(between[1])
        if stretch is self.stretches[0]:
            return Window(0, max(wanted, min(now.high, highest)))
        if stretch is self.stretches[-1]:
            return Window(max(lowest, min(now.low, stretch.places - wanted)), stretch.places)
        low = max(lowest, min(now.low, highest - wanted))
        return Window(low, max(low + wanted, min(now.high, highest)))


def _packed_above(stretch: Stretch, pages: int, cursor: int) -> int:
    """Return where pages end that lie as low as they can from `cursor` on."""
    return stretch.at(stretch.place_from(cursor) + pages) if pages else cursor


def _packed_below(stretch: Stretch, pages: int, cursor: int) -> int:
    """Return where pages begin that lie as high as they can below `cursor`."""
    return stretch.at(stretch.place_to(cursor) - pages) if pages else cursor


def _holds(window: Window) -> bool:
    return window.high > window.low


class Paddings(NamedTuple):
    """The paddings of spaces that share a buffer: where each begins, and the pages of the last space that they take."""

    offsets: dict[str, int]
    nbytes: int
    pages: int


def lay_paddings(page_nbytes: Mapping[str, int]) -> Paddings:
    """Return where the padding pages lie; spaces are given from the first to the last, which measures the buffer.

    The first space's padding comes last, so that its pages follow without a gap. Each space between the ends may lose
    part of a page to its grid, which is made up for.
    """
    offsets, offset = {}, 0
    for space in reversed(list(page_nbytes)):
        offsets[space] = offset
        offset += page_nbytes[space]
    *others, last = page_nbytes.values()
    return Paddings(offsets, offset, 1 + -(-(sum(others) + sum(others[1:])) // last))


def first_pages(page_nbytes: Mapping[str, int]) -> dict[str, int]:
    """Return the first page of each space that overlaps no padding, or what makes up for grids."""
    paddings = lay_paddings(page_nbytes)
    found = {s: -(-(paddings.nbytes - paddings.offsets[s]) // nbytes) for s, nbytes in page_nbytes.items()}
    return {**found, list(page_nbytes)[-1]: paddings.pages}


def page_bytes(buffers: Iterable[Buffer], spaces: Mapping[str, Space]) -> dict[str, int]:
    """Return the bytes of a page of each space that shares the buffer, in the order in which the spaces lie.

    A space of limited size comes first, and then the largest pages, so that what lies between loses little to its grid.
    """
    found: dict[str, int] = {}
    last = ""
    for buffer in buffers:
        if buffer.storage in (SHARED, WITHIN) and buffer.space is not None:
            nbytes = block_nbytes(buffer, spaces[buffer.space].page_size) * max(1, len(buffer.layers))
            found[buffer.space] = found.get(buffer.space, 0) + nbytes
            last = buffer.space if buffer.storage == SHARED else last
    others = sorted(found.keys() - {last}, key=lambda s: (spaces[s].rule.at_most is None, -found[s], s))
    return {space: found[space] for space in (*others, last) if space}


def line_of(buffers: Sequence[Buffer], spaces: Mapping[str, Space], sizes: Mapping[str, int]) -> Line | None:
    """Return where the spaces of a plan lie in its shared byte buffer; ``None`` without one."""
    nbytes = page_bytes(buffers, spaces)
    if not nbytes:
        return None
    paddings, first = lay_paddings(nbytes), first_pages(nbytes)
    last = list(nbytes)[-1]
    pages = {space: sizes[space] // spaces[space].page_size for space in nbytes}
    high = (pages[last] + paddings.pages) * nbytes[last]
    stretches = []
    for space, page in nbytes.items():
        start = paddings.offsets[space] + first[space] * page
        count = min(pages[space], (high - start) // page)
        stretches.append(Stretch(space, spaces[space].page_size, page, start, first[space], count))
    return Line(tuple(stretches), paddings.nbytes, high)


def page_layouts(
    line: Line, buffers: Sequence[Buffer], spaces: Mapping[str, Space], sizes: Mapping[str, int]
) -> dict[str, PageLayout]:
    """Return where the blocks of each space of a line lie in its pages."""
    found = {}
    for stretch in line.stretches:
        own = [b for b in buffers if b.space == stretch.space and b.storage in (SHARED, WITHIN)]
        layout = lay_pages(own, spaces[stretch.space], sizes[stretch.space])
        offset = stretch.start - stretch.first * stretch.page_nbytes
        pages = min(layout.pages, (line.high - offset) // stretch.page_nbytes)
        found[stretch.space] = msgspec.structs.replace(layout, pages=pages, offset=offset)
    return found
