"""What a command shows, as data: tables, facts, lines, a bar. Drawn by `kvdock.cli.render`, or as Markdown here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from kvdock.cli.text import printable, size


class Table(msgspec.Struct, frozen=True):
    """A table of texts; `numeric` columns are set to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[str] = ()


class Facts(msgspec.Struct, frozen=True):
    """Names and what they stand for, a line each."""

    rows: Sequence[tuple[str, str]]


class Line(msgspec.Struct, frozen=True):
    """A sentence; `label` is set off before it."""

    text: str
    label: str = ""


class Part(msgspec.Struct, frozen=True):
    """A part of a bar: its name, its bytes, how it is filled in Unicode and in ASCII, and its colour."""

    name: str
    nbytes: int
    fill: str
    ascii_fill: str
    style: str


class Bar(msgspec.Struct, frozen=True):
    """Parts of a whole, drawn to scale with a legend."""

    title: str
    parts: Sequence[Part]

    @property
    def whole(self) -> int:
        """Bytes of all parts together."""
        return sum(part.nbytes for part in self.parts)

    def shares(self) -> list[str]:
        """Return the share of each part in the whole, for a person."""
        return [f"{part.nbytes / self.whole:.1%}" for part in self.parts]


Item = Table | Facts | Line | Bar
Page = Sequence[Item]

BAR_CELLS = 64


def cells(sizes: Sequence[int], width: int) -> list[int]:
    """Return the cells of each size in a bar of `width` cells: to scale, and at least one for what is not zero.

    What small parts take beyond their share comes off the largest.
    """
    whole = sum(sizes)
    if not whole:
        return [0] * len(sizes)
    width = max(width, sum(size > 0 for size in sizes))
    found = [max(1, size * width // whole) if size else 0 for size in sizes]
    while sum(found) > width:
        found[found.index(max(found))] -= 1
    for place in sorted(range(len(sizes)), key=lambda i: -(sizes[i] * width % whole)):
        if sum(found) < width and sizes[place]:
            found[place] += 1
    return found


def bar_runs(bar: Bar, *, ascii_only: bool = False) -> list[tuple[Part, str]]:
    """Return the parts that are not zero with the characters that stand for them."""
    counts = cells([part.nbytes for part in bar.parts], BAR_CELLS)
    return [
        (part, (part.ascii_fill if ascii_only else part.fill) * count)
        for part, count in zip(bar.parts, counts, strict=True)
        if count
    ]


def legend(bar: Bar) -> list[tuple[Part, str, str]]:
    """Return the parts that are not zero with their size and their share."""
    return [
        (part, size(part.nbytes), share) for part, share in zip(bar.parts, bar.shares(), strict=True) if part.nbytes
    ]


def markdown(page: Page) -> str:
    """Return a page as GitHub Markdown; texts of others are escaped."""
    return "\n\n".join(filter(None, map(_markdown, page)))


def _markdown(item: Item) -> str:
    if isinstance(item, Table):
        return "\n".join((f"**{_escape(item.title)}**\n", *_markdown_rows(item.columns, item.rows, item.numeric)))
    if isinstance(item, Facts):
        return "\n".join(_markdown_rows(("", " "), item.rows))
    if isinstance(item, Line):
        return f"**{_escape(item.label)}** {_escape(item.text)}" if item.label else _escape(item.text)
    rows = [(part.name, nbytes, f"{part.nbytes:,}", share) for part, nbytes, share in legend(item)]
    return _markdown(Table(item.title, ("part", "size", "bytes", "share"), rows, ("size", "bytes", "share")))


def _markdown_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[str] = ()) -> Iterable[str]:
    yield _row(columns)
    yield f"|{'|'.join('---:' if column in numeric else '---' for column in columns)}|"
    yield from map(_row, rows)


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(_escape(text) for text in texts)} |"


_ACTIVE = re.compile(r"[\\`*\[\]<>|~&]|(?<![0-9A-Za-z])[_#]|_(?![0-9A-Za-z])")


def _escape(text: str) -> str:
    """Return a text of one line that Markdown shows as it is."""
    return _ACTIVE.sub(lambda found: f"\\{found[0]}", printable(text))
