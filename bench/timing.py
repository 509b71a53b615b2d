"""How things are timed: medians on one thread, several sides in turn, and tables of the figures."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

KI, MI = 2**10, 2**20


def timed(call: Callable[[], object]) -> tuple[float, object]:
    """Return the microseconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e6, result


def median_us(call: Callable[[], object], undo: Callable[[object], object], repeats: int) -> float:
    spent = []
    for turn in range(repeats + 3):
        took, result = timed(call)
        undo(result)
        if turn >= 3:
            spent.append(took)
    return statistics.median(spent)


class Side(NamedTuple):
    """A thing to time: `call` gets what `prepare` returned, `undo` its result; only `call` is timed."""

    call: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    undo: Callable[[Any], object] = lambda _: None


class Pace(NamedTuple):
    """How often sides are measured: calls of a block that count, most turns, and the seconds after which turns end."""

    calls: int
    turns: int
    seconds: float


def in_turn(sides: Mapping[str, Side], pace: Pace) -> dict[str, float]:
    """Return the median microseconds of each side.

    Sides take turns in blocks of calls, since a side that copies megabytes at each call would empty the cache
    for the others if the calls alternated. Blocks are short, so that a mood of the machine meets all sides. The
    first turn is not counted, nor the first two calls of a block; there are at least three turns that count.
    """
    spent: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.freeze()
    ends = time.perf_counter() + pace.seconds
    for turn in range(pace.turns + 1):
        if turn > 3 and time.perf_counter() > ends:
            break
        for name, side in sides.items():
            found = _block(side, pace.calls, pace.seconds / 40)
            if turn:
                spent[name].extend(found)
    gc.unfreeze()
    return {name: statistics.median(found) for name, found in spent.items()}


def _block(side: Side, calls: int, seconds: float) -> list[float]:
    """Return the times of the calls of a block, which ends after some seconds but not before its third call that counts."""
    spent: list[float] = []
    ends = time.perf_counter() + seconds
    while len(spent) < calls + 2 and (len(spent) < 5 or time.perf_counter() < ends):
        given = side.prepare()
        start = time.perf_counter()
        result = side.call(given)
        spent.append((time.perf_counter() - start) * 1e6)
        del given
        side.undo(result)
    return spent[2:]


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    lines = [f"### {title}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def size_name(size: int) -> str:
    return f"{size // MI}Mi" if size >= MI else f"{size // KI}Ki"


def time_name(us: float) -> str:
    """Return a time in the unit that it is read in."""
    if us < 1000:
        return f"{us:.1f} µs" if us < 100 else f"{us:.0f} µs"
    return f"{us / 1000:.2f} ms" if us < 10_000 else f"{us / 1000:.0f} ms"


def machine() -> str:
    """Return what all of this runs on."""
    versions = f"Python {platform.python_version()}, torch {version('torch')}, one thread"
    return f"{versions}, on {processor()} with {os.cpu_count()} cores, shared"


def processor() -> str:
    """Return the name of the processor, as the operating system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
