"""What would serve requests that a plan does not serve, each tried with a plan of its own, and how that is found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from kvdock.budget import show_bytes
from kvdock.checked import show
from kvdock.costs import slots_held
from kvdock.device import GIVEN_BUDGET
from kvdock.edge import Model
from kvdock.errors import KVDockError, PlanError
from kvdock.layout import FULL, MAX_SLOTS, STATE, SWA, round_up
from kvdock.least import MOST_BYTES, least_budget
from kvdock.levers import NARROWER, request_divisions, token_divisions
from kvdock.options import Parallelism
from kvdock.planner import CachePlan, plan_from
from kvdock.sizing import token_factors
from kvdock.weights import weights_of

MOST_RANKS = 64
MOST_FRACTIONS = 20
"""Thousandths that are tried for mem_fraction_static from the least that leaves the smallest budget."""


class SpaceNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of one space: what the requests hold, in whole pages, what is there, and how many are lacking."""

    name: str
    needed: int
    there: int
    lacking: int


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """Something to change, and what it serves: `requests` of `length` tokens, tried with a plan of its own.

    `change` holds options, parallel sizes, `budget_bytes`, `weights_bytes`, or fewer `requests` or a shorter `length`.
    """

    change: dict[str, Any]
    requests: int
    length: int
    note: str = ""


def per_worker(plan: Any, requests: Any) -> int:
    """Return the requests of each worker: all of them, shared out evenly."""
    if not isinstance(plan, CachePlan):
        raise PlanError(f"{type(plan).__name__} is no plan; give what kvdock.plan returned")
    check_count("requests", requests)
    return -(-int(requests) // plan.parallel.dp_size)


def check_count(name: str, value: Any) -> None:
    """Refuse what is no count of requests or tokens.

    Raises:
        PlanError: names the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SLOTS:
        raise PlanError(f"{name}={show(value)} is no count; give a whole number from 1 to {MAX_SLOTS}")


def context_of(plan: CachePlan) -> int:
    """Return the tokens that a request of a plan may have at most, by the option or the model."""
    return plan.options.values.context_length or plan.model.context_length


def _is_reachable(plan: CachePlan, length: int) -> bool:
    """Return whether a context of this length can be asked for."""
    return length <= max(context_of(plan), plan.model.context_length) or bool(plan.options.values.allow_longer_context)


def held_slots(plan: CachePlan, each: int, length: int) -> dict[str, int]:
    """Return the slots of each space that `each` requests of `length` tokens hold on one worker."""
    return slots_held(plan.outline.spaces, length, each, plan.parallel.dcp_size)


def needs_of(plan: CachePlan, each: int, length: int) -> tuple[SpaceNeed, ...]:
    """Return the same beside what is there and what is lacking."""
    held = held_slots(plan, each, length)
    return tuple(
        SpaceNeed(name=name, needed=held[name], there=there, lacking=max(0, held[name] - there))
        for name, there in plan.spaces.items()
    )


def obstacles(plan: CachePlan, requests: int, length: int) -> tuple[str, ...]:
    """Return a sentence for each thing in the way of `requests` requests of `length` tokens on one worker."""
    found = []
    if length > context_of(plan):
        found.append(f"length={length:,} is more than context_length={context_of(plan):,}")
    lacking = [need for need in needs_of(plan, requests, length) if need.lacking]
    found += [
        f"space {need.name}: {need.needed:,} slots are needed, {need.there:,} are there, {need.lacking:,} are lacking"
        for need in lacking
    ]
    shared = None if lacking else plan.outline.shared_lack(held_slots(plan, requests, length), plan.spaces)
    if shared is not None:
        needed, there = shared
        found.append(f"{SHARED_BUFFER}: pages of {needed:,} bytes are needed at once, {there:,} bytes are there")
    return tuple(found)


SHARED_BUFFER = "the shared buffer"
"""What spaces of unified memory have together: each alone may have room where all of them have not."""


def most_served(plan: CachePlan, length: int) -> int:
    """Return the most requests of `length` tokens that a plan serves at once, over all workers."""
    return plan.concurrency(length) * plan.parallel.dp_size if length <= context_of(plan) else 0


def raised_limits(plan: CachePlan, each: int, length: int) -> dict[str, Any]:
    """Return the limits of the user's, and an automatic one on requests, that no memory gets round, with new values."""
    given, needs = plan.outline.given, {need.name: need for need in needs_of(plan, each, length)}
    change: dict[str, Any] = {}
    if length > context_of(plan):
        change["context_length"] = length
    if needs["requests"].lacking:
        change["max_running_requests"] = each * plan.parallel.attn_dp_size
    if given.max_state_slots is not None and STATE in needs and needs[STATE].lacking:
        change["max_state_slots"] = needs[STATE].needed * plan.parallel.attn_dp_size
    tokens = _tokens_lacking(plan, needs)
    if given.max_total_tokens is not None and tokens:
        change["max_total_tokens"] = tokens
    return change


def _tokens_lacking(plan: CachePlan, needs: Mapping[str, SpaceNeed]) -> int:
    """Return the tokens to plan for so that each space that follows them has enough slots; 0 where none lacks any."""
    factors, page = token_factors(plan.outline.spaces), plan.options.values.page_size or 1
    follow = [needs[name] for name, space in plan.outline.spaces.items() if space.issued_by == "allocator"]
    if not any(need.lacking for need in follow):
        return 0
    tokens = [-int(-need.needed / factors[need.name] // 1) for need in follow if factors[need.name]]
    return round_up(max(tokens, default=0), page)


def again(
    plan: CachePlan, change: Mapping[str, Any], parallel: Parallelism | None = None, weights_bytes: int | None = None
) -> CachePlan:
    """Return a plan of the same inputs with options changed, or other parallel sizes and weights.

    Raises:
        KVDockError: what cannot be served then.
    """
    outline, asked = plan.outline, plan.asked_budget
    is_given = asked.base == "given"
    return plan_from(
        outline.models,
        outline.device,
        msgspec.structs.replace(outline.given, **change),
        parallel or plan.parallel,
        outline.registry,
        budget_bytes=asked.nbytes if is_given else None,
        weights_bytes=None if is_given else (asked.weights_bytes if weights_bytes is None else weights_bytes) or None,
        weights_source=asked.weights_source,
        reserve_bytes=asked.reserve_bytes or None,
        cap_tokens=plan.cap_tokens,
        suggests=False,
    )


def cheapest_budget(
    plan: CachePlan, each: int, length: int, change: dict[str, Any]
) -> tuple[int | None, dict[str, Any]]:
    """Return the smallest budget that serves with `change`, or ``None``; and the changes that go with it.

    No smaller one does. Where an automatic limit on requests ends below what is asked for, that limit is fixed.
    """
    fixed = {**change, "max_running_requests": each * plan.parallel.attn_dp_size}
    for beside in (change,) if change == fixed else (change, fixed):
        found = _search(plan, each, length, beside)
        if found is not None:
            return found, beside
    return None, {}


def _search(plan: CachePlan, each: int, length: int, change: dict[str, Any]) -> int | None:
    if not _is_reachable(plan, length):
        return None
    try:
        ample = _ample(plan, change)
    except KVDockError:
        return None
    return None if length > context_of(ample) else least_budget(ample, held_slots(ample, each, length), plan.cap_tokens)


def _ample(plan: CachePlan, change: dict[str, Any]) -> CachePlan:
    """Return the plan for a device with the most memory that is tried, so that a budget is all that limits it."""
    outline = plan.outline
    room = msgspec.structs.replace(outline.device, free_bytes=MOST_BYTES, free_before_load_bytes=MOST_BYTES)
    options = msgspec.structs.replace(outline.given, **{**change, "mem_fraction_static": None})
    return plan_from(
        outline.models, room, options, plan.parallel, outline.registry, budget_bytes=MOST_BYTES, suggests=False
    )


def remedies_of(
    plan: CachePlan,
    requests: int,
    length: int,
    budget: int | None,
    change: dict[str, Any],
    beside: dict[str, Any],
    model: Model | None,
) -> Iterator[Remedy]:
    """Yield what serves the requests, cheapest first, then what of them is served as it is."""
    each = per_worker(plan, requests)
    raised = _tried(plan, each, length, change) if change else None
    if raised is not None:
        yield Remedy(change=change, requests=requests, length=length)
    else:
        yield from _other_split(plan, requests, length, change)
        if budget is not None:
            yield from _with_more_memory(plan, requests, length, budget, beside)
    fewer = most_served(plan, length)
    if fewer:
        yield Remedy(change={"requests": min(fewer, requests)}, requests=min(fewer, requests), length=length)
    shorter = plan.max_length(each)
    if shorter:
        yield Remedy(change={"length": min(shorter, length)}, requests=requests, length=min(shorter, length))
    if raised is None and _is_reachable(plan, length):
        yield from _narrower(plan, requests, length, change)
        yield from _other_division(plan, requests, length, change, model)
        yield from _more_ranks(plan, requests, length, change, model)


def _other_split(plan: CachePlan, requests: int, length: int, change: dict[str, Any]) -> Iterator[Remedy]:
    """Yield another division of the same memory between the spaces that serves, where a ratio divides it."""
    each = per_worker(plan, requests)
    needed = {need.name: need.needed for need in needs_of(plan, each, length)}
    spaces = plan.outline.spaces
    changes: list[dict[str, Any]] = []
    if STATE in spaces and spaces[STATE].rule.shares:
        changes.append({"max_running_requests": each * plan.parallel.attn_dp_size})
    if SWA in spaces and "swa_full_tokens_ratio" in spaces[SWA].options and needed.get(FULL):
        ratio = Fraction(max(needed[SWA], spaces[SWA].rule.needs), needed[FULL])
        changes.append({"swa_full_tokens_ratio": float(Fraction(-int(-ratio * 1000 // 1), 1000))})
    for split in changes:
        if _tried(plan, each, length, {**change, **split}) is not None:
            yield Remedy(change={**change, **split}, requests=requests, length=length, note="the same memory")


def _with_more_memory(
    plan: CachePlan, requests: int, length: int, budget: int, beside: dict[str, Any]
) -> Iterator[Remedy]:
    """Yield the smallest share of the device that serves, where one does, and the smallest budget if it has that."""
    each = per_worker(plan, requests)
    for fraction in _fractions(plan, budget):
        change = {"mem_fraction_static": fraction, **beside}
        if _tried(plan, each, length, change) is not None:
            yield Remedy(change=change, requests=requests, length=length)
            break
    if beyond_device(plan, budget):
        return
    is_given = plan.budget.base == "given"
    note = "" if is_given else f"given outright, not as a share of {plan.device.name}"
    yield Remedy(change={"budget_bytes": budget, **beside}, requests=requests, length=length, note=note)


def beyond_device(plan: CachePlan, budget: int | None) -> str:
    """Return that a budget is more than the plan's device has for the cache, and how much that is; else nothing."""
    device, is_given = plan.device, plan.budget.base == "given"
    free = max(0, device.free_bytes if is_given else plan.budget.free_bytes)
    if budget is None or budget <= free or device.source == GIVEN_BUDGET:
        return ""
    beside = "free" if is_given else "free beside weights and reserve"
    return f"more memory than {device.name} has, where {show_bytes(free)} are {beside}"


def _fractions(plan: CachePlan, budget: int) -> Iterator[float]:
    """Yield the smallest mem_fraction_static, in thousandths, that leaves `budget` bytes, and a few above it.

    More memory may serve less where a space takes a share of it, so the first need not be the one that serves.
    """
    spare = plan.budget.free_bytes + plan.budget.least_slack_bytes - budget
    if plan.budget.base == "given" or spare < plan.budget.least_slack_bytes:
        return
    share = 1 - Fraction(spare, plan.device.free_before_load_bytes)
    least = max(1, -int(-share * 1000 // 1))
    for thousandths in range(least, min(1000, least + MOST_FRACTIONS) + 1):
        yield float(Fraction(thousandths, 1000))


def _tried(plan: CachePlan, each: int, length: int, change: dict[str, Any], *other: Any) -> CachePlan | None:
    """Return the plan with these changes if it can be made and serves."""
    try:
        made = again(plan, change, *other)
    except KVDockError:
        return None
    return None if obstacles(made, each, length) else made


def _narrower(plan: CachePlan, requests: int, length: int, change: dict[str, Any]) -> Iterator[Remedy]:
    """Yield the widest kv_cache_dtype that is narrower than the plan's and serves."""
    for dtype in NARROWER:
        narrow = {"kv_cache_dtype": dtype, **change}
        made = _tried(plan, per_worker(plan, requests), length, narrow)
        if made is not None and made.bytes_per_token.kv < plan.bytes_per_token.kv:
            yield Remedy(change=narrow, requests=requests, length=length)
            return


def _other_division(
    plan: CachePlan, requests: int, length: int, change: dict[str, Any], model: Model | None
) -> Iterator[Remedy]:
    """Yield the fewest ranks that have to share tokens, and the fewest workers to share requests, on the same ranks."""
    for divided in (token_divisions(plan.parallel), request_divisions(plan.parallel)):
        for sizes in divided:
            parallel = msgspec.structs.replace(plan.parallel, dcp_rank=0, **sizes)
            each = -(-requests // parallel.dp_size)
            if "max_running_requests" in change:
                change = {**change, "max_running_requests": each * parallel.attn_dp_size}
            weights, note = _weights_divided(plan, parallel, model)
            if weights is not None and _tried(plan, each, length, change, parallel, weights) is not None:
                yield Remedy(change={**sizes, **change}, requests=requests, length=length, note=note)
                break


def _weights_divided(plan: CachePlan, parallel: Parallelism, model: Model | None) -> tuple[int | None, str]:
    """Return what the weights take where the same ranks divide their work otherwise, and how that is known.

    ``None``: each worker keeps more of attention's weights, and nobody can say how much that is.
    """
    asked, device = plan.asked_budget, plan.device
    if parallel.attn_tp_size == plan.parallel.attn_tp_size or asked.base == "given":
        return asked.weights_bytes, ""
    found = weights_of(model, plan.model, plan.outline.given, parallel) if asked.weights_source else None
    if found is not None:
        return found.nbytes, COUNTED
    loaded = asked.weights_bytes or device.free_bytes < device.free_before_load_bytes
    return (None if loaded else 0), ""


def _more_ranks(
    plan: CachePlan, requests: int, length: int, change: dict[str, Any], model: Model | None
) -> Iterator[Remedy]:
    """Yield the fewest ranks, doubling tp_size, that serve; weights shrink with the ranks."""
    tp_size = plan.parallel.tp_size * 2
    while tp_size <= MOST_RANKS:
        try:
            parallel = msgspec.structs.replace(plan.parallel, tp_size=tp_size)
        except PlanError:
            return
        weights, note = _weights_at(plan, parallel, model)
        if _tried(plan, per_worker(plan, requests), length, change, parallel, weights) is not None:
            stated = {"weights_bytes": weights} if note == SCALED else {}
            yield Remedy(change={"tp_size": tp_size, **stated, **change}, requests=requests, length=length, note=note)
            return
        tp_size *= 2


SCALED = "the weights of a rank scaled by the ratio"
COUNTED = "the weights of a rank counted anew from the headers"


def _weights_at(plan: CachePlan, parallel: Parallelism, model: Model | None) -> tuple[int, str]:
    """Return what the weights take at other parallel sizes, and how that is known."""
    asked = plan.asked_budget
    if not asked.weights_bytes:
        return 0, ""
    found = weights_of(model, plan.model, plan.outline.given, parallel) if asked.weights_source else None
    if found is not None:
        return found.nbytes, COUNTED
    return -(-asked.weights_bytes * plan.parallel.tp_size // parallel.tp_size), SCALED
