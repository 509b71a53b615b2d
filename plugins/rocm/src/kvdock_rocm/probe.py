"""A live AMD device, as ROCm's torch sees it, or the one line that says why there is none."""

from __future__ import annotations

from typing import Any

from kvdock.device import DeviceInfo
from kvdock.errors import PlanError

from kvdock_rocm import device

PROFILE = "a profile such as mi300x plans without a device"


def is_number(selector: str) -> bool:
    """Return whether a selector means a live device: empty, or an ordinal; else it can only be a profile's name."""
    return not selector or (selector.isascii() and selector.isdigit())


def find(torch: Any, selector: str) -> DeviceInfo:
    """Return the device of an ordinal, or torch's current one; `torch` is the module, which calls it ``cuda:N``.

    ``free_before_load_bytes`` counts what torch holds in this process, the weights if they are loaded, as free.

    Raises:
        PlanError: torch cannot reach such a device; one line says why.
    """
    check_build(torch)
    count = _count(torch)
    try:
        index = int(selector) if selector else torch.cuda.current_device()
        if index >= count:
            raise PlanError(f"no device rocm:{index} is here: torch finds {_listed(count)}")
        return _described(torch, index)
    except RuntimeError as error:
        raise PlanError(f"no device rocm:{selector or 0} can be used here: {_first_line(error)}; {PROFILE}") from error


def missing_torch(error: ImportError) -> PlanError:
    """Return why no device is found where torch does not import."""
    return PlanError(f"no ROCm device can be probed without torch ({_first_line(error)}); {PROFILE}")


def check_build(torch: Any) -> None:
    """Tell ROCm's build of torch from the others.

    Raises:
        PlanError: it is another.
    """
    if torch.version.hip is not None:
        return
    cuda = torch.version.cuda
    build = "CPUs alone" if cuda is None else f"CUDA {cuda}, which kvdock-cuda probes as cuda:0"
    raise PlanError(f"no ROCm device can be used: torch {torch.__version__} is a build for {build}; {PROFILE}")


def _count(torch: Any) -> int:
    count: int = torch.cuda.device_count()
    if count:
        return count
    try:
        torch.cuda.init()  # says whether the driver is missing or shows no device
    except RuntimeError as error:
        reason = _first_line(error)
    else:
        reason = "the driver shows none"
    raise PlanError(f"torch {torch.__version__} finds no ROCm device: {reason}; {PROFILE}")


def _check_architecture(torch: Any, index: int) -> str:
    """Return the architecture of a device, after verifying that this build of torch has code for it.

    Code runs on its own architecture alone; ``gfx9-4-generic`` and its like serve several.
    """
    # The name has the state of ECC and of page faults behind it: gfx942:sramecc+:xnack-.
    own: str = torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]
    built = sorted({name.partition(":")[0] for name in torch.cuda.get_arch_list()})
    if built and own not in built and not any(name.endswith("-generic") for name in built):
        raise PlanError(
            f"device rocm:{index} is {own}, and torch {torch.__version__} has no code for it (for {', '.join(built)} "
            f"alone); install one that has; {PROFILE}"
        )
    return own


def _described(torch: Any, index: int) -> DeviceInfo:
    architecture = _check_architecture(torch, index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    free_bytes = min(free_bytes, total_bytes)  # integrated devices count the host's free memory
    held_bytes = torch.cuda.memory_reserved(index)
    return DeviceInfo(
        device_type=device.DEVICE_TYPE,
        name=torch.cuda.get_device_name(index) or f"{architecture} (rocm:{index})",
        total_bytes=total_bytes,
        free_before_load_bytes=min(total_bytes, free_bytes + held_bytes),
        free_bytes=free_bytes,
        granularity_bytes=device.GRANULARITY_BYTES,
        capabilities=(architecture,),
        source=f"torch.cuda.mem_get_info of torch {torch.__version__}",
        index=index,
    )


def _listed(count: int) -> str:
    return "only rocm:0" if count == 1 else f"rocm:0 to rocm:{count - 1}"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
