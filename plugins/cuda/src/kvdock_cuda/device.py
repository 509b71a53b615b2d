"""NVIDIA devices: what a compute capability can do, and profiles derived from what the driver reports."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from kvdock.device import DeviceInfo
from kvdock.hardware import SOFTWARE_BLOCKS, SOFTWARE_FLOATS
from kvdock.objections import SAVES_MEMORY, SKIPS_KV

MIB = 2**20

DEVICE_TYPE = "cuda"
"""Torch's word for these devices; that of AMD's too, which is why `is_ours` reads the capabilities."""

DRIVER_MIB = 768
"""What the driver keeps for itself: the most seen between its total and the total that a process gets.

An A100 80GB has 81,920 MiB of which a process gets 79.25 GiB = 81,152 MiB, a B200 183,359 MiB of which it
gets 178.35 GiB; the other devices keep less, so plans for them are on the safe side.
"""

CONTEXT_MIB = 512
"""Allowance for one CUDA context with the kernels of an engine loaded."""

GRANULARITY_BYTES = 2 * MIB
"""The caching allocator of torch asks the driver for segments in multiples of 2 MiB."""

LEAST = (8, 0)
"""The least compute capability: Triton compiles for no older device, and older ones have no bfloat16."""

FP4 = "fp4"
"""Capability of devices whose kernels read keys and values of 4 bits."""

FIRST_FP4 = (10, 0)
"""The first compute capability with 4-bit floats, and with blocks of floats whose scales are powers of two."""

FIRST_FP8 = (8, 9)
"""The first compute capability with 8-bit floats; before, kernels convert them, which engines' do."""

NATIVE_FLOATS = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Encodings of 8 bits that kernels read."""

SKIPPING: Mapping[str, frozenset[int]] = {"fa3": frozenset({9}), "fa4": frozenset({9, 10})}
"""Prefill backend that works without a cache → the major compute capabilities that it is written for."""


class Card(msgspec.Struct, frozen=True):
    """One device: the total that the driver reports, its compute capability, and where the total is published."""

    name: str
    driver_total_mib: int
    capability: tuple[int, int]
    published: str


_MEASURED = "thundergolfer.com/blog/nvidia-gpu-memory-capacity"
_CARDS = (
    Card("a100-40gb", 40_960, (8, 0), _MEASURED),
    Card("a100-80gb", 81_920, (8, 0), _MEASURED),
    Card("l40s", 46_068, (8, 9), _MEASURED),
    Card("h100", 81_559, (9, 0), _MEASURED),
    Card("h200", 143_771, (9, 0), _MEASURED),
    Card("b200", 183_359, (10, 0), "github.com/NVIDIA/TensorRT-LLM/issues/10278"),
    Card("rtx4090", 24_564, (8, 9), "github.com/RLinf/RLinf/issues/255"),
    Card("rtx5090", 32_607, (12, 0), "github.com/noonghunna/club-3090/issues/1229"),
)


def catalogue() -> Mapping[str, DeviceInfo]:
    """Return a profile per card; usable bytes are those of an idle device with one CUDA context."""
    return {card.name: _profile(card) for card in _CARDS}


def capabilities(major: int, minor: int) -> tuple[str, ...]:
    """Return what a compute capability can do: its own name (``sm_90``) first, then what follows from it."""
    skipping = [f"{SKIPS_KV}{backend}" for backend, majors in SKIPPING.items() if major in majors]
    fp4 = [FP4] if (major, minor) >= FIRST_FP4 else []
    lacking = {SOFTWARE_FLOATS: FIRST_FP8, SOFTWARE_BLOCKS: FIRST_FP4}
    software = [name for name, first in lacking.items() if (major, minor) < first]
    return (f"sm_{major}{minor}", *skipping, *fp4, *software, SAVES_MEMORY)


def is_ours(device: DeviceInfo) -> bool:
    """Return whether a device is NVIDIA's: of torch's type ``cuda``, with a compute capability."""
    return device.device_type == DEVICE_TYPE and compute_capability(device) != ""


def compute_capability(device: DeviceInfo) -> str:
    """Return the compute capability among a device's capabilities, for example ``sm_90``; else an empty string."""
    return next((name for name in device.capabilities if name.startswith("sm_")), "")


def is_too_old(device: DeviceInfo) -> bool:
    """Return whether a device of NVIDIA's is older than what its kernels are written for."""
    number = compute_capability(device).removeprefix("sm_")
    return number.isdigit() and divmod(int(number), 10) < LEAST


def _profile(card: Card) -> DeviceInfo:
    usable_bytes = (card.driver_total_mib - DRIVER_MIB - CONTEXT_MIB) * MIB
    return DeviceInfo(
        device_type=DEVICE_TYPE,
        name=card.name,
        total_bytes=card.driver_total_mib * MIB,
        free_before_load_bytes=usable_bytes,
        free_bytes=usable_bytes,
        granularity_bytes=GRANULARITY_BYTES,
        capabilities=capabilities(*card.capability),
        source=(
            f"nvidia-smi: {card.driver_total_mib} MiB ({card.published}), "
            f"less {DRIVER_MIB} for the driver and {CONTEXT_MIB} for a CUDA context"
        ),
    )
