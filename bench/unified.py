"""Unified memory against static splits of the same bytes, and what compaction costs: `python bench/unified.py`.

`workloads/shift.jsonl` (written by `shift.py`, before anything was tuned to it) goes through caches that differ only in
how they split one budget, page tables included. Requests come as in the file; one that does not fit waits, the oldest
first, and those that wait longest drop out at the end of a phase. Goals: at least 98 % of the requests of the best
static split of each phase, chosen in hindsight, and 1.2 times those of the best split of all phases; a compaction plans
and remaps at least 25 times faster than a Python walk over the holes, timed in turn, and its time follows what it frees.
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
from kvdock.kernels.reference import ReferenceKernels
from kvdock.layout import SizeRule, Space
from kvdock.model import ConvBlock, ConvParams, LayerSpec, MHAParams, ModelSpec, StateParams
from kvdock.pools.storage import allocate
from kvdock.unified.geometry import Stretch, Window
from kvdock.unified.segment import Segment, table_buffers
from timing import table, time_name

SHIFT = Path(__file__).parent / "workloads" / "shift.jsonl"
STEP_MS, PHASE_MS, CHUNK, PIECE, MAX_WAITING = 20, 5_000, 4_096, 256, 64
BUDGET = 12 * 2**20
PAGE_SIZE, CONTEXT = 16, 4_096


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


def linear_model() -> ModelSpec:
    """Return a model with 1 KiB of KV a token and states of 136 KiB."""
    heads = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=64, v_head_dim=64))
    conv = ConvParams(blocks=(ConvBlock(heads=16, head_dim=64),), kernel=5)
    state = StateParams(conv=(conv,), temporal=(16, 64, 32), temporal_dtype="bfloat16")
    layers = (heads, LayerSpec(kind="state", params=state), LayerSpec(kind="state", params=state), heads)
    return ModelSpec(name="linear", architecture="M", layers=layers, context_length=CONTEXT, dtype="bfloat16")


def sliding_model() -> ModelSpec:
    """Return a model with 1 KiB a token in full layers and 3 KiB in sliding ones, with a window of 128."""
    heads = MHAParams(num_kv_heads=4, head_dim=64, v_head_dim=64)
    full, window = LayerSpec(kind="mha", params=heads), LayerSpec(kind="mha", params=heads, window_tokens=127)
    layers = (full, window, window, window)
    return ModelSpec(name="sliding", architecture="M", layers=layers, context_length=CONTEXT, dtype="bfloat16")


def build(model: ModelSpec, **options: object) -> kvdock.KVCache:
    given = {"page_size": PAGE_SIZE, "prefix_cache": False, "request_table_share": 0.14, **options}
    plan = kvdock.plan(model, device="cpu", options=kvdock.CacheOptions(**given), budget_bytes=BUDGET)
    return kvdock.build(plan)


def static_splits(model: ModelSpec) -> Iterable[tuple[str, dict[str, object]]]:
    """Yield splits of the budget to choose from: so much of it for states, or so many sliding slots per full slot."""
    if model.name == "linear":
        for share in range(10, 100, 10):
            yield f"{share} % states", {"state_sizing": "ratio", "state_memory_ratio": share / (100 - share)}
    else:
        for ratio in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            yield f"ratio {ratio}", {"swa_full_tokens_ratio": ratio}


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
            self.release(name)
            self.finished[phase] += 1
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


def compare(model: ModelSpec, rows: list[dict]) -> list[str]:
    """Return tables: unified memory beside every split, and the ways to compact."""
    window = 127 if model.name == "sliding" else None
    static = {name: Engine(build(model, **options), window).run(rows) for name, options in static_splits(model)}
    phases = sorted({phase for result in static.values() for phase in result.finished})
    best = {p: max(static, key=lambda name, p=p: static[name].finished[p]) for p in phases}
    hindsight = sum(static[best[p]].finished[p] for p in phases)
    fixed = max(static, key=lambda name: static[name].finished.total())
    plain = Engine(build(model), window).run(rows)
    unified = {
        "lazy": Engine(build(model, unified_memory=True), window).run(rows),
        "eager": Engine(build(model, unified_memory=True, lazy_compaction=False), window).run(rows),
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
    ratio = f"{total / hindsight:.3f} of the best splits (goal ≥ 0.98), ×{total / static[fixed].finished.total():.2f} of the best one of all, ×{total / plain.finished.total():.2f} of the plan's own (goal ≥ ×1.2)"
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
        table(f"finished requests by phase, {model.name}: {ratio}", ["side", *phases, "all"], lines),
        table(f"costs, {model.name}", ["side", "admitted", "refused", "moved", "a freed byte", "a step"], costs),
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
    parser.add_argument("--only", choices=("linear", "sliding", "compaction"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in SHIFT.read_text(encoding="utf-8").splitlines()]
    parts: list[str] = []
    for model in (linear_model(), sliding_model()):
        if chosen.only in (None, model.name):
            parts += compare(model, rows)
    if chosen.only in (None, "compaction"):
        parts += [report_compaction(chosen.turns), report_growth(chosen.turns)]
    text = "\n".join(parts)
    print(text)
    if chosen.write is not None:
        chosen.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
