"""The kernel set of an AMD device: Triton's, or where there is no Triton torch's own, run once before it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.hardware import triton_kernels
from kvdock.kernels.interface import Kernels

from kvdock_rocm import warming

if TYPE_CHECKING:
    from kvdock.cache import KVCache
    from kvdock.options import CacheOptions


class RocmKernels(Kernels):
    """What is ROCm's alone, before another kernel set: all that a first request needs is loaded while building."""

    def warm_up(self, cache: KVCache) -> None:
        """Take, write, move and give back slots once, so that the first `free` neither compiles nor loads a kernel."""
        warming.warm_up(cache)


def kernel_set(options: CacheOptions) -> Kernels:
    """Return the kernel set for a plan's options.

    Raises:
        PlanError: Triton is not here and the options are `strict`.
    """
    base = triton_kernels(options, install="the pytorch-triton-rocm that belongs to this torch")
    if base is None:
        from kvdock.kernels.reference import ReferenceKernels

        base = ReferenceKernels
    return extended(base)()


def extended(base: type[Kernels]) -> type[RocmKernels]:
    """Return a class of kernel sets that is `base` with what `RocmKernels` adds."""
    made: type[RocmKernels] = type(f"Rocm{base.__name__}", (RocmKernels, base), {})
    return made
