"""What planning knows of a device: plain numbers, read from a catalogue or probed by a plugin."""

from __future__ import annotations

import msgspec

from kvdock.checked import check_fields, show
from kvdock.errors import PlanError

GIVEN_BUDGET = "the given budget"
"""Source of a device that stands for a budget alone."""


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator, as one rank sees it. All sizes are bytes.

    `free_before_load_bytes` is what was free before the model's weights were loaded (the base of
    `mem_fraction_static`); `free_bytes` is what is free now. A catalogue profile gives the bytes that
    are usable on an idle device for both, and says in `source` where they come from.
    """

    device_type: str
    """Torch's word for the device: ``cpu``, ``cuda``, ``npu`` …"""
    name: str
    total_bytes: int
    free_before_load_bytes: int
    free_bytes: int
    granularity_bytes: int = 1
    """The device allocator rounds each tensor up to a multiple of this."""
    capabilities: tuple[str, ...] = ()
    source: str = ""
    index: int | None = None
    """Ordinal of a live device; ``None`` for a profile."""

    def __post_init__(self) -> None:
        check_fields(self, f"device {show(self.name)}:")
        if not self.device_type or not self.name:
            raise PlanError("a device needs a device_type and a name, for example 'cuda' and 'h200'")
        if self.granularity_bytes < 1:
            raise PlanError(
                f"device {self.name!r}: granularity_bytes={self.granularity_bytes} is not positive; give 1 if unknown"
            )
        for field in ("total_bytes", "free_before_load_bytes", "free_bytes"):
            value = getattr(self, field)
            if value < 0 or value > 2**63 - 1:
                raise PlanError(f"device {self.name!r}: {field}={value} is outside 0 … 2^63 - 1")
        if self.free_bytes > self.free_before_load_bytes:
            raise PlanError(
                f"device {self.name!r}: free_bytes={self.free_bytes} exceeds "
                f"free_before_load_bytes={self.free_before_load_bytes}; loading a model frees no memory"
            )


def budget_device(budget_bytes: int) -> DeviceInfo:
    """Return what stands for the device where a budget is all that is known: torch's CPU, with as much memory."""
    return DeviceInfo(
        device_type="cpu",
        name="any device",
        total_bytes=budget_bytes,
        free_before_load_bytes=budget_bytes,
        free_bytes=budget_bytes,
        source=GIVEN_BUDGET,
    )
