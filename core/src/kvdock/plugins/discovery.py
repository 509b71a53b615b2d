"""Entry points → candidates: what is installed, read from metadata, importing nothing."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import importlib_metadata
import msgspec

from kvdock.errors import printable
from kvdock.hookspecs import GROUPS, TIERS

RESERVED = frozenset({"core", "cpu"})
"""Names of built-in plugins; no distribution may use them."""

NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)?")
"""What a plugin may be called; a device is ``plugin:name`` and a preference ``hook=plugin``."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An entry point that may become a plugin; nothing of it was imported.

    `value` is the object that it names, `needs` the hardware and the family that a variant waits for.
    `status` is ``found``, ``conflict`` (another distribution has the same name) or ``failed`` (it can
    never be loaded), and `reason` says why.
    """

    name: str
    tier: str
    group: str
    value: str
    distribution: str = ""
    version: str = ""
    needs: tuple[str, ...] = ()
    status: str = "found"
    reason: str = ""


def discover(path: Sequence[str] | None = None) -> tuple[Candidate, ...]:
    """Return every candidate on `path` (default: ``sys.path``), sorted by tier and name.

    Metadata is read once per process and path. The same name and value found twice (a path and a link
    to it, old metadata beside new) is one candidate, the first on the path.
    """
    return _scan(tuple(sys.path if path is None else path))


@functools.cache
def _scan(path: tuple[str, ...]) -> tuple[Candidate, ...]:
    first: dict[tuple[str, str, str], Candidate] = {}
    for candidate in _read(path):
        first.setdefault((candidate.group, candidate.name, candidate.value), candidate)
    rivals: defaultdict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for candidate in first.values():
        rivals[candidate.group, candidate.name].append(candidate)
    checked = [_checked(candidate, same) for same in rivals.values() for candidate in same]
    return tuple(sorted(checked, key=lambda c: (TIERS.index(c.tier), c.name, c.distribution, c.value)))


def _read(path: tuple[str, ...]) -> Iterator[Candidate]:
    """Yield every candidate, path entry by path entry; the newest metadata of an entry comes first."""
    for entry in filter(_exists, path):
        found: list[Candidate] = []
        for distribution in importlib_metadata.distributions(path=[entry]):
            try:
                found += _candidates(distribution)
            except Exception as error:  # whatever a broken file does to its parser, the others are found
                _skip(distribution, entry, error)
        yield from sorted(found, key=lambda candidate: _numbers(candidate.version), reverse=True)


def _skip(distribution: Any, entry: str, error: Exception) -> None:
    import logging  # only then: every start of the command line would pay for it

    try:
        owner = " ".join(filter(None, _name_and_version(distribution)))
    except Exception:
        owner = ""
    logging.getLogger("kvdock").warning(
        "the metadata of %s in %s cannot be read and is skipped: %s; reinstall or remove it",
        printable(owner) or "a distribution",
        printable(entry or os.curdir),
        printable(str(error)),
    )


def _exists(entry: str) -> bool:
    """Tell whether a path entry is there; for one that is not, the library would import `zipfile` to look inside."""
    return Path(entry or os.curdir).exists()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version))


def _candidates(distribution: Any) -> list[Candidate]:
    """Return the candidates of one distribution; most have none, and of those only one file is read."""
    text = distribution.read_text("entry_points.txt") or ""
    if "kvdock." not in text:
        return []
    try:
        points = [point for point in distribution.entry_points if point.group in GROUPS]
    except Exception as error:
        raise ValueError(f"entry_points.txt: {_bad_line(text) or error}") from error
    if not points:
        return []
    name, version = _name_and_version(distribution)
    return [
        Candidate(
            name=point.name,
            tier=GROUPS[point.group],
            group=point.group,
            value=point.value,
            distribution=name,
            version=version,
            needs=tuple(point.name.split(".")) if GROUPS[point.group] == "variant" else (),
        )
        for point in points
    ]


def _bad_line(text: str) -> str:
    """Return what is wrong with the first malformed line: the library's parser stumbles over it without naming it."""
    lines = (line.strip() for line in text.splitlines())
    bad = (line for line in lines if line and not line.startswith(("[", "#")) and "=" not in line)
    return next((f"{line!r} is not name = value" for line in bad), "")


def _name_and_version(distribution: Any) -> tuple[str, str]:
    """Return the two fields from the head of the metadata; the library's parser would import all of `email`."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    fields = dict(
        line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if line[:1].strip() and ":" in line
    )
    return fields.get("Name", "").strip(), fields.get("Version", "").strip()


def _checked(candidate: Candidate, same_name: list[Candidate]) -> Candidate:
    """Return the candidate, marked if it can never be loaded."""
    reason = refuse_name(candidate.name, candidate.tier)
    if reason:
        return msgspec.structs.replace(candidate, status="failed", reason=reason)
    if len(same_name) == 1:
        return candidate
    owners = " and ".join(sorted(f"{c.distribution} {c.version} ({c.value})" for c in same_name))
    reason = f"the name {candidate.name!r} in {candidate.group} belongs to {owners}; uninstall all but one"
    return msgspec.structs.replace(candidate, status="conflict", reason=reason)


def refuse_name(name: str, tier: str) -> str:
    """Return why a plugin of `tier` cannot be called `name`, or an empty string."""
    if not NAME.fullmatch(name):
        return f"{name!r} is no name for a plugin; use letters, digits, '-' and '_'"
    if tier == "core":
        return ""
    if name in RESERVED:
        return f"the name {name!r} is reserved for a built-in plugin; rename the entry point"
    if (tier == "variant") != ("." in name):
        right = "'<hardware>.<family>'" if tier == "variant" else "one word"
        return f"the {tier} {name!r} must be named {right}"
    return ""
