"""Keys and values per head, a tensor of each per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvdock.layout import Buffer
from kvdock.model import MHAParams
from kvdock.planned import Parts
from kvdock.pools.grouped import GroupedPool, check_kv_dtype, common_shape, group_of
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch


class MHAPool(GroupedPool):
    """Multi-head, grouped-query and multi-query attention.

    `get_key_buffer` and `get_value_buffer` return views in the format of the cache: 8-bit floats as such,
    though their tensors hold bytes; what was divided by a scale when it was written is read undivided.
    """

    layer_pairs = True
    features: ClassVar[frozenset[str]] = frozenset({"fp8", "page_major", "unified_memory", "context_parallel", "dcp"})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self._k, self._v = self.stored("k"), self.stored("v")
        self._keys, self._values = self.readable("k"), self.readable("v")

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare K and V of each layer that owns them; page 0 is padding.

        Raises:
            PlanError: layers of different shapes, heads that do not split over the ranks, or a data type
                that cannot hold keys and values.
        """
        params = common_params(query)
        heads = query.parallel.kv_heads_per_rank(params.num_kv_heads)
        return (
            kv_buffer(query, "k", "key", (heads, params.head_dim)),
            kv_buffer(query, "v", "value", (heads, params.v_head_dim)),
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the keys of a layer."""
        self.owner_for_read(layer_id)
        return self._keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the values of a layer."""
        self.owner_for_read(layer_id)
        return self._values[layer_id]

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write keys and values of the slots `loc`; 8-bit pools store ``k / k_scale``, saturating.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        keys = self.owned_for_write(self._k, layer_id)
        values = self._v[layer_id]
        self.check_write(layer_id, values, loc, v)
        self.check_write(layer_id, keys, loc, k)
        encode = self.codec.encode
        self.parts.kernels.store_kv(keys, values, self.row_slots(loc), encode(k, k_scale), encode(v, v_scale))


def kv_buffer(query: PoolQuery, name: str, role: str, shape: tuple[int, ...], dtype: str | None = None) -> Buffer:
    """Return a buffer in the format of the cache (or `dtype`) with one tensor for each layer that owns KV.

    Of shared tokens it holds this rank's; a draft's holds them all.
    """
    group = group_of(query)
    return Buffer(
        name=name,
        role=role,
        space=group.space,
        shape=shape,
        dtype=dtype or check_kv_dtype(query),
        guard=query.space.page_size,
        widen=1 if query.shares_tokens else query.parallel.dcp_size,
        layers=group.layer_ids,
        worker=query.worker,
        is_kv=True,
    )


def common_params(query: PoolQuery) -> MHAParams:
    """Return the shape that all layers of the group have.

    Raises:
        PlanError: two layers differ, or one is no MHA layer; names them.
    """
    return common_shape(
        query,
        lambda params: params if isinstance(params, MHAParams) else None,
        lacks="not mha",
        differ="have different shapes ({0} and {1})",
    )
