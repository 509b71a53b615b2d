"""What this plugin answers for DeepSeek V4 on AMD devices."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvdock.allocators import Allocator
from kvdock.device import DeviceInfo
from kvdock.hardware import refuse_settings
from kvdock.hookspecs import hookimpl
from kvdock.layout import FULL, TARGET, LayerGroup, Space
from kvdock.model import ModelSpec
from kvdock.pools.base import Pool
from kvdock.queries import AllocatorQuery, GroupQuery, OptionsQuery, PlanQuery, PoolQuery, StateQuery
from kvdock_dsv4 import model, sizing

from kvdock_rocm import device
from kvdock_rocm.dsv4 import rules, spaces
from kvdock_rocm.dsv4.allocators import RocmPagedAllocator, RocmSortedAllocator
from kvdock_rocm.dsv4.pools import RocmIndexPool, RocmRowsPool, RocmStatePool
from kvdock_rocm.dsv4.router import RocmDSV4Pool

kvdock_contract = "0.1"

VARIANT = "rocm.dsv4"

POOLS: Mapping[str, type[Pool]] = MappingProxyType(
    {
        model.KIND: RocmRowsPool,
        sizing.INDEX: RocmIndexPool,
        sizing.STATE: RocmStatePool,
        sizing.INDEX_STATE: RocmStatePool,
    }
)
"""Kind of a group → the pool that keeps it on these devices."""


@hookimpl
def get_option_defaults(query: OptionsQuery) -> Mapping[str, Any] | None:
    """Give rows in bfloat16, and requests that share no pages."""
    if not _is_ours(query.model, query.device):
        return None
    refuse_settings(query.options, VARIANT)
    return {"kv_cache_dtype": rules.KV_DTYPE, "prefix_cache": False}


@hookimpl
def group_layers(query: GroupQuery) -> tuple[LayerGroup, ...] | None:
    """Keep a layer's sliding and compressed rows in one group."""
    return spaces.group_layers(query) if _is_ours(query.model, query.device) else None


@hookimpl
def size_state_pools(query: StateQuery) -> Mapping[str, Space] | None:
    """Declare rings by request row, and compressed rows behind them."""
    return spaces.spaces(query) if _is_ours(query.model, query.device) else None


@hookimpl
def get_pool_cls(query: PoolQuery) -> type[Pool] | None:
    """Serve the kinds of `POOLS`, and what routes to them."""
    if not _is_ours(query.model, query.device):
        return None
    return RocmDSV4Pool if query.group is None else POOLS.get(query.kind)


@hookimpl
def get_allocator_cls(query: AllocatorQuery) -> type[Allocator] | None:
    """Hand out token slots to requests that share none; in order, where caches are sent away."""
    if not _is_ours(query.model, query.device) or {space.name for space in query.spaces} != {FULL}:
        return None
    return RocmPagedAllocator if query.options.role in (None, "none") else RocmSortedAllocator


@hookimpl
def validate_plan(query: PlanQuery) -> tuple[str, ...] | None:
    """Object to what the form for these devices does not have."""
    ours = query.worker == TARGET and _is_ours(query.model, query.device)
    return rules.objections(query) if ours else None


def _is_ours(spec: ModelSpec, info: DeviceInfo) -> bool:
    return spec.family == model.FAMILY and device.is_ours(info)
