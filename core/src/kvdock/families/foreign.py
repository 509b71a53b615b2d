"""Fields that tell of caches other than keys and values per token: no reader may plan over them.

Linear attention and state-space layers keep states per request, chunked and sparse attention keep other
rows, and encoders keep the cache of what they read. A config with such a field is refused by name rather
than planned as plain attention.
"""

from __future__ import annotations

from typing import Any

from kvdock.families.common import Family, Fields

PREFIXES = (
    "mamba_",
    "ssm_",
    "rwkv_",
    "kda_",
    "gdn_",
    "lru_",
    "linear_attn",
    "linear_attention",
    "linear_conv",
    "linear_key",
    "linear_value",
    "linear_num",
    "compress_ratio",
)

NAMES = frozenset(
    {
        "attention_chunk_size",
        "attn_config",
        "attn_layer_indices",
        "attn_layer_offset",
        "attn_layer_period",
        "block_configs",
        "block_types",
        "conv_L_cache",
        "cross_attention_layers",
        "full_attention_interval",
        "full_attn_idxs",
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        "is_encoder_decoder",
        "layer_group_size",
        "layers_block_type",
        "linear_silu",
        "sparse_attention_config",
        "sparse_config",
        "state_size",
        "use_cla",
        "zero_expert_num",
    }
)

ATTENTION_TYPES = "attn_type_list"
"""One number a layer: 1 is attention, 0 a linear layer."""
INDEXER = "index_head_dim"


def refuse_foreign(fields: Fields, family: Family) -> None:
    """Refuse a config with a field that tells of a cache that neither core nor this family reads.

    Raises:
        PlanError: names the field.
    """
    found = [
        name
        for name, value in fields.section.items()
        if isinstance(name, str) and not _is_read(name, family) and _is_foreign(fields, name, value)
    ]
    if found:
        # The indexer's width tells least about what the model is.
        name = min(found, key=lambda name: name == INDEXER)
        raise fields.error(
            f"{name} tells of a cache that no installed family reads, so the model is not planned as plain "
            "attention; install the plugin of its family (kvdock plugins lists what is installed)"
        )


def _is_read(name: str, family: Family) -> bool:
    return name in family.reads or any(entry.endswith("_") and name.startswith(entry) for entry in family.reads)


def _is_foreign(fields: Fields, name: str, value: Any) -> bool:
    if not value:
        return False
    if name == ATTENTION_TYPES:
        return not isinstance(value, list) or any(entry != 1 for entry in value)
    if name == INDEXER:
        return not fields.has("kv_lora_rank") or fields.flag("use_mla") is False
    return name in NAMES or name.startswith(PREFIXES)
