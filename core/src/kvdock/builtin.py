"""The core's own hook implementations: the only importer of its pools, allocators and request pools.

They come in by the same door as anybody's plugin, in the least specific tier.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvdock import dtypes, families
from kvdock.allocators import (
    HiSparseAllocator,
    PagedAllocator,
    PureSWAAllocator,
    PureSWASortedAllocator,
    PureSWATokenAllocator,
    SortedAllocator,
    SWAAllocator,
    TokenAllocator,
)
from kvdock.device import DeviceInfo
from kvdock.families import groups
from kvdock.hookspecs import CONTRACT, hookimpl
from kvdock.layout import DEVICE, FULL, HOST, REQUESTS, STATE, SWA, LayerGroup, Space
from kvdock.model import ModelSpec
from kvdock.objections import objections, prefill_only_objections
from kvdock.pools import (
    BlockMHAPool,
    BlockMLAPool,
    DSAPool,
    HiSparseDSAPool,
    HybridLinearPool,
    IndexerPool,
    LayerSplitDSAPool,
    MHAPool,
    MLAPool,
    NoOpPool,
    PureSlidingPool,
    RoutedPool,
    SlidingPool,
    SparsePool,
    StatePool,
)
from kvdock.queries import (
    AllocatorQuery,
    GroupQuery,
    ModelQuery,
    PlanQuery,
    PoolQuery,
    RequestQuery,
    StateQuery,
)
from kvdock.requests import (
    DecodeReqToTokenPool,
    HybridDecodeReqToTokenPool,
    HybridReqToTokenPool,
    ReqToTokenPool,
)
from kvdock.unified import (
    UnifiedAllocator,
    UnifiedPureSWAAllocator,
    UnifiedReqToTokenPool,
    UnifiedSWAAllocator,
)

if TYPE_CHECKING:
    from kvdock.allocators.base import Allocator
    from kvdock.pools.base import Pool
    from kvdock.requests.base import RequestPool

POOLS: Mapping[str, type[Pool]] = {
    "mha": MHAPool,
    "mla": MLAPool,
    "dsa": DSAPool,
    "sparse_index": IndexerPool,
    "state": StatePool,
}
"""Layer kind → the pool that serves it on any device that torch knows."""

BLOCK_POOLS: Mapping[str, type[Pool]] = {"mha": BlockMHAPool, "mla": BlockMLAPool}
"""Layer kind → the pool that serves it where keys and values are kept in blocks with scales."""

ALLOCATORS: Mapping[tuple[bool, str], type[Allocator]] = {
    (False, "token"): TokenAllocator,
    (False, "paged"): PagedAllocator,
    (False, "sorted"): SortedAllocator,
    (True, "token"): PureSWATokenAllocator,
    (True, "paged"): PureSWAAllocator,
    (True, "sorted"): PureSWASortedAllocator,
}
"""Whether requests are numbered in sliding slots, and how slots are handed out → the allocator of one space."""

COMPOSITES: Mapping[frozenset[str], type[Allocator]] = {
    frozenset({FULL, SWA}): SWAAllocator,
    frozenset({FULL, DEVICE, HOST}): HiSparseAllocator,
}
"""Spaces that are handed out together → the allocator that keeps them in step."""

UNIFIED: Mapping[bool, type[Allocator]] = {False: UnifiedAllocator, True: UnifiedPureSWAAllocator}
"""Whether requests are numbered in sliding slots → the allocator of one space of unified memory."""

REQUEST_POOLS: Mapping[tuple[bool, bool], type[RequestPool]] = {
    (False, False): ReqToTokenPool,
    (False, True): DecodeReqToTokenPool,
    (True, False): HybridReqToTokenPool,
    (True, True): HybridDecodeReqToTokenPool,
}
"""Whether requests have states, and whether they arrive from a prefill worker → the request pool."""


class CorePlugin:
    """Families, pools, allocators and request pools that need no vendor's hardware."""

    kvdock_contract = CONTRACT

    @hookimpl
    def read_model(self, query: ModelQuery) -> ModelSpec | None:
        """Read the families that core knows."""
        return families.read_model(query)

    @hookimpl
    def group_layers(self, query: GroupQuery) -> tuple[LayerGroup, ...] | None:
        """Group by kind, space and shape."""
        return groups.group_layers(query)

    @hookimpl
    def size_state_pools(self, query: StateQuery) -> Mapping[str, Space] | None:
        """Declare ``full``, ``swa`` and ``requests`` where groups need them."""
        return groups.spaces(query)

    @hookimpl
    def get_pool_cls(self, query: PoolQuery) -> type[Pool] | None:
        """Serve the kinds of `POOLS`; route by layer where a worker has more than one group."""
        return _router_cls(query) if query.group is None else _group_pool_cls(query)

    @hookimpl
    def get_allocator_cls(self, query: AllocatorQuery) -> type[Allocator] | None:
        """Serve one space by its page size (in order, where caches are sent away), and those of `COMPOSITES` together."""
        if query.options.unified_memory:
            return _unified_cls(query)
        if len(query.spaces) == 1:
            return ALLOCATORS[_is_only_sliding(query.spaces[0]), _slot_order(query)]
        return COMPOSITES.get(frozenset(space.name for space in query.spaces))

    @hookimpl
    def get_request_pool_cls(self, query: RequestQuery) -> type[RequestPool] | None:
        """Serve request tables: plain, with states, of a decode worker, and both."""
        if query.options.unified_memory and STATE in query.spaces:
            return UnifiedReqToTokenPool
        return REQUEST_POOLS[STATE in query.spaces, query.options.role == "decode"]

    @hookimpl
    def validate_plan(self, query: PlanQuery) -> tuple[str, ...]:
        """Object to what no device can serve."""
        return objections(query)

    @hookimpl
    def validate_prefill_only(self, query: PlanQuery) -> tuple[str, ...]:
        """Object unless plain attention of an embedding model runs on a backend that the device says needs no cache."""
        return prefill_only_objections(query)


def _is_only_sliding(space: Space) -> bool:
    """Return whether requests are numbered in a space of sliding slots: beside a full space it follows that one."""
    return space.window_tokens is not None and not space.rule.follows() - {REQUESTS}


def _unified_cls(query: AllocatorQuery) -> type[Allocator] | None:
    """Return the allocator of spaces that share a byte buffer."""
    if len(query.spaces) == 1:
        return UNIFIED[_is_only_sliding(query.spaces[0])]
    return UnifiedSWAAllocator if {space.name for space in query.spaces} == {FULL, SWA} else None


def _slot_order(query: AllocatorQuery) -> str:
    """Return how the slots of one space are handed out: in order where caches are sent away, else by its page size."""
    if query.options.role in ("prefill", "decode"):
        return "sorted"
    return "token" if query.spaces[0].page_size * query.parallel.dcp_size == 1 else "paged"


def _group_pool_cls(query: PoolQuery) -> type[Pool] | None:
    """Return the pool of one layer group."""
    if query.kind == "mha" and query.options.prefill_only_disable_kv_cache:
        return NoOpPool
    if query.kind == "dsa" and query.options.hisparse:
        return HiSparseDSAPool
    if query.kind == "dsa" and query.options.layer_split:
        return LayerSplitDSAPool
    in_blocks = bool(dtypes.find(query.kv_dtype).block) and query.kind in BLOCK_POOLS
    return (BLOCK_POOLS if in_blocks else POOLS).get(query.kind)


def _router_cls(query: PoolQuery) -> type[Pool] | None:
    """Return what an engine sees of a worker's groups, or ``None`` where the pool of its only group will do."""
    if any(group.space == SWA for group in query.groups):
        # Requests are numbered in full slots, even on a rank whose own layers all slide.
        return SlidingPool if FULL in query.spaces else PureSlidingPool
    if any(group.kind == "sparse_index" for group in query.groups):
        return SparsePool
    if any(group.space == STATE for group in query.groups):
        return HybridLinearPool
    return RoutedPool if len(query.groups) > 1 else None


class CpuPlugin:
    """The CPU as a device: probed through the operating system, without torch."""

    kvdock_contract = CONTRACT

    @hookimpl
    def probe_device(self, selector: str) -> DeviceInfo | None:
        """Describe this machine's memory; the only selector is ``0`` (or none)."""
        if selector not in ("", "0"):
            return None
        total, free = _host_memory()
        return DeviceInfo(
            device_type="cpu",
            name=f"cpu ({platform.machine() or 'unknown'})",
            total_bytes=total,
            free_before_load_bytes=free,
            free_bytes=free,
            source="the operating system's free memory",
            index=0,
        )


def _host_memory() -> tuple[int, int]:
    """Return total and available bytes of this host (available counts reclaimable caches where known)."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return total, min(total, int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    try:
        return total, page * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):
        return total, total


BUILTINS: tuple[tuple[str, object], ...] = (("core", CorePlugin()), ("cpu", CpuPlugin()))
"""Name and object of each built-in plugin."""
