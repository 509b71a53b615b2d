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


def nearest_model(name: str, known: Iterable[str]) -> str:
    """Return as `nearest`, for names of which each figure counts: no other device or version is ever suggested.

    ``trtlm`` is a slip of ``trtllm`` and ``a100`` the beginning of ``a100-40gb``; h20, h800 and gb200 are no h200.
    """
    found = [other for other in sorted(known) if name and _is_slip(name.lower(), other)]
    return nearest(name.lower(), found) or (f"; did you mean {found[0]!r}?" if found else "")


def _is_slip(name: str, other: str) -> bool:
    """Return whether `name` begins `other`, or differs by letters left out, added or swapped, never by a figure."""
    if other.startswith(name):
        return not other[len(name) :][:1].isdigit()
    plain, meant = ("".join(filter(str.isalnum, text)) for text in (name, other))
    shorter, longer = sorted((plain, meant), key=len)
    rest = iter(longer)
    is_within = len(longer) - len(shorter) <= 2 and len(shorter) > 2 and all(char in rest for char in shorter)
    figures, others = ([char for char in text if char.isdigit()] for text in (plain, meant))
    return figures == others and plain[:1] == meant[:1] and (is_within or sorted(plain) == sorted(meant))


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
