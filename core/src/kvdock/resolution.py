"""Options of a plan: each filled once, in the order user > plugin > default, and each read by something."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, nearest
from kvdock.model import ModelSpec
from kvdock.options import DEFAULTS, CacheOptions, Parallelism, ResolvedOptions
from kvdock.plugins import resolve
from kvdock.plugins.devices import owners_of
from kvdock.plugins.loading import Registry
from kvdock.plugins.resolve import Decision
from kvdock.queries import OptionsQuery

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
        "memory_saver",
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
    known = [member.name for member in registry.members if member.tier != "core"]
    for name in options.plugin_options or {}:
        if name == "core":
            raise PlanError("plugin_options names 'core', whose options are those of CacheOptions; give them there")
        if name not in known:
            raise PlanError(f"plugin_options names {name!r}, which is not loaded{nearest(name, known)}")


def unread_options(given: CacheOptions, read: Collection[str]) -> list[str]:
    """Return the names of the options that the user gave and that are not among those that are `read`."""
    return [
        name
        for name in CacheOptions.__struct_fields__
        if getattr(given, name) not in (None, DEFAULTS.get(name)) and name not in read
    ]


def refuse_unread(given: CacheOptions, read: Collection[str], who: str) -> None:
    """Refuse options that the user gave and that are not among those that are `read`; `who` names model and device."""
    unread = [f"{name}={getattr(given, name)!r}" for name in unread_options(given, read)]
    if unread:
        raise PlanError(
            f"nothing in this plan reads {', '.join(unread)}: {who} has no part that the option shapes; leave it out"
        )


def passed_over(decisions: Iterable[Decision], registry: Registry, device: DeviceInfo) -> Iterator[str]:
    """Say where the device's own plugin named a class that lacks what is asked, and another's took its place."""
    for decision in decisions:
        unfit = [answer for answer in decision.answers if answer.outcome == "unfit" and decision.plugin]
        owners = {member.name for member in owners_of(registry, device)} if unfit else set()
        for answer in unfit:
            if answer.plugin in owners:
                yield (
                    f"{decision.subject}: {answer.detail}, so {decision.name} of {decision.plugin} serves "
                    f"{device.name} instead of what plugin {answer.plugin!r} named"
                )
