"""Models that mix attention with layers that keep a state per request: which layer keeps what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from kvdock.families import attention, sliding
from kvdock.families.common import LAYER_LETTERS, Family, Fields, Layers, LayersRead, translate
from kvdock.model import HybridParams, LayerSpec, MHAParams, NoParams, StateParams

Keeps = Literal["kv", "state", "both", "nothing"]
ReadState = Callable[[Fields], StateParams]

LayerTypes = Mapping[str, Keeps]
"""Entry of ``layer_types`` or ``layers_block_type`` → what the layer keeps."""

_ATTENTION: LayerTypes = {"full_attention": "kv", "attention": "kv"}
DELTA_TYPES: LayerTypes = {**_ATTENTION, "linear_attention": "state"}
CONV_TYPES: LayerTypes = {**_ATTENTION, "conv": "state", "short_conv": "state"}
MAMBA_TYPES: LayerTypes = {
    **_ATTENTION,
    "mamba": "state",
    "linear_attention": "state",  # the newer name
    "hybrid": "both",
    "mlp": "nothing",
    "moe": "nothing",
}
LETTERS: dict[str, Keeps] = {"M": "state", "*": "kv", "-": "nothing", "E": "nothing"}
"""Letter of ``hybrid_override_pattern`` → what the layer keeps."""

TYPES = ("layer_types", "layers_block_type")
INDICES = ("attn_layer_indices", "full_attn_idxs")
INTERVAL = "full_attention_interval"
PERIOD, OFFSET = "attn_layer_period", "attn_layer_offset"


def read_layers(
    fields: Fields, family: Family, *, read_state: ReadState, types: LayerTypes, keeps: Keeps | None = None
) -> LayersRead:
    """Return attention layers, layers with a state that `read_state` reads, and layers that keep nothing.

    What each layer keeps is told by the config (`types` are the entries of its lists), or is `keeps` for all. Only
    shapes that a layer has are read.

    Raises:
        PlanError: a field is missing or wrong, or nothing tells the layers apart.
    """
    layers = attention.count_layers(fields)
    kept = _what_is_kept(fields, layers, types) if keeps is None else (keeps,) * layers
    return assemble(fields, kept, read_state), sliding.unused(fields)


def assemble(fields: Fields, kept: Iterable[Keeps], read_state: ReadState) -> Layers:
    """Return one layer for each entry of `kept`.

    Raises:
        PlanError: the shape of a layer that is there cannot be read.
    """
    kept = tuple(kept)
    made = {keeps: _layer(fields, keeps, read_state) for keeps in dict.fromkeys(kept)}
    return tuple(made[keeps] for keeps in kept)


def _layer(fields: Fields, keeps: Keeps, read_state: ReadState) -> LayerSpec:
    if keeps == "nothing":
        return LayerSpec(kind="none", params=NoParams())
    if keeps == "kv":
        return attention.full_layer(fields)
    state = read_state(fields)
    return LayerSpec(kind="state", params=state) if keeps == "state" else _both(attention.read_heads(fields), state)


def _both(heads: MHAParams, state: StateParams) -> LayerSpec:
    params = HybridParams(
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, v_head_dim=heads.v_head_dim, state=state
    )
    return LayerSpec(kind="hybrid", params=params)


def _what_is_kept(fields: Fields, layers: int, types: LayerTypes) -> tuple[Keeps, ...]:
    for name in TYPES:
        entries = fields.entries(name, layers)
        if entries is not None:
            return translate(fields, name, entries, types)
    if fields.has(LAYER_LETTERS):
        return read_letters(fields, LAYER_LETTERS)
    for name in INDICES:
        if fields.has(name):
            found = _attention_at(fields, name, layers)
            return tuple("kv" if layer in found else "state" for layer in range(layers))
    return _by_period(fields, layers)


def read_letters(fields: Fields, name: str) -> tuple[Keeps, ...]:
    """Return what each layer of a pattern keeps: ``M`` a state, ``*`` keys and values, ``-`` and ``E`` nothing.

    Raises:
        PlanError: the pattern is no text, or has another letter.
    """
    return translate(fields, name, fields.text(name) or "", LETTERS)


def _attention_at(fields: Fields, name: str, layers: int) -> set[int]:
    """Return the layers that a list names by number, counted from 0."""
    return {fields.whole(name, entry, 0, layers - 1) for entry in fields.list(name) or []}


def _by_period(fields: Fields, layers: int) -> tuple[Keeps, ...]:
    """Return attention in every N-th layer: the last of each N, or the one at an offset."""
    if fields.has(PERIOD):
        period = fields.needed(PERIOD)
        offset = fields.needed(OFFSET, low=0, high=period - 1)
    elif fields.has(INTERVAL):
        period = fields.needed(INTERVAL)
        offset = period - 1
    else:
        known = ", ".join((*TYPES, LAYER_LETTERS, *INDICES, INTERVAL, PERIOD))
        raise fields.error(f"nothing says which layers keep a state; add one of {known}")
    return tuple("kv" if layer % period == offset else "state" for layer in range(layers))
