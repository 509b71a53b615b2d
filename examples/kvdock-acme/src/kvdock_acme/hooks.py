"""What acme answers; each hook decides and leaves the work to another module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdock.allocators.base import Allocator
from kvdock.device import DeviceInfo
from kvdock.hookspecs import hookimpl
from kvdock.pools.base import Pool
from kvdock.queries import AllocatorQuery, OptionsQuery, PlanQuery, PoolQuery

from kvdock_acme import device
from kvdock_acme.allocators import AcmeAllocator
from kvdock_acme.pools import AcmePool

kvdock_contract = "0.1"


@hookimpl
def device_catalogue() -> Mapping[str, DeviceInfo]:
    """Return the profiles of acme's devices."""
    return device.catalogue()


@hookimpl
def probe_device(selector: str) -> DeviceInfo | None:
    """Return the simulated device for ``acme:sim``; there is no other one."""
    return device.simulated() if selector == "sim" else None


@hookimpl
def get_option_defaults(query: OptionsQuery) -> Mapping[str, Any] | None:
    """Suggest the page that the attention unit reads."""
    return {"page_size": device.PAGE_MULTIPLE} if query.device.device_type == device.DEVICE_TYPE else None


@hookimpl
def get_pool_cls(query: PoolQuery) -> type[Pool] | None:
    """Claim keys and values per head, where both are of one size."""
    if query.device.device_type != device.DEVICE_TYPE or query.group is None or query.kind != "mha":
        return None
    return AcmePool if AcmePool.fits(query) else None


@hookimpl
def get_allocator_cls(query: AllocatorQuery) -> type[Allocator] | None:
    """Claim every single space; several in step are left to the core, which asks for each part."""
    claims = query.device.device_type == device.DEVICE_TYPE and len(query.spaces) == 1
    return AcmeAllocator if claims else None


@hookimpl
def validate_plan(query: PlanQuery) -> str | None:
    """Object to pages that the attention unit cannot read."""
    page_size = query.options.page_size or 1
    if query.device.device_type != device.DEVICE_TYPE or page_size % device.PAGE_MULTIPLE == 0:
        return None
    return f"page_size={page_size} is no multiple of {device.PAGE_MULTIPLE}; give 16, 32 or 64"
