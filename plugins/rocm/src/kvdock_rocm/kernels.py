"""The kernel set of an AMD device: Triton's, or where there is no Triton torch's own, run once before it is needed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from kvdock.errors import PlanError
from kvdock.kernels.interface import Kernels
from kvdock.plugins.loading import PluginWarning

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
    base = _triton(bool(options.strict))
    if base is None:
        from kvdock.kernels.reference import ReferenceKernels

        base = ReferenceKernels
    return extended(base)()


def extended(base: type[Kernels]) -> type[RocmKernels]:
    """Return a class of kernel sets that is `base` with what `RocmKernels` adds."""
    made: type[RocmKernels] = type(f"Rocm{base.__name__}", (RocmKernels, base), {})
    return made


def _triton(is_strict: bool) -> type[Kernels] | None:
    """Return Triton's kernel set, or after a warning nothing.

    Raises:
        PlanError: it does not import, and that is no warning but an error.
    """
    try:
        from kvdock.kernels.triton_set import TritonKernels
    except ImportError as error:
        why = (
            f"Triton does not import here ({error}), so torch's own operations write and move keys and values, "
            "several launches for one of Triton's; install the pytorch-triton-rocm that belongs to this torch"
        )
        if is_strict:
            raise PlanError(f"strict=true refuses a warning: {why}") from error
        warnings.warn(why, PluginWarning, stacklevel=2)
        return None
    return TritonKernels
