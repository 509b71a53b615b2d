"""Limits as data: what was asked for, what holds, which factor binds, and what would raise it."""

from __future__ import annotations

import msgspec

from kvdock.layout import DEVICE, REQUESTS, STATE
from kvdock.outline import Outline
from kvdock.sizing import Solution

LARGER_BUDGET = "a larger budget"


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit; `requested` is ``None`` where nothing was asked for."""

    name: str
    requested: int | None
    effective: int
    factor: str
    raised_by: str


def find_limits(outline: Outline, solution: Solution, tokens: int) -> tuple[Limit, Limit, Limit]:
    """Return the limits on tokens, on requests, and on the tokens of one request."""
    return (
        _token_limit(outline, solution, tokens),
        _request_limit(outline, solution),
        _length_limit(outline, tokens),
    )


def limit_warnings(limits: tuple[Limit, Limit, Limit]) -> list[str]:
    """Return a sentence for each limit that is lower than what was asked for."""
    tokens, _, length = limits
    found = []
    if tokens.requested is not None and tokens.factor != "max_total_tokens":
        found.append(
            f"max_total_tokens={tokens.requested} is more than the {tokens.effective} tokens that fit "
            f"({tokens.factor} binds)"
        )
    if length.factor == "tokens":
        found.append(
            f"a request can have {length.effective} tokens at most, fewer than context_length={length.requested}; "
            "a larger budget, a narrower kv_cache_dtype or more ranks raise it"
        )
    return found


def _token_limit(outline: Outline, solution: Solution, tokens: int) -> Limit:
    return Limit(
        name="tokens",
        requested=outline.given.max_total_tokens,
        effective=tokens,
        factor=solution.bound,
        raised_by="max_total_tokens" if solution.bound == "max_total_tokens" else LARGER_BUDGET,
    )


def _request_limit(outline: Outline, solution: Solution) -> Limit:
    requests, rule = solution.sizes[REQUESTS], outline.spaces[REQUESTS].rule
    asked = outline.given.max_running_requests
    states, buffers = (dict(rule.at_most_of).get(space) for space in (STATE, DEVICE))
    if states is not None and requests == solution.sizes[STATE] * states[0] // states[1]:
        factor, raised_by = f"state slots // {states[1]}", _state_options(outline)
    elif requests * 2 + 1 >= solution.tokens:
        factor, raised_by = "tokens // 2", LARGER_BUDGET
    elif asked is not None:
        factor, raised_by = "max_running_requests", "max_running_requests"
    elif buffers is not None and requests == solution.sizes[DEVICE] * buffers[0] // buffers[1]:
        factor, raised_by = (
            f"device slots // {buffers[1]}",
            f"a smaller hisparse_device_buffer_size, or {LARGER_BUDGET}",
        )
    elif requests < rule.at_least:
        factor, raised_by = (
            "request_table_share",
            "request_table_share, max_running_requests, or a shorter context_length",
        )
    else:
        factor, raised_by = "tokens · 512 / context_length, from 2048 to 4096", "max_running_requests"
    return Limit(name="requests", requested=asked, effective=requests, factor=factor, raised_by=raised_by)


def _state_options(outline: Outline) -> str:
    if outline.given.max_state_slots is not None:
        return "max_state_slots"
    return "max_running_requests (states then follow it), state_memory_ratio, or a larger budget"


def _length_limit(outline: Outline, tokens: int) -> Limit:
    context = outline.options.values.context_length or outline.model.context_length
    fits = context <= tokens
    return Limit(
        name="request_tokens",
        requested=context,
        effective=min(context, tokens),
        factor="context_length" if fits else "tokens",
        raised_by="context_length" if fits else LARGER_BUDGET,
    )
