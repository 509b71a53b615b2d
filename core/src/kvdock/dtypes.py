"""Data types by name: their width and how they are stored, without torch.

Names are torch's (``torch.bfloat16`` is ``"bfloat16"``). Floats of 8 bits are stored as bytes and of
4 bits two to a byte, so `storage` names the type of the tensor that holds them. Formats: IEEE 754
for 16 to 64 bits, OCP 8-bit Floating Point (e4m3fn, e5m2) and OCP Microscaling v1.0 (e8m0, e2m1).

Block formats keep a scale for each `block` elements of a row beside the data: as kv_cache_dtype,
``float4_e2m1fn_x2`` has power-of-two scales for 16, ``mxfp8`` for 32; ``nvfp4`` has e4m3 scales for 16
and one float32 for a whole layer's keys, one for its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from kvdock.errors import PlanError, nearest


class DType(msgspec.Struct, frozen=True, kw_only=True):
    """One data type: `bits` per element, the dtype of its tensor, and the feature a pool needs for it."""

    name: str
    bits: int
    storage: str
    is_float: bool = False
    feature: str | None = None
    """What a KV pool must honour to store this type; ``None`` for types every pool stores."""
    element: str = ""
    """The type of one stored element of a block format; empty where it is the type itself."""
    block: int = 0
    """Elements that share a scale; 0 without scales of blocks."""
    scale: str = ""
    """The type of a block's scale."""


def _plain(name: str, bits: int, *, is_float: bool = False) -> DType:
    return DType(name=name, bits=bits, storage=name, is_float=is_float)


def _packed(name: str, bits: int, feature: str | None) -> DType:
    return DType(name=name, bits=bits, storage="uint8", is_float=True, feature=feature)


def _blocks(name: str, bits: int, feature: str, *, element: str, block: int, scale: str) -> DType:
    packed = _packed(name, bits, feature)
    return msgspec.structs.replace(packed, element=element, block=block, scale=scale)


_FP4, _E8M0 = "float4_e2m1fn_x2", "float8_e8m0fnu"
_ALL = (
    _plain("float64", 64, is_float=True),
    _plain("float32", 32, is_float=True),
    _plain("float16", 16, is_float=True),
    _plain("bfloat16", 16, is_float=True),
    _plain("int64", 64),
    _plain("int32", 32),
    _plain("int16", 16),
    _plain("int8", 8),
    _plain("uint8", 8),
    _plain("bool", 8),
    _packed("float8_e4m3fn", 8, "fp8"),
    _packed("float8_e5m2", 8, "fp8"),
    _packed("float8_e4m3fnuz", 8, "fp8"),
    _packed("float8_e5m2fnuz", 8, "fp8"),
    _packed(_E8M0, 8, None),
    _blocks(_FP4, 4, "fp4", element=_FP4, block=16, scale=_E8M0),
    _blocks("nvfp4", 4, "nvfp4", element=_FP4, block=16, scale="float8_e4m3fn"),
    _blocks("mxfp8", 8, "mxfp8", element="float8_e4m3fn", block=32, scale=_E8M0),
)
DTYPES: Mapping[str, DType] = MappingProxyType({dtype.name: dtype for dtype in _ALL})

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
        "fp64": "float64",
        "double": "float64",
        "fp8": "float8_e4m3fn",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
        "float8_e4m3": "float8_e4m3fn",
        "fp4": "float4_e2m1fn_x2",
        "fp4_e2m1": "float4_e2m1fn_x2",
        "fp4_mx_block16": "float4_e2m1fn_x2",
        "mxfp4": "float4_e2m1fn_x2",
    }
)
"""Names that engines use for the same types."""


def find(name: str, *, option: str = "dtype") -> DType:
    """Return the data type called `name` (``torch.`` prefix and engine aliases allowed).

    Raises:
        PlanError: no such type; names `option`, the value and the nearest match.
    """
    key = name.removeprefix("torch.")
    key = ALIASES.get(key, key)
    found = DTYPES.get(key)
    if found is None:
        known = sorted({*DTYPES, *ALIASES})
        raise PlanError(f"{option}={name!r} is not a data type that kvdock knows{nearest(name, known)}")
    return found


def packed_nbytes(elements: int, dtype: str) -> int:
    """Return the whole bytes that `elements` of `dtype` take, packed without gaps."""
    return (elements * find(dtype).bits + 7) // 8
