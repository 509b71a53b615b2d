"""A distribution with a plugin that keeps every promise, written from a template that the wheel holds."""

from __future__ import annotations

import keyword
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from kvdock.errors import PlanError
from kvdock.families.reader import FAMILIES, OTHER
from kvdock.plugins.discovery import RESERVED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

KINDS = ("hardware", "family")
"""What can be made: a folder of templates each."""
SUFFIX = ".tmpl"
"""Ending of a template, so that no tool takes it for a module."""
MODEL_NAME = "acme"
"""The name that templates are written for: in lower case as it is, and capitalised in names of classes."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def check_name(name: str) -> None:
    """Verify that a plugin can have a name.

    Raises:
        PlanError: it is no lower-case identifier, or the core's own; says what would do.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise PlanError(f"NAME={name!r} cannot name a package; give letters in lower case, digits and _, such as acme")
    taken = RESERVED | {family.name for family in (*FAMILIES, OTHER)}
    if name in taken:
        raise PlanError(f"NAME={name!r} is the core's own; give a name that is not one of {', '.join(sorted(taken))}")


def rendered(name: str, kind: str = "hardware") -> dict[str, str]:
    """Return the files of the distribution ``kvdock-NAME``, path → text.

    Raises:
        PlanError: the name cannot be a plugin's.
    """
    check_name(name)
    capitalised = "".join(part.capitalize() for part in name.split("_"))
    found = {}
    for path, text in _templates(files("kvdock.testing").joinpath("templates", kind)):
        for old, new in ((MODEL_NAME, name), (MODEL_NAME.capitalize(), capitalised)):
            path, text = path.replace(old, new), text.replace(old, new)
        found[path.removesuffix(SUFFIX)] = text
    return found


def _templates(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            yield prefix + entry.name, entry.read_text(encoding="utf-8")


def write(name: str, kind: str, out: Path) -> Path:
    """Write the distribution into the folder ``kvdock-NAME`` in `out`, which is made if need be; return it.

    Raises:
        PlanError: the name cannot be a plugin's, or the folder is there already. Nothing is written.
    """
    texts = rendered(name, kind)
    target = out / f"kvdock-{name}"
    if target.exists():
        raise PlanError(f"{target} is there already and is left as it is; remove it, or give another --out or NAME")
    try:
        for path, text in texts.items():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise PlanError(f"{target} cannot be written ({error.strerror}); give another --out") from error
    return target
