"""Serves requests from a cache at the level of slots, step by step, and counts what it did and the CPU time of it."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import kvdock
import torch
from kvdock.allocators.swa import SWAAllocator
from kvdock.layout import FULL, STATE, SWA

PAGE_SIZE, STEP_MS, PHASE_MS, CHUNK, PIECE, MAX_WAITING = 16, 20, 5_000, 4_096, 256, 64


class Running(NamedTuple):
    """A request that has its prompt, the phase that admitted it, and the tokens with which it ends."""

    phase: str
    total: int


class Engine:
    """Continuous batching: admit, decode, slide, release; the youngest gives way.

    A request that is longer than its plan serves is turned away when it comes, and one that an empty cache cannot hold
    when it is tried. Those that still wait when a phase ends drop out.
    """

    def __init__(self, cache: kvdock.KVCache, window: int | None) -> None:
        self.cache, self.plan, self.window = cache, cache.plan, window
        self.running: dict[int, Running] = {}
        self.length: dict[int, int] = {}
        self.waiting: list[tuple[int, dict]] = []
        self.place = 0
        self.finished: Counter[str] = Counter()
        self.tokens = self.admitted = self.failed = self.gave_way = self.turned_away = 0
        self.freed = self.moved = self.passes = 0
        self.unused: dict[str, list[int]] = defaultdict(list)
        """By phase, bytes of pages that nobody held, at each step whose last admission failed."""
        self.spent: Counter[str] = Counter()
        """CPU µs of all steps, by phase."""

    def advance(self, rows: list[dict], step: int) -> None:
        """Take in what came by now, and do one step of it; the step alone is timed."""
        if step * STEP_MS % PHASE_MS == 0:
            self.waiting.clear()
        while self.place < len(rows) and rows[self.place]["timestamp"] <= step * STEP_MS:
            row = rows[self.place]
            if row["input_length"] + row["output_length"] > self.plan.max_request_tokens:
                self.turned_away += 1
            else:
                self.waiting.append((self.place, row))
            self.place += 1
        del self.waiting[MAX_WAITING:]
        phase, failed, started = f"{step * STEP_MS // PHASE_MS}", self.failed, time.process_time()
        self.step(phase)
        self.spent[phase] += (time.process_time() - started) * 1e6
        if self.failed > failed:
            self.unused[phase].append(unused_bytes(self.cache))

    def end(self) -> None:
        """Keep what compaction did, and let the cache go."""
        if self.cache.memory is not None:
            self.moved, self.passes = self.cache.memory.bytes_moved, self.cache.memory.passes
        del self.cache

    def step(self, phase: str) -> None:
        self.decode()
        for name in [name for name, request in self.running.items() if self.length[name] >= request.total]:
            self.finished[self.running[name].phase] += 1
            self.tokens += self.running[name].total
            self.release(name)
        budget = CHUNK
        while self.waiting and budget > 0:
            name, row = self.waiting[0]
            if not self.cache.req_to_token_pool.available_size() or not self.prefill(name, row["input_length"]):
                self.failed += 1
                if self.running:
                    break
                self.turned_away += 1
                self.waiting.pop(0)
                continue
            self.waiting.pop(0)
            self.admitted += 1
            self.running[name] = Running(phase, row["input_length"] + row["output_length"])
            budget -= row["input_length"]
        self.cache.prepare_states()
        if self.cache.memory is not None:
            self.cache.memory.compact()

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

    def decode(self) -> None:
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
            self.give_way(names[-1])

    def give_way(self, name: int) -> None:
        """Let a request wait again, with what it has as its prompt; for good if it runs alone."""
        prompt, total, is_alone = self.length[name], self.running[name].total, len(self.running) == 1
        self.release(name)
        if is_alone:
            self.turned_away += 1
            return
        self.gave_way += 1
        self.waiting.insert(0, (name, {"input_length": prompt, "output_length": total - prompt}))

    def slide(self, names: list[int]) -> None:
        if self.window is not None:
            due = [name for name in names if self.length[name] > self.window + PAGE_SIZE]
            self.cache.evict(due, [self.length[name] - self.window for name in due])

    def release(self, name: int) -> None:
        self.cache.release(name)
        self.freed += self.nbytes_of(name)
        del self.running[name], self.length[name]

    def nbytes_of(self, name: int) -> int:
        """Return the bytes of all pages that a request had, those included that left the window before."""
        pages = -(-self.length[name] // PAGE_SIZE)
        sizes = self.plan.costs.shared_pages
        return sum(nbytes * (1 if space == STATE else pages) for space, nbytes in sizes.items())


def unused_bytes(cache: kvdock.KVCache) -> int:
    """Return the bytes of all pages and states that nobody holds, whichever space they are of."""
    if cache.memory is not None:
        memory = cache.memory
        segments = [memory.segment(stretch.space) for stretch in memory.line.stretches]
        return memory.gap_bytes() + sum(found.holes * found.stretch.page_nbytes for found in segments)
    allocator, requests = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    if isinstance(allocator, SWAAllocator):
        free = {FULL: allocator.full_available_size(), SWA: allocator.swa_available_size()}
    else:
        free = {FULL: allocator.available_size(), STATE: requests.available_states()}
    return round(sum(slots * cache.plan.costs.per_slot[space].kv for space, slots in free.items()))


def serve_in_turn(engines: Mapping[str, Engine], rows: list[dict]) -> None:
    """Serve the same requests from every engine, one step of each in turn; who begins changes with each step."""
    names = list(engines)
    gc.collect()
    gc.disable()
    try:
        for step in range(round(rows[-1]["timestamp"]) // STEP_MS + 1):
            for name in (*names[step % len(names) :], *names[: step % len(names)]):
                engines[name].advance(rows, step)
        for engine in engines.values():
            engine.end()
    finally:
        gc.enable()


def median_ratio(above: list[float], below: list[float]) -> float:
    """Return the median of the ratios of what was timed in turn."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
