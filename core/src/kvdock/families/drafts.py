"""The layers that a model brings to draft with (MTP, NextN), told by the target's own config."""

from __future__ import annotations

from kvdock.families.common import Family, Fields, Layers

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
MAX_EXTRA = 1024
NOT_ATTENTION = frozenset({"none", "state", "hybrid"})
"""Kinds that no drafting layer has: it is an attention layer, whatever the target mixes."""


def extra_layers(fields: Fields, family: Family, layers: Layers) -> Layers:
    """Return the layers that predict further tokens, by the rule of the family.

    Raises:
        PlanError: the model brings none, or their shape is not known.
    """
    count = fields.count(*COUNTS, low=0, high=MAX_EXTRA)
    if count is None:
        count = family.extra_layers
    if not count:
        raise fields.error(f"the config has no {COUNTS[0]}, so the model brings no layers to draft with")
    return (family.read_extra or alike)(fields, layers, count)


def alike(fields: Fields, layers: Layers, count: int) -> Layers:
    """Return drafting layers of the one shape that all attention layers of the model have.

    Raises:
        PlanError: the attention layers differ, or there are none.
    """
    shapes = list(dict.fromkeys(layer for layer in layers if layer.kind not in NOT_ATTENTION))
    if len(shapes) != 1:
        why = "layers differ" if shapes else "layers are none of them attention alone"
        raise fields.error(
            f"{fields.first(*COUNTS) or 'draft layers'}={count}, but the model's {why}, so their shape is not known; "
            "give the draft's own config"
        )
    return (shapes[0],) * count


def like_the_last(fields: Fields, layers: Layers, count: int) -> Layers:
    """Return drafting layers of the shape of the model's last layer, after which they stand."""
    return layers[-1:] * count
