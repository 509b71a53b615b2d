"""A live Ascend device, as torch_npu sees it, or the one line that says why there is none."""

from __future__ import annotations

import importlib
from typing import Any

from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.hardware import LiveDevices, first_line, live_memory

from kvdock_ascend import device

PROFILE = "a profile such as 910b-64gb plans without a device"

DEVICES = LiveDevices("ascend", "torch_npu", PROFILE)


def imported() -> Any:
    """Return torch with ``torch.npu`` in it.

    Raises:
        PlanError: torch or torch_npu does not import; one line says which.
    """
    try:
        import torch
    except ImportError as error:
        raise PlanError(f"no Ascend device can be used without torch ({first_line(error)}); {PROFILE}") from error
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:  # OSError: the libraries of CANN are not found
        raise PlanError(
            f"no Ascend device can be used without torch_npu ({first_line(error)}); install the torch_npu that belongs "
            f"to torch {torch.__version__}, and source CANN's set_env.sh; {PROFILE}"
        ) from error
    return torch


def find(torch: Any, selector: str) -> DeviceInfo:
    """Return the device of an ordinal, or torch's current one; `torch` is the module with ``torch.npu``.

    Raises:
        PlanError: torch cannot reach such a device; one line says why.
    """
    return DEVICES.find(torch.npu, selector, lambda: _count(torch), lambda index: _described(torch, index))


def _count(torch: Any) -> int:
    found: int = torch.npu.device_count()
    if not found:
        raise PlanError(f"torch_npu finds no Ascend device; look at npu-smi info; {PROFILE}")
    return found


def _described(torch: Any, index: int) -> DeviceInfo:
    chip: str = torch.npu.get_device_name(index)
    return DeviceInfo(
        device_type=device.DEVICE_TYPE,
        name=chip or f"ascend:{index}",
        **live_memory(torch.npu, index),
        granularity_bytes=device.GRANULARITY_BYTES,
        capabilities=(chip,) if chip else (),
        source=f"torch.npu.mem_get_info of torch {torch.__version__}",
        index=index,
    )
