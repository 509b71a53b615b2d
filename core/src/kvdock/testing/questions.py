"""What plugins are asked beside their own cases: models of every shape, and options that make hooks look closer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvdock.device import DeviceInfo
from kvdock.model import DSAParams, LayerParams, LayerSpec, MHAParams, MLAParams, ModelSpec


def _model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(
        name="conformance", architecture="Conformance", layers=layers, context_length=256, dtype="bfloat16"
    )


def _layer(kind: str, params: LayerParams, **more: Any) -> LayerSpec:
    return LayerSpec(kind=kind, params=params, **more)


def _heads(count: int, dim: int, v_dim: int) -> MHAParams:
    return MHAParams(num_kv_heads=count, head_dim=dim, v_head_dim=v_dim)


SHAPES: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "one_head": _model(*[_layer("mha", _heads(1, 16, 16))] * 2),
        "odd_heads": _model(*[_layer("mha", _heads(3, 24, 24))] * 2),
        "narrow_values": _model(*[_layer("mha", _heads(2, 16, 8))] * 2),
        "wide_values": _model(*[_layer("mha", _heads(2, 8, 16))] * 2),
        "two_shapes": _model(_layer("mha", _heads(2, 8, 8)), _layer("mha", _heads(4, 16, 16))),
        "sliding": _model(_layer("mha", _heads(2, 8, 8), window_tokens=31), _layer("mha", _heads(2, 8, 8))),
        "shared": _model(_layer("mha", _heads(2, 8, 8)), _layer("mha", _heads(2, 8, 8), shares_kv_with=0)),
        "latent": _model(*[_layer("mla", MLAParams(kv_lora_rank=128, qk_rope_head_dim=16))] * 2),
        "sparse": _model(
            *[_layer("dsa", DSAParams(kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128))] * 2,
        ),
    }
)
"""Models that a device meets, by what is special about them: small enough that every slot can be compared."""

BACKENDS = ("torch_native", "triton", "flashinfer", "fa3", "trtllm", "aiter", "unheard-of")

OPTIONS: tuple[Mapping[str, Any], ...] = (
    {},
    *({"page_size": page} for page in (1, 8, 16, 24, 64, 128, 256)),
    *({"kv_cache_dtype": dtype} for dtype in ("float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp4", "mxfp8", "nvfp4")),
    *({"attention_backend": backend} for backend in BACKENDS),
    *({"sparse_decode_backend": backend} for backend in BACKENDS),
    {"role": "prefill"},
    {"role": "decode"},
    {"page_major": True},
    {"unified_memory": True},
    {"memory_saver": True},
    {"hisparse": True},
    {"prefill_only_disable_kv_cache": True, "is_embedding": True},
)
"""Options of which each lets some plugin object or claim; on devices of others none may."""

DEVICE_TYPES = ("cpu", "cuda", "npu", "xpu", "unheard-of")
"""Torch's words for devices, and one that nobody uses."""


def device_of(device_type: str) -> DeviceInfo:
    """Return a device of a type that no plugin here lists: nothing but its type and its bytes is known."""
    size = 2**30
    return DeviceInfo(
        device_type=device_type,
        name=f"somebody's {device_type}",
        total_bytes=size,
        free_before_load_bytes=size,
        free_bytes=size,
    )


def with_options(query: Any, device: DeviceInfo, more: Mapping[str, Any]) -> Any:
    """Return a query about another device, with `more` options."""
    options = msgspec.structs.replace(query.options, **more)
    return msgspec.structs.replace(query, device=device, options=options)
