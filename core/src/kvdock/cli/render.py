"""Drawings for people: pages, lists, a report. Only this module imports rich, and only to draw.

Texts of others (names of models, reasons of plugins) are never read as markup and never steer the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text

from kvdock.cli.page import Bar, Facts, Line, Page, Table, bar_runs, legend
from kvdock.cli.text import printable

if TYPE_CHECKING:
    from kvdock.testing.report import Report

LONGEST_FIGURE = 16
WIDEST_WORD = 48
"""Longer words are broken where a table is narrow: paths, lists without spaces."""
PIPE_COLUMNS = 140
"""Width where the output is no terminal, so that piped tables are not folded."""


def console() -> Console:
    """Return a console on standard output that takes every text literally."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Sequence[str] = ()) -> RichTable:
    """Return a table of literal texts; `numeric` columns are set to the right."""
    heads, texts = [printable(column) for column in columns], [[printable(str(cell)) for cell in row] for row in rows]
    drawn = RichTable(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column in numeric else "left"
        least = _least_width([heads[place], *(row[place] for row in texts)], whole=column in numeric)
        drawn.add_column(Text(heads[place]), justify=justify, overflow="fold", min_width=least)
    for row in texts:
        drawn.add_row(*map(Text, row))
    return drawn


def _least_width(texts: Sequence[str], *, whole: bool) -> int:
    """Return the width of a column at which no word is broken; `whole`: no number from its unit either."""
    parts = (part for text in texts for part in ([text] if whole and len(text) <= LONGEST_FIGURE else text.split()))
    return min(max(map(len, parts), default=0), WIDEST_WORD)


def _records(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Group:
    """Return each row of a table as lines of names and values, for a terminal too narrow for the table."""
    blocks = [_grid([(f" {column}", str(cell)) for column, cell in zip(columns, row, strict=True)]) for row in rows]
    return Group(Text(title, style="bold"), *(part for block in blocks for part in (block, Text(""))))


def draw_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Sequence[str] = ()) -> None:
    """Print a table; row by row where the terminal is too narrow to show it without breaking words."""
    _print_table(console(), title, columns, list(rows), numeric)


def _print_table(
    out: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], numeric: Sequence[str]
) -> None:
    drawn = table(title, columns, rows, numeric)
    between = len(drawn.columns) * (sum(drawn.padding[1::2]) + 1)  # padding and the box's own space
    fits = sum(column.min_width or 0 for column in drawn.columns) + between <= out.width
    out.print(drawn if fits else _records(title, columns, rows))


def draw(page: Page) -> None:
    """Print a page."""
    out = console()
    for item in page:
        if isinstance(item, Table):
            _print_table(out, item.title, item.columns, item.rows, item.numeric)
        elif isinstance(item, Facts):
            out.print(_grid(item.rows))
        elif isinstance(item, Line):
            label = [Text(f"{item.label} ", style="yellow")] if item.label else []
            out.print(Text("").join([*label, Text(printable(item.text))]))
        else:
            out.print(_bar(item, ascii_only=not out.encoding.startswith("utf")))


def _bar(bar: Bar, *, ascii_only: bool) -> Group:
    """Return a bar drawn to scale, and its legend."""
    drawn = Text("").join([Text(text, style=part.style) for part, text in bar_runs(bar, ascii_only=ascii_only)])
    rows = RichTable.grid(padding=(0, 2))
    for column in ("left", "left", "right", "right"):
        rows.add_column(justify="right" if column == "right" else "left")
    for part, nbytes, share in legend(bar):
        fill = part.ascii_fill if ascii_only else part.fill
        rows.add_row(Text(fill, style=part.style), Text(printable(part.name)), Text(nbytes), Text(share))
    return Group(Text(printable(bar.title), style="bold"), drawn, rows)


def _grid(rows: Iterable[tuple[str, str]]) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="bold"), Text(printable(value)))
    return grid


def draw_report(report: Report) -> None:
    """Print what a run did."""
    is_shared = bool(report.bytes_moved or report.gates)
    checked = f"{report.checks:,} (a token in a layer each), all right"
    rows = [
        ("requests", f"{report.finished:,} of {report.arrived:,} served"),
        ("rejected", f"{report.rejected:,} longer than {report.longest_tokens:,} tokens"),
        ("tokens written", f"{report.tokens_written:,} in {report.steps:,} steps"),
        ("time", f"{report.seconds:.2f} s, {report.tokens_per_second:,.0f} tokens/s"),
        ("values checked", checked if report.checks else "none: no layer of this rank keeps KV"),
        *_report_of_states(report),
        *_report_of_tiers(report),
        *([("moved", f"{report.bytes_moved:,} bytes; {report.gates:,} times pages had to stay")] if is_shared else []),
        ("failed admissions", f"{report.failed_admissions:,}"),
        ("preemptions", f"{report.preemptions:,}, swapped out to the host and back"),
        ("shared prefixes", f"{report.shared_tokens:,} tokens"),
        ("rolled back", f"{report.rollbacks:,} speculative steps"),
        *((f"peak of {name}", f"{used:,} slots") for name, used in report.peak_slots.items()),
        ("bytes", f"{report.allocated_bytes:,} allocated, {report.planned_bytes:,} planned"),
        ("check", "; ".join(report.problems) or "passed"),
    ]
    console().print(_grid(rows))


def _report_of_states(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what concerns states and requests that arrive, where there are such."""
    if report.state_checks:
        forked = f"{report.forks:,} begun with the state of a prefix"
        others = f"{report.tracked:,} tracked, {report.committed:,} from snapshots of drafts"
        yield "states checked", f"{report.state_checks:,} (a tensor of a layer each), all right"
        yield "states", f"{forked}, {others}"
    if report.received:
        yield "received", f"{report.received:,} requests that arrived with their KV"


def _report_of_tiers(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what concerns rows in two tiers, where a request held a device buffer."""
    if report.device_buffers:
        yield (
            "swap-ins",
            f"{report.swapped_in:,} rows from the host, {report.found_on_device:,} found in a device buffer",
        )
        yield "device buffers", f"{report.device_buffers:,} given, {report.grown_buffers:,} grown later"
