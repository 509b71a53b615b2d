"""The spaces of the form for Ascend devices, as rules: every one has pages of the page size that requests have."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from kvdock.demand import decode_extra_rows, page_size_of
from kvdock.errors import PlanError
from kvdock.layout import FULL, REQUESTS, Ratio, SizeRule, Space
from kvdock.queries import Query, StateQuery
from kvdock_dsv4 import sizing
from kvdock_dsv4.geometry import RATIO_OF, STATE_RATIO

from kvdock_ascend import rules


def spaces(query: StateQuery) -> Mapping[str, Space] | None:
    """Return the spaces of a DeepSeek V4 target, or ``None`` for other families.

    A page of compressed rows belongs to one request, so each request may have one that is not full. States have a
    fixed number of pages a request, which its newest tokens share in turn.

    Raises:
        PlanError: a host tier is asked for, whose spaces and rows are the family's for other devices.
    """
    if query.options.hisparse:
        raise PlanError(rules.unread(query, "hisparse"))
    found = sizing.spaces(query)
    if found is None:
        return None
    changed = {name: _compressed(query, name) for name in RATIO_OF if name in found}
    changed |= {name: _states(query, name) for name in STATE_RATIO if name in found}
    beside = tuple((name, space.rule.per_request) for name, space in changed.items())
    return {**found, **changed, REQUESTS: _requests(found[REQUESTS], beside)}


def state_pages(query: Query, ratio: int) -> int:
    """Return the pages of states of a request: enough for the newest tokens, ``1.8 · ratio`` of them, wherever they begin."""
    return max(2, -(-18 * ratio // (10 * page_size_of(query))) + 1)


def _compressed(query: StateQuery, name: str) -> Space:
    """Return ``n / ratio`` rows in whole pages, and a page a request."""
    page = page_size_of(query)
    rule = SizeRule(
        per_token=(1, RATIO_OF[name]),
        of=FULL,
        per_request=(page, 1),
        fixed=page * decode_extra_rows(query),
        round="up",
        round_to=page,
        needs=page,
    )
    return Space(name=name, rule=rule, page_size=page, options=("page_size", "max_running_requests"))


def _states(query: StateQuery, name: str) -> Space:
    page = page_size_of(query)
    each = state_pages(query, STATE_RATIO[name]) * page
    rule = SizeRule(per_request=(each, 1), fixed=each * decode_extra_rows(query), needs=each)
    return Space(name=name, rule=rule, page_size=page, options=("page_size", "max_running_requests"))


def _requests(space: Space, beside: tuple[tuple[str, Ratio], ...]) -> Space:
    """Return the request rows, with what each request holds beside its tokens paid from the same share of the budget."""
    shares = tuple(
        msgspec.structs.replace(share, beside=beside) if share.counts == "kv" else share for share in space.rule.shares
    )
    return msgspec.structs.replace(space, rule=msgspec.structs.replace(space.rule, shares=shares))
