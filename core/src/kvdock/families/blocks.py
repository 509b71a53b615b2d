"""Models that a search has pruned layer by layer: each block has heads of its own, or no attention at all."""

from __future__ import annotations

from typing import Any

from kvdock.families import attention
from kvdock.families.common import HEADS, Family, Fields, LayersRead
from kvdock.model import LayerSpec, NoParams

BLOCKS = "block_configs"
GROUP = "n_heads_in_group"
WITHOUT_CACHE = ("no_op", "replace_with_linear")
"""Flags of a block whose attention is left out, or replaced by one matrix."""
UNREAD = ("window_length", "sparsify", "num_sink_tokens")
"""Fields of a block that tell of a cache of another kind; the published configs leave them empty."""
NO_CACHE = LayerSpec(kind="none", params=NoParams())


def read_layers(fields: Fields, family: Family) -> LayersRead:
    """Return one layer per block: its KV heads are the query heads over those that share one.

    Source: ``block_configs`` of the published configs of Llama-Nemotron (Nemotron-NAS, ``DeciLMForCausalLM``).

    Raises:
        PlanError: a block cannot be read; names it and the field.
    """
    if not fields.has(BLOCKS):
        return attention.read_layers(fields, family)
    blocks = fields.entries(BLOCKS, attention.count_layers(fields)) or []
    return tuple(_block_layer(fields, f"{BLOCKS}[{index}]", block) for index, block in enumerate(blocks)), ()


def _block_layer(fields: Fields, name: str, block: Any) -> LayerSpec:
    outer = fields.inner(name, block)
    block_fields = outer.inner("attention", outer.raw("attention"))
    if any(block_fields.flag(flag) for flag in WITHOUT_CACHE):
        return NO_CACHE
    unread = next((field for field in UNREAD if block_fields.raw(field)), None)
    if unread is not None:
        raise block_fields.error(f"{unread} tells of a cache that no installed family reads; leave it out")
    heads, group = fields.needed(*HEADS), block_fields.needed(GROUP)
    if heads % group:
        raise block_fields.error(f"{GROUP}={group} does not divide num_attention_heads={heads}")
    section = {**fields.section, "num_key_value_heads": heads // group}
    return attention.full_layer(Fields(section, fields.outer, block_fields.where))


FAMILIES = (
    Family(
        name="decilm",
        architectures=("DeciLMForCausalLM",),
        reads=frozenset({BLOCKS}),
        read_layers=read_layers,
    ),
    # Each layer has heads of its own, in lists.
    Family(name="openelm", architectures=("OpenELMForCausalLM",)),
)
