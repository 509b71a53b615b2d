"""One row of facts per plugin, for the command line, explanations and errors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvdock.hookspecs import TIERS
from kvdock.plugins.discovery import Candidate
from kvdock.plugins.loading import Member, Problem, Registry


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one plugin.

    `status` is ``found`` (installed, not imported), ``loaded``, ``failed``, ``inactive``, ``denied`` or
    ``conflict``; `reason` says why. `contract` and `hooks` are known of loaded plugins alone.
    """

    name: str
    tier: str
    distribution: str
    version: str
    entry_point: str
    status: str
    contract: str = ""
    hooks: tuple[str, ...] = ()
    reason: str = ""


def rows(candidates: Sequence[Candidate], registry: Registry | None = None) -> tuple[Row, ...]:
    """Return a row per candidate and per other member of the registry, by tier and name.

    Without a registry nothing was imported: the rows say what the metadata says.
    """
    members = {(m.tier, m.name, m.distribution): m for m in registry.members} if registry else {}
    problems = {(p.tier, p.name, p.distribution): p for p in registry.problems} if registry else {}
    found = []
    for candidate in candidates:
        key = (candidate.tier, candidate.name, candidate.distribution)
        member = members.pop(key, None) if candidate.status == "found" else None
        found.append(_of_candidate(candidate, registry, member, problems.get(key)))
    found += [_of_member(registry, member) for member in members.values() if registry]
    return tuple(sorted(found, key=lambda row: (TIERS.index(row.tier), row.name, row.distribution)))


def _of_candidate(
    candidate: Candidate, registry: Registry | None, member: Member | None, problem: Problem | None
) -> Row:
    if member is not None and registry is not None:
        return _of_member(registry, member, candidate.value)
    return Row(
        name=candidate.name,
        tier=candidate.tier,
        distribution=candidate.distribution,
        version=candidate.version,
        entry_point=candidate.value,
        status=problem.status if problem else candidate.status,
        reason=problem.reason if problem else candidate.reason,
    )


def _of_member(registry: Registry, member: Member, entry_point: str = "") -> Row:
    return Row(
        name=member.name,
        tier=member.tier,
        distribution=member.distribution,
        version=member.version,
        entry_point=entry_point,
        status="loaded",
        contract=getattr(member.plugin, "kvdock_contract", ""),
        hooks=registry.hooks_of(member),
        reason=f"the same object as {member.same_as}, asked once" if member.same_as else "",
    )
