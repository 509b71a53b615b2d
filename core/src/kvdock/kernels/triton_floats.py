# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Floats of 4 and 8 bits in Triton, by integer arithmetic: the same bits on every device, whatever it converts itself.

What is encoded has been clamped to the largest element. `SPECIAL` says which codes are no numbers: ``fn`` has NaN
alone, above the largest; ``ieee`` has infinities too; ``fnuz`` has NaN in the place of −0.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Element(NamedTuple):
    """An element of 8 bits: its mantissa's bits, the exponent's bias, and which codes are no numbers."""

    mantissa: int
    bias: int
    special: str


ELEMENTS = {
    "float8_e4m3fn": Element(3, 7, "fn"),
    "float8_e5m2": Element(2, 15, "ieee"),
    "float8_e4m3fnuz": Element(3, 8, "fnuz"),
    "float8_e5m2fnuz": Element(2, 16, "fnuz"),
}


def largest(element: str) -> float:
    """Return the largest number of an 8-bit type."""
    return float(torch.finfo(getattr(torch, element)).max)


@triton.jit
def load_wide(pointer, mask, IS_BF16: tl.constexpr):
    """Floats as float32; of bfloat16 the pointer is to int16, the upper half of a float32."""
    loaded = tl.load(pointer, mask=mask, other=0)
    wide = loaded.to(tl.float32)
    if IS_BF16:
        wide = (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def store_narrow(pointer, wide, mask, IS_BF16: tl.constexpr):
    """Write float32 as the pointer's type; of bfloat16 the pointer is to int16, rounded to nearest even."""
    if IS_BF16:
        bits = wide.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        narrow = tl.where(wide != wide, 0x7FC0, rounded).to(tl.int16)
    else:
        narrow = wide.to(pointer.dtype.element_ty)
    tl.store(pointer, narrow, mask=mask)


@triton.jit
def rounded(magnitudes):
    """The nearest integers, ties to even, of floats from 0 to 2 ** 22."""
    return (magnitudes + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000


@triton.jit
def to_8_bits(wide, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr):
    """Codes, as int32, of floats that are no larger than the largest element."""
    bits = wide.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    halfway = ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = ((magnitude + halfway) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal element codes count steps of one size.
    PER_STEP: tl.constexpr = 2.0 ** (BIAS + MANTISSA - 1)
    is_small = magnitude < ((128 - BIAS) << 23)
    small = rounded(tl.where(is_small, tl.abs(wide), 0.0) * PER_STEP)
    code = tl.where(is_small, small, normal)
    sign = (bits >> 24) & 0x80
    if SPECIAL == "fnuz":
        code = tl.where(code == 0, 0, code | sign)
        code = tl.where(wide != wide, 0x80, code)
    else:
        code = tl.where(wide != wide, 0x7F, code | sign)
    return code


@triton.jit
def from_8_bits(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr):
    """The float32 values of codes that are int32."""
    magnitude = code & 0x7F
    STEP: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
    normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    small = (magnitude.to(tl.float32) * STEP).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < (1 << MANTISSA), small, normal) | ((code & 0x80) << 24)
    if SPECIAL == "fnuz":
        bits = tl.where(code == 0x80, 0x7FC00000, bits)
    elif SPECIAL == "ieee":
        bits = tl.where(magnitude >= 0x7C, bits | 0x7F800000, bits)
    else:
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_4_bits(wide):
    """Codes, as int32, of the nearest of 0, ½, 1, 1½, 2, 3, 4, 6 (ties to even codes), a sign above them."""
    magnitude = tl.minimum(tl.abs(wide), 6.0)
    # Codes count steps of ½ up to 2, of 1 up to 4 and of 2 above, and rounding is to even counts in each.
    per_step = tl.where(magnitude >= 4, 0.5, tl.where(magnitude >= 2, 1.0, 2.0))
    before = tl.where(magnitude >= 4, 4, tl.where(magnitude >= 2, 2, 0))
    return (rounded(magnitude * per_step) + before) | ((wide.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def from_4_bits(code):
    """The float32 values of codes that are int32."""
    count = code & 7
    halves = tl.where(count < 4, count, tl.where(count < 6, 2 * count - 4, 4 * count - 16))
    bits = (halves.to(tl.float32) * 0.5).to(tl.int32, bitcast=True) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_exponent(magnitude, is_nan, EXPONENT: tl.constexpr):
    """The e8m0 codes, as int32, of scales of blocks with these largest magnitudes; ``2 ** EXPONENT`` is an element's."""
    biased = (magnitude.to(tl.int32, bitcast=True) >> 23) - EXPONENT
    return tl.where(is_nan, 255, tl.maximum(biased, 0))


@triton.jit
def from_exponent(code):
    """The powers of two of e8m0 codes that are int32."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
