"""The pool of prefill-only work: attention runs without a cache, and nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvdock import dtypes
from kvdock.errors import SlotError
from kvdock.layout import Buffer
from kvdock.planned import Parts
from kvdock.pools.base import BufferInfo, Pool
from kvdock.pools.grouped import check_kv_dtype, group_of
from kvdock.pools.mha import common_params
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch


class NoOpPool(Pool):
    """Keeps no KV: slots are handed out and rows written as ever, but keys and values go nowhere.

    `get_key_buffer` and `get_value_buffer` return a placeholder ``[1, page_size, heads, dim]`` over one element, for
    code that asks for shape and type. What is written is dropped; in debug mode a write raises, since with
    the cache off nothing should write. There is nothing to move, to copy or to transfer.
    """

    features: ClassVar[frozenset[str]] = frozenset({"no_kv", "fp8"})
    options: ClassVar[frozenset[str]] = frozenset({"prefill_only_disable_kv_cache"})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        group, params = group_of(query), common_params(query)
        self._readable = frozenset((*group.layer_ids, *(reader for reader, _ in group.shared)))
        heads = query.parallel.kv_heads_per_rank(params.num_kv_heads)
        element = parts.tensors.rows("placeholder")
        shape = (1, query.space.page_size, heads)
        self._key = element.expand(*shape, params.head_dim)
        self._value = element.expand(*shape, params.v_head_dim)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare one element, whatever the layers and the tokens.

        Raises:
            PlanError: layers of different shapes, heads that do not split over the ranks, or a data type
                that cannot hold keys and values.
        """
        query.parallel.kv_heads_per_rank(common_params(query).num_kv_heads)
        dtype = dtypes.find(check_kv_dtype(query)).storage
        return (Buffer(name="placeholder", role="placeholder", shape=(1,), dtype=dtype, worker=query.worker),)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers of the group, ascending."""
        return tuple(sorted(self._readable))

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the placeholder for keys; it holds no value of any slot."""
        return self._of_layer(layer_id, self._key)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the placeholder for values; it holds no value of any slot."""
        return self._of_layer(layer_id, self._value)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Drop what is written.

        Raises:
            SlotError: the layer is not of this pool; with debug, always.
        """
        self._of_layer(layer_id, self._key)
        if self.parts.debug:
            raise SlotError(
                f"layer {layer_id}: KV is written although prefill_only_disable_kv_cache keeps none; run an attention "
                "backend that works without the cache, or plan without the option"
            )

    def read_kv(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse: there are no values to read.

        Raises:
            SlotError: always.
        """
        raise SlotError(f"layer {layer_id}: prefill_only_disable_kv_cache keeps no KV, so there is none to read")

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Move nothing.

        Raises:
            SlotError: another number of targets than of sources.
        """
        if tgt_loc.shape != src_loc.shape:
            raise SlotError(f"{tgt_loc.numel()} target slots for {src_loc.numel()} source slots; nothing was moved")

    def get_cpu_copy(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Return no tensor: a slot owns nothing."""
        return []

    def load_cpu_copy(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Load what `get_cpu_copy` returned: nothing.

        Raises:
            SlotError: there are copies, which must be of another pool.
        """
        self.verify_copies(copies, indices)

    def buffer_infos(self) -> list[BufferInfo]:
        """Return none: there is nothing to transfer."""
        return []

    def clear(self) -> None:
        """Do nothing: nothing is kept."""

    def storages(self) -> list[torch.Tensor]:
        """Return the tensor of the placeholder."""
        return self.parts.tensors.storages()

    def _of_layer(self, layer_id: int, placeholder: torch.Tensor) -> torch.Tensor:
        if layer_id not in self._readable:
            raise self.refuse_layer(layer_id)
        return placeholder
