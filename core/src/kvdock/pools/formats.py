"""How keys and values lie in tensors, and how rows of them are read back as floats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock import dtypes

if TYPE_CHECKING:
    import torch

    from kvdock.kernels.interface import Kernels


class Codec:
    """How keys and values lie in tensors of one data type.

    8-bit floats are kept as bytes: `encode` divides by the scale, saturates at the largest finite value
    and rounds to nearest even; NaN stays NaN. Values that come in the format already, or as its bytes, are
    kept bit for bit. Other types are converted as torch does, and scales are not used.
    """

    def __init__(self, dtype: str) -> None:
        import torch

        found = dtypes.find(dtype)
        self.format: torch.dtype = getattr(torch, found.name)
        self.stored: torch.dtype = getattr(torch, found.storage)
        self._limit = torch.finfo(self.format).max if self.format is not self.stored else None

    def encode(self, values: torch.Tensor, scale: float | torch.Tensor | None = None) -> torch.Tensor:
        """Return `values` as they are stored; `scale` is a number or a tensor of one element."""
        import torch

        if values.dtype is self.stored:
            return values
        if self._limit is None:
            return values.to(self.stored)
        if values.dtype is self.format:
            return values.view(self.stored)
        wide = values.to(torch.float32)
        if scale is not None:
            wide = wide / scale
        return wide.clamp(-self._limit, self._limit).to(self.format).view(self.stored)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a view of stored values in their format."""
        return stored if self._limit is None else stored.view(self.format)


def read_rows(
    kernels: Kernels,
    view: torch.Tensor,
    loc: torch.Tensor,
    scale: float | torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return copies of the rows of `view` at the slots `loc`, in `dtype`.

    8-bit floats are multiplied by `scale`, which divided them when they were written; other types were not divided.
    """
    import torch

    if view.element_size() > 1:
        return kernels.gather(view, loc).to(dtype)
    rows = kernels.gather(view.view(torch.uint8), loc).view(view.dtype)
    return rows.to(dtype) if scale is None else (rows.to(torch.float32) * scale).to(dtype)
