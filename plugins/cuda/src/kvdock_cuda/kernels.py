"""The kernel set of an NVIDIA device: Triton's, or where there is no Triton torch's own, and what streams and memory add."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from kvdock.hardware import triton_kernels
from kvdock.kernels.interface import Kernels

from kvdock_cuda import memory, settings
from kvdock_cuda.streams import SideStream

if TYPE_CHECKING:
    import torch
    from kvdock.options import CacheOptions


class CudaKernels(Kernels):
    """What is CUDA's alone, before a kernel set `base`: values beside keys, and memory that can be released."""

    base: ClassVar[type[Kernels]]

    def __init__(self, side: SideStream | None) -> None:
        super().__init__()
        self.side = side
        """``None``: keys and values are written on the current stream alone."""

    def store_kv(
        self, k_view: torch.Tensor, v_view: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write keys and values of the same slots; on two streams where `SideStream.serves` says so."""
        if self.side is not None and self.side.serves(loc):
            self.side.store_kv(self.store, k_view, v_view, loc, k, v)
        else:
            self.base.store_kv(self, k_view, v_view, loc, k, v)

    def releasable(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a region of torch_memory_saver."""
        return memory.releasable(device)


def kernel_set(torch: Any, options: CacheOptions) -> Kernels:
    """Return the kernel set for a plan's options; `torch` is the module.

    Raises:
        PlanError: Triton is not here and the options are `strict`.
    """
    base = triton_kernels(options, install="it with: pip install 'kvdock[triton]'")
    asked = settings.of(options).side_stream
    is_beside = base is None if asked is None else asked
    side = SideStream(torch) if is_beside and not options.pd_multiplexing else None
    if base is None:
        from kvdock.kernels.reference import ReferenceKernels

        base = ReferenceKernels
    return extended(base)(side)


def extended(base: type[Kernels]) -> type[CudaKernels]:
    """Return a class of kernel sets that is `base` with what `CudaKernels` adds."""
    made: type[CudaKernels] = type(f"Cuda{base.__name__}", (CudaKernels, base), {"base": base})
    return made
