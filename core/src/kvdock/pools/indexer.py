"""What the indexers of sparse layers keep beside the layers' keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvdock.errors import SlotError
from kvdock.layout import Buffer
from kvdock.model import IndexParams
from kvdock.planned import Parts
from kvdock.pools.grouped import GroupedPool, common_shape, group_of
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch


class IndexerPool(GroupedPool):
    """One indexer head a layer: a key of `index_head_dim` a token, and a value where the layers have one.

    Kept in the model's data type whatever keys and values are kept in. `get_key_buffer` and
    `get_value_buffer` are the indexer's here; an engine reaches them by the names of `SparsePool`.
    """

    features: ClassVar[frozenset[str]] = frozenset({"page_major", "context_parallel"})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.has_values = _params(query).index_value
        self._k = self.stored("index_k")
        self._v = self.stored("index_v") if self.has_values else {}

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the keys of each layer, and the values where the layers have them.

        Raises:
            PlanError: layers of different shapes, or of another kind.
        """
        params, group = _params(query), group_of(query)
        names = ("index_k", "index_v") if params.index_value else ("index_k",)
        return tuple(
            Buffer(
                name=name,
                role="index",
                space=group.space,
                shape=(1, params.index_head_dim),
                dtype=query.model_dtype,
                guard=query.space.page_size,
                layers=group.layer_ids,
                worker=query.worker,
                is_kv=True,
            )
            for name in names
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the indexer's keys of a layer ``[pages, page_size, 1, index_head_dim]``."""
        return self._read(self._k, layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the indexer's values of a layer.

        Raises:
            SlotError: the layer's indexer keeps none.
        """
        if not self.has_values and layer_id in self._owner_of:
            raise SlotError(f"the indexer of layer {layer_id} keeps keys alone; its values are disabled by the model")
        return self._read(self._v, layer_id)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write the indexer's keys ``[n, 1, index_head_dim]``, and values where it has them, of the slots `loc`.

        Raises:
            SlotError: the layer owns no indexer here, the shapes do not fit, or values are missing or not
                wanted; nothing is written.
        """
        keys = self.owned_for_write(self._k, layer_id)
        if self.has_values != (v is not None):
            wanted = "keys and values" if self.has_values else "keys alone"
            raise SlotError(f"the indexer of layer {layer_id} keeps {wanted}; nothing was written")
        self.check_write(layer_id, keys, loc, k)
        if v is None:
            self.parts.kernels.store(keys, loc, k.to(keys.dtype))
            return
        values = self._v[layer_id]
        self.check_write(layer_id, values, loc, v)
        self.parts.kernels.store_kv(keys, values, loc, k.to(keys.dtype), v.to(values.dtype))

    def _read(self, views: dict[int, torch.Tensor], layer_id: int) -> torch.Tensor:
        return views[self.owner_for_read(layer_id)]


def _params(query: PoolQuery) -> IndexParams:
    """Return the shape that all indexers of the group have.

    Raises:
        PlanError: two differ, or a layer has none; names them.
    """
    return common_shape(
        query,
        lambda params: params if isinstance(params, IndexParams) else None,
        lacks="which has no indexer",
        differ="have indexers of different shapes",
    )
