"""Attention layers as the common fields tell them: their kind, their heads, their windows."""

from __future__ import annotations

from kvdock.families import deepseek, llama, per_layer, sliding
from kvdock.families.common import HEADS, Family, Fields, Layers, LayersRead, check_common, layer_count
from kvdock.model import LayerParams, LayerSpec, MHAParams

Shapes = tuple[str, LayerParams, LayerParams]
"""Kind of the layers, shape of those that see everything, shape of those that slide."""
Windows = tuple[int | None, ...]


def count_layers(fields: Fields) -> int:
    """Return the number of layers of a config that has all common fields.

    Raises:
        PlanError: fields are missing, or disagree about the number of layers.
    """
    check_common(fields, latent=deepseek.is_latent(fields))
    return layer_count(fields)


def read_layers(fields: Fields, family: Family) -> LayersRead:
    """Return the layers of a model whose every layer is attention.

    Raises:
        PlanError: a field is missing or wrong, or fields contradict each other.
    """
    windows, warnings = sliding.read_windows(fields, count_layers(fields), family)
    return lay_out(fields, windows), warnings


def lay_out(fields: Fields, windows: Windows) -> Layers:
    """Return one attention layer per window (``None``: sees everything).

    Raises:
        PlanError: heads or sharing cannot be read.
    """
    owners = sliding.read_owners(fields, windows)
    return tuple(
        LayerSpec(kind=kind, params=full if window is None else slides, window_tokens=window, shares_kv_with=owner)
        for window, owner, (kind, full, slides) in zip(windows, owners, _all_shapes(fields, len(windows)), strict=True)
    )


def full_layer(fields: Fields) -> LayerSpec:
    """Return the one kind of attention layer that a model has between layers that keep states.

    Raises:
        PlanError: its heads cannot be read.
    """
    kind, full, _ = _read_shapes(fields)
    return LayerSpec(kind=kind, params=full)


def read_heads(fields: Fields) -> MHAParams:
    """Return keys and values per head, at most one per query head.

    Raises:
        PlanError: a field is no count, or there are more KV heads than query heads.
    """
    shape = llama.read_heads(fields)
    _check_heads(fields, shape, fields.needed(*HEADS))
    return shape


def _all_shapes(fields: Fields, layers: int) -> list[Shapes]:
    """Return the shapes at each layer; they differ only where a field lists heads layer by layer."""
    views = per_layer.split_lists(fields, layers)
    if views is None or deepseek.is_latent(fields):
        return [_read_shapes(fields)] * layers
    return [_read_shapes(view) for view in views]


def _read_shapes(fields: Fields) -> Shapes:
    if deepseek.is_latent(fields):
        kind, latent = deepseek.read_latent(fields)
        return kind, latent, latent
    full, slides = sliding.read_shapes(fields, llama.read_heads(fields))
    _check_heads(fields, full, fields.needed(*HEADS))
    _check_heads(fields, slides, fields.count("swa_num_attention_heads") or fields.needed(*HEADS))
    return "mha", full, slides


def _check_heads(fields: Fields, shape: MHAParams, heads: int) -> None:
    if shape.num_kv_heads > heads:
        raise fields.error(
            f"{shape.num_kv_heads} KV heads (num_key_value_heads) are more than the {heads} query heads "
            f"(num_attention_heads) that read them; give at most {heads}"
        )
