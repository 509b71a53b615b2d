"""Groups and spaces of the form for AMD devices, as data: what slides has a ring for each request row, whatever the tokens."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from kvdock.demand import decode_extra_rows, draft_tokens
from kvdock.errors import PlanError
from kvdock.layout import FULL, REQUESTS, SWA, LayerGroup, Ratio, SizeRule, Space
from kvdock.queries import GroupQuery, StateQuery
from kvdock_dsv4 import sizing
from kvdock_dsv4.geometry import C4, C4_STATE, C128, C128_STATE, RATIO_OF, ring_of
from kvdock_dsv4.model import KIND, DSV4Params

ROWS = {C4: "c4_rows", C128: "c128_rows"}
"""Space of compressed rows → that of the buffer in which they lie behind the rings of all request rows."""
RATIO_OF_ROWS = {ROWS[name]: ratio for name, ratio in RATIO_OF.items()}

_BY_REQUEST = ("max_running_requests", "speculative_algorithm", "role", "decode_extra_slots")
"""Options that rings follow."""


def group_layers(query: GroupQuery) -> tuple[LayerGroup, ...] | None:
    """Return this rank's layers, each with its sliding and compressed rows in one group; ``None`` for other families.

    Index keys and states have groups of their own, as on other devices.

    Raises:
        PlanError: a draft of this family beside a target of another.
    """
    found = sizing.group_layers(query)
    return None if found is None else tuple(own for group in found if (own := _with_rings(group)) is not None)


def _with_rings(group: LayerGroup) -> LayerGroup | None:
    """Return a group of rows in the space of its one buffer; of the group of all layers those without a ratio."""
    if group.kind != KIND:
        return group
    if group.space != SWA:
        return msgspec.structs.replace(group, space=ROWS[group.space])
    plain = tuple(
        pair for pair in group.layers if isinstance(own := pair[1].params, DSV4Params) and not own.compress_ratio
    )
    return msgspec.structs.replace(group, layers=plain) if plain else None


def spaces(query: StateQuery) -> Mapping[str, Space] | None:
    """Return the spaces of a DeepSeek V4 target, or ``None`` for other families.

    Requests are numbered in ``full``, and nothing else is handed out with tokens: sliding rows and all states are in
    rings of request rows, a constant beside the tokens.

    Raises:
        PlanError: a host tier is asked for, or a draft of another family has layers that slide.
    """
    _refuse_tiers(query)
    found = sizing.spaces(query)
    if found is None:
        return None
    _refuse_sliding_drafts(query)
    ring, used = ring_rows(query), {group.space for group in query.all_groups}
    changed = {SWA: _rings(query, SWA, ring, window_tokens=_window(query) - 1)}
    changed |= {rows: _rows(query, rows, ring) for rows in RATIO_OF_ROWS if rows in used}
    if C4_STATE in found:
        changed[C4_STATE] = _rings(query, C4_STATE, ring_of(query, RATIO_OF[C4]))
    declared = {**found, **changed}
    return {**declared, REQUESTS: _requests(declared)}


def ring_rows(query: StateQuery) -> int:
    """Return the sliding rows of a request: its window for the first of the tokens of a step, and the other tokens.

    The window counts the token itself, as the config does, so a step of one token (no speculation) needs no more.
    """
    return _window(query) + max(1, draft_tokens(query)) - 1


def _window(query: StateQuery) -> int:
    """Return the largest window of the layers of this family, drafts included."""
    layers = [layer for group in query.all_groups if group.kind == KIND for _, layer in group.layers]
    return max(layer.window_tokens or 1 for layer in layers)


def _rings(query: StateQuery, name: str, ring: int, window_tokens: int | None = None) -> Space:
    """Return a space of rings, one for each request row, those of requests that still arrive included."""
    rule = SizeRule(per_request=(ring, 1), fixed=ring * decode_extra_rows(query), needs=ring)
    return Space(
        name=name,
        rule=rule,
        page_size=ring,
        window_tokens=window_tokens,
        issued_by="request_pool",
        options=_BY_REQUEST,
    )


def _rows(query: StateQuery, name: str, ring: int) -> Space:
    """Return the space of one buffer: the rings of all request rows, and a compressed row for each so many tokens."""
    rings = _rings(query, name, ring)
    rule = msgspec.structs.replace(rings.rule, per_token=(1, RATIO_OF_ROWS[name]), of=FULL)
    return msgspec.structs.replace(rings, rule=rule, issued_by="derived", options=("page_size", *_BY_REQUEST))


def _requests(found: Mapping[str, Space]) -> Space:
    """Return the request rows, with all that each keeps beside its tokens paid from the same share of the budget."""
    beside: tuple[tuple[str, Ratio], ...] = tuple(
        (name, found[name].rule.per_request) for name in (SWA, *RATIO_OF_ROWS, C4_STATE, C128_STATE) if name in found
    )
    space = found[REQUESTS]
    shares = tuple(
        msgspec.structs.replace(share, beside=beside) if share.counts == "kv" else share for share in space.rule.shares
    )
    return msgspec.structs.replace(space, rule=msgspec.structs.replace(space.rule, shares=shares))


def _refuse_tiers(query: StateQuery) -> None:
    if query.options.hisparse:
        raise PlanError(
            "hisparse=true keeps compressed rows on the host, and the kernels of DeepSeek V4 on "
            f"{query.device.name} read them in one buffer with the sliding rows; leave hisparse out"
        )


def _refuse_sliding_drafts(query: StateQuery) -> None:
    """Refuse drafts that need sliding slots of tokens: there are none."""
    others = [group for group in query.all_groups if group.space == SWA and group.kind != KIND]
    if others:
        raise PlanError(
            f"the layers {list(others[0].layer_ids)} of {others[0].worker} slide, and on {query.device.name} a target of "
            "DeepSeek V4 has no sliding slots for them; give a draft of DeepSeek V4, or one without windows"
        )
