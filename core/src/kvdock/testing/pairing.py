"""Whether two sides of a transfer can tell what a cache keeps apart: in its plan, and in what its pools describe."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvdock.compat import compatible, layout_fingerprint
from kvdock.errors import KVDockError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock.cache import KVCache
    from kvdock.planner import CachePlan
    from kvdock.pools.base import Pool

_ADVICE = (
    "a transfer engine pairs both sides by these, never by places in a list; give each Buffer of a layer a role or a name "
    "of its own, in all groups that the layer is in"
)


def without_fingerprint(plan: CachePlan) -> str:
    """Return why a plan cannot be compared with the other side of a transfer, or with itself; empty if it can."""
    try:
        layout_fingerprint(plan)
        found = compatible(plan, plan)
    except KVDockError as error:
        return f"the plan has no layout_fingerprint: {error}; {_ADVICE}"
    return f"the plan is not compatible with itself: {found}" if found else ""


def described_alike(pools: Iterable[Pool]) -> str:
    """Return which tensors a pool describes by one name, role and layer; empty if it tells all of them apart."""
    for pool in pools:
        infos = (*pool.buffer_infos(), *pool.state_infos())
        counts = Counter((info.name, info.role, info.layer_id) for info in infos)
        if alike := [key for key, count in counts.items() if count > 1]:
            return (
                f"{type(pool).__name__} describes {len(infos)} tensors by {len(counts)} names, roles and layers; more than "
                f"one is {', '.join(map(str, alike[:4]))}: {_ADVICE}"
            )
    return ""


def seen_pools(cache: KVCache) -> tuple[Pool, ...]:
    """Return the pools that an engine sees, of the target and of each draft."""
    target = (cache.token_to_kv_pool,) if cache.pools else ()
    return (*target, *cache.drafts.values())
