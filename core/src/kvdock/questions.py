"""Questions that people ask a planner, answered with data: does it fit, what would, how many ranks, which choice.

Every number in an answer comes from a plan that was really made; what an answer suggests serves when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from kvdock.budget import show_bytes
from kvdock.checked import show
from kvdock.costs import slots_held
from kvdock.errors import KVDockError, PlanError
from kvdock.explain import window_policy
from kvdock.layout import FULL, MAX_SLOTS, STATE, SWA
from kvdock.options import Parallelism
from kvdock.planner import CachePlan, plan_from
from kvdock.sizing import smallest

MOST_BYTES = 2**50
"""Largest budget that is tried: a pebibyte."""
MOST_RANKS = 64
NARROWER = ("float8_e4m3fn", "nvfp4", "float4_e2m1fn_x2")
"""Values of kv_cache_dtype that are tried in place of a wider one, the widest first."""


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


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag_field="question", tag="serves"):
    """Whether a plan serves `requests` requests of `length` tokens at once, and what would if not.

    `requests` are shared out evenly over the `workers` of the deployment; spaces and bytes are those of one worker's
    rank. `most_requests` (of this length, all workers together) and `longest` (for this many) are what the plan does
    serve; `budget_bytes` is the smallest budget that would, ``None`` where no budget does, with `budget_change` beside
    it. `reasons` say what is in the way.
    """

    fits: bool
    requests: int
    length: int
    workers: int
    requests_per_worker: int
    context_length: int
    spaces: tuple[SpaceNeed, ...]
    kv_bytes: int
    most_requests: int
    longest: int
    budget_bytes: int | None
    budget_change: dict[str, Any]
    plan_budget_bytes: int
    windows: str
    reasons: tuple[str, ...]
    remedies: tuple[Remedy, ...]


class Longest(msgspec.Struct, frozen=True, kw_only=True, tag_field="question", tag="longest"):
    """The longest length in tokens that `requests` requests can have at once (0: none), and what stops it there.

    `bound` is ``context_length`` or the space that has no slot for one token more; `spaces` are taken at this length.
    """

    requests: int
    workers: int
    requests_per_worker: int
    length: int
    context_length: int
    bound: str
    spaces: tuple[SpaceNeed, ...]
    kv_bytes: int
    windows: str


def serves(plan: CachePlan, requests: int, length: int) -> Answer:
    """Return whether `requests` requests of `length` tokens are served at once, and if not, what would serve them.

    Raises:
        PlanError: `plan` is none, or a number is no count.
    """
    each = _per_worker(plan, requests)
    check_count("length", length)
    reasons = obstacles(plan, each, length)
    change = _raised_limits(plan, each, length) if reasons else {}
    budget, beside = _least_budget(plan, each, length, change)
    remedies = _remedies(plan, requests, length, budget, change, beside) if reasons else ()
    return Answer(
        fits=not reasons,
        requests=requests,
        length=length,
        workers=plan.parallel.dp_size,
        requests_per_worker=each,
        context_length=_context(plan),
        spaces=_needs(plan, each, length),
        kv_bytes=plan.bytes_for(length, each),
        most_requests=_most_requests(plan, length),
        longest=plan.max_length(each),
        budget_bytes=budget,
        budget_change=beside,
        plan_budget_bytes=plan.budget_bytes,
        windows=window_policy(plan),
        reasons=reasons,
        remedies=tuple(remedies),
    )


def longest(plan: CachePlan, requests: int = 1) -> Longest:
    """Return the longest length that `requests` requests can have at once, and what stops it there.

    Raises:
        PlanError: `plan` is none, or `requests` is no count.
    """
    each = _per_worker(plan, requests)
    length = plan.max_length(each)
    return Longest(
        requests=requests,
        workers=plan.parallel.dp_size,
        requests_per_worker=each,
        length=length,
        context_length=_context(plan),
        bound=_bound(plan, each, length),
        spaces=_needs(plan, each, length),
        kv_bytes=plan.bytes_for(length, each),
        windows=window_policy(plan),
    )


def _bound(plan: CachePlan, each: int, length: int) -> str:
    if length == _context(plan):
        return "context_length"
    lacking = [need.name for need in _needs(plan, each, length + 1) if need.lacking]
    return ", ".join(lacking)


def _per_worker(plan: Any, requests: Any) -> int:
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


def _context(plan: CachePlan) -> int:
    return plan.options.values.context_length or plan.model.context_length


def _is_reachable(plan: CachePlan, length: int) -> bool:
    """Return whether a context of this length can be asked for."""
    return length <= max(_context(plan), plan.model.context_length) or bool(plan.options.values.allow_longer_context)


def _needs(plan: CachePlan, each: int, length: int) -> tuple[SpaceNeed, ...]:
    held = slots_held(plan.outline.spaces, length, each, plan.parallel.dcp_size)
    return tuple(
        SpaceNeed(name=name, needed=held[name], there=there, lacking=max(0, held[name] - there))
        for name, there in plan.spaces.items()
    )


def obstacles(plan: CachePlan, requests: int, length: int) -> tuple[str, ...]:
    """Return a sentence for each thing in the way of `requests` requests of `length` tokens on one worker."""
    found = []
    if length > _context(plan):
        found.append(f"length={length:,} is more than context_length={_context(plan):,}")
    return (
        *found,
        *(
            f"space {need.name}: {need.needed:,} slots are needed, {need.there:,} are there, {need.lacking:,} are lacking"
            for need in _needs(plan, requests, length)
            if need.lacking
        ),
    )


def _most_requests(plan: CachePlan, length: int) -> int:
    return plan.concurrency(length) * plan.parallel.dp_size if length <= _context(plan) else 0


def _raised_limits(plan: CachePlan, each: int, length: int) -> dict[str, Any]:
    """Return the limits of the user's, and an automatic one on requests, that no memory gets round, with new values."""
    given, needs = plan.outline.given, {need.name: need for need in _needs(plan, each, length)}
    change: dict[str, Any] = {}
    if length > _context(plan):
        change["context_length"] = length
    if needs["requests"].lacking:
        change["max_running_requests"] = each * plan.parallel.attn_dp_size
    if given.max_state_slots is not None and STATE in needs and needs[STATE].lacking:
        change["max_state_slots"] = needs[STATE].needed * plan.parallel.attn_dp_size
    tokens = needs.get(plan.outline.numbering or "")
    if given.max_total_tokens is not None and tokens is not None and tokens.lacking:
        change["max_total_tokens"] = tokens.needed
    return change


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
    )


def _least_budget(plan: CachePlan, each: int, length: int, change: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Return the smallest budget that serves with `change`, or ``None``; and the changes that go with it.

    At a byte less it does not. Where an automatic limit on requests keeps growing with the budget, that limit is fixed.
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

    def holds(budget_bytes: int) -> bool:
        try:
            return not obstacles(ample.replan(budget_bytes, plan.cap_tokens), each, length)
        except KVDockError:
            return False

    return smallest(holds, 1, MOST_BYTES)


def _ample(plan: CachePlan, change: dict[str, Any]) -> CachePlan:
    """Return the plan for a device with the most memory that is tried, so that a budget is all that limits it."""
    outline = plan.outline
    room = msgspec.structs.replace(outline.device, free_bytes=MOST_BYTES, free_before_load_bytes=MOST_BYTES)
    options = msgspec.structs.replace(outline.given, **{**change, "mem_fraction_static": None})
    return plan_from(outline.models, room, options, plan.parallel, outline.registry, budget_bytes=MOST_BYTES)


def _remedies(
    plan: CachePlan, requests: int, length: int, budget: int | None, change: dict[str, Any], beside: dict[str, Any]
) -> Iterator[Remedy]:
    """Yield what serves the requests, cheapest first, then what of them is served as it is."""
    each = _per_worker(plan, requests)
    raised = _tried(plan, each, length, change) if change else None
    if raised is not None:
        yield Remedy(change=change, requests=requests, length=length)
    else:
        yield from _other_split(plan, requests, length, change)
        if budget is not None:
            yield from _with_more_memory(plan, requests, length, budget, beside)
    fewer = _most_requests(plan, length)
    if fewer:
        yield Remedy(change={"requests": min(fewer, requests)}, requests=min(fewer, requests), length=length)
    shorter = plan.max_length(each)
    if shorter:
        yield Remedy(change={"length": min(shorter, length)}, requests=requests, length=min(shorter, length))
    if raised is None and _is_reachable(plan, length):
        yield from _narrower(plan, requests, length, change)
        yield from _more_ranks(plan, requests, length, change)


def _other_split(plan: CachePlan, requests: int, length: int, change: dict[str, Any]) -> Iterator[Remedy]:
    """Yield another division of the same memory between the spaces that serves, where a ratio divides it."""
    each = _per_worker(plan, requests)
    needed = {need.name: need.needed for need in _needs(plan, each, length)}
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
    """Yield the smallest share of the device that serves, where one does, and the smallest budget."""
    fraction = _least_fraction(plan, budget)
    if fraction is not None:
        change = {"mem_fraction_static": fraction, **beside}
        if _tried(plan, _per_worker(plan, requests), length, change) is not None:
            yield Remedy(change=change, requests=requests, length=length)
    change = {"budget_bytes": budget, **beside}
    yield Remedy(change=change, requests=requests, length=length, note=_budget_note(plan, budget))


def _budget_note(plan: CachePlan, budget: int) -> str:
    """Return what a budget stands in place of, and whether the device has that much."""
    if plan.budget.base == "given":
        return ""
    free = max(0, plan.budget.free_bytes)
    note = f"given outright, not as a share of {plan.device.name}"
    return note if budget <= free else f"{note}, which has {show_bytes(free)} for it"


def _least_fraction(plan: CachePlan, budget: int) -> float | None:
    """Return the smallest mem_fraction_static, in thousandths, that leaves `budget` bytes; ``None`` where none does."""
    spare = plan.budget.free_bytes + plan.budget.least_slack_bytes - budget
    if plan.budget.base == "given" or spare < plan.budget.least_slack_bytes:
        return None
    share = 1 - Fraction(spare, plan.device.free_before_load_bytes)
    return float(Fraction(max(1, -int(-share * 1000 // 1)), 1000))


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
        made = _tried(plan, _per_worker(plan, requests), length, narrow)
        if made is not None and made.bytes_per_token.kv < plan.bytes_per_token.kv:
            yield Remedy(change=narrow, requests=requests, length=length)
            return


def _more_ranks(plan: CachePlan, requests: int, length: int, change: dict[str, Any]) -> Iterator[Remedy]:
    """Yield the fewest ranks, doubling tp_size, that serve; weights shrink with the ranks."""
    tp_size = plan.parallel.tp_size * 2
    while tp_size <= MOST_RANKS:
        weights = -(-plan.asked_budget.weights_bytes * plan.parallel.tp_size // tp_size)
        try:
            parallel = msgspec.structs.replace(plan.parallel, tp_size=tp_size)
        except PlanError:
            return
        if _tried(plan, _per_worker(plan, requests), length, change, parallel, weights) is not None:
            more = {"tp_size": tp_size, **({"weights_bytes": weights} if weights else {}), **change}
            note = "the weights of a rank scaled by the ratio" if weights else ""
            yield Remedy(change=more, requests=requests, length=length, note=note)
            return
        tp_size *= 2
