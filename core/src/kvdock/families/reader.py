"""One way from a config to a `ModelSpec`; what a family reads differently is said in its `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from kvdock.errors import printable
from kvdock.families import (
    attention,
    blocks,
    chunked,
    deepseek,
    drafts,
    linear,
    llama,
    per_layer,
    sliding,
    sparse,
    ssm,
)
from kvdock.families.common import Family, Fields, context_length, model_dtype, open_fields, with_defaults
from kvdock.families.foreign import refuse_foreign
from kvdock.model import ModelSpec
from kvdock.queries import ModelQuery

ROLES = frozenset({"target", "draft", "mtp"})

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *deepseek.FAMILIES,
    *sliding.FAMILIES,
    *chunked.FAMILIES,
    *blocks.FAMILIES,
    *sparse.FAMILIES,
    *linear.FAMILIES,
    *ssm.FAMILIES,
)
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
    layers, warnings = (family.read_layers or attention.read_layers)(fields, family)
    if query.role == "mtp":
        layers = drafts.extra_layers(fields, family, layers)
    dtype, dtype_warnings = model_dtype(fields)
    return ModelSpec(
        name=query.name or architecture or "config",
        architecture=architecture,
        layers=layers,
        context_length=context_length(fields),
        dtype=dtype,
        role=query.role,
        family=family.name,
        num_attention_heads=per_layer.most_heads(fields),
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
