"""Inner calls that fail, each of them in turn: the call around them changes nothing, and can be made again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from unittest import mock

from kvdock.abilities import Awaits
from kvdock.layout import Unit

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Allocator
    from kvdock.cache import KVCache

Found = TypeVar("Found")
Way = Literal["before", "after", "operator"]
"""An inner call fails before it did anything, after it did all, or at any operator of torch."""

_MOST = 1000
_TAKE = ("alloc", "alloc_pages", "alloc_extend", "alloc_extend_swa_tail", "alloc_decode")
_GIVE = ("free", "free_pages", "free_rows", "free_swa_pages", "free_swa_rows", "free_group_begin", "free_group_end")
_MAP = ("_write", "_erase")
_ROWS = ("alloc", "free", "write", "truncate")


class Broken(Exception):
    """What an inner call raises."""


class Fuse:
    """Burns at the n-th inner call."""

    def __init__(self, way: Way, place: int) -> None:
        self.way = way
        self.left = place

    def burn(self) -> bool:
        """Count a call, and return whether it is the one that fails."""
        self.left -= 1
        return self.left == 0

    def wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return an inner call that fails when its turn comes."""

        def call(*arguments: Any, **named: Any) -> Any:
            if not self.burn():
                return real(*arguments, **named)
            if self.way == "after":
                real(*arguments, **named)
            raise Broken

        return call


def parts_of(allocator: Allocator) -> Iterator[tuple[str, Allocator]]:
    """Yield every allocator that one drives, by its space; one that drives none alone."""
    tiers: Mapping[str, Allocator] = getattr(allocator, "_tiers", {})
    if not tiers:
        yield getattr(allocator, "space", ""), allocator
    for part in tiers.values():
        yield from parts_of(part)


def books(cache: KVCache) -> list[object]:
    """Return what a cache holds: free and live pages in their order, maps of live pages, tables, rows and states."""
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    found: list[object] = []
    for space, part in parts_of(allocator):
        ring: Any = getattr(part, "_ring", None)
        found += [space, part.available_size(), part.live_pages(), getattr(part, "_group", None) is None]
        found.append(None if ring is None else ring.peek(ring.free).tolist())
    live = allocator.live_pages() or []
    for buffer in allocator.buffers(allocator.query):
        rows = allocator.parts.tensors.rows(buffer.name)
        if buffer.role == "map":
            by_page = rows if buffer.unit is Unit.PAGE else rows.view(-1, allocator.page_size)
            found.append((buffer.name, by_page[live].tolist()))
        elif buffer.role == "table":
            found.append((buffer.name, rows.tolist()))
    for row, request in table.live_rows().items():
        length = int(table.lengths[row])
        found.append((request, row, length, table.req_to_token[row, :length].tolist(), cache._holdings.of(request)))
    states: Any = getattr(table, "states", None)
    return found if states is None else [*found, states.live_slots(), states.available_size()]


class Failing:
    """Makes calls of a cache so that each inner call fails once, then without a failure."""

    def __init__(self, cache: KVCache, way: Way) -> None:
        self.cache = cache
        self.way: Way = way
        self.failures = 0
        """Calls that failed so far."""

    def __call__(self, call: Callable[[], Found], is_whole: bool = True) -> Found:
        """Return what a call returns after each of its inner calls failed once; what it then changed stays as it was.

        Without `is_whole` a call that failed may have done a part of its work, which the next one finishes.

        Raises:
            AssertionError: something changed.
        """
        before = books(self.cache)
        for place in range(1, _MOST):
            fuse = Fuse(self.way, place)
            try:
                with self._armed(fuse):
                    return call()
            except Broken:
                self.failures += 1
                if is_whole and (after := books(self.cache)) != before:
                    changed = [(old, new) for old, new in zip(before, after, strict=False) if old != new]
                    raise AssertionError(f"inner call {place} failed, and changed what was held: {changed}") from None
        raise AssertionError("a call has no end")

    @contextmanager
    def _armed(self, fuse: Fuse) -> Iterator[None]:
        with ExitStack() as patches:
            if fuse.way == "operator":
                patches.enter_context(_operators(fuse))
            else:
                for part, name in self._inner():
                    real = getattr(part, name)
                    patches.enter_context(mock.patch.object(part, name, fuse.wrapped(real)))
            yield

    def _inner(self) -> list[tuple[object, str]]:
        """Return the inner calls: what composites do with their parts and maps, and with rows and states of requests."""
        outer, table = self.cache.token_to_kv_pool_allocator, self.cache.req_to_token_pool
        found: list[tuple[object, str]] = [(table, name) for name in _ROWS]
        states: Any = getattr(table, "states", None)
        if states is not None:
            found += [(states, name) for name in ("alloc", "free")]
        waiting, composites = list(getattr(outer, "_tiers", {}).values()), [outer]
        while waiting:
            part = waiting.pop()
            found += [(part, name) for name in (*_TAKE, *_GIVE) if hasattr(part, name)]
            if inner := list(getattr(part, "_tiers", {}).values()):
                composites.append(part)
                waiting += inner
        beside = getattr(outer, "_beside", None)
        found += [(beside, "write")] if beside is not None else []
        return found + [(part, name) for part in composites for name in _MAP if hasattr(part, name)]


@contextmanager
def _operators(fuse: Fuse) -> Iterator[None]:
    """Let an operator of torch fail in turn."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if fuse.burn():
                raise Broken
            return func(*args, **(kwargs or {}))

    with Operators():  # type: ignore[no-untyped-call]
        yield


class Life:
    """The calls that a request's life consists of, each made through `Failing`; slots go where an engine writes them."""

    def __init__(self, cache: KVCache, way: Way) -> None:
        self.cache = cache
        self.attempt = Failing(cache, way)
        self.allocator = cache.token_to_kv_pool_allocator
        self.table = cache.req_to_token_pool
        self.page_size = self.allocator.page_size

    def slots(self, request: Hashable) -> torch.Tensor:
        """Return the slots of a request's tokens, int64."""
        row = self.table.row_of(request)
        assert row is not None
        return self.table.req_to_token[row, : int(self.table.lengths[row])].long()

    def admit(self, request: Hashable, tokens: int, **how: Any) -> None:
        """Admit a request; one that arrives runs then."""
        found = self.attempt(lambda: self.cache.admit(request, tokens, **how))
        assert found is not None
        if how.get("arriving") and isinstance(self.table, Awaits):
            self.table.start([request])

    def grow(self, request: Hashable, tokens: int) -> None:
        """Let a request grow by so many tokens at once, as chunked prefill and drafts do."""
        slots = self.attempt(self._extend(request, tokens))
        assert slots is not None
        self._write(request, slots)

    def decode(self, requests: Sequence[Hashable], steps: int) -> None:
        """Let requests grow by a token a step."""
        import torch

        for _ in range(steps):
            had = [self.slots(request) for request in requests]
            lens = [len(slots) + 1 for slots in had]
            last = torch.stack([slots[-1] for slots in had])
            batch = torch.tensor(lens), lens, last, list(requests)
            slots = self.attempt(lambda batch=batch: self.allocator.alloc_decode(*batch))  # type: ignore[misc]
            assert slots is not None
            for request, slot in zip(requests, slots, strict=True):
                self._write(request, slot.view(1))

    def retract(self, request: Hashable, tokens: int) -> None:
        """Take back what a request was given, and let it be shorter again."""
        length, before = len(self.slots(request)), self.allocator.backup_state()
        slots = self._extend(request, tokens)()
        assert slots is not None
        self._write(request, slots)
        self.attempt(lambda: self.allocator.restore_state(before))
        self.cache.truncate([request], [length])

    def evict(self, requests: Sequence[Hashable], ends: Sequence[int]) -> None:
        """Give back what left the window."""
        self.attempt(lambda: self.cache.evict(requests, ends))

    def trim(self, requests: Sequence[Hashable], lengths: Sequence[int]) -> None:
        """Give back what was taken ahead."""
        self.attempt(lambda: self.cache.trim(requests, lengths))

    def hold_prefix(self, request: Hashable, borrowed: int, evicted: int = 0) -> None:
        """Say what of a request is another's."""
        self.attempt(lambda: self.cache.hold_prefix(request, borrowed, evicted))

    def release(self, request: Hashable, kept: int = 0) -> None:
        """Let a request end: a second call does what is left."""
        self.attempt(lambda: self.cache.release(request, kept), is_whole=False)

    def release_in_a_group(self, requests: Sequence[Hashable]) -> None:
        """Let requests end in one free group."""
        self.attempt(self.allocator.free_group_begin)
        for request in requests:
            self.release(request)
        self.attempt(self.allocator.free_group_end)

    def end(self) -> None:
        """Verify that nothing is held any more, and that something failed on the way."""
        import torch

        self.cache.check(torch.zeros(0, dtype=torch.int64))
        assert not self.table.live_rows()
        assert self.attempt.failures

    def _extend(self, request: Hashable, tokens: int) -> Callable[[], torch.Tensor | None]:
        import torch

        had = self.slots(request)
        prefix, seq = [len(had)], [len(had) + tokens]
        lens = torch.tensor(prefix), prefix, torch.tensor(seq), seq
        return lambda: self.allocator.alloc_extend(*lens, had[-1:], tokens, [request])

    def _write(self, request: Hashable, slots: torch.Tensor) -> None:
        row = self.table.row_of(request)
        assert row is not None
        start = int(self.table.lengths[row])
        self.table.write([row], [start], [start + len(slots)], slots)
