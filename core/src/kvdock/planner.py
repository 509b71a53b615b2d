"""Config → `CachePlan`: an outline from the hooks, sizes from the solver, every byte accounted for."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import msgspec

from kvdock import planfile
from kvdock.budget import Budget, check_bytes, find_budget, late_slack_bytes
from kvdock.cells import cell_warnings
from kvdock.costs import Costs, SlotCost, bytes_per_token, find_costs, kv_bytes_held, slots_held
from kvdock.device import GIVEN_BUDGET, DeviceInfo, budget_device
from kvdock.errors import KVDockError, PlanError
from kvdock.fitting import Agreement, Fitted, Vector, fit, replay
from kvdock.hardware import conversion_warnings
from kvdock.layout import MAX_SLOTS, REQUESTS, Buffer
from kvdock.levers import Attempt, nothing
from kvdock.limits import Limit, find_limits, limit_warnings
from kvdock.model import ModelSpec
from kvdock.options import CacheOptions, Parallelism, ResolvedOptions, draft_parallels
from kvdock.outline import Outline, draw_outline
from kvdock.sizing import Problem, host_nbytes, largest
from kvdock.storages import SHARED, WITHIN, bytes_of

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
    agreement: Agreement
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

    @property
    def unused_bytes(self) -> int:
        """Bytes of the budget that nothing takes: less than a page, or what a rank leaves that does not bind."""
        return self.budget_bytes - self.total_bytes

    def replan(self, budget_bytes: int, cap_tokens: int | None = None, group: Any = None) -> CachePlan:
        """Return the same decisions sized for another budget, for at most `cap_tokens` tokens.

        A plan that several ranks agreed on needs their process `group` (``torch.distributed``): each calls this.

        Raises:
            BudgetError: nothing useful fits; `self` stays as it is.
            PlanError: ranks have to agree, and no `group` is given.
        """
        return self._sized_again(budget_bytes, cap_tokens, group, suggests=True)

    def sized_for(self, budget_bytes: int, cap_tokens: int | None = None) -> CachePlan:
        """Return what `replan` does, without its suggestions: an error says what is lacking alone, if not how much.

        Raises:
            BudgetError: nothing useful fits.
        """
        return self._sized_again(budget_bytes, cap_tokens, None, suggests=False)

    def _sized_again(self, budget_bytes: int, cap_tokens: int | None, group: Any, suggests: bool) -> CachePlan:
        from kvdock.ranks import agree_over

        if group is None and self.agreement.ranks > 1:
            raise PlanError(
                f"{self.agreement.ranks} ranks agreed on this plan, so one alone cannot size it again; "
                "give group=, the process group of them all"
            )

        def steps(rank: int = 0, ranks: int = 1) -> PlanSteps:
            if cap_tokens is not None:
                _check_count("cap_tokens", cap_tokens)
            check_bytes("budget_bytes", budget_bytes)
            outline = self.outline
            if outline.device.source == GIVEN_BUDGET:
                outline = msgspec.structs.replace(outline, device=budget_device(budget_bytes))
            budget = find_budget(outline.device, self.options.values, budget_bytes, None)
            asked = Asked(cap_tokens=cap_tokens, rank=rank, ranks=ranks, suggests=suggests)
            return (yield from _sized(outline, budget, asked))

        sized = replay(steps(), ()) if group is None else agree_over(group, steps)
        return msgspec.structs.replace(sized, read_by=self.read_by)

    def bytes_for(self, length: int, requests: int = 1) -> int:
        """Return the device bytes of KV that `requests` requests of `length` tokens occupy, in whole pages.

        Sliding spaces hold the window alone. Bookkeeping and padding are not counted; see `costs`.
        """
        _check_count("length", length)
        _check_count("requests", requests)
        spaces = self.outline.spaces
        return kv_bytes_held(self.outline.buffers, spaces, slots_held(spaces, length, requests, self.parallel.dcp_size))

    def max_length(self, requests: int = 1) -> int:
        """Return the longest length that `requests` requests can have at once, in tokens; 0 if not even 1."""
        _check_count("requests", requests)
        spaces = self.outline.spaces

        def fits(length: int) -> bool:
            slots = slots_held(spaces, length, requests, self.parallel.dcp_size)
            return self.outline.holds(slots, self.spaces)

        return largest(fits, 0, self.outline.options.values.context_length or self.model.context_length)

    def concurrency(self, length: int) -> int:
        """Return how many requests of `length` tokens run at once: as many as every space holds and rows there are.

        0 beyond the context.
        """
        _check_count("length", length)
        if length > (self.options.values.context_length or self.model.context_length):
            return 0  # no request may be so long
        spaces = self.outline.spaces

        def fits(requests: int) -> bool:
            slots = slots_held(spaces, length, requests, self.parallel.dcp_size)
            return self.outline.holds(slots, self.spaces)

        return largest(fits, 0, self.max_running_requests)

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


PlanSteps = Generator[Vector, Vector, CachePlan]
"""Planning in progress; see `kvdock.fitting.Steps`."""


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SLOTS:
        raise PlanError(f"{name}={value!r} is no count; give a whole number from 0 to {MAX_SLOTS}")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of one rank's memory: a budget outright, or what else takes the device's; and a cap on tokens.

    `rank` of `ranks` is the place among the ranks that are sized together. `suggests`: messages name what would help,
    each tried by planning again; false where nobody reads them.
    """

    budget_bytes: int | None = None
    weights_bytes: int | None = None
    weights_source: str = ""
    reserve_bytes: int | None = None
    cap_tokens: int | None = None
    rank: int = 0
    ranks: int = 1
    suggests: bool = True


def plan_from(
    models: tuple[ModelSpec, ...],
    device: DeviceInfo,
    options: CacheOptions,
    parallel: Parallelism,
    registry: Registry,
    *,
    budget_bytes: int | None = None,
    weights_bytes: int | None = None,
    weights_source: str = "",
    reserve_bytes: int | None = None,
    cap_tokens: int | None = None,
    suggests: bool = True,
) -> CachePlan:
    """Plan the cache of a target model (first) and its drafts on one rank. Pure: nothing is read or changed.

    `cap_tokens` is the most tokens to plan for, beside the user's own `max_total_tokens`; `suggests` as in `Asked`.

    Raises:
        PlanError, BudgetError, UnsupportedCombination, PluginError: what cannot be served, and what would work.
    """
    asked = Asked(
        budget_bytes=budget_bytes,
        weights_bytes=weights_bytes,
        weights_source=weights_source,
        reserve_bytes=reserve_bytes,
        cap_tokens=cap_tokens,
        suggests=suggests,
    )
    return replay(plan_steps(models, device, options, parallel, registry, asked), ())


def plan_steps(
    models: tuple[ModelSpec, ...],
    device: DeviceInfo,
    options: CacheOptions,
    parallel: Parallelism,
    registry: Registry,
    asked: Asked,
) -> PlanSteps:
    """Plan one rank in the steps of `kvdock.fitting.fit`; what `plan_from` runs to its end for a rank alone."""
    if asked.budget_bytes is not None and options.mem_fraction_static is not None:
        raise PlanError(
            f"mem_fraction_static={options.mem_fraction_static} has no effect beside budget_bytes={asked.budget_bytes}; "
            "give one of them"
        )
    if not models:
        raise PlanError("there is no model to plan for; give the target model first, then its drafts")
    outline = draw_outline(models, device, options, draft_parallels(options, parallel, len(models)), registry)
    budget = find_budget(
        device,
        outline.options.values,
        asked.budget_bytes,
        asked.weights_bytes,
        weights_source=asked.weights_source,
        reserve_bytes=asked.reserve_bytes,
        least_slack_bytes=late_slack_bytes(outline.request_pool.query),
    )
    return (yield from _sized(outline, budget, asked))


def _sized(outline: Outline, budget: Budget, asked: Asked) -> PlanSteps:
    def again(change: dict[str, Any]) -> CachePlan | None:
        return _attempt(outline, budget, asked, change)

    attempt = again if asked.suggests else nothing
    fitted = yield from fit(outline, budget, asked.cap_tokens, asked.rank, asked.ranks, attempt)
    warnings = [*outline.warnings, *cell_warnings(outline), *_conversions(outline, attempt)]
    if budget.base == "fraction" and outline.device.index is None and not budget.weights_bytes:
        warnings.append(
            f"no weights are taken off the memory of {outline.device.name}; give weights_bytes (--weights), "
            "what they take on this rank"
        )
    plan = _assemble(outline, budget, fitted, warnings, asked.cap_tokens, attempt)
    if outline.options.values.strict and plan.warnings:
        raise PlanError(f"strict planning refuses warnings: {'; '.join(plan.warnings)}")
    return plan


def _attempt(outline: Outline, budget: Budget, asked: Asked, change: dict[str, Any]) -> CachePlan | None:
    """Return the plan of this rank alone with options, parallel sizes or ``budget_bytes`` changed, or ``None``.

    Nothing is suggested for it in turn.
    """
    options, device = dict(change), outline.device
    nbytes = options.pop("budget_bytes", None)
    if nbytes is not None and device.source == GIVEN_BUDGET:
        device = budget_device(nbytes)
    try:
        changed = {name: options.pop(name) for name in Parallelism.__struct_fields__ if name in options}
        parallel = msgspec.structs.replace(outline.parallel, **changed)
        given = msgspec.structs.replace(outline.given, **options)
        sizes = draft_parallels(given, parallel, len(outline.models))
        other = draw_outline(outline.models, device, given, sizes, outline.registry)
        if nbytes is not None:
            budget = find_budget(device, other.options.values, nbytes, None)
        elif budget.base != "given":
            budget = find_budget(
                outline.device,
                other.options.values,
                None,
                budget.weights_bytes,
                weights_source=budget.weights_source,
                reserve_bytes=budget.reserve_bytes,
                least_slack_bytes=late_slack_bytes(other.request_pool.query),
            )
        return replay(_sized(other, budget, Asked(cap_tokens=asked.cap_tokens, suggests=False)), ())
    except KVDockError:
        return None


def _conversions(outline: Outline, attempt: Attempt) -> tuple[str, ...]:
    found = conversion_warnings(outline.device, outline.buffers)
    if not found or attempt({"kv_cache_dtype": PLAIN}) is None:
        return found
    return tuple(f"{text}; kv_cache_dtype={PLAIN} needs no conversion" for text in found)


PLAIN = "bfloat16"
"""The type of keys and values that every device reads without conversion."""


def _assemble(
    outline: Outline,
    budget: Budget,
    fitted: Fitted,
    warnings: list[str],
    cap_tokens: int | None,
    attempt: Attempt,
) -> CachePlan:
    problem, solution = fitted.problem, fitted.solution
    sizes = solution.sizes
    plans = _buffer_plans(outline, problem, sizes)
    is_shared = outline.line(sizes) is not None  # then the numbering counts what others may take as well
    tokens = solution.tokens if is_shared or outline.numbering is None else sizes[outline.numbering]
    visible = tokens * outline.parallel.dcp_size
    limits = find_limits(outline, problem, fitted.budget.nbytes, solution, visible, attempt)
    engine = outline.allocators[-1] if outline.allocators else None
    in_groups = {choice.name for choice in outline.pools}
    return CachePlan(
        outline=outline,
        budget=fitted.budget,
        asked_budget=budget,
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
        host_bytes=host_nbytes(problem, sizes),
        bound=solution.bound,
        agreement=fitted.agreement,
        warnings=(*warnings, *fitted.warnings, *limit_warnings(limits)),
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
        storage=_storage_of(buffer),
        is_kv=buffer.is_kv,
    )


def _storage_of(buffer: Buffer) -> str:
    """Return the name of the memory that a buffer shares."""
    if buffer.storage in (SHARED, WITHIN):
        return "unified memory"
    return f"{buffer.owner} pages" if buffer.storage else buffer.overlay


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
