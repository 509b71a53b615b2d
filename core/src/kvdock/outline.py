"""Everything that a plan decides before sizes: groups, spaces, classes, buffers, and who said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvdock.allocators.base import Allocator
from kvdock.demand import request_columns
from kvdock.device import DeviceInfo
from kvdock.errors import KVDockError, PluginError, UnsupportedCombination
from kvdock.features import FEATURE_OPTIONS, features_asked
from kvdock.layout import REQUESTS, TARGET, Buffer, LayerGroup, Space
from kvdock.model import ModelSpec
from kvdock.options import CacheOptions, Parallelism, ResolvedOptions
from kvdock.planned import Planned
from kvdock.plugins import resolve
from kvdock.plugins.loading import Registry, describe, stdout_to_stderr
from kvdock.plugins.resolve import Decision
from kvdock.pools.base import Pool
from kvdock.queries import (
    AllocatorQuery,
    GroupQuery,
    PlanQuery,
    PoolQuery,
    Query,
    RequestQuery,
    StateQuery,
)
from kvdock.requests.base import RequestPool
from kvdock.resolution import ENGINE_FACTS, PLANNER_OPTIONS, passed_over, refuse_unread, resolve_options, unread_options
from kvdock.sizing import ordered
from kvdock.storages import fits_pages
from kvdock.unified.geometry import Line, line_of
from kvdock.unified.sharing import share_out


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A class that a plan chose: for what (`name`), by which plugin, and the buffers that it declares."""

    cls: type[Planned]
    name: str
    plugin: str
    buffers: tuple[Buffer, ...]


class PoolChoice(Choice, frozen=True, kw_only=True):
    """The pool of one group, or (`query.group` is ``None``) what routes by layer; `cls` None: nobody needed to."""

    query: PoolQuery
    cls: type[Pool]
    replaces: tuple[Buffer, ...] = ()
    """Buffers of the pool whose place one without KV takes: the tokens are those that it would have held."""

    @property
    def worker(self) -> str:
        """``target``, or the draft that owns the pool."""
        return self.query.worker


class AllocatorChoice(Choice, frozen=True, kw_only=True):
    """The allocator of one space, or of several in step."""

    query: AllocatorQuery
    cls: type[Allocator]


class RequestChoice(Choice, frozen=True, kw_only=True):
    """The request pool."""

    query: RequestQuery
    cls: type[RequestPool]


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """A plan without sizes. `allocators` are in building order, the one that the engine uses last."""

    models: tuple[ModelSpec, ...]
    device: DeviceInfo
    given: CacheOptions
    options: ResolvedOptions
    parallels: tuple[Parallelism, ...]
    """Parallel sizes of each worker, the target's first: a draft may run with its own."""
    registry: Registry
    groups: tuple[LayerGroup, ...]
    spaces: dict[str, Space]
    pools: tuple[PoolChoice, ...]
    routers: dict[str, PoolChoice]
    allocators: tuple[AllocatorChoice, ...]
    request_pool: RequestChoice
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]

    @property
    def model(self) -> ModelSpec:
        """The target model."""
        return self.models[0]

    @property
    def parallel(self) -> Parallelism:
        """Parallel sizes of the target, and the rank."""
        return self.parallels[0]

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every chosen class, in the order in which it is built."""
        return (self.request_pool, *self.allocators, *self.pools, *self.routers.values())

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every buffer of the plan."""
        return tuple(buffer for choice in self.choices for buffer in choice.buffers)

    @property
    def sized_buffers(self) -> tuple[Buffer, ...]:
        """Every buffer by which the tokens are sized: those of the replaced pool where one keeps no KV."""
        return tuple(
            buffer for choice in self.choices for buffer in (getattr(choice, "replaces", ()) or choice.buffers)
        )

    def line(self, sizes: Mapping[str, int]) -> Line | None:
        """Return where spaces lie in the byte buffer that they share at these sizes; ``None`` without one."""
        return line_of(self.buffers, self.spaces, sizes)

    def holds(self, slots: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
        """Return whether so many slots of every space are there at once."""
        if any(slots[name] > sizes[name] for name in slots):
            return False
        return self.shared_lack(slots, sizes) is None

    def shared_lack(self, slots: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int] | None:
        """Return the bytes of pages that slots of all spaces need of a shared buffer, and those that it has; ``None``: they fit."""
        line = self.line(sizes)
        pages = {} if line is None else {s.space: -(-slots[s.space] // s.page_size) for s in line.stretches}
        if line is None or line.fits(pages):
            return None
        return sum(pages[s.space] * s.page_nbytes for s in line.stretches), line.high - line.low

    @property
    def numbering(self) -> str | None:
        """The space in which requests are numbered: the one that the engine's allocator hands out."""
        return self.allocators[-1].query.spaces[0].name if self.allocators else None


def draw_outline(
    models: tuple[ModelSpec, ...],
    device: DeviceInfo,
    given: CacheOptions,
    parallels: tuple[Parallelism, ...],
    registry: Registry,
) -> Outline:
    """Ask the hooks for everything but sizes; `parallels` are those of the models, one each.

    Raises:
        PlanError, PluginError, UnsupportedCombination: what cannot be served, and why.
    """
    options, decisions = resolve_options(models[0], given, parallels[0], device, registry)
    builder = _Builder(models, device, options.values, parallels, registry)
    groups = builder.group()
    everywhere = builder.group_everywhere(groups)
    spaces = builder.declare_spaces(groups, everywhere)
    try:
        pools, routers = builder.choose_pools(groups, spaces)
        if builder.options.unified_memory:
            _refuse_objected(builder, groups, spaces, pools)
            spaces, pools = _shared_out(spaces, pools)
        allocators = builder.choose_allocators(groups, spaces)
        request_pool = builder.choose_request_pool(groups, spaces)
    except UnsupportedCombination as unserved:
        _refuse_objected(builder, groups, spaces, (), unserved)
        raise
    outline = Outline(
        models=models,
        device=device,
        given=given,
        options=options,
        parallels=parallels,
        registry=registry,
        groups=groups,
        spaces=spaces,
        pools=pools,
        routers=routers,
        allocators=allocators,
        request_pool=request_pool,
        decisions=(*decisions, *builder.decisions),
        warnings=(
            *(warning for model in models for warning in model.warnings),
            *passed_over(builder.decisions, registry, device),
        ),
    )
    who, read = f"{models[0].name} on {device.name}", _options_read(outline, outline.choices)
    if parallels[0].pp_size > 1 and unread_options(given, read):
        read |= _options_read(outline, builder.choose_everywhere(everywhere, spaces))
    refuse_unread(given, read, who)
    _refuse_objected(builder, groups, spaces, pools)
    return outline


def _options_read(outline: Outline, choices: Iterable[Choice]) -> frozenset[str]:
    """Return the options that something in this plan reads, or one of the classes chosen."""
    read = set(PLANNER_OPTIONS | ENGINE_FACTS | FEATURE_OPTIONS)
    for space in outline.spaces.values():
        read.update(space.options)
    for choice in choices:
        read |= choice.cls.options
        if any(buffer.memory != "device" for buffer in choice.buffers):
            read.add("host_budget_bytes")
    windows = any(layer.window_tokens is not None for model in outline.models for layer in model.layers)
    if windows or outline.given.hybrid_swa == "off":
        read.add("hybrid_swa")  # where no layer has a window, full KV for every layer is what there is
    return frozenset(read)


class _Builder:
    """Asks hook after hook for one plan and keeps the decisions."""

    def __init__(
        self,
        models: tuple[ModelSpec, ...],
        device: DeviceInfo,
        options: CacheOptions,
        parallels: tuple[Parallelism, ...],
        registry: Registry,
    ) -> None:
        self.models = models
        self.parallels = parallels
        self.options = options
        self.registry = registry
        self.prefer = options.prefer or ()
        self.base = Query(model=models[0], options=options, parallel=parallels[0], device=device)
        self.decisions: list[Decision] = []

    def query(self, query_type: type[Any], worker: str = TARGET, **fields: Any) -> Any:
        """Return a query of a worker with the fields that all queries hold."""
        base, index = self.base, self.workers().index(worker)
        return query_type(
            model=self.models[index],
            options=base.options,
            parallel=self.parallels[index],
            device=base.device,
            worker=worker,
            **fields,
        )

    def workers(self) -> tuple[str, ...]:
        """Return the target and the drafts, by name."""
        drafts = len(self.models) - 1
        return (TARGET, *(f"draft{i if drafts > 1 else ''}" for i in range(drafts)))

    def group(self) -> tuple[LayerGroup, ...]:
        """Group the layers that each worker owns on this rank; drafts live on the last stage."""
        groups: list[LayerGroup] = []
        last = self.base.parallel.pp_rank == self.base.parallel.pp_size - 1
        for worker, model in zip(self.workers(), self.models, strict=True):
            if worker == TARGET:
                own = self.base.parallel.stage_layers(len(model.layers))
            elif last:
                own = range(len(model.layers))
            else:
                continue
            found, decision = self._groups_of(worker, own)
            self.decisions.append(decision)
            groups += found
        _refuse_twins("layer group", [group.name for group in groups])
        return tuple(groups)

    def group_everywhere(self, own: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
        """Return the groups of every layer and draft, whatever the rank: `own` unless there are other stages."""
        if self.base.parallel.pp_size == 1:
            return own
        each = [
            self._groups_of(worker, range(len(m.layers))) for worker, m in zip(self.workers(), self.models, strict=True)
        ]
        return tuple(group for found, _ in each for group in found)

    def choose_everywhere(self, everywhere: tuple[LayerGroup, ...], spaces: dict[str, Space]) -> tuple[Choice, ...]:
        """Return the classes of every layer and draft, whatever the rank: all stages are given the same options."""
        decisions, self.decisions = self.decisions, []
        try:
            pools, routers = self.choose_pools(everywhere, spaces)
            allocators = self.choose_allocators(everywhere, spaces)
            return (self.choose_request_pool(everywhere, spaces), *allocators, *pools, *routers.values())
        finally:
            self.decisions = decisions

    def _groups_of(self, worker: str, layer_ids: range) -> tuple[list[LayerGroup], Decision]:
        model = self.models[self.workers().index(worker)]
        layers = tuple((layer_id, model.layers[layer_id]) for layer_id in layer_ids)
        query = self.query(GroupQuery, worker, layers=layers, target=self.models[0])
        found, decision = resolve.layer_groups(self.registry, query, self.prefer)
        return [_own(group, worker) for group in found], decision

    def declare_spaces(self, groups: tuple[LayerGroup, ...], everywhere: tuple[LayerGroup, ...]) -> dict[str, Space]:
        """Ask for the spaces, once for all workers and alike on all ranks."""
        query = self.query(StateQuery, groups=groups, all_groups=everywhere)
        spaces, decisions = resolve.spaces(self.registry, query, self.prefer)
        self.decisions += decisions
        for group in everywhere:
            if group.space not in spaces:
                raise PluginError(
                    f"layer group {group.name!r} lives in the space {group.space!r}, which no plugin declares "
                    f"(declared: {', '.join(sorted(spaces))}); answer size_state_pools with it"
                )
        return ordered(spaces)

    def choose_pools(
        self, groups: tuple[LayerGroup, ...], spaces: dict[str, Space]
    ) -> tuple[tuple[PoolChoice, ...], dict[str, PoolChoice]]:
        """Choose the pool of each group, then, for each worker with several, what routes by layer."""
        pools: list[PoolChoice] = []
        routers: dict[str, PoolChoice] = {}
        for worker in self.workers():
            own = tuple(group for group in groups if group.worker == worker)
            for group in own:
                choice = self._pool(worker, group.kind, group, own, spaces)
                if choice is None:
                    raise PluginError(f"no pool class was found for group {group.name!r}")
                pools.append(choice)
            router = self._pool(worker, "router", None, own, spaces) if own else None
            if router is not None:
                routers[worker] = router
        return tuple(pools), routers

    def _pool(
        self,
        worker: str,
        kind: str,
        group: LayerGroup | None,
        own: tuple[LayerGroup, ...],
        spaces: dict[str, Space],
    ) -> PoolChoice | None:
        query = self.query(PoolQuery, worker, kind=kind, group=group, spaces=spaces, groups=own)
        asked = features_asked(query, "pool") if group is not None else frozenset()
        cls, decision = resolve.pool_cls(self.registry, query, asked, self.prefer)
        self.decisions.append(decision)
        if cls is None:
            return None
        name = group.name if group is not None else f"{worker} router"
        buffers = _declared(cls, query, name, decision.plugin, spaces)
        if group is not None and "page_major" in asked:
            buffers = _in_pages(buffers, spaces[group.space])
        replaces = self._replaced(query, name, spaces) if "no_kv" in asked else ()
        return PoolChoice(name=name, plugin=decision.plugin, query=query, cls=cls, buffers=buffers, replaces=replaces)

    def _replaced(self, query: PoolQuery, name: str, spaces: dict[str, Space]) -> tuple[Buffer, ...]:
        """Return the buffers of the pool that the group would have with a cache."""
        options = msgspec.structs.replace(query.options, prefill_only_disable_kv_cache=False)
        cached = msgspec.structs.replace(query, options=options)
        cls, decision = resolve.pool_cls(self.registry, cached, features_asked(cached, "pool"), self.prefer)
        return () if cls is None else _declared(cls, cached, name, decision.plugin, spaces)

    def choose_allocators(
        self, groups: tuple[LayerGroup, ...], spaces: dict[str, Space]
    ) -> tuple[AllocatorChoice, ...]:
        """Choose the allocator of each space that one issues, then of all of them in step."""
        issued = [space for space in spaces.values() if space.issued_by == "allocator"]
        choices = [self._allocator(groups, spaces, (space,), {}) for space in issued]
        if len(issued) > 1:
            inner = {choice.query.spaces[0].name: choice.cls for choice in choices}
            choices.append(self._allocator(groups, spaces, tuple(issued), inner))
        return tuple(choices)

    def _allocator(
        self,
        groups: tuple[LayerGroup, ...],
        spaces: dict[str, Space],
        issued: tuple[Space, ...],
        inner: Mapping[str, type[Allocator]],
    ) -> AllocatorChoice:
        query = self.query(AllocatorQuery, spaces=issued, groups=groups, inner=inner)
        asked = features_asked(query, "allocator")
        cls, decision = resolve.allocator_cls(self.registry, query, asked, self.prefer)
        self.decisions.append(decision)
        name = f"allocator {'+'.join(space.name for space in issued)}"
        buffers = _declared(cls, query, name, decision.plugin, spaces)
        return AllocatorChoice(name=name, plugin=decision.plugin, query=query, cls=cls, buffers=buffers)

    def choose_request_pool(self, groups: tuple[LayerGroup, ...], spaces: dict[str, Space]) -> RequestChoice:
        """Choose the request pool."""
        if REQUESTS not in spaces:
            raise PluginError("no plugin declares the space 'requests'; every plan has request rows")
        columns = request_columns(self.base)
        query = self.query(RequestQuery, spaces=spaces, groups=groups, columns=columns)
        asked = features_asked(query, "request_pool")
        cls, decision = resolve.request_pool_cls(self.registry, query, asked, self.prefer)
        self.decisions.append(decision)
        buffers = _declared(cls, query, "request pool", decision.plugin, spaces)
        return RequestChoice(name="request pool", plugin=decision.plugin, query=query, cls=cls, buffers=buffers)


def _shared_out(
    spaces: dict[str, Space], pools: tuple[PoolChoice, ...]
) -> tuple[dict[str, Space], tuple[PoolChoice, ...]]:
    """Return spaces and pools whose pages lie in one byte buffer."""
    shared, buffers = share_out(spaces, [buffer for pool in pools for buffer in pool.buffers])
    left = iter(buffers)
    own = tuple(msgspec.structs.replace(pool, buffers=tuple(next(left) for _ in pool.buffers)) for pool in pools)
    return ordered(shared), own


def _in_pages(buffers: tuple[Buffer, ...], space: Space) -> tuple[Buffer, ...]:
    """Return the buffers with those that a page of the group's space can hold in one byte buffer."""
    return tuple(
        msgspec.structs.replace(buffer, storage="pages", stacked=False)
        if buffer.is_kv and fits_pages(buffer, space)
        else buffer
        for buffer in buffers
    )


def _own(group: LayerGroup, worker: str) -> LayerGroup:
    name = group.name if worker == TARGET else f"{worker}.{group.name}"
    return msgspec.structs.replace(group, worker=worker, name=name)


def _refuse_twins(what: str, names: Iterable[str]) -> None:
    twins = [name for name, count in Counter(names).items() if count > 1]
    if twins:
        raise PluginError(f"two {what}s are called {twins[0]!r}; give each a name of its own")


def _declared(
    cls: type[Planned], query: Any, owner: str, plugin: str, spaces: Mapping[str, Space]
) -> tuple[Buffer, ...]:
    """Return the buffers of a class, marked with their owner, after checking what it declared.

    Raises:
        PluginError: `buffers` fails or answers something else; names the plugin and the class.
    """
    who = f"plugin {plugin!r}: {cls.__module__}.{cls.__name__}.buffers"
    try:
        with stdout_to_stderr():
            buffers = cls.buffers(query)
    except KVDockError:
        raise
    except Exception as error:
        raise PluginError(f"{who} raised {describe(error)} for {owner!r}") from error
    if not isinstance(buffers, tuple) or not all(isinstance(buffer, Buffer) for buffer in buffers):
        raise PluginError(f"{who} must return a tuple of Buffer, not {type(buffers).__name__}")
    _refuse_twins(f"buffer of {cls.__name__}", [buffer.name for buffer in buffers])
    for buffer in buffers:
        if buffer.space is not None and buffer.space not in spaces:
            raise PluginError(
                f"{who}: buffer {buffer.name!r} counts rows in the space {buffer.space!r}, "
                f"which no plugin declares (declared: {', '.join(sorted(spaces))})"
            )
    return tuple(msgspec.structs.replace(buffer, owner=owner, worker=query.worker) for buffer in buffers)


def _refuse_objected(
    builder: _Builder,
    groups: tuple[LayerGroup, ...],
    spaces: dict[str, Space],
    pools: tuple[PoolChoice, ...],
    unserved: UnsupportedCombination | None = None,
) -> None:
    """Raise every objection at once, and with them what no class serves; return if nobody objects."""
    said = () if unserved is None else unserved.objections
    objections = tuple(found for found in _objections(builder, groups, spaces, pools) if found not in said)
    if not objections:
        return
    lines = [f"  {plugin}: {reason}" for plugin, reason in objections]
    text = "\n".join(["this combination of model, device and options is refused:", *lines])
    if unserved is None:
        raise UnsupportedCombination(text, objections)
    raise UnsupportedCombination(f"{text}\n{unserved}", (*objections, *unserved.objections)) from unserved


def _objections(
    builder: _Builder, groups: tuple[LayerGroup, ...], spaces: dict[str, Space], pools: tuple[PoolChoice, ...]
) -> list[tuple[str, str]]:
    """Return what is said against a plan, with the plugin that says it, worker by worker."""
    found: list[tuple[str, str]] = []
    without_kv = builder.options.prefill_only_disable_kv_cache
    loaded = frozenset(member.name for member in builder.registry.members)
    if without_kv:
        chosen = (decision for decision in builder.decisions if decision.hook == "get_pool_cls")
        advice = "its device reads KV that nothing keeps, so leave prefill_only_disable_kv_cache out"
        found += [
            ("core", f"{reason}; {advice}") for reason in passed_over(chosen, builder.registry, builder.base.device)
        ]
    for worker in builder.workers():
        own = tuple(group for group in groups if group.worker == worker)
        chosen_pools = [choice for choice in pools if choice.worker == worker]
        classes = {choice.name: choice.cls for choice in chosen_pools}
        buffers = tuple(buffer for choice in chosen_pools for buffer in choice.buffers)
        query = builder.query(
            PlanQuery, worker, groups=own, spaces=spaces, pools=classes, buffers=buffers, loaded=loaded
        )
        said = resolve.objections(builder.registry, "validate_plan", query)
        found += said if worker == TARGET else [pair for pair in said if pair not in found]  # drafts share options
        if without_kv:
            found += resolve.objections(builder.registry, "validate_prefill_only", query)
    return found
