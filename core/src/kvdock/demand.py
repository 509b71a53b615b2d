"""What requests ask for beside their tokens: rows, columns for drafts, state slots."""

from __future__ import annotations

from kvdock.errors import PlanError
from kvdock.layout import round_up
from kvdock.queries import Query

MIN_REQUESTS, MAX_REQUESTS = 2048, 4096
"""Where the automatic request limit ends, memory permitting."""
EXTRA_COLUMNS = 4
DECODE_REQUESTS_WITH_EXTRA = 32
"""Up to this many requests a decode worker takes twice as many that still arrive."""


def page_size_of(query: Query) -> int:
    """Return the tokens a page of the spaces in which tokens are numbered."""
    return query.options.page_size or 1


def requests_per_worker(query: Query) -> int | None:
    """Return the user's request limit of one worker: divided over the workers under DP attention; or ``None``.

    Raises:
        PlanError: the division leaves none; names both numbers.
    """
    asked, workers = query.options.max_running_requests, query.parallel.attn_dp_size
    if asked is None:
        return None
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


def state_slots_per_request(query: Query) -> int:
    """Return the state slots that a request may hold: its own, with a prefix cache two that it leaves there, and tracks.

    Raises:
        PlanError: lazy tracking without an overlapping schedule.
    """
    options = query.options
    if options.state_extra_buffer == "lazy" and options.overlap_schedule is False:
        raise PlanError(
            "state_extra_buffer='lazy' takes its second slot between overlapping steps, but overlap_schedule is "
            "false; give state_extra_buffer='on', or overlap_schedule=true"
        )
    return states_in_use(query) + (0 if options.prefix_cache is False else 2)


def states_in_use(query: Query) -> int:
    """Return the state slots that a request has from its admission on: its own and its tracks."""
    return 1 + track_slots(query)


def track_slots(query: Query) -> int:
    """Return the slots in which a request's state is tracked in turn: 2 with overlap, 1 without or at first in lazy mode."""
    options = query.options
    if options.prefix_cache is False or options.state_extra_buffer in (None, "off"):
        return 0
    return 2 if options.state_extra_buffer == "on" and options.overlap_schedule is not False else 1


def device_buffer_size(query: Query) -> int:
    """Return the device slots from which a request's steps read: the option, else twice what one step reads.

    Raises:
        PlanError: fewer than one step reads; names both options.
    """
    options = query.options
    top_k = options.hisparse_top_k or 1
    size = options.hisparse_device_buffer_size or 2 * top_k
    if size < top_k:
        raise PlanError(
            f"hisparse_device_buffer_size={size} is less than hisparse_top_k={top_k}, what one step reads; "
            f"give at least {top_k}, or a smaller hisparse_top_k"
        )
    return size


def device_slots_per_request(query: Query) -> int:
    """Return the device slots that a running request takes at most: its buffer and a page for its newest tokens."""
    page = page_size_of(query)
    longest = min(device_buffer_size(query), query.context_length)
    return round_up(longest, page) + page
