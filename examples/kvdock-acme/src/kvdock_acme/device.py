"""The devices of acme: profiles for planning, and a simulated one that lives on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from kvdock.device import DeviceInfo

DEVICE_TYPE = "acme"
PAGE_MULTIPLE = 16
"""The attention unit of acme reads 16 tokens at a time."""

GIB = 2**30
MIB = 2**20


def catalogue() -> Mapping[str, DeviceInfo]:
    """Return the profiles, by name."""
    return {
        "acme-1": _profile("acme-1", total_bytes=16 * GIB, firmware_bytes=GIB),
        "acme-1-mini": _profile("acme-1-mini", total_bytes=64 * MIB, firmware_bytes=16 * MIB),
    }


def simulated() -> DeviceInfo:
    """Return a live device: an acme-1-mini whose memory is the host's."""
    mini = catalogue()["acme-1-mini"]
    return msgspec.structs.replace(mini, name="acme-1-mini (simulated)", source="simulated on the CPU", index=0)


def _profile(name: str, *, total_bytes: int, firmware_bytes: int) -> DeviceInfo:
    usable_bytes = total_bytes - firmware_bytes
    return DeviceInfo(
        device_type=DEVICE_TYPE,
        name=name,
        total_bytes=total_bytes,
        free_before_load_bytes=usable_bytes,
        free_bytes=usable_bytes,
        source=f"invented: {total_bytes} bytes, of which the firmware keeps {firmware_bytes}",
    )
