"""What this plugin answers for DeepSeek V4 on Ascend devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kvdock.allocators import Allocator
from kvdock.hardware import refuse_settings
from kvdock.hookspecs import hookimpl
from kvdock.layout import FULL, SWA, TARGET, Space
from kvdock.pools.base import Pool
from kvdock.queries import AllocatorQuery, OptionsQuery, PlanQuery, PoolQuery, Query, RequestQuery, StateQuery
from kvdock.requests.base import RequestPool
from kvdock_dsv4 import model, settings, sizing

from kvdock_ascend import device, rules
from kvdock_ascend.dsv4 import spaces
from kvdock_ascend.dsv4.allocator import DSV4NpuAllocator
from kvdock_ascend.dsv4.pools import NpuCompressStatePool, NpuIndexPool, NpuRowsPool
from kvdock_ascend.dsv4.requests import DSV4NpuDecodeReqToTokenPool, DSV4NpuReqToTokenPool
from kvdock_ascend.dsv4.router import DSV4NpuPool

kvdock_contract = "0.1"

POOLS: Mapping[str, type[Pool]] = MappingProxyType(
    {
        model.KIND: NpuRowsPool,
        sizing.INDEX: NpuIndexPool,
        sizing.STATE: NpuCompressStatePool,
        sizing.INDEX_STATE: NpuCompressStatePool,
    }
)
"""Kind of a group → the pool that keeps it on these devices."""

KV_DTYPE = "bfloat16"
VARIANT = "ascend.dsv4"

Rule = Callable[[PlanQuery], str | None]


@hookimpl
def get_option_defaults(query: OptionsQuery) -> Mapping[str, Any] | None:
    """Give pages of 128, rows in bfloat16, and requests that share no pages."""
    if query.model.family != model.FAMILY or not device.is_ours(query.device):
        return None
    refuse_settings(query.options, VARIANT)
    return {"page_size": rules.PAGE_SIZE, "kv_cache_dtype": KV_DTYPE, "prefix_cache": False}


@hookimpl
def size_state_pools(query: StateQuery) -> Mapping[str, Space] | None:
    """Declare every space with pages of the page size that requests have."""
    return spaces.spaces(query) if _is_ours(query) else None


@hookimpl
def get_pool_cls(query: PoolQuery) -> type[Pool] | None:
    """Serve the kinds of `POOLS`, and what routes to them."""
    if not _is_ours(query):
        return None
    return DSV4NpuPool if query.group is None else POOLS.get(query.kind)


@hookimpl
def get_allocator_cls(query: AllocatorQuery) -> type[Allocator] | None:
    """Keep all spaces in step; each of them alone is the hardware's."""
    names = {space.name for space in query.spaces}
    return DSV4NpuAllocator if _is_ours(query) and {FULL, SWA} <= names else None


@hookimpl
def get_request_pool_cls(query: RequestQuery) -> type[RequestPool] | None:
    """Give the request table the five beside it."""
    if not _is_ours(query):
        return None
    return DSV4NpuDecodeReqToTokenPool if query.options.role == "decode" else DSV4NpuReqToTokenPool


@hookimpl
def validate_plan(query: PlanQuery) -> tuple[str, ...] | None:
    """Object to what the form for these devices does not have."""
    if not _is_ours(query) or query.worker != TARGET:
        return None
    return tuple(reason for rule in RULES if (reason := rule(query)) is not None)


def _rows_dtype(query: PlanQuery) -> str | None:
    if query.kv_dtype in rules.KV_DTYPES:
        return None
    return (
        f"kv_cache_dtype={query.options.kv_cache_dtype} ({query.kv_dtype}) is no type of rows that kernels here read for "
        f"DeepSeek V4; leave kv_cache_dtype out, which gives {KV_DTYPE}"
    )


def _online(query: PlanQuery) -> str | None:
    if not settings.is_online(query):
        return None
    return "online_compress=true is no form of states that kernels here read; leave online_compress out"


def _index_dtype(query: PlanQuery) -> str | None:
    """Object to the setting that stands for `index_dtype`, which nothing reads here: keys are integers, whatever it says."""
    asked = settings.settings_of(query).fp4_indexer
    if asked is None:
        return None
    return (
        f"fp4_indexer={str(asked).lower()} says which floats index keys are, and kernels here read them in integers of 8 bits "
        "with a scale each; leave fp4_indexer out"
    )


def _shared_prefixes(query: PlanQuery) -> str | None:
    if not query.options.prefix_cache:
        return None
    return (
        "prefix_cache=true lets requests share pages, and a page of compressed rows here belongs to one request; "
        "give prefix_cache=false"
    )


RULES: tuple[Rule, ...] = (rules.large_indexer_page, _rows_dtype, _online, _index_dtype, _shared_prefixes)
"""In the order in which they are reported."""


def _is_ours(query: Query) -> bool:
    return query.model.family == model.FAMILY and device.is_ours(query.device)
