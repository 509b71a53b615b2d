"""What the conformance suites of a run found, in a few lines behind pytest's own summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SUITE_PROPERTY = "kvdock_suite"
"""Name of the property that a report carries if it is of a suite: the class and the suite that it makes concrete."""
REASON_PROPERTY = "kvdock_unsupported"
"""Name of the property with the reason for which a check was replaced."""

OUTCOMES = ("passed", "failed", "unsupported", "skipped")


class Check(NamedTuple):
    """One check of one suite: `outcome` is one of `OUTCOMES`, `why` the reason of the last two."""

    suite: str
    name: str
    outcome: str
    why: str


def checks_of(stats: Mapping[str, Sequence[Any]]) -> Iterator[Check]:
    """Yield every check that a suite made, from pytest's reports by outcome; of other tests nothing."""
    for status in ("passed", "failed", "error", "skipped"):
        for report in stats.get(status, ()):
            properties = dict(getattr(report, "user_properties", ()))
            if SUITE_PROPERTY in properties:
                yield _check(report, status, properties)


def _check(report: Any, status: str, properties: Mapping[str, Any]) -> Check:
    cls, suite = properties[SUITE_PROPERTY]
    file, _, rest = report.nodeid.partition("::")
    why = str(properties.get(REASON_PROPERTY, ""))
    outcome = "failed" if status == "error" else status
    if status == "skipped":
        outcome, why = ("unsupported", why) if why else ("skipped", _skip_reason(report))
    return Check(f"{file}::{cls} ({suite})", rest.partition("[")[0].rpartition("::")[2], outcome, why)


def _skip_reason(report: Any) -> str:
    where = report.longrepr
    return str(where[2]).removeprefix("Skipped: ") if isinstance(where, tuple) else str(where)


def lines(checks: Iterable[Check], verbose: bool = True) -> Iterator[str]:
    """Yield the summary: a line a suite if `verbose`, the reasons of what was not checked, and a line of totals."""
    found = list(checks)
    suites = {check.suite: Counter[str]() for check in found}
    for check in found:
        suites[check.suite][check.outcome] += 1
    for suite, counts in suites.items():
        if verbose or counts["failed"]:
            yield f"{suite}: {_counted(counts)}"
        yield from _reasons(suite, [check for check in found if check.suite == suite], verbose)
    total = sum((counts for counts in suites.values()), Counter[str]())
    yield f"{_number(len(suites), 'suite')}, {_number(len(found), 'check')}: {_counted(total)}"


def _reasons(suite: str, checks: Sequence[Check], verbose: bool) -> Iterator[str]:
    shown = ("unsupported", "skipped") if verbose else ("unsupported",)
    left = Counter((check.outcome, check.name, check.why) for check in checks if check.outcome in shown)
    name = "  " if verbose else f"{suite}: "
    for (outcome, check, why), count in left.items():
        times = f" ({count} times)" if count > 1 else ""
        yield f"{name}{outcome}{times}: {check}: {why}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome] or outcome == "passed")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
