"""Choices side by side: the fewest ranks that serve, variants of a plan in columns, the ranks of a deployment in rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvdock.checked import show
from kvdock.deployment import Deployment, plan_ranks
from kvdock.device import DeviceInfo
from kvdock.edge import Model, plan
from kvdock.errors import KVDockError, PlanError, nearest, one_line, printable
from kvdock.explain import window_policy
from kvdock.limits import Limit
from kvdock.model import ModelSpec
from kvdock.options import CacheOptions, Parallelism, make_options, make_parallelism
from kvdock.planner import CachePlan
from kvdock.plugins.loading import Registry
from kvdock.remedies import check_count, obstacles

TP_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sizes that are tried for the fewest ranks."""
PLACES = ("device", "budget_bytes", "weights_bytes", "reserve_bytes")


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor-parallel size that was tried: whether it serves, and why not. Numbers are ``None`` without a plan.

    Tokens and requests are those of all workers together; bytes are those of the rank that binds.
    """

    tp_size: int
    serves: bool
    reason: str = ""
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    kv_bytes_per_token: int | float | None = None
    budget_bytes: int | None = None
    weights_bytes: int | None = None


class SmallestTP(msgspec.Struct, frozen=True, kw_only=True, tag_field="question", tag="smallest_tp"):
    """The smallest tp_size that serves (``None``: none of those tried), and every size that was tried.

    With `length` it serves `requests` requests of that many tokens at once, else `tokens` tokens.
    """

    tp_size: int | None
    requests: int | None
    length: int | None
    tokens: int | None
    workers: int
    trials: tuple[Trial, ...]
    note: str = ""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One column of a comparison: the input that is changed, its value, and what the plan holds, or why there is none.

    Bytes are those of the rank that is planned; tokens and requests those of its worker. `limits` say what binds them.
    """

    name: str
    value: Any
    reason: str = ""
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    max_request_tokens: int | None = None
    kv_bytes_per_token: int | float | None = None
    bookkeeping_bytes_per_token: int | float | None = None
    weights_bytes: int | None = None
    budget_bytes: int | None = None
    kv_bytes: int | None = None
    bookkeeping_bytes: int | None = None
    unused_bytes: int | None = None
    host_bytes: int | None = None
    limits: tuple[Limit, ...] = ()
    windows: str | None = None
    warnings: tuple[str, ...] = ()


class Comparison(msgspec.Struct, frozen=True, kw_only=True, tag_field="question", tag="compare"):
    """Plans side by side, a variant each; all inputs but the variant's own are the same."""

    model: str
    variants: tuple[Variant, ...]
    note: str = ""


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a deployment: its stage, its layers by group, its memory, and whether it limits the others.

    `own_tokens` is what it would hold alone, `tokens` what all agreed on; both are slots of this rank.
    """

    rank: int
    stage: int
    device: str
    layers: dict[str, tuple[int, ...]]
    budget_bytes: int
    planned_bytes: int
    unused_bytes: int
    own_tokens: int
    tokens: int
    binds: bool


class RankTable(msgspec.Struct, frozen=True, kw_only=True, tag_field="question", tag="ranks"):
    """Every rank of one replica, and what the deployment holds over all its workers.

    Tokens and requests are those of all `workers`, bytes those of one of `replicas` replicas; `limits` are those of the
    rank that binds, on its own worker.
    """

    ranks: tuple[RankRow, ...]
    binding_rank: int
    workers: int
    replicas: int
    max_total_num_tokens: int
    max_running_requests: int
    max_request_tokens: int
    total_bytes: int
    unused_bytes: int
    limits: tuple[Limit, ...]
    warnings: tuple[str, ...]


def survey(deployment: Deployment) -> RankTable:
    """Return every rank of a deployment as a row, with totals over all workers.

    Raises:
        PlanError: `deployment` is none.
    """
    if not isinstance(deployment, Deployment):
        raise PlanError(f"{type(deployment).__name__} is no deployment; give what kvdock.plan_ranks returned")
    plans = deployment.plans
    return RankTable(
        ranks=tuple(map(_row, plans)),
        binding_rank=deployment.agreement.binding_rank,
        workers=deployment.workers,
        replicas=deployment.replicas,
        max_total_num_tokens=deployment.max_total_num_tokens,
        max_running_requests=deployment.max_running_requests,
        max_request_tokens=plans[0].max_request_tokens,
        total_bytes=deployment.total_bytes,
        unused_bytes=sum(deployment.unused_bytes),
        limits=deployment.binding.limits,
        warnings=tuple(dict.fromkeys(warning for made in plans for warning in made.warnings)),
    )


def _row(made: CachePlan) -> RankRow:
    agreed = made.agreement
    return RankRow(
        rank=agreed.rank,
        stage=made.parallel.pp_rank,
        device=made.device.name,
        layers={group.name: group.layers for group in made.groups},
        budget_bytes=made.budget_bytes,
        planned_bytes=made.total_bytes,
        unused_bytes=made.unused_bytes,
        own_tokens=agreed.own_tokens,
        tokens=agreed.tokens,
        binds=agreed.own_tokens == agreed.tokens,
    )


class _Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made of; fields as in `kvdock.plan`."""

    model: Any
    device: Any
    options: CacheOptions
    parallel: Parallelism
    budget_bytes: Any
    weights_bytes: Any
    reserve_bytes: Any
    registry: Any

    def changed(self, name: str, value: Any) -> _Inputs:
        """Return these inputs with one of them changed; stated weights shrink as the ranks that share them grow.

        Raises:
            PlanError: the value does not fit.
        """
        if name in PLACES:
            return msgspec.structs.replace(self, **{name: value})
        if name in CacheOptions.__struct_fields__:
            return msgspec.structs.replace(self, options=msgspec.structs.replace(self.options, **{name: value}))
        parallel = msgspec.structs.replace(self.parallel, **{name: value})
        weights = self.weights_bytes
        if isinstance(weights, int):
            ranks, before = (sizes.tp_size * sizes.pp_size for sizes in (parallel, self.parallel))
            weights = -(-weights * before // ranks)
        return msgspec.structs.replace(self, parallel=parallel, weights_bytes=weights)

    def plan(self) -> CachePlan:
        """Plan one rank."""
        return plan(**self._given())

    def plan_ranks(self) -> Deployment:
        """Plan all ranks."""
        return plan_ranks(**self._given())

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}

    def scaled_note(self, names: Sequence[str]) -> str:
        """Return a sentence on stated weights, where `names` change the ranks that share them."""
        if self.weights_bytes is None or not {"tp_size", "pp_size"} & set(names):
            return ""
        sizes = self.parallel
        return (
            f"weights_bytes={self.weights_bytes} are those of a rank at tp_size={sizes.tp_size}, "
            f"pp_size={sizes.pp_size}; at other sizes they are scaled by the ratio of the ranks"
        )


def smallest_tp(
    model: Model,
    *,
    requests: int | None = None,
    length: int | None = None,
    tokens: int | None = None,
    device: str | DeviceInfo | None = None,
    options: CacheOptions | Mapping[str, Any] | None = None,
    parallel: Parallelism | Mapping[str, Any] | None = None,
    budget_bytes: int | None = None,
    weights_bytes: int | None = None,
    reserve_bytes: int | None = None,
    registry: Registry | None = None,
) -> SmallestTP:
    """Return the smallest tp_size of 1, 2, 4 … 64 that serves `requests` requests of `length` tokens, or `tokens` tokens.

    Every rank is planned at every size. Weights come from the headers in the model folder, counted anew for each
    size; `weights_bytes` are those at the tp_size of `parallel` and scaled by the ratio.

    Raises:
        PlanError: neither question is asked, or both; a number is no count.
        KVDockError: no size can be planned, all for the same reason.
    """
    _check_question(requests, length, tokens)
    inputs = _Inputs(
        model=model,
        device=device,
        options=make_options(options),
        parallel=make_parallelism(_with_ranks(parallel)),
        budget_bytes=budget_bytes,
        weights_bytes=weights_bytes,
        reserve_bytes=reserve_bytes,
        registry=registry,
    )
    failures: list[KVDockError] = []
    trials = tuple(_until_served(_trials(inputs, requests, length, tokens, failures)))
    _refuse_all(failures, len(trials))
    return SmallestTP(
        tp_size=trials[-1].tp_size if trials[-1].serves else None,
        requests=requests,
        length=length,
        tokens=tokens,
        workers=inputs.parallel.dp_size,
        trials=trials,
        note=inputs.scaled_note(["tp_size"]),
    )


def _with_ranks(parallel: Any) -> Any:
    """Return parallel sizes with the fewest tensor-parallel ranks that the others need, where none are given."""
    if not isinstance(parallel, Mapping) or parallel.get("tp_size") is not None:
        return parallel
    workers = parallel.get("dp_size") if parallel.get("dp_attention") else 1
    shares = [size for size in (workers, parallel.get("cp_size"), parallel.get("dcp_size")) if isinstance(size, int)]
    return {**parallel, "tp_size": max(1, math.prod(shares))}


def _check_question(requests: Any, length: Any, tokens: Any) -> None:
    given = {"requests": requests, "length": length, "tokens": tokens}
    for name, value in given.items():
        if value is not None:
            check_count(name, value)
    if (requests is None) != (length is None) or (tokens is None) == (requests is None):
        told = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise PlanError(f"{told or 'nothing'} is asked for; give requests= and length=, or tokens= alone")


def _until_served(trials: Iterator[Trial]) -> Iterator[Trial]:
    for trial in trials:
        yield trial
        if trial.serves:
            return


def _refuse_all(failures: Sequence[KVDockError], tried: int) -> None:
    """Raise the reason for which nothing that was tried can be planned, if it is one: it lies with the common inputs."""
    if failures and len(failures) == tried and len({str(error) for error in failures}) == 1:
        raise failures[0]


def _trials(
    inputs: _Inputs, requests: int | None, length: int | None, tokens: int | None, failures: list[KVDockError]
) -> Iterator[Trial]:
    """Yield a trial of each size; `failures` takes the errors of those that cannot be planned."""
    for tp_size in TP_SIZES:
        try:
            made = inputs.changed("tp_size", tp_size).plan_ranks()
        except KVDockError as error:
            failures.append(error)
            yield Trial(tp_size=tp_size, serves=False, reason=one_line(str(error)))
            continue
        reasons = _lacking(made, requests, length, tokens)
        yield Trial(
            tp_size=tp_size,
            serves=not reasons,
            reason="; ".join(reasons),
            max_total_num_tokens=made.max_total_num_tokens,
            max_running_requests=made.max_running_requests,
            kv_bytes_per_token=made.binding.bytes_per_token.kv,
            budget_bytes=made.binding.budget_bytes,
            weights_bytes=made.binding.budget.weights_bytes,
        )


def _lacking(made: Deployment, requests: int | None, length: int | None, tokens: int | None) -> tuple[str, ...]:
    """Return what a deployment lacks for what is asked, once for all ranks."""
    if requests is not None and length is not None:
        each = -(-requests // made.workers)
        return tuple(dict.fromkeys(text for own in made.plans for text in obstacles(own, each, length)))
    if tokens is not None and tokens > made.max_total_num_tokens:
        return (f"{tokens:,} tokens are asked for, {made.max_total_num_tokens:,} fit",)
    return ()


def compare(
    model: Model,
    axes: Mapping[str, Sequence[Any]],
    *,
    device: str | DeviceInfo | None = None,
    options: CacheOptions | Mapping[str, Any] | None = None,
    parallel: Parallelism | Mapping[str, Any] | None = None,
    budget_bytes: int | None = None,
    weights_bytes: int | None = None,
    reserve_bytes: int | None = None,
    registry: Registry | None = None,
) -> Comparison:
    """Return plans side by side: one for each value of each axis, which changes that input and no other.

    An axis is an option, a parallel size, ``device``, ``budget_bytes``, ``weights_bytes`` or ``reserve_bytes``. A variant
    that cannot be planned has its reason in place of numbers.

    Raises:
        PlanError: no such input, or an axis without values.
        KVDockError: no variant can be planned, all for the same reason.
    """
    _check_axes(axes)
    inputs = _Inputs(
        model=model,
        device=device,
        options=make_options(options),
        parallel=make_parallelism(parallel),
        budget_bytes=budget_bytes,
        weights_bytes=weights_bytes,
        reserve_bytes=reserve_bytes,
        registry=registry,
    )
    failures: list[KVDockError] = []
    variants = tuple(_variant(inputs, name, value, failures) for name, values in axes.items() for value in values)
    _refuse_all(failures, len(variants))
    return Comparison(model=_name_of(model), variants=variants, note=inputs.scaled_note(list(axes)))


def _check_axes(axes: Mapping[str, Sequence[Any]]) -> None:
    known = (*PLACES, *CacheOptions.__struct_fields__, *Parallelism.__struct_fields__)
    if not isinstance(axes, Mapping):
        raise PlanError(f"axes={show(axes)} does not fit; give inputs with their values, as {{'page_size': [1, 16]}}")
    if not axes:
        raise PlanError("there is nothing to compare; give an axis, for example kv_cache_dtype with two values")
    for name, values in axes.items():
        if name not in known:
            raise PlanError(f"no input of a plan is called {show(name)}{nearest(str(name), known)}")
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
            raise PlanError(
                f"axes: {name}={show(values)} lists no values; give at least one, in a list, as {{'{name}': [a, b]}}"
            )


def _name_of(model: Any) -> str:
    """Return the name of a model, or where it was read from, as text that is safe to show and to encode."""
    name = model.name if isinstance(model, ModelSpec) else "" if isinstance(model, Mapping) else str(model)
    return printable(name, None)


def _variant(inputs: _Inputs, name: str, value: Any, failures: list[KVDockError]) -> Variant:
    shown = getattr(value, "name", value)  # a DeviceInfo by its name
    shown = printable(shown, None) if isinstance(shown, str) else shown
    try:
        made = inputs.changed(name, value).plan()
    except KVDockError as error:
        failures.append(error)
        return Variant(name=name, value=shown, reason=one_line(str(error)))
    kv = sum(buffer.nbytes for buffer in made.buffers if buffer.is_kv and buffer.memory == "device")
    return Variant(
        name=name,
        value=shown,
        max_total_num_tokens=made.max_total_num_tokens,
        max_running_requests=made.max_running_requests,
        max_request_tokens=made.max_request_tokens,
        kv_bytes_per_token=made.bytes_per_token.kv,
        bookkeeping_bytes_per_token=made.bytes_per_token.bookkeeping,
        weights_bytes=made.budget.weights_bytes,
        budget_bytes=made.budget_bytes,
        kv_bytes=kv,
        bookkeeping_bytes=made.total_bytes - kv,
        unused_bytes=made.unused_bytes,
        host_bytes=made.host_bytes,
        limits=made.limits,
        windows=window_policy(made),
        warnings=made.warnings,
    )
