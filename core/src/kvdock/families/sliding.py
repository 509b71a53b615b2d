"""Which layers see only a window, what their heads are, and which layers read the KV of another.

A config's ``sliding_window`` counts the token itself: the mask of the published models lets a query at
position p see the keys at ``p - sliding_window + 1 … p`` (transformers, ``masking_utils``, the sliding
overlay: ``kv_idx > q_idx - sliding_window``). `LayerSpec.window_tokens` counts earlier tokens, hence one less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvdock.families.common import Family, Fields, Layers, show, translate
from kvdock.model import MAX_CONTEXT, MHAParams


def sliding_extra(fields: Fields, layers: Layers, count: int) -> Layers:
    """Return drafting layers that slide: those of MiMo V2 are built with the sliding heads and window.

    Source: ``MiMoV2MTPLayer`` of vLLM and SGLang.

    Raises:
        PlanError: none of the model's layers slides.
    """
    found = next((layer for layer in layers if layer.window_tokens is not None), None)
    if found is None:
        raise fields.error(
            "the layers that draft slide, but none of the model's layers does; give the draft's own config"
        )
    return (found,) * count


FAMILIES = (
    Family(
        name="mistral",
        architectures=("MistralForCausalLM", "MixtralForCausalLM", "Mistral3ForConditionalGeneration"),
        embedding=("MistralModel",),
        full_every=0,
    ),
    Family(name="ministral", architectures=("MinistralForCausalLM", "Ministral3ForCausalLM"), full_every=0),
    Family(name="phi3", architectures=("Phi3ForCausalLM", "PhiMoEForCausalLM", "Phi4MMForCausalLM"), full_every=0),
    Family(name="starcoder2", architectures=("Starcoder2ForCausalLM",), full_every=0),
    Family(
        name="gemma2",
        architectures=("Gemma2ForCausalLM",),
        embedding=("Gemma2ForSequenceClassification",),
        full_every=2,
    ),
    Family(
        name="gemma3",
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        full_every=6,
        # The small published configs leave these to the model's class.
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
        },
    ),
    Family(
        name="gemma3n",
        architectures=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        full_every=5,
    ),
    Family(name="gemma4", architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), full_every=6),
    Family(name="gpt-oss", architectures=("GptOssForCausalLM",), full_every=2),
    Family(name="cohere2", architectures=("Cohere2ForCausalLM",), full_every=4),
    Family(name="olmo3", architectures=("Olmo3ForCausalLM",), full_every=4),
    Family(name="exaone4", architectures=("Exaone4ForCausalLM",), full_every=4),
    Family(
        name="mimo",
        architectures=("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
        # Its chunk size repeats the window; the pattern says which layers slide.
        reads=frozenset({"hybrid_layer_pattern", "attention_chunk_size"}),
        read_extra=sliding_extra,
    ),
)

WINDOW = "sliding_window"
PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
LAYER_TYPES = {
    "full_attention": False,
    "attention": False,
    "sliding_attention": True,
}
"""Entry of ``layer_types`` → whether the layer slides."""
PATTERN_LETTERS = {"G": False, "L": True}

Slides = tuple[bool, ...]


def read_windows(fields: Fields, layers: int, family: Family) -> tuple[tuple[int | None, ...], tuple[str, ...]]:
    """Return the earlier tokens that each layer sees (``None``: all), and warnings.

    Raises:
        PlanError: a layer slides but there is no window, or a pattern cannot be read.
    """
    slides = _first_answer(fields, layers, family)
    if fields.flag("use_sliding_window") is False:
        return (None,) * layers, ()
    if isinstance(fields.raw(WINDOW), list | tuple):
        return _cycled(fields, layers, slides), ()
    window = fields.count(WINDOW, "sliding_window_size", high=MAX_CONTEXT)
    if slides is None:
        return (None,) * layers, _unused(fields, window)
    if window is None:
        if any(slides) and fields.has(*LISTS):
            raise fields.error(f"layers slide, but the config has no {WINDOW}; add the field")
        return (None,) * layers, ()
    return tuple(window - 1 if sliding else None for sliding in slides), ()


def unused(fields: Fields) -> tuple[str, ...]:
    """Return a warning where the config has a window that its family does not use."""
    if fields.flag("use_sliding_window") is False:
        return ()
    return _unused(fields, fields.count(WINDOW, high=MAX_CONTEXT))


def _unused(fields: Fields, window: int | None) -> tuple[str, ...]:
    if window is None:
        return ()
    return (
        f"{fields.where}: {WINDOW}={window}, but nothing says which layers slide; "
        "every layer is planned with full attention",
    )


def _cycled(fields: Fields, layers: int, slides: Slides | None) -> tuple[int | None, ...]:
    """Return the windows of a list that repeats over the layers: only those that a layer uses."""
    entries = fields.list(WINDOW) or []
    if not entries:
        raise fields.error(f"{WINDOW} is an empty list; leave it out for full attention")
    used = [entries[layer % len(entries)] for layer in range(layers)]
    counts = [None if entry is None else fields.whole(WINDOW, entry, 1, MAX_CONTEXT) - 1 for entry in used]
    return tuple(count if slides is None or slides[layer] else None for layer, count in enumerate(counts))


def _first_answer(fields: Fields, layers: int, family: Family) -> Slides | None:
    answers = (source(fields, layers, family) for source in _SOURCES)
    return next((answer for answer in answers if answer is not None), None)


def _by_layer_types(fields: Fields, layers: int, family: Family) -> Slides | None:
    entries = fields.list("layer_types")
    if entries is None:
        return None
    return translate(fields, "layer_types", entries, LAYER_TYPES)


def _by_hybrid_pattern(fields: Fields, layers: int, family: Family) -> Slides | None:
    entries = fields.list("hybrid_layer_pattern")
    if entries is None:
        return None
    return tuple(fields.whole("hybrid_layer_pattern", entry, 0, 1) == 1 for entry in entries)


def _by_window_pattern(fields: Fields, layers: int, family: Family) -> Slides | None:
    name = fields.first(*PATTERN)
    if name is None:
        return None
    letters = fields.raw(name)
    if not isinstance(letters, str):
        return _every(fields.needed(name), layers)
    if not letters or not set(letters) <= PATTERN_LETTERS.keys():
        raise fields.error(f"{name}={show(letters)} is no pattern; give L (sliding) and G (full), or a number")
    return tuple(PATTERN_LETTERS[letters[layer % len(letters)]] for layer in range(layers))


def _by_first_full(fields: Fields, layers: int, family: Family) -> Slides | None:
    """Qwen's rule: the layers from `max_window_layers` on slide."""
    if not fields.flag("use_sliding_window"):
        return None
    first = fields.count("max_window_layers", low=0)
    return None if first is None else tuple(layer >= first for layer in range(layers))


def _by_family(fields: Fields, layers: int, family: Family) -> Slides | None:
    return None if family.full_every is None else _every(family.full_every, layers)


def _every(full_every: int, layers: int) -> Slides:
    return tuple(not full_every or (layer + 1) % full_every != 0 for layer in range(layers))


_SOURCES: tuple[Callable[[Fields, int, Family], Slides | None], ...] = (
    _by_layer_types,
    _by_hybrid_pattern,
    _by_window_pattern,
    _by_first_full,
    _by_family,
)
LISTS = ("layer_types", "hybrid_layer_pattern")


def opts_in(fields: Fields) -> frozenset[str]:
    """Return the fields that a config allows to be read by saying that it is a hybrid of full and sliding layers."""
    return frozenset({"hybrid_layer_pattern"}) if fields.flag("is_hybrid_swa") else frozenset()


def read_shapes(fields: Fields, common: MHAParams) -> tuple[MHAParams, MHAParams]:
    """Return the shapes of full and of sliding layers, which may have heads of their own.

    Raises:
        PlanError: a field is no count.
    """
    full = _shape(fields, common, "num_global_key_value_heads", "global_head_dim", "global_v_head_dim")
    return full, _shape(fields, common, "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")


def _shape(fields: Fields, common: MHAParams, heads: str, dim: str, v_dim: str) -> MHAParams:
    own_dim = fields.count(dim)
    return MHAParams(
        num_kv_heads=fields.count(heads) or common.num_kv_heads,
        head_dim=own_dim or common.head_dim,
        v_head_dim=fields.count(v_dim) or own_dim or common.v_head_dim,
    )


def read_owners(fields: Fields, kinds: tuple[Any, ...]) -> tuple[int | None, ...]:
    """Return the layer whose KV each layer reads, or ``None`` where it owns its KV.

    The last `num_kv_shared_layers` read the KV of the last owner of their kind.

    Raises:
        PlanError: all layers or more share, or no owner is of a layer's kind.
    """
    shared = fields.count("num_kv_shared_layers", low=0) or 0
    owners = len(kinds) - shared
    if owners < 1:
        raise fields.error(
            f"num_kv_shared_layers={shared} leaves none of the {len(kinds)} layers to own the KV; "
            f"give at most {len(kinds) - 1}"
        )
    last = {kind: layer for layer, kind in enumerate(kinds[:owners])}
    for layer in range(owners, len(kinds)):
        if kinds[layer] not in last:
            raise fields.error(f"layer {layer} shares KV, but none of the first {owners} layers is of its kind")
    return (None,) * owners + tuple(last[kind] for kind in kinds[owners:])
