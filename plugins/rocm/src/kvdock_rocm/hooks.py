"""What this plugin answers for AMD devices; each hook decides and leaves the work to another module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdock.device import DeviceInfo
from kvdock.hardware import is_ordinal
from kvdock.hookspecs import hookimpl
from kvdock.kernels.interface import Kernels
from kvdock.options import CacheOptions
from kvdock.pools.base import Pool
from kvdock.queries import OptionsQuery, PlanQuery, PoolQuery

from kvdock_rocm import device as cards
from kvdock_rocm import formats, kernels, pools, probe, rules

kvdock_contract = "0.1"


@hookimpl
def device_catalogue() -> Mapping[str, DeviceInfo]:
    """Return the profile of each device that this distribution knows, by name."""
    return cards.catalogue()


@hookimpl
def probe_device(selector: str) -> DeviceInfo | None:
    """Describe ``rocm:N`` as torch sees it; without a number, torch's current device."""
    if not is_ordinal(selector):
        return None
    try:
        import torch
    except ImportError as error:
        raise probe.missing_torch(error) from error
    return probe.find(torch, selector)


@hookimpl
def get_option_defaults(query: OptionsQuery) -> Mapping[str, Any] | None:
    """Give index keys the encoding of the device, where it is not the common one."""
    has_index = any(getattr(layer.params, "index_head_dim", None) for layer in query.model.layers)
    return {"index_dtype": formats.INDEX_NATIVE["auto"]} if has_index and formats.is_fnuz(query.device) else None


@hookimpl
def get_pool_cls(query: PoolQuery) -> type[Pool] | None:
    """Claim pools whose encoding or rows AMD's kernels read otherwise than the core lays them out."""
    return pools.pool_cls(query) if query.group is not None and cards.is_ours(query.device) else None


@hookimpl
def validate_plan(query: PlanQuery) -> tuple[str, ...] | None:
    """Object to pages, formats and backends that the device does not know."""
    return rules.objections(query) if cards.is_ours(query.device) else None


@hookimpl
def get_kernels(device: DeviceInfo, options: CacheOptions) -> Kernels | None:
    """Give Triton's kernels, or torch's own, and have them run once before they are needed."""
    if not cards.is_ours(device):
        return None
    import torch

    probe.check_build(torch)
    return kernels.kernel_set(options)
