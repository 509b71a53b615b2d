"""Sparse attention over keys and values per head: each sparse layer has an indexer beside its KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.errors import SlotError
from kvdock.planned import Parts
from kvdock.pools.indexer import IndexerPool
from kvdock.pools.routed import RoutedPool
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch


class SparsePool(RoutedPool):
    """Routes keys and values by layer, and reaches a layer's indexer by names of its own.

    All parts number slots alike, so what moves, copies or describes tokens takes KV and indexers along.
    """

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        indexers = [pool for pool in parts.pools.values() if isinstance(pool, IndexerPool)]
        self._indexer_of = {layer_id: pool for pool in indexers for layer_id in pool.layer_ids}

    @property
    def sparse_layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers that have an indexer, ascending."""
        return tuple(sorted(self._indexer_of))

    def get_index_k_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the indexer's keys of a layer ``[pages, page_size, 1, index_head_dim]``.

        Raises:
            SlotError: the layer has no indexer.
        """
        return self._indexer(layer_id).get_key_buffer(layer_id)

    def get_index_v_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the indexer's values of a layer.

        Raises:
            SlotError: the layer has no indexer, or one without values.
        """
        return self._indexer(layer_id).get_value_buffer(layer_id)

    def set_index_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_v: torch.Tensor | None = None
    ) -> None:
        """Write the indexer's keys ``[n, 1, index_head_dim]`` of the slots `loc`, and values where it keeps them.

        Raises:
            SlotError: the layer has no indexer, the shapes do not fit, or values are missing or not wanted;
                nothing is written.
        """
        self._indexer(layer_id).set_kv_buffer(layer_id, loc, index_k, index_v)

    def _indexer(self, layer_id: int) -> IndexerPool:
        found = self._indexer_of.get(layer_id)
        if found is None:
            raise SlotError(f"layer {layer_id} has no indexer; sparse are the layers {list(self.sparse_layer_ids)}")
        return found
