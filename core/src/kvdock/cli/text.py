"""Text of others on a terminal: model names, reasons of plugins, file names."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator


def printable(text: str, keep: str = "") -> str:
    """Return `text` with every character that could steer a terminal replaced, but those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)


def one_line(message: str) -> str:
    """Return a message of several lines as one, without control characters."""
    joined = ""
    for line in filter(None, (line.strip() for line in message.splitlines())):
        separator = "" if not joined else " " if joined.endswith((":", ",", ";")) else "; "
        joined += separator + line
    return printable(joined)


def size(nbytes: int | float) -> str:
    """Return bytes for a person: ``1.50 GiB``, ``512 B``."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:,.2f} {unit}"
    return f"{nbytes:,} B" if isinstance(nbytes, int) else f"{nbytes:,.2f} B"


def ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers for a person: ``0-3, 5, 8-9``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


@contextlib.contextmanager
def foreign_prints_to_stderr() -> Iterator[None]:
    """Send what plugins and their libraries print to standard error, so that standard output is ours alone.

    A warning becomes one line there, without the file and line of the code that gave it.
    """
    with _descriptor_to_stderr(), contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.showwarning = _show_warning
        yield


def _show_warning(message: Warning | str, *_where: object, **_more: object) -> None:
    print(f"kvdock: warning: {one_line(str(message))}", file=sys.stderr)


@contextlib.contextmanager
def _descriptor_to_stderr() -> Iterator[None]:
    """Do the same for native code, where standard output is a file of the system."""
    try:
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        yield
        return
    sys.stdout.flush()
    saved = os.dup(out)
    os.dup2(err, out)
    try:
        yield
    finally:
        os.dup2(saved, out)
        os.close(saved)
