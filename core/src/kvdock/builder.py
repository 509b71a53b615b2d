"""`CachePlan` → live request pool, allocators and KV pools: the only place that allocates."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kvdock.cache import KVCache
from kvdock.errors import BuildError
from kvdock.layout import TARGET, round_up
from kvdock.planned import Parts
from kvdock.plugins import resolve
from kvdock.pools.storage import (
    SharedBuffer,
    Tensors,
    Within,
    allocate,
    allocate_overlays,
    unique_storages,
    zeros,
)
from kvdock.storages import SHARED, bytes_of
from kvdock.unified import UnifiedMemory
from kvdock.unified.geometry import page_layouts

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Allocator
    from kvdock.kernels.interface import Kernels
    from kvdock.layout import Buffer
    from kvdock.outline import Choice, PoolChoice
    from kvdock.planner import CachePlan
    from kvdock.pools.base import Pool
    from kvdock.requests.base import RequestPool

DEBUG_VARIABLE = "KVDOCK_DEBUG"
"""Environment variable that turns debug mode on when it is ``1``."""


def build(
    plan: CachePlan,
    device: str | torch.device | None = None,
    group: Any = None,
    debug: bool | None = None,
    within: Within | None = None,
) -> KVCache:
    """Allocate what `plan` says, to the byte, and return it alive.

    Args:
        plan: a plan that was made here or read from a file.
        device: where to build. Default: the device that was planned for, if it is here; ``cpu`` and
            ``meta`` (no device memory) may be asked for whatever the plan is for.
        group: a `torch.distributed` process group whose ranks must have plans of the same sizes.
        debug: check every call and name the request in errors. Default: whether ``KVDOCK_DEBUG`` is 1.
        within: given a buffer and the device, returns the context in which its tensors are taken, such as a memory
            pool that a transfer engine has registered. Not beside `memory_saver`, which says that itself.

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
        return _assembled(plan, where, chosen, group, within)
    except BaseException as error:
        # Whoever keeps the error would keep the frames, and with them every tensor that was made so far.
        traceback.clear_frames(error.__traceback__)
        raise


def _assembled(plan: CachePlan, device: torch.device, debug: bool, group: Any, within: Within | None) -> KVCache:
    assembly = _Assembly(plan, device, debug, group, within)
    cache = assembly.cache()
    _verify(cache)
    _verify_declared(cache, assembly.tensors)
    _verify_no_kv(cache)
    assembly.kernels.warm_up(cache)
    return cache


class _Assembly:
    """A cache in the making: request pool, inner allocators, the engine's allocator, pools, routers."""

    def __init__(self, plan: CachePlan, device: torch.device, debug: bool, group: Any, within: Within | None) -> None:
        self.plan = plan
        self.device = device
        self.debug = debug
        self.group = group
        self.kernels = _kernels(plan, device)
        self.within = _within(plan, device, self.kernels, within)
        self.tensors: list[Tensors] = []
        buffers, spaces, step = plan.outline.buffers, plan.outline.spaces, plan.device.granularity_bytes
        self.overlays = allocate_overlays(buffers, plan.sizes, spaces, device, step, self.within)
        self.shared_buffer: SharedBuffer | None = None
        self.memory = self._unified_memory()
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
        by_worker = self._by_worker(routers)
        return KVCache(self.plan, requests, engine, self.pools, by_worker, self.tensors, self.debug, self.memory)

    def _unified_memory(self) -> UnifiedMemory | None:
        """Allocate the byte buffer that spaces share, if the plan has one."""
        outline, sizes, step = self.plan.outline, self.plan.sizes, self.plan.device.granularity_bytes
        line = outline.line(sizes)
        if line is None:
            return None
        first = next(buffer for buffer in outline.buffers if buffer.storage == SHARED)
        raw = zeros(first, round_up(line.high, step), self.device, self.within)
        self.shared_buffer = SharedBuffer(raw, page_layouts(line, outline.buffers, outline.spaces, sizes))
        is_lazy = outline.options.values.lazy_compaction is not False
        return UnifiedMemory(line, raw, self.kernels, is_lazy, self.debug)

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
        spaces, over = plan.outline.spaces, self.overlays
        tensors = allocate(
            choice.buffers, plan.sizes, spaces, self.device, step, over, self.within, shared_buffer=self.shared_buffer
        )
        self.tensors.append(tensors)
        return Parts(
            tensors=tensors,
            kernels=self.kernels,
            device=self.device,
            sizes=plan.sizes,
            debug=self.debug,
            group=self.group,
            memory=self.memory,
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
    found = resolve.kernels(plan.outline.registry, plan.device, plan.outline.options.values)
    return found if found is not None else ReferenceKernels()


def _within(plan: CachePlan, device: torch.device, kernels: Kernels, given: Within | None) -> Within | None:
    """Return where device memory is taken from: as the caller says, or under `memory_saver` on the planned device.

    Raises:
        BuildError: both say it, or the device has no memory that can be released.
    """
    if not plan.outline.options.values.memory_saver:
        return given
    if given is not None:
        raise BuildError("memory_saver=true says itself where buffers are taken; leave within out, or memory_saver")
    if device.type != plan.device.device_type:
        return None
    kernels.releasable(device)  # before anything is taken

    def releasable(buffer: Buffer, where: torch.device) -> AbstractContextManager[object]:
        return kernels.releasable(where) if buffer.is_releasable else nullcontext()

    return releasable


def _find_device(plan: CachePlan, device: str | torch.device | None) -> torch.device:
    """Return where to build.

    Raises:
        BuildError: the device is of another type than the plan's, or not here.
    """
    import torch

    planned, index = plan.device.device_type, plan.device.index
    asked = device if device is not None else planned if index is None or planned == "cpu" else f"{planned}:{index}"
    advice = "give device='cpu' (--on-cpu) to build it in host memory, or 'meta' to build it without memory"
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
        numbered = plan.spaces[str(plan.outline.numbering)] * plan.parallel.dcp_size
        found["tokens"] = (cache.token_to_kv_pool_allocator.size, numbered)
    for what, (built, planned) in found.items():
        if built != planned:
            raise BuildError(f"{built} {what} were built but {planned} planned; a class must take its size from Parts")


def _verify_declared(cache: KVCache, tensors: Sequence[Tensors]) -> None:
    """Verify that pools hold no memory beside what their classes declared.

    Raises:
        BuildError: one does; names the plugin and the class.
    """
    declared = unique_storages(raw for part in tensors for raw in part.storages()).keys()
    for choice in cache.plan.outline.pools:
        held = [raw for raw in cache.pools[choice.name].storages() if not raw.is_meta]  # those have no address
        beside = sum(nbytes for key, nbytes in unique_storages(held).items() if key not in declared)
        if beside:
            raise BuildError(
                f"group {choice.name!r}: {choice.cls.__name__} of plugin {choice.plugin!r} holds {beside:,} bytes that its "
                "buffers do not declare; declare every tensor, and take it from Parts"
            )


def _verify_no_kv(cache: KVCache) -> None:
    """Verify that a cache without KV keeps none, whatever class a plugin named and whatever that class claims.

    Raises:
        BuildError: a pool of the target takes memory by slots, or lists memory that a transfer would move.
    """
    outline = cache.plan.outline
    if not outline.options.values.prefill_only_disable_kv_cache:
        return
    for choice in outline.pools:
        if choice.worker != TARGET:
            continue
        pool = cache.pools[choice.name]
        kept = [buffer.name for buffer in choice.buffers if buffer.space is not None]
        kept += [info.name for info in pool.buffer_infos()]
        if kept or "no_kv" not in type(pool).features:
            raise BuildError(
                f"prefill_only_disable_kv_cache=true needs a pool that keeps nothing, but group {choice.name!r} got "
                f"{type(pool).__name__} of plugin {choice.plugin!r}, which keeps {', '.join(dict.fromkeys(kept)) or 'KV'}; "
                f"leave the option out, or the plugin with no_plugins={choice.plugin}"
            )


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
