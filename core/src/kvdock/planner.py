"""Config → `CachePlan`: an outline from the hooks, sizes from the solver, every byte accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvdock import planfile
from kvdock.budget import Budget, find_budget, refuse_budget, show_bytes
from kvdock.costs import Costs, SlotCost, bytes_per_token, find_costs, kv_bytes_held, slots_held
from kvdock.device import DeviceInfo
from kvdock.errors import BudgetError, PlanError
from kvdock.families.groups import MIN_TOKENS
from kvdock.layout import MAX_SLOTS, REQUESTS, STATE, Buffer, round_up
from kvdock.limits import Limit, find_limits, limit_warnings
from kvdock.model import ModelSpec
from kvdock.options import CacheOptions, Parallelism, ResolvedOptions
from kvdock.outline import Outline, draw_outline
from kvdock.sizing import (
    Problem,
    Solution,
    Solver,
    largest,
    token_factors,
    total_nbytes,
)
from kvdock.storages import bytes_of

if TYPE_CHECKING:
    from kvdock.plugins.loading import Registry
    from kvdock.plugins.resolve import Decision


class ClassRef(msgspec.Struct, frozen=True, kw_only=True):
    """A class as data: the plugin that named it and its name. Never a path to import."""

    plugin: str
    name: str


class BufferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A buffer with its size: `tensors` tensors of `shape` (rows first), `nbytes` in all with every rounding.

    `storage` names the memory that it shares with other buffers, page by page or lying over them; empty: its own.
    """

    name: str
    owner: str
    role: str
    worker: str
    space: str | None
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    memory: str
    tensors: int
    nbytes: int
    is_kv: bool
    storage: str = ""


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One layer group: the layers that own buffers, those that read them as well, and the pool."""

    name: str
    kind: str
    space: str
    worker: str
    layers: tuple[int, ...]
    shared: tuple[tuple[int, int], ...]
    pool_cls: ClassRef
    buffers: tuple[BufferPlan, ...]


class CachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which classes, which buffers, how many slots, how many bytes, and why.

    `spaces` are usable slots by space; `total_bytes` is device memory, `host_bytes` is beside it.
    `tables` are the buffers that belong to no group. `asked_budget` is the budget before the user's own token count was weighed against it. `outline`
    holds the live classes and queries and is no part of the JSON.
    """

    outline: Outline
    budget: Budget
    asked_budget: Budget
    max_total_num_tokens: int
    max_running_requests: int
    max_request_tokens: int
    spaces: dict[str, int]
    groups: tuple[GroupPlan, ...]
    allocator_cls: ClassRef | None
    request_pool_cls: ClassRef
    tables: tuple[BufferPlan, ...]
    limits: tuple[Limit, ...]
    bytes_per_token: SlotCost
    costs: Costs
    total_bytes: int
    host_bytes: int
    bound: str
    warnings: tuple[str, ...]
    cap_tokens: int | None = None
    read_by: tuple[Decision, ...] = ()
    """Who read the models' configs; empty for models that were given as they are."""

    @property
    def budget_bytes(self) -> int:
        """Bytes that the cache may take."""
        return self.budget.nbytes

    @property
    def buffers(self) -> tuple[BufferPlan, ...]:
        """Every buffer: the groups' and the tables of allocators, request pool and routers."""
        return (*(buffer for group in self.groups for buffer in group.buffers), *self.tables)

    @property
    def sizes(self) -> dict[str, int]:
        """Usable slots by space; the same as `spaces`."""
        return self.spaces

    @property
    def model(self) -> ModelSpec:
        """The target model."""
        return self.outline.model

    @property
    def device(self) -> DeviceInfo:
        """The device that was planned for."""
        return self.outline.device

    @property
    def options(self) -> ResolvedOptions:
        """Resolved options, each with its source."""
        return self.outline.options

    @property
    def parallel(self) -> Parallelism:
        """Parallel sizes and the rank."""
        return self.outline.parallel

    def replan(self, budget_bytes: int, cap_tokens: int | None = None) -> CachePlan:
        """Return the same decisions sized for another budget, for at most `cap_tokens` tokens.

        Raises:
            BudgetError: nothing useful fits; `self` stays as it is.
        """
        if cap_tokens is not None:
            _check_count("cap_tokens", cap_tokens)
        budget = find_budget(self.device, self.options.values, budget_bytes, None)
        return msgspec.structs.replace(_sized(self.outline, budget, cap_tokens), read_by=self.read_by)

    def bytes_for(self, length: int, requests: int = 1) -> int:
        """Return the bytes of KV that `requests` requests of `length` tokens occupy, in whole pages.

        Sliding spaces hold the window alone. Bookkeeping and padding are not counted; see `costs`.
        """
        _check_count("length", length)
        _check_count("requests", requests)
        spaces = self.outline.spaces
        return kv_bytes_held(self.outline.buffers, spaces, slots_held(spaces, length, requests))

    def max_length(self, requests: int = 1) -> int:
        """Return the longest length that `requests` requests can have at once, in tokens; 0 if not even 1."""
        _check_count("requests", requests)
        spaces = self.outline.spaces

        def fits(length: int) -> bool:
            slots = slots_held(spaces, length, requests)
            return all(slots[name] <= self.spaces[name] for name in spaces)

        return largest(fits, 0, self.outline.options.values.context_length or self.model.context_length)

    def explain(self) -> str:
        """Return every decision as text: the hook, who claimed, who declined and why; every byte."""
        from kvdock.explain import explain

        return explain(self)

    def to_json(self) -> str:
        """Return the plan as JSON: data only, classes by plugin and name."""
        return planfile.dump(self)

    @staticmethod
    def from_json(text: str | bytes, registry: Registry | None = None) -> CachePlan:
        """Read a plan file: ask the hooks again, size again, and compare with what is written.

        Raises:
            PlanError: not a plan file, or a field differs from what is planned now; names the field.
        """
        return planfile.load(text, registry)


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SLOTS:
        raise PlanError(f"{name}={value!r} is no count; give a whole number from 0 to {MAX_SLOTS}")


def plan_from(
    models: tuple[ModelSpec, ...],
    device: DeviceInfo,
    options: CacheOptions,
    parallel: Parallelism,
    registry: Registry,
    *,
    budget_bytes: int | None = None,
    weights_bytes: int | None = None,
    cap_tokens: int | None = None,
) -> CachePlan:
    """Plan the cache of a target model (first) and its drafts on one rank. Pure: nothing is read or changed.

    `cap_tokens` is the most tokens to plan for, beside the user's own `max_total_tokens`.

    Raises:
        PlanError, BudgetError, UnsupportedCombination, PluginError: what cannot be served, and what would work.
    """
    if budget_bytes is not None and options.mem_fraction_static is not None:
        raise PlanError(
            f"mem_fraction_static={options.mem_fraction_static} has no effect beside budget_bytes={budget_bytes}; "
            "give one of them"
        )
    if not models:
        raise PlanError("there is no model to plan for; give the target model first, then its drafts")
    outline = draw_outline(models, device, options, parallel, registry)
    budget = find_budget(device, outline.options.values, budget_bytes, weights_bytes)
    return _sized(outline, budget, cap_tokens)


def _sized(outline: Outline, budget: Budget, cap_tokens: int | None) -> CachePlan:
    problem = _problem(outline, cap_tokens)
    warnings: list[str] = list(outline.warnings)
    if budget.base == "fraction" and outline.device.index is None and not budget.weights_bytes:
        warnings.append(
            f"no weights are taken off the memory of {outline.device.name}; give weights_bytes (--weights), "
            "what they take on this rank"
        )
    asked = budget
    try:
        budget = _authoritative_budget(outline, problem, budget, warnings)
        solution = _solve(problem, budget.nbytes, outline, warnings)
    except BudgetError as error:
        raise refuse_budget(error, budget, outline.device, outline.options.values) from error
    plan = _assemble(outline, (asked, budget), problem, solution, warnings, cap_tokens)
    if outline.options.values.strict and plan.warnings:
        raise PlanError(f"strict planning refuses warnings: {'; '.join(plan.warnings)}")
    return plan


def _problem(outline: Outline, cap_tokens: int | None) -> Problem:
    options = outline.options.values
    page = options.page_size or 1
    caps = {"max_total_tokens": options.max_total_tokens, "cap_tokens": cap_tokens}
    given = {name: value for name, value in caps.items() if value is not None}
    if page > MAX_SLOTS // 3:
        raise PlanError(f"page_size={page} leaves no room for a page beside padding among {MAX_SLOTS:,} slots")
    for name, value in given.items():
        if value < page:
            raise PlanError(f"{name}={value} is less than one page; give at least page_size={page}")
    factors = token_factors(outline.spaces)
    follows = any(b.is_kv and b.space is not None and factors[b.space] for b in outline.buffers)
    if not given and not follows:
        given["max_running_requests · context_length"] = _tokens_without_kv(outline, page)
    name = min(given, key=lambda key: given[key]) if given else "max_total_tokens"
    return Problem(
        spaces=outline.spaces,
        buffers=outline.buffers,
        page_size=page,
        granularity_bytes=outline.device.granularity_bytes,
        cap_tokens=given.get(name),
        cap_name=name,
    )


def _tokens_without_kv(outline: Outline, page: int) -> int:
    """Return the tokens that a rank numbers when none of its KV grows with them."""
    options = outline.options.values
    context = options.context_length or outline.model.context_length
    requests = options.max_running_requests or outline.spaces[REQUESTS].rule.at_least or 1
    return min(round_up(requests * context, page), (MAX_SLOTS - page) // page * page)


def _authoritative_budget(outline: Outline, problem: Problem, budget: Budget, warnings: list[str]) -> Budget:
    """Return the budget, raised to the free memory where the user's own token count needs it.

    `mem_fraction_static` is a default's way of leaving room; tokens that the user states outright win
    over it as long as the memory is really there. Where it is not, the fraction's own capacity holds.
    """
    tokens = outline.options.values.max_total_tokens
    if budget.base == "given" or tokens is None:
        return budget
    needed = _stated_nbytes(outline, problem, budget, tokens)
    fraction = f"mem_fraction_static={outline.options.values.mem_fraction_static}"
    if needed <= budget.nbytes:
        return budget
    if needed > budget.free_bytes:
        warnings.append(
            f"max_total_tokens={tokens} takes {show_bytes(needed)}, but {show_bytes(max(0, budget.free_bytes))} are "
            f"free after weights; what {fraction} leaves ({show_bytes(budget.nbytes)}) is planned instead"
        )
        return budget
    warnings.append(
        f"max_total_tokens={tokens} takes {show_bytes(needed)}, more than {fraction} leaves "
        f"({show_bytes(budget.nbytes)}); the stated tokens win, and {show_bytes(budget.free_bytes - needed)} stay "
        "for activations"
    )
    return msgspec.structs.replace(
        budget, nbytes=needed, note=f"{show_bytes(needed)}, what max_total_tokens={tokens} takes of the free memory"
    )


def _stated_nbytes(outline: Outline, problem: Problem, budget: Budget, tokens: int) -> int:
    """Return the bytes of a cache of the tokens that the user stated, with the requests that go with them."""
    limit = outline.spaces[REQUESTS].rule.fixed
    pinned = {REQUESTS: max(1, min(limit, tokens // MIN_TOKENS))} if limit else {}
    solver = Solver(problem, max(budget.free_bytes, 0), pinned)
    return solver.nbytes(max(tokens // problem.page_size * problem.page_size, solver.floor_tokens()))


def _solve(problem: Problem, budget_bytes: int, outline: Outline, warnings: list[str]) -> Solution:
    rule = outline.spaces[REQUESTS].rule
    asked = rule.fixed if outline.given.max_running_requests is not None else 0
    if not asked:
        return Solver(problem, budget_bytes).solve()
    Solver(problem, budget_bytes, {REQUESTS: 1}).check_cap()
    charge = _Charge(problem, budget_bytes)
    with_states = charge.within_states(asked, warnings)
    fixed = charge.within_cap(with_states)
    charge.refuse_tables(fixed)
    solution = Solver(problem, budget_bytes, {REQUESTS: fixed}).solve()
    if solution.tokens < MIN_TOKENS * fixed:
        fixed = max(1, charge.served(fixed))
        solution = Solver(problem, budget_bytes, {REQUESTS: fixed}).solve()
    if fixed < with_states:
        raised_by = "a larger budget or a narrower kv_cache_dtype"
        warnings.append(
            f"max_running_requests: {asked} asked for, {fixed} fit, since each needs {MIN_TOKENS} of the "
            f"{solution.tokens} tokens; {problem.cap_name if solution.bound == problem.cap_name else raised_by} raises it"
        )
    return solution


class _Charge:
    """What a number of requests that the user fixed takes, tables in full."""

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes

    def nbytes(self, requests: int, tokens_each: int) -> int:
        """Return all bytes with `requests` rows and, for each, `tokens_each` tokens; at least what one needs."""
        page = self.problem.page_size
        solver = Solver(self.problem, self.budget_bytes, {REQUESTS: requests})
        tokens = round_up(requests * tokens_each, page)
        if self.problem.cap_tokens is not None:
            tokens = min(tokens, self.problem.cap_tokens // page * page)
        return solver.nbytes(max(tokens, solver.floor_tokens()))

    def within_cap(self, limit: int) -> int:
        """Return `limit`, or the most requests that have their tokens under the cap."""
        cap, page = self.problem.cap_tokens, self.problem.page_size
        return limit if cap is None else max(1, min(limit, cap // page * page // MIN_TOKENS))

    def within_states(self, limit: int, warnings: list[str]) -> int:
        """Return `limit`, or the most requests whose states have slots, with a warning."""
        each = dict(self.problem.spaces[REQUESTS].rule.at_most_of).get(STATE)
        if each is None:
            return limit
        slots = Solver(self.problem, self.budget_bytes, {REQUESTS: limit}).sizes(self.problem.page_size)[STATE]
        fits = max(1, slots * each[0] // each[1])
        if fits < limit:
            warnings.append(
                f"max_running_requests: {limit} asked for, {fits} fit, since a request may hold {each[1]} of the {slots} "
                f"state slots; max_state_slots={limit * each[1]} serves all of them"
            )
        return min(limit, fits)

    def served(self, limit: int, tokens_each: int = MIN_TOKENS) -> int:
        """Return the most requests up to `limit` that have `tokens_each` tokens each."""
        return largest(lambda count: self.nbytes(count, tokens_each) <= self.budget_bytes, 0, limit)

    def refuse_tables(self, requests: int) -> None:
        """Refuse a limit whose tables do not fit beside one page per request.

        Raises:
            BudgetError: always then; gives the bytes and the number that fits.
        """
        own = [b for b in self.problem.buffers if b.space == REQUESTS and b.memory == "device"]
        sizes = {REQUESTS: requests}
        tables = sum(bytes_of(own, self.problem.spaces, sizes, self.problem.granularity_bytes))
        needed = self.nbytes(requests, self.problem.page_size)
        if not tables or needed <= self.budget_bytes:
            return
        fits = self.served(requests, max(MIN_TOKENS, self.problem.page_size))
        raise BudgetError(
            f"max_running_requests={requests} needs {needed:,} bytes with one page per request "
            f"({tables:,} of them what each request keeps: tables, draft snapshots), but the budget is {self.budget_bytes:,} bytes; "
            + (f"max_running_requests={fits} fits" if fits else "not one request fits"),
            needed_bytes=needed,
            budget_bytes=self.budget_bytes,
        )


def _assemble(
    outline: Outline,
    budgets: tuple[Budget, Budget],
    problem: Problem,
    solution: Solution,
    warnings: list[str],
    cap_tokens: int | None,
) -> CachePlan:
    sizes = solution.sizes
    plans = _buffer_plans(outline, problem, sizes)
    tokens = sizes[outline.numbering] if outline.numbering else solution.tokens
    visible = tokens * outline.parallel.dcp_size
    limits = find_limits(outline, solution, visible)
    engine = outline.allocators[-1] if outline.allocators else None
    in_groups = {choice.name for choice in outline.pools}
    return CachePlan(
        outline=outline,
        budget=budgets[1],
        asked_budget=budgets[0],
        max_total_num_tokens=visible,
        max_running_requests=sizes[REQUESTS],
        max_request_tokens=limits[2].effective,
        spaces=sizes,
        groups=_group_plans(outline, plans),
        allocator_cls=_ref(engine) if engine else None,
        request_pool_cls=_ref(outline.request_pool),
        tables=tuple(plan for name, own in plans.items() if name not in in_groups for plan in own),
        limits=limits,
        bytes_per_token=bytes_per_token(problem),
        costs=find_costs(problem),
        total_bytes=solution.total_bytes,
        host_bytes=total_nbytes(problem, sizes, ("host", "pinned")),
        bound=solution.bound,
        warnings=(*warnings, *limit_warnings(limits)),
        cap_tokens=cap_tokens,
    )


def _ref(choice: Any) -> ClassRef:
    return ClassRef(plugin=choice.plugin, name=choice.cls.__name__)


def _buffer_plans(outline: Outline, problem: Problem, sizes: dict[str, int]) -> dict[str, tuple[BufferPlan, ...]]:
    """Return the buffers of each choice with their sizes."""
    found = iter(bytes_of(outline.buffers, problem.spaces, sizes, problem.granularity_bytes))
    return {
        choice.name: tuple(_buffer_plan(buffer, problem, sizes, next(found)) for buffer in choice.buffers)
        for choice in outline.choices
    }


def _buffer_plan(buffer: Buffer, problem: Problem, sizes: dict[str, int], nbytes: int) -> BufferPlan:
    count = buffer.units_in(problem.spaces, sizes)
    stacked = (len(buffer.layers),) if buffer.stacked else ()
    return BufferPlan(
        name=buffer.name,
        owner=buffer.owner,
        role=buffer.role,
        worker=buffer.worker,
        space=buffer.space,
        layers=buffer.layers,
        shape=(*stacked, buffer.rows(count), *buffer.shape),
        dtype=buffer.dtype,
        memory=buffer.memory,
        tensors=buffer.tensors,
        nbytes=nbytes,
        storage=f"{buffer.owner} pages" if buffer.storage else buffer.overlay,
        is_kv=buffer.is_kv,
    )


def _group_plans(outline: Outline, choices: dict[str, tuple[BufferPlan, ...]]) -> tuple[GroupPlan, ...]:
    pools = {choice.name: choice for choice in outline.pools}
    return tuple(
        GroupPlan(
            name=group.name,
            kind=group.kind,
            space=group.space,
            worker=group.worker,
            layers=group.layer_ids,
            shared=group.shared,
            pool_cls=_ref(pools[group.name]),
            buffers=choices[group.name],
        )
        for group in outline.groups
    )
