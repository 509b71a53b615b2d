"""A plan as a page: what was decided, what fits, and where every byte goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvdock.cli.page import Bar, Facts, Line, Page, Part, Table
from kvdock.cli.text import ranges, size
from kvdock.explain import shared_pages, window_policy
from kvdock.pools.snapshots import ROLE as SNAPSHOT

if TYPE_CHECKING:
    from kvdock.planner import BufferPlan, CachePlan, GroupPlan

ALWAYS_SHOWN = ("page_size", "kv_cache_dtype")
KV_FILLS = (("█", "#"), ("▚", "%"), ("▤", "@"), ("▦", "$"), ("▣", "*"), ("▥", "="))
KV_STYLES = ("cyan", "blue", "green", "bright_cyan", "bright_blue", "bright_green")


def plan_page(plan: CachePlan) -> Page:
    """Return a plan as a page."""
    return (
        _head(plan),
        _options(plan),
        _spaces(plan),
        _groups(plan),
        _limits(plan),
        _memory(plan),
        memory_bar(plan),
        *warning_lines(plan.warnings),
    )


def warning_lines(warnings: Iterable[str]) -> list[Line]:
    """Return a line for each warning."""
    return [Line(warning, label="warning:") for warning in warnings]


def _head(plan: CachePlan) -> Facts:
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
    return Facts(rows)


def _options(plan: CachePlan) -> Table:
    sources, values = plan.options.sources, plan.options.values
    always = ALWAYS_SHOWN if plan.budget.base == "given" else (*ALWAYS_SHOWN, "mem_fraction_static")
    shown = [n for n in values.__struct_fields__ if n in sources and (n in always or sources[n] != "default")]
    rows = [(name, str(getattr(values, name)), sources[name]) for name in shown]
    return Table("options", ("option", "value", "from"), rows)


def _spaces(plan: CachePlan) -> Table:
    rows, shared = [], shared_pages(plan)
    for name, slots in plan.spaces.items():
        space = plan.outline.spaces[name]
        window = "" if space.window_tokens is None else f"{space.window_tokens:,}"
        kv, rest = kv_and_rest(b for b in plan.buffers if b.space == name)
        held = f"shared, {size(shared[name])} a page" if name in shared else size(kv)
        rows.append((name, f"{slots:,}", str(space.page_size), window, held, size(rest)))
    kv, rest = kv_and_rest(b for b in plan.buffers if b.space is None)
    if kv or rest:
        rows.append(("(fixed)", "", "", "", size(kv), size(rest)))
    columns = ("space", "slots", "page", "window", "KV", "bookkeeping")
    return Table("spaces", columns, rows, numeric=columns[1:])


def _groups(plan: CachePlan) -> Table:
    shared = shared_pages(plan)
    rows = [
        (
            group.name,
            group.kind,
            _layers(group),
            group.space,
            group.pool_cls.name,
            group.pool_cls.plugin,
            "shared" if group.space in shared else _bytes(group),
        )
        for group in plan.groups
    ]
    columns = ("group", "kind", "layers", "space", "pool", "plugin", "bytes")
    return Table("layer groups", columns, rows, numeric=("bytes",))


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
    return Table("limits", ("limit", "asked", "holds", "bound by", "raised by"), rows, numeric=("asked", "holds"))


def _memory(plan: CachePlan) -> Table:
    kv, rest = kv_and_rest(plan.buffers)
    per_token = plan.bytes_per_token
    parts = _kv_sums(plan)
    rows = [
        ("KV", kv),
        *((f"· {name}", nbytes) for name, nbytes in parts.items() if len(parts) > 1),
        ("bookkeeping", rest),
        ("total", plan.total_bytes),
        ("budget", plan.budget_bytes),
        ("left over", plan.budget_bytes - plan.total_bytes),
        ("per token: KV", per_token.kv),
        ("per token: bookkeeping", per_token.bookkeeping),
    ]
    if plan.host_bytes:
        rows.append(("on the host", plan.host_bytes))
    return Table("memory", ("", "size", "bytes"), [(n, size(b), f"{b:,}") for n, b in rows], numeric=("size", "bytes"))


def kv_and_rest(buffers: Iterable[BufferPlan]) -> tuple[int, int]:
    """Return the device bytes of KV and of everything else."""
    kept = [buffer for buffer in buffers if buffer.memory == "device"]
    kv = sum(buffer.nbytes for buffer in kept if buffer.is_kv)
    return kv, sum(buffer.nbytes for buffer in kept) - kv


def memory_bar(plan: CachePlan) -> Bar:
    """Return where the memory goes: what else takes the device's, KV by group, bookkeeping, what is unused."""
    kv = _kv_parts(plan)
    rest = plan.total_bytes - sum(part.nbytes for part in kv)
    own = [
        *kv,
        Part("bookkeeping", rest, "▒", "b", "magenta"),
        Part("unused", max(0, plan.unused_bytes), "·", ".", "dim"),
    ]
    if plan.budget.base == "given":
        return Bar(f"memory: {plan.total_bytes / max(1, plan.budget_bytes):.1%} of the budget", own)
    share = f"{plan.total_bytes / max(1, plan.device.free_before_load_bytes):.1%}"
    return Bar(f"memory of {plan.device.name}: {share} for the cache", [*_claims(plan), *own])


def _claims(plan: CachePlan) -> list[Part]:
    """Return what else takes the memory that was free before loading; the slack is what the budget leaves of it."""
    budget, device = plan.budget, plan.device
    loaded = device.free_before_load_bytes - device.free_bytes
    slack = device.free_bytes - budget.weights_bytes - budget.reserve_bytes - plan.budget_bytes
    return [
        Part("loaded already", loaded, "▞", "L", "red"),
        Part("weights", budget.weights_bytes, "▓", "W", "yellow"),
        Part("reserve", budget.reserve_bytes, "▧", "r", "bright_yellow"),
        Part("slack", max(0, slack), "░", "s", "white"),
    ]


def _kv_sums(plan: CachePlan) -> dict[str, int]:
    """Return the device bytes of what layers keep: of each group, what drafts may have to take back apart, and of tables."""
    sums: dict[str, int] = {}
    for group in plan.groups:
        snapshots = [buffer for buffer in group.buffers if buffer.role == SNAPSHOT]
        kept, _ = kv_and_rest(group.buffers)
        taken, _ = kv_and_rest(snapshots)
        sums[f"KV of {group.name}"] = kept - taken
        if taken:
            sums[f"snapshots of {group.name}"] = taken
    sums["KV in tables"] = kv_and_rest(plan.tables)[0]
    return {name: nbytes for name, nbytes in sums.items() if nbytes}


def _kv_parts(plan: CachePlan) -> list[Part]:
    """Return the KV of each group, then that of tables."""
    found = []
    for place, (name, nbytes) in enumerate(_kv_sums(plan).items()):
        fill, ascii_fill = KV_FILLS[place % len(KV_FILLS)]
        found.append(Part(name, nbytes, fill, ascii_fill, KV_STYLES[place % len(KV_STYLES)]))
    return found
