"""One way from a config to a `ModelSpec`, whatever the family: families differ in data only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from kvdock.errors import printable
from kvdock.families import deepseek, llama, sliding
from kvdock.families.common import (
    HEADS,
    Family,
    Fields,
    check_common,
    context_length,
    layer_count,
    model_dtype,
    open_fields,
    with_defaults,
)
from kvdock.families.foreign import refuse_foreign
from kvdock.model import LayerParams, LayerSpec, MHAParams, ModelSpec
from kvdock.queries import ModelQuery

ROLES = frozenset({"target", "draft", "mtp"})
MTP_LAYERS = "num_nextn_predict_layers"

FAMILIES: tuple[Family, ...] = (*llama.FAMILIES, *deepseek.FAMILIES, *sliding.FAMILIES)
OTHER = Family(name="other")
"""Reads the common fields of an architecture that no family lists."""

BY_ARCHITECTURE: Mapping[str, Family] = MappingProxyType(
    {name: family for family in FAMILIES for name in (*family.architectures, *family.embedding)}
)


def architectures() -> dict[str, str]:
    """Return each architecture that core knows with the name of its family, sorted."""
    return {name: BY_ARCHITECTURE[name].name for name in sorted(BY_ARCHITECTURE)}


def read_model(query: ModelQuery) -> ModelSpec | None:
    """Return the model that a config describes, or ``None`` for a role that core does not read.

    An architecture that no family lists is read from the common fields, with a warning.

    Raises:
        PlanError: a field is missing or wrong, fields contradict each other, or one tells of another cache.
    """
    if query.role not in ROLES:
        return None
    fields = open_fields(query)
    inner = ModelQuery(config=fields.section).architecture
    architecture = query.architecture or inner
    family = BY_ARCHITECTURE.get(inner) or BY_ARCHITECTURE.get(architecture, OTHER)
    fields = with_defaults(fields, family)
    refuse_foreign(fields, msgspec.structs.replace(family, reads=family.reads | sliding.opts_in(fields)))
    layers, warnings = _read_layers(fields, family)
    if query.role == "mtp":
        layers = _extra_layers(fields, layers)
    dtype, dtype_warnings = model_dtype(fields)
    return ModelSpec(
        name=query.name or architecture or "config",
        architecture=architecture,
        layers=layers,
        context_length=context_length(fields),
        dtype=dtype,
        role=query.role,
        family=family.name,
        num_attention_heads=fields.count(*HEADS),
        is_embedding=architecture in family.embedding,
        warnings=(*_unlisted(fields, family, architecture), *warnings, *dtype_warnings),
    )


def _unlisted(fields: Fields, family: Family, architecture: str) -> tuple[str, ...]:
    if family is not OTHER:
        return ()
    return (
        f"{fields.where}: no family lists the architecture {printable(architecture)!r}; its cache is planned from the "
        "common fields alone",
    )


def _read_layers(fields: Fields, family: Family) -> tuple[tuple[LayerSpec, ...], tuple[str, ...]]:
    check_common(fields, latent=deepseek.is_latent(fields))
    windows, warnings = sliding.read_windows(fields, layer_count(fields), family)
    kind, full, slides = _read_shapes(fields)
    owners = sliding.read_owners(fields, windows)
    layers = tuple(
        LayerSpec(kind=kind, params=full if window is None else slides, window_tokens=window, shares_kv_with=owner)
        for window, owner in zip(windows, owners, strict=True)
    )
    return layers, warnings


def _read_shapes(fields: Fields) -> tuple[str, LayerParams, LayerParams]:
    """Return the kind of the layers, the shape of those that see everything and of those that slide."""
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


def _extra_layers(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers that predict further tokens; they have the shape of the model's own."""
    count = fields.count(MTP_LAYERS, low=0, high=1024)
    if not count:
        raise fields.error(f"the config has no {MTP_LAYERS}, so the model brings no layers to draft with")
    shapes = set(layers)
    if len(shapes) > 1:
        raise fields.error(
            f"{MTP_LAYERS}={count}, but the model's layers differ, so their shape is not known; "
            "give the draft's own config"
        )
    return layers[:1] * count
