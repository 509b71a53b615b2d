"""Spaces that share one byte buffer, while planning: how large the buffer is, and how many pages each can number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec

from kvdock.errors import PlanError
from kvdock.layout import REQUESTS, STATE, Buffer, SizeRule, Space, Unit, round_up
from kvdock.storages import SHARED, WITHIN, fits_pages
from kvdock.unified.geometry import first_pages, page_bytes


def share_out(spaces: Mapping[str, Space], buffers: Sequence[Buffer]) -> tuple[dict[str, Space], tuple[Buffer, ...]]:
    """Return spaces and buffers of which all that layers read lies in one byte buffer, where pages can hold it.

    The space in which requests are numbered measures the buffer: what it would hold of each other space by that
    one's own rule is added to its tokens. Every space then numbers as many pages as the whole buffer has.

    Raises:
        PlanError: fewer than two spaces have anything in it.
    """
    last = next((name for name, space in spaces.items() if space.issued_by == "allocator"), "")
    capped = {name: _capped(space) for name, space in spaces.items()}
    marked = tuple(_marked(buffer, spaces, last) for buffer in buffers)
    nbytes = page_bytes(marked, capped)
    if len(nbytes) < 2 or last not in nbytes:
        raise PlanError(
            f"unified_memory=true has only {', '.join(nbytes) or 'nothing'} to lay into the buffer, so there is nothing to "
            "share out; leave unified_memory out"
        )
    units = {name: Fraction(nbytes[name], spaces[name].page_size) for name in nbytes}
    found = {**capped, **_numberings(capped, nbytes, last), last: _measure(capped, units, last)}
    if REQUESTS in found:
        found[REQUESTS] = _uncapped(found[REQUESTS], capped.get(STATE))
    return found, tuple(_guarded(buffer, nbytes, found) for buffer in marked)


def _capped(space: Space) -> Space:
    """Return a space that keeps a number of slots that the user stated as the most that it has."""
    rule = space.rule
    states = space.issued_by == "request_pool" and space.name != REQUESTS
    if not states or rule.shares or rule.per_token[0] or rule.per_request[0]:
        return space
    return _with_rule(space, msgspec.structs.replace(rule, at_most=rule.fixed))


def _marked(buffer: Buffer, spaces: Mapping[str, Space], last: str) -> Buffer:
    space = spaces.get(buffer.space or "")
    if not buffer.is_kv or space is None or space.name == REQUESTS or not fits_pages(buffer, space):
        return buffer
    return msgspec.structs.replace(buffer, storage=SHARED if space.name == last else WITHIN, stacked=False)


def _guarded(buffer: Buffer, nbytes: Mapping[str, int], spaces: Mapping[str, Space]) -> Buffer:
    """Return a buffer with rows for the pages in which paddings lie."""
    if buffer.storage not in (SHARED, WITHIN) or buffer.space is None:
        return buffer
    pages = first_pages(nbytes)[buffer.space]
    slots = spaces[buffer.space].page_size if buffer.unit is Unit.SLOT else 1
    return msgspec.structs.replace(buffer, guard=pages * slots)


class _Shares(NamedTuple):
    """What the other spaces hold by their own rules, in slots of the last: a token, a request, and always."""

    per_token: Fraction
    per_request: Fraction
    fixed: Fraction
    factor: Fraction
    """What states with a share of the memory add to everything else."""


def _shares(spaces: Mapping[str, Space], units: Mapping[str, Fraction], last: str) -> _Shares:
    found = _Shares(Fraction(0), Fraction(0), Fraction(0), Fraction(1))
    for name in units.keys() - {last}:
        rule, weight = spaces[name].rule, units[name] / units[last]
        if rule.shares:
            of_budget = Fraction(*rule.shares[0].of_budget)
            found = found._replace(factor=found.factor + of_budget / (1 - of_budget))
            continue
        found = found._replace(
            per_token=found.per_token + weight * Fraction(*rule.per_token),
            per_request=found.per_request + weight * Fraction(*rule.per_request),
            fixed=found.fixed + weight * rule.fixed,
        )
    return found


def _measure(spaces: Mapping[str, Space], units: Mapping[str, Fraction], last: str) -> Space:
    """Return the last space: its tokens, and room for what the others hold beside them."""
    space, shares = spaces[last], _shares(spaces, units, last)
    per_token, per_request = (1 + shares.per_token) * shares.factor, shares.per_request * shares.factor
    needed = sum(spaces[name].rule.needs * unit for name, unit in units.items()) / units[last]
    rule = SizeRule(
        per_token=(per_token.numerator, per_token.denominator),
        per_request=(per_request.numerator, per_request.denominator),
        fixed=-int(-(shares.fixed * shares.factor) // 1),
        round="up",
        round_to=space.page_size,
        needs=round_up(-int(-needed // 1), space.page_size),
    )
    options = tuple(dict.fromkeys(option for name in (last, *units) for option in spaces[name].options))
    return msgspec.structs.replace(space, rule=rule, options=options)


def _numberings(spaces: Mapping[str, Space], nbytes: Mapping[str, int], last: str) -> dict[str, Space]:
    """Return the other spaces, each with as many slots as the whole buffer holds."""
    others = [name for name in nbytes if name != last]
    found = {}
    for place, name in enumerate(others):
        space = spaces[name]
        page = space.page_size
        ratio = Fraction(nbytes[last] * page, spaces[last].page_size * nbytes[name])
        # Between the ends every place of the grid has a number; the first space may lose its last one.
        slack = 0 if place == 0 else (2 + -(-2 * sum(nbytes.values()) // nbytes[name])) * page
        rule = SizeRule(
            per_token=(ratio.numerator, ratio.denominator),
            of=last,
            fixed=slack,
            at_most=space.rule.at_most,
            round="down" if place == 0 else "up",
            round_to=page,
            needs=space.rule.needs,
        )
        found[name] = _with_rule(space, rule)
    return found


def _uncapped(space: Space, states: Space | None) -> Space:
    """Return the rows without a cap at states that only share the buffer, where the user fixed the rows."""
    if states is None or not states.rule.shares or space.rule.shares:
        return space
    caps = tuple((of, ratio) for of, ratio in space.rule.at_most_of if of != STATE)
    return _with_rule(space, msgspec.structs.replace(space.rule, at_most_of=caps))


def _with_rule(space: Space, rule: SizeRule) -> Space:
    return msgspec.structs.replace(space, rule=rule)
