"""Ascend devices: which are ours, and profiles derived from what the driver reports."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from kvdock.device import DeviceInfo

MIB = 2**20

DEVICE_TYPE = "npu"
"""Torch's word for these devices, once ``torch_npu`` is imported."""

DRIVER_MIB = 3_456
"""Allowance for what the firmware keeps: the most that `npu-smi` shows as used on an idle die is 3,419 MiB.

Of a die's 65,536 MiB torch gets 60.96 GiB = 62,423 MiB on a 910B and 61.27 GiB on a 910C, so plans are on the safe side.
"""

CONTEXT_MIB = 512
"""Allowance for one context with the kernels of an engine loaded."""

GRANULARITY_BYTES = 2 * MIB
"""The caching allocator of torch_npu asks the driver for segments in multiples of 2 MiB."""

WITHOUT_BFLOAT16 = ("Ascend310", "Ascend910A", "Ascend910P")
"""First letters of the names of chips whose kernels read no bfloat16; 910B and 910C do."""


class Card(msgspec.Struct, frozen=True):
    """One device, of cards with two dies one die: the total that `npu-smi` shows, its chip, and where that is published."""

    name: str
    driver_total_mib: int
    chip: str
    published: str


_CARDS = (
    Card("910b-32gb", 32_768, "Ascend910B4", "github.com/Project-HAMi/HAMi/issues/1860"),
    Card("910b-64gb", 65_536, "Ascend910B3", "github.com/vllm-project/vllm-ascend/issues/1670"),
    Card("910c", 65_536, "Ascend910_9392", "github.com/vllm-project/vllm-ascend/issues/12980"),
)


def catalogue() -> Mapping[str, DeviceInfo]:
    """Return a profile per card, of a 910C per die; usable bytes are those of an idle device with one context."""
    return {card.name: _profile(card) for card in _CARDS}


def is_ours(device: DeviceInfo) -> bool:
    """Return whether a device is an NPU."""
    return device.device_type == DEVICE_TYPE


def reads_bfloat16(device: DeviceInfo) -> bool:
    """Return whether the device's kernels read bfloat16; chips that are not known do."""
    return not any(name.startswith(WITHOUT_BFLOAT16) for name in device.capabilities)


def _profile(card: Card) -> DeviceInfo:
    usable_bytes = (card.driver_total_mib - DRIVER_MIB - CONTEXT_MIB) * MIB
    return DeviceInfo(
        device_type=DEVICE_TYPE,
        name=card.name,
        total_bytes=card.driver_total_mib * MIB,
        free_before_load_bytes=usable_bytes,
        free_bytes=usable_bytes,
        granularity_bytes=GRANULARITY_BYTES,
        capabilities=(card.chip,),
        source=(
            f"npu-smi: {card.driver_total_mib} MiB ({card.published}), "
            f"less {DRIVER_MIB} for the firmware and {CONTEXT_MIB} for a context"
        ),
    )
