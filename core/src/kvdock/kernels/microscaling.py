"""Block formats in torch: floats → elements of 4 or 8 bits and a scale for each block, and back.

Element types and scales are those of OCP Microscaling Formats v1.0: e2m1 lies two to a byte, the first of a
pair in the low half; e8m0 is a power of two, biased by 127, 255 being NaN. Elements are rounded to nearest
even and saturate. With e8m0 scales a block's exponent is that of its largest magnitude less that of the
largest element; with e4m3 scales a block's scale is its largest magnitude over the largest element, less a
factor that is given for the whole layer. A block of zeros has the scale that zeroed bytes have.

Infinities count as the largest float32 and saturate with it, so what shares their block reads zero. NaN
makes its whole block NaN where elements have none (e2m1), and stays alone where they have (e4m3).

Everything is arithmetic on the tensors themselves: no tables to bring to a device, nothing read back.
"""

from __future__ import annotations

import torch

from kvdock.dtypes import DType
from kvdock.errors import SlotError

PER_BYTE = {4: 2, 8: 1}
"""Bits of an element → elements in a byte."""
_E2M1_MAX, _E2M1_EXPONENT = 6.0, 2
_E4M3_MAX, _E4M3_EXPONENT = 448.0, 8


def encode(
    values: torch.Tensor, block_format: DType, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `values` ``[…, width]`` as bytes: data ``[…, width / elements in a byte]``, scales ``[…, blocks]``.

    The last block of a row may be short. `global_scale` (one element) is a factor of every e4m3 scale.

    Raises:
        SlotError: an odd number of elements that lie two to a byte.
    """
    width = values.shape[-1]
    if width % PER_BYTE[block_format.bits]:
        raise SlotError(f"a row of {width} elements of 4 bits ends inside a byte; give rows of an even number")
    blocks = in_blocks(values, block_format.block)
    scales = _scales(blocks, block_format, global_scale)
    steps = _steps(scales, block_format, global_scale).unsqueeze(-1)
    scaled = (blocks / steps).flatten(-2)[..., :width]
    if block_format.bits == 8:
        return scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8), scales
    # A block without a scale, or with NaN for one, reads the same whatever its elements are.
    usable = (steps > 0).expand_as(blocks).flatten(-2)[..., :width]
    return _packed(_e2m1(torch.where(usable, scaled, 0.0))), scales


def decode(
    data: torch.Tensor,
    scales: torch.Tensor,
    block_format: DType,
    dtype: torch.dtype,
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `encode` stored, in `dtype`; products are of float32."""
    values = _from_e2m1(_unpacked(data)) if block_format.bits == 4 else data.view(torch.float8_e4m3fn).float()
    width, size = values.shape[-1], block_format.block
    steps = _steps(scales, block_format, global_scale).reshape(*data.shape[:-1], -(-width // size))
    return values.mul_(steps.repeat_interleave(size, dim=-1)[..., :width]).to(dtype)


def in_blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return `values` ``[…, width]`` as float32 ``[…, blocks, size]``, zeros after what the last block has."""
    width, wide = values.shape[-1], values.to(torch.float32)
    short = -width % size
    padded = torch.nn.functional.pad(wide, (0, short)) if short else wide.contiguous()
    return padded.view(*wide.shape[:-1], (width + short) // size, size)


def _scales(blocks: torch.Tensor, block_format: DType, global_scale: torch.Tensor | None) -> torch.Tensor:
    """Return the byte of each block's scale."""
    magnitudes = blocks.abs()
    if block_format.bits == 8:
        magnitudes = torch.where(magnitudes.isnan(), 0.0, magnitudes)
    largest = magnitudes.amax(-1)
    if block_format.scale == "float8_e8m0fnu":
        return _e8m0(largest, _E2M1_EXPONENT if block_format.bits == 4 else _E4M3_EXPONENT)
    wanted = largest / _E2M1_MAX if global_scale is None else largest / (_E2M1_MAX * global_scale)
    return wanted.clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _steps(scales: torch.Tensor, block_format: DType, global_scale: torch.Tensor | None) -> torch.Tensor:
    """Return what one unit of each block's elements is worth, in float32."""
    if block_format.scale == "float8_e8m0fnu":
        return _from_e8m0(scales)
    steps = scales.view(torch.float8_e4m3fn).float()
    return steps if global_scale is None else steps * global_scale


def _e8m0(largest: torch.Tensor, element_exponent: int) -> torch.Tensor:
    """Return the bytes of ``2 ** (floor(log2(largest)) - element_exponent)``, not below 2 ** -127."""
    finite = largest.clamp(max=torch.finfo(torch.float32).max)
    # The exponent field of a float32 is floor(log2) + 127 already, and 0 for what is smaller than 2 ** -126.
    biased = ((finite.view(torch.int32) >> 23) - element_exponent).clamp(min=0)
    return torch.where(largest.isnan(), 255, biased).to(torch.uint8)


def _from_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Return powers of two; 2 ** -127 is below the smallest exponent of a normal float32, 255 is NaN."""
    codes = scales.to(torch.int32)
    bits = torch.where(codes == 0, 0x00400000, codes << 23)
    return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)


def _e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest of 0, ½, 1, 1½, 2, 3, 4, 6 (ties to even codes), a sign above them."""
    magnitudes = scaled.abs().clamp(max=_E2M1_MAX)
    from_2, from_4 = (magnitudes >= 2).float(), (magnitudes >= 4).float()
    # Codes count steps of ½ up to 2, of 1 up to 4 and of 2 above, and rounding is to even counts in each.
    counts = (magnitudes * 2 / (1 + from_2 + 2 * from_4)).round() + 2 * (from_2 + from_4)
    return (counts + 8 * scaled.signbit()).to(torch.uint8)


def _from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes: as the top bits of a float16 they are 2 ** 14 times too small."""
    signs = (codes & 8).to(torch.int16) << 12
    return (((codes & 7).to(torch.int16) << 9) | signs).view(torch.float16).float().mul_(2.0**14)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpacked(data: torch.Tensor) -> torch.Tensor:
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
