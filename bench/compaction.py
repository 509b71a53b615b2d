"""What a compaction of unified memory costs, beside a plain Python walk, and what taking and giving pages costs.

CPU time of one thread, since the machine may be shared; sides in turn, who begins changes with each turn, and of what was
timed in turn the median of the ratios counts. Bytes of pages are not copied: that is the device's affair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from kvdock.kernels.reference import ReferenceKernels
from kvdock.layout import SizeRule, Space
from kvdock.pools.storage import allocate
from kvdock.unified.geometry import Stretch, Window
from kvdock.unified.segment import Segment, table_buffers
from serving import median_ratio
from timing import table, time_name

SIZES = ((2**16, 2**12), (2**20, 2**12), (2**16, 2**14), (2**20, 2**18))
"""Pages of a space, a quarter of which are holes, and places that it gives up; the last two close every hole."""


def segment_of(pages: int, nbytes: int = 16) -> Segment:
    """Return a space of `pages` places of a few bytes, all of them taken."""
    space = Space(name="full", rule=SizeRule(), page_size=1)
    tables = allocate(table_buffers("full"), {"full": pages}, {"full": space}, torch.device("cpu"))
    raw = torch.zeros((pages + 1, 1, nbytes // 8), dtype=torch.int64)
    segment = Segment(Stretch("full", 1, nbytes, 0, 1, pages), tables, raw, ReferenceKernels())
    segment.reset(Window(0, pages))
    segment.back(torch.arange(1, pages + 1))
    return segment


def dig(segment: Segment, pages: int, count: int, seed: int) -> torch.Tensor:
    """Free `count` pages in no order, and return which."""
    chosen = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[:count] + 1
    segment.release(chosen)
    return chosen


def walk(free: torch.Tensor, owner_of: torch.Tensor, page_of: torch.Tensor, high: int, count: int) -> int:
    """Retreat by `count` places as a plain Python walk does, from the same tensors to the same; return the moves.

    The holes come to the host; places are popped from the end, and each survivor goes into the lowest hole.
    """
    targets = sorted(free.tolist())
    holes, owners = set(targets), owner_of[high - count : high].tolist()
    place, moved, to = 0, [], []
    for last in range(high - 1, high - 1 - count, -1):
        if last in holes:
            holes.discard(last)
            continue
        target = targets[place]
        place += 1
        holes.discard(target)
        moved.append(owners[last - high + count])
        to.append(target)
    pages, places = torch.tensor(moved), torch.tensor(to)
    page_of[pages] = places
    owner_of[places] = pages
    return len(moved)


def cpu_us(call: Callable[[], object]) -> float:
    """Return the CPU µs of a call."""
    started = time.process_time()
    call()
    return (time.process_time() - started) * 1e6


def compaction(pages: int, count: int, turns: int) -> tuple[list[float], list[float], int]:
    """Return the µs of giving up `count` places of a space with holes, ours and the walk's by turn, and the moves."""
    spent: dict[str, list[float]] = {"ours": [], "walk": []}
    moves = 0
    for turn in range(turns + 1):
        segment = segment_of(pages)
        free = dig(segment, pages, pages // 4, turn) - 1
        segment._copy = lambda source, target: None
        owner_of, page_of = torch.arange(1, pages + 1), torch.arange(-1, pages)
        calls = {
            "ours": lambda segment=segment: segment.narrow(Window(0, pages - count)),
            "walk": lambda a=(free, owner_of, page_of): walk(*a, pages, count),
        }
        for name in sorted(calls, reverse=bool(turn % 2)):
            took = cpu_us(calls[name])
            if turn:  # the first one warms up
                spent[name].append(took)
        moves = segment.pages_moved
    return spent["ours"], spent["walk"], moves


def report_compaction(turns: int) -> str:
    rows = []
    for pages, count in SIZES:
        ours, theirs, moves = compaction(pages, count, turns if pages <= 2**16 else max(5, turns // 4))
        usual = statistics.median(ours)
        figures = [
            time_name(usual),
            f"{usual * 1e3 / moves:.0f} ns",
            time_name(statistics.median(theirs)),
            f"×{median_ratio(theirs, ours):.0f} (goal ≥ ×25)",
        ]
        rows.append([f"{pages:,}", f"{count:,}", f"{moves:,}", *figures])
    header = ["pages", "given up", "moved", "ours", "a move", "Python walk", "ratio"]
    return table("plan and remap of a compaction, CPU time; a quarter of the pages are holes", header, rows)


def report_growth(turns: int) -> str:
    """Return the time of taking and giving 256 pages, in buffers of different sizes."""
    calls, spent = {}, {}
    for pages in (2**12, 2**16, 2**20, 2**22):
        segment = segment_of(pages)
        chosen = dig(segment, pages, min(4096, pages // 2), 1)[:256]

        def both(segment: Segment = segment, chosen: torch.Tensor = chosen) -> None:
            segment.back(chosen)
            segment.release(chosen)

        calls[pages], spent[pages] = both, []
    for turn in range(turns + 1):
        for pages, call in calls.items():
            found = [cpu_us(call) for _ in range(20)]
            spent[pages] += found if turn else []  # the first one warms up
    rows = [[f"{pages:,}", time_name(statistics.median(found))] for pages, found in spent.items()]
    return table("backing and releasing 256 pages, CPU time", ["pages of the buffer", "both"], rows)
