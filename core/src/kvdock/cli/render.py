"""Drawings for people: a plan, a list, a report. Only this module imports rich, and only to draw.

Texts of others (names of models, reasons of plugins) are never read as markup and never steer the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdock.cli.text import printable, ranges, size
from kvdock.explain import window_policy

if TYPE_CHECKING:
    from kvdock.planner import BufferPlan, CachePlan, GroupPlan
    from kvdock.testing.report import Report

BAR_CELLS = 48
PIPE_COLUMNS = 140
"""Width where the output is no terminal, so that piped tables are not folded."""
ALWAYS_SHOWN = ("page_size", "kv_cache_dtype")


def console() -> Console:
    """Return a console on standard output that takes every text literally."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Sequence[str] = ()) -> Table:
    """Return a table of literal texts; `numeric` columns are set to the right."""
    drawn = Table(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(printable(str(cell))) for cell in row))
    return drawn


def draw_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Sequence[str] = ()) -> None:
    """Print a table."""
    console().print(table(title, columns, rows, numeric))


def draw_plan(plan: CachePlan) -> None:
    """Print a plan: what was decided, what fits, and where the bytes go."""
    out = console()
    out.print(_head(plan))
    out.print(_options(plan))
    out.print(_spaces(plan))
    out.print(_groups(plan))
    out.print(_limits(plan))
    out.print(_memory(plan))
    out.print(_bar(plan, "█▓░" if out.encoding.startswith("utf") else "#+."))
    for warning in plan.warnings:
        out.print(Text("warning: ", style="yellow").append(printable(warning)))


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="bold"), Text(printable(value)))
    return grid


def _head(plan: CachePlan) -> Table:
    model, device, parallel = plan.model, plan.device, plan.parallel
    ranks = ", ".join(
        f"{name} {value}"
        for name in parallel.__struct_fields__
        if (value := getattr(parallel, name)) not in (1, 0, None)
    )
    rows = [
        ("model", f"{model.name} ({model.architecture}, {len(model.layers)} layers, {model.dtype})"),
        ("device", f"{device.name} ({device.device_type}, {size(device.total_bytes)})"),
        ("budget", plan.budget.note),
        ("rank", ranks or "the only one"),
        ("windows", window_policy(plan)),
        ("request pool", f"{plan.request_pool_cls.name} of {plan.request_pool_cls.plugin}"),
    ]
    if plan.allocator_cls is not None:
        rows.append(("allocator", f"{plan.allocator_cls.name} of {plan.allocator_cls.plugin}"))
    return _grid(rows)


def _options(plan: CachePlan) -> Table:
    sources, values = plan.options.sources, plan.options.values
    always = ALWAYS_SHOWN if plan.budget.base == "given" else (*ALWAYS_SHOWN, "mem_fraction_static")
    shown = [n for n in values.__struct_fields__ if n in sources and (n in always or sources[n] != "default")]
    rows = [(name, getattr(values, name), sources[name]) for name in shown]
    return table("options", ("option", "value", "from"), rows)


def _spaces(plan: CachePlan) -> Table:
    rows = []
    for name, slots in plan.spaces.items():
        space = plan.outline.spaces[name]
        window = "" if space.window_tokens is None else f"{space.window_tokens:,}"
        kv, rest = _kv_and_rest(b for b in plan.buffers if b.space == name)
        rows.append((name, f"{slots:,}", str(space.page_size), window, size(kv), size(rest)))
    kv, rest = _kv_and_rest(b for b in plan.buffers if b.space is None)
    if kv or rest:
        rows.append(("(fixed)", "", "", "", size(kv), size(rest)))
    columns = ("space", "slots", "page", "window", "KV", "bookkeeping")
    return table("spaces", columns, rows, numeric=columns[1:])


def _groups(plan: CachePlan) -> Table:
    rows = [
        (group.name, group.kind, _layers(group), group.space, group.pool_cls.name, group.pool_cls.plugin, _bytes(group))
        for group in plan.groups
    ]
    columns = ("group", "kind", "layers", "space", "pool", "plugin", "bytes")
    return table("layer groups", columns, rows, numeric=("bytes",))


def _layers(group: GroupPlan) -> str:
    readers = f" (read by {ranges(layer for layer, _ in group.shared)})" if group.shared else ""
    return f"{ranges(group.layers)}{readers}"


def _bytes(group: GroupPlan) -> str:
    return size(sum(buffer.nbytes for buffer in group.buffers))


def _limits(plan: CachePlan) -> Table:
    rows = [
        (
            limit.name.replace("_", " "),
            "" if limit.requested is None else f"{limit.requested:,}",
            f"{limit.effective:,}",
            limit.factor,
            ", ".join(limit.raised_by),
        )
        for limit in plan.limits
    ]
    return table("limits", ("limit", "asked", "holds", "bound by", "raised by"), rows, numeric=("asked", "holds"))


def _memory(plan: CachePlan) -> Table:
    kv, rest = _kv_and_rest(plan.buffers)
    per_token = plan.bytes_per_token
    rows = [
        ("KV", kv),
        ("bookkeeping", rest),
        ("total", plan.total_bytes),
        ("budget", plan.budget_bytes),
        ("left over", plan.budget_bytes - plan.total_bytes),
        ("per token: KV", per_token.kv),
        ("per token: bookkeeping", per_token.bookkeeping),
    ]
    if plan.host_bytes:
        rows.append(("on the host", plan.host_bytes))
    return table("memory", ("", "size", "bytes"), [(n, size(b), f"{b:,}") for n, b in rows], numeric=("size", "bytes"))


def _kv_and_rest(buffers: Iterable[BufferPlan]) -> tuple[int, int]:
    """Return the device bytes of KV and of everything else."""
    kept = [buffer for buffer in buffers if buffer.memory == "device"]
    kv = sum(buffer.nbytes for buffer in kept if buffer.is_kv)
    return kv, sum(buffer.nbytes for buffer in kept) - kv


def _bar(plan: CachePlan, cells: str) -> Text:
    kv, rest = _kv_and_rest(plan.buffers)
    whole = max(1, plan.budget_bytes)
    first = min(BAR_CELLS, round(BAR_CELLS * kv / whole))
    second = min(BAR_CELLS - first, -(-BAR_CELLS * rest // whole))
    bar = Text(cells[0] * first, style="cyan").append(cells[1] * second, style="magenta")
    bar.append(cells[2] * (BAR_CELLS - first - second), style="dim")
    return bar.append(f"  {plan.total_bytes / whole:.1%} of the budget", style="default")


def draw_report(report: Report) -> None:
    """Print what a run did."""
    checked = f"{report.checks:,} (a token in a layer each), all right"
    rows = [
        ("requests", f"{report.finished:,} of {report.arrived:,} served"),
        ("rejected", f"{report.rejected:,} longer than {report.longest_tokens:,} tokens"),
        ("tokens written", f"{report.tokens_written:,} in {report.steps:,} steps"),
        ("time", f"{report.seconds:.2f} s, {report.tokens_per_second:,.0f} tokens/s"),
        ("values checked", checked if report.checks else "none: no layer of this rank keeps KV"),
        *_report_of_states(report),
        *_report_of_tiers(report),
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
