"""What this plugin answers: profiles of NVIDIA devices, so that plans can be made without one."""

from __future__ import annotations

from collections.abc import Mapping

from kvdock.device import DeviceInfo
from kvdock.hookspecs import hookimpl

from kvdock_cuda import device

kvdock_contract = "0.1"


@hookimpl
def device_catalogue() -> Mapping[str, DeviceInfo]:
    """Return the profile of each device that this distribution knows, by name."""
    return device.catalogue()
