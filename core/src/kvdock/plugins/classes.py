"""Choosing classes: the most specific claim that fits; ties are refused, and so is what nobody serves."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from kvdock.allocators.base import Allocator
from kvdock.errors import PluginError, UnsupportedCombination
from kvdock.features import Part, asking
from kvdock.model import CORE_KINDS
from kvdock.planned import Planned
from kvdock.plugins.answers import (
    Answer,
    Claim,
    Decision,
    Outcome,
    ask,
    declined,
    mark_outranked,
    most_specific_first,
    named,
    settle,
    wrong,
)
from kvdock.plugins.devices import owners_of
from kvdock.plugins.loading import Member, Registry
from kvdock.pools.base import Pool
from kvdock.queries import AllocatorQuery, PoolQuery, Query, RequestQuery
from kvdock.requests.base import RequestPool


def pool_cls(
    registry: Registry, query: PoolQuery, asked: frozenset[str] = frozenset(), prefer: Sequence[str] = ()
) -> tuple[type[Pool] | None, Decision]:
    """Return the pool class of a group; without a group, of what routes by layer (``None``: nobody).

    Raises:
        UnsupportedCombination: no class fits; lists every plugin with its reason, and what would help.
        PluginError: two classes of one tier fit, or an answer breaks the contract.
    """
    device = query.device.device_type
    if query.group is None:
        subject = f"the pool that routes by layer (device {device}, worker {query.worker})"
    else:
        subject = f"the pool for group {query.group.name!r} (kind {query.kind}, device {device})"
    found, decision = _choose(registry, "get_pool_cls", subject, Pool, query, asked, prefer)
    if found is None and query.group is not None:
        raise _unsupported(registry, decision, query, "pool")
    return found, decision


def allocator_cls(
    registry: Registry, query: AllocatorQuery, asked: frozenset[str] = frozenset(), prefer: Sequence[str] = ()
) -> tuple[type[Allocator], Decision]:
    """Return the allocator class of one space, or of several in step; raises as `pool_cls` does."""
    names = "+".join(space.name for space in query.spaces)
    subject = f"the allocator for {names!r} (device {query.device.device_type})"
    found, decision = _choose(registry, "get_allocator_cls", subject, Allocator, query, asked, prefer)
    if found is None:
        raise _unsupported(registry, decision, query, "allocator")
    return found, decision


def request_pool_cls(
    registry: Registry, query: RequestQuery, asked: frozenset[str] = frozenset(), prefer: Sequence[str] = ()
) -> tuple[type[RequestPool], Decision]:
    """Return the request-pool class; raises as `pool_cls` does."""
    subject = f"the request pool (device {query.device.device_type})"
    found, decision = _choose(registry, "get_request_pool_cls", subject, RequestPool, query, asked, prefer)
    if found is None:
        raise _unsupported(registry, decision, query, "request_pool")
    return found, decision


def _choose(
    registry: Registry,
    hook: str,
    subject: str,
    base: type[Any],
    query: Any,
    asked: frozenset[str],
    prefer: Sequence[str],
) -> tuple[Any, Decision]:
    answers: list[Answer] = []
    for tier in most_specific_first():
        fitting: list[Claim] = []
        for member, value in ask(registry, hook, tier, query=query):
            answer = _judge(registry, member, hook, value, base, query, asked)
            answers.append(answer)
            if answer.outcome == "claimed":
                fitting.append(Claim(member=member, value=value))
        if fitting:
            winner = settle(registry, hook, subject, fitting, prefer, equal_is_one=True)
            ranked = mark_outranked(hook, answers, winner, fitting, equal_is_one=True)
            return winner.value, _decision(hook, subject, ranked, winner)
    return None, _decision(hook, subject, answers, None)


def _decision(hook: str, subject: str, answers: Sequence[Answer], winner: Claim | None) -> Decision:
    return Decision(
        hook=hook,
        subject=subject,
        plugin=winner.member.name if winner else "",
        name=winner.value.__name__ if winner else "",
        answers=tuple(answers),
    )


def _judge(
    registry: Registry, member: Member, hook: str, value: Any, base: type[Any], query: Any, asked: frozenset[str]
) -> Answer:
    """Check one answer and say what it counts as."""
    if value is None:
        return declined(member)
    _check_class(member, hook, value, base)
    outcome: Outcome = "claimed"
    why = ""
    if hook == "get_pool_cls" and (why := _not_its_own(registry, member, query.kind)):
        outcome = "refused"
    elif why := _lacks(value, query.device.device_type, asked):
        outcome = "unfit"
    return Answer(plugin=member.name, tier=member.tier, outcome=outcome, detail=f"{value.__name__} {why}".rstrip())


def _not_its_own(registry: Registry, member: Member, kind: str) -> str:
    """Return why a family may not claim a kind that it did not invent, or an empty string."""
    if member.tier != "family":
        return ""
    if kind in CORE_KINDS:
        return f"may not serve the core's kind {kind!r}: a family claims the kinds that it invented"
    owner = registry.inventor(kind)
    if owner in ("", member.name, member.same_as):
        return ""
    return f"may not serve the kind {kind!r} of {owner}: a family claims the kinds that it invented"


def _lacks(cls: type[Planned], device_type: str, asked: frozenset[str]) -> str:
    """Return what a class lacks for a query, or an empty string."""
    reasons = []
    if cls.device_types is not None and device_type not in cls.device_types:
        reasons.append(f"runs on {', '.join(sorted(cls.device_types)) or 'no device'}, not on {device_type}")
    if not asked <= cls.features:
        reasons.append(f"lacks {', '.join(sorted(asked - cls.features))}")
    return " and ".join(reasons)


def _check_class(member: Member, hook: str, value: Any, base: type[Any]) -> None:
    """Refuse what is no concrete class of the kind asked for, naming what is wrong with it."""
    if not inspect.isclass(value) or not issubclass(value, base):
        raise wrong(member, hook, value, f"a subclass of kvdock's {base.__name__}")
    cls: Any = value
    where = f"{named(member, hook)} answered {cls.__name__}"
    missing = ", ".join(sorted(cls.__abstractmethods__))
    if missing:
        raise PluginError(f"{where}, which lacks {missing}; a {base.__name__} implements all of its abstract methods")
    if cls.device_types is not None and not _is_names(cls.device_types):
        raise PluginError(
            f"{where}, whose device_types is {cls.device_types!r}; give a frozenset of names such as "
            "frozenset({'cuda'}), or None for any device"
        )
    for attribute in ("features", "options"):
        if not _is_names(getattr(cls, attribute)):
            raise PluginError(f"{where}, whose {attribute} is {getattr(cls, attribute)!r}; give a frozenset of names")


def _is_names(value: Any) -> bool:
    return isinstance(value, frozenset) and all(isinstance(name, str) for name in value)


def _unsupported(registry: Registry, decision: Decision, query: Query, part: Part) -> UnsupportedCombination:
    """Return the error for what nobody serves: each plugin with its reason, then what would help."""
    reasons = [(answer.plugin, _reason(answer)) for answer in decision.answers]
    origins = {member.name: member.origin for member in registry.members}
    lines = [f"  {plugin}   {origins[plugin]}   {reason}" for plugin, reason in reasons] or ["  nobody was asked"]
    help_lines = _help(registry, query) or ["Install a plugin that answers it, or choose another device or options."]
    asked = asking(query, part) if any(answer.outcome == "unfit" for answer in decision.answers) else {}
    if asked:
        help_lines.insert(0, f"Asked for by {', '.join(asked.values())}: leave out one that the classes above lack.")
    text = "\n".join([f"no plugin offers {decision.subject}, hook {decision.hook}:", *lines, *help_lines])
    return UnsupportedCombination(text, reasons)


def _reason(answer: Answer) -> str:
    return f"{answer.outcome}: {answer.detail}" if answer.detail else answer.outcome


def _help(registry: Registry, query: Query) -> list[str]:
    """Say which distribution is known to add the pair of this family and this hardware."""
    problems = {problem.name: problem for problem in registry.problems}
    loaded = {member.name for member in registry.members}
    family = query.model.family
    lines = []
    for owner in owners_of(registry, query.device):
        pair = f"{owner.name}.{family}"
        if owner.tier != "hardware" or not family or pair in loaded:
            continue
        if pair in problems:
            problem = problems.pop(pair)
            lines.append(
                f"The variant {pair} ({problem.origin}) would add it, but is {problem.status}: {problem.reason}"
            )
        elif any(member.name == family and member.tier == "family" for member in registry.members):
            distribution = owner.distribution or f"kvdock-{owner.name}"
            lines.append(f"The variant {pair} would add it: install {distribution}[{family}].")
    lines += [
        f"Not loaded: {problem.name} ({problem.origin}): {problem.reason}"
        for problem in problems.values()
        if problem.status in ("failed", "conflict")
    ]
    return lines
