"""A small scheduler that drives requests through a built cache and checks every value.

It does what an engine does with a cache: admits requests while rows and pages are there, extends prompts
in chunks, decodes the batch, gives back what has left a window, takes the youngest request back when a
decode finds no room, and releases what is finished. Time is simulated: a step takes `step_ms`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from kvdock.errors import PlanError, SlotError
from kvdock.testing.trace import Arrival
from kvdock.testing.values import RunError, Values

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Allocator
    from kvdock.builder import KVCache

DEFAULT_CHUNK = 512
MAX_WAITING = 1024
"""Arrivals are read no further ahead than this, so a long trace is never held in memory."""
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
    was taken back. `problems` says what `check` found afterwards; empty: everything is in order.
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
) -> Report:
    """Drive `arrivals` through an empty cache and return what happened; the cache is empty again.

    `chunk` is the tokens of prompts in one step (default: chunked_prefill_size, else 512).

    Raises:
        WrongValue: a value that was read back is not the one that was written.
        RunError: the cache cannot serve what its plan promises, or a failed call left something behind.
    """
    size = chunk or cache.plan.options.values.chunked_prefill_size or DEFAULT_CHUNK
    run = _Run(cache, arrivals, seed, size, step_ms)
    began = time.perf_counter()
    while run.has_work and (max_steps is None or run.steps < max_steps):
        run.step()
        if on_progress is not None:
            on_progress(run.progress())
    run.release_all()
    return run.report(time.perf_counter() - began)


class _Request:
    """A request on its way: `length` tokens are in the cache, those before `evicted` have left the window."""

    def __init__(self, name: int, arrival: Arrival) -> None:
        self.name = name
        self.prompt = arrival.input_length
        self.total = arrival.tokens
        self.attempt = 0
        self.salt = 0
        self.row = 0
        self.length = 0
        self.evicted = 0


Piece = tuple[_Request, int]
"""A request and the tokens that it grows by."""


class _Run:
    """The state of one run."""

    def __init__(self, cache: KVCache, arrivals: Iterable[Arrival], seed: int, chunk: int, step_ms: float) -> None:
        if chunk < 1:
            raise PlanError(f"chunk={chunk} prefills nothing; give at least 1")
        if not cache.plan.outline.allocators:
            raise PlanError("no layer of this rank keeps KV token by token, so there is nothing to drive")
        self.cache = cache
        self.rows = cache.req_to_token_pool
        self.slots = _Slots(cache)
        self.values = Values(cache, seed)
        self.rng = random.Random(seed)
        self.longest = cache.plan.max_request_tokens
        self.chunk, self.step_ms = chunk, step_ms
        self.arrivals: Iterator[Arrival] = iter(arrivals)
        self.next: Arrival | None = next(self.arrivals, None)
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.is_paused = False
        self.clock_ms = 0.0
        self.steps = self.arrived = self.finished = self.rejected = self.unfinished = 0
        self.tokens_written = self.failed_admissions = self.preemptions = 0

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
                self.waiting.append(_Request(self.arrived, self.next))
            self.arrived += 1
            self.next = next(self.arrivals, None)

    def _decode(self) -> int:
        """Grow every request that is past its prompt by one token; return how many."""
        while batch := [r for r in self.running if r.prompt <= r.length < r.total]:
            self.slots.evict(batch, self.slots.eviction_interval)
            if self._grow([(request, 1) for request in batch], self.slots.decode):
                self._sample(batch[self.steps % len(batch)], 1)
                return len(batch)
            if self.slots.evict(self.running, 1):
                continue
            if len(self.running) == 1:
                raise RunError(f"{_describe(batch[0])} finds no slot in a cache that it has for itself")
            self._preempt()
        return 0

    def _prefill(self) -> int:
        """Extend prompts, oldest first, by at most a chunk; return the tokens."""
        pieces = self._choose_pieces()
        self.slots.evict([request for request, _ in pieces], 1)
        while pieces:
            if self._grow(pieces, self.slots.extend):
                self._sample(*pieces[self.steps % len(pieces)])
                return sum(tokens for _, tokens in pieces)
            request, _ = pieces.pop()
            if request.length == 0:
                self._give_up(request)
        return 0

    def _choose_pieces(self) -> list[Piece]:
        budget, pieces = self.chunk, []
        for request in self.running:
            tokens = min(budget, request.prompt - request.length)
            if tokens > 0:
                pieces.append((request, tokens))
                budget -= tokens
        while budget > 0 and self.waiting and not self.is_paused:
            request = self.waiting[0]
            rows = self.rows.alloc([request.name])
            if rows is None:
                self.failed_admissions += 1
                break
            self.waiting.popleft()
            request.row, request.salt = rows[0], self.values.salt(request.name, request.attempt)
            self.running.append(request)
            pieces.append((request, min(budget, request.prompt)))
            budget -= pieces[-1][1]
        return pieces

    def _grow(self, pieces: list[Piece], alloc: Callable[[list[Piece]], torch.Tensor | None]) -> bool:
        """Give requests slots and write their new tokens; ``False`` (and nothing changes) if there is no room."""
        import torch

        before = self.slots.available()
        slots = alloc(pieces)
        if slots is None:
            self._refuse_change(before)
            return False
        starts = [request.length for request, _ in pieces]
        ends = [request.length + tokens for request, tokens in pieces]
        self.rows.write([request.row for request, _ in pieces], starts, ends, slots)
        spans = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        salts = [torch.full_like(span, request.salt) for span, (request, _) in zip(spans, pieces, strict=True)]
        device = slots.device
        self.values.write(torch.cat(salts).to(device), torch.cat(spans).to(device), slots.to(torch.int64))
        for (request, _), end in zip(pieces, ends, strict=True):
            request.length = end
        self.tokens_written += slots.numel()
        self.slots.note_peak()
        return True

    def _refuse_change(self, before: dict[str, int]) -> None:
        after = self.slots.available()
        if before != after:
            raise RunError(f"an allocation that was refused changed the free slots from {before} to {after}")

    def _sample(self, request: _Request, new: int) -> None:
        """Compare what the first of `new` tokens sees: the oldest token of its window, the newest, some others."""
        first_new = request.length - new
        oldest = 0 if self.slots.window is None else max(0, first_new - self.slots.window)
        drawn = {self.rng.randrange(request.length) for _ in range(SAMPLE_TOKENS - 2)}
        self._check(request, sorted(drawn | {oldest, request.length - 1}), new)

    def _check(self, request: _Request, positions: Iterable[int], new: int = 1) -> None:
        """Compare tokens of a request as the first of its `new` tokens sees them."""
        import torch

        table = self.rows.req_to_token
        where = torch.tensor(list(positions), dtype=torch.int64, device=table.device)
        kept = where[where >= self.slots.first_kept(request)]
        slots = table[request.row, kept].to(torch.int64)
        self.values.check(request.name, request.salt, (request.evicted, request.length - new), kept, slots)

    def _finish(self) -> None:
        for request in [r for r in self.running if r.length == r.total]:
            self._check(request, range(request.length))
            self._release(request)
            self.finished += 1
            self.is_paused = False

    def _release(self, request: _Request) -> None:
        self.slots.release(request)
        self.running.remove(request)

    def _give_up(self, request: _Request) -> None:
        """Take back the row of a request that found no pages; it waits on."""
        self._release(request)
        self.waiting.appendleft(request)
        self.failed_admissions += 1

    def _preempt(self) -> None:
        """Take the youngest request back, after checking it; it starts again when another has finished."""
        request = self.running[-1]
        self._check(request, range(request.length))
        self._release(request)
        request.length = request.evicted = 0
        request.attempt += 1
        self.waiting.appendleft(request)
        self.preemptions += 1
        self.is_paused = bool(self.running)

    def _unblock(self) -> None:
        """Make room where nothing could grow: take a request back, or prefill in smaller chunks."""
        if len(self.running) > 1:
            self._preempt()
            return
        self.is_paused = False
        request = self.running[0] if self.running else self.waiting[0]
        if self.chunk == 1:
            raise RunError(f"{_describe(request)} finds no room in a cache that it has for itself")
        self.chunk //= 2

    def release_all(self) -> None:
        """Take back what is still running, and count what was not served."""
        self.unfinished = len(self.running) + len(self.waiting)
        for request in tuple(self.running):
            self._check(request, range(request.length))
            self._release(request)

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


def _describe(request: _Request) -> str:
    return f"request {request.name} of {request.total} tokens, {request.length} of them cached,"


class _Slots:
    """The allocator of a cache as a scheduler uses it, and what is free in each space."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.rows = cache.req_to_token_pool
        self.allocator = cache.token_to_kv_pool_allocator
        spaces = cache.plan.outline.spaces
        self.parts = _parts_of(cache)
        sliding = [s.window_tokens for n, s in spaces.items() if n in self.parts and s.window_tokens is not None]
        self.window = sliding[0] if sliding else None
        self.is_pure = len(self.parts) == 1
        self.eviction_interval = cache.plan.options.values.swa_eviction_interval or 1
        self.at_first = self.available()
        self.peak = dict.fromkeys(self.at_first, 0)

    def available(self) -> dict[str, int]:
        """Return the free slots of each space that is handed out."""
        free = {name: part.available_size() for name, part in self.parts.items()}
        return free | {"requests": self.rows.available_size()}

    def note_peak(self) -> None:
        """Remember the most slots that were taken at once."""
        for name, free in self.available().items():
            self.peak[name] = max(self.peak[name], self.at_first[name] - free)

    def extend(self, pieces: list[Piece]) -> torch.Tensor | None:
        """Return slots for the new tokens of prompts."""
        prefix = [request.length for request, _ in pieces]
        seq = [request.length + tokens for request, tokens in pieces]
        on_device = (self._tensor(prefix), prefix, self._tensor(seq), seq)
        return self.allocator.alloc_extend(*on_device, self._last(pieces), sum(seq) - sum(prefix))

    def decode(self, pieces: list[Piece]) -> torch.Tensor | None:
        """Return one slot a request."""
        seq = [request.length + 1 for request, _ in pieces]
        return self.allocator.alloc_decode(self._tensor(seq), seq, self._last(pieces))

    def _last(self, pieces: list[Piece]) -> torch.Tensor:
        """Return the slot of each request's newest token, −1 without one."""
        import torch

        rows = self._tensor([request.row for request, _ in pieces])
        lengths = self._tensor([request.length for request, _ in pieces])
        slots = self.rows.req_to_token[rows, (lengths - 1).clamp(min=0)].to(torch.int64)
        return torch.where(lengths > 0, slots, -1)

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        import torch

        return torch.tensor(numbers, dtype=torch.int64, device=self.rows.req_to_token.device)

    def evict(self, requests: list[_Request], at_least: int) -> bool:
        """Give back what left the window, where that is `at_least` tokens; tell whether anything was."""
        window = self.window
        if window is None:
            return False
        due = [r for r in requests if r.length - window - r.evicted >= at_least]
        before = self.available()
        if self.is_pure:
            self._evict_pages(due, window)
        elif due:
            self.cache.evict([r.name for r in due], [r.length - window for r in due])
            for request in due:
                request.evicted = request.length - window
        return self.available() != before

    def _evict_pages(self, requests: list[_Request], window: int) -> None:
        """Give back whole pages of the only space; `release` is told how far that went."""
        page_size = self.allocator.page_size
        for request in requests:
            end = (request.length - window) // page_size * page_size
            if end > request.evicted:
                self.allocator.free_rows(self.rows.req_to_token, [request.row], [request.evicted], [end])
                request.evicted = end

    def release(self, request: _Request) -> None:
        """Give back everything that a request still owns."""
        self.cache.release(request.name, kept=request.evicted if self.is_pure else 0)

    def first_kept(self, request: _Request) -> int:
        """Return the first token whose slot in the request table is still the request's."""
        return request.evicted if self.is_pure else 0


def _parts_of(cache: KVCache) -> dict[str, Allocator]:
    """Return the allocator of each space that one hands out."""
    allocator = cache.token_to_kv_pool_allocator
    inner = dict(allocator.parts.allocators)
    return inner or {str(cache.plan.outline.numbering): allocator}
