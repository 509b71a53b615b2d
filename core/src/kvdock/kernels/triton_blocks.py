# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Block formats in Triton: floats → elements of 4 or 8 bits and a scale for each block, and back, one launch each.

Bytes are those of `kvdock.kernels.blocks` and `kvdock.kernels.microscaling`, NaN excepted, of which an encoder writes
one code. Rows lie in views or in dense tensors on both sides, so that encoding and storing are one launch, and reading
and decoding as well.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvdock.kernels.triton_floats import (
    ELEMENTS,
    from_4_bits,
    from_8_bits,
    from_exponent,
    largest,
    load_wide,
    store_narrow,
    to_4_bits,
    to_8_bits,
    to_exponent,
)
from kvdock.kernels.triton_forms import ceil_div, launch, power_of_two
from kvdock.kernels.triton_rows import Side, slot_offsets

ELEMENTS_AT_ONCE = 1024
"""Elements that a program treats: 8 a thread in 4 warps of 32."""
_FLOAT_MAX, _FLOAT_TINY = tl.constexpr(torch.finfo(torch.float32).max), tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _numbered(n, BLOCKS: tl.constexpr, HEADS: tl.constexpr, COUNT: tl.constexpr):
    """Row, head and place in the head of each block that a program treats, and which of them exist."""
    number = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    row, in_slot = number // (HEADS * BLOCKS), number % (HEADS * BLOCKS)
    return row, in_slot // BLOCKS, in_slot % BLOCKS, in_slot, row < n


@triton.jit
def _lanes(block, inside, WIDTH: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr):
    """Place in its head of each lane of a block, and which lanes exist; in bytes where elements are pairs."""
    lane = tl.arange(0, LANES)
    column = block[:, None] * (SIZE // PER_LANE) + lane[None, :]
    mask = inside[:, None] & (lane < SIZE // PER_LANE)[None, :]
    if WIDTH % SIZE != 0:
        mask = mask & (column < WIDTH // PER_LANE)
    return column, mask


@triton.jit
def _scale(
    values, global_scale, BITS: tl.constexpr, SCALE: tl.constexpr, LIMIT: tl.constexpr, EXPONENT: tl.constexpr
):  # fmt: skip
    """What is stored as the scale of each block, and what one unit of its elements is worth."""
    is_nan = tl.max((values != values).to(tl.int32), 1) > 0
    top = tl.max(tl.where(values != values, 0.0, tl.abs(values)), 1)
    if SCALE == "float32":
        top = tl.minimum(top, _FLOAT_MAX)
        # Below the smallest normal number a quotient may be no number any more.
        quotient = tl.maximum(tl.div_rn(top, LIMIT + tl.zeros_like(top)), _FLOAT_TINY)
        step = tl.where(is_nan, float("nan"), tl.where(top == 0, 1.0, quotient))
        scale = step
    elif SCALE == "float8_e8m0fnu":
        scale = to_exponent(tl.minimum(top, _FLOAT_MAX), is_nan & (BITS == 4), EXPONENT)
        step = from_exponent(scale)
    else:
        unit = LIMIT + tl.zeros_like(top)
        if global_scale is not None:
            unit = unit * tl.load(global_scale)
        wanted = tl.div_rn(top, unit)
        wanted = tl.where(is_nan | (wanted != wanted), float("nan"), tl.minimum(wanted, 448.0))
        scale = to_8_bits(wanted, 3, 7, "fn")
        step = from_8_bits(scale, 3, 7, "fn")
        if global_scale is not None:
            step = step * tl.load(global_scale)
    return scale, step


@triton.jit(do_not_specialize=["n"])
def encode_kernel(
    values, data, data_loc, scales, scales_loc, global_scale, n,
    value_stride, d_page_stride, d_slot_stride, s_page_stride, s_slot_stride,
    D_PAGE_SIZE: tl.constexpr, S_PAGE_SIZE: tl.constexpr, IS_BF16: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, COUNT: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr,
    LIMIT: tl.constexpr, SCALE: tl.constexpr, EXPONENT: tl.constexpr,
):  # fmt: skip
    """Encode rows of floats, and write elements and scales to slots of two views; a side without slots is dense."""
    BLOCKS: tl.constexpr = (WIDTH + SIZE - 1) // SIZE
    i, head, block, in_slot, inside = _numbered(n, BLOCKS, HEADS, COUNT)
    column, mask = _lanes(block, inside, WIDTH, SIZE, LANES, 1)
    at = values + (i * value_stride + head * WIDTH)[:, None] + column
    wide = load_wide(at, mask, IS_BF16)
    scale, step = _scale(wide, global_scale, BITS, SCALE, LIMIT, EXPONENT)
    s_at = slot_offsets(scales_loc, i, inside, s_page_stride, s_slot_stride, S_PAGE_SIZE)
    tl.store(scales + (s_at + in_slot), scale.to(scales.dtype.element_ty), mask=inside)
    d_at = slot_offsets(data_loc, i, inside, d_page_stride, d_slot_stride, D_PAGE_SIZE)
    if BITS == 8:
        scaled = tl.div_rn(wide, tl.broadcast_to(step[:, None], wide.shape))
        clamped = tl.where(scaled != scaled, scaled, tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT))
        there = data + (d_at + head * WIDTH)[:, None] + column
        tl.store(there, to_8_bits(clamped, MANTISSA, BIAS, SPECIAL).to(tl.int8), mask=mask)
    else:
        # A block without a scale, or with NaN for one, reads the same whatever its elements are.
        usable = step > 0
        scaled = tl.div_rn(wide, tl.broadcast_to(tl.where(usable, step, 1.0)[:, None], wide.shape))
        codes = to_4_bits(tl.where(usable[:, None], scaled, 0.0))
        low, high = tl.split(tl.reshape(codes, (COUNT, LANES // 2, 2)))
        pair, pair_mask = _lanes(block, inside, WIDTH, SIZE, LANES // 2, 2)
        there = data + (d_at + head * (WIDTH // 2))[:, None] + pair
        tl.store(there, (low | (high << 4)).to(tl.int8), mask=pair_mask)


@triton.jit(do_not_specialize=["n"])
def decode_kernel(
    out, data, data_loc, scales, scales_loc, global_scale, n,
    d_page_stride, d_slot_stride, s_page_stride, s_slot_stride,
    D_PAGE_SIZE: tl.constexpr, S_PAGE_SIZE: tl.constexpr, IS_BF16: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, COUNT: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Decode slots of two views, elements and scales, to dense rows of floats; a side without slots is dense."""
    BLOCKS: tl.constexpr = (WIDTH + SIZE - 1) // SIZE
    i, head, block, in_slot, inside = _numbered(n, BLOCKS, HEADS, COUNT)
    s_at = slot_offsets(scales_loc, i, inside, s_page_stride, s_slot_stride, S_PAGE_SIZE)
    stored = tl.load(scales + (s_at + in_slot), mask=inside, other=0)
    if SCALE == "float32":
        step = stored
    elif SCALE == "float8_e8m0fnu":
        step = from_exponent(stored.to(tl.int32) & 0xFF)
    else:
        step = from_8_bits(stored.to(tl.int32) & 0xFF, 3, 7, "fn")
    if global_scale is not None:
        step = step * tl.load(global_scale)
    d_at = slot_offsets(data_loc, i, inside, d_page_stride, d_slot_stride, D_PAGE_SIZE)
    column, mask = _lanes(block, inside, WIDTH, SIZE, LANES, 1)
    if BITS == 8:
        there = data + (d_at + head * WIDTH)[:, None] + column
        codes = tl.load(there, mask=mask, other=0).to(tl.int32) & 0xFF
        wide = from_8_bits(codes, MANTISSA, BIAS, SPECIAL)
    else:
        pair, pair_mask = _lanes(block, inside, WIDTH, SIZE, LANES // 2, 2)
        there = data + (d_at + head * (WIDTH // 2))[:, None] + pair
        both = tl.load(there, mask=pair_mask, other=0).to(tl.int32) & 0xFF
        wide = from_4_bits(tl.reshape(tl.join(both & 15, both >> 4), (COUNT, LANES)))
    here = out + (i * (HEADS * WIDTH) + head * WIDTH)[:, None] + column
    store_narrow(here, wide * step[:, None], mask, IS_BF16)


class Format(NamedTuple):
    """Elements of a block format, and the scale for each `size` of them."""

    bits: int
    element: str
    size: int
    scale: str
    """``float32``, or the type that a byte is."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """The type of the tensor that holds scales."""
        return torch.float32 if self.scale == "float32" else torch.uint8

    def constants(self) -> dict[str, Any]:
        """Return what both kernels are told of the format."""
        mantissa, bias, special = ELEMENTS.get(self.element, (0, 0, ""))
        lanes = power_of_two(self.size)
        found = {"MANTISSA": mantissa, "BIAS": bias, "SPECIAL": special, "SCALE": self.scale, "BITS": self.bits}
        return {**found, "SIZE": self.size, "LANES": lanes, "COUNT": max(ELEMENTS_AT_ONCE // lanes, 1)}

    def encoder(self) -> dict[str, Any]:
        """Return the largest element and its exponent, which the encoder alone is told."""
        limit = 6.0 if self.bits == 4 else largest(self.element)
        return {"LIMIT": limit, "EXPONENT": 2 if self.bits == 4 else 8}


class Rows(NamedTuple):
    """Rows of `heads` times `width` floats."""

    heads: int
    width: int

    @property
    def constants(self) -> dict[str, Any]:
        """What both kernels are told of rows."""
        return {"HEADS": self.heads, "WIDTH": self.width}

    def fit(self, block_format: Format, data: torch.Tensor, scales: torch.Tensor) -> bool:
        """Return whether the slots of two views of bytes hold the elements of a row, head after head, and its scales."""
        nbytes, rest = divmod(self.width * block_format.bits, 8)
        blocks = ceil_div(self.width, block_format.size)
        held = data.shape[2:].numel(), scales.shape[2:].numel()
        are_bytes = data.dtype is scales.dtype is torch.uint8
        return are_bytes and rest == 0 and held == (self.heads * nbytes, self.heads * blocks)

    def grid(self, n: int, constants: dict[str, Any]) -> tuple[int]:
        """Return how many programs treat the blocks of `n` rows."""
        blocks = n * self.heads * ceil_div(self.width, constants["SIZE"])
        return (ceil_div(blocks, constants["COUNT"]),)


def launch_encode(
    values: torch.Tensor, rows: Rows, data: Side, scales: Side, block_format: Format, global_scale: torch.Tensor | None
) -> None:
    """Encode floats ``[n, heads · width]``, rows at any distance, and store them; in one launch."""
    n, constants = values.shape[0], block_format.constants()
    if n and rows.heads and rows.width:
        launch(
            encode_kernel, rows.grid(n, constants), values, _bits(values), _bytes(data.view), data.loc,
            _scales(scales.view), scales.loc, global_scale, n, values.stride(0),
            *_distances(data, 1), *_distances(scales, scales.view.dtype.itemsize), IS_BF16=_is_bf16(values),
            D_PAGE_SIZE=data.form.page_size, S_PAGE_SIZE=scales.form.page_size,
            **rows.constants, **constants, **block_format.encoder(),
        )  # fmt: skip


def launch_decode(
    out: torch.Tensor, rows: Rows, data: Side, scales: Side, block_format: Format, global_scale: torch.Tensor | None
) -> None:
    """Decode elements and scales to contiguous floats ``[n, heads · width]``; in one launch."""
    n, constants = out.shape[0], block_format.constants()
    if n and rows.heads and rows.width:
        launch(
            decode_kernel, rows.grid(n, constants), out, _bits(out), _bytes(data.view), data.loc,
            _scales(scales.view), scales.loc, global_scale, n,
            *_distances(data, 1), *_distances(scales, scales.view.dtype.itemsize), IS_BF16=_is_bf16(out),
            D_PAGE_SIZE=data.form.page_size, S_PAGE_SIZE=scales.form.page_size, **rows.constants, **constants,
        )  # fmt: skip


def _distances(side: Side, item: int) -> tuple[int, int]:
    return side.form.page_stride // item, side.form.slot_stride // item


def _is_bf16(values: torch.Tensor) -> bool:
    return values.dtype is torch.bfloat16


def _bits(values: torch.Tensor) -> Any:
    return triton.reinterpret(values, tl.int16) if _is_bf16(values) else values


def _bytes(data: torch.Tensor) -> Any:
    return triton.reinterpret(data, tl.int8)


def _scales(scales: torch.Tensor) -> Any:
    return scales if scales.dtype is torch.float32 else triton.reinterpret(scales, tl.int8)
