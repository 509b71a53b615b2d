"""Questions that people ask a planner, answered with data: does it fit, and how long may requests be; and what raises that.

Every number in an answer comes from a plan that was really made; what an answer suggests serves when it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from kvdock.costs import kv_bytes_held
from kvdock.edge import Model
from kvdock.errors import KVDockError
from kvdock.explain import window_policy
from kvdock.layout import REQUESTS, STATE
from kvdock.planner import CachePlan
from kvdock.remedies import (
    SHARED_BUFFER,
    Remedy,
    SpaceNeed,
    again,
    beyond_device,
    cheapest_budget,
    check_count,
    context_of,
    held_slots,
    most_served,
    needs_of,
    obstacles,
    per_worker,
    raised_limits,
    remedies_of,
)


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag_field="question", tag="serves"):
    """Whether a plan serves `requests` requests of `length` tokens at once, and what would if not.

    `requests` are shared out evenly over the `workers` of the deployment; spaces and bytes are those of one worker's
    rank. `most_requests` (of this length, all workers together) and `longest` (for this many) are what the plan does
    serve; `budget_bytes` is the smallest budget that would, ``None`` where no budget does, with `budget_change` beside
    it, and `budget_note` where it is more than the plan's device has for the cache. `kv_bytes` are on the device,
    `host_kv_bytes` beside them in host memory. `reasons` say what is in the way.
    """

    fits: bool
    requests: int
    length: int
    workers: int
    requests_per_worker: int
    context_length: int
    spaces: tuple[SpaceNeed, ...]
    kv_bytes: int
    host_kv_bytes: int
    most_requests: int
    longest: int
    budget_bytes: int | None
    budget_change: dict[str, Any]
    budget_note: str
    plan_budget_bytes: int
    windows: str
    reasons: tuple[str, ...]
    remedies: tuple[Remedy, ...]


class Longest(msgspec.Struct, frozen=True, kw_only=True, tag_field="question", tag="longest"):
    """The longest length in tokens that `requests` requests can have at once (0: none), and what stops it there.

    `bound` is ``context_length``, the space that has no slot for one token more, or ``the shared buffer`` of all, and
    `limit` the limit of the plan that it makes: ``request_tokens``, ``tokens``, ``requests``, ``state_slots`` or another
    space's name. `spaces` are taken at this length, `kv_bytes` on the device and `host_kv_bytes` in host memory.
    `remedies` serve a longer length, or the next one for fewer requests.
    """

    requests: int
    workers: int
    requests_per_worker: int
    length: int
    context_length: int
    bound: str
    limit: str
    spaces: tuple[SpaceNeed, ...]
    kv_bytes: int
    host_kv_bytes: int
    windows: str
    remedies: tuple[Remedy, ...]


def serves(plan: CachePlan, requests: int, length: int, *, model: Model | None = None) -> Answer:
    """Return whether `requests` requests of `length` tokens are served at once, and if not, what would serve them.

    Where the weights were counted in a model folder, `model` names it again: they are then counted anew for other
    ranks, else scaled by the ratio.

    Raises:
        PlanError: `plan` is none, a number is no count, or the weights in the folder cannot be counted any more.
    """
    each = per_worker(plan, requests)
    check_count("length", length)
    reasons = obstacles(plan, each, length)
    change = raised_limits(plan, each, length) if reasons else {}
    budget, beside = cheapest_budget(plan, each, length, change)
    remedies = remedies_of(plan, requests, length, budget, change, beside, model) if reasons else ()
    return Answer(
        fits=not reasons,
        requests=requests,
        length=length,
        workers=plan.parallel.dp_size,
        requests_per_worker=each,
        context_length=context_of(plan),
        spaces=needs_of(plan, each, length),
        kv_bytes=plan.bytes_for(length, each),
        host_kv_bytes=_host_kv_bytes(plan, each, length),
        most_requests=most_served(plan, length),
        longest=plan.max_length(each),
        budget_bytes=budget,
        budget_change=beside,
        budget_note=beyond_device(plan, budget),
        plan_budget_bytes=plan.budget_bytes,
        windows=window_policy(plan),
        reasons=reasons,
        remedies=tuple(remedies),
    )


def longest(plan: CachePlan, requests: int = 1, *, model: Model | None = None) -> Longest:
    """Return the longest length that `requests` requests can have at once, what stops it there, and what raises it.

    `model` as in `serves`.

    Raises:
        PlanError: `plan` is none, `requests` is no count, or the weights in the folder cannot be counted any more.
    """
    each = per_worker(plan, requests)
    length = plan.max_length(each)
    bound = _bound(plan, each, length)
    return Longest(
        requests=requests,
        workers=plan.parallel.dp_size,
        requests_per_worker=each,
        length=length,
        context_length=context_of(plan),
        bound=", ".join(bound),
        limit=_limit_of(plan, bound),
        spaces=needs_of(plan, each, length),
        kv_bytes=plan.bytes_for(length, each),
        host_kv_bytes=_host_kv_bytes(plan, each, length),
        windows=window_policy(plan),
        remedies=tuple(_longer(plan, requests, length, model)),
    )


CONTEXT = "context_length"


def _bound(plan: CachePlan, each: int, length: int) -> tuple[str, ...]:
    if length == context_of(plan):
        return (CONTEXT,)
    lacking = tuple(need.name for need in needs_of(plan, each, length + 1) if need.lacking)
    return lacking or (SHARED_BUFFER,)


def _limit_of(plan: CachePlan, bound: tuple[str, ...]) -> str:
    """Return the limit of a plan that what stops a length belongs to; the first of several."""
    names = {CONTEXT: "request_tokens", SHARED_BUFFER: "tokens", REQUESTS: "requests", STATE: "state_slots"}
    spaces = plan.outline.spaces
    found = [
        names.get(name) or ("tokens" if spaces[name].issued_by == "allocator" else name)
        for name in (*filter(names.__contains__, bound), *bound)
    ]
    return found[0] if found else ""


def _longer(plan: CachePlan, requests: int, length: int, model: Model | None) -> Iterator[Remedy]:
    """Yield what serves a longer length than the longest: the model's own context as far as it goes, else a token more."""
    each, most = per_worker(plan, requests), plan.model.context_length
    if context_of(plan) <= length < most:
        with contextlib.suppress(KVDockError):  # a shorter one may do
            length = max(length, again(plan, {CONTEXT: most}).max_length(each) - 1)
    change = raised_limits(plan, each, length + 1)
    budget, beside = cheapest_budget(plan, each, length + 1, change)
    remedies = remedies_of(plan, requests, length + 1, budget, change, beside, model)
    return (remedy for remedy in remedies if "length" not in remedy.change)


def _host_kv_bytes(plan: CachePlan, each: int, length: int) -> int:
    outline = plan.outline
    return kv_bytes_held(outline.buffers, outline.spaces, held_slots(plan, each, length), ("host", "pinned"))
