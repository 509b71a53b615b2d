"""The core's own hook implementations: the only importer of its pools, allocators and request pools.

They come in by the same door as anybody's plugin, in the least specific tier.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvdock import families
from kvdock.allocators import PagedAllocator, SWAAllocator, TokenAllocator
from kvdock.device import DeviceInfo
from kvdock.families import groups
from kvdock.hookspecs import CONTRACT, hookimpl
from kvdock.layout import FULL, SWA, LayerGroup, Space
from kvdock.model import ModelSpec
from kvdock.objections import objections
from kvdock.pools import IndexerPool, MHAPool, MLAPool, NoOpPool, PureSlidingPool, RoutedPool, SlidingPool
from kvdock.queries import (
    AllocatorQuery,
    GroupQuery,
    ModelQuery,
    PlanQuery,
    PoolQuery,
    RequestQuery,
    StateQuery,
)
from kvdock.requests import ReqToTokenPool

if TYPE_CHECKING:
    from kvdock.allocators.base import Allocator
    from kvdock.pools.base import Pool
    from kvdock.requests.base import RequestPool

POOLS: Mapping[str, type[Pool]] = {"mha": MHAPool, "mla": MLAPool, "sparse_index": IndexerPool}
"""Layer kind → the pool that serves it on any device that torch knows."""


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
        """Serve one space by its page size, and full and sliding slots in step."""
        if len(query.spaces) == 1:
            return TokenAllocator if query.spaces[0].page_size == 1 else PagedAllocator
        return SWAAllocator if {space.name for space in query.spaces} == {FULL, SWA} else None

    @hookimpl
    def get_request_pool_cls(self, query: RequestQuery) -> type[RequestPool] | None:
        """Serve plain request tables."""
        return ReqToTokenPool

    @hookimpl
    def validate_plan(self, query: PlanQuery) -> tuple[str, ...]:
        """Object to what no device can serve."""
        return objections(query)

    @hookimpl
    def validate_prefill_only(self, query: PlanQuery) -> str | None:
        """Object unless the device says that its backend can work without the cache."""
        backend = query.options.prefill_attention_backend or query.options.attention_backend
        if f"skip_kv_cache:{backend}" in query.device.capabilities:
            return None
        return f"no attention backend of {query.device.name} is known to work without a KV cache"


def _group_pool_cls(query: PoolQuery) -> type[Pool] | None:
    """Return the pool of one layer group."""
    if query.kind == "mha" and query.options.prefill_only_disable_kv_cache:
        return NoOpPool
    return POOLS.get(query.kind)


def _router_cls(query: PoolQuery) -> type[Pool] | None:
    """Return what an engine sees of a worker's groups, or ``None`` where the pool of its only group will do."""
    if any(group.space == SWA for group in query.groups):
        # Requests are numbered in full slots, even on a rank whose own layers all slide.
        return SlidingPool if FULL in query.spaces else PureSlidingPool
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
