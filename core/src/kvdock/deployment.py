"""All ranks of a deployment in one process: one plan each, agreed, and what they add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvdock.checked import show
from kvdock.device import DeviceInfo
from kvdock.edge import Model, Start
from kvdock.errors import PlanError
from kvdock.fitting import Agreement
from kvdock.options import CacheOptions, Parallelism, make_options, make_parallelism
from kvdock.planner import CachePlan
from kvdock.plugins.loading import Registry
from kvdock.ranks import agree_here


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The plans of all ranks of one replica: equal numbers of tokens, requests and slots, each its own buffers.

    `plans` holds a plan for each rank, stage by stage and within a stage in the order of its tensor-parallel ranks;
    ranks with the same layers and the same memory share one.
    """

    plans: tuple[CachePlan, ...]
    parallel: Parallelism

    @property
    def agreement(self) -> Agreement:
        """What the ranks agreed on, as rank 0 tells it."""
        return self.plans[0].agreement

    @property
    def binding(self) -> CachePlan:
        """The plan of the rank that limits all others."""
        return self.plans[self.agreement.binding_rank]

    @property
    def workers(self) -> int:
        """Schedulers with a cache of their own: replicas, or the workers of DP attention."""
        return self.parallel.dp_size

    @property
    def replicas(self) -> int:
        """Copies of all ranks: one for each worker, or a single one whose ranks the workers of DP attention share."""
        return self.parallel.dp_size // self.parallel.attn_dp_size

    @property
    def max_total_num_tokens(self) -> int:
        """Tokens that all workers hold together."""
        return self.plans[0].max_total_num_tokens * self.workers

    @property
    def max_running_requests(self) -> int:
        """Requests that all workers run at once."""
        return self.plans[0].max_running_requests * self.workers

    @property
    def total_bytes(self) -> int:
        """Device bytes of one replica, all its ranks together."""
        return sum(plan.total_bytes for plan in self.plans)

    @property
    def unused_bytes(self) -> tuple[int, ...]:
        """Bytes of its budget that each rank leaves, for want of memory or layers elsewhere."""
        return tuple(plan.unused_bytes for plan in self.plans)


def plan_ranks(
    model: Model,
    *,
    device: str | DeviceInfo | Sequence[str | DeviceInfo] | None = None,
    options: CacheOptions | Mapping[str, Any] | None = None,
    parallel: Parallelism | Mapping[str, Any] | None = None,
    budget_bytes: int | Sequence[int] | None = None,
    weights_bytes: int | Sequence[int] | None = None,
    reserve_bytes: int | Sequence[int] | None = None,
    registry: Registry | None = None,
) -> Deployment:
    """Plan every rank of a deployment; all of them number the same tokens, requests and slots.

    A replica has ``pp_size · tp_size`` ranks, stage by stage. `device`, `budget_bytes`, `weights_bytes` and
    `reserve_bytes` are as in `kvdock.plan`, one for all ranks or a list with one for each.

    Raises:
        KVDockError: one rank cannot be served; the message names it and what would work.
        PlanError: a list has another length than there are ranks, or `parallel` names one rank.
    """
    sizes, chosen = make_parallelism(parallel), make_options(options)
    if sizes.pp_rank or sizes.cp_rank or sizes.dcp_rank:
        raise PlanError(
            f"pp_rank={sizes.pp_rank}, cp_rank={sizes.cp_rank}, dcp_rank={sizes.dcp_rank}: all ranks are planned, so none "
            "is named; leave them out"
        )
    ranks = sizes.pp_size * sizes.tp_size
    given = {"budget_bytes": budget_bytes, "weights_bytes": weights_bytes, "reserve_bytes": reserve_bytes}
    per_rank = {name: _for_each(name, value, ranks) for name, value in given.items()}
    devices = _for_each("device", device, ranks)
    starts = [
        Start(
            model=model,
            device=devices[rank],
            options=chosen,
            parallel=place_of(sizes, rank),
            registry=registry,
            **{name: values[rank] for name, values in per_rank.items()},
        )
        for rank in range(ranks)
    ]
    return Deployment(plans=_agreed(starts), parallel=sizes)


def place_of(parallel: Parallelism, rank: int) -> Parallelism:
    """Return the parallel sizes with the place of a rank: stages in order, context shards within a stage.

    Neighbours among the attention ranks of a shard share the tokens (`dcp_size` of them).
    """
    stage, within = divmod(rank, parallel.tp_size)
    shard, attention = divmod(within, parallel.attn_tp_size)
    return msgspec.structs.replace(
        parallel, pp_rank=stage, cp_rank=shard % parallel.cp_size, dcp_rank=attention % parallel.dcp_size
    )


def _for_each(name: str, value: Any, ranks: int) -> Sequence[Any]:
    """Return one value for each rank."""
    if not isinstance(value, list | tuple):
        return [value] * ranks
    if len(value) != ranks:
        raise PlanError(
            f"{name} lists {len(value)} values, but the deployment has {ranks} ranks (pp_size · tp_size); "
            f"give one for each, or one for all: {show(value)}"
        )
    return value


def _agreed(starts: Sequence[Start]) -> tuple[CachePlan, ...]:
    """Return the plan of each rank; ranks that plan with the same inputs are planned once."""
    first: dict[str, int] = {}
    home = [first.setdefault(start.own(), rank) for rank, start in enumerate(starts)]
    planned = sorted(first.values())
    plans = agree_here([starts[rank](rank, len(starts)) for rank in planned], planned)
    by_rank = dict(zip(planned, plans, strict=True))
    return tuple(_as_rank(by_rank[first], rank) for rank, first in enumerate(home))


def _as_rank(plan: CachePlan, rank: int) -> CachePlan:
    """Return a plan as another rank with the same inputs makes it."""
    return msgspec.structs.replace(plan, agreement=msgspec.structs.replace(plan.agreement, rank=rank))
