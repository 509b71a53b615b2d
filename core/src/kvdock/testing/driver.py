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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvdock.demand import draft_tokens
from kvdock.errors import PlanError, SlotError
from kvdock.requests.decode import DecodeReqToTokenPool
from kvdock.testing.kinds import Tokens
from kvdock.testing.moves import Moves
from kvdock.testing.report import Progress, Report
from kvdock.testing.slots import Part, Piece, Request, Slots, parts_of, refuse_nothing
from kvdock.testing.states import States
from kvdock.testing.tiers import Tiers
from kvdock.testing.trace import Arrival
from kvdock.testing.values import RunError, Values

if TYPE_CHECKING:
    import torch

    from kvdock.cache import KVCache

DEFAULT_CHUNK = 512
MAX_WAITING = 1024
"""Arrivals are read no further ahead than this, so a long trace is never held in memory."""
SHARING, SPECULATING = 0.5, 0.1
"""How often a request that ends leaves a prefix and one that begins takes one; how often a decode speculates."""
TRIMMING = 0.5
"""How often what was speculated is trimmed page by page instead of taken back as a whole."""
PREEMPTING = 0.1
"""How often the youngest request is swapped out for one that waits for a device buffer."""
MAX_DRAFTS = 4
"""Tokens that a request speculates at most."""
SAMPLE_TOKENS = 8
"""Tokens of one request that are compared at each extend and decode step, in every layer."""


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
    is_shared = cache.plan.options.values.prefix_cache is not False  # without one, nothing is kept for others
    run.sharing, run.speculating = sharing if is_shared else 0.0, speculating
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
        refuse_nothing(cache)
        self.cache = cache
        self.rows = cache.req_to_token_pool
        self.rng = random.Random(seed)
        self.values = Values(cache, seed)
        self.states = States(cache, self.values, self.rng)
        self.tiers = Tiers(cache, self.values, self.rng)
        self.slots = Slots(cache, self.rng, self.states, self.tiers)
        self.moves = Moves(cache, self.rng)
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
        self.shared_tokens = self.rollbacks = self.received = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is running, waiting or still to come."""
        return bool(self.running or self.waiting or self.next is not None)

    def step(self) -> None:
        """Let one step of the engine pass."""
        self._arrive()
        grown = self._start() + self._decode() + self._receive() + self._prefill()
        self._finish()
        if not grown and (self.running or self.waiting):
            self._unblock()
        self.moves.settle()
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
        while batch := self._decoding():
            self.slots.evict(batch, self.slots.eviction_interval)
            if self.rng.random() < self.speculating:
                self._speculate(batch)
            if self._grow([(request, 1) for request in batch], self.slots.decode):
                self._sample(batch[self.steps % len(batch)], 1)
                return len(batch)
            if self._make_room():
                continue
            if len(self.running) == 1 and batch[0].prefix is None:
                raise RunError(f"{batch[0].describe()} finds no slot in a cache that it has for itself")
            self._preempt()
        return 0

    def _decoding(self) -> list[Request]:
        """Return the requests that decode now: all that are past their prompt and have a place to read from."""
        due = [r for r in self.running if r.goal <= r.length < r.total and not r.is_arriving]
        ready = self.tiers.ready(due)
        if len(ready) == len(due) or self._make_room():
            return ready if len(ready) == len(due) else self.tiers.ready(due)
        if len(self.running) > 1 and self.rng.random() < PREEMPTING:
            self._preempt()
            return self._decoding()
        return ready

    def _make_room(self) -> bool:
        """Give back what no request needs any more; tell whether there was anything."""
        return (
            self.moves.open()
            or self.tiers.evict(self.running)
            or self.slots.evict(self.running, 1)
            or self.slots.drop_prefixes()
        )

    def _receive(self) -> int:
        """Admit requests whose KV arrives with them, at a decode worker; return the tokens."""
        tokens = 0
        while isinstance(self.rows, DecodeReqToTokenPool) and self.waiting and not self.is_paused:
            request, before = self.waiting[0], self.slots.available()
            slots = None if request.saved is not None else self.cache.admit(request.name, request.prompt, arriving=True)
            if slots is not None and not self.tiers.reserve(request):
                self.cache.release(request.name)
                slots = None
            if slots is None:
                self._refuse_change(before)
                self.failed_admissions += request.saved is None
                break
            self.running.append(self.waiting.popleft())
            self.slots.take_arrived(request, slots)
            self._write([(request, slots)], at=self.tiers.arrive(request))
            request.length, request.is_arriving = request.prompt, True
            self.states.write(request)
            tokens += request.prompt
            self.received += 1
            self.slots.note_peak()
        self.tokens_written += tokens
        return tokens

    def _start(self) -> int:
        """Let requests decode whose KV has arrived, as many as may run; return how many."""
        if not isinstance(self.rows, DecodeReqToTokenPool):
            return 0
        arriving = [request for request in self.running if request.is_arriving]
        for request in arriving:
            request.is_arriving = self.rows.start([request.name]) is None
        return sum(not request.is_arriving for request in arriving)

    def _prefill(self) -> int:
        """Extend prompts, oldest first, by at most a chunk; return the tokens."""
        pieces = self._choose_pieces()
        self.slots.evict([request for request, _ in pieces], 1)
        self.tiers.evict([request for request, _ in pieces], always=False)
        while pieces:
            if self._grow(pieces, self.slots.extend):
                self._sample(*pieces[self.steps % len(pieces)])
                self._keep_prompts([request for request, _ in pieces])
                return sum(tokens for _, tokens in pieces)
            if self.moves.open() or self.tiers.evict(self.running):
                continue
            request, _ = pieces.pop()
            if request.length == request.start:
                self._give_up(request)
        return 0

    def _keep_prompts(self, requests: list[Request]) -> None:
        """Let some of the prompts that are complete begin those of later requests."""
        for request in requests:
            # A state is there for the newest token alone, so any step may end where a prefix can.
            is_complete = bool(self.states) or request.length == request.prompt
            if request.saved is None and is_complete and self.rng.random() < self.sharing:
                self.slots.keep(request)

    def _choose_pieces(self) -> list[Piece]:
        budget, pieces = self.chunk, []
        for request in self.running:
            if budget > 0 and request.length < request.goal:
                pieces.append((request, self._piece(request, budget)))
                budget -= pieces[-1][1]
        while budget > 0 and self._may_admit():
            request = self.waiting[0]
            row = self._take_row(request)
            if row is None and self.states and (self.moves.open() or self.slots.drop_prefixes()):
                continue
            if row is None:
                self.failed_admissions += 1
                break
            self._admit(self.waiting.popleft(), row)
            pieces.append((request, self._piece(request, budget)))
            budget -= pieces[-1][1]
        return pieces

    def _take_row(self, request: Request) -> int | None:
        """Return the row of a request that begins, or ``None``; with it go slots on the host for all that it may write."""
        (row,) = self.rows.alloc([request.name]) or (None,)
        if row is not None and not self.tiers.reserve(request):
            self.cache.release(request.name)
            return None
        return row

    def _may_admit(self) -> bool:
        """Return whether the next request begins here: at a decode worker all but those that were swapped out arrive."""
        received = isinstance(self.rows, DecodeReqToTokenPool)
        return bool(self.waiting) and not self.is_paused and (not received or self.waiting[0].saved is not None)

    def _piece(self, request: Request, budget: int) -> int:
        """Return the tokens by which a prompt grows; now and then to the end of a page, where a state can be kept."""
        tokens = min(budget, request.goal - request.length)
        aligned = self.slots.page_floor(request.length + tokens) - request.length
        cut = bool(self.states) and request.saved is None and aligned > 0 and self.rng.random() < self.sharing
        return aligned if cut else tokens

    def _admit(self, request: Request, row: int) -> None:
        """Let a request run: from where it was saved, from a prefix of another, or from its first token."""
        request.row = row
        self.running.append(request)
        if request.saved is not None:
            request.start = request.length = request.evicted = request.saved.first
            request.lost = request.saved.lost
            self.slots.skip(request, request.saved.first)
            self.states.load(request, request.saved.states)
            self.slots.load_rows(request, request.saved)
        elif self.rng.random() < self.sharing:
            self.shared_tokens += self.slots.share(request)
            self.tiers.adopt(request)

    def _grow(self, pieces: list[Piece], alloc: Callable[[list[Piece]], torch.Tensor | None]) -> bool:
        """Give requests slots and write their new tokens; ``False`` (and nothing changes) if there is no room."""
        before = self.slots.available()
        slots = alloc(pieces)
        if slots is None:
            self._refuse_change(before)
            return False
        self._write_rows(pieces, slots)
        self.cache.prepare_states()
        parts = list(parts_of(pieces, slots))
        with self.moves.forward():
            for place, (request, part) in enumerate(parts):
                self.slots.take(request, part)
                if request.saved is not None:
                    self._load(request, part)
                elif request.length == request.start or place == self.steps % len(pieces):
                    self.states.check(request)
            written = [pair for pair in parts if pair[0].saved is None]
            self._write(written)
        self.tiers.back_up(written)
        for request, part in parts:
            request.length += part.numel()
            if request.saved is None:
                self.states.advance(request)
        self.tokens_written += slots.numel()
        self.slots.note_peak()
        self._end_loading()
        return True

    def _write_rows(self, pieces: list[Piece], slots: torch.Tensor) -> None:
        rows, starts = [r.row for r, _ in pieces], [r.length for r, _ in pieces]
        self.rows.write(rows, starts, [r.length + tokens for r, tokens in pieces], slots)

    def _write(self, parts: list[Part], salts: Sequence[int] = (), at: tuple[str, torch.Tensor] | None = None) -> None:
        """Write the values of each request's next tokens; `salts` stand for values that are not its own."""
        import torch

        if not parts:
            return
        positions = [torch.arange(r.length, r.length + p.numel(), device=p.device) for r, p in parts]
        own = [request.salts(found) for (request, _), found in zip(parts, positions, strict=True)]
        others = [torch.full_like(found, salt) for found, salt in zip(positions, salts, strict=False)]
        slots = torch.cat([part for _, part in parts]).to(torch.int64)
        counts = torch.tensor([p.numel() for _, p in parts], device=slots.device)
        of_requests = torch.tensor([(r.row, r.length + p.numel(), r.readable) for r, p in parts], device=slots.device)
        rows, lengths, firsts = of_requests.repeat_interleave(counts, 0).unbind(1)
        tokens = Tokens(slots, torch.cat(positions), rows, lengths, firsts)
        self.values.write(torch.cat(others or own), tokens, at)

    def _load(self, request: Request, slots: torch.Tensor) -> None:
        """Bring a request's next tokens back from the host."""
        if request.saved is not None:
            self.slots.load(request, request.saved, slots)

    def _end_loading(self) -> None:
        """Compare all of the requests that are back from the host."""
        for request in self.running:
            if request.saved is not None and request.length == request.saved.length:
                request.saved = None
                self._check_all(request)

    def _speculate(self, batch: list[Request]) -> None:
        """Let requests write some tokens ahead, and take all of them back as if none had been accepted."""
        batch = [request for request in batch if not self.tiers.holds_buffer(request)]
        if not batch:
            return
        most = self.values.most_ahead
        if most == 0:
            return
        drafts = max(MAX_DRAFTS, draft_tokens(self.cache.token_to_kv_pool.query))
        ahead = self.rng.randint(1, drafts if most is None else min(most, drafts))
        pieces = [(request, min(ahead, request.total - request.length)) for request in batch]
        before, allocator = self.slots.available(), self.slots.allocator
        state = allocator.backup_state()
        slots = self.slots.extend(pieces)
        if slots is not None:
            self._write_rows(pieces, slots)
            self.rollbacks += 1
            salts = [self.values.salt(request.name, self.rollbacks) for request in batch]
            parts = list(parts_of(pieces, slots))
            for request, part in parts:
                self.slots.verify(request, part)
            self._write(parts, salts)
            self.cache.prepare_states()
            states = self.states.speculate(batch, [tokens for _, tokens in pieces], salts)
            self._roll_back(batch, state)
            self.states.roll_back(batch, states)
            if not self.tiers:
                self._sample(batch[self.steps % len(batch)], 0)
        self._refuse_change(before, "that was taken back" if slots is not None else "that was refused")

    def _roll_back(self, batch: list[Request], state: object) -> None:
        """Take back what requests wrote ahead: the allocation as a whole, or the pages beyond their tokens."""
        names, lengths = [request.name for request in batch], [request.length for request in batch]
        # What is freed while pages have to stay is a hole that other spaces cannot use; what is restored never was one.
        if self.rng.random() < TRIMMING and self.moves.may_move:
            self.cache.trim(names, lengths)
        else:
            self.slots.allocator.restore_state(state)
            self.cache.truncate(names, lengths)

    def _refuse_change(self, before: dict[str, int], which: str = "that was refused") -> None:
        after = self.slots.available()
        if before != after:
            raise RunError(f"an allocation {which} changed the free slots from {before} to {after}")

    def _sample(self, request: Request, new: int) -> None:
        """Compare what the first of `new` tokens sees, or the next one: the oldest token of its window, the newest, some others."""
        if self.tiers:
            self.tiers.read_step(request)
            return
        if request.saved is not None:  # rings hold its newest tokens already; all is compared once it is back
            return
        first_new = request.length - new
        oldest = 0 if self.slots.window is None else max(0, first_new - self.slots.window)
        newest = request.length - 1
        drawn = {self.rng.randrange(request.length) for _ in range(SAMPLE_TOKENS - 2)}
        self._check(request, sorted(drawn | {min(oldest, newest), newest}), new)

    def _check(self, request: Request, positions: Iterable[int], new: int = 1) -> None:
        """Compare tokens of a request as the first of its `new` tokens sees them."""
        import torch

        table = self.rows.req_to_token
        where = torch.tensor(list(positions), dtype=torch.int64, device=table.device)
        kept = where[where >= self.slots.first_kept(request)]
        slots = table[request.row, kept].to(torch.int64)
        seen = (request.readable, request.length - new)
        of_request = (torch.full_like(kept, n) for n in (request.row, request.length, request.readable))
        self.values.check(request.name, request.salts(kept), seen, Tokens(slots, kept, *of_request))

    def _check_all(self, request: Request) -> None:
        """Compare all that a request has in the cache."""
        if self.tiers:
            self.tiers.check_all(request)
        else:
            self._check(request, range(request.length))
        self.states.check(request)

    def _finish(self) -> None:
        for request in [r for r in self.running if r.length == r.total]:
            self._check_all(request)
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
            self._check_all(request)
            request.saved = self.slots.save(request)
        self._release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
        self.is_paused = bool(self.running)

    def _unblock(self) -> None:
        """Make room where nothing could grow: take a request back, or prefill in smaller chunks."""
        if self.moves.open() or self.slots.drop_prefixes():
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
        self.moves.open()
        self.unfinished = len(self.running) + len(self.waiting)
        for request in tuple(self.running):
            if request.saved is None:
                self._check_all(request)
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
            received=self.received,
            **self.states.counts(),
            **self.tiers.counts(),
            **self.moves.counts(),
        )

    def _problems(self, planned: int, allocated: int) -> Iterator[str]:
        try:
            self.cache.check(held=self.slots.nothing(), held_states=())
        except SlotError as error:
            yield str(error)
        if self.slots.available() != self.slots.at_first:
            yield f"slots leaked: {self.slots.at_first} were free before and {self.slots.available()} are free now"
        if planned != allocated:
            yield f"{planned} bytes were planned and {allocated} allocated"
        if self.cache.plan.host_bytes != self.cache.host_bytes():
            yield f"{self.cache.plan.host_bytes} host bytes were planned and {self.cache.host_bytes()} allocated"
