"""Models whose layers have head counts of their own: fields that hold a list with one entry per layer."""

from __future__ import annotations

from kvdock.families.common import HEADS, KV_HEADS, Fields
from kvdock.model import MAX_EXTENT

LISTS = (*HEADS, *KV_HEADS)
"""Fields that hold one number for all layers, or one per layer."""


def split_lists(fields: Fields, layers: int) -> list[Fields] | None:
    """Return the fields as each layer has them, or ``None`` where no count of heads is a list.

    Source: ``num_query_heads`` and ``num_kv_heads`` of the published OpenELM configs,
    ``num_key_value_heads_per_layer`` of DeciLM.

    Raises:
        PlanError: a list does not have one entry per layer.
    """
    given = {name: fields.entries(name, layers) for name in LISTS if isinstance(fields.raw(name), list | tuple)}
    lists = {name: entries for name, entries in given.items() if entries is not None}
    if not lists:
        return None
    return [
        Fields(
            {**fields.section, **{name: entries[layer] for name, entries in lists.items()}}, fields.outer, fields.where
        )
        for layer in range(layers)
    ]


def most_heads(fields: Fields) -> int | None:
    """Return the number of query heads, the largest where each layer has its own, or ``None``.

    Raises:
        PlanError: it is no count.
    """
    name = fields.first(*HEADS)
    values = fields.raw(name) if name is not None else None
    if name is None or not isinstance(values, list | tuple):
        return fields.count(*HEADS)
    return max((fields.whole(name, value, 1, MAX_EXTENT) for value in values), default=None)
