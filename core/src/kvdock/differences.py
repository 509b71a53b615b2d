"""Differences as data: what two plans have not in common, and a line of text for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from kvdock.errors import PlanError, one_line
from kvdock.explain import rule_text
from kvdock.layout import TARGET
from kvdock.planfile import plugin_versions
from kvdock.planner import BufferPlan, CachePlan, ClassRef, GroupPlan

ABSENT = "absent"
"""What stands in a line for something that one side lacks."""
NOT_GIVEN = "not given"
"""Source of an option that nobody set."""

Fields = dict[str, Any]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that two sides have not in common: its `name`, the value of each side, the layers that it concerns.

    Values are plain data; ``None`` where a side lacks it. `sources` says who set an option on each side. `severity` is
    ``incompatible`` (what one side sends the other cannot read), ``resplit`` (it can, where the transfer splits heads
    anew) or ``note``; `change` says what to do about it, empty for a note.
    """

    name: str
    a: Any
    b: Any
    layers: tuple[int, ...] = ()
    worker: str = TARGET
    severity: Literal["incompatible", "resplit", "note"] = "note"
    change: str = ""
    sources: tuple[str, str] | None = None


def render_lines(differences: Iterable[Difference]) -> list[str]:
    """Return a line of text for each difference; names and values of others cannot add lines of their own."""
    return [one_line(_line(difference)) for difference in differences]


def _line(difference: Difference) -> str:
    worker = "" if difference.worker == TARGET else f"{difference.worker}: "
    layers = f" (layers {_ranges(difference.layers)})" if difference.layers else ""
    values = shown_values(difference)
    severity = "" if difference.severity == "note" else f" [{difference.severity}]"
    change = f"; {difference.change}" if difference.change else ""
    return f"{worker}{difference.name}{layers}: {values[0]} | {values[1]}{severity}{change}"


def shown_values(difference: Difference) -> tuple[str, str]:
    """Return the values of both sides as text, those of an option with who set it."""
    a, b = _shown(difference.a), _shown(difference.b)
    if difference.sources is None:
        return a, b
    ours, theirs = difference.sources
    return _sourced(a, ours), _sourced(b, theirs)


def _sourced(value: str, source: str) -> str:
    return NOT_GIVEN if source == NOT_GIVEN else f"{value} ({source})"


def _shown(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(str(item) for item in value)}]"
    if isinstance(value, Mapping):
        told = {name: item for name, item in value.items() if name != "layers" and item not in (None, "", ())}
        return ", ".join(f"{name} {_shown(item)}" for name, item in told.items())
    return str(value)


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers in ascending order: ``0-3, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def diff(a: CachePlan, b: CachePlan) -> tuple[Difference, ...]:
    """Return every difference between two plans: inputs, options, classes, spaces, buffers, totals, limits, plugins.

    Raises:
        PlanError: one of the two is no plan.
    """
    for side in (a, b):
        if not isinstance(side, CachePlan):
            raise PlanError(
                f"diff compares two plans, and {type(side).__name__} is none; give what kvdock.plan returned"
            )
    return (
        *_compared("model", _models(a), _models(b)),
        *_compared("device", {"": msgspec.structs.asdict(a.device)}, {"": msgspec.structs.asdict(b.device)}),
        *_compared("parallel", _parallel(a), _parallel(b)),
        *_options(a, b),
        *_compared("plugins", {"": plugin_versions(a)}, {"": plugin_versions(b)}),
        *_compared("", {"": _classes(a)}, {"": _classes(b)}),
        *_compared("groups", _groups(a), _groups(b)),
        *_compared("spaces", _spaces(a), _spaces(b)),
        *_compared("buffers", _buffers(a), _buffers(b)),
        *_compared("", {"": _totals(a)}, {"": _totals(b)}),
        *_compared("limits", _limits(a), _limits(b)),
        *_warnings(a, b),
    )


def _compared(section: str, a: Mapping[str, Fields], b: Mapping[str, Fields]) -> Iterator[Difference]:
    """Yield a difference for each thing that one side lacks, and for each field in which both have another value."""
    for key in dict.fromkeys((*a, *b)):
        path = ".".join(part for part in (section, key) if part)
        own, other = a.get(key), b.get(key)
        if own is None or other is None:
            layers = (own or other or {}).get("layers", ())
            yield Difference(name=path, a=own, b=other, layers=tuple(layers))
            continue
        for field in dict.fromkeys((*own, *other)):
            values = own.get(field), other.get(field)
            if values[0] != values[1]:
                name = f"{path}.{field}" if path else field
                layers = own.get("layers", ()) if field != "layers" else ()
                yield Difference(name=name, a=values[0], b=values[1], layers=tuple(layers))


def _models(plan: CachePlan) -> dict[str, Fields]:
    """Return what identifies each model, the target first; its layers show in groups and buffers."""
    return {
        worker: {
            "name": model.name,
            "architecture": model.architecture,
            "layer_count": len(model.layers),
            "context_length": model.context_length,
            "dtype": model.dtype,
        }
        for worker, model in zip(_workers(plan), plan.outline.models, strict=True)
    }


def _workers(plan: CachePlan) -> tuple[str, ...]:
    """Return the names of the workers in a path: none for the target, then the drafts."""
    drafts = len(plan.outline.models) - 1
    return ("", *(f"draft{place if drafts > 1 else ''}" for place in range(drafts)))


def _parallel(plan: CachePlan) -> dict[str, Fields]:
    """Return the parallel sizes of each worker, those of drafts where they are their own, and who agreed on the sizes."""
    sizes = zip(_workers(plan), plan.outline.parallels, strict=True)
    own = {name: msgspec.structs.asdict(found) for name, found in sizes if not name or found != plan.parallel}
    agreed = {name: getattr(plan.agreement, name) for name in ("rank", "ranks", "binding_rank")}
    return {**own, "agreement": agreed}


def _options(a: CachePlan, b: CachePlan) -> Iterator[Difference]:
    """Yield the options that have other values, or the same from another source."""
    for name in a.options.values.__struct_fields__:
        values = getattr(a.options.values, name), getattr(b.options.values, name)
        sources = a.options.sources.get(name, NOT_GIVEN), b.options.sources.get(name, NOT_GIVEN)
        if values[0] != values[1] or sources[0] != sources[1]:
            yield Difference(name=f"options.{name}", a=values[0], b=values[1], sources=sources)


def _classes(plan: CachePlan) -> Fields:
    return {
        "allocator_cls": plan.allocator_cls and _class_name(plan.allocator_cls),
        "request_pool_cls": _class_name(plan.request_pool_cls),
    }


def _class_name(ref: ClassRef) -> str:
    return f"{ref.name} of {ref.plugin}"


def _groups(plan: CachePlan) -> dict[str, Fields]:
    return {group.name: _group(group) for group in plan.groups}


def _group(group: GroupPlan) -> Fields:
    fields = {name: getattr(group, name) for name in ("kind", "space", "worker", "layers", "shared")}
    return {**fields, "pool_cls": _class_name(group.pool_cls)}


def _spaces(plan: CachePlan) -> dict[str, Fields]:
    return {
        name: {
            "slots": plan.spaces[name],
            "page_size": space.page_size,
            "window_tokens": space.window_tokens,
            "issued_by": space.issued_by,
            "rule": rule_text(space),
        }
        for name, space in plan.outline.spaces.items()
    }


def _buffers(plan: CachePlan) -> dict[str, Fields]:
    return {f"{buffer.owner}.{buffer.name}": _buffer(buffer) for buffer in plan.buffers}


def _buffer(buffer: BufferPlan) -> Fields:
    fields = msgspec.structs.asdict(buffer)
    return {name: value for name, value in fields.items() if name not in ("name", "owner")}


def _totals(plan: CachePlan) -> Fields:
    return {
        "budget_bytes": plan.budget_bytes,
        "budget": plan.budget.note,
        "weights_bytes": plan.budget.weights_bytes,
        "max_total_num_tokens": plan.max_total_num_tokens,
        "max_running_requests": plan.max_running_requests,
        "max_request_tokens": plan.max_request_tokens,
        "total_bytes": plan.total_bytes,
        "host_bytes": plan.host_bytes,
        "bytes_per_token.kv": plan.bytes_per_token.kv,
        "bytes_per_token.bookkeeping": plan.bytes_per_token.bookkeeping,
        "fixed_bytes": plan.costs.fixed_bytes,
        "bound": plan.bound,
        "cap_tokens": plan.cap_tokens,
    }


def _limits(plan: CachePlan) -> dict[str, Fields]:
    return {
        limit.name: {name: getattr(limit, name) for name in limit.__struct_fields__ if name != "name"}
        for limit in plan.limits
    }


def _warnings(a: CachePlan, b: CachePlan) -> Iterator[Difference]:
    """Yield the warnings that one side alone has."""
    for warning in dict.fromkeys((*a.warnings, *b.warnings)):
        if (warning in a.warnings) != (warning in b.warnings):
            own, other = (warning if warning in plan.warnings else None for plan in (a, b))
            yield Difference(name="warnings", a=own, b=other)
