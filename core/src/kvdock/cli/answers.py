"""Answers as pages: does it fit and what would, the fewest ranks, choices side by side, all ranks, differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdock.cli.overview import warning_lines
from kvdock.cli.page import Facts, Line, Page, Table
from kvdock.cli.text import ranges, size
from kvdock.layout import TARGET

if TYPE_CHECKING:
    from kvdock.choices import Comparison, RankRow, RankTable, SmallestTP, Trial, Variant
    from kvdock.differences import Difference
    from kvdock.limits import Limit
    from kvdock.questions import Answer, Longest
    from kvdock.remedies import Remedy, SpaceNeed

FLAGS: Mapping[str, str] = {
    "budget_bytes": "--memory",
    "weights_bytes": "--weights",
    "reserve_bytes": "--reserve",
    "mem_fraction_static": "--mem-fraction",
    "max_running_requests": "--max-requests",
    "max_total_tokens": "--max-tokens",
    "context_length": "--context",
    "kv_cache_dtype": "--kv-cache-dtype",
    "tp_size": "--tp",
    "dcp_size": "--dcp",
    "dp_size": "--dp",
    "requests": "--requests",
    "length": "--length",
}
"""Flags of inputs that have one of another name than ``--option NAME=VALUE``."""


def serves_page(answer: Answer) -> Page:
    """Return whether requests fit, what they hold, and what would serve them."""
    rows = [
        ("fits", "yes" if answer.fits else "no"),
        ("asked", _asked(answer.requests, answer.workers, answer.requests_per_worker, f"{answer.length:,} tokens")),
        ("most requests", f"{answer.most_requests:,} of this length at once"),
        ("longest", f"{answer.longest:,} tokens each for so many; the context is {answer.context_length:,}"),
        ("KV that they hold", _held(answer)),
        ("smallest budget", _smallest_budget(answer)),
        ("windows", answer.windows),
    ]
    page: list[Any] = [Facts(rows), _needs(answer.spaces)]
    page += [Line(reason, label="in the way:") for reason in answer.reasons]
    if answer.remedies:
        page.append(_remedies(answer.remedies))
    return page


def _asked(requests: int, workers: int, each: int, what: str) -> str:
    shared = f", {each:,} on each of {workers:,} workers" if workers > 1 else ""
    return f"{requests:,} request{'' if requests == 1 else 's'} of {what} at once{shared}"


def _held(answer: Answer | Longest) -> str:
    """Return the bytes of KV behind the requests, those on the device and those on the host apart."""
    if not answer.host_kv_bytes:
        return f"{_bytes(answer.kv_bytes)} a rank"
    return f"{_bytes(answer.kv_bytes)} on the device, {_bytes(answer.host_kv_bytes)} on the host, a rank"


def _bytes(nbytes: int) -> str:
    return f"{size(nbytes)} ({nbytes:,} bytes)"


def _smallest_budget(answer: Answer) -> str:
    if answer.budget_bytes is None:
        return "none serves them"
    beside = _change(answer.budget_change)
    text = _bytes(answer.budget_bytes) + (f" with {beside}" if beside else "")
    note = f"; {answer.budget_note}" if answer.budget_note else ""
    return f"{text}; the plan has {size(answer.plan_budget_bytes)}{note}"


def _needs(spaces: Iterable[SpaceNeed]) -> Table:
    rows = [(need.name, f"{need.needed:,}", f"{need.there:,}", f"{need.lacking:,}") for need in spaces]
    columns = ("space", "slots needed", "there", "lacking")
    return Table("spaces", columns, rows, numeric=columns[1:])


def _remedies(remedies: Iterable[Remedy], title: str = "what serves") -> Table:
    rows = [(_change(r.change), f"{r.requests:,}", f"{r.length:,}", r.note) for r in remedies]
    return Table(title, ("change", "requests", "tokens each", "note"), rows, ("requests", "tokens each"))


def _change(change: Mapping[str, Any]) -> str:
    """Return changes as arguments of a command line."""
    return " ".join(map(_argument, change, change.values()))


def _argument(name: str, value: Any) -> str:
    if name == "dp_attention":
        return "--dp-attention"
    return f"{FLAGS[name]} {value}" if name in FLAGS else f"--option {name}={value}"


def longest_page(answer: Longest) -> Page:
    """Return the longest length, and what stops it there."""
    rows = [
        ("longest", f"{answer.length:,} tokens"),
        ("asked", _asked(answer.requests, answer.workers, answer.requests_per_worker, "equal length")),
        (_BOUND, _bound(answer)),
        ("context", f"{answer.context_length:,} tokens"),
        ("KV that they hold", _held(answer)),
        ("windows", answer.windows),
    ]
    page: list[Any] = [Facts(rows), _needs(answer.spaces)]
    return [*page, _remedies(answer.remedies, "what raises it")] if answer.remedies else page


def _bound(answer: Longest) -> str:
    """Return the limit that stops a length, and what of it is used up."""
    if answer.bound == "context_length":
        return f"{_words(answer.limit)}: context_length={answer.context_length}"
    return f"{_words(answer.limit)}: no slot more in {answer.bound}"


_BOUND = "bound by"


def _words(name: str) -> str:
    """Return a limit's name as a page says it."""
    return "longest request" if name == "request_tokens" else name.replace("_", " ")


def smallest_tp_page(answer: SmallestTP) -> Page:
    """Return the smallest tp_size that serves, and why smaller ones do not."""
    if answer.requests is not None and answer.length is not None:
        each = -(-answer.requests // answer.workers)
        asked = _asked(answer.requests, answer.workers, each, f"{answer.length:,} tokens")
    else:
        asked = f"{answer.tokens or 0:,} tokens"
    fits = f"--tp {answer.tp_size}" if answer.tp_size is not None else "none of these sizes serves that"
    columns = ("tp", "serves", "tokens", "requests", "KV a token", "weights", "budget", "why not")
    rows = [_trial(trial) for trial in answer.trials]
    page: list[Any] = [
        Facts([("smallest", fits), ("asked", asked)]),
        Table("sizes that were tried", columns, rows, numeric=columns[2:7]),
    ]
    return [*page, *([Line(answer.note, label="note:")] if answer.note else [])]


def _trial(trial: Trial) -> tuple[str, ...]:
    return (
        str(trial.tp_size),
        "yes" if trial.serves else "no",
        _number(trial.max_total_num_tokens),
        _number(trial.max_running_requests),
        _size(trial.kv_bytes_per_token),
        _size(trial.weights_bytes),
        _size(trial.budget_bytes),
        trial.reason,
    )


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _size(value: int | float | None) -> str:
    return "" if value is None else size(value)


_LINES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "tokens": ("max_total_num_tokens", _number),
    "requests": ("max_running_requests", _number),
    "longest request": ("max_request_tokens", _number),
    "KV a token": ("kv_bytes_per_token", _size),
    "bookkeeping a token": ("bookkeeping_bytes_per_token", _size),
    "weights": ("weights_bytes", _size),
    "budget": ("budget_bytes", _size),
    "KV": ("kv_bytes", _size),
    "bookkeeping": ("bookkeeping_bytes", _size),
    "unused": ("unused_bytes", _size),
    "on the host": ("host_bytes", _size),
    "windows": ("windows", lambda value: value or ""),
}
"""Line of a comparison → field of a variant, and how it is shown."""


def compare_page(answer: Comparison) -> Page:
    """Return variants side by side, a column each."""
    labels = [f"{variant.name} {variant.value}" for variant in answer.variants]
    rows = [
        (line, *(show(getattr(variant, field)) for variant in answer.variants))
        for line, (field, show) in _LINES.items()
        if any(getattr(variant, field) for variant in answer.variants)
    ]
    rows += _limit_rows([variant.limits for variant in answer.variants])
    if any(variant.reason for variant in answer.variants):
        rows.append(("cannot be planned", *(variant.reason for variant in answer.variants)))
    page: list[Any] = [Table(answer.model, ("", *labels), rows, numeric=labels)]
    page += [line for variant, label in zip(answer.variants, labels, strict=True) for line in _warned(variant, label)]
    return [*page, *([Line(answer.note, label="note:")] if answer.note else [])]


def _limit_rows(variants: Sequence[Iterable[Limit]]) -> list[tuple[str, ...]]:
    """Return two lines for each limit, what binds it and what raises it, with a text for each variant."""
    by_name = [{limit.name: limit for limit in limits} for limits in variants]
    rows = []
    for name in dict.fromkeys(name for limits in by_name for name in limits):
        found = [limits.get(name) for limits in by_name]
        rows.append((f"{_words(name)}: bound by", *(limit.factor if limit else "" for limit in found)))
        rows.append(("· raised by", *(", ".join(limit.raised_by) if limit else "" for limit in found)))
    return rows


def _warned(variant: Variant, label: str) -> list[Line]:
    return [Line(warning, label=f"{label}: warning:") for warning in variant.warnings]


def ranks_page(answer: RankTable) -> Page:
    """Return every rank of a deployment, and what it holds over all workers."""
    columns = ("rank", "stage", "device", "layers", "budget", "planned", "unused", "alone", "agreed", "binds")
    table = Table(
        "ranks of one replica", columns, [_rank(row) for row in answer.ranks], ("rank", "stage", *columns[4:9])
    )
    rows = [
        ("tokens", f"{answer.max_total_num_tokens:,} over {answer.workers:,} worker{'s' * (answer.workers > 1)}"),
        ("requests", f"{answer.max_running_requests:,} at once"),
        ("longest request", f"{answer.max_request_tokens:,} tokens"),
        ("planned", f"{_bytes(answer.total_bytes)} on {_ranks(answer)}{_of_all(answer, answer.total_bytes)}"),
        ("unused", f"{_bytes(answer.unused_bytes)}{_of_all(answer, answer.unused_bytes)}"),
        *((_BOUND if limit is answer.limits[0] else "", _binds(limit, answer.binding_rank)) for limit in answer.limits),
    ]
    return [table, Facts(rows), *warning_lines(answer.warnings)]


def _binds(limit: Limit, rank: int) -> str:
    return f"rank {rank}: {_words(limit.name)} by {limit.factor}; raised by {', '.join(limit.raised_by)}"


def _ranks(answer: RankTable) -> str:
    count = len(answer.ranks)
    ranks = f"{count:,} rank{'s' * (count > 1)}"
    return f"{ranks} of each of {answer.replicas:,} replicas" if answer.replicas > 1 else ranks


def _of_all(answer: RankTable, nbytes: int) -> str:
    """Return the same bytes over all replicas, where there are several."""
    return f"; {_bytes(nbytes * answer.replicas)} on all of them" if answer.replicas > 1 else ""


def _rank(row: RankRow) -> tuple[str, ...]:
    layers = "; ".join(f"{group} {_layers(ids)}" for group, ids in row.layers.items())
    memory = (size(row.budget_bytes), size(row.planned_bytes), size(row.unused_bytes))
    slots = (f"{row.own_tokens:,}", f"{row.tokens:,}")
    return (str(row.rank), str(row.stage), row.device, layers or "none", *memory, *slots, "yes" if row.binds else "")


def _layers(ids: Sequence[int]) -> str:
    """Return how many layers there are and which, or where they lie if they are in many pieces."""
    text = ranges(ids)
    return f"{len(ids)} ({text})" if text.count(",") < 3 else f"{len(ids)} (among {min(ids)}-{max(ids)})"


def differences_page(differences: Sequence[Difference], *, transfer: bool) -> Page:
    """Return a row for each difference, or that there is none."""
    if not differences:
        return [Line(NO_DIFFERENCE[transfer])]
    columns: tuple[str, ...] = ("what", "layers", "a", "b", "severity", "what to change")
    used = columns if transfer else columns[:4]
    return [Table("differences", used, [_difference(difference)[: len(used)] for difference in differences])]


NO_DIFFERENCE = ("the plans are equal", "each side reads the KV of the other")
"""What is said where plans are equal, and where a transfer finds nothing in its way."""


def _difference(difference: Difference) -> tuple[str, ...]:
    from kvdock.differences import shown_values

    worker = "" if difference.worker == TARGET else f"{difference.worker}: "
    values = shown_values(difference)
    return (f"{worker}{difference.name}", ranges(difference.layers), *values, difference.severity, difference.change)
