"""A small scheduler that drives requests through a built cache and checks every value.

It does what an engine does with a cache: admits requests while rows and pages are there, extends prompts
in chunks, decodes the batch, gives back what has left a window, swaps the youngest request out to the host when a
decode finds no room, and releases what is finished. Now and then a request begins with the prefix of an earlier
one, and a decode first speculates and takes its tokens back. Time is simulated: a step takes `step_ms`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from kvdock.errors import PlanError, SlotError
from kvdock.testing.slots import Piece, Request, Slots
from kvdock.testing.trace import Arrival
from kvdock.testing.values import RunError, Values

if TYPE_CHECKING:
    import torch

    from kvdock.builder import KVCache

DEFAULT_CHUNK = 512
MAX_WAITING = 1024
"""Arrivals are read no further ahead than this, so a long trace is never held in memory."""
SHARING, SPECULATING = 0.5, 0.1
"""How often a request that ends leaves a prefix and one that begins takes one; how often a decode speculates."""
MAX_DRAFTS = 4
"""Tokens that a request speculates at most."""
SAMPLE_TOKENS = 8
"""Tokens of one request that are compared at each extend and decode step, in every layer."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is."""

    arrived: int
    finished: int
    tokens_written: int
    steps: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did.

    `checks` counts compared values, a token in a layer each. `rejected` requests were longer than
    `longest_tokens`, what the plan can hold. `unfinished` ones were taken back at `max_steps`.
    `failed_admissions` counts the times that a request found no room, `preemptions` the times that one
    was swapped out, `shared_tokens` the tokens that requests took from prefixes of others, `rollbacks` the
    times that a decode speculated in vain. `problems` says what `check` found afterwards; empty: everything is in order.
    """

    arrived: int
    finished: int
    rejected: int
    unfinished: int
    longest_tokens: int
    steps: int
    tokens_written: int
    seconds: float
    peak_slots: dict[str, int]
    failed_admissions: int
    preemptions: int
    checks: int
    planned_bytes: int
    allocated_bytes: int
    problems: tuple[str, ...]
    shared_tokens: int = 0
    rollbacks: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens written in a second of wall time, their checks included."""
        return self.tokens_written / self.seconds if self.seconds else 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing leaked and the planned bytes are the allocated ones."""
        return not self.problems


def drive(
    cache: KVCache,
    arrivals: Iterable[Arrival],
    *,
    seed: int,
    max_steps: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    chunk: int | None = None,
    step_ms: float = 20.0,
    sharing: float = SHARING,
    speculating: float = SPECULATING,
) -> Report:
    """Drive `arrivals` through an empty cache and return what happened; the cache is empty again.

    `chunk` is the tokens of prompts in one step (default: chunked_prefill_size, else 512). `sharing` is the chance that
    a request leaves a prefix, and that one begins with one; `speculating` that a decode first speculates.

    Raises:
        WrongValue: a value that was read back is not the one that was written.
        RunError: the cache cannot serve what its plan promises, or a failed call left something behind.
    """
    size = chunk or cache.plan.options.values.chunked_prefill_size or DEFAULT_CHUNK
    run = _Run(cache, arrivals, seed, size, step_ms)
    run.sharing, run.speculating = sharing, speculating
    began = time.perf_counter()
    while run.has_work and (max_steps is None or run.steps < max_steps):
        run.step()
        if on_progress is not None:
            on_progress(run.progress())
    run.release_all()
    return run.report(time.perf_counter() - began)


class _Run:
    """The state of one run."""

    def __init__(self, cache: KVCache, arrivals: Iterable[Arrival], seed: int, chunk: int, step_ms: float) -> None:
        if chunk < 1:
            raise PlanError(f"chunk={chunk} prefills nothing; give at least 1")
        if not cache.plan.outline.allocators:
            raise PlanError("no layer of this rank keeps KV token by token, so there is nothing to drive")
        self.cache = cache
        self.rows = cache.req_to_token_pool
        self.rng = random.Random(seed)
        self.slots = Slots(cache, self.rng)
        self.values = Values(cache, seed)
        self.sharing = self.speculating = 0.0
        self.longest = cache.plan.max_request_tokens
        self.chunk, self.step_ms = chunk, step_ms
        self.arrivals: Iterator[Arrival] = iter(arrivals)
        self.next: Arrival | None = next(self.arrivals, None)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.is_paused = False
        self.clock_ms = 0.0
        self.steps = self.arrived = self.finished = self.rejected = self.unfinished = 0
        self.tokens_written = self.failed_admissions = self.preemptions = 0
        self.shared_tokens = self.rollbacks = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is running, waiting or still to come."""
        return bool(self.running or self.waiting or self.next is not None)

    def step(self) -> None:
        """Let one step of the engine pass."""
        self._arrive()
        grown = self._decode() + self._prefill()
        self._finish()
        if not grown and (self.running or self.waiting):
            self._unblock()
        self.steps += 1
        self.clock_ms += self.step_ms

    def _arrive(self) -> None:
        if not self.running and not self.waiting and self.next is not None:
            self.clock_ms = max(self.clock_ms, self.next.timestamp_ms)
        while self.next is not None and self.next.timestamp_ms <= self.clock_ms and len(self.waiting) < MAX_WAITING:
            if self.next.tokens > self.longest:
                self.rejected += 1
            else:
                self.waiting.append(Request(self.arrived, self.next, self.values.salt(self.arrived, 0)))
            self.arrived += 1
            self.next = next(self.arrivals, None)

    def _decode(self) -> int:
        """Grow every request that is past its prompt by one token; return how many."""
        while batch := [r for r in self.running if r.goal <= r.length < r.total]:
            self.slots.evict(batch, self.slots.eviction_interval)
            if self.rng.random() < self.speculating:
                self._speculate(batch)
            if self._grow([(request, 1) for request in batch], self.slots.decode):
                self._sample(batch[self.steps % len(batch)], 1)
                return len(batch)
            if self.slots.evict(self.running, 1) or self.slots.drop_prefixes():
                continue
            if len(self.running) == 1 and batch[0].prefix is None:
                raise RunError(f"{batch[0].describe()} finds no slot in a cache that it has for itself")
            self._preempt()
        return 0

    def _prefill(self) -> int:
        """Extend prompts, oldest first, by at most a chunk; return the tokens."""
        pieces = self._choose_pieces()
        self.slots.evict([request for request, _ in pieces], 1)
        while pieces:
            if self._grow(pieces, self.slots.extend):
                self._sample(*pieces[self.steps % len(pieces)])
                self._keep_prompts([request for request, _ in pieces])
                return sum(tokens for _, tokens in pieces)
            request, _ = pieces.pop()
            if request.length == request.start:
                self._give_up(request)
        return 0

    def _keep_prompts(self, requests: list[Request]) -> None:
        """Let some of the prompts that are complete begin those of later requests."""
        for request in requests:
            if request.length == request.prompt and self.rng.random() < self.sharing:
                self.slots.keep(request)

    def _choose_pieces(self) -> list[Piece]:
        budget, pieces = self.chunk, []
        for request in self.running:
            tokens = min(budget, request.goal - request.length)
            if tokens > 0:
                pieces.append((request, tokens))
                budget -= tokens
        while budget > 0 and self.waiting and not self.is_paused:
            request = self.waiting[0]
            rows = self.rows.alloc([request.name])
            if rows is None:
                self.failed_admissions += 1
                break
            self._admit(self.waiting.popleft(), rows[0])
            pieces.append((request, min(budget, request.goal - request.length)))
            budget -= pieces[-1][1]
        return pieces

    def _admit(self, request: Request, row: int) -> None:
        """Let a request run: from where it was saved, from a prefix of another, or from its first token."""
        request.row = row
        self.running.append(request)
        if request.saved is not None:
            request.start = request.length = request.evicted = request.saved.first
            request.lost = request.saved.lost
        elif self.rng.random() < self.sharing:
            self.shared_tokens += self.slots.share(request)

    def _grow(self, pieces: list[Piece], alloc: Callable[[list[Piece]], torch.Tensor | None]) -> bool:
        """Give requests slots and write their new tokens; ``False`` (and nothing changes) if there is no room."""
        before = self.slots.available()
        slots = alloc(pieces)
        if slots is None:
            self._refuse_change(before)
            return False
        self._write_rows(pieces, slots)
        for request, part in _parts(pieces, slots):
            self.slots.take(request, part)
            if request.saved is not None:
                self._load(request, part)
            else:
                self._write(request, part)
            request.length += part.numel()
        self.tokens_written += slots.numel()
        self.slots.note_peak()
        self._end_loading()
        return True

    def _write_rows(self, pieces: list[Piece], slots: torch.Tensor) -> None:
        rows, starts = [r.row for r, _ in pieces], [r.length for r, _ in pieces]
        self.rows.write(rows, starts, [r.length + tokens for r, tokens in pieces], slots)

    def _write(self, request: Request, slots: torch.Tensor, salt: int | None = None) -> None:
        """Write the values of a request's next tokens; `salt` stands for values that are not its own."""
        import torch

        positions = torch.arange(request.length, request.length + slots.numel(), device=slots.device)
        salts = request.salts(positions) if salt is None else torch.full_like(positions, salt)
        self.values.write(salts, positions, slots.to(torch.int64))

    def _load(self, request: Request, slots: torch.Tensor) -> None:
        """Bring a request's next tokens back from the host."""
        saved = request.saved
        if saved is None:
            return
        self.slots.load(saved, request.length, slots)
        if request.length == saved.first > 0:
            self.cache.hold_prefix(request.name, evicted=saved.first)

    def _end_loading(self) -> None:
        """Compare all of the requests that are back from the host."""
        for request in self.running:
            if request.saved is not None and request.length == request.saved.length:
                request.saved = None
                self._check(request, range(request.length))

    def _speculate(self, batch: list[Request]) -> None:
        """Let requests write some tokens ahead, and take all of them back as if none had been accepted."""
        ahead = self.rng.randint(1, MAX_DRAFTS)
        pieces = [(request, min(ahead, request.total - request.length)) for request in batch]
        before, allocator = self.slots.available(), self.slots.allocator
        state = allocator.backup_state()
        slots = self.slots.extend(pieces)
        if slots is not None:
            self._write_rows(pieces, slots)
            self.rollbacks += 1
            for request, part in _parts(pieces, slots):
                self.slots.verify(request, part)
                self._write(request, part, self.values.salt(request.name, self.rollbacks))
            allocator.restore_state(state)
            self.cache.truncate([request.name for request in batch], [request.length for request in batch])
        self._refuse_change(before, "that was taken back" if slots is not None else "that was refused")

    def _refuse_change(self, before: dict[str, int], which: str = "that was refused") -> None:
        after = self.slots.available()
        if before != after:
            raise RunError(f"an allocation {which} changed the free slots from {before} to {after}")

    def _sample(self, request: Request, new: int) -> None:
        """Compare what the first of `new` tokens sees: the oldest token of its window, the newest, some others."""
        first_new = request.length - new
        oldest = 0 if self.slots.window is None else max(0, first_new - self.slots.window)
        drawn = {self.rng.randrange(request.length) for _ in range(SAMPLE_TOKENS - 2)}
        self._check(request, sorted(drawn | {oldest, request.length - 1}), new)

    def _check(self, request: Request, positions: Iterable[int], new: int = 1) -> None:
        """Compare tokens of a request as the first of its `new` tokens sees them."""
        import torch

        table = self.rows.req_to_token
        where = torch.tensor(list(positions), dtype=torch.int64, device=table.device)
        kept = where[where >= self.slots.first_kept(request)]
        slots = table[request.row, kept].to(torch.int64)
        seen = (request.readable, request.length - new)
        self.values.check(request.name, request.salts(kept), seen, kept, slots)

    def _finish(self) -> None:
        for request in [r for r in self.running if r.length == r.total]:
            self._check(request, range(request.length))
            if self.rng.random() < self.sharing:
                self.slots.release_and_keep(request)
            else:
                self.slots.release(request)
            self.running.remove(request)
            self.finished += 1
            self.is_paused = False

    def _release(self, request: Request) -> None:
        """Take a request out of the cache; what was saved of it stays."""
        self.slots.release(request)
        self.running.remove(request)
        request.restart()

    def _give_up(self, request: Request) -> None:
        """Take back the row of a request that found no pages; it waits on."""
        self._release(request)
        self.waiting.appendleft(request)
        self.failed_admissions += 1

    def _preempt(self) -> None:
        """Swap the youngest request out, after checking it; it comes back when another has finished."""
        request = self.running[-1]
        if request.saved is None:
            self._check(request, range(request.length))
            request.saved = self.slots.save(request)
        self._release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
        self.is_paused = bool(self.running)

    def _unblock(self) -> None:
        """Make room where nothing could grow: take a request back, or prefill in smaller chunks."""
        if self.slots.drop_prefixes():
            return
        if len(self.running) > 1 or (self.running and self.running[0].prefix is not None):
            self._preempt()
            return
        self.is_paused = False
        request = self.running[0] if self.running else self.waiting[0]
        if self.chunk == 1:
            raise RunError(f"{request.describe()} finds no room in a cache that it has for itself")
        self.chunk //= 2

    def release_all(self) -> None:
        """Take back what is still running, and count what was not served."""
        self.unfinished = len(self.running) + len(self.waiting)
        for request in tuple(self.running):
            if request.saved is None:
                self._check(request, range(request.length))
            self._release(request)
        self.slots.drop_prefixes()

    def progress(self) -> Progress:
        """Return how far the run is."""
        return Progress(
            arrived=self.arrived, finished=self.finished, tokens_written=self.tokens_written, steps=self.steps
        )

    def report(self, seconds: float) -> Report:
        """Return what happened, after a last look at the cache."""
        planned, allocated = self.cache.plan.total_bytes, self.cache.allocated_bytes()
        return Report(
            arrived=self.arrived,
            finished=self.finished,
            rejected=self.rejected,
            unfinished=self.unfinished,
            longest_tokens=self.longest,
            steps=self.steps,
            tokens_written=self.tokens_written,
            seconds=seconds,
            peak_slots=self.slots.peak,
            failed_admissions=self.failed_admissions,
            preemptions=self.preemptions,
            checks=self.values.checks,
            planned_bytes=planned,
            allocated_bytes=allocated,
            problems=tuple(self._problems(planned, allocated)),
            shared_tokens=self.shared_tokens,
            rollbacks=self.rollbacks,
        )

    def _problems(self, planned: int, allocated: int) -> Iterator[str]:
        try:
            self.cache.check()
        except SlotError as error:
            yield str(error)
        if self.slots.available() != self.slots.at_first:
            yield f"slots leaked: {self.slots.at_first} were free before and {self.slots.available()} are free now"
        if planned != allocated:
            yield f"{planned} bytes were planned and {allocated} allocated"


def _parts(pieces: list[Piece], slots: torch.Tensor) -> Iterator[tuple[Request, torch.Tensor]]:
    """Yield each request and the slots that it got."""
    start = 0
    for request, tokens in pieces:
        yield request, slots[start : start + tokens]
        start += tokens
