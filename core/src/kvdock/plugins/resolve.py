"""One typed function per hook: the only callers of hooks.

Each asks tier by tier, ranks what fits, refuses ties, checks the answers, and returns beside the result a
`Decision`: who claimed, who declined, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvdock.errors import PlanError, PluginError, nearest
from kvdock.hookspecs import TIERS
from kvdock.layout import LayerGroup, Space
from kvdock.model import ModelSpec
from kvdock.options import CacheOptions, make_options
from kvdock.plugins.answers import Answer as Answer
from kvdock.plugins.answers import (
    Claim,
    ask_all,
    declined,
    first_claim,
    mark_outranked,
    most_specific_first,
    named,
    settle,
    wrong,
)
from kvdock.plugins.answers import Decision as Decision
from kvdock.plugins.classes import allocator_cls as allocator_cls
from kvdock.plugins.classes import pool_cls as pool_cls
from kvdock.plugins.classes import request_pool_cls as request_pool_cls
from kvdock.plugins.devices import catalogue as catalogue
from kvdock.plugins.devices import find_device as find_device
from kvdock.plugins.devices import kernels as kernels
from kvdock.plugins.devices import live_devices as live_devices
from kvdock.plugins.devices import probe as probe
from kvdock.plugins.loading import Member, Registry, shown
from kvdock.queries import GroupQuery, ModelQuery, OptionsQuery, PlanQuery, StateQuery

USER_ONLY = frozenset({"plugins", "no_plugins", "prefer", "strict", "plugin_options"})
"""Options about plugins: none of them may answer for the user."""

VALIDATORS = ("validate_plan", "validate_prefill_only")


def read_model(registry: Registry, query: ModelQuery, prefer: Sequence[str] = ()) -> tuple[ModelSpec, Decision]:
    """Return the model that a config describes, as its family reads it.

    Raises:
        PlanError: no family knows the config, or its family finds it faulty.
        PluginError: two families of one tier read it, or an answer is no model.
    """

    def check(member: Member, value: Any) -> str:
        if not isinstance(value, ModelSpec):
            raise wrong(member, "read_model", value, "a ModelSpec")
        return value.name or value.architecture or value.family

    what = f"architecture {query.architecture!r}, model_type {query.model_type!r}, role {query.role}"
    subject = f"the config ({what})"
    claim, answers = first_claim(registry, "read_model", subject, check, prefer, query=query)
    if claim is None:
        asked = ", ".join(answer.plugin for answer in answers) or "nobody"
        failed = "".join(f"; not loaded: {p.name}: {p.reason}" for p in registry.problems if p.tier == "family")
        raise PlanError(
            f"no family reads this config ({what}); asked: {asked}{failed}; install the plugin that knows it, "
            "or describe the model with a ModelSpec"
        )
    model: ModelSpec = claim.value
    return model, _decided("read_model", subject, claim, check(claim.member, model), answers)


def _decided(hook: str, subject: str, claim: Claim, name: str, answers: Sequence[Answer]) -> Decision:
    return Decision(hook=hook, subject=subject, plugin=claim.member.name, name=name, answers=tuple(answers))


def layer_groups(
    registry: Registry, query: GroupQuery, prefer: Sequence[str] = ()
) -> tuple[tuple[LayerGroup, ...], Decision]:
    """Return the groups of a rank's layers; raises `PluginError` for ties and wrong answers, `PlanError` for none."""

    def check(member: Member, value: Any) -> str:
        if not isinstance(value, tuple) or not all(isinstance(group, LayerGroup) for group in value):
            raise wrong(member, "group_layers", value, "a tuple of LayerGroup")
        return ", ".join(group.name for group in value) or "no group"

    subject = f"the layers of {query.model.name or query.model.family!r} (worker {query.worker})"
    claim, answers = first_claim(registry, "group_layers", subject, check, prefer, query=query)
    if claim is None:
        asked = ", ".join(answer.plugin for answer in answers) or "nobody"
        raise PlanError(f"no plugin groups {subject} (hook group_layers); asked: {asked}; load the core plugin")
    groups: tuple[LayerGroup, ...] = claim.value
    return groups, _decided("group_layers", subject, claim, check(claim.member, groups), answers)


def option_defaults(
    registry: Registry, query: OptionsQuery, prefer: Sequence[str] = ()
) -> tuple[dict[str, tuple[Any, str]], tuple[Decision, ...]]:
    """Return, for each option that a plugin has a default for, the value and the plugin.

    The most specific tier wins option by option. Options that the user gave are left alone.

    Raises:
        PluginError: two values of one tier, an unknown option, or a value that the option does not take.
    """
    offers = [
        (member, _option_values(member, value)) for member, value in _ask_merged(registry, "get_option_defaults", query)
    ]
    given = {name for name in CacheOptions.__struct_fields__ if getattr(query.options, name) is not None}
    names = sorted({name for _, values in offers for name in values or ()} - given)
    merged = {name: _merge(registry, "get_option_defaults", name, offers, prefer, _OPTION) for name in names}
    values = {name: (claim.value, claim.member.name) for name, (claim, _) in merged.items()}
    return values, tuple(decision for _, decision in merged.values())


def _option_values(member: Member, value: Any) -> Mapping[str, Any] | None:
    hook = "get_option_defaults"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong(member, hook, value, "a mapping of option to value")
    known = set(CacheOptions.__struct_fields__) - USER_ONLY
    for name, default in value.items():
        if name not in known:
            why = "is the user's alone" if name in USER_ONLY else f"does not exist{nearest(shown(name), known)}"
            raise PluginError(f"{named(member, hook)} gives a default for the option {shown(name)}, which {why}")
        if default is None:
            raise PluginError(f"{named(member, hook)} gives None for {shown(name)}; leave the option out")
    try:
        options = make_options(value)
    except PlanError as error:
        raise PluginError(f"{named(member, hook)} gives a default that the option does not take: {error}") from error
    return {name: getattr(options, name) for name in value}


def spaces(
    registry: Registry, query: StateQuery, prefer: Sequence[str] = ()
) -> tuple[dict[str, Space], tuple[Decision, ...]]:
    """Return the spaces of a plan by name, the most specific tier winning space by space.

    Raises:
        PluginError: two different spaces of one tier have one name, or an answer is no mapping of spaces.
    """
    offers = [
        (member, _space_values(member, value)) for member, value in _ask_merged(registry, "size_state_pools", query)
    ]
    names = dict.fromkeys(name for _, values in reversed(offers) for name in values or ())
    merged = {name: _merge(registry, "size_state_pools", name, offers, prefer, _SPACE) for name in names}
    found: dict[str, Space] = {name: claim.value for name, (claim, _) in merged.items()}
    return found, tuple(decision for _, decision in merged.values())


def _space_values(member: Member, value: Any) -> Mapping[str, Space] | None:
    hook = "size_state_pools"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong(member, hook, value, "a mapping of name to Space")
    for name, space in value.items():
        if not isinstance(space, Space):
            raise wrong(member, f"{hook}[{shown(name)}]", space, "a Space")
        if name != space.name:
            raise PluginError(f"{named(member, hook)} lists the space {space.name!r} as {shown(name)}; use one name")
    return value


class _Merge(msgspec.Struct, frozen=True):
    """How a merged hook is spoken of: the subject of one key, the verb of a tie, and another way out of it."""

    subject: str
    verb: str
    advice: str
    text: Callable[[Any], str]


_OPTION = _Merge("the option {name!r}", "give different defaults for", "set {name} yourself, or ", repr)
_SPACE = _Merge("the space {name!r}", "declare different rules for", "", lambda space: f"Space {space.name}")

Offers = Sequence[tuple[Member, Mapping[str, Any] | None]]


def _ask_merged(registry: Registry, hook: str, query: Any) -> list[tuple[Member, Any]]:
    return list(ask_all(registry, hook, most_specific_first(), query=query))


def _merge(
    registry: Registry, hook: str, name: str, offers: Offers, prefer: Sequence[str], words: _Merge
) -> tuple[Claim, Decision]:
    """Return the claim that wins one key of a merged answer; equal values of one tier are no tie."""
    subject = words.subject.format(name=name)
    claims = [Claim(member=member, value=values[name]) for member, values in offers if values and name in values]
    rivals = [claim for claim in claims if claim.member.tier == claims[0].member.tier]
    advice = words.advice.format(name=name)
    winner = settle(registry, hook, subject, rivals, prefer, equal_is_one=True, verb=words.verb, advice=advice)
    answers = tuple(
        Answer(plugin=member.name, tier=member.tier, outcome="claimed", detail=words.text(values[name]))
        if values and name in values
        else declined(member)
        for member, values in offers
    )
    ranked = mark_outranked(hook, answers, winner, rivals, equal_is_one=True)
    return winner, _decided(hook, subject, winner, words.text(winner.value), ranked)


def objections(registry: Registry, hook: str, query: PlanQuery) -> tuple[tuple[str, str], ...]:
    """Return every objection with its plugin, from the core to the variants; `hook` is one of `VALIDATORS`.

    Raises:
        PluginError: an answer is neither text nor a tuple of texts, or empty.
    """
    if hook not in VALIDATORS:
        raise ValueError(f"{hook!r} does not validate; ask one of {', '.join(VALIDATORS)}")
    found = []
    for member, value in ask_all(registry, hook, TIERS, query=query):
        reasons = () if value is None else value if isinstance(value, tuple) else (value,)
        if not all(isinstance(reason, str) and reason.strip() for reason in reasons):
            raise wrong(member, hook, value, "the reason of an objection as text, a tuple of several")
        found += [(member.name, reason) for reason in reasons]
    return tuple(found)
