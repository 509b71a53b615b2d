"""Standard output for the result alone, whatever plugins, their libraries and native code print, and whenever."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from kvdock.cli.text import one_line
from kvdock.errors import KVDockError


class OutputClosed(KVDockError):
    """There is no standard output to print a result to."""


def claim() -> TextIO | None:
    """Make `sys.stdout` a stream of ours alone and return it; for all others descriptor 1 is standard error from now on.

    ``None``: the caller has put a stream of its own in place of the process's, which is used as it is.

    Raises:
        OutputClosed: standard output is closed.
    """
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stdout is None:
        raise OutputClosed("standard output is closed; leave it open, or send it to a file with > FILE")
    ours, errors = None, _descriptor(sys.stderr)
    if _descriptor(sys.stdout) == 1 and errors is not None:
        sys.stdout.flush()
        ours = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
        os.dup2(errors, 1)
        sys.stdout = ours
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a question mark for what the terminal's encoding lacks
    return ours


def release(ours: TextIO | None) -> None:
    """Write out what `claim` returned, and leave standard error to whatever still runs.

    Threads of plugins print until the interpreter has gone, and so does what they registered to run at exit.
    """
    if ours is None:
        return
    try:
        ours.flush()
    except OSError:
        forget()
    sys.stdout = sys.stderr


def forget() -> None:
    """Drop what could not be written, so that the interpreter does not try and complain once more."""
    descriptor = _descriptor(sys.stdout)
    if descriptor is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _descriptor(stream: object) -> int | None:
    try:
        number = stream.fileno()  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return None
    return int(number)


@contextlib.contextmanager
def foreign_prints_to_stderr() -> Iterator[None]:
    """Send what plugins and their libraries print to standard error.

    A warning becomes one line there, without the file and line of the code that gave it.
    """
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.showwarning = _show_warning
        yield


def warn(message: str) -> None:
    """Print a warning as one line on standard error."""
    print(f"kvdock: warning: {one_line(message)}", file=sys.stderr)


def _show_warning(message: Warning | str, *_where: object, **_more: object) -> None:
    warn(str(message))


def print_json(data: Any) -> None:
    """Print data as one JSON document, in UTF-8 whatever the terminal's encoding."""
    import click
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2))
