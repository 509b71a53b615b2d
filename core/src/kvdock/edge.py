"""Where kvdock meets the world: it reads files and the environment, finds plugins, probes a device.

Everything below is pure and takes what this module found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvdock.budget import check_bytes
from kvdock.checked import converted, show
from kvdock.device import DeviceInfo, budget_device
from kvdock.errors import PlanError
from kvdock.families.config import load_config
from kvdock.fitting import replay
from kvdock.model import ModelSpec
from kvdock.options import CacheOptions, Draft, Parallelism, drafts_of, make_options, make_parallelism
from kvdock.planner import Asked, CachePlan, PlanSteps, plan_steps
from kvdock.plugins import report, resolve
from kvdock.plugins.loading import Registry
from kvdock.plugins.report import Row
from kvdock.plugins.resolve import Decision
from kvdock.queries import ModelQuery
from kvdock.ranks import agree_over
from kvdock.startup import candidates, check_names, installed
from kvdock.weights import weights_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Model = str | os.PathLike[str] | Mapping[str, Any] | ModelSpec

KV_FREE_ALGORITHMS = frozenset({"NGRAM"})
"""Speculation that keeps no KV of its own."""


def plan(
    model: Model,
    *,
    device: str | DeviceInfo | None = None,
    options: CacheOptions | Mapping[str, Any] | None = None,
    parallel: Parallelism | Mapping[str, Any] | None = None,
    budget_bytes: int | None = None,
    weights_bytes: int | None = None,
    reserve_bytes: int | None = None,
    registry: Registry | None = None,
    group: ProcessGroup | None = None,
) -> CachePlan:
    """Plan the KV cache of a model on one rank of a deployment.

    Args:
        model: a ``config.json``, a model folder, ``hf:org/name``, a config as data, or a `ModelSpec`.
        device: a catalogue name (``"h200"``, ``"cuda:h200"``), a live device (``"cpu"``, ``"cuda:0"``), or a
            `DeviceInfo`. ``None`` plans for `budget_bytes` on any device if given, else for the one live accelerator.
        options: `CacheOptions`, or names and values.
        parallel: `Parallelism`, or names and values.
        budget_bytes: bytes for everything that kvdock allocates, instead of a share of the device's memory.
        weights_bytes: bytes that the weights take of a device's memory on this rank. ``None``: for a device that is
            not live, what the safetensors headers in the model folder say, where there are any.
        reserve_bytes: bytes of a device's memory to leave for activations and graphs, beside the slack.
        registry: plugins to ask, instead of those that are installed.
        group: the process group (``torch.distributed``) of the ranks that have to agree; every rank calls this.

    Raises:
        KVDockError: what cannot be served, and what would work.
    """

    def start(rank: int = 0, ranks: int = 1) -> PlanSteps:
        given = Start(
            model=model,
            device=device,
            options=make_options(options),
            parallel=make_parallelism(parallel),
            budget_bytes=budget_bytes,
            weights_bytes=weights_bytes,
            reserve_bytes=reserve_bytes,
            registry=registry,
        )
        return given(rank, ranks)

    return replay(start(), ()) if group is None else agree_over(group, start)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank plans with; calling it reads files, probes the device and begins to plan. Fields as in `plan`."""

    model: Any
    device: Any
    options: CacheOptions
    parallel: Parallelism
    budget_bytes: Any = None
    weights_bytes: Any = None
    reserve_bytes: Any = None
    registry: Any = None

    def __call__(self, rank: int = 0, ranks: int = 1) -> PlanSteps:
        """Begin to plan as `rank` of `ranks`."""
        budget_bytes = _whole_bytes("budget_bytes", self.budget_bytes)
        asked = Asked(
            budget_bytes=budget_bytes,
            weights_bytes=_whole_bytes("weights_bytes", self.weights_bytes),
            reserve_bytes=_whole_bytes("reserve_bytes", self.reserve_bytes),
            rank=rank,
            ranks=ranks,
        )
        _check_kinds(self.device, self.registry)
        registry = self.registry
        if registry is None:
            registry = _registry_for(self.device, self.options, budget_bytes)
        models, read_by = read_models(self.model, self.options, registry)
        info = find_device(self.device, registry, budget_bytes)
        asked = _with_weights(asked, self.model, models[0], info, self.options, self.parallel)
        made = yield from plan_steps(models, info, self.options, self.parallel, registry, asked)
        return msgspec.structs.replace(made, read_by=read_by)

    def own(self) -> str:
        """Return what may differ between the ranks of a deployment: place, device and memory."""
        return repr((self.parallel, self.device, self.budget_bytes, self.weights_bytes, self.reserve_bytes))


def _with_weights(
    asked: Asked, source: Model, model: ModelSpec, info: DeviceInfo, options: CacheOptions, parallel: Parallelism
) -> Asked:
    """Add what the weights in the model's own folder take, unless the caller says it or the device shows it."""
    is_idle = info.index is None and info.free_bytes == info.free_before_load_bytes
    if not is_idle or asked.budget_bytes is not None or asked.weights_bytes is not None:
        return asked
    found = weights_of(source, model, options, parallel)
    if found is None:
        return asked
    return msgspec.structs.replace(asked, weights_bytes=found.nbytes, weights_source=found.source)


def _whole_bytes(name: str, nbytes: Any) -> int | None:
    whole: int | None = converted(name, nbytes, int | None)
    if whole is not None:
        check_bytes(name, whole)
    return whole


def _check_kinds(device: Any, registry: Any) -> None:
    if device is not None and not isinstance(device, str | DeviceInfo):
        raise PlanError(f"device={show(device)} does not fit: give a name such as 'h200' or 'cuda:0', or a DeviceInfo")
    if registry is not None and not isinstance(registry, Registry):
        raise PlanError(f"registry={show(registry)} does not fit: give a Registry, or leave it out")


def _registry_for(device: str | DeviceInfo | None, options: CacheOptions, budget_bytes: int | None) -> Registry:
    """Import only the hardware that may matter: the plugin that the device names; none for a bare budget."""
    if isinstance(device, DeviceInfo):
        return installed(options)
    if device is None and budget_bytes is not None:
        return installed(options, hardware=set())
    names = {candidate.name for candidate in candidates() if candidate.tier == "hardware"}
    owner = (device or "").split(":", 1)[0]
    if owner in names:
        return installed(options, hardware={owner}, requested={owner})
    return installed(options, hardware=set() if owner == "cpu" else None)


def find_device(device: str | DeviceInfo | None, registry: Registry, budget_bytes: int | None = None) -> DeviceInfo:
    """Return the device that is planned for.

    Raises:
        PlanError: no device is named, and not exactly one live accelerator is found; says how to name it.
    """
    if isinstance(device, DeviceInfo):
        return device
    if device is not None:
        return resolve.find_device(registry, device)
    if budget_bytes is not None:
        return budget_device(budget_bytes)
    live = resolve.live_devices(registry)
    if len(live) == 1:
        return live[0][1]
    listed = ", ".join(f"{plugin}:{info.index or 0} is {info.name}" for plugin, info in live)
    found = f"{len(live)} accelerators are here ({listed})" if live else "no accelerator is here"
    raise PlanError(
        f"{found}; name one with device= (--device NAME; kvdock devices lists the profiles), "
        "or give the memory for the cache with budget_bytes= (--memory 40GiB)"
    )


def read_models(
    model: Model, options: CacheOptions, registry: Registry
) -> tuple[tuple[ModelSpec, ...], tuple[Decision, ...]]:
    """Return the target model and its drafts, and who read each of them."""
    if isinstance(model, ModelSpec):
        drafts = _read_drafts(None, options, registry)
        return (model, *(spec for spec, _ in drafts)), tuple(decision for _, decision in drafts)
    name, config = load_config(model)
    read = [_ask(config, options, registry, "target", name), *_read_drafts(config, options, registry)]
    return tuple(spec for spec, _ in read), tuple(decision for _, decision in read)


def _ask(
    config: Mapping[str, Any], options: CacheOptions, registry: Registry, role: str, name: str
) -> tuple[ModelSpec, Decision]:
    return resolve.read_model(registry, ModelQuery(config=config, role=role, name=name), options.prefer or ())


def _read_drafts(
    config: Mapping[str, Any] | None, options: CacheOptions, registry: Registry
) -> list[tuple[ModelSpec, Decision]]:
    """Return the models that draft: the one that is given, or the extra layers of the target's own config."""
    algorithm = options.speculative_algorithm
    if algorithm is None:
        return []
    if algorithm in KV_FREE_ALGORITHMS:
        if options.draft is not None:
            raise PlanError(
                f"speculative_algorithm={algorithm!r} drafts without a model, so draft={show(options.draft)} would not "
                "be read; leave draft out, or give another algorithm, for example EAGLE"
            )
        return []
    read: list[tuple[ModelSpec, Decision]] = []
    for draft in drafts_of(options) or (Draft(),):
        spec, decision = _read_draft(draft, config, options, registry)
        read += [(part, decision) for part in _dealt_out(spec, draft.workers)]
    return read


def _dealt_out(spec: ModelSpec, workers: int) -> list[ModelSpec]:
    """Return the models of the workers of a draft: its layers, dealt out evenly in order."""
    if workers == 1:
        return [spec]
    share, rest = divmod(len(spec.layers), workers)
    if rest or any(layer.shares_kv_with is not None for layer in spec.layers):
        raise PlanError(
            f"draft: workers={workers} cannot share the {len(spec.layers)} layers of {show(spec.name)} out evenly; give "
            "a number of workers that divides them"
        )
    parts = (spec.layers[i * share : (i + 1) * share] for i in range(workers))
    return [msgspec.structs.replace(spec, layers=layers) for layers in parts]


def _read_draft(
    draft: Draft, config: Mapping[str, Any] | None, options: CacheOptions, registry: Registry
) -> tuple[ModelSpec, Decision]:
    """Return one draft model: the one that is given, or the extra layers of the target's own config."""
    algorithm = options.speculative_algorithm
    if draft.model is not None:
        name, own = load_config(draft.model)
        return _ask(own, options, registry, "draft", name)
    advice = "give draft=path/to/config.json"
    if config is None:
        raise PlanError(f"speculative_algorithm={algorithm!r} needs a draft model; {advice}")
    try:
        return _ask(config, options, registry, "mtp", "draft layers")
    except PlanError as error:
        raise PlanError(
            f"speculative_algorithm={algorithm!r} needs a draft model, and the target's config brings none ({error}); "
            f"{advice}"
        ) from error


def plugin_rows(check: bool = False, options: CacheOptions | None = None) -> list[Row]:
    """Return one row of facts per plugin; `check` imports each and adds contract, hooks and status.

    Raises:
        PluginError: a name in the options is not installed; with `check`, a plugin that they name fails.
    """
    if check:
        return list(report.rows(candidates(), installed(options)))
    check_names(options or CacheOptions())
    return list(report.rows(candidates()))


def devices(options: CacheOptions | None = None) -> list[tuple[str, DeviceInfo]]:
    """Return every catalogue profile with the plugin that brings it, sorted by plugin and memory."""
    catalogue = resolve.catalogue(installed(options))
    pairs = [(plugin, info) for owners in catalogue.values() for plugin, info in owners]
    return sorted(pairs, key=lambda pair: (pair[0], pair[1].total_bytes, pair[1].name))
