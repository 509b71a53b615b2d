"""Models whose local layers see the chunk of tokens that a token is in, and full layers in between (Llama 4)."""

from __future__ import annotations

from kvdock.families import attention
from kvdock.families.common import Family, Fields, LayersRead, translate
from kvdock.model import MAX_CONTEXT

CHUNK = "attention_chunk_size"
NO_ROPE = "no_rope_layers"
INTERVAL = "no_rope_layer_interval"
DEFAULT_INTERVAL = 4
LAYER_TYPES = {"chunked_attention": True, "full_attention": False}
"""Entry of ``layer_types`` → whether the layer is local."""


def read_layers(fields: Fields, family: Family) -> LayersRead:
    """Return layers that see a chunk, or everything where the config has no chunk size.

    `LayerSpec.window_tokens` is the chunk size: a token sees fewer earlier ones, but a request may hold a chunk
    whole. Source: ``Llama4TextConfig`` in transformers.

    Raises:
        PlanError: a field is missing or wrong, or layers are chunked and there is no chunk size.
    """
    layers = attention.count_layers(fields)
    local = _local_layers(fields, layers)
    chunk = fields.count(CHUNK, high=MAX_CONTEXT)
    if chunk is None and fields.has("layer_types") and any(local):
        raise fields.error(f"layer_types has chunked layers, but the config has no {CHUNK}; add the field")
    return attention.lay_out(fields, tuple(chunk if is_local else None for is_local in local)), ()


def _local_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers are local: those that the config lists, else all with rotary positions."""
    types = fields.list("layer_types")
    if types is not None:
        return translate(fields, "layer_types", types, LAYER_TYPES)
    entries = fields.entries(NO_ROPE, layers) if fields.list(NO_ROPE) else None
    if entries:
        return tuple(fields.whole(NO_ROPE, entry, 0, 1) == 1 for entry in entries)
    interval = fields.count(INTERVAL) or DEFAULT_INTERVAL
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


FAMILIES = (
    Family(
        name="llama4",
        architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "EagleLlama4ForCausalLM"),
        reads=frozenset({CHUNK}),
        read_layers=read_layers,
    ),
)
