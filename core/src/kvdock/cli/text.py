"""Text of others on a terminal: model names, reasons of plugins, file names."""

from __future__ import annotations

from collections.abc import Iterable

from kvdock import errors
from kvdock.errors import one_line as one_line


def printable(text: str) -> str:
    """Return the whole `text` with every character that could steer a terminal replaced."""
    return errors.printable(text, limit=None)


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
