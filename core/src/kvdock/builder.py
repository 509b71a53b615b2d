"""`CachePlan` → live request pool, allocators and KV pools: the only place that allocates."""

from __future__ import annotations

import os
import traceback
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvdock.errors import BuildError
from kvdock.layout import TARGET
from kvdock.planned import Parts
from kvdock.plugins import resolve
from kvdock.pools.storage import Tensors, allocate, allocate_overlays, unique_storages
from kvdock.requests.holdings import Holdings, Span
from kvdock.storages import bytes_of

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Allocator
    from kvdock.kernels.interface import Kernels
    from kvdock.outline import Choice, PoolChoice
    from kvdock.planner import CachePlan
    from kvdock.pools.base import Pool
    from kvdock.requests.base import RequestPool

DEBUG_VARIABLE = "KVDOCK_DEBUG"
"""Environment variable that turns debug mode on when it is ``1``."""


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
        self._slides_whole = allocator is not None and _slides_whole(plan, allocator)
        page_size = 1 if allocator is None else allocator.page_size
        self._holdings = Holdings(req_to_token_pool, page_size, self._slides_whole)

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
        self._free_left([span.row for span in spans], [span.start for span in spans], [span.end for span in spans])
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

    def release(self, request: Hashable, kept: int = 0) -> None:
        """Free all that a request owns, everywhere: its token slots and its row. A second call does nothing.

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

    def check(self, held: torch.Tensor | None = None) -> None:
        """Verify that free and live slots and rows add up, and that exactly the slots `held` are live if given.

        Raises:
            SlotError: names what does not add up.
        """
        self.req_to_token_pool.check()
        if self._allocator is not None:
            self._allocator.check(held)

    def clear(self) -> None:
        """Give back every row and slot, and zero every KV buffer."""
        self._holdings.clear()
        self.req_to_token_pool.clear()
        if self._allocator is not None:
            self._allocator.clear()
        for pool in self.pools.values():
            pool.clear()

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


def _slides_whole(plan: CachePlan, allocator: Allocator) -> bool:
    """Return whether the slots that requests are numbered by slide themselves, because every layer does."""
    numbering = plan.outline.numbering
    slides = numbering is not None and plan.outline.spaces[numbering].window_tokens is not None
    return slides and not isinstance(allocator, _Evicts)


def build(
    plan: CachePlan, device: str | torch.device | None = None, group: Any = None, debug: bool | None = None
) -> KVCache:
    """Allocate what `plan` says, to the byte, and return it alive.

    Args:
        plan: a plan that was made here or read from a file.
        device: where to build. Default: the device that was planned for, if it is here; ``cpu`` and
            ``meta`` (no device memory) may be asked for whatever the plan is for.
        group: a `torch.distributed` process group whose ranks must have plans of the same sizes.
        debug: check every call and name the request in errors. Default: whether ``KVDOCK_DEBUG`` is 1.

    Raises:
        BuildError: torch or the device is not here, the memory is not there, ranks disagree, or what was
            built is not what was planned. Nothing stays allocated.
    """
    _need_torch()
    where = _find_device(plan, device)
    _check_plan(plan)
    if group is not None:
        _check_ranks(plan, where, group)
    chosen = os.environ.get(DEBUG_VARIABLE) == "1" if debug is None else debug
    try:
        return _assembled(plan, where, chosen, group)
    except BaseException as error:
        # Whoever keeps the error would keep the frames, and with them every tensor that was made so far.
        traceback.clear_frames(error.__traceback__)
        raise


def _assembled(plan: CachePlan, device: torch.device, debug: bool, group: Any) -> KVCache:
    cache = _Assembly(plan, device, debug, group).cache()
    _verify(cache)
    return cache


class _Assembly:
    """A cache in the making: request pool, inner allocators, the engine's allocator, pools, routers."""

    def __init__(self, plan: CachePlan, device: torch.device, debug: bool, group: Any) -> None:
        self.plan = plan
        self.device = device
        self.debug = debug
        self.group = group
        self.kernels = _kernels(plan, device)
        self.tensors: list[Tensors] = []
        buffers, spaces, step = plan.outline.buffers, plan.outline.spaces, plan.device.granularity_bytes
        self.overlays = allocate_overlays(buffers, plan.sizes, spaces, device, step)
        self.allocators: dict[str, Allocator] = {}
        self.pools: dict[str, Pool] = {}

    def cache(self) -> KVCache:
        """Return what the plan describes."""
        outline = self.plan.outline
        choice = outline.request_pool
        requests = choice.cls(choice.query, self._parts(choice))
        engine = self._allocators(requests)
        for pool in outline.pools:
            self.pools[pool.name] = self._pool(pool, requests, engine)
        routers = {worker: self._pool(router, requests, engine) for worker, router in outline.routers.items()}
        return KVCache(self.plan, requests, engine, self.pools, self._by_worker(routers), self.tensors, self.debug)

    def _allocators(self, requests: RequestPool) -> Allocator | None:
        """Make the allocator of each space, then the one that keeps them in step; return the engine's."""
        engine: Allocator | None = None
        for choice in self.plan.outline.allocators:
            inner = dict(self.allocators) if len(choice.query.spaces) > 1 else {}
            # The request table holds slots of one numbering; an inner allocator of another has no use for it.
            is_numbering = self.plan.outline.numbering in {space.name for space in choice.query.spaces}
            parts = self._parts(choice, request_pool=requests if is_numbering else None, allocators=inner)
            engine = choice.cls(choice.query, parts)
            if len(choice.query.spaces) == 1:
                self.allocators[choice.query.spaces[0].name] = engine
        return engine

    def _pool(self, choice: PoolChoice, requests: RequestPool, engine: Allocator | None) -> Pool:
        own = (
            {group.name: self.pools[group.name] for group in choice.query.groups} if choice.query.group is None else {}
        )
        parts = self._parts(
            choice, request_pool=requests, allocator=engine, allocators=dict(self.allocators), pools=own
        )
        return choice.cls(choice.query, parts)

    def _parts(self, choice: Choice, **links: Any) -> Parts:
        """Allocate the buffers of a choice and wrap them with what its class may need."""
        plan = self.plan
        step = plan.device.granularity_bytes
        tensors = allocate(choice.buffers, plan.sizes, plan.outline.spaces, self.device, step, self.overlays)
        self.tensors.append(tensors)
        return Parts(
            tensors=tensors,
            kernels=self.kernels,
            device=self.device,
            sizes=plan.sizes,
            debug=self.debug,
            group=self.group,
            **links,
        )

    def _by_worker(self, routers: dict[str, Pool]) -> dict[str, Pool]:
        """Return what each worker sees: its router, or the pool of its only group."""
        found: dict[str, Pool] = {}
        for choice in self.plan.outline.pools:
            if choice.worker in found and choice.worker not in routers:
                raise BuildError(
                    f"worker {choice.worker!r} has several layer groups and the plan names no pool that routes; "
                    "answer get_pool_cls where query.group is None"
                )
            found[choice.worker] = self.pools[choice.name]
        return found | routers


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise BuildError(f"building needs torch ({error}); install it with: pip install 'kvdock[torch]'") from error


def _kernels(plan: CachePlan, device: torch.device) -> Kernels:
    """Return the kernels of the planned device where it is used, else torch's own."""
    from kvdock.kernels.reference import ReferenceKernels

    if device.type != plan.device.device_type:
        return ReferenceKernels()
    outline = plan.outline
    found = resolve.kernels(outline.registry, plan.device, outline.options.values.prefer or ())
    return found if found is not None else ReferenceKernels()


def _find_device(plan: CachePlan, device: str | torch.device | None) -> torch.device:
    """Return where to build.

    Raises:
        BuildError: the device is of another type than the plan's, or not here.
    """
    import torch

    planned, index = plan.device.device_type, plan.device.index
    asked = device if device is not None else planned if index is None or planned == "cpu" else f"{planned}:{index}"
    advice = "give device='cpu' to build it in host memory, or 'meta' to build it without memory"
    try:
        where = torch.device(asked)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise BuildError(f"torch knows no device {str(asked)!r} here ({reason}); {advice}") from error
    if where.type not in (planned, "cpu", "meta"):
        raise BuildError(f"the plan is for {plan.device.name} ({planned}), not for {str(asked)!r}; {advice}")
    if not _is_here(where):
        raise BuildError(f"the plan is for {plan.device.name}, and torch finds no {str(where)!r} here; {advice}")
    return where


def _is_here(device: torch.device) -> bool:
    import torch

    if device.type in ("cpu", "meta"):
        return True
    backend = getattr(torch, device.type, None)
    return backend is not None and backend.is_available() and (device.index or 0) < backend.device_count()


def _check_plan(plan: CachePlan) -> None:
    """Verify that the plan's sizes and totals belong together, before anything is allocated.

    Raises:
        BuildError: they do not.
    """
    step = plan.device.granularity_bytes
    needed = dict.fromkeys(("device", "host", "pinned"), 0)
    buffers = plan.outline.buffers
    for buffer, nbytes in zip(buffers, bytes_of(buffers, plan.outline.spaces, plan.sizes, step), strict=True):
        needed[buffer.memory] += nbytes
    _compare(plan, needed["device"], needed["host"] + needed["pinned"], "its sizes take")


def _verify(cache: KVCache) -> None:
    """Verify that what was built has the bytes and the sizes of the plan.

    Raises:
        BuildError: it has not.
    """
    plan = cache.plan
    _compare(plan, cache.allocated_bytes(), cache.host_bytes(), "the tensors take")
    found = {"requests": (cache.req_to_token_pool.size, plan.max_running_requests)}
    if plan.outline.allocators:
        found["tokens"] = (cache.token_to_kv_pool_allocator.size, plan.max_total_num_tokens)
    for what, (built, planned) in found.items():
        if built != planned:
            raise BuildError(f"{built} {what} were built but {planned} planned; a class must take its size from Parts")


def _compare(plan: CachePlan, device_bytes: int, host_bytes: int, subject: str) -> None:
    for memory, found, planned in (
        ("device", device_bytes, plan.total_bytes),
        ("host", host_bytes, plan.host_bytes),
    ):
        if found != planned:
            raise BuildError(
                f"the plan counts {planned:,} bytes of {memory} memory, but {subject} {found:,}; "
                "build a plan as it was made, and plan again to change a size (plan.replan)"
            )


def _measured(tensors: Sequence[Tensors], memory: Sequence[str]) -> int:
    raw = [tensor for part in tensors for kind in memory for tensor in part.storages(kind)]
    return sum(unique_storages(raw).values())


def _check_ranks(plan: CachePlan, device: torch.device, group: Any) -> None:
    """Verify in one collective call that every rank of `group` planned the same tokens and requests.

    Raises:
        BuildError: they differ.
    """
    import torch
    from torch import distributed

    here = torch.device("cpu") if distributed.get_backend(group) == "gloo" else device
    own = torch.tensor([plan.max_total_num_tokens, plan.max_running_requests], dtype=torch.int64, device=here)
    both = torch.cat([own, -own])
    distributed.all_reduce(both, op=distributed.ReduceOp.MIN, group=group)
    least_tokens, least_requests, most_tokens, most_requests = both.tolist()
    if (least_tokens, least_requests) != (-most_tokens, -most_requests):
        raise BuildError(
            f"the ranks planned {least_tokens} to {-most_tokens} tokens and {least_requests} to {-most_requests} "
            f"requests; plan all of them for cap_tokens={least_tokens} and max_running_requests={least_requests}"
        )
