"""Layers → groups, and the spaces in which their rows are numbered, as rules that the core's solver sizes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from kvdock.demand import decode_extra_rows, device_buffer_size, page_size_of
from kvdock.errors import PlanError
from kvdock.families import groups as core_groups
from kvdock.layout import (
    DEVICE,
    FULL,
    REQUESTS,
    SWA,
    LayerGroup,
    SizeRule,
    Space,
    round_up,
)
from kvdock.model import DSAParams, LayerSpec
from kvdock.options import exact_ratio
from kvdock.queries import GroupQuery, Query, StateQuery

from kvdock_dsv4.geometry import C4, C4_STATE, C128, C128_STATE, RATIO_OF, ring_of
from kvdock_dsv4.model import FAMILY, KIND, DSV4Params

INDEX, STATE, INDEX_STATE = "dsv4_index", "dsv4_state", "dsv4_index_state"
"""Kinds of the pools beside `KIND`: index keys, states of compressed rows, states of the indexer's."""

Layers = tuple[tuple[int, LayerSpec], ...]

_FOLLOWS_SWA = ("page_size", "swa_full_tokens_ratio", "speculative_algorithm")


def group_layers(query: GroupQuery) -> tuple[LayerGroup, ...] | None:
    """Return this rank's layers by what they keep, each in several groups; ``None`` for other families.

    Every layer keeps sliding rows, and one with a ratio its compressed rows and their states; layers of ratio 4
    index keys and the states of those as well.

    Raises:
        PlanError: a draft of this family beside a target of another, which numbers no sliding slots for it.
    """
    if query.model.family != FAMILY:
        return None
    if query.target.family != FAMILY:
        raise PlanError(
            f"the draft {query.model.name!r} of DeepSeek V4 shares the sliding slots of its target, and "
            f"{query.target.name!r} is no DeepSeek V4; give another draft"
        )
    by_ratio = {ratio: tuple(pair for pair in query.layers if _ratio(pair[1]) == ratio) for ratio in (4, 128)}
    found = [
        _group(query, SWA, KIND, SWA, query.layers),
        _group(query, C4, KIND, C4, by_ratio[4]),
        _group(query, "c4.index", INDEX, C4, _indexers(by_ratio[4])),
        _group(query, "c4.state", STATE, C4_STATE, by_ratio[4]),
        _group(query, "c4.index_state", INDEX_STATE, C4_STATE, by_ratio[4]),
        _group(query, C128, KIND, C128, by_ratio[128]),
        _group(query, "c128.state", STATE, C128_STATE, by_ratio[128]),
    ]
    return tuple(group for group in found if group is not None)


def _ratio(layer: LayerSpec) -> int:
    return layer.params.compress_ratio if isinstance(layer.params, DSV4Params) else 0


def _group(query: GroupQuery, name: str, kind: str, space: str, layers: Layers) -> LayerGroup | None:
    if not layers:
        return None
    return LayerGroup(name=name, kind=kind, space=space, layers=layers, worker=query.worker)


def _indexers(layers: Layers) -> Layers:
    """Return the indexers of layers as the core describes them: its format of index keys is used as it is."""
    return tuple((layer_id, _indexer(layer)) for layer_id, layer in layers)


def _indexer(layer: LayerSpec) -> LayerSpec:
    own = layer.params
    if not isinstance(own, DSV4Params) or own.index_head_dim is None:
        raise PlanError(f"a layer of kind {layer.kind!r} has no indexer")
    params = DSAParams(kv_lora_rank=own.nope_dim, qk_rope_head_dim=own.rope_dim, index_head_dim=own.index_head_dim)
    return msgspec.structs.replace(layer, kind=INDEX, params=params)


def spaces(query: StateQuery) -> Mapping[str, Space] | None:
    """Return the spaces of a DeepSeek V4 target, or ``None`` for other families.

    Requests are numbered in ``full``, which no buffer counts. Sliding slots follow it by a ratio, compressed rows
    by their own, and states follow sliding pages or request rows. All ranks have the same spaces.
    """
    if query.model.family != FAMILY:
        return None
    used = {group.space for group in query.all_groups}
    declared = [_full(query), _sliding(query)]
    declared += [_compressed(query, name) for name in RATIO_OF if name in used]
    if has_host_tier(query):
        declared.append(_device(query))
    if C4_STATE in used:
        declared.append(_swa_states(query))
    if C128_STATE in used:
        declared.append(_request_states(query))
    found = {space.name: space for space in declared}
    return {**found, REQUESTS: _requests(query, found)}


def _full(query: StateQuery) -> Space:
    page = page_size_of(query)
    rule = SizeRule(per_token=(1, 1), round_to=page, needs=page)
    return Space(name=FULL, rule=rule, page_size=page, options=("page_size",))


def _sliding(query: StateQuery) -> Space:
    """Return the sliding slots: a ratio of the full ones, whatever the requests; the floor is the core's."""
    page, window = page_size_of(query), _window(query)
    rule = SizeRule(
        per_token=exact_ratio(query.options.swa_full_tokens_ratio or 1),
        of=FULL,
        at_most_of=((FULL, (1, 1)),),
        round_to=page,
        needs=core_groups.sliding_floor(query, window),
    )
    options = ("page_size", "swa_full_tokens_ratio", "context_length", "chunked_prefill_size")
    return Space(name=SWA, rule=rule, page_size=page, window_tokens=window, options=options)


def _window(query: StateQuery) -> int:
    """Return the largest window of what lives in sliding slots, drafts of other families included."""
    layers = [layer for group in query.all_groups if group.space == SWA for _, layer in group.layers]
    return max((layer.window_tokens or 0 for layer in layers), default=0)


def _compressed(query: StateQuery, name: str) -> Space:
    """Return the space of compressed rows: a page of them for each full page, so ``n / ratio`` rows."""
    ratio = RATIO_OF[name]
    page = max(1, page_size_of(query) // ratio)  # a page of fewer tokens is objected to
    rule = SizeRule(per_token=(1, ratio), of=FULL, round_to=page)
    return Space(name=name, rule=rule, page_size=page, issued_by="derived", options=("page_size",))


def has_host_tier(query: StateQuery) -> bool:
    """Return whether compressed rows of ratio 4 lie on the host: it is asked for, and there are some, on whatever rank."""
    return bool(query.options.hisparse) and any(group.space == C4 for group in query.all_groups)


def device_buffer_slots(query: Query) -> int:
    """Return the compressed slots from which a request's steps read, in whole pages."""
    ratio = RATIO_OF[C4]
    longest = min(device_buffer_size(query), -(-query.context_length // ratio))
    return round_up(longest, page_size_of(query) // ratio)


def _device(query: StateQuery) -> Space:
    """Return the space of the rows of ratio 4 that are on the device: those of the window, and buffers to read from.

    Requests that arrive have the rows of their window there, beside those that run.
    """
    ratio, window = RATIO_OF[C4], _window(query)
    page = page_size_of(query) // ratio
    shrink = query.options.hisparse_host_to_device_ratio or 1
    arriving = decode_extra_rows(query) * core_groups.window_pages(window, page_size_of(query)) * page
    needs = device_slots_per_request(query, window) + arriving
    rule = SizeRule(per_token=(1, ratio * shrink), of=FULL, fixed=arriving, round_to=page, needs=needs)
    options = (
        "page_size",
        "hisparse_host_to_device_ratio",
        "hisparse_top_k",
        "hisparse_device_buffer_size",
        "role",
        "decode_extra_slots",
    )
    return Space(name=DEVICE, rule=rule, page_size=page, window_tokens=-(-window // ratio), options=options)


def device_slots_per_request(query: Query, window_tokens: int) -> int:
    """Return the device slots that one request takes at most: its buffer, and the rows of its sliding pages."""
    return device_buffer_slots(query) + core_groups.sliding_floor(query, window_tokens) // RATIO_OF[C4]


def _swa_states(query: StateQuery) -> Space:
    """Return the space of states that follow sliding pages: a ring for each *page*, whatever the window is."""
    ring = ring_of(query, RATIO_OF[C4])
    rule = SizeRule(per_token=(ring, page_size_of(query)), of=SWA, round_to=ring)
    return Space(name=C4_STATE, rule=rule, page_size=ring, issued_by="derived", options=_FOLLOWS_SWA)


def _request_states(query: StateQuery) -> Space:
    """Return the space of states that follow request rows, those of requests that still arrive included."""
    ring = ring_of(query, RATIO_OF[C128])
    rule = SizeRule(per_request=(ring, 1), fixed=ring * decode_extra_rows(query), needs=ring)
    options = ("max_running_requests", "speculative_algorithm", "role", "decode_extra_slots")
    return Space(name=C128_STATE, rule=rule, page_size=ring, issued_by="request_pool", options=options)


def _requests(query: StateQuery, found: Mapping[str, Space]) -> Space:
    """Return the core's request rows, states by request paid from the same share of the budget as what they hold."""
    space = core_groups.spaces(query)[REQUESTS]
    if DEVICE in found:
        rule = found[DEVICE].rule
        # Of the tokens: what is fixed is for requests that arrive.
        share = rule.per_token[0], rule.per_token[1] * (rule.needs - rule.fixed)
        caps = (*space.rule.at_most_of, (FULL, share))
        space = msgspec.structs.replace(space, rule=msgspec.structs.replace(space.rule, at_most_of=caps))
    states = found.get(C128_STATE)
    if states is None or not space.rule.shares:
        return space
    beside = ((C128_STATE, states.rule.per_request),)
    shares = tuple(
        msgspec.structs.replace(share, beside=beside) if share.counts == "kv" else share for share in space.rule.shares
    )
    return msgspec.structs.replace(space, rule=msgspec.structs.replace(space.rule, shares=shares))


def state_guard(query: Query, ratio: int) -> int:
    """Return the rows of an offline state pool beyond its slots: those of padding, a ring, and the empty state.

    Padding is the ring of page 0 where states follow sliding pages, and of row 0 where they follow requests;
    the latter is counted among the request rows, and the pool keeps a ring beside them.
    """
    ring = ring_of(query, ratio)
    return ring + 1 if ratio == RATIO_OF[C4] else 2 * ring + 1
