"""The space of per-request states: how many slots it has."""

from __future__ import annotations

from kvdock.demand import MAX_REQUESTS, decode_extra_rows, state_slots_per_request
from kvdock.errors import PlanError
from kvdock.layout import MAX_SLOTS, REQUESTS, STATE, Share, SizeRule, Space
from kvdock.options import exact_ratio
from kvdock.queries import Query, StateQuery

KIND = "state"
"""Kind of a layer that keeps a state per request."""


def has_states(query: StateQuery) -> bool:
    """Return whether the model, on whatever rank, has layers that keep states."""
    return any(group.space == STATE for group in query.all_groups)


def rule_is_fixed(query: StateQuery) -> bool:
    """Return whether the slots do not follow the requests, so that the requests have to follow them."""
    return has_states(query) and not _follows_requests(query)


def _follows_requests(query: Query) -> bool:
    options = query.options
    return (
        options.max_state_slots is None and options.max_running_requests is not None and options.state_sizing != "ratio"
    )


def state_space(query: StateQuery) -> Space:
    """Return the space of states: the slots that the user gives, else those of the requests, else a share of the budget.

    Raises:
        PlanError: the user's slots do not hold one request's, or drafts are taken without saying how many.
    """
    _check_drafts(query)
    each = state_slots_per_request(query)
    options = ["max_state_slots", "state_extra_buffer", "state_sizing"]
    if query.options.max_state_slots is not None:
        rule = SizeRule(fixed=_slots_per_worker(query, each), needs=each)
    elif _follows_requests(query):
        rule = SizeRule(per_request=(each, 1), fixed=each * decode_extra_rows(query), needs=each)
        options.append("max_running_requests")
    else:
        numerator, denominator = exact_ratio(query.options.state_memory_ratio or 1)
        owned = any(group.space == STATE for group in query.groups)
        rule = SizeRule(
            fixed=MAX_SLOTS - 1 if owned else MAX_REQUESTS * each,
            shares=(
                Share(
                    of_budget=(numerator, numerator + denominator),
                    counts="kv",
                    beside=((REQUESTS, (1, each)),),  # draft snapshots of the requests that the slots serve
                ),
            ),
            needs=each,
        )
        options.append("state_memory_ratio")
    return Space(name=STATE, rule=rule, issued_by="request_pool", options=tuple(options))


def _check_drafts(query: Query) -> None:
    """Refuse speculation that does not say how many draft tokens need a snapshot of the state."""
    options = query.options
    told = (options.speculative_num_draft_tokens, options.speculative_num_steps)
    if options.speculative_algorithm is not None and told == (None, None):
        raise PlanError(
            f"speculative_algorithm={options.speculative_algorithm!r} keeps a snapshot of the states for each draft token; "
            "give speculative_num_draft_tokens or speculative_num_steps"
        )


def _slots_per_worker(query: Query, each: int) -> int:
    asked, workers = query.options.max_state_slots or 0, query.parallel.attn_dp_size
    if asked // workers < each:
        raise PlanError(
            f"max_state_slots={asked} leaves {asked // workers} for a worker, but a request may hold {each}; "
            f"give at least {workers * each}"
        )
    return asked // workers
