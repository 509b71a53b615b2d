"""The operators of torch_npu that write keys and values: the only place that names them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Ops:
    """Operators of `torch_npu`, the module or what stands for it; each writes in place and waits for nothing."""

    def __init__(self, torch_npu: Any) -> None:
        self._module = torch_npu

    def scatter_rows(self, rows: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values[i]`` to row ``slots[i]`` of `rows` ``[slots, width]``, of one of `scattered`."""
        self._module.npu_scatter_nd_update_(rows, slots.view(-1, 1), values)

    def write_cache(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write keys and values ``[n, heads, dim]`` to int32 slots of caches ``[pages, page_size, heads, dim]``."""
        self._module._npu_reshape_and_cache(key=k, value=v, key_cache=k_cache, value_cache=v_cache, slot_indices=slots)


def scattered() -> frozenset[torch.dtype]:
    """Return the types that `Ops.scatter_rows` takes."""
    import torch

    return frozenset({torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.int8})


def cached() -> frozenset[torch.dtype]:
    """Return the types that `Ops.write_cache` takes."""
    import torch

    return frozenset({torch.float16, torch.bfloat16, torch.int8})


def load() -> Ops:
    """Return the operators of the torch_npu that is installed.

    Raises:
        PlanError: torch or torch_npu does not import.
    """
    from kvdock_ascend import probe

    probe.imported()
    return Ops(importlib.import_module("torch_npu"))
