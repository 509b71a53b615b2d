"""Layers → groups and spaces: which layers share a numbering of slots, and how many slots it has.

A layer slides when it has a window, the window is shorter than the longest request, and `hybrid_swa`
allows it; sliding layers live in the space ``swa``, all others in ``full``. The window boundary: a layer
sees ``window_tokens + 1`` tokens (the earlier ones and the token itself), so from a context of that
length down it sees everything and counts as full.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvdock.errors import PlanError
from kvdock.layout import FULL, REQUESTS, SWA, TARGET, TOKENS, LayerGroup, SizeRule, Space, round_up
from kvdock.model import LayerParams, LayerSpec
from kvdock.options import exact_ratio
from kvdock.queries import GroupQuery, Query, StateQuery

NO_CACHE = "none"
"""Kind of a layer that keeps nothing."""

MIN_TOKENS = 2
"""Fewest tokens that serve one request: one to read and one to write."""
MIN_REQUESTS, MAX_REQUESTS = 2048, 4096
REQUESTS_PER_CONTEXT = 512
"""The automatic request limit allows this many requests for each context length of tokens."""
EXTRA_COLUMNS = 4
DECODE_REQUESTS_WITH_EXTRA = 32
"""Up to this many requests a decode worker takes twice as many that still arrive."""


def group_layers(query: GroupQuery) -> tuple[LayerGroup, ...]:
    """Return this rank's layers by space, kind and shape; the first group of a space has the space's name.

    Layers that share KV are listed in `LayerGroup.shared` of the owner's group; layers without a cache
    are left out. A draft's layers slide only beside a target whose layers do: they share its allocator.

    Raises:
        PlanError: a layer shares KV that another pipeline stage owns.
    """
    members: dict[tuple[str, str, LayerParams], list[tuple[int, LayerSpec]]] = {}
    home: dict[int, tuple[str, str, LayerParams]] = {}
    for layer_id, layer in query.layers:
        if layer.kind == NO_CACHE or layer.shares_kv_with is not None:
            continue
        key = (_space_of(layer, query), layer.kind, layer.params)
        members.setdefault(key, []).append((layer_id, layer))
        home[layer_id] = key
    shared = _shared(query.layers, home)
    names = _names(key[0] for key in members)
    return tuple(
        LayerGroup(
            name=name,
            kind=kind,
            space=space,
            layers=tuple(layers),
            shared=tuple(pair for pair in shared if home[pair[1]] == (space, kind, params)),
            worker=query.worker,
        )
        for name, ((space, kind, params), layers) in zip(names, members.items(), strict=True)
    )


def _shared(
    layers: Iterable[tuple[int, LayerSpec]], home: dict[int, tuple[str, str, LayerParams]]
) -> list[tuple[int, int]]:
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


def _names(spaces: Iterable[str]) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for space in spaces:
        count = seen.get(space, 0)
        names.append(f"{space}.{count}" if count else space)
        seen[space] = count + 1
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
    if not slides(layer, context, option):
        return FULL
    beside = query.worker == TARGET or any(slides(other, context, option) for other in target.layers)
    return SWA if beside else FULL


def spaces(query: StateQuery) -> dict[str, Space]:
    """Return the spaces ``full``, ``swa`` and ``requests`` where this plan needs them.

    What the model has counts, not what this rank owns of it: all ranks number their slots alike.

    Raises:
        PlanError: `max_running_requests` leaves no request for a data-parallel worker.
    """
    declared = {REQUESTS: _requests(query)}
    used = _spaces_used(query)
    if FULL in used:
        declared[FULL] = _full(query)
    if SWA in used:
        window = _window(query)
        declared[SWA] = _sliding(query, window) if FULL in used else _only_sliding(query, window)
    return declared


def _spaces_used(query: StateQuery) -> set[str]:
    used = {group.space for group in query.groups}
    if used <= {FULL, SWA}:
        context, option = query.context_length, query.options.hybrid_swa
        layers = [layer for layer in query.model.layers if layer.kind != NO_CACHE]
        used |= {SWA if slides(layer, context, option) else FULL for layer in layers}
    return used


def _window(query: StateQuery) -> int:
    """Return the largest window in use: one space, so one window for all that lives in it."""
    context, option = query.context_length, query.options.hybrid_swa
    found = [layer.window_tokens for layer in query.model.layers if slides(layer, context, option)]
    found += [layer.window_tokens for group in query.groups if group.space == SWA for _, layer in group.layers]
    return max(window for window in found if window is not None)


def page_size_of(query: Query) -> int:
    """Return the tokens a page of the spaces in which tokens are numbered."""
    return query.options.page_size or 1


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
            at_most_of=(FULL, (1, 1)),
            round="up",
            round_to=page,
            needs=needs,
        )
        options: tuple[str, ...] = (*common, *_CAP_OPTIONS)
    else:
        ratio = exact_ratio(query.options.swa_full_tokens_ratio or 1)
        rule = SizeRule(per_token=ratio, of=FULL, at_most_of=(FULL, (1, 1)), round="down", round_to=page, needs=needs)
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
    """Return whether requests bound the sliding slots: their limit is given and nothing outlives a request."""
    options = query.options
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
    half = (TOKENS, (1, 2))
    limit = requests_per_worker(query)
    if limit is not None:
        rule = SizeRule(fixed=limit, at_most_of=half, needs=1)
        options: tuple[str, ...] = ("max_running_requests",)
    else:
        rule = SizeRule(
            per_token=(REQUESTS_PER_CONTEXT, query.context_length),
            at_least=MIN_REQUESTS,
            at_most=MAX_REQUESTS,
            at_most_of=half,
            at_most_share=exact_ratio(query.options.request_table_share or 1),
            needs=1,
        )
        options = ("context_length", "request_table_share")
    return Space(name=REQUESTS, rule=rule, issued_by="request_pool", options=options)


def requests_per_worker(query: Query) -> int | None:
    """Return the user's request limit of one worker: divided over the workers under DP attention; or ``None``.

    Raises:
        PlanError: the division leaves none; names both numbers.
    """
    asked, parallel = query.options.max_running_requests, query.parallel
    if asked is None:
        return None
    workers = parallel.dp_size if parallel.dp_attention else 1
    if asked < workers:
        raise PlanError(
            f"max_running_requests={asked} over dp_size={workers} leaves no request for a worker; "
            f"give max_running_requests={workers} or more, or a smaller dp_size"
        )
    return asked // workers


def decode_extra_rows(query: Query) -> int:
    """Return the rows of requests whose KV is still arriving at a decode worker; 0 in other roles."""
    options = query.options
    if options.role != "decode":
        return 0
    if options.decode_extra_slots is not None:
        return options.decode_extra_slots
    limit = requests_per_worker(query)
    return 2 * limit if limit is not None and limit <= DECODE_REQUESTS_WITH_EXTRA else 0


def draft_tokens(query: Query) -> int:
    """Return the tokens that one speculative step verifies: the option, else a chain of its steps; 0 without."""
    options = query.options
    if options.speculative_algorithm is None:
        return 0
    chain = (options.speculative_num_steps or 0) * (options.speculative_topk or 1) + 1
    return options.speculative_num_draft_tokens or chain


def alloc_len_per_decode(query: Query) -> int:
    """Return the slots that one speculative step takes of a request row; branches on pages of their own are rounded."""
    options, page = query.options, page_size_of(query)
    steps, topk = options.speculative_num_steps or 0, options.speculative_topk or 1
    if page > 1 and topk > 1:
        # A branch may start at the last slot of a page: it takes the rest of that page as well.
        return max(-(-(page - 1 + steps) // page) * page * topk, draft_tokens(query))
    return max(steps * topk, draft_tokens(query))


def request_columns(query: Query) -> int:
    """Return the columns of a request row: the context and room for drafts that run past it."""
    page = page_size_of(query)
    extra = EXTRA_COLUMNS + draft_tokens(query)
    if query.options.speculative_algorithm is not None and page > 1:
        extra = max(extra, 2 * alloc_len_per_decode(query) + page - 1)
    return query.context_length + extra
