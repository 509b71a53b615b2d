"""The kernel set of an NPU: torch_npu writes keys and values, torch's own operations do the rest."""

from __future__ import annotations

import torch
from kvdock.kernels.reference import ReferenceKernels, check_values

from kvdock_ascend import ops


class NpuKernels(ReferenceKernels):
    """Writes rows with one operator a buffer, and keys and values of one shape with one for both."""

    def __init__(self, operators: ops.Ops) -> None:
        self._ops = operators
        self._scattered, self._cached = ops.scattered(), ops.cached()

    def store(self, view: torch.Tensor, loc: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values[i]`` to slot ``loc[i]``; of a slot named twice, either value may stay."""
        check_values(view, loc.shape[0], values)
        rows = _rows(view)
        if rows is None or not loc.numel():
            super().store(view, loc, values)
            return
        flat = values.reshape(values.shape[0], rows.shape[1])
        if view.dtype is torch.uint8:  # the operator knows signed bytes alone
            rows, flat = rows.view(torch.int8), flat.view(torch.int8)
        if rows.dtype in self._scattered and flat.dtype is rows.dtype:
            self._ops.scatter_rows(rows, loc, flat)
        else:
            super().store(view, loc, values)

    def store_kv(
        self, k_view: torch.Tensor, v_view: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write keys and values of the same slots: at once if both have one shape, else keys, then values."""
        check_values(k_view, loc.shape[0], k)
        check_values(v_view, loc.shape[0], v)
        if loc.numel() and self._is_cache(k_view, k) and self._is_cache(v_view, v) and k.shape == v.shape:
            slots = loc.to(torch.int32).contiguous()  # every other one of a batch, say, has gaps
            self._ops.write_cache(k.contiguous(), v.contiguous(), k_view, v_view, slots)
        else:
            self.store(k_view, loc, k)
            self.store(v_view, loc, v)

    def gather(self, view: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows at `loc`."""
        rows = _rows(view)
        if rows is None:
            return super().gather(view, loc)
        return rows.index_select(0, loc.reshape(-1)).view(*loc.shape, *view.shape[2:])

    def _is_cache(self, view: torch.Tensor, values: torch.Tensor) -> bool:
        is_known = view.dtype in self._cached and values.dtype is view.dtype
        return is_known and view.dim() == 4 and view.is_contiguous()


def _rows(view: torch.Tensor) -> torch.Tensor | None:
    """Return the slots of a view ``[pages, page_size, …]`` as ``[slots, width]``; ``None`` where they are no such rows."""
    (pages, page_size), (apart, row) = view.shape[:2], view.stride()[:2]
    if page_size == 1:
        row = apart
    width = 1
    for extent, stride in zip(reversed(view.shape[2:]), reversed(view.stride()[2:]), strict=True):
        if extent != 1 and stride != width:
            return None
        width *= extent
    if not width or not pages or apart != row * page_size or row < width:
        return None
    return view.as_strided((pages * page_size, width), (row, 1))
