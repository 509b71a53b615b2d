"""Models whose attention reads what an indexer picks from keys and values per head (MiniMax M3)."""

from __future__ import annotations

from kvdock.families import attention
from kvdock.families.common import Family, Fields, LayersRead
from kvdock.families.drafts import like_the_last
from kvdock.model import LayerSpec, MHAParams, SparseParams

CONFIG = "sparse_attention_config"
SPARSE = "sparse_attention_freq"
NO_VALUE = "sparse_disable_index_value"
INDEX_DIM = "sparse_index_dim"


def read_layers(fields: Fields, family: Family) -> LayersRead:
    """Return layers with an indexer where the config says so, the others with keys and values alone.

    The indexer has one key head whatever its query heads, and a value unless the layer disables it. Source:
    ``sparse_attention_config`` of the published configs, as SGLang and vLLM read it.

    Raises:
        PlanError: a field is missing or wrong, or a list does not have one entry per layer.
    """
    inner = fields.inner(CONFIG, fields.raw(CONFIG)) if fields.has(CONFIG) else None
    if inner is None or not inner.section or inner.flag("use_sparse_attention") is False:
        return attention.read_layers(fields, family)
    layers = attention.count_layers(fields)
    heads = attention.read_heads(fields)
    is_sparse = _flags(inner, SPARSE, layers)
    if is_sparse is None:
        raise inner.error(f"the config has no {SPARSE}; add the field")
    disabled = _flags(inner, NO_VALUE, layers) or [False] * layers
    dense = LayerSpec(kind="mha", params=heads)
    made = {no_value: _sparse_layer(inner, heads, no_value) for no_value in set(disabled)} if any(is_sparse) else {}
    return tuple(made[no_value] if on else dense for on, no_value in zip(is_sparse, disabled, strict=True)), ()


def _flags(fields: Fields, name: str, layers: int) -> list[bool] | None:
    entries = fields.entries(name, layers)
    return None if entries is None else [fields.whole(name, entry, 0, 1) == 1 for entry in entries]


def _sparse_layer(fields: Fields, heads: MHAParams, no_value: bool) -> LayerSpec:
    params = SparseParams(
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        v_head_dim=heads.v_head_dim,
        index_head_dim=fields.needed(INDEX_DIM),
        index_value=not no_value,
    )
    return LayerSpec(kind="sparse", params=params)


FAMILIES = (
    Family(
        name="minimax-sparse",
        architectures=("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        reads=frozenset({CONFIG}),
        read_layers=read_layers,
        read_extra=like_the_last,
    ),
)
