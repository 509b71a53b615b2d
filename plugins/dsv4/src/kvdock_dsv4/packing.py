"""The packed row: 8-bit columns with a power-of-two scale for each 64 of them, then columns with a position in bfloat16.

In a page the columns of all its rows come first, then their scales: 576 and 8 bytes for a row of 448 and 64 columns,
the eighth scale byte being padding. A scale is the smallest power of two that keeps its block inside the 8-bit
format, as a byte biased by 127, so a block never saturates; a block of zeros has scale 1. NaN and
infinities read back as what they are; the rest of an infinity's block reads as if it were the largest float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from kvdock import dtypes
from kvdock.errors import PlanError
from kvdock.layout import round_up
from kvdock.pools.index_keys import recast

if TYPE_CHECKING:
    import torch

BLOCK = 64
"""Columns that share a scale."""
ELEMENT = "float8_e4m3fn"
ROPE_DTYPE = "bfloat16"
BIAS = 127


class PackedFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a row of `nope_dim` and `rope_dim` columns lies in bytes."""

    nope_dim: int
    rope_dim: int

    def __post_init__(self) -> None:
        if self.nope_dim % BLOCK:
            raise PlanError(
                f"{self.nope_dim} columns without a position are no whole number of blocks of {BLOCK}, which share a scale"
            )

    @property
    def blocks(self) -> int:
        """Scales of a row."""
        return self.nope_dim // BLOCK

    @property
    def data_nbytes(self) -> int:
        """Bytes of a row's columns: 576 for 448 and 64. A page takes a whole number of them."""
        return self.nope_dim + self.rope_dim * dtypes.find(ROPE_DTYPE).bits // 8

    @property
    def scale_nbytes(self) -> int:
        """Bytes of a row's scales, padded to 8."""
        return round_up(self.blocks, 8)

    @property
    def nbytes(self) -> int:
        """Bytes of a row: 584 for 448 and 64 columns."""
        return self.data_nbytes + self.scale_nbytes

    def split(self, pages: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the columns ``[pages, page_size, data_nbytes]`` and the scales of pages of bytes, as views."""
        end = page_size * self.data_nbytes
        scales = pages[:, end : end + page_size * self.scale_nbytes]
        shape = (pages.shape[0], page_size, -1)
        return pages[:, :end].view(shape), scales.view(shape)

    def pack(self, nope: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows ``[n, nope_dim]`` and ``[n, rope_dim]`` as bytes: columns ``[n, …]`` and scales ``[n, …]``."""
        import torch

        element: torch.dtype = getattr(torch, ELEMENT)
        limit = torch.finfo(element).max
        blocks = nope.to(torch.float32).reshape(*nope.shape[:-1], self.blocks, BLOCK)
        exponents = _exponents(blocks, limit)
        # 2 ** -exponent by its bits: exponents are from -127 to 120, so none is too small for a normal float32.
        powers = ((BIAS - exponents) << 23).view(torch.float32)
        scaled = (blocks * powers.unsqueeze(-1)).clamp_(-limit, limit)
        data = scaled.to(element).view(torch.uint8).flatten(-2)
        tail = recast(rope.to(getattr(torch, ROPE_DTYPE)), torch.uint8)
        scales = torch.nn.functional.pad((exponents + BIAS).to(torch.uint8), (0, self.scale_nbytes - self.blocks))
        return torch.cat([data, tail], -1), scales

    def unpack(self, data: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `pack` stored: columns without a position in float32, those with one in bfloat16."""
        import torch

        codes = data[..., : self.nope_dim].contiguous().view(getattr(torch, ELEMENT))
        blocks = codes.to(torch.float32).view(*codes.shape[:-1], self.blocks, BLOCK)
        exponents = scales[..., : self.blocks].to(torch.int32) - BIAS
        nope = torch.ldexp(blocks, exponents.unsqueeze(-1)).flatten(-2)
        return nope, recast(data[..., self.nope_dim :], getattr(torch, ROPE_DTYPE))


def _exponents(blocks: torch.Tensor, limit: float) -> torch.Tensor:
    """Return, for each block, the smallest exponent at which its largest magnitude is at most `limit`; 0 for zeros."""
    import torch

    wide = torch.finfo(torch.float32)
    largest = blocks.abs().nan_to_num_(0.0, posinf=wide.max).amax(-1)
    # A quotient of m · 2 ** e with m from ½ to below 1 is at most 2 ** e, and at most 2 ** (e - 1) where m is ½.
    mantissas, exponents = torch.frexp(largest / limit)
    exponents = exponents - (mantissas == 0.5).to(exponents.dtype)
    return torch.where(largest == 0, 0, exponents).clamp(min=-BIAS)
