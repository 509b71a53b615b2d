"""What `build` returns: request pool, allocator and KV pools, and the life of a request across all of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from kvdock.abilities import Awaits, Evicts, HoldsMore, HoldsStates, KeepsStates, KeepsTiers, TakesTails, unshared_by
from kvdock.allocators.debug import held_states as named_states
from kvdock.allocators.lengths import on_host, require_row, to_device, to_host
from kvdock.allocators.window import swa_tail_start
from kvdock.errors import BuildError, SlotError
from kvdock.layout import TARGET
from kvdock.pools.storage import Tensors, measured
from kvdock.requests.holdings import Holdings, Span, columns

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Allocator
    from kvdock.planner import CachePlan
    from kvdock.pools.base import Pool
    from kvdock.requests.base import RequestPool
    from kvdock.unified.memory import UnifiedMemory


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
        memory: UnifiedMemory | None = None,
    ) -> None:
        self.plan = plan
        self.req_to_token_pool = req_to_token_pool
        self.pools = pools
        """Pool of each layer group, drafts' included, by group name."""
        self.drafts = {worker: pool for worker, pool in by_worker.items() if worker != TARGET}
        """What each draft worker sees as its KV pool; request pool and allocator are the target's."""
        self.memory = memory  # the byte buffer that spaces share in unified memory, or None
        self._target = by_worker.get(TARGET)
        self._allocator = allocator
        self._tensors = tuple(tensors)
        self._debug = debug
        self._is_closed = False
        self._slides_whole = _slides_whole(plan)
        # What the parts can do is asked once: a protocol is looked up method by method.
        self._evicts = allocator if isinstance(allocator, Evicts) else None
        self._tiers = allocator if isinstance(allocator, KeepsTiers) else None
        self._tails = allocator if isinstance(allocator, TakesTails) else None
        self._more = allocator if isinstance(allocator, HoldsMore) else None
        self._awaits = req_to_token_pool if isinstance(req_to_token_pool, Awaits) else None
        self._gives_early = self._slides_whole or self._evicts is not None or self._tiers is not None
        self._tail_tokens = None if self._tails is None else _window(plan)
        self._page_size = 1 if allocator is None else allocator.page_size
        self._holdings = Holdings(req_to_token_pool, self._page_size, self._slides_whole, unshared_by(allocator))
        self._states = req_to_token_pool if isinstance(req_to_token_pool, HoldsStates) else None
        self._state_pools = [pool for pool in pools.values() if isinstance(pool, KeepsStates)]

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
        return measured(self._tensors, ("device",))

    def host_bytes(self) -> int:
        """Return the same for host memory, pinned or not."""
        return measured(self._tensors, ("host", "pinned"))

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
            request: any hashable id but ``None`` that has no row.
            tokens: tokens of its prompt, those of the prefix included.
            prefix: slots ``[n]`` of whole pages that another holds, as in `hold_prefix`.
            evicted: of the prefix, the first tokens whose sliding slots were given back before.
            cached_state: the state slot, such as a prefix cache's, with whose state it begins.
            arriving: its KV is still arriving (role decode); the request pool's `start` lets it run. Sliding
                layers get slots for the newest tokens alone, those that the next one sees; with a host tier
                all of it arrives on the host.

        Raises:
            SlotError: the request has a row, what is asked for cannot be, or the cache is closed; with debug, slots
                of `prefix` are not live.
        """
        self._check_asked(request, cached_state, arriving)
        tokens, borrowed = self._check_admission(request, tokens, prefix, evicted)
        allocator = self._allocator
        before = None if allocator is None else allocator.backup_state()
        tail = self._tail_tokens if arriving else None
        try:
            slots = self._first_slots(request, borrowed, tokens, prefix, tail, arriving)
            row = None if slots is None else self._take_row(request, arriving)
            if slots is not None and row is not None:
                self._write_first(row, prefix, slots)
                gone = 0 if tail is None else swa_tail_start(tokens, tail, self._page_size)
                gone = tokens if arriving and self._tiers is not None else gone
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
        slot: at most one call of each in every pool of states, and no wait. Nothing to do without states. After
        any error a second call does what is left, and nothing twice.
        """
        if self._states is None:
            return
        for pool, due in zip(self._state_pools, self._states.due_states(len(self._state_pools)), strict=True):
            due.make_ready(pool, self._on_device)

    def hold_prefix(self, request: Hashable, borrowed: int = 0, evicted: int = 0) -> None:
        """Say what of a request's first tokens is not its own, after they were written to its row.

        The slots of the first `borrowed` tokens (whole pages) belong to another holder, such as the request
        that wrote them or a prefix cache: `evict` and `release` leave them alone, both sides of them. The
        sliding slots of the first `evicted` tokens were given back before. Both numbers only grow while the
        request lives, so a request whose own tokens are taken over calls this, too.

        Raises:
            SlotError: the request has no row or did not write as much, `borrowed` is no whole number of pages, or
                requests share nothing in this plan; with debug, slots of the prefix are not live, or some that were
                evicted still are. Nothing changes.
        """
        if self._debug:
            self._check_held(request, borrowed, evicted)
        self._holdings.hold(request, borrowed, evicted)

    def evict(self, requests: Sequence[Hashable], ends: Sequence[int]) -> None:
        """Give back the sliding slots of each request's tokens before ``ends[i]``, which have left the window.

        A page goes back whole, together with its last token; how far each request came is remembered for
        `release`. Where every layer slides it is the request's only slots that go back. With a host tier it is
        the device slots of tokens that were copied to the host. Nothing is given back where there is neither.
        Never waits for the device.

        Raises:
            SlotError: a request has no row or is named twice, or an end is not from 0 to what it wrote; with
                debug, another borrows tokens that did not leave its window yet, as far as this was called for
                it. Nothing changes.
        """
        if self._tiers is not None:
            ends = (on_host(ends, "ends") // self._page_size * self._page_size).tolist()
        spans = self._holdings.due(requests, ends)
        if not self._gives_early:
            return
        if self._debug:
            self._holdings.check_sole(spans)
            self._holdings.check_lent(spans, dict(zip(requests, ends, strict=True)))
        if spans:
            self._free_left(*columns(spans))
            self._holdings.evict(spans)
        if self._debug:
            self._holdings.leave(requests, ends)

    def truncate(self, requests: Sequence[Hashable], lengths: Sequence[int]) -> None:
        """Forget what each request wrote from ``lengths[i]`` on: its slots were taken back, or freed by the caller.

        Call it after `restore_state`, or a request would give back slots that are others' by then.

        Raises:
            SlotError: a request has no row or is named twice, a length is not from 0 to what it wrote, or
                what would be forgotten was evicted or is another's; with debug, another borrows it. Nothing changes.
        """
        self._holdings.check_truncate(requests, lengths)
        if self._debug:
            self._holdings.check_lent(self._holdings.tails(requests, lengths))
        self.req_to_token_pool.truncate(requests, lengths)

    def trim(self, requests: Sequence[Hashable], lengths: Sequence[int]) -> int:
        """Cut each request to ``lengths[i]`` tokens and give back the pages that lie wholly beyond; return the slots.

        For what speculation took ahead: draft tokens that were not accepted. The page in which the last token
        lies stays, and the next tokens fill it. One call of the allocator, and no wait.

        Raises:
            SlotError: a request has no row or is named twice, a length is not from 0 to what it wrote, or
                what would be given back was evicted or is another's; with debug, another borrows it. Nothing changes,
                and after any other error the call can be made again.
        """
        self._holdings.check_truncate(requests, lengths)
        spans = self._holdings.tails(requests, lengths)
        if self._debug and self._allocator is not None and spans:
            self._check_given(spans)
        table = self.req_to_token_pool
        before = {row: int(table.lengths[row]) for row in map(table.row_of, requests) if row is not None}
        try:
            table.truncate(requests, lengths)  # before the slots go back: they are others' from then on
            if self._allocator is not None and spans:
                self._allocator.free_rows(table.req_to_token, *columns(spans))
        except BaseException:
            table.lengths[list(before)] = list(before.values())
            raise
        return sum(self._holdings.slots_in(span) for span in spans)

    def release(self, request: Hashable, kept: int = 0) -> None:
        """Free all that a request owns, everywhere: token slots, row, state and track slots. A second call does nothing.

        The slots of its first `kept` tokens (whole pages) stay with whoever took them over, such as a prefix
        cache; so do those that `hold_prefix` named.

        Raises:
            SlotError: `kept` is not from 0 to what the request wrote, no whole number of pages, or above 0 where
                requests share nothing; slots are freed that are not live or another's; with debug, another borrows
                them. The request keeps its row. After any error a second call frees what is left, and nothing twice;
                what the first was told to keep stays kept, unless it refused and nothing changed.
        """
        table = self.req_to_token_pool
        row = table.row_of(request)
        if row is None:
            return
        self._holdings.check_tokens(request, "kept", kept)
        self._holdings.check_pages(request, "kept", kept)
        start = max(int(kept), self._holdings.owned_from(self._holdings.of(request)))
        span = Span(request, row, start, int(table.lengths[row]))
        self._free_tokens(span)
        try:
            if self._more is not None:
                self._more.release(request)
            table.free(request)
        except BaseException:
            if table.row_of(request) is not None:
                self._holdings.hold(request, start, 0)
                table.truncate([request], [start])  # its tokens went back, so a second call frees the rest alone
            raise
        self._holdings.forget(request)

    def check(self, held: torch.Tensor | None = None, held_states: Sequence[int] | None = None) -> None:
        """Verify that free and live slots and rows add up.

        With `held`, exactly those token slots are live, those of live requests included: every slot, or of each
        page any of them, and each once. What an open free group holds may be among them or not. With `held_states`,
        exactly those state slots are live beside those of live requests, such as what a prefix cache holds.

        Raises:
            SlotError: names what does not add up, and the owners of state slots that leaked; what is held is named
                twice, does not exist or is no whole number.
        """
        if self._states is not None:
            self._states.check(held_states)
        elif held_states is not None and (named := named_states(held_states)):
            raise SlotError(f"state slots {named} are held, but requests have no states in this plan")
        else:
            self.req_to_token_pool.check()
        if self._allocator is not None:
            self._allocator.check(held)

    def clear(self) -> None:
        """Give back every row and slot, and zero every KV buffer; with debug, refused while a gate or forward is not over."""
        if self._debug and self.memory is not None:
            self.memory.require_open()
        self._give_back_all()
        for pool in self.pools.values():
            pool.clear()
        if self.memory is not None:
            self.memory.zero()

    def close(self, held: torch.Tensor | None = None, held_states: Sequence[int] = ()) -> None:
        """Give everything back at the end; with debug, verify first that only `held` and `held_states` are live.

        No request is admitted any more.

        Raises:
            SlotError: with debug, names what leaked and whose it is; everything was given back all the same.
        """
        try:
            if self._debug:
                self._check_released()
                self.check(_no_slots() if held is None else held, held_states)
        finally:
            self._give_back_all()
            self._is_closed = True

    def _check_released(self) -> None:
        table = self.req_to_token_pool
        if live := table.live_rows():
            named = ", ".join(f"{name!r} ({int(table.lengths[row])} tokens)" for row, name in list(live.items())[:8])
            raise SlotError(f"{len(live)} requests were not released: {named}; release each when it ends")
        if self.memory is not None:
            self.memory.require_open()

    def _give_back_all(self) -> None:
        self.req_to_token_pool.clear()
        if self._allocator is not None:
            self._allocator.clear()
        self._holdings.clear()

    def _check_asked(self, request: Hashable, cached_state: int | None, arriving: bool) -> None:
        """Refuse what this plan never serves, however much is free."""
        if arriving and self._awaits is None:
            raise SlotError(f"request {request!r} cannot arrive: the plan is not of role='decode'")
        if cached_state is not None and self._states is None:
            raise SlotError(f"request {request!r} cannot begin with a state: requests have none in this plan")

    def _check_admission(
        self, request: Hashable, tokens: int, prefix: torch.Tensor | None, evicted: int
    ) -> tuple[int, int]:
        """Return the tokens of the request and of its prefix, after verifying that such a request can be."""
        table = self.req_to_token_pool
        if self._is_closed:
            raise SlotError(f"request {request!r} cannot be admitted: the cache is closed; build another from its plan")
        count, gone = on_host([tokens, evicted], "tokens and evicted").tolist()
        if prefix is not None:
            require_row("prefix", prefix)
        borrowed, columns = 0 if prefix is None else int(prefix.shape[0]), table.req_to_token.shape[1]
        if table.row_of(request) is not None:
            raise SlotError(f"request {request!r} has a row already; extend it, or release it first")
        if not max(1, borrowed) <= count <= columns:
            raise SlotError(
                f"request {request!r} cannot begin with {count} tokens, {borrowed} of them a prefix: a row has "
                f"{columns} columns"
            )
        if not 0 <= gone <= borrowed:
            raise SlotError(f"request {request!r}: evicted={gone} is no part of its prefix of {borrowed} tokens")
        self._holdings.check_pages(request, "prefix", borrowed)
        if self._debug and prefix is not None:
            self._check_live(request, prefix, gone)
        return count, borrowed

    def _check_live(self, request: Hashable, prefix: torch.Tensor, gone: int) -> None:
        """Verify that the slots of a prefix are live, but for those of `gone` tokens; slow, for debug mode."""
        import numpy as np

        size = self._page_size
        slots = prefix[gone // size * size if self._slides_whole else 0 :]
        live = None if self._allocator is None else self._allocator.live_pages()
        if self._allocator is None or live is None:
            return
        numbers = to_host(slots)
        if len(dead := numbers[~np.isin(numbers // size, live)]):
            raise SlotError(
                f"request {request!r} cannot borrow slots {dead[:8].tolist()} ({len(dead)} in all) of its prefix, which "
                "are not live: they were freed, or never handed out; nothing was changed"
            )
        try:
            self._allocator.verify_live(slots)
        except SlotError as error:
            raise SlotError(f"request {request!r} cannot borrow its prefix: {error}") from error

    def _check_held(self, request: Hashable, borrowed: int, evicted: int) -> None:
        """Verify that what a request says to borrow is live; slow, for debug mode."""
        holding = self._holdings.of(request)
        self._holdings.check_tokens(request, "borrowed", borrowed)
        self._holdings.check_tokens(request, "evicted", evicted)
        prefix = self.req_to_token_pool.req_to_token[holding.row, : int(borrowed)]
        self._check_live(request, prefix, max(holding.evicted, int(evicted)))
        if self._gives_early and self._allocator is not None:
            self._allocator.verify_gone(self._holdings.gone_slots(request, int(borrowed), int(evicted)), request)

    def _check_given(self, spans: Sequence[Span]) -> None:
        """Verify that nobody else owns or borrows what is given back; slow, for debug mode."""
        self._holdings.check_sole(spans)
        self._holdings.check_lent(spans)

    def _first_slots(
        self,
        request: Hashable,
        borrowed: int,
        tokens: int,
        prefix: torch.Tensor | None,
        tail: int | None,
        arriving: bool,
    ) -> torch.Tensor | None:
        allocator = self._allocator
        if allocator is None:
            return _no_slots()
        last = self._on_device([-1]) if prefix is None or not borrowed else prefix[-1:]
        lens = self._on_device([borrowed]), [borrowed], self._on_device([tokens]), [tokens]
        if tail is not None and self._tails is not None:
            return self._tails.alloc_extend_swa_tail(*lens, last, tokens - borrowed, [tail], owners=[request])
        if arriving and self._tiers is not None:
            return self._tiers.alloc_logical_extend(*lens, last, tokens - borrowed, owners=[request])
        return allocator.alloc_extend(*lens, last, tokens - borrowed, owners=[request])

    def _take_row(self, request: Hashable, arriving: bool) -> int | None:
        awaits = self._awaits
        rows = self.req_to_token_pool.alloc([request]) if awaits is None else awaits.alloc([request], arriving)
        return None if rows is None else rows[0]

    def _write_first(self, row: int, prefix: torch.Tensor | None, slots: torch.Tensor) -> None:
        import torch

        if self._allocator is not None:
            found = slots if prefix is None else torch.cat((prefix.to(slots.dtype), slots))
            self.req_to_token_pool.write([row], [0], [found.shape[0]], found)

    def _fork(self, request: Hashable, cached_state: int | None) -> None:
        if cached_state is not None and self._states is not None:
            self._states.fork_state(request, cached_state)

    def _take_back(self, request: Hashable, before: object) -> None:
        """Undo an admission that did not come to its end."""
        self._holdings.forget(request)
        try:
            if self.req_to_token_pool.row_of(request) is not None:
                self.req_to_token_pool.free(request)
        finally:
            if self._allocator is not None:
                self._allocator.restore_state(before)

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(on_host(numbers, "slots"), self.req_to_token_pool.req_to_token.device)

    def _free_left(self, rows: list[int], starts: list[int], ends: list[int]) -> None:
        """Give back what left the window: sliding slots, or where every layer slides whole pages."""
        table = self.req_to_token_pool.req_to_token
        if self._evicts is not None:
            self._evicts.free_swa_rows(table, rows, starts, ends)
        elif self._tiers is not None:
            self._tiers.free_device_rows(table, rows, starts, ends)
        elif self._allocator is not None:
            page_size = self._allocator.page_size
            firsts, lasts = ([token // page_size * page_size for token in tokens] for tokens in (starts, ends))
            self._allocator.free_rows(table, rows, firsts, lasts)

    def _free_tokens(self, span: Span) -> None:
        """Give back the slots of tokens; after an error that is no refusal, those before them stay with others."""
        if self._allocator is None or span.end <= span.start:
            return
        if self._debug:
            self._check_given([span])
        table = self.req_to_token_pool.req_to_token
        begin = max(span.start, self._holdings.of(span.request).evicted)
        sides = {"swa_starts": self._evicts, "device_starts": self._tiers}
        begins = {name: [begin] for name, side in sides.items() if side is not None}
        try:
            self._allocator.free_rows(table, [span.row], [span.start], [span.end], **begins)
        except BaseException as error:
            if not isinstance(error, SlotError):
                self._holdings.hold(span.request, span.start, 0)
            raise


def _no_slots() -> torch.Tensor:
    import torch

    return torch.zeros(0, dtype=torch.int64)


def _slides_whole(plan: CachePlan) -> bool:
    """Return whether the slots that requests are numbered by slide themselves, because every layer does."""
    numbering = plan.outline.numbering
    return numbering is not None and plan.outline.spaces[numbering].window_tokens is not None


def _window(plan: CachePlan) -> int | None:
    """Return the earlier tokens that sliding layers see, if there are such layers."""
    return max((s.window_tokens for s in plan.outline.spaces.values() if s.window_tokens is not None), default=None)
