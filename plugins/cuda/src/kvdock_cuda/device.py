"""Profiles of NVIDIA devices: one table of what the driver reports, one derivation of what is usable."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from kvdock.device import DeviceInfo

MIB = 2**20

DRIVER_MIB = 768
"""What the driver keeps for itself: the most seen between its total and the total that a process gets.

An A100 80GB has 81,920 MiB of which a process gets 79.25 GiB = 81,152 MiB, a B200 183,359 MiB of which it
gets 178.35 GiB; the other devices keep less, so plans for them are on the safe side.
"""

CONTEXT_MIB = 512
"""Allowance for one CUDA context with the kernels of an engine loaded."""

GRANULARITY_BYTES = 2 * MIB
"""The caching allocator of torch asks the driver for segments in multiples of 2 MiB."""


class Card(msgspec.Struct, frozen=True):
    """One device: the total that the driver reports, its compute capability, and where the total is published."""

    name: str
    driver_total_mib: int
    capability: str
    published: str


_MEASURED = "thundergolfer.com/blog/nvidia-gpu-memory-capacity"
_CARDS = (
    Card("a100-40gb", 40_960, "sm_80", _MEASURED),
    Card("a100-80gb", 81_920, "sm_80", _MEASURED),
    Card("l40s", 46_068, "sm_89", _MEASURED),
    Card("h100", 81_559, "sm_90", _MEASURED),
    Card("h200", 143_771, "sm_90", _MEASURED),
    Card("b200", 183_359, "sm_100", "github.com/NVIDIA/TensorRT-LLM/issues/10278"),
    Card("rtx4090", 24_564, "sm_89", "github.com/RLinf/RLinf/issues/255"),
    Card("rtx5090", 32_607, "sm_120", "github.com/noonghunna/club-3090/issues/1229"),
)


def catalogue() -> Mapping[str, DeviceInfo]:
    """Return a profile per card; usable bytes are those of an idle device with one CUDA context."""
    return {card.name: _profile(card) for card in _CARDS}


def _profile(card: Card) -> DeviceInfo:
    usable_bytes = (card.driver_total_mib - DRIVER_MIB - CONTEXT_MIB) * MIB
    return DeviceInfo(
        device_type="cuda",
        name=card.name,
        total_bytes=card.driver_total_mib * MIB,
        free_before_load_bytes=usable_bytes,
        free_bytes=usable_bytes,
        granularity_bytes=GRANULARITY_BYTES,
        capabilities=(card.capability,),
        source=(
            f"nvidia-smi: {card.driver_total_mib} MiB ({card.published}), "
            f"less {DRIVER_MIB} for the driver and {CONTEXT_MIB} for a CUDA context"
        ),
    )
