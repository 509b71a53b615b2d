"""The first calls of a cache, made while it is built: what they compile and load is there when a request comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from kvdock.allocators.base import Allocator
    from kvdock.cache import KVCache
    from kvdock.pools.base import Pool

WRITTEN = frozenset({"mha", "mla", "dsa"})
"""Kinds whose pools are written token by token."""


def warm_up(cache: KVCache) -> None:
    """Run a request of one token, and one more, from its admission to its release; the cache is empty and zero afterwards.

    What does not fit into a cache that is smaller than that is left out.
    """
    request = object()
    taken = cache.admit(request, 1)
    if taken is None:
        return
    cache.prepare_states()
    for pool in cache.pools.values():
        _use(pool, _slot_of(pool, cache, taken))
    if cache.plan.outline.allocators:
        _decode(cache, request, taken)
    cache.release(request)
    if cache.plan.outline.allocators:
        _free_slots(cache.token_to_kv_pool_allocator)
    cache.clear()


def _slot_of(pool: Pool, cache: KVCache, taken: torch.Tensor) -> torch.Tensor:
    """Return the slot that was taken, or padding for a pool whose slots are numbered otherwise."""
    group = pool.query.group
    is_numbered = group is not None and group.space == cache.plan.outline.numbering
    device = cache.req_to_token_pool.req_to_token.device
    return taken if is_numbered else taken.new_zeros(1, device=device)


def _use(pool: Pool, slot: torch.Tensor) -> None:
    """Move, copy and write one slot in each layer."""
    pool.move_kv_cache(slot, slot)
    pool.load_cpu_copy(pool.get_cpu_copy(slot), slot)
    # A layer split reads from other ranks, which may be at something else; without KV there is nothing to read.
    if pool.query.kind not in WRITTEN or {"layer_split", "no_kv"} & pool.features:
        return
    for layer_id in pool.query.group.layer_ids if pool.query.group else ():
        pool.set_kv_buffer(layer_id, slot, *pool.read_kv(layer_id, slot))


def _decode(cache: KVCache, request: object, last: torch.Tensor) -> None:
    table, row = cache.req_to_token_pool, cache.req_to_token_pool.row_of(request)
    slots = cache.token_to_kv_pool_allocator.alloc_decode(last.new_full((1,), 2), [2], last, owners=[request])
    if row is not None and slots is not None:
        table.write([row], [1], [2], slots)


def _free_slots(allocator: Allocator) -> None:
    """Free slots as such: what finds their pages is another kernel than that which reads a request's row."""
    slots = allocator.alloc(allocator.page_size)
    if slots is not None:
        allocator.free(slots)
