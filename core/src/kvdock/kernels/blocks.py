"""Elements of 8 or 4 bits with a scale for each block of a row: how they are found, and what they are worth.

8-bit floats have float32 scales: the largest magnitude of a block over the largest of the format, so that it
reaches the format's end; a block of zeros has 1. Infinities count as the largest float32, and NaN makes its whole
block NaN. 4-bit floats have powers of two; `kvdock.kernels.microscaling` defines them.
"""

from __future__ import annotations

import msgspec
import torch

from kvdock import dtypes
from kvdock.kernels import microscaling


def quantize(values: torch.Tensor, dtype: str, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `values` ``[…, dim]`` as bytes of `dtype`, and the scale of each `block` of the last dimension.

    Raises:
        SlotError: an odd number of elements that lie two to a byte.
    """
    if dtypes.find(dtype).bits == 4:
        return microscaling.encode(values, _of_blocks(dtype, block))
    element: torch.dtype = getattr(torch, dtype)
    limit = torch.finfo(element).max
    blocks = microscaling.in_blocks(values, block)
    wide = torch.finfo(torch.float32)
    largest = blocks.abs().amax(-1).clamp(max=wide.max)
    # Below the smallest normal number a quotient may be no number any more.
    scales = torch.where(largest == 0, 1.0, (largest / limit).clamp(min=wide.tiny))
    scaled = (blocks / scales.unsqueeze(-1)).clamp(-limit, limit)
    return scaled.to(element).view(torch.uint8).flatten(-2)[..., : values.shape[-1]], scales


def dequantize(data: torch.Tensor, scales: torch.Tensor, dtype: str, block: int) -> torch.Tensor:
    """Return the float32 values of what `quantize` answered."""
    if dtypes.find(dtype).bits == 4:
        return microscaling.decode(data, scales, _of_blocks(dtype, block), torch.float32)
    blocks = microscaling.in_blocks(data.view(getattr(torch, dtype)), block)
    return (blocks * scales.unsqueeze(-1)).flatten(-2)[..., : data.shape[-1]]


def _of_blocks(dtype: str, block: int) -> dtypes.DType:
    return msgspec.structs.replace(dtypes.find(dtype), block=block)
