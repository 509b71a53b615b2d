"""What this plugin answers for Ascend devices; each hook decides and leaves the work to another module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdock.allocators import Allocator
from kvdock.device import DeviceInfo
from kvdock.hardware import is_ordinal
from kvdock.hookspecs import hookimpl
from kvdock.kernels.interface import Kernels
from kvdock.pools.base import Pool
from kvdock.queries import AllocatorQuery, OptionsQuery, PlanQuery, PoolQuery

from kvdock_ascend import allocators, pools, probe, rules
from kvdock_ascend import device as cards

kvdock_contract = "0.1"


@hookimpl
def device_catalogue() -> Mapping[str, DeviceInfo]:
    """Return the profile of each device that this distribution knows, by name."""
    return cards.catalogue()


@hookimpl
def probe_device(selector: str) -> DeviceInfo | None:
    """Describe ``ascend:N`` as torch_npu sees it; without a number, torch's current device."""
    return probe.find(probe.imported(), selector) if is_ordinal(selector) else None


@hookimpl
def get_option_defaults(query: OptionsQuery) -> Mapping[str, Any] | None:
    """Give pages of 128 tokens."""
    return {"page_size": rules.PAGE_SIZE} if cards.is_ours(query.device) else None


@hookimpl
def get_pool_cls(query: PoolQuery) -> type[Pool] | None:
    """Claim keys and values, latents, index keys and states; what routes to them is the core's."""
    return pools.POOLS.get(query.kind) if query.group is not None and cards.is_ours(query.device) else None


@hookimpl
def get_allocator_cls(query: AllocatorQuery) -> type[Allocator] | None:
    """Claim each space; what keeps several in step is the core's."""
    return allocators.allocator_cls(query) if cards.is_ours(query.device) else None


@hookimpl
def validate_plan(query: PlanQuery) -> tuple[str, ...] | None:
    """Object to pages, formats and arrangements that the device's kernels do not read."""
    return rules.objections(query) if cards.is_ours(query.device) else None


@hookimpl
def validate_prefill_only(query: PlanQuery) -> tuple[str, ...] | None:
    """Object: attention reads the cache's pages."""
    return rules.prefill_only_objections(query) if cards.is_ours(query.device) else None


@hookimpl
def get_kernels(device: DeviceInfo) -> Kernels | None:
    """Give torch_npu's writes, and torch's own operations for the rest."""
    if not cards.is_ours(device):
        return None
    from kvdock_ascend import ops

    operators = ops.load()
    from kvdock_ascend.kernels.npu_set import NpuKernels

    return NpuKernels(operators)
