"""What a scheduler does with a cache: slots for its requests, prefixes that they share, copies on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.abilities import KeepsByRequest
from kvdock.errors import PlanError
from kvdock.layout import TARGET
from kvdock.testing.owners import KEPT, Owners
from kvdock.testing.states import Copies, Kept, States
from kvdock.testing.tiers import Tiers
from kvdock.testing.trace import Arrival
from kvdock.testing.values import RunError

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Allocator
    from kvdock.cache import KVCache

MAX_PREFIXES = 4
"""Prefixes that are kept for later requests at once."""


class Prefix:
    """The first tokens of a request, kept for others; sliding slots before `evicted` are gone, and hold nothing before `lost`."""

    def __init__(self, slots: torch.Tensor, request: Request, state: Kept | None) -> None:
        self.slots = slots
        self.state = state
        self.salt = request.salt
        self.evicted, self.lost = request.evicted, request.readable
        self.borrowers = 0

    @property
    def tokens(self) -> int:
        """Tokens of the prefix, whole pages."""
        return int(self.slots.shape[0])


class Saved(NamedTuple):
    """A request on the host: copies of its tokens ``first … length``, which had `slots`, by worker, and of its state.

    `by_row` are copies of what it owns beside its tokens, by worker.
    """

    first: int
    length: int
    lost: int
    slots: torch.Tensor
    copies: dict[str, list[torch.Tensor]]
    states: Copies
    by_row: dict[str, list[torch.Tensor]]


class Request:
    """A request on its way: `length` tokens are in the cache, from `start` on written or loaded by itself.

    The sliding slots before `evicted` went back, and those before `lost` hold nothing to be read. The first
    `shared` tokens have the values of another request; `prefix` is what they are borrowed from. `saved` is
    there while the request, or a part of it, is on the host. `tracks` are the track slots whose state is whole,
    and the tokens that it has seen.
    """

    def __init__(self, name: int, arrival: Arrival, salt: int) -> None:
        self.name = name
        self.prompt = arrival.input_length
        self.total = arrival.tokens
        self.salt = salt
        self.saved: Saved | None = None
        self.shared = self.shared_salt = 0
        self.restart()

    def restart(self) -> None:
        """Begin anew, without a row; values of tokens stay what they were."""
        self.row = self.length = self.start = self.evicted = self.lost = 0
        self.prefix: Prefix | None = None
        self.tracks: dict[int, int] = {}
        self.is_arriving = False
        if self.saved is None:
            self.shared = 0

    @property
    def goal(self) -> int:
        """Tokens that are there before it decodes: its prompt, or what was saved."""
        return self.prompt if self.saved is None else self.saved.length

    @property
    def borrowed(self) -> int:
        """Tokens whose slots are a kept prefix's."""
        return 0 if self.prefix is None else self.prefix.tokens

    @property
    def readable(self) -> int:
        """The first token that sliding layers still hold."""
        return max(self.evicted, self.lost)

    def salts(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the number that the values of each token follow."""
        import torch

        return torch.where(positions < self.shared, self.shared_salt, self.salt)

    def describe(self) -> str:
        """Return the request and how far it is, for a message."""
        return f"request {self.name} of {self.total} tokens, {self.length} of them cached,"


Piece = tuple[Request, int]
"""A request and the tokens that it grows by."""
Part = tuple[Request, "torch.Tensor"]
"""A request and the slots that it got for its next tokens."""


class Slots:
    """The allocator of a cache as a scheduler uses it, and what is free in each space."""

    def __init__(self, cache: KVCache, rng: random.Random, states: States, tiers: Tiers) -> None:
        self.cache = cache
        self.memory = cache.memory
        self.rng = rng
        self.states = states
        self.tiers = tiers
        self.rows = cache.req_to_token_pool
        self.allocator: Any = cache.token_to_kv_pool_allocator
        self.page_size: int = self.allocator.page_size
        spaces = cache.plan.outline.spaces
        self.parts = _parts_of(cache)
        self.numbering = str(cache.plan.outline.numbering)
        sliding = {n: spaces[n].window_tokens for n in self.parts if spaces[n].window_tokens is not None}
        self.sliding = next(iter(sliding), None)
        """The space whose slots leave a window, if there is one; the numbering itself if every layer slides."""
        self.window = sliding.get(self.sliding) if self.sliding is not None else None
        self.is_pure = self.sliding == self.numbering
        self.eviction_interval = cache.plan.options.values.swa_eviction_interval or 1
        self.at_first = self.available()
        self.peak = dict.fromkeys(self.at_first, 0)
        self.owners = Owners({name: part.size for name, part in self.parts.items()}, self.page_size)
        self.prefixes: list[Prefix] = []

    def available(self) -> dict[str, int]:
        """Return the free slots of each space that is handed out."""
        free = {name: part.available_size() for name, part in self.parts.items()}
        return free | self.states.available() | {"requests": self.rows.available_size()}

    def note_peak(self) -> None:
        """Remember the most slots that were taken at once."""
        taken = {name: self.at_first[name] - free for name, free in self.available().items()}
        if self.memory is not None:  # where what one space takes is not free for another either
            taken |= {share.space: share.live * self._slots_of(share.space) for share in self.memory.shares()}
        for name, count in taken.items():
            self.peak[name] = max(self.peak[name], count)

    def _slots_of(self, space: str) -> int:
        return self.cache.plan.outline.spaces[space].page_size

    def extend(self, pieces: list[Piece]) -> torch.Tensor | None:
        """Return slots for the new tokens of requests."""
        prefix = [request.length for request, _ in pieces]
        seq = [request.length + tokens for request, tokens in pieces]
        on_device = (self._tensor(prefix), prefix, self._tensor(seq), seq)
        found: torch.Tensor | None = self.allocator.alloc_extend(
            *on_device, self._last(pieces), sum(seq) - sum(prefix), self.tiers.names(request for request, _ in pieces)
        )
        return found

    def decode(self, pieces: list[Piece]) -> torch.Tensor | None:
        """Return one slot a request."""
        seq = [request.length + 1 for request, _ in pieces]
        names = self.tiers.names(request for request, _ in pieces)
        found: torch.Tensor | None = self.allocator.alloc_decode(self._tensor(seq), seq, self._last(pieces), names)
        return found

    def verify(self, request: Request, slots: torch.Tensor) -> None:
        """Verify that `slots` are nobody's, on both sides."""
        for space, found in self._both(slots).items():
            self.owners.verify_free(space, found, request.name)
        self.tiers.verify(request, slots)

    def take(self, request: Request, slots: torch.Tensor) -> None:
        """Note that `slots` are a request's from now on, on both sides."""
        for space, found in self._both(slots).items():
            self.owners.take(space, found, request.name)
        self.tiers.take(request, slots)

    def take_arrived(self, request: Request, slots: torch.Tensor) -> None:
        """Note the row and the slots of a request that came with its KV: sliding layers hold its newest tokens alone."""
        request.row = self.rows.row_of(request.name) or 0
        both = self._both(slots)
        if self.sliding is not None:
            gone = int((both[self.sliding] < self.page_size).sum())
            request.evicted = request.lost = gone
            both[self.sliding] = both[self.sliding][gone:]
        for space, found in both.items():
            self.owners.take(space, found, request.name)

    def nothing(self) -> torch.Tensor:
        """Return no slot."""
        return self._tensor([])

    def write_row(self, request: Request, start: int, slots: torch.Tensor) -> None:
        """Write slots into the row of a request, from column `start` on."""
        self.rows.write([request.row], [start], [start + slots.shape[0]], slots)

    def skip(self, request: Request, tokens: int) -> None:
        """Begin the row of a request with `tokens` tokens that left the window of every layer: they have no slots."""
        if tokens:
            self.write_row(request, 0, self._tensor([0] * tokens))
            self.cache.hold_prefix(request.name, evicted=tokens)

    def evict(self, requests: list[Request], at_least: int) -> bool:
        """Give back what left the window, where that is `at_least` tokens; tell whether anything was."""
        window = self.window
        due = [] if window is None else [r for r in requests if r.length - window - r.evicted >= at_least]
        if window is None or not due:
            return False
        before = self.available()
        ends = [request.length - window for request in due]
        given = [self._sliding_of(request, end) for request, end in zip(due, ends, strict=True)]
        self.cache.evict([request.name for request in due], ends)
        for request, end, slots in zip(due, ends, given, strict=True):
            self.owners.give(str(self.sliding), slots)
            request.evicted = end
        after, due_slots = self.available(), sum(slots.numel() for slots in given)
        if after[str(self.sliding)] - before[str(self.sliding)] != due_slots:
            raise RunError(f"evict was due to give back {due_slots} slots; {before} were free before and {after} after")
        return after != before

    def release(self, request: Request, kept: int = 0) -> None:
        """Give back everything that a request still owns but its first `kept` tokens."""
        row = self._row(request)
        full = row[max(kept, request.borrowed, self.page_floor(request.evicted) if self.is_pure else 0) :]
        given = {self.numbering: full}
        if self.sliding is not None:
            first = max(kept, request.borrowed, self.page_floor(request.evicted))
            given[self.sliding] = self._to_sliding(row[first:])
        self.tiers.release(request, kept)
        self.cache.release(request.name, kept=kept)
        for space, slots in given.items():
            self.owners.give(space, slots)
        if request.prefix is not None:
            request.prefix.borrowers -= 1
            request.prefix = None

    def release_and_keep(self, request: Request) -> None:
        """Give back a request that ended, and keep some of its first tokens for others, if that is possible."""
        prefix = self._keep(request, goes_on=False)
        self.release(request, 0 if prefix is None else prefix.tokens)

    def keep(self, request: Request) -> None:
        """Keep some of the first tokens of a request for others while it goes on, if that is possible."""
        prefix = self._keep(request, goes_on=True)
        if prefix is not None:
            self.cache.hold_prefix(request.name, borrowed=prefix.tokens)
            request.prefix, prefix.borrowers = prefix, 1

    def _keep(self, request: Request, goes_on: bool) -> Prefix | None:
        kept = self._tokens_to_keep(request)
        state = self.states.donate(request, replace=goes_on) if kept and self.states else None
        if not kept or (self.states and state is None):
            return None
        prefix = Prefix(self._row(request)[:kept].clone(), request, state)
        self._pass_on(prefix, KEPT)
        self.prefixes.append(prefix)
        return prefix

    def _tokens_to_keep(self, request: Request) -> int:
        """Return a whole number of pages whose window, and state, is still there; 0 if there are none."""
        if len(self.prefixes) >= MAX_PREFIXES or request.shared or request.prefix is not None:
            return 0
        if not self.tiers.is_whole(request):
            return 0
        lost, window = request.readable, self.window or 0
        least = -(-max(1, lost + window if lost else 1) // self.page_size)
        if self.states:
            # What begins with these tokens begins with the state after the last of them.
            tokens = self.states.tokens_to_donate(request)
            return tokens if tokens % self.page_size == 0 and tokens >= least * self.page_size else 0
        most = request.length // self.page_size
        return self.rng.randint(least, max(least, most // 2)) * self.page_size if least <= most else 0

    def share(self, request: Request) -> int:
        """Let a request that got its row begin with a kept prefix, if one fits; return the tokens."""
        fitting = [prefix for prefix in self.prefixes if prefix.tokens < request.prompt]
        if not fitting:
            return 0
        prefix = self.rng.choice(fitting)
        self.write_row(request, 0, prefix.slots)
        self.states.fork(request, prefix.state)
        takes_over = prefix.borrowers == 0 and self.rng.random() < 0.5
        self.cache.hold_prefix(request.name, borrowed=0 if takes_over else prefix.tokens, evicted=prefix.evicted)
        if takes_over:
            self.prefixes.remove(prefix)
            self._pass_on(prefix, request.name)
            self.states.give(prefix.state)
        else:
            prefix.borrowers += 1
            request.prefix = prefix
        request.length = request.start = request.shared = prefix.tokens
        request.shared_salt, request.evicted, request.lost = prefix.salt, prefix.evicted, prefix.lost
        return prefix.tokens

    def drop_prefixes(self) -> bool:
        """Give back the prefixes that nobody borrows; tell whether there were any."""
        unused = [prefix for prefix in self.prefixes if not prefix.borrowers]
        for prefix in unused:
            self._pass_on(prefix, None)
            self.states.give(prefix.state)
            self.allocator.free(prefix.slots[self.page_floor(prefix.evicted) if self.is_pure else 0 :])
            self.prefixes.remove(prefix)
        return bool(unused)

    def save(self, request: Request) -> Saved:
        """Return copies of all that a request has in the cache."""
        first = self.page_floor(request.readable) if self.is_pure else 0
        slots = self._row(request)[first:]
        host = self.tiers.host_of(request, first, slots.shape[0])
        copies = {worker: pool.get_cpu_copy(slots, *host) for worker, pool in self._pools().items()}
        row = self._tensor([request.row])
        by_row = {worker: pool.get_request_copy(row) for worker, pool in self._by_request().items()}
        return Saved(first, request.length, request.readable, slots, copies, self.states.save(request), by_row)

    def load(self, request: Request, saved: Saved, slots: torch.Tensor) -> None:
        """Write what was saved of a request's next tokens to `slots`."""
        start = request.length - saved.first
        host = self.tiers.host_of(request, request.length, slots.shape[0])
        for worker, pool in self._pools().items():
            copies = pool.cut_copies(saved.copies[worker], saved.slots, start, start + slots.shape[0])
            pool.load_cpu_copy(copies, slots, *host)

    def load_rows(self, request: Request, saved: Saved) -> None:
        """Write what was saved of a request beside its tokens to its row, which may be another one."""
        pools = self._by_request()
        if pools:
            self.cache.prepare_states()  # a fresh row is cleared first, not what is loaded
        for worker, pool in pools.items():
            pool.load_request_copy(saved.by_row[worker], self._tensor([request.row]))

    def first_kept(self, request: Request) -> int:
        """Return the first token whose slot in the request table is still the request's."""
        return self.page_floor(request.readable) if self.is_pure else 0

    def _pools(self) -> dict[str, Any]:
        return {TARGET: self.cache.token_to_kv_pool, **self.cache.drafts}

    def _by_request(self) -> dict[str, KeepsByRequest]:
        return {worker: pool for worker, pool in self._pools().items() if isinstance(pool, KeepsByRequest)}

    def _row(self, request: Request) -> torch.Tensor:
        import torch

        return self.rows.req_to_token[request.row, : request.length].to(torch.int64)

    def page_floor(self, tokens: int) -> int:
        """Return the tokens of whole pages among the first `tokens`."""
        return tokens // self.page_size * self.page_size

    def _to_sliding(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots that sliding layers use for `slots`."""
        found: torch.Tensor = slots if self.is_pure else self.allocator.translate(slots)
        return found

    def _both(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        both = {self.numbering: slots}
        return both if self.sliding is None else both | {self.sliding: self._to_sliding(slots)}

    def _sliding_of(self, request: Request, end: int) -> torch.Tensor:
        """Return the sliding slots of the pages that end before `end` and were not given back."""
        first = max(request.borrowed, self.page_floor(request.evicted))
        return self._to_sliding(self._row(request)[first : max(first, self.page_floor(end))])

    def _pass_on(self, prefix: Prefix, holder: int | None) -> None:
        """Note whose the slots of a prefix are now; ``None``: nobody's."""
        to = {} if holder is None else {"holder": holder}
        first = self.page_floor(prefix.evicted)
        self.owners.give(self.numbering, prefix.slots[first if self.is_pure else 0 :], **to)
        self.tiers.pass_on(prefix.slots, holder)
        if self.sliding is not None:
            self.owners.give(self.sliding, self._to_sliding(prefix.slots[first:]), **to)

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


def _parts_of(cache: KVCache) -> dict[str, Allocator]:
    """Return the allocator of each space that one hands out."""
    allocator = cache.token_to_kv_pool_allocator
    inner = dict(allocator.parts.allocators)
    return inner or {str(cache.plan.outline.numbering): allocator}


def parts_of(pieces: list[Piece], slots: torch.Tensor) -> Iterator[Part]:
    """Yield each request and the slots that it got."""
    start = 0
    for request, tokens in pieces:
        yield request, slots[start : start + tokens]
        start += tokens


def refuse_nothing(cache: KVCache) -> None:
    """Raise `PlanError` for a cache in which no request could be told from another."""
    outline = cache.plan.outline
    if not outline.allocators:
        raise PlanError("no layer of this model keeps KV token by token, so there is nothing to drive")
    if not any(group.worker == TARGET for group in outline.groups):
        raise PlanError(
            "no layer of this rank keeps KV or states, so there is nothing to drive; run a rank that has some of them"
        )
