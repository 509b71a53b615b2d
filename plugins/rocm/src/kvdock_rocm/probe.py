"""A live AMD device, as ROCm's torch sees it, or the one line that says why there is none."""

from __future__ import annotations

from typing import Any

from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.hardware import LiveDevices, first_line, live_memory

from kvdock_rocm import device

PROFILE = "a profile such as mi300x plans without a device"

DEVICES = LiveDevices("rocm", "torch", PROFILE)


def find(torch: Any, selector: str) -> DeviceInfo:
    """Return the device of an ordinal, or torch's current one; `torch` is the module, which calls it ``cuda:N``.

    Raises:
        PlanError: torch cannot reach such a device; one line says why.
    """
    check_build(torch)
    none = f"torch {torch.__version__} finds no ROCm device"
    return DEVICES.find(
        torch.cuda, selector, lambda: DEVICES.counted(torch.cuda, none), lambda index: _described(torch, index)
    )


def missing_torch(error: ImportError) -> PlanError:
    """Return why no device is found where torch does not import."""
    return PlanError(f"no ROCm device can be probed without torch ({first_line(error)}); {PROFILE}")


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


def _check_architecture(torch: Any, index: int) -> str:
    """Return the architecture of a device, after verifying that this build of torch has code for it.

    Code runs on its own architecture alone; ``gfx9-4-generic`` and its like serve several.
    """
    # The name has the state of ECC and of page faults behind it: gfx942:sramecc+:xnack-.
    own: str = torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]
    built = sorted({name.partition(":")[0] for name in torch.cuda.get_arch_list()})
    if built and own not in built and not any(own in device.GENERIC.get(name, ()) for name in built):
        raise PlanError(
            f"device rocm:{index} is {own}, and torch {torch.__version__} has no code for it (for {', '.join(built)} "
            f"alone); install one that has; {PROFILE}"
        )
    return own


def _described(torch: Any, index: int) -> DeviceInfo:
    architecture = _check_architecture(torch, index)
    return DeviceInfo(
        device_type=device.DEVICE_TYPE,
        name=torch.cuda.get_device_name(index) or f"{architecture} (rocm:{index})",
        **live_memory(torch.cuda, index),
        granularity_bytes=device.GRANULARITY_BYTES,
        capabilities=device.capabilities(architecture),
        source=f"torch.cuda.mem_get_info of torch {torch.__version__}",
        index=index,
    )
