"""What planning knows of a model: one `LayerSpec` per layer, whatever the family.

Families turn a published ``config.json`` into a `ModelSpec`; nothing above this floor reads a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvdock import dtypes
from kvdock.checked import check_fields, show
from kvdock.errors import PlanError, nearest

MAX_LAYERS = 10_000
MAX_EXTENT = 2**20
"""Largest head count or head size that is believed."""
MAX_CONTEXT = 2**31


class LayerParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the per-kind shape of a layer; a family subclasses it for kinds of its own.

    Every field is a positive integer below 2^20 unless the subclass says otherwise.
    """

    def __post_init__(self) -> None:
        check_fields(self, type(self).__name__)
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, int) and not isinstance(value, bool) and not 0 < value <= MAX_EXTENT:
                raise PlanError(f"{type(self).__name__}: {field}={value} is outside 1 … {MAX_EXTENT}")


class MHAParams(LayerParams, frozen=True, kw_only=True):
    """Keys and values per head (MHA, GQA, MQA); `num_kv_heads` counts the whole model's, not a rank's."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int


class MLAParams(LayerParams, frozen=True, kw_only=True):
    """One latent row per token for all heads: `kv_lora_rank` columns, then `qk_rope_head_dim`."""

    kv_lora_rank: int
    qk_rope_head_dim: int


class DSAParams(LayerParams, frozen=True, kw_only=True):
    """MLA with an indexer that keeps one key of `index_head_dim` per token (DeepSeek V3.2)."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    index_head_dim: int


class SparseParams(LayerParams, frozen=True, kw_only=True):
    """Keys and values per head, and an indexer with one head of `index_head_dim` that picks what is read.

    `index_value` says whether the indexer keeps a value beside its key (MiniMax sparse attention).
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    index_head_dim: int
    index_value: bool = True


class IndexParams(LayerParams, frozen=True, kw_only=True):
    """The indexer of a sparse layer alone: a key, and a value where `index_value`, of `index_head_dim` a token."""

    index_head_dim: int
    index_value: bool = True


class ConvBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Channels of a convolution that split by heads: `heads` times `head_dim` of the whole model.

    With `replicated`, ranks beyond the number of heads keep a copy of one (groups of a state-space layer).
    """

    heads: int
    head_dim: int
    replicated: bool = False


class ConvParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One convolution of a linear layer: `kernel` taps over the channels of `blocks`; ``kernel - 1`` inputs are kept.

    `channels_last` keeps an input's channels side by side, ``[kernel - 1, channels]``, instead of ``[channels,
    kernel - 1]``.
    """

    blocks: tuple[ConvBlock, ...]
    kernel: int
    channels_last: bool = False


class RingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step leaves in a replay ring: a key per key head, a delta per value head, a decay.

    The decay is one number a value head, or with `decay_per_key` one for each of its `k_dim` columns.
    """

    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int
    decay_per_key: bool = False


class StateParams(LayerParams, frozen=True, kw_only=True):
    """A layer that keeps a state per request instead of rows per token: convolutions and a temporal state.

    `temporal` is ``(heads, …)`` of the whole model, the heads split over the ranks. `temporal_dtype` is the
    published type of the temporal state. `dense_windows` keeps each draft token's convolution inputs whole.
    """

    conv: tuple[ConvParams, ...]
    temporal: tuple[int, ...]
    temporal_dtype: str = "float32"
    dense_windows: bool = False
    ring: RingParams | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        extents = [*self.temporal, *(conv.kernel for conv in self.conv)]
        extents += [extent for conv in self.conv for b in conv.blocks for extent in (b.heads, b.head_dim)]
        if not all(0 < extent <= MAX_EXTENT for extent in extents):
            raise PlanError(f"StateParams: an extent of {extents} is outside 1 … {MAX_EXTENT}")
        dtypes.find(self.temporal_dtype, option="StateParams: temporal_dtype")


class HybridParams(LayerParams, frozen=True, kw_only=True):
    """A layer with attention and a state side by side (kind ``hybrid``): it belongs to a group of each."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    state: StateParams


class NoParams(LayerParams, frozen=True, kw_only=True):
    """The shape of a layer that keeps nothing (kind ``none``)."""


CORE_PARAMS: Mapping[str, type[LayerParams]] = MappingProxyType(
    {
        "mha": MHAParams,
        "mla": MLAParams,
        "dsa": DSAParams,
        "sparse": SparseParams,
        "sparse_index": IndexParams,
        "state": StateParams,
        "hybrid": HybridParams,
        "none": NoParams,
    }
)
"""The shape struct of each kind that core's families produce."""

CORE_KINDS = frozenset({"mha", "mla", "dsa", "sparse_index", "state"})
"""Kinds of pools that belong to the core: hardware and variants may claim them, a family may not."""


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: its kind, its shape, how far back it sees, and whose KV it reads.

    `window_tokens` counts *earlier* tokens (``None``: all). `shares_kv_with` is the layer whose buffers
    this one reads; such a layer owns none.
    """

    kind: str
    params: LayerParams
    window_tokens: int | None = None
    shares_kv_with: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "LayerSpec")
        if not self.kind:
            raise PlanError("a layer needs a kind, for example 'mha'")
        if self.window_tokens is not None and not 0 <= self.window_tokens <= MAX_CONTEXT:
            raise PlanError(f"window_tokens={self.window_tokens} is outside 0 … 2^31")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its KV cache sees it.

    `layers` holds one spec per layer of the whole model, in order; layers without any cache have kind
    ``"none"``. `context_length` is the longest request in tokens, `dtype` the model's own data type.
    `warnings` are remarks of the family that read the config (an unknown architecture, say).
    """

    name: str
    architecture: str
    layers: tuple[LayerSpec, ...]
    context_length: int
    dtype: str
    role: str = "target"
    family: str = ""
    num_attention_heads: int | None = None
    is_embedding: bool = False
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, f"model {show(self.name)}:")
        for text in (self.name, self.architecture):
            if not text.isascii() and text.encode("utf-8", "replace") != text.encode("utf-8", "surrogatepass"):
                raise PlanError(f"model name or architecture {text!a} is no valid text; give one in UTF-8")
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise PlanError(f"model {self.name!r} has {len(self.layers)} layers; 1 … {MAX_LAYERS} can be planned")
        if not 0 < self.context_length <= MAX_CONTEXT:
            raise PlanError(f"model {self.name!r}: context_length={self.context_length} is outside 1 … 2^31")
        if not dtypes.find(self.dtype, option=f"model {self.name!r}: dtype").is_float:
            raise PlanError(f"model {self.name!r}: dtype={self.dtype!r} is no floating-point type")
        for layer_id, layer in enumerate(self.layers):
            self._check_sharing(layer_id, layer)

    def _check_sharing(self, layer_id: int, layer: LayerSpec) -> None:
        owner = layer.shares_kv_with
        if owner is None:
            return
        if not 0 <= owner < len(self.layers) or owner == layer_id:
            raise PlanError(f"layer {layer_id} shares the KV of layer {owner}, which the model does not have")
        if self.layers[owner].shares_kv_with is not None:
            raise PlanError(f"layer {layer_id} shares the KV of layer {owner}, which owns none itself")
        if self.layers[owner].kind != layer.kind or self.layers[owner].params != layer.params:
            raise PlanError(f"layer {layer_id} shares the KV of layer {owner}, whose kind or shape differs")


def model_to_builtins(model: ModelSpec) -> dict[str, Any]:
    """Return the model as JSON-ready data."""
    data: dict[str, Any] = msgspec.to_builtins(model)
    return data


def model_from_builtins(data: Any, params_types: Mapping[str, type[LayerParams]] = CORE_PARAMS) -> ModelSpec:
    """Read what `model_to_builtins` wrote; `params_types` names the shape struct of each kind.

    Raises:
        PlanError: a field is missing, unknown or of the wrong type, or a kind's shape struct is not known.
    """
    if not isinstance(data, dict) or not isinstance(data.get("layers"), (list, tuple)):
        raise PlanError("a model in JSON is an object with a list of layers")
    _refuse_unknown("model", data, ModelSpec.__struct_fields__)
    layers = tuple(_layer_from_builtins(i, layer, params_types) for i, layer in enumerate(data["layers"]))
    return ModelSpec(layers=layers, **_plain_fields("model in JSON", data, _MODEL_FIELDS))


def _without(cls: type[msgspec.Struct], left_out: str) -> type[msgspec.Struct]:
    """Return a struct with the fields of `cls` but one, for checking the types of the others."""
    fields = [f for f in msgspec.structs.fields(cls) if f.name != left_out]
    required = [(f.name, f.type) for f in fields if f.required]
    optional = [(f.name, f.type, f.default) for f in fields if not f.required]
    return msgspec.defstruct(f"{cls.__name__}Fields", [*required, *optional], kw_only=True)


_MODEL_FIELDS = _without(ModelSpec, "layers")
_LAYER_FIELDS = _without(LayerSpec, "params")


def _plain_fields(where: str, data: Mapping[str, Any], fields: type[msgspec.Struct]) -> dict[str, Any]:
    try:
        return msgspec.structs.asdict(msgspec.convert(data, fields))
    except msgspec.ValidationError as error:
        raise PlanError(f"{where}: {error}") from error


def _layer_from_builtins(index: int, data: Any, params_types: Mapping[str, type[LayerParams]]) -> LayerSpec:
    where = f"model layer {index}"
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise PlanError(f"{where} is not an object with a kind")
    _refuse_unknown(where, data, LayerSpec.__struct_fields__)
    params_type = params_types.get(data["kind"])
    if params_type is None:
        known = ", ".join(sorted(params_types))
        raise PlanError(f"{where} has kind {data['kind']!r}, whose plugin is not loaded (known: {known})")
    try:
        params = msgspec.convert(data.get("params"), params_type)
    except msgspec.ValidationError as error:
        raise PlanError(f"{where}: {error}") from error
    return LayerSpec(params=params, **_plain_fields(where, data, _LAYER_FIELDS))


def _refuse_unknown(where: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in data:
        if name not in known:
            raise PlanError(f"{where} has no field {name!r}{nearest(name, known)}")
