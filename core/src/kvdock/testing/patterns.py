"""Numbers that a data type holds exactly, drawn from bytes: what is read back can be compared bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvdock import dtypes

if TYPE_CHECKING:
    import torch

_EXACT_INTEGERS = {"float8_e4m3fn": 16, "float8_e4m3fnuz": 16, "float8_e5m2": 8, "float8_e5m2fnuz": 8}
"""How many integers from 0 a narrow type holds exactly (a power of two); wider types hold 256 and more."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floats. 8-bit floats hold them as well, whatever power of two scales a block of theirs."""
_POWERS = 8
"""Powers of two that a block is scaled by, from 2 ** -3 on."""


class Pattern(NamedTuple):
    """Columns of numbers: `integers` from 0; or in blocks of `block` columns `codes` times a power of two a block.

    The first column of a block is `top`, its largest magnitude, so that the scale that a format finds for the
    block is that power of two.
    """

    columns: int
    integers: int = 256
    block: int = 0
    top: float = 0.0
    codes: tuple[float, ...] = ()

    def numbers(self, drawn: torch.Tensor) -> torch.Tensor:
        """Return the numbers of bytes ``[…, columns]``: integers as uint8, blocks as float32."""
        import torch

        if not self.block:
            return drawn & (self.integers - 1)
        codes = torch.tensor(self.codes, device=drawn.device)
        found = codes[(drawn & (len(self.codes) - 1)).to(torch.int64)]
        found[..., :: self.block] = self.top
        powers = (2.0 ** ((drawn[..., :: self.block] & (_POWERS - 1)).float() - 3)).repeat_interleave(self.block, -1)
        return found.mul_(powers[..., : self.columns])


def plain(columns: int, dtype: str) -> Pattern:
    """Return columns of a type without scales: the small integers that it holds."""
    return Pattern(columns, _EXACT_INTEGERS.get(dtypes.find(dtype).name, 256))


def in_blocks(columns: int, block: int) -> Pattern:
    """Return columns of a type of 4 or 8 bits whose blocks have a power of two, or one times 6, for a scale."""
    return Pattern(columns, block=block, top=6.0, codes=(*_E2M1, *(-code for code in _E2M1)))


def scaled_to_limit(columns: int, block: int, dtype: str) -> Pattern:
    """Return columns of 8-bit floats that a scale stretches to the largest of their format; 4 bits as `in_blocks`."""
    import torch

    found = dtypes.find(dtype)
    if found.bits == 4:
        return in_blocks(columns, block)
    limit = torch.finfo(getattr(torch, found.name)).max
    return Pattern(columns, block=block, top=limit, codes=tuple(float(n) for n in range(-8, 8)))
