"""A live NVIDIA device, as torch sees it, or the one line that says why there is none."""

from __future__ import annotations

import re
from typing import Any

from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.hardware import LiveDevices, first_line, live_memory

from kvdock_cuda import device

PROFILE = "a profile such as h200 plans without a device"

DEVICES = LiveDevices("cuda", "torch", PROFILE)


def find(torch: Any, selector: str) -> DeviceInfo:
    """Return the device of an ordinal, or torch's current one; `torch` is the module.

    Raises:
        PlanError: torch cannot reach such a device; one line says why.
    """
    check_build(torch)
    none = f"torch {torch.__version__} finds no CUDA device"
    return DEVICES.find(
        torch.cuda, selector, lambda: DEVICES.counted(torch.cuda, none), lambda index: _described(torch, index)
    )


def missing_torch(error: ImportError) -> PlanError:
    """Return why no device is found where torch does not import."""
    return PlanError(f"no CUDA device can be probed without torch ({first_line(error)}); {PROFILE}")


def check_build(torch: Any) -> None:
    """Tell a build of torch for CUDA from the others.

    Raises:
        PlanError: it is another.
    """
    if torch.version.cuda is not None:
        return
    hip = torch.version.hip
    build = "CPUs alone" if hip is None else f"ROCm {hip}, which kvdock-rocm probes as rocm:0"
    raise PlanError(f"no CUDA device can be used: torch {torch.__version__} is a build for {build}; {PROFILE}")


def _check_architecture(torch: Any, index: int) -> tuple[int, int]:
    """Return the compute capability of a device, after verifying that this build of torch has code for it.

    Code runs on its own generation from its minor version on (``sm_90a`` on that alone); ``compute_…`` is compiled anew
    for any later device.
    """
    own: tuple[int, int] = torch.cuda.get_device_capability(index)
    known = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name) for name in torch.cuda.get_arch_list()]
    built = [(match[1], (int(match[2]), int(match[3])), match[4]) for match in known if match]
    serves = [code for kind, code, only in built if _runs(kind, code, only, own)]
    if built and not serves:
        oldest = min(code for _, code, _ in built)
        raise PlanError(
            f"device cuda:{index} is sm_{own[0]}{own[1]}, and torch {torch.__version__} has no code for it (the oldest: "
            f"sm_{oldest[0]}{oldest[1]}); install one that has; {PROFILE}"
        )
    return own


def _runs(kind: str, code: tuple[int, int], only: str, own: tuple[int, int]) -> bool:
    if only == "a":
        return code == own
    return code <= own and (kind == "compute" or code[0] == own[0])


def _described(torch: Any, index: int) -> DeviceInfo:
    capability = _check_architecture(torch, index)
    return DeviceInfo(
        device_type=device.DEVICE_TYPE,
        name=torch.cuda.get_device_name(index) or f"cuda:{index}",
        **live_memory(torch.cuda, index),
        granularity_bytes=device.GRANULARITY_BYTES,
        capabilities=device.capabilities(*capability),
        source=f"torch.cuda.mem_get_info of torch {torch.__version__}",
        index=index,
    )
