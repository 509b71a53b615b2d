"""AMD devices: what an architecture reads, and profiles derived from what the driver reports."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from kvdock.device import DeviceInfo
from kvdock.hardware import SOFTWARE_FLOATS

MIB = 2**20

DEVICE_TYPE = "cuda"
"""Torch's word for these devices: ROCm's torch calls them ``cuda`` too, so `is_ours` reads the capabilities."""

DRIVER_MIB = 512
"""Allowance for what the driver keeps and `rocm-smi` shows as used on an idle device: 284 MiB of an MI300X."""

CONTEXT_MIB = 512
"""Allowance for one HIP context with the kernels of an engine loaded.

Both together are more than the most seen: of 191.98 GiB of an MI300X a process had 191.33 GiB left.
"""

GRANULARITY_BYTES = 2 * MIB
"""The caching allocator of torch asks the driver for segments in multiples of 2 MiB."""

FNUZ = frozenset({"gfx940", "gfx941", "gfx942"})
"""Architectures whose 8-bit floats have neither infinities nor a negative zero: e4m3 ends at 240, not at 448."""

OCP = frozenset({"gfx950", "gfx1200", "gfx1201"})
"""Architectures with the common 8-bit floats. All others convert them in software."""

MICROSCALING = frozenset({"gfx950"})
"""Architectures that read elements of 4 and 8 bits in blocks with scales that are powers of two."""


GENERIC: Mapping[str, frozenset[str]] = {
    "gfx9-generic": frozenset({"gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"}),
    "gfx9-4-generic": frozenset({"gfx940", "gfx941", "gfx942", "gfx950"}),
    "gfx10-1-generic": frozenset({"gfx1010", "gfx1011", "gfx1012", "gfx1013"}),
    "gfx10-3-generic": frozenset(f"gfx103{digit}" for digit in range(7)),
    "gfx11-generic": frozenset({*(f"gfx110{digit}" for digit in range(4)), *(f"gfx115{digit}" for digit in range(4))}),
    "gfx12-generic": frozenset({"gfx1200", "gfx1201"}),
}
"""Code for several architectures → those that it runs on (llvm.org/docs/AMDGPUUsage.html)."""


class Card(msgspec.Struct, frozen=True):
    """One device as the driver counts it: its total, its architecture, and where the total is published."""

    name: str
    driver_total_mib: int
    architecture: str
    published: str


_CARDS = (
    Card("mi210", 65_520, "gfx90a", "github.com/ROCm/legacy-rocm-build/issues/3460"),
    Card("mi250x", 65_520, "gfx90a", "github.com/ROCm/rocm_smi_lib/issues/160"),
    Card("mi300x", 196_592, "gfx942", "github.com/ROCm/legacy-rocm-build/issues/4750"),
    Card("mi325x", 262_128, "gfx942", "github.com/vllm-project/vllm/issues/41962"),
    Card("mi355x", 294_896, "gfx950", "github.com/ROCm/TheRock/issues/2118"),
)


def catalogue() -> Mapping[str, DeviceInfo]:
    """Return a profile per card, of an MI250X per die; usable bytes are those of an idle device with one HIP context."""
    return {card.name: _profile(card) for card in _CARDS}


def is_ours(device: DeviceInfo) -> bool:
    """Return whether a device is AMD's: of torch's type ``cuda``, with an architecture."""
    return device.device_type == DEVICE_TYPE and architecture(device) != ""


def architecture(device: DeviceInfo) -> str:
    """Return the architecture among a device's capabilities, for example ``gfx942``; else an empty string."""
    return next((name for name in device.capabilities if name.startswith("gfx")), "")


def capabilities(architecture: str) -> tuple[str, ...]:
    """Return what an architecture can do: its own name first, then whether it only emulates 8-bit floats."""
    return (architecture,) if architecture in FNUZ | OCP else (architecture, SOFTWARE_FLOATS)


def native_floats(device: DeviceInfo) -> tuple[str, str]:
    """Return the encodings of 8 bits that kernels of a device read, e4m3 first; in software, the common ones."""
    return ("float8_e4m3fnuz", "float8_e5m2fnuz") if architecture(device) in FNUZ else ("float8_e4m3fn", "float8_e5m2")


def _profile(card: Card) -> DeviceInfo:
    usable_bytes = (card.driver_total_mib - DRIVER_MIB - CONTEXT_MIB) * MIB
    return DeviceInfo(
        device_type=DEVICE_TYPE,
        name=card.name,
        total_bytes=card.driver_total_mib * MIB,
        free_before_load_bytes=usable_bytes,
        free_bytes=usable_bytes,
        granularity_bytes=GRANULARITY_BYTES,
        capabilities=capabilities(card.architecture),
        source=(
            f"driver's total: {card.driver_total_mib} MiB ({card.published}), "
            f"less {DRIVER_MIB} for the driver and {CONTEXT_MIB} for a HIP context"
        ),
    )
