"""A live NVIDIA device, as torch sees it, or the one line that says why there is none."""

from __future__ import annotations

import re
from typing import Any

from kvdock.device import DeviceInfo
from kvdock.errors import PlanError

from kvdock_cuda import device

PROFILE = "a profile such as h200 plans without a device"


def is_number(selector: str) -> bool:
    """Return whether a selector means a live device: empty, or an ordinal; else it can only be a profile's name."""
    return not selector or (selector.isascii() and selector.isdigit())


def find(torch: Any, selector: str) -> DeviceInfo:
    """Return the device of an ordinal, or torch's current one; `torch` is the module.

    ``free_before_load_bytes`` counts what torch holds in this process, the weights if they are loaded, as free.

    Raises:
        PlanError: torch cannot reach such a device; one line says why.
    """
    check_build(torch)
    count = _count(torch)
    try:
        index = int(selector) if selector else torch.cuda.current_device()
        if index >= count:
            raise PlanError(f"no device cuda:{index} is here: torch finds {_listed(count)}")
        return _described(torch, index)
    except RuntimeError as error:
        raise PlanError(f"no device cuda:{selector or 0} can be used here: {_first_line(error)}; {PROFILE}") from error


def missing_torch(error: ImportError) -> PlanError:
    """Return why no device is found where torch does not import."""
    return PlanError(f"no CUDA device can be probed without torch ({_first_line(error)}); {PROFILE}")


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


def _count(torch: Any) -> int:
    count: int = torch.cuda.device_count()
    if count:
        return count
    try:
        torch.cuda.init()  # says whether the driver is missing, too old, or shows no device
    except RuntimeError as error:
        reason = _first_line(error)
    else:
        reason = "the driver shows none"
    raise PlanError(f"torch {torch.__version__} finds no CUDA device: {reason}; {PROFILE}")


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
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    free_bytes = min(free_bytes, total_bytes)  # integrated devices count the host's free memory
    held_bytes = torch.cuda.memory_reserved(index)
    return DeviceInfo(
        device_type=device.DEVICE_TYPE,
        name=torch.cuda.get_device_name(index) or f"cuda:{index}",
        total_bytes=total_bytes,
        free_before_load_bytes=min(total_bytes, free_bytes + held_bytes),
        free_bytes=free_bytes,
        granularity_bytes=device.GRANULARITY_BYTES,
        capabilities=device.capabilities(*capability),
        source=f"torch.cuda.mem_get_info of torch {torch.__version__}",
        index=index,
    )


def _listed(count: int) -> str:
    return "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
