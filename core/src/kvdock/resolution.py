"""Options of a plan: each filled once, in the order user > plugin > default, and each read by something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, nearest
from kvdock.features import FEATURE_OPTIONS
from kvdock.model import ModelSpec
from kvdock.options import DEFAULTS, CacheOptions, Parallelism, ResolvedOptions
from kvdock.plugins import resolve
from kvdock.plugins.loading import Registry
from kvdock.plugins.resolve import Decision
from kvdock.queries import OptionsQuery

if TYPE_CHECKING:
    from kvdock.outline import Outline

ENGINE_FACTS = frozenset(
    {
        "max_prefill_tokens",
        "chunked_prefill_size",
        "prefix_cache",
        "overlap_schedule",
        "pd_multiplexing",
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "sparse_prefill_backend",
        "sparse_decode_backend",
        "linear_backend",
        "is_embedding",
        "swa_eviction_interval",
    }
)
"""Options that describe the engine rather than ask for something: a plan that has no use for one is no error."""

PLANNER_OPTIONS = frozenset(
    {
        "page_size",
        "model_dtype",
        "mem_fraction_static",
        "max_total_tokens",
        "context_length",
        "allow_longer_context",
        "draft",
        "plugins",
        "no_plugins",
        "prefer",
        "strict",
        "plugin_options",
    }
)
"""Options that the planner itself reads for every model."""


def resolve_options(
    model: ModelSpec, given: CacheOptions, parallel: Parallelism, device: DeviceInfo, registry: Registry
) -> tuple[ResolvedOptions, tuple[Decision, ...]]:
    """Fill what the user left open, from plugins, then from the defaults, and keep each source.

    Raises:
        PlanError: the context is longer than the model's, or options of an unknown plugin are given.
    """
    query = OptionsQuery(model=model, options=given, parallel=parallel, device=device)
    offered, decisions = resolve.option_defaults(registry, query, given.prefer or ())
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in CacheOptions.__struct_fields__:
        if (value := getattr(given, name)) is not None:
            values[name], sources[name] = value, "user"
        elif name in offered:
            values[name], sources[name] = offered[name]
        elif name in DEFAULTS:
            values[name], sources[name] = DEFAULTS[name], "default"
    options = CacheOptions(**values)
    _check_context(model, options)
    _check_speculation(given)
    _check_plugin_options(options, registry)
    return ResolvedOptions(values=options, sources=sources), decisions


def _check_context(model: ModelSpec, options: CacheOptions) -> None:
    asked = options.context_length
    if asked is not None and asked > model.context_length and not options.allow_longer_context:
        raise PlanError(
            f"context_length={asked} is above the model's {model.context_length}; "
            f"give at most {model.context_length}, or allow_longer_context=true"
        )


def _check_speculation(given: CacheOptions) -> None:
    alone = [
        name
        for name in ("speculative_num_steps", "speculative_topk", "speculative_num_draft_tokens", "draft")
        if getattr(given, name) is not None
    ]
    if alone and given.speculative_algorithm is None:
        raise PlanError(f"{', '.join(alone)} without speculative_algorithm has no effect; give one, for example EAGLE")


def _check_plugin_options(options: CacheOptions, registry: Registry) -> None:
    known = [member.name for member in registry.members]
    for name in options.plugin_options or {}:
        if name not in known:
            raise PlanError(f"plugin_options names {name!r}, which is not loaded{nearest(name, known)}")


def read_options(outline: Outline) -> frozenset[str]:
    """Return the options that something in this plan reads."""
    read = set(PLANNER_OPTIONS | ENGINE_FACTS | FEATURE_OPTIONS)
    for space in outline.spaces.values():
        read.update(space.options)
    for choice in outline.choices:
        read |= choice.cls.options
    if any(buffer.memory != "device" for buffer in outline.buffers):
        read.add("host_budget_bytes")
    windows = any(layer.window_tokens is not None for model in outline.models for layer in model.layers)
    if windows or outline.given.hybrid_swa == "off":
        read.add("hybrid_swa")  # where no layer has a window, full KV for every layer is what there is
    return frozenset(read)


def refuse_unread(outline: Outline) -> None:
    """Refuse options that the user gave and that nothing in this plan reads."""
    read = read_options(outline)
    unread = [
        f"{name}={getattr(outline.given, name)!r}"
        for name in CacheOptions.__struct_fields__
        if getattr(outline.given, name) not in (None, DEFAULTS.get(name)) and name not in read
    ]
    if unread:
        raise PlanError(
            f"nothing in this plan reads {', '.join(unread)}: {outline.model.name} on {outline.device.name} "
            f"has no part that the option shapes; leave it out"
        )
