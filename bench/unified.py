"""Unified memory against static splits of the same bytes, and what compaction costs: `python bench/unified.py`.

`workloads/shift.jsonl` (written by `shift.py`, before anything was tuned to it) goes through caches that differ only in
how they split one budget, page tables included. Requests come as in the file; one that does not fit waits, the oldest
first, and those that wait longest drop out at the end of a phase. Goals: at least 98 % of the requests of the best
static split of each phase, chosen in hindsight, and 1.2 times those of one fixed split; a compaction plans and remaps at
least 25 times faster than a Python walk over the holes, timed in turn, and its time follows what it frees.

What was fixed before the first run, and why:

* The models are real ones, a rank of a usual deployment: a hybrid with states (Qwen3-Next, tp 4) and one whose layers
  slide every other time (gpt-oss-20b, tp 1). Pages of 16, a context of 4,096, no prefix cache (the workload shares
  none), every other option as it comes.
* The budget is far below a device's, since no load that a CPU steps through fills one: half of what the offered load
  (by Little's law: arrivals a step x steps that a request lives x its bytes) of the phase that needs less would hold,
  so that memory is short in both; but enough for the plan's own split to serve a request of the whole context.
* The fixed split is the one that the same plan has without unified memory. Splits in hindsight are tenths.

Changed after the first run: a request counts for the phase that admitted it, though it may end in the next (it counted
for the one in which it ended: chats carried over counted as documents). Totals are the same either way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import kvdock
import torch
from kvdock.errors import KVDockError
from kvdock.kernels.reference import ReferenceKernels
from kvdock.layout import SizeRule, Space
from kvdock.pools.storage import allocate
from kvdock.unified.geometry import Stretch, Window
from kvdock.unified.segment import Segment, table_buffers
from timing import table, time_name

SHIFT = Path(__file__).parent / "workloads" / "shift.jsonl"
STEP_MS, PHASE_MS, CHUNK, PIECE, MAX_WAITING = 20, 5_000, 4_096, 256, 64
PAGE_SIZE, CONTEXT, STEPS = 16, 4_096, PHASE_MS // STEP_MS
CONFIGS = Path(__file__).parent.parent / "tests" / "models"


class Setting(NamedTuple):
    """A model's rank, and its window of earlier tokens if layers slide."""

    name: str
    tp: int
    window: int | None


SETTINGS = (Setting("qwen3-next-80b-a3b", 4, None), Setting("gpt-oss-20b", 1, 127))


class Result(NamedTuple):
    """What a run did, by phase, and its compactions."""

    finished: Counter[str]
    admitted: int
    refused: int
    bytes_moved: int
    bytes_freed: int
    passes: int
    step_us: float


class Running(NamedTuple):
    """A request that has its prompt."""

    phase: str
    total: int


def plan_of(setting: Setting, budget: int, **options: object) -> kvdock.CachePlan:
    given = {"page_size": PAGE_SIZE, "context_length": CONTEXT, "prefix_cache": False, **options}
    parallel, path = {"tp_size": setting.tp}, CONFIGS / f"{setting.name}.json"
    return kvdock.plan(path, device="cpu", options=kvdock.CacheOptions(**given), parallel=parallel, budget_bytes=budget)


def budget_of(setting: Setting, rows: list[dict]) -> int:
    """Return half of what the offered load of the lesser phase holds, or what the plan's own split needs to serve all."""
    plan = plan_of(setting, 2**34)
    loads: Counter[str] = Counter()
    for row in rows:
        total = row["input_length"] + row["output_length"]
        loads[row["phase"]] += plan.bytes_for(total, 1) * row["output_length"]
    half, least = min(loads.values()) // STEPS // 2, 2**20
    while True:
        try:
            if plan_of(setting, least).max_request_tokens >= CONTEXT:
                return max(half, least)
        except KVDockError:
            pass
        least += 2**20


def static_splits(setting: Setting) -> Iterable[tuple[str, dict[str, object]]]:
    """Yield splits of the budget to choose from: so much of it for states, or so many sliding slots per full slot."""
    for tenth in range(1, 11):
        if setting.window is not None:
            yield f"ratio {tenth / 10}", {"swa_full_tokens_ratio": tenth / 10}
        elif tenth < 10:
            yield f"{tenth}0 % states", {"state_sizing": "ratio", "state_memory_ratio": tenth / (10 - tenth)}


class Engine:
    """Continuous batching at the level of slots: admit, decode, slide, release; the youngest gives way."""

    def __init__(self, cache: kvdock.KVCache, window: int | None) -> None:
        self.cache, self.window = cache, window
        self.running: dict[int, Running] = {}
        self.length: dict[int, int] = {}
        self.finished: Counter[str] = Counter()
        self.admitted = self.refused = self.freed = 0
        self.spent: list[float] = []

    def run(self, rows: list[dict]) -> Result:
        waiting: list[tuple[int, dict]] = []
        steps, place = round(rows[-1]["timestamp"]) // STEP_MS + 1, 0
        for step in range(steps):
            if step * STEP_MS % PHASE_MS == 0:
                waiting.clear()
            while place < len(rows) and rows[place]["timestamp"] <= step * STEP_MS:
                waiting.append((place, rows[place]))
                place += 1
            del waiting[MAX_WAITING:]
            started = time.perf_counter()
            self.step(waiting, f"{step * STEP_MS // PHASE_MS}")
            self.spent.append((time.perf_counter() - started) * 1e6)
        memory = self.cache.memory
        moved, passes = (0, 0) if memory is None else (memory.bytes_moved, memory.passes)
        us = statistics.mean(self.spent)
        return Result(self.finished, self.admitted, self.refused, moved, self.freed, passes, us)

    def step(self, waiting: list[tuple[int, dict]], phase: str) -> None:
        self.decode(waiting)
        for name in [name for name, request in self.running.items() if self.length[name] >= request.total]:
            self.finished[self.running[name].phase] += 1
            self.release(name)
        budget = CHUNK
        while waiting and budget > 0 and self.cache.req_to_token_pool.available_size():
            name, row = waiting[0]
            if not self.prefill(name, row["input_length"]):
                self.refused += 1
                break
            waiting.pop(0)
            self.admitted += 1
            self.running[name] = Running(phase, row["input_length"] + row["output_length"])
            budget -= row["input_length"]
        self.cache.prepare_states()
        if self.cache.memory is not None:
            self.cache.memory.compact()

    def nbytes_of(self, name: int) -> int:
        """Return the bytes of all pages that a request had, those included that left the window before."""
        line = None if self.cache.memory is None else self.cache.memory.line
        pages = -(-self.length[name] // PAGE_SIZE)
        return sum(s.page_nbytes * (1 if s.space == "state" else pages) for s in line.stretches) if line else 0

    def prefill(self, name: int, tokens: int) -> bool:
        """Give a request its prompt, piece by piece, each after what left the window went back; or nothing."""
        length = min(tokens, PIECE)
        if self.cache.admit(name, length) is None:
            return False
        self.length[name] = length
        table, allocator = self.cache.req_to_token_pool, self.cache.token_to_kv_pool_allocator
        while length < tokens:
            self.slide([name])
            row, to = table.row_of(name), min(tokens, length + PIECE)
            lens = torch.tensor([length]), [length], torch.tensor([to]), [to]
            slots = allocator.alloc_extend(*lens, table.req_to_token[row, length - 1 : length].long(), to - length)
            if slots is None:
                self.cache.release(name)
                del self.length[name]
                return False
            table.write([row], [length], [to], slots)
            self.length[name] = length = to
        self.slide([name])
        return True

    def decode(self, waiting: list[tuple[int, dict]]) -> None:
        table = self.cache.req_to_token_pool
        while self.running:
            names = list(self.running)
            rows = [table.row_of(name) for name in names]
            seq = [self.length[name] + 1 for name in names]
            last = table.req_to_token[torch.tensor(rows), torch.tensor(seq) - 2].long()
            slots = self.cache.token_to_kv_pool_allocator.alloc_decode(torch.tensor(seq), seq, last)
            if slots is not None:
                table.write(rows, [n - 1 for n in seq], seq, slots)
                self.length.update(zip(names, seq, strict=True))
                self.slide(names)
                return
            self.refused += 1
            youngest = names[-1]
            total = self.running[youngest].total
            prompt = self.length[youngest]
            self.release(youngest)
            waiting.insert(0, (youngest, {"input_length": prompt, "output_length": total - prompt}))

    def slide(self, names: list[int]) -> None:
        if self.window is not None:
            due = [name for name in names if self.length[name] > self.window + PAGE_SIZE]
            self.cache.evict(due, [self.length[name] - self.window for name in due])

    def release(self, name: int) -> None:
        self.cache.release(name)
        self.freed += self.nbytes_of(name)
        del self.running[name], self.length[name]


def serve(setting: Setting, budget: int, rows: list[dict], **options: object) -> Result | None:
    """Return what a cache did; ``None`` where its split cannot be planned."""
    try:
        plan = plan_of(setting, budget, **options)
    except KVDockError:
        return None
    return Engine(kvdock.build(plan), setting.window).run(rows)


def compare(setting: Setting, rows: list[dict]) -> list[str]:
    """Return tables: unified memory beside every split, and the ways to compact."""
    budget = budget_of(setting, rows)
    found = {name: serve(setting, budget, rows, **options) for name, options in static_splits(setting)}
    static = {name: result for name, result in found.items() if result is not None}
    phases = sorted({phase for result in static.values() for phase in result.finished})
    best = {p: max(static, key=lambda name, p=p: static[name].finished[p]) for p in phases}
    hindsight = sum(static[best[p]].finished[p] for p in phases)
    fixed = max(static, key=lambda name: static[name].finished.total())
    plain = serve(setting, budget, rows)
    unified = {
        "lazy": serve(setting, budget, rows, unified_memory=True),
        "eager": serve(setting, budget, rows, unified_memory=True, lazy_compaction=False),
    }
    lines = [
        ["best split of each phase", *(f"{static[best[p]].finished[p]} ({best[p]})" for p in phases), str(hindsight)]
    ]
    sides = {
        "the plan's own split": plain,
        f"best split of all ({fixed})": static[fixed],
        **{f"unified, {k}": v for k, v in unified.items()},
    }
    lines += [[n, *(str(r.finished[p]) for p in phases), str(r.finished.total())] for n, r in sides.items()]
    total = unified["lazy"].finished.total()
    own, best_of_all = plain.finished.total(), static[fixed].finished.total()
    ratio = (
        f"{total / hindsight:.3f} of the best splits (goal ≥ 0.98), ×{total / own:.2f} of the plan's own split (goal ≥ ×1.2; "
        f"the best splits: ×{hindsight / own:.2f}; all that come: ×{len(rows) / own:.2f}), ×{total / best_of_all:.2f} of the best split of all"
    )
    lines += [
        [f"static, {n}", *(str(r.finished[p]) for p in phases), str(r.finished.total())] for n, r in static.items()
    ]
    costs = [
        [
            n,
            str(r.admitted),
            str(r.refused),
            f"{r.bytes_moved / 2**20:.1f} MiB in {r.passes} passes",
            f"{r.bytes_moved / max(1, r.bytes_freed):.3f}",
            f"{r.step_us:.0f} µs",
        ]
        for n, r in sides.items()
    ]
    return [
        table(
            f"finished requests by phase, {setting.name}, tp {setting.tp}, {budget / 2**20:.0f} MiB: {ratio}",
            ["side", *phases, "all"],
            lines,
        ),
        table(f"costs, {setting.name}", ["side", "admitted", "refused", "moved", "a freed byte", "a step"], costs),
    ]


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


def compaction(pages: int, count: int, turns: int) -> tuple[float, float, int]:
    """Return the median µs of closing `count` of the holes of a quarter of the pages, ours and the walk's, and the moves."""
    ours, theirs, moves = [], [], 0
    for turn in range(turns + 1):
        segment = segment_of(pages)
        chosen = dig(segment, pages, pages // 4, turn)
        segment._copy = lambda source, target: None  # plan and remap alone; bytes are the device's affair
        owner_of, page_of, free = torch.arange(1, pages + 1), torch.arange(-1, pages), chosen - 1
        started = time.perf_counter()
        segment.narrow(Window(0, pages - count))
        middle = time.perf_counter()
        moves = walk(free, owner_of, page_of, pages, count)
        if turn:
            ours.append((middle - started) * 1e6)
            theirs.append((time.perf_counter() - middle) * 1e6)
    return statistics.median(ours), statistics.median(theirs), moves


def report_compaction(turns: int) -> str:
    rows = []
    for pages, count in ((2**16, 2**12), (2**20, 2**12), (2**16, 2**14), (2**20, 2**18)):
        ours, theirs, moves = compaction(pages, count, turns)
        figures = [
            time_name(ours),
            f"{ours * 1e3 / moves:.0f} ns",
            time_name(theirs),
            f"×{theirs / ours:.0f} (goal ≥ ×25)",
        ]
        rows.append([f"{pages:,}", f"{count:,}", f"{moves:,}", *figures])
    header = ["pages", "given up", "moved", "ours", "a move", "Python walk", "ratio"]
    return table("plan and remap of a compaction, a quarter of the pages are holes", header, rows)


def report_growth(turns: int) -> str:
    """Return the time of taking and giving 256 pages, in buffers of different sizes."""
    rows = []
    for pages in (2**12, 2**16, 2**20, 2**22):
        segment = segment_of(pages)
        chosen, spent = dig(segment, pages, 4096 if pages > 4096 else 2048, 1)[:256], []
        for _ in range(turns * 20):
            started = time.perf_counter()
            segment.back(chosen)
            segment.release(chosen)
            spent.append((time.perf_counter() - started) * 1e6)
        rows.append([f"{pages:,}", time_name(statistics.median(spent))])
    return table("backing and releasing 256 pages", ["pages of the buffer", "both"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", choices=(*(setting.name for setting in SETTINGS), "compaction"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in SHIFT.read_text(encoding="utf-8").splitlines()]
    parts: list[str] = []
    for setting in SETTINGS:
        if chosen.only in (None, setting.name):
            parts += compare(setting, rows)
    if chosen.only in (None, "compaction"):
        parts += [report_compaction(chosen.turns), report_growth(chosen.turns)]
    text = "\n".join(parts)
    print(text)
    if chosen.write is not None:
        chosen.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
