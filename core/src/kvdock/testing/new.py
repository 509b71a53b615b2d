"""A distribution with a plugin that keeps every promise, written from a template that the wheel holds."""

from __future__ import annotations

import keyword
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from kvdock.errors import PlanError, printable
from kvdock.families.reader import FAMILIES, OTHER
from kvdock.plugins.discovery import RESERVED, discover

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

KINDS = ("hardware", "family")
"""What can be made: a folder of templates each."""
SUFFIX = ".tmpl"
"""Ending of a template, so that no tool takes it for a module."""
MODEL_NAME = "acme"
"""The name that templates are written for: in lower case as it is, and capitalised in names of classes."""

KNOWN = frozenset({"ascend", "cuda", "dsv4", "rocm"})
"""Plugins of this project, whether or not they are installed here."""
WORDS = frozenset({"all", "any", "auto", "kvdock", "meta", "none", "npu", "testing", "torch", "triton"})
"""What devices, options, packages or modules are called already."""
LONGEST = 40
"""Letters of a name: files are called by it several times over."""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def check_name(name: str) -> None:
    """Verify that a plugin can have a name.

    Raises:
        PlanError: it is no lower-case identifier, too long, or taken by the core or a known plugin; says what would do.
    """
    if len(name) > LONGEST:
        raise PlanError(
            f"NAME={printable(name, LONGEST)!r} has {len(name)} letters; give at most {LONGEST}, such as acme"
        )
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise PlanError(
            f"NAME={printable(name)!r} cannot name a package; give letters in lower case, digits and single _ between "
            "them, such as acme"
        )
    core = RESERVED | {family.name for family in (*FAMILIES, OTHER)}
    for taken, owner in (
        (core, "the core's own"),
        (KNOWN, "a plugin of kvdock's own"),
        (WORDS, "a word of kvdock's own"),
    ):
        if name in taken:
            listed = ", ".join(sorted(core | KNOWN | WORDS))
            raise PlanError(f"NAME={name!r} is {owner}; give a name that is not one of {listed}")


def check_free(name: str) -> None:
    """Verify that no plugin of that name is installed: of two, neither would be loaded.

    Raises:
        PlanError: one is; names its distribution.
    """
    owners = sorted({f"{c.distribution} {c.version}" for c in discover() if c.name == name})
    if owners:
        raise PlanError(
            f"NAME={name!r} is the name of an installed plugin ({', '.join(owners)}); give another NAME, or uninstall it"
        )


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
    """Write the distribution into the new folder ``kvdock-NAME`` in `out`, which is made if its parent is there; return it.

    Raises:
        PlanError: the name cannot be a plugin's or is taken, or the folder is there or cannot be made. Nothing is written.
    """
    texts = rendered(name, kind)
    check_free(name)
    target = out / f"kvdock-{name}"
    made: list[Path] = []
    try:
        for folder in (out, target):
            _make(folder, made, must_be_new=folder is target)
        for path, text in texts.items():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        for folder in reversed(made):
            shutil.rmtree(folder, ignore_errors=True)
        raise PlanError(f"{target} cannot be written ({error.strerror}); give another --out") from error
    return target


def _make(folder: Path, made: list[Path], *, must_be_new: bool) -> None:
    """Make a folder and note it in `made`.

    Raises:
        PlanError: one that `must_be_new` is there, or its parent is not.
    """
    try:
        folder.mkdir()
    except FileExistsError as error:
        if must_be_new:
            raise PlanError(
                f"{folder} is there already and is left as it is; remove it, or give another --out or NAME"
            ) from error
    except FileNotFoundError as error:
        raise PlanError(
            f"--out {folder}: the folder {folder.parent} is not there; make it, or give another --out"
        ) from error
    else:
        made.append(folder)
