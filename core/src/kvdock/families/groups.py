"""Layers → groups and spaces: which layers share a numbering of slots, and how many slots it has.

A layer slides when it has a window, the window is shorter than the longest request, and `hybrid_swa`
allows it; sliding layers live in the space ``swa``, all others in ``full``. The window boundary: a layer
sees ``window_tokens + 1`` tokens (the earlier ones and the token itself), so from a context of that
length down it sees everything and counts as full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from kvdock.demand import (
    MAX_REQUESTS,
    MIN_REQUESTS,
    alloc_len_per_decode,
    decode_extra_rows,
    draft_tokens,
    page_size_of,
    requests_per_worker,
    state_slots_per_request,
)
from kvdock.errors import PlanError
from kvdock.families import host_tier, states
from kvdock.layout import (
    FULL,
    REQUESTS,
    STATE,
    SWA,
    TARGET,
    TOKENS,
    LayerGroup,
    Ratio,
    Share,
    SizeRule,
    Space,
    round_up,
)
from kvdock.model import HybridParams, IndexParams, LayerParams, LayerSpec, MHAParams, SparseParams
from kvdock.options import exact_ratio
from kvdock.queries import GroupQuery, Query, StateQuery

NO_CACHE = "none"
"""Kind of a layer that keeps nothing."""
SPARSE = "sparse"
"""Kind of a layer that keeps keys and values, and an indexer's beside them."""

_Key = tuple[str, str, LayerParams]
"""What the layers of a group have in common: space, kind of pool, shape."""

MIN_TOKENS = 2
"""Fewest tokens that serve one request: one to read and one to write."""
REQUESTS_PER_CONTEXT = 512
"""The automatic request limit allows this many requests for each context length of tokens."""


def group_layers(query: GroupQuery) -> tuple[LayerGroup, ...]:
    """Return this rank's layers by space, kind and shape; the first group of a space has the space's name.

    Layers that share KV are listed in `LayerGroup.shared` of the owner's group; layers without a cache
    are left out. A draft's layers slide only beside a target whose layers do: they share its allocator.

    Raises:
        PlanError: a layer shares KV that another pipeline stage owns.
    """
    members: dict[_Key, list[tuple[int, LayerSpec]]] = {}
    home: dict[int, list[_Key]] = {}
    for layer_id, layer in query.layers:
        if layer.kind == NO_CACHE or layer.shares_kv_with is not None:
            continue
        for part in _parts(layer):
            key = (_space_of(part, query), part.kind, part.params)
            members.setdefault(key, []).append((layer_id, part))
            home.setdefault(layer_id, []).append(key)
    shared = _shared(query.layers, home)
    names = _names(members)
    return tuple(
        LayerGroup(
            name=name,
            kind=kind,
            space=space,
            layers=tuple(layers),
            shared=tuple(pair for pair in shared if (space, kind, params) in home[pair[1]]),
            worker=query.worker,
        )
        for name, ((space, kind, params), layers) in zip(names, members.items(), strict=True)
    )


def _shared(layers: Iterable[tuple[int, LayerSpec]], home: Mapping[int, list[_Key]]) -> list[tuple[int, int]]:
    """Return pairs of a layer without KV of its own and the layer whose KV it reads."""
    pairs = []
    for layer_id, layer in layers:
        owner = layer.shares_kv_with
        if owner is None or layer.kind == NO_CACHE:
            continue
        if owner not in home:
            raise PlanError(
                f"layer {layer_id} reads the KV of layer {owner}, which is on another pipeline stage; "
                "give pp_layers so that both are on one stage"
            )
        pairs.append((layer_id, owner))
    return pairs


def _parts(layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Return what a layer keeps, kind by kind: a sparse layer has an indexer beside its heads, a hybrid one a state."""
    params = layer.params
    if isinstance(params, HybridParams):
        heads = MHAParams(num_kv_heads=params.num_kv_heads, head_dim=params.head_dim, v_head_dim=params.v_head_dim)
        state = LayerSpec(kind=states.KIND, params=params.state)
        return msgspec.structs.replace(layer, kind="mha", params=heads), state
    if layer.kind != SPARSE or not isinstance(params, SparseParams):
        return (layer,)
    heads = MHAParams(num_kv_heads=params.num_kv_heads, head_dim=params.head_dim, v_head_dim=params.v_head_dim)
    index = IndexParams(index_head_dim=params.index_head_dim, index_value=params.index_value)
    replace = msgspec.structs.replace
    return replace(layer, kind="mha", params=heads), replace(layer, kind="sparse_index", params=index)


def _names(keys: Iterable[_Key]) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for space, kind, _ in keys:
        name = f"{space}.index" if kind == "sparse_index" else space
        count = seen.get(name, 0)
        names.append(f"{name}.{count}" if count else name)
        seen[name] = count + 1
    return names


def slides(layer: LayerSpec, context_length: int, hybrid_swa: str | None) -> bool:
    """Return whether a layer keeps a window only: it has one shorter than the context, and the option allows it."""
    window = layer.window_tokens
    if window is None or layer.kind == NO_CACHE or hybrid_swa == "off":
        return False
    return window + 1 < context_length


def _space_of(layer: LayerSpec, query: GroupQuery) -> str:
    target, option = query.target, query.options.hybrid_swa
    context = query.options.context_length or target.context_length
    if layer.kind == states.KIND:
        return STATE
    if not slides(layer, context, option):
        return FULL
    beside = query.worker == TARGET or any(slides(other, context, option) for other in target.layers)
    return SWA if beside else FULL


def spaces(query: StateQuery) -> dict[str, Space]:
    """Return the spaces ``full``, ``swa``, ``state`` and ``requests`` where this plan needs them.

    What all layers and drafts keep counts, not what this rank owns of it: all ranks number their slots alike.

    Raises:
        PlanError: `max_running_requests` leaves no request for a data-parallel worker.
    """
    declared = {REQUESTS: _requests(query)}
    used = {group.space for group in query.all_groups}
    if FULL in used:
        declared |= host_tier.token_spaces(query, _full(query))
    if SWA in used:
        window = _window(query)
        declared[SWA] = _sliding(query, window) if FULL in used else _only_sliding(query, window)
    if STATE in used:
        declared[STATE] = states.state_space(query)
    return declared


def _window(query: StateQuery) -> int:
    """Return the largest window in use: one space, so one window for all that lives in it."""
    layers = [layer for group in query.all_groups if group.space == SWA for _, layer in group.layers]
    return max(layer.window_tokens for layer in layers if layer.window_tokens is not None)


def _full(query: StateQuery) -> Space:
    page = page_size_of(query)
    rule = SizeRule(per_token=(1, 1), round_to=page, needs=round_up(MIN_TOKENS, page))
    return Space(name=FULL, rule=rule, page_size=page, options=("page_size",))


def _only_sliding(query: StateQuery, window: int) -> Space:
    """Return the space of a model whose layers all slide: requests are numbered in it, and no ratio applies."""
    page = page_size_of(query)
    rule = SizeRule(per_token=(1, 1), round_to=page, needs=sliding_floor(query, window))
    options = ("page_size", "hybrid_swa", "context_length", "chunked_prefill_size")
    return Space(name=SWA, rule=rule, page_size=page, window_tokens=window, options=options)


def _sliding(query: StateQuery, window: int) -> Space:
    """Return the space of a hybrid's sliding layers: capped by its requests if they are fixed, else by the ratio."""
    page = page_size_of(query)
    needs = sliding_floor(query, window)
    common = ("page_size", "hybrid_swa", "context_length", "chunked_prefill_size")
    if _is_capped(query):
        rule = SizeRule(
            per_request=(window_tokens_per_request(query, window), 1),
            fixed=_tokens_in_flight(query, window),
            at_most_of=((FULL, (1, 1)),),
            round="up",
            round_to=page,
            needs=needs,
        )
        options: tuple[str, ...] = (*common, *_CAP_OPTIONS)
    else:
        ratio = exact_ratio(query.options.swa_full_tokens_ratio or 1)
        rule = SizeRule(
            per_token=ratio, of=FULL, at_most_of=((FULL, (1, 1)),), round="down", round_to=page, needs=needs
        )
        options = (*common, "swa_full_tokens_ratio")
    return Space(name=SWA, rule=rule, page_size=page, window_tokens=window, options=options)


_CAP_OPTIONS = (
    "max_running_requests",
    "prefix_cache",
    "overlap_schedule",
    "swa_eviction_interval",
    "speculative_num_steps",
    "speculative_topk",
    "speculative_num_draft_tokens",
    "role",
    "decode_extra_slots",
)


def window_pages(window_tokens: int, page_size: int) -> int:
    """Return the most pages on which a token and its `window_tokens` earlier ones can lie."""
    return -(-window_tokens // page_size) + 1


def sliding_floor(query: Query, window_tokens: int) -> int:
    """Return the fewest sliding slots that serve one request, in whole pages.

    More than window + page, and the pages that a window straddles with the chunk that is being prefilled
    (a request is never longer than the context).
    """
    page = page_size_of(query)
    chunk = round_up(query.options.chunked_prefill_size or 0, page)
    straddled = window_pages(window_tokens, page) * page + chunk
    longest = round_up(query.context_length, page)
    return max(round_up(window_tokens + page + 1, page), min(straddled, longest))


def _is_capped(query: Query) -> bool:
    """Return whether requests bound the sliding slots: their limit is given and nothing outlives a request.

    In unified memory sliding layers have no pool of their own to bound, only a share by the ratio.
    """
    options = query.options
    if options.unified_memory:
        return False
    chunked = options.chunked_prefill_size is not None or options.role == "decode"
    return options.max_running_requests is not None and options.prefix_cache is False and chunked


def window_tokens_per_request(query: Query, window_tokens: int) -> int:
    """Return the sliding slots that a running request holds at most, between two evictions."""
    interval = query.options.swa_eviction_interval or 1
    page = page_size_of(query)
    return window_tokens + interval * max(1, draft_tokens(query)) + page + _decode_alloc(query)


def _decode_alloc(query: Query) -> int:
    """Return the slots that one decode step may take ahead for a request."""
    page, options = page_size_of(query), query.options
    if options.speculative_algorithm is None:
        return page
    if options.overlap_schedule:
        return 2 * alloc_len_per_decode(query)
    topk = options.speculative_topk or 1
    branch = round_up(options.speculative_num_steps or 0, page) + (page if topk > 1 else 0)
    return max(branch * topk, round_up(draft_tokens(query), page))


def _tokens_in_flight(query: Query, window_tokens: int) -> int:
    """Return the sliding slots beside those of running requests: chunks in prefill, or requests that arrive."""
    page, options = page_size_of(query), query.options
    if options.role == "decode":
        return (window_tokens + page) * decode_extra_rows(query)
    chunks = 2 if options.overlap_schedule else 1
    return chunks * (options.chunked_prefill_size or 0) + page


def _requests(query: StateQuery) -> Space:
    """Return the space of request rows: the user's limit, or what the tokens are worth within a share of the budget."""
    caps: tuple[tuple[str, Ratio], ...] = ((TOKENS, (1, 2)), *host_tier.request_caps(query))
    if states.rule_is_fixed(query):
        caps += ((STATE, (1, state_slots_per_request(query))),)
    limit = requests_per_worker(query)
    if limit is not None:
        rule = SizeRule(fixed=limit, at_most_of=caps, needs=1)
        options: tuple[str, ...] = ("max_running_requests",)
    else:
        rule = SizeRule(
            per_token=(REQUESTS_PER_CONTEXT, query.context_length),
            at_least=MIN_REQUESTS,
            at_most=MAX_REQUESTS,
            at_most_of=caps,
            shares=(
                Share(of_budget=exact_ratio(query.options.request_table_share or 1), counts="bookkeeping"),
                Share(of_budget=exact_ratio(query.options.request_state_share or 1), counts="kv"),
            ),
            needs=1,
        )
        options = ("context_length", "request_table_share", "request_state_share")
    return Space(name=REQUESTS, rule=rule, issued_by="request_pool", options=options)
