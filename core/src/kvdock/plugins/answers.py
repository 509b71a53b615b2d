"""Asking: one hook of one tier at a time, every answer kept with who gave it, every failure named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import msgspec

from kvdock.errors import PlanError, PluginError, nearest
from kvdock.hookspecs import TIERS
from kvdock.plugins.loading import Member, Registry, describe, hook_names, shown, stdout_to_stderr

Outcome = Literal["claimed", "declined", "unfit", "refused", "outranked", "objected"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one plugin said to one hook.

    ``unfit``: the class that it named lacks something; ``refused``: it may not claim this; ``outranked``:
    it lost a tie to the user's preference; `detail` says what.
    """

    plugin: str
    tier: str
    outcome: Outcome
    detail: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Who decided what: the hook, what it was asked about, the plugin that won (``""``: nobody) and its answer.

    `answers` are of everybody who was asked, the most specific tier first. A tier below a winner is not
    asked where one answer is enough.
    """

    hook: str
    subject: str
    plugin: str
    name: str
    answers: tuple[Answer, ...] = ()


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is not ``None``, with its plugin."""

    member: Member
    value: Any


def ask(
    registry: Registry, hook: str, tier: str, only: Collection[str] | None = None, **arguments: Any
) -> Iterator[tuple[Member, Any]]:
    """Yield the answer of each plugin of a tier that implements `hook`, ``None`` included, by name.

    With `only`, none but the plugins of these names are asked.

    Raises:
        PlanError: the plugin says that what the user gave cannot be served.
        PluginError: the plugin raised anything else.
    """
    for member, impl in registry.hookimpls(hook, tier):
        if only is not None and member.name not in only:
            continue
        try:
            with stdout_to_stderr():
                value = impl.function(*(arguments[name] for name in impl.argnames))
        except PlanError as error:
            if tier == "core":
                raise
            raise PlanError(f"{error} (says plugin {member.name!r}, {member.origin}, in {hook})") from error
        except (Exception, SystemExit) as error:
            way_out = "" if tier == "core" else f", or leave it out with --no-plugin {member.name}"
            raise PluginError(
                f"{named(member, hook)} raised {describe(error)}; report it to its authors{way_out}"
            ) from error
        yield member, value


def ask_all(
    registry: Registry, hook: str, tiers: Sequence[str], only: Collection[str] | None = None, **arguments: Any
) -> Iterator[tuple[Member, Any]]:
    """Yield the answers of several tiers, in the order given."""
    for tier in tiers:
        yield from ask(registry, hook, tier, only, **arguments)


def most_specific_first() -> tuple[str, ...]:
    """Return the tiers from variant to core."""
    return TIERS[::-1]


def named(member: Member, hook: str) -> str:
    """Return plugin, distribution and hook, the beginning of every message about an answer."""
    return f"plugin {member.name!r} ({member.origin}): {hook}"


def wrong(member: Member, hook: str, value: Any, expected: str) -> PluginError:
    """Return the error for an answer of the wrong type."""
    return PluginError(
        f"{named(member, hook)} answered {shown(value)} ({type(value).__name__}); return {expected} or None"
    )


def first_claim(
    registry: Registry,
    hook: str,
    subject: str,
    check: Callable[[Member, Any], str],
    prefer: Sequence[str] = (),
    **arguments: Any,
) -> tuple[Claim | None, tuple[Answer, ...]]:
    """Return the claim of the most specific tier, and what everybody who was asked said.

    `check` raises for an answer of the wrong type and returns a name for a right one.
    """
    answers: list[Answer] = []
    for tier in most_specific_first():
        claims = []
        for member, value in ask(registry, hook, tier, **arguments):
            if value is None:
                answers.append(declined(member))
                continue
            name = check(member, value)
            answers.append(Answer(plugin=member.name, tier=tier, outcome="claimed", detail=name))
            claims.append(Claim(member=member, value=value))
        if claims:
            winner = settle(registry, hook, subject, claims, prefer)
            return winner, mark_outranked(hook, answers, winner, claims)
    return None, tuple(answers)


def declined(member: Member) -> Answer:
    """Return the answer of a plugin that said ``None``."""
    return Answer(plugin=member.name, tier=member.tier, outcome="declined")


def settle(
    registry: Registry,
    hook: str,
    subject: str,
    claims: Sequence[Claim],
    prefer: Sequence[str],
    *,
    equal_is_one: bool = False,
    verb: str = "claim",
    advice: str = "",
) -> Claim:
    """Return the one claim of a tier, or the preferred one of several; equal ones may count as one.

    Raises:
        PluginError: a tie that no preference settles; names every plugin and the line that settles it.
    """
    preferred = preferences(registry, hook, prefer)
    left: list[Claim] = []
    for claim in [claim for claim in claims if claim.member.name in preferred] or claims:
        if not equal_is_one or all(claim.value != other.value for other in left):
            left.append(claim)
    if len(left) == 1:
        return left[0]
    first, *others = [claim.member for claim in left]
    count = {2: "two"}.get(len(left), str(len(left)))
    lines = "\n".join(f"  {m.name}   {m.origin}   {m.module}" for m in (first, *others))
    denied = " and ".join(f"--no-plugin {member.name}" for member in others)
    ways = f"{advice}uninstall the other" + ("s" if len(others) > 1 else "")
    raise PluginError(
        f"{count} plugins {verb} {subject}:\n{lines}\n"
        f"Keep one: {ways}, or pass --prefer {hook}={first.name} or {denied}."
    )


def mark_outranked(
    hook: str, answers: Sequence[Answer], winner: Claim, claims: Sequence[Claim], *, equal_is_one: bool = False
) -> tuple[Answer, ...]:
    """Return the answers, those of `claims` that lost the tie to the winner marked with the preference."""
    lost = {
        claim.member.name
        for claim in claims
        if claim.member.name != winner.member.name and not (equal_is_one and claim.value == winner.value)
    }
    why = f"lost to prefer {hook}={winner.member.name}"
    return tuple(
        msgspec.structs.replace(answer, outcome="outranked", detail=f"{answer.detail}, {why}")
        if answer.plugin in lost and answer.outcome == "claimed"
        else answer
        for answer in answers
    )


def preferences(registry: Registry, hook: str, prefer: Sequence[str]) -> frozenset[str]:
    """Return the plugins that the user prefers for a hook, after checking every line of `prefer`.

    Raises:
        PlanError: a line is not ``hook=plugin``, no hook or plugin is called so (with the nearest match), or
            the plugin does not implement the hook.
    """
    known = registry.names
    chosen: set[str] = set()
    for line in prefer:
        key, equals, plugin = line.partition("=")
        if not equals or not key or not plugin:
            raise PlanError(f"prefer={line!r} is not hook=plugin; give for example get_pool_cls=acme")
        if key not in hook_names():
            raise PlanError(f"prefer={line!r}: no hook is called {key!r}{nearest(key, hook_names())}")
        if plugin not in known:
            listed = ", ".join(known) or "none"
            raise PlanError(
                f"prefer={line!r}: no plugin is called {plugin!r}{nearest(plugin, known)} (found: {listed})"
            )
        members = [member for member in registry.members if member.name == plugin]
        if members and not any(key in registry.hooks_of(member) for member in members):
            raise PlanError(f"prefer={line!r}: {plugin!r} does not implement {key}; {_implementers(registry, key)}")
        if key == hook:
            chosen.update(member.same_as or member.name for member in members)
    return frozenset(chosen)


def _implementers(registry: Registry, hook: str) -> str:
    names = [member.name for member in registry.members if hook in registry.hooks_of(member)]
    return f"drop the line, or name one of {', '.join(names)}" if names else "drop the line: no plugin here does"
