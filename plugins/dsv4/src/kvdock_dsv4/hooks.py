"""What this plugin answers for DeepSeek V4, on devices without a form of their own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvdock.hookspecs import hookimpl
from kvdock.layout import DEVICE, FULL, SWA, LayerGroup, Space
from kvdock.model import LayerParams, ModelSpec
from kvdock.queries import (
    AllocatorQuery,
    GroupQuery,
    ModelQuery,
    OptionsQuery,
    PlanQuery,
    PoolQuery,
    RequestQuery,
    StateQuery,
)

from kvdock_dsv4 import model, objections, settings, sizing
from kvdock_dsv4.allocators import DSV4Allocator
from kvdock_dsv4.geometry import C4, C128_STATE
from kvdock_dsv4.pools.hisparse import HiSparsePackedPool
from kvdock_dsv4.pools.index import IndexPool
from kvdock_dsv4.pools.packed import PackedPool
from kvdock_dsv4.pools.router import DSV4Pool
from kvdock_dsv4.pools.states import CompressStatePool, OnlineStatePool
from kvdock_dsv4.requests import OnlineDecodeReqToTokenPool, OnlineReqToTokenPool
from kvdock_dsv4.tiers import DSV4HiSparseAllocator

if TYPE_CHECKING:
    from kvdock.allocators.base import Allocator
    from kvdock.pools.base import Pool
    from kvdock.requests.base import RequestPool

kvdock_contract = "0.1"
layer_params: Mapping[str, type[LayerParams]] = MappingProxyType({model.KIND: model.DSV4Params})

POOLS: Mapping[str, type[Pool]] = MappingProxyType(
    {
        model.KIND: PackedPool,
        sizing.INDEX: IndexPool,
        sizing.STATE: CompressStatePool,
        sizing.INDEX_STATE: CompressStatePool,
    }
)
"""Kind of a group → the pool that serves it on any device that torch knows."""


COMPOSITES: Mapping[frozenset[str], type[Allocator]] = MappingProxyType(
    {frozenset({FULL, SWA}): DSV4Allocator, frozenset({FULL, SWA, DEVICE}): DSV4HiSparseAllocator}
)
"""Spaces that are handed out together → the allocator that keeps them in step."""


@hookimpl
def read_model(query: ModelQuery) -> ModelSpec | None:
    """Read configs of this family in every role."""
    return model.read_model(query)


@hookimpl
def get_option_defaults(query: OptionsQuery) -> Mapping[str, Any] | None:
    """Give pages of 256, a sliding ratio of 0.1 and 8-bit rows, and what the user's settings stand for."""
    return settings.option_defaults(query.options) if query.model.family == model.FAMILY else None


@hookimpl
def group_layers(query: GroupQuery) -> tuple[LayerGroup, ...] | None:
    """Group by what layers keep: sliding and compressed rows, index keys, states."""
    return sizing.group_layers(query)


@hookimpl
def size_state_pools(query: StateQuery) -> Mapping[str, Space] | None:
    """Declare the spaces of a target of this family."""
    return sizing.spaces(query)


@hookimpl
def get_pool_cls(query: PoolQuery) -> type[Pool] | None:
    """Serve the kinds of `POOLS`, with running states where they are online, and what routes to them."""
    if query.group is None:
        return DSV4Pool if query.model.family == model.FAMILY else None
    if query.group.space == C128_STATE and settings.is_online(query):
        return OnlineStatePool
    if query.kind == model.KIND and query.group.space == C4 and query.options.hisparse:
        return HiSparsePackedPool
    return POOLS.get(query.kind)


@hookimpl
def get_allocator_cls(query: AllocatorQuery) -> type[Allocator] | None:
    """Keep full and sliding slots of this family in step; each of them alone is the core's."""
    if query.model.family != model.FAMILY:
        return None
    return COMPOSITES.get(frozenset(space.name for space in query.spaces))


@hookimpl
def get_request_pool_cls(query: RequestQuery) -> type[RequestPool] | None:
    """Clear online states with request rows; other tables are the core's."""
    if query.model.family != model.FAMILY or C128_STATE not in query.spaces or not settings.is_online(query):
        return None
    return OnlineDecodeReqToTokenPool if query.options.role == "decode" else OnlineReqToTokenPool


@hookimpl
def validate_plan(query: PlanQuery) -> tuple[str, ...]:
    """Object to pages, types, drafts and arrangements that this family's cache does not have."""
    return objections.objections(query)


@hookimpl
def validate_prefill_only(query: PlanQuery) -> tuple[str, ...]:
    """Object: compression reads the cache."""
    return objections.prefill_only_objections(query)
