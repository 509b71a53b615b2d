"""What `build` returns: request pool, allocator and KV pools, and the life of a request across all of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvdock.allocators.lengths import on_host, to_device
from kvdock.allocators.window import swa_tail_start
from kvdock.errors import BuildError, SlotError
from kvdock.layout import TARGET
from kvdock.pools.storage import Tensors, unique_storages
from kvdock.requests.holdings import Holdings, Span

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Allocator
    from kvdock.planner import CachePlan
    from kvdock.pools.base import Pool
    from kvdock.requests.base import RequestPool


@runtime_checkable
class _Evicts(Protocol):
    """An allocator whose oldest tokens give back the slots of sliding layers."""

    def free_swa_rows(
        self, table: torch.Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Give back the sliding pages whose last token is in ``starts[i] … ends[i]``."""

    def free_rows(
        self,
        table: torch.Tensor,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        swa_starts: Sequence[int] | None = None,
    ) -> None:
        """Give back both sides; `swa_starts` is where `free_swa_rows` ended."""


@runtime_checkable
class _TakesTails(Protocol):
    """An allocator that gives sliding slots to the newest tokens of a batch alone."""

    def alloc_extend_swa_tail(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Sequence[int],
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int],
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        swa_tail_lens: Sequence[int],
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return slots for the new tokens of each request."""


@runtime_checkable
class _HoldsStates(Protocol):
    """A request pool that hands out state slots beside its rows."""

    def fork_state(self, request: Hashable, cached_slot: int) -> tuple[int, int]:
        """Let a request begin with the state of another slot."""

    def take_copies(self) -> tuple[list[int], list[int]]:
        """Return sources and targets of the copies that are due; reads come first."""

    def take_fresh(self) -> list[int]:
        """Return the slots that are to be cleared before their first use."""

    def check(self, held_states: Iterable[int] | None = None) -> None:
        """Verify rows and state slots."""


@runtime_checkable
class _KeepsStates(Protocol):
    """A pool of states, by slot."""

    def clear_slots(self, slots: torch.Tensor) -> None:
        """Put slots into the state of a request that begins."""

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all that slots own; every source is read before any target is written."""


@runtime_checkable
class _Awaits(Protocol):
    """A request pool of a decode worker: requests arrive before they run."""

    def alloc(self, requests: Sequence[Hashable], arriving: bool = False) -> list[int] | None:
        """Return a row for each request."""

    def start(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Let requests run that have arrived."""


class KVCache:
    """What `build` returns: everything that an engine runs on, over memory that the plan accounts for.

    Owned by one thread; nothing locks.
    """

    def __init__(
        self,
        plan: CachePlan,
        req_to_token_pool: RequestPool,
        allocator: Allocator | None,
        pools: dict[str, Pool],
        by_worker: dict[str, Pool],
        tensors: Sequence[Tensors],
        debug: bool = False,
    ) -> None:
        self.plan = plan
        self.req_to_token_pool = req_to_token_pool
        self.pools = pools
        """Pool of each layer group, drafts' included, by group name."""
        self.drafts = {worker: pool for worker, pool in by_worker.items() if worker != TARGET}
        """What each draft worker sees as its KV pool; request pool and allocator are the target's."""
        self._target = by_worker.get(TARGET)
        self._allocator = allocator
        self._tensors = tuple(tensors)
        self._debug = debug
        self._slides_whole = _slides_whole(plan)
        self._tail_tokens = _window(plan) if isinstance(allocator, _TakesTails) else None
        self._page_size = 1 if allocator is None else allocator.page_size
        self._holdings = Holdings(req_to_token_pool, self._page_size, self._slides_whole)
        self._states = req_to_token_pool if isinstance(req_to_token_pool, _HoldsStates) else None
        self._state_pools = [pool for pool in pools.values() if isinstance(pool, _KeepsStates)]

    @property
    def token_to_kv_pool(self) -> Pool:
        """The KV pool that the target sees.

        Raises:
            BuildError: no layer of this rank keeps KV.
        """
        if self._target is None:
            raise BuildError("no layer of this rank keeps KV, so there is no token_to_kv_pool")
        return self._target

    @property
    def token_to_kv_pool_allocator(self) -> Allocator:
        """The allocator that requests are numbered by.

        Raises:
            BuildError: no space of this plan is handed out by an allocator.
        """
        if self._allocator is None:
            raise BuildError("no space of this plan is handed out token by token, so there is no allocator")
        return self._allocator

    def allocated_bytes(self) -> int:
        """Return the device bytes of all tensors, each storage once, measured on them."""
        return _measured(self._tensors, ("device",))

    def host_bytes(self) -> int:
        """Return the same for host memory, pinned or not."""
        return _measured(self._tensors, ("host", "pinned"))

    def admit(
        self,
        request: Hashable,
        tokens: int,
        *,
        prefix: torch.Tensor | None = None,
        evicted: int = 0,
        cached_state: int | None = None,
        arriving: bool = False,
    ) -> torch.Tensor | None:
        """Take all that a new request needs for its first `tokens` tokens: row, state slots and token slots.

        Returns the slots of the tokens behind `prefix`, written to its row, or ``None`` if something is
        missing; then, and whenever this raises, nothing was taken anywhere.

        Args:
            request: any hashable id that has no row.
            tokens: tokens of its prompt, those of the prefix included.
            prefix: slots ``[n]`` of whole pages that another holds, as in `hold_prefix`.
            evicted: of the prefix, the first tokens whose sliding slots were given back before.
            cached_state: the state slot, such as a prefix cache's, with whose state it begins.
            arriving: its KV is still arriving (role decode); the request pool's `start` lets it run. Sliding
                layers get slots for the newest tokens alone, those that the next one sees.

        Raises:
            SlotError: the request has a row, or what is asked for cannot be.
        """
        borrowed = self._check_admission(request, tokens, prefix)
        allocator = self._allocator
        before = None if allocator is None else allocator.backup_state()
        tail = self._tail_tokens if arriving else None
        try:
            slots = self._first_slots(request, borrowed, tokens, prefix, tail)
            row = None if slots is None else self._take_row(request, arriving)
            if slots is not None and row is not None:
                self._write_first(row, slots if prefix is None else _joined(prefix, slots))
                gone = 0 if tail is None else swa_tail_start(tokens, tail, self._page_size)
                self._holdings.hold(request, borrowed, max(evicted, gone if gone > borrowed else 0))
                self._fork(request, cached_state)
                return slots
        except BaseException:
            self._take_back(request, before)
            raise
        self._take_back(request, before)
        return None

    def prepare_states(self) -> None:
        """Make the state slots ready that were handed out since the last call; before each forward pass.

        Copies what begins with another's state (`admit`, `fork_state`, `donate`), then clears every other fresh
        slot: at most one call of each in every pool of states, and no wait. Nothing to do without states.
        """
        if self._states is None:
            return
        (sources, targets), fresh = self._states.take_copies(), self._states.take_fresh()
        for pool in self._state_pools:
            if targets:
                pool.copy_slots(self._on_device(sources), self._on_device(targets))
            if fresh:
                pool.clear_slots(self._on_device(fresh))

    def hold_prefix(self, request: Hashable, borrowed: int = 0, evicted: int = 0) -> None:
        """Say what of a request's first tokens is not its own, after they were written to its row.

        The slots of the first `borrowed` tokens (whole pages) belong to another holder, such as the request
        that wrote them or a prefix cache: `evict` and `release` leave them alone, both sides of them. The
        sliding slots of the first `evicted` tokens were given back before. Both numbers only grow while the
        request lives, so a request whose own tokens are taken over calls this, too.

        Raises:
            SlotError: the request has no row or did not write as much, or `borrowed` is no whole number of
                pages; nothing changes.
        """
        self._holdings.hold(request, borrowed, evicted)

    def evict(self, requests: Sequence[Hashable], ends: Sequence[int]) -> None:
        """Give back the sliding slots of each request's tokens before ``ends[i]``, which have left the window.

        A page goes back whole, together with its last token; how far each request came is remembered for
        `release`. Where every layer slides it is the request's only slots that go back. Nothing is given
        back where no space slides. Never waits for the device.

        Raises:
            SlotError: a request has no row or is named twice, or an end is not from 0 to what it wrote;
                nothing changes.
        """
        spans = self._holdings.due(requests, ends)
        if not spans or not (self._slides_whole or isinstance(self._allocator, _Evicts)):
            return
        if self._debug:
            self._holdings.check_sole(spans)
        self._free_left(*_columns(spans))
        self._holdings.evict(spans)

    def truncate(self, requests: Sequence[Hashable], lengths: Sequence[int]) -> None:
        """Forget what each request wrote from ``lengths[i]`` on: its slots were taken back, or freed by the caller.

        Call it after `restore_state`, or a request would give back slots that are others' by then.

        Raises:
            SlotError: a request has no row or is named twice, a length is not from 0 to what it wrote, or
                what would be forgotten was evicted or is another's; nothing changes.
        """
        self._holdings.check_truncate(requests, lengths)
        self.req_to_token_pool.truncate(requests, lengths)

    def trim(self, requests: Sequence[Hashable], lengths: Sequence[int]) -> int:
        """Cut each request to ``lengths[i]`` tokens and give back the pages that lie wholly beyond; return the slots.

        For what speculation took ahead: draft tokens that were not accepted. The page in which the last token
        lies stays, and the next tokens fill it. One call of the allocator, and no wait.

        Raises:
            SlotError: a request has no row or is named twice, a length is not from 0 to what it wrote, or
                what would be given back was evicted or is another's; nothing changes.
        """
        self._holdings.check_truncate(requests, lengths)
        spans = self._holdings.tails(requests, lengths)
        if self._allocator is not None and spans:
            if self._debug:
                self._holdings.check_sole(spans)
            rows, starts, ends = _columns(spans)
            self._allocator.free_rows(self.req_to_token_pool.req_to_token, rows, starts, ends)
        self.req_to_token_pool.truncate(requests, lengths)
        return sum(self._holdings.slots_in(span) for span in spans)

    def release(self, request: Hashable, kept: int = 0) -> None:
        """Free all that a request owns, everywhere: token slots, row, state and track slots. A second call does nothing.

        The slots of its first `kept` tokens (whole pages) stay with whoever took them over, such as a prefix
        cache; so do those that `hold_prefix` named.

        Raises:
            SlotError: `kept` is not from 0 to what the request wrote or no whole number of pages, or slots
                are freed that are not live or another's; the request keeps its row.
        """
        table = self.req_to_token_pool
        row = table.row_of(request)
        if row is None:
            return
        self._holdings.check_tokens(request, "kept", kept)
        self._holdings.check_pages(request, "kept", kept)
        start = max(kept, self._holdings.owned_from(self._holdings.of(request)))
        span = Span(request, row, start, int(table.lengths[row]))
        if self._allocator is not None and span.end > span.start:
            self._free_tokens(self._allocator, span)
        self._holdings.forget(request)
        table.free(request)

    def check(self, held: torch.Tensor | None = None, held_states: Sequence[int] | None = None) -> None:
        """Verify that free and live slots and rows add up.

        With `held`, exactly those token slots are live, those of live requests included. With `held_states`,
        exactly those state slots are live beside those of live requests, such as what a prefix cache holds.

        Raises:
            SlotError: names what does not add up, and the owners of state slots that leaked.
        """
        if self._states is not None:
            self._states.check(held_states)
        elif held_states:
            raise SlotError(f"state slots {list(held_states)} are held, but requests have no states in this plan")
        else:
            self.req_to_token_pool.check()
        if self._allocator is not None:
            self._allocator.check(held)

    def clear(self) -> None:
        """Give back every row and slot, and zero every KV buffer."""
        self._give_back_all()
        for pool in self.pools.values():
            pool.clear()

    def close(self, held: torch.Tensor | None = None, held_states: Sequence[int] = ()) -> None:
        """Give everything back at the end; with debug, verify first that only `held` and `held_states` are live.

        Raises:
            SlotError: with debug, names what leaked and whose it is; everything was given back all the same.
        """
        try:
            if self._debug:
                self._check_released()
                self.check(_no_slots() if held is None else held, held_states)
        finally:
            self._give_back_all()

    def _check_released(self) -> None:
        table = self.req_to_token_pool
        if live := table.live_rows():
            named = ", ".join(f"{name!r} ({int(table.lengths[row])} tokens)" for row, name in list(live.items())[:8])
            raise SlotError(f"{len(live)} requests were not released: {named}; release each when it ends")

    def _give_back_all(self) -> None:
        self._holdings.clear()
        self.req_to_token_pool.clear()
        if self._allocator is not None:
            self._allocator.clear()

    def _check_admission(self, request: Hashable, tokens: int, prefix: torch.Tensor | None) -> int:
        """Return the tokens of the prefix, after verifying that such a request can be."""
        table = self.req_to_token_pool
        (count,) = on_host([tokens], "tokens").tolist()
        borrowed, columns = 0 if prefix is None else int(prefix.shape[0]), table.req_to_token.shape[1]
        if table.row_of(request) is not None:
            raise SlotError(f"request {request!r} has a row already; extend it, or release it first")
        if not max(1, borrowed) <= count <= columns:
            raise SlotError(
                f"request {request!r} cannot begin with {count} tokens, {borrowed} of them a prefix: a row has "
                f"{columns} columns"
            )
        self._holdings.check_pages(request, "prefix", borrowed)
        return borrowed

    def _first_slots(
        self, request: Hashable, borrowed: int, tokens: int, prefix: torch.Tensor | None, tail: int | None
    ) -> torch.Tensor | None:
        allocator = self._allocator
        if allocator is None:
            return _no_slots()
        last = self._on_device([-1]) if prefix is None or not borrowed else prefix[-1:]
        lens = self._on_device([borrowed]), [borrowed], self._on_device([tokens]), [tokens]
        if tail is not None and isinstance(allocator, _TakesTails):
            return allocator.alloc_extend_swa_tail(*lens, last, tokens - borrowed, [tail], owners=[request])
        return allocator.alloc_extend(*lens, last, tokens - borrowed, owners=[request])

    def _take_row(self, request: Hashable, arriving: bool) -> int | None:
        table = self.req_to_token_pool
        if arriving and not isinstance(table, _Awaits):
            raise SlotError(f"request {request!r} cannot arrive: the plan is not of role='decode'")
        rows = table.alloc([request], arriving) if isinstance(table, _Awaits) else table.alloc([request])
        return None if rows is None else rows[0]

    def _write_first(self, row: int, slots: torch.Tensor) -> None:
        if self._allocator is not None:
            self.req_to_token_pool.write([row], [0], [slots.shape[0]], slots)

    def _fork(self, request: Hashable, cached_state: int | None) -> None:
        if cached_state is None:
            return
        if self._states is None:
            raise SlotError(f"request {request!r} cannot begin with a state: requests have none in this plan")
        self._states.fork_state(request, cached_state)

    def _take_back(self, request: Hashable, before: object) -> None:
        """Undo an admission that did not come to its end."""
        self._holdings.forget(request)
        if self.req_to_token_pool.row_of(request) is not None:
            self.req_to_token_pool.free(request)
        if self._allocator is not None:
            self._allocator.restore_state(before)

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(on_host(numbers, "slots"), self.req_to_token_pool.req_to_token.device)

    def _free_left(self, rows: list[int], starts: list[int], ends: list[int]) -> None:
        """Give back what left the window: sliding slots, or where every layer slides whole pages."""
        table = self.req_to_token_pool.req_to_token
        if isinstance(self._allocator, _Evicts):
            self._allocator.free_swa_rows(table, rows, starts, ends)
        elif self._allocator is not None:
            page_size = self._allocator.page_size
            firsts, lasts = ([token // page_size * page_size for token in tokens] for tokens in (starts, ends))
            self._allocator.free_rows(table, rows, firsts, lasts)

    def _free_tokens(self, allocator: Allocator, span: Span) -> None:
        if self._debug:
            self._holdings.check_sole([span])
        table = self.req_to_token_pool.req_to_token
        if isinstance(allocator, _Evicts):
            sliding = max(span.start, self._holdings.of(span.request).evicted)
            allocator.free_rows(table, [span.row], [span.start], [span.end], swa_starts=[sliding])
        else:
            allocator.free_rows(table, [span.row], [span.start], [span.end])


def _columns(spans: Sequence[Span]) -> tuple[list[int], list[int], list[int]]:
    return [span.row for span in spans], [span.start for span in spans], [span.end for span in spans]


def _joined(prefix: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat((prefix.to(slots.dtype), slots))


def _no_slots() -> torch.Tensor:
    import torch

    return torch.zeros(0, dtype=torch.int64)


def _slides_whole(plan: CachePlan) -> bool:
    """Return whether the slots that requests are numbered by slide themselves, because every layer does."""
    numbering = plan.outline.numbering
    return numbering is not None and plan.outline.spaces[numbering].window_tokens is not None


def _window(plan: CachePlan) -> int | None:
    """Return the earlier tokens that sliding layers see, if there are such layers."""
    windows = [space.window_tokens for space in plan.outline.spaces.values() if space.window_tokens is not None]
    return max(windows, default=None)


def _measured(tensors: Sequence[Tensors], memory: Sequence[str]) -> int:
    raw = [tensor for part in tensors for kind in memory for tensor in part.storages(kind)]
    return sum(unique_storages(raw).values())
