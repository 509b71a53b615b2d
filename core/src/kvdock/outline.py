"""Everything that a plan decides before sizes: groups, spaces, classes, buffers, and who said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from kvdock.allocators.base import Allocator
from kvdock.demand import request_columns
from kvdock.device import DeviceInfo
from kvdock.errors import KVDockError, PlanError, PluginError, UnsupportedCombination, nearest
from kvdock.features import FEATURE_OPTIONS, features_asked
from kvdock.layout import REQUESTS, TARGET, Buffer, LayerGroup, Space
from kvdock.model import ModelSpec
from kvdock.options import DEFAULTS, CacheOptions, Parallelism, ResolvedOptions
from kvdock.planned import Planned
from kvdock.plugins import resolve
from kvdock.plugins.devices import owners_of
from kvdock.plugins.loading import Registry, describe, stdout_to_stderr
from kvdock.plugins.resolve import Decision
from kvdock.pools.base import Pool
from kvdock.queries import (
    AllocatorQuery,
    GroupQuery,
    OptionsQuery,
    PlanQuery,
    PoolQuery,
    Query,
    RequestQuery,
    StateQuery,
)
from kvdock.requests.base import RequestPool
from kvdock.sizing import ordered
from kvdock.storages import fits_pages

ENGINE_FACTS = frozenset(
    {
        "max_prefill_tokens",
        "chunked_prefill_size",
        "prefix_cache",
        "overlap_schedule",
        "pd_multiplexing",
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "sparse_prefill_backend",
        "sparse_decode_backend",
        "linear_backend",
        "is_embedding",
        "swa_eviction_interval",
    }
)
"""Options that describe the engine rather than ask for something: a plan that has no use for one is no error."""

PLANNER_OPTIONS = frozenset(
    {
        "page_size",
        "model_dtype",
        "mem_fraction_static",
        "max_total_tokens",
        "context_length",
        "allow_longer_context",
        "draft",
        "plugins",
        "no_plugins",
        "prefer",
        "strict",
        "plugin_options",
    }
)
"""Options that the planner itself reads for every model."""


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
    parallel: Parallelism
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
    def choices(self) -> tuple[Choice, ...]:
        """Every chosen class, in the order in which it is built."""
        return (self.request_pool, *self.allocators, *self.pools, *self.routers.values())

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every buffer of the plan."""
        return tuple(buffer for choice in self.choices for buffer in choice.buffers)

    @property
    def numbering(self) -> str | None:
        """The space in which requests are numbered: the one that the engine's allocator hands out."""
        return self.allocators[-1].query.spaces[0].name if self.allocators else None


def draw_outline(
    models: tuple[ModelSpec, ...],
    device: DeviceInfo,
    given: CacheOptions,
    parallel: Parallelism,
    registry: Registry,
) -> Outline:
    """Ask the hooks for everything but sizes.

    Raises:
        PlanError, PluginError, UnsupportedCombination: what cannot be served, and why.
    """
    options, decisions = resolve_options(models[0], given, parallel, device, registry)
    builder = _Builder(models, device, options.values, parallel, registry)
    groups = builder.group()
    spaces = builder.declare_spaces(groups)
    pools, routers = builder.choose_pools(groups, spaces)
    allocators = builder.choose_allocators(groups, spaces)
    request_pool = builder.choose_request_pool(groups, spaces)
    outline = Outline(
        models=models,
        device=device,
        given=given,
        options=options,
        parallel=parallel,
        registry=registry,
        groups=groups,
        spaces=spaces,
        pools=pools,
        routers=routers,
        allocators=allocators,
        request_pool=request_pool,
        decisions=(*decisions, *builder.decisions),
        warnings=(*(warning for model in models for warning in model.warnings), *_passed_over(builder, registry)),
    )
    _refuse_unread(outline)
    _collect_objections(outline, builder)
    return outline


def _passed_over(builder: _Builder, registry: Registry) -> Iterator[str]:
    """Warn where the device's own plugin named a class that lacks what is asked, and another's took its place."""
    for decision in builder.decisions:
        unfit = [answer for answer in decision.answers if answer.outcome == "unfit" and decision.plugin]
        owners = {member.name for member in owners_of(registry, builder.base.device)} if unfit else set()
        for answer in unfit:
            if answer.plugin in owners:
                yield (
                    f"{decision.subject}: {answer.detail}, so {decision.name} of {decision.plugin} serves "
                    f"{builder.base.device.name} instead of what plugin {answer.plugin!r} named"
                )


def resolve_options(
    model: ModelSpec, given: CacheOptions, parallel: Parallelism, device: DeviceInfo, registry: Registry
) -> tuple[ResolvedOptions, tuple[Decision, ...]]:
    """Fill what the user left open, from plugins, then from the defaults, and keep each source.

    Raises:
        PlanError: the context is longer than the model's, or options of an unknown plugin are given.
    """
    query = OptionsQuery(model=model, options=given, parallel=parallel, device=device)
    offered, decisions = resolve.option_defaults(registry, query, given.prefer or ())
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in CacheOptions.__struct_fields__:
        if (value := getattr(given, name)) is not None:
            values[name], sources[name] = value, "user"
        elif name in offered:
            values[name], sources[name] = offered[name]
        elif name in DEFAULTS:
            values[name], sources[name] = DEFAULTS[name], "default"
    options = CacheOptions(**values)
    _check_context(model, options)
    _check_speculation(given)
    _check_plugin_options(options, registry)
    return ResolvedOptions(values=options, sources=sources), decisions


def _check_context(model: ModelSpec, options: CacheOptions) -> None:
    asked = options.context_length
    if asked is not None and asked > model.context_length and not options.allow_longer_context:
        raise PlanError(
            f"context_length={asked} is above the model's {model.context_length}; "
            f"give at most {model.context_length}, or allow_longer_context=true"
        )


def _check_speculation(given: CacheOptions) -> None:
    alone = [
        name
        for name in ("speculative_num_steps", "speculative_topk", "speculative_num_draft_tokens", "draft")
        if getattr(given, name) is not None
    ]
    if alone and given.speculative_algorithm is None:
        raise PlanError(f"{', '.join(alone)} without speculative_algorithm has no effect; give one, for example EAGLE")


def _check_plugin_options(options: CacheOptions, registry: Registry) -> None:
    known = [member.name for member in registry.members]
    for name in options.plugin_options or {}:
        if name not in known:
            raise PlanError(f"plugin_options names {name!r}, which is not loaded{nearest(name, known)}")


class _Builder:
    """Asks hook after hook for one plan and keeps the decisions."""

    def __init__(
        self,
        models: tuple[ModelSpec, ...],
        device: DeviceInfo,
        options: CacheOptions,
        parallel: Parallelism,
        registry: Registry,
    ) -> None:
        self.models = models
        self.options = options
        self.registry = registry
        self.prefer = options.prefer or ()
        self.base = Query(model=models[0], options=options, parallel=parallel, device=device)
        self.decisions: list[Decision] = []

    def query(self, query_type: type[Any], worker: str = TARGET, **fields: Any) -> Any:
        """Return a query of a worker with the fields that all queries hold."""
        base = self.base
        return query_type(
            model=self.models[self.workers().index(worker)],
            options=base.options,
            parallel=base.parallel,
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
        for worker, model in zip(self.workers(), self.models, strict=True):
            parallel = self.base.parallel
            own = parallel.stage_layers(len(model.layers)) if worker == TARGET else range(len(model.layers))
            if worker != TARGET and parallel.pp_rank != parallel.pp_size - 1:
                continue
            layers = tuple((layer_id, model.layers[layer_id]) for layer_id in own)
            query = self.query(GroupQuery, worker, layers=layers, target=self.models[0])
            found, decision = resolve.layer_groups(self.registry, query, self.prefer)
            self.decisions.append(decision)
            groups += [_own(group, worker) for group in found]
        _refuse_twins("layer group", [group.name for group in groups])
        return tuple(groups)

    def declare_spaces(self, groups: tuple[LayerGroup, ...]) -> dict[str, Space]:
        """Ask for the spaces, once for all workers."""
        spaces, decisions = resolve.spaces(self.registry, self.query(StateQuery, groups=groups), self.prefer)
        self.decisions += decisions
        for group in groups:
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
        return PoolChoice(name=name, plugin=decision.plugin, query=query, cls=cls, buffers=buffers)

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


def _read_options(outline: Outline) -> frozenset[str]:
    """Return the options that something in this plan reads."""
    read = set(PLANNER_OPTIONS | ENGINE_FACTS | FEATURE_OPTIONS)
    for space in outline.spaces.values():
        read.update(space.options)
    for choice in outline.choices:
        read |= choice.cls.options
    windows = any(layer.window_tokens is not None for model in outline.models for layer in model.layers)
    if windows or outline.given.hybrid_swa == "off":
        read.add("hybrid_swa")  # where no layer has a window, full KV for every layer is what there is
    return frozenset(read)


def _refuse_unread(outline: Outline) -> None:
    """Refuse options that the user gave and that nothing in this plan reads."""
    read = _read_options(outline)
    unread = [
        f"{name}={getattr(outline.given, name)!r}"
        for name in CacheOptions.__struct_fields__
        if getattr(outline.given, name) not in (None, DEFAULTS.get(name)) and name not in read
    ]
    if unread:
        raise PlanError(
            f"nothing in this plan reads {', '.join(unread)}: {outline.model.name} on {outline.device.name} "
            f"has no part that the option shapes; leave it out"
        )


def _collect_objections(outline: Outline, builder: _Builder) -> None:
    objections: list[tuple[str, str]] = []
    for worker in builder.workers():
        pools = {choice.name: choice.cls for choice in outline.pools if choice.worker == worker}
        own = tuple(group for group in outline.groups if group.worker == worker)
        query = builder.query(PlanQuery, worker, groups=own, spaces=outline.spaces, pools=pools)
        objections += resolve.objections(outline.registry, "validate_plan", query)
        if outline.options.values.prefill_only_disable_kv_cache:
            objections += resolve.objections(outline.registry, "validate_prefill_only", query)
    if objections:
        lines = "\n".join(f"  {plugin}: {reason}" for plugin, reason in objections)
        raise UnsupportedCombination(f"this combination of model, device and options is refused:\n{lines}", objections)
