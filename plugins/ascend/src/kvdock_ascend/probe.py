"""A live Ascend device, as torch_npu sees it, or the one line that says why there is none."""

from __future__ import annotations

import importlib
from typing import Any

from kvdock.device import DeviceInfo
from kvdock.errors import PlanError

from kvdock_ascend import device

PROFILE = "a profile such as 910b-64gb plans without a device"


def is_number(selector: str) -> bool:
    """Return whether a selector means a live device: empty, or an ordinal; else it can only be a profile's name."""
    return not selector or (selector.isascii() and selector.isdigit())


def imported() -> Any:
    """Return torch with ``torch.npu`` in it.

    Raises:
        PlanError: torch or torch_npu does not import; one line says which.
    """
    try:
        import torch
    except ImportError as error:
        raise PlanError(f"no Ascend device can be used without torch ({_first_line(error)}); {PROFILE}") from error
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:  # OSError: the libraries of CANN are not found
        raise PlanError(
            f"no Ascend device can be used without torch_npu ({_first_line(error)}); install the torch_npu that belongs "
            f"to torch {torch.__version__}, and source CANN's set_env.sh; {PROFILE}"
        ) from error
    return torch


def find(torch: Any, selector: str) -> DeviceInfo:
    """Return the device of an ordinal, or torch's current one; `torch` is the module with ``torch.npu``.

    ``free_before_load_bytes`` counts what torch holds in this process, the weights if they are loaded, as free.

    Raises:
        PlanError: torch cannot reach such a device; one line says why.
    """
    try:
        count: int = torch.npu.device_count()
        if not count:
            raise PlanError(f"torch_npu finds no Ascend device; look at npu-smi info; {PROFILE}")
        index = int(selector) if selector else int(torch.npu.current_device())
        if index >= count:
            raise PlanError(f"no device ascend:{index} is here: torch_npu finds {_listed(count)}")
        return _described(torch, index)
    except RuntimeError as error:
        raise PlanError(
            f"no device ascend:{selector or 0} can be used here: {_first_line(error)}; {PROFILE}"
        ) from error


def _described(torch: Any, index: int) -> DeviceInfo:
    free_bytes, total_bytes = torch.npu.mem_get_info(index)
    held_bytes = torch.npu.memory_reserved(index)
    chip: str = torch.npu.get_device_name(index)
    return DeviceInfo(
        device_type=device.DEVICE_TYPE,
        name=chip or f"ascend:{index}",
        total_bytes=total_bytes,
        free_before_load_bytes=min(total_bytes, free_bytes + held_bytes),
        free_bytes=free_bytes,
        granularity_bytes=device.GRANULARITY_BYTES,
        capabilities=(chip,) if chip else (),
        source=f"torch.npu.mem_get_info of torch {torch.__version__}",
        index=index,
    )


def _listed(count: int) -> str:
    return "only ascend:0" if count == 1 else f"ascend:0 to ascend:{count - 1}"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
