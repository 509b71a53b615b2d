"""Every error that kvdock raises on purpose.

A message says what happened, where, and what to do. A number that a message suggests was asked of
the solver and works when it is used.
"""

from __future__ import annotations

from collections.abc import Iterable


class KVDockError(Exception):
    """Base of all errors of kvdock: catching it catches nothing else."""


class PlanError(KVDockError):
    """Options, a model or a plan file that cannot be served; names the option, its value and what works."""


class BudgetError(KVDockError):
    """The memory does not suffice; says what is needed, what is there, and the nearest fit.

    Attributes:
        needed_bytes: the smallest budget that works, in bytes.
        budget_bytes: the budget that was there, in bytes.
    """

    def __init__(self, message: str, *, needed_bytes: int = 0, budget_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class UnsupportedCombination(KVDockError):
    """No plugin serves this hardware, model and options together; lists every objection.

    Attributes:
        objections: pairs of the plugin that objects and its reason, in the order of the report.
    """

    def __init__(self, message: str, objections: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.objections = tuple(objections)


class PluginError(KVDockError):
    """A plugin cannot be used: it failed to load, broke the hook contract, or clashes with another."""


class BuildError(KVDockError):
    """A plan cannot be turned into live pools here; says what is missing and how to get it."""


class SlotError(KVDockError):
    """A slot, page or request row was misused while running; nothing was changed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the closest of `known`, or an empty string."""
    import difflib  # only for a message: every start of the command line would pay for it

    names = sorted(known)
    match = [k for k in names if name and k.startswith(name)] or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def printable(text: str, limit: int | None = 200) -> str:
    """Return `text` safe for a terminal: control characters replaced, cut after `limit` characters (``None``: whole)."""
    shown = text[:limit]
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)
    return shown if limit is None or len(text) <= limit else f"{shown}…"


def one_line(text: str) -> str:
    """Return a text of several lines as one, without control characters."""
    joined = ""
    for line in filter(None, (line.strip() for line in text.splitlines())):
        separator = "" if not joined else " " if joined.endswith((":", ",", ";")) else "; "
        joined += separator + line
    return printable(joined, limit=None)
