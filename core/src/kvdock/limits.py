"""Limits as data: what was asked for, what holds, which factor binds, and what would raise it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvdock.demand import DECODE_REQUESTS_WITH_EXTRA, decode_extra_rows, state_slots_per_request, states_in_use
from kvdock.families.groups import window_pages
from kvdock.layout import DEVICE, FULL, REQUESTS, STATE, Space
from kvdock.levers import Attempt, Tried, lower_ratios, nothing, roomier, roomier_dtype
from kvdock.outline import Outline
from kvdock.sizing import Problem, Solution, Solver, largest
from kvdock.unified.geometry import Line

LARGER_BUDGET = "a larger budget"
CAP = "max_total_tokens"
RATIO = "swa_full_tokens_ratio"
TABLE_SHARE = "request_table_share"
HOST_TIER_CAPS = {DEVICE: "device slots", FULL: "tokens"}
"""Space that bounds the requests of a cache with a host tier → its word: the device has a buffer for each that runs."""


Raisers = Callable[[Callable[[Tried], bool]], tuple[str, ...]]
"""Returns what lets a cache hold more, where the argument tells that of a plan that was tried."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit; `requested` is ``None`` where nothing was asked for.

    `raised_by` names what would raise it: options by their name, and what is no option in words.
    """

    name: str
    requested: int | None
    effective: int
    factor: str
    raised_by: tuple[str, ...]


def find_limits(
    outline: Outline, problem: Problem, budget_bytes: int, solution: Solution, tokens: int, attempt: Attempt = nothing
) -> tuple[Limit, ...]:
    """Return the limits on tokens, requests, the tokens of one request, state slots, and requests that arrive.

    The last two only where a cache has states or a role in which requests arrive. `attempt` tries what would raise them.
    """

    def raisers(holds_more: Callable[[Tried], bool]) -> tuple[str, ...]:
        return _raises_tokens(outline, solution.bound, attempt, holds_more)

    more_tokens = raisers(lambda made: made.max_total_num_tokens > tokens)
    found = [
        _token_limit(outline, solution, tokens, more_tokens),
        _request_limit(outline, Solver(problem, budget_bytes), solution, raisers),
        _length_limit(outline, solution, tokens, more_tokens, raisers),
    ]
    if STATE in outline.spaces:
        found.append(_state_limit(outline, solution))
    if outline.options.values.role == "decode":
        found.append(_arrival_limit(outline))
    return tuple(found)


def limit_warnings(limits: tuple[Limit, ...]) -> list[str]:
    """Return a sentence for each limit that is lower than what was asked for."""
    tokens, _, length = limits[:3]
    found = []
    if tokens.requested is not None and not tokens.factor.startswith(CAP):
        found.append(
            f"max_total_tokens={tokens.requested} is more than the {tokens.effective} tokens that fit "
            f"({tokens.factor} binds)"
        )
    if length.factor == "tokens":
        found.append(
            f"a request can have {length.effective} tokens at most, fewer than context_length={length.requested}; "
            f"raised by: {', '.join(length.raised_by)}"
        )
    return found


def _token_limit(outline: Outline, solution: Solution, tokens: int, raised_by: tuple[str, ...]) -> Limit:
    return Limit(
        name="tokens",
        requested=outline.given.max_total_tokens,
        effective=tokens,
        factor=_token_factor(outline, solution, tokens),
        raised_by=raised_by,
    )


def _token_factor(outline: Outline, solution: Solution, tokens: int) -> str:
    """Return what stopped the growth; a user's cap with what makes more tokens of it: it counts a rank's device slots."""
    if solution.bound != CAP or tokens <= solution.tokens:
        return solution.bound
    options = outline.options.values
    ratio = options.hisparse_host_to_device_ratio if options.hisparse else 1
    factors = {"dcp_size": outline.parallel.dcp_size, "hisparse_host_to_device_ratio": ratio or 1}
    return " · ".join([CAP, *(f"{name} ({factor})" for name, factor in factors.items() if factor > 1)])


def _raises_tokens(
    outline: Outline, bound: str, attempt: Attempt, holds_more: Callable[[Tried], bool]
) -> tuple[str, ...]:
    """Return what lets a cache hold more tokens, by what stopped their growth; `holds_more` tells it of what is tried."""
    if bound in (CAP, "host_budget_bytes", "cap_tokens"):
        return (bound,)
    if bound == "max_running_requests · context_length":
        return ("max_running_requests", "context_length")
    if bound.startswith("rank "):
        return (f"more memory, or fewer layers, on {bound}",)
    if bound != "budget":
        return ("more ranks",)
    found = [LARGER_BUDGET, roomier_dtype(outline, attempt, holds_more), "more ranks"]
    if any(RATIO in space.options for space in outline.spaces.values()):
        found.append(
            roomier(attempt, RATIO, lower_ratios(outline.options.values.swa_full_tokens_ratio or 1), holds_more)
        )
    return tuple(filter(None, found))


def _request_limit(outline: Outline, solver: Solver, solution: Solution, raisers: Raisers) -> Limit:
    requests = solution.sizes[REQUESTS]
    factor, raised_by = _request_factor(outline, solver, solution, raisers)
    given = outline.given.max_running_requests is not None
    return Limit(
        name="requests",
        requested=outline.spaces[REQUESTS].rule.fixed if given else None,  # of one worker, as what holds
        effective=requests,
        factor=factor,
        raised_by=raised_by,
    )


def _request_factor(
    outline: Outline, solver: Solver, solution: Solution, raisers: Raisers
) -> tuple[str, tuple[str, ...]]:
    """Return what stops the growth of the requests, and what would let them grow."""
    space = outline.spaces[REQUESTS]
    requests, caps = solution.sizes[REQUESTS], dict(space.rule.at_most_of)
    if STATE in caps and requests == solution.sizes[STATE] * caps[STATE][0] // caps[STATE][1]:
        return f"state slots // {caps[STATE][1]}", _raises_states(outline)
    given = outline.given.max_running_requests is not None
    if requests * 2 + 1 >= solution.tokens and not (given and requests >= space.rule.fixed):
        return "tokens // 2", raisers(lambda made: made.spaces[REQUESTS] > requests)
    if given:
        if requests < space.rule.fixed:
            return "other ranks", ("more memory on the rank that binds",)
        return "max_running_requests", ("max_running_requests",)
    for name, what in HOST_TIER_CAPS.items():
        if name in caps and requests == solution.sizes[name] * caps[name][0] // caps[name][1]:
            return f"{what} // {caps[name][1]}", ("hisparse_device_buffer_size (a smaller one)", LARGER_BUDGET)
    if requests < space.rule.at_least:
        share = _binding_share(solver, space)
        shorter = ("context_length (a shorter one)",) if share == TABLE_SHARE else ()
        return share, (share, "max_running_requests", *shorter)
    return "tokens · 512 / context_length, from 2048 to 4096", ("max_running_requests",)


def _binding_share(solver: Solver, space: Space) -> str:
    """Return the option whose share of the budget lets the fewest requests have what each keeps."""
    shares = {share.counts: solver.within_share(space, share) for share in space.rule.shares}
    states = shares.get("kv", 0) < shares.get("bookkeeping", 0)
    return "request_state_share" if states else TABLE_SHARE


def _raises_states(outline: Outline) -> tuple[str, ...]:
    if outline.given.max_state_slots is not None:
        return ("max_state_slots",)
    if outline.options.values.state_sizing == "ratio":
        return ("max_state_slots", "state_memory_ratio", LARGER_BUDGET)
    return ("max_running_requests (states then follow it)", "state_memory_ratio", LARGER_BUDGET)


def _length_limit(
    outline: Outline, solution: Solution, tokens: int, more_tokens: tuple[str, ...], raisers: Raisers
) -> Limit:
    context = outline.options.values.context_length or outline.model.context_length
    longest = _longest(outline, solution, context, tokens)
    fits = context <= longest
    if not fits and outline.line(solution.sizes) is not None:  # more tokens need not make room for a longer request
        more_tokens = raisers(lambda made: made.max_request_tokens > longest)
    return Limit(
        name="request_tokens",
        requested=context,
        effective=min(context, longest),
        factor="context_length" if fits else "tokens",
        raised_by=_raises_context(outline, context) if fits else more_tokens,
    )


def _raises_context(outline: Outline, context: int) -> tuple[str, ...]:
    longer = context < outline.model.context_length or outline.options.values.allow_longer_context
    return ("context_length",) if longer else ("context_length with allow_longer_context",)


def _longest(outline: Outline, solution: Solution, context: int, tokens: int) -> int:
    """Return the tokens of the longest request up to `context`: in unified memory what fits beside its window and states."""
    line = outline.line(solution.sizes)
    if line is None:
        return tokens
    return largest(lambda length: line.fits(_pages_alone(outline, line, length)), 0, context)


def _pages_alone(outline: Outline, line: Line, length: int) -> dict[str, int]:
    """Return the pages of each space that a request of `length` tokens has at most, alone in a cache without a prefix.

    A window lies on the most pages where a chunk of the prompt, cut anywhere, begins a page.
    """
    chunk = outline.options.values.chunked_prefill_size or 1
    found = {}
    for stretch in line.stretches:
        space, pages = outline.spaces[stretch.space], -(-length // stretch.page_size)
        if space.issued_by == "request_pool":
            pages = states_in_use(outline.request_pool.query)
        elif space.window_tokens is not None and space.name != outline.numbering:
            pages = min(pages, window_pages(space.window_tokens + chunk - 1, stretch.page_size))
        found[space.name] = pages
    return found


def _state_limit(outline: Outline, solution: Solution) -> Limit:
    """Return the limit on state slots: the user's number, what the requests take, or a share of the memory."""
    rule, given = outline.spaces[STATE].rule, outline.given
    each = state_slots_per_request(outline.request_pool.query)
    if rule.shares:
        factor, raised_by = "state_memory_ratio", _raises_states(outline)
    elif outline.options.values.unified_memory and given.max_state_slots is None:
        factor, raised_by = "unified memory, where no other space takes it", (LARGER_BUDGET,)
    elif given.max_state_slots is not None:
        factor, raised_by = "max_state_slots", ("max_state_slots",)
    else:
        factor, raised_by = f"requests · {each}", ("max_running_requests",)
    return Limit(
        name="state_slots",
        requested=given.max_state_slots,
        effective=solution.sizes[STATE],
        factor=factor,
        raised_by=raised_by,
    )


def _arrival_limit(outline: Outline) -> Limit:
    """Return the rows of requests whose KV is still arriving at a decode worker."""
    rows, asked = decode_extra_rows(outline.request_pool.query), outline.options.values.decode_extra_slots
    twice = f"2 · max_running_requests, up to {DECODE_REQUESTS_WITH_EXTRA} requests"
    factor = "decode_extra_slots" if asked is not None else twice
    return Limit(
        name="arriving_requests",
        requested=asked,
        effective=rows,
        factor=factor,
        raised_by=("decode_extra_slots",),
    )
