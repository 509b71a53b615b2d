"""Rows, index keys and states of DeepSeek V4 as AMD's kernels read them; what slides lies by request row and position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec
from kvdock.errors import SlotError
from kvdock.layout import FULL, Buffer
from kvdock.planned import Parts
from kvdock.pools.base import BufferInfo
from kvdock.pools.grouped import check_kv_dtype, group_of
from kvdock.queries import PoolQuery
from kvdock_dsv4.geometry import C128, RATIO_OF, compressed_slot, request_state_slot
from kvdock_dsv4.model import params_of
from kvdock_dsv4.pools.index import IndexPool
from kvdock_dsv4.pools.packed import COMPRESSED
from kvdock_dsv4.pools.placed import PlacedPool, whole_rows
from kvdock_dsv4.pools.states import CompressStatePool

from kvdock_rocm.pools import NativeFloats
from kvdock_rocm.rules import INDEXER_PAGE_STEP

if TYPE_CHECKING:
    import torch
    from kvdock.testing.kinds import Kind

KV, LATENT = "kv", "latent"


class RocmRowsPool(PlacedPool):
    """One buffer a layer: a ring of sliding rows for each request row, then the layer's compressed rows, if it has some.

    Keys and values are one row for all heads. Ring 0 is that of the padding row, and the first page of compressed rows
    that of padding tokens. Slots are rows of the buffer: ``row · ring + position % ring`` of sliding ones, and
    ``first_compressed + slot // ratio`` of compressed ones; `RocmDSV4Pool` finds both. A ring keeps what its row wrote
    last; nothing is cleared when a row is handed out.
    """

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        params = params_of(self.group.layers)
        self.ring = query.space.page_size
        self.nope_dim, self.ratio = params.nope_dim, params.compress_ratio
        # A page of one row: rings and pages of compressed rows are of different lengths.
        self._rows = {i: parts.tensors.rows(KV, i).unsqueeze(1) for i in self.group.layer_ids}
        self._page = compressed_page(query, self.ratio)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the rows ``[1, columns]``; the padding row's ring and a page of compressed rows are padding.

        Raises:
            PlanError: rows of different widths, or a type that cannot hold them.
        """
        group = group_of(query)
        params = params_of(group.layers)
        return (
            Buffer(
                name=KV,
                role=LATENT,
                space=group.space,
                shape=(1, params.row_dim),
                dtype=check_kv_dtype(query),
                layers=group.layer_ids,
                guard=query.space.page_size + compressed_page(query, params.compress_ratio),
                worker=query.worker,
                is_kv=True,
            ),
        )

    @property
    def row_count(self) -> int:
        """Rows of a layer's buffer."""
        return next(iter(self._rows.values())).shape[0]

    @property
    def first_compressed(self) -> int:
        """Where the compressed rows begin, behind the last ring: they end with the buffer."""
        return self.row_count - self._pages * self._page

    @property
    def _pages(self) -> int:
        """Pages of compressed rows, that of padding included: one for each page of tokens."""
        return self.parts.sizes[FULL] // self.query.spaces[FULL].page_size + 1

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return all rows of a layer ``[rows, 1, 1, columns]``, rings first."""
        return self._rows[self.owner_for_read(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return what `get_key_buffer` does: values are the keys."""
        return self.get_key_buffer(layer_id)

    def get_ring_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the rings of a layer by request row, as a view ``[request rows, ring, 1, columns]``."""
        rows = self.get_key_buffer(layer_id)[: self.first_compressed, 0]
        return rows.view(-1, self.ring, *rows.shape[1:])

    def get_compressed_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the compressed rows of a layer by page of tokens, as a view ``[pages, rows of a page, 1, columns]``.

        Raises:
            SlotError: its layers compress nothing.
        """
        if not self.ratio:
            raise SlotError(f"layer {layer_id} of compress ratio 0 keeps no compressed rows")
        rows = self.get_key_buffer(layer_id)[self.first_compressed :, 0]
        return rows.view(-1, self._page, *rows.shape[1:])

    def get_raw_kv_buffer(self, layer_id: int) -> dict[str, torch.Tensor]:
        """Return the rows of a layer as they lie: ``kv`` ``[rows, 1, columns]``."""
        return {KV: self.get_key_buffer(layer_id).squeeze(1)}

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write rows `k` ``[n, 1, columns]`` to the rows `loc` of the buffer; `v` and scales are not read.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        rows = self.owned_for_write(self._rows, layer_id)
        self.check_write(layer_id, rows, loc, k)
        self.parts.kernels.store(rows, self.row_slots(loc), self.codec.encode(k))

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Write columns without ``[n, 1, nope_dim]`` and with a position ``[n, 1, rope_dim]`` to the rows `loc`.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        rows, encode = self.owned_for_write(self._rows, layer_id), self.codec.encode
        self.check_write(layer_id, rows[..., self.nope_dim :], loc, cache_k_rope)
        self.check_write(layer_id, rows[..., : self.nope_dim], loc, cache_k_nope)
        self.parts.kernels.store_mla(rows, self.row_slots(loc), encode(cache_k_nope), encode(cache_k_rope))

    def get_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of both parts of the rows at `loc`, in `dst_dtype` (default: the model's)."""
        rows, _ = self.read_kv(layer_id, loc, dtype=dst_dtype)
        return rows[..., : self.nope_dim], rows[..., self.nope_dim :]

    def slots_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return every row of the rings of request rows, ring by ring."""
        import torch

        offsets = torch.arange(self.ring, dtype=torch.int64, device=rows.device)
        return request_state_slot(rows.to(torch.int64).unsqueeze(-1), offsets, self.ring).flatten()

    def get_request_copy(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return host copies of the rings of the request rows `rows`, one tensor a layer.

        Raises:
            SlotError: a row does not exist, or is given twice; with debug, it is nobody's.
        """
        return self.get_cpu_copy(self._slots_of(rows))

    def load_request_copy(self, copies: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Write what `get_request_copy` returned to the rings of the request rows `rows`; bit-identical.

        Raises:
            SlotError: the copies are of another pool or for another number of rows, or as `get_request_copy`; nothing is
                written.
        """
        self.load_cpu_copy(copies, self._slots_of(rows))

    def verify_request_copy(self, copies: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Raise what `load_request_copy` would raise, and change nothing."""
        self.verify_copies(copies, self._slots_of(rows))

    def _slots_of(self, rows: torch.Tensor) -> torch.Tensor:
        return self.slots_of_rows(whole_rows(rows, self.first_compressed // self.ring))

    def slot_views(self) -> list[torch.Tensor]:
        """Return the rows of each layer, ``[rows, 1, 1, columns]``."""
        return list(self._rows.values())

    def buffer_infos(self) -> list[BufferInfo]:
        """Describe the compressed rows layer by layer; an item is what a page of ``full`` has of them."""
        if not self.ratio:
            return []
        return [self._described(i, self.get_compressed_buffer(i), COMPRESSED, FULL) for i in self.group.layer_ids]

    def state_infos(self) -> list[BufferInfo]:
        """Describe the rings layer by layer; an item is the ring of a request row."""
        space = self.query.space.name
        return [self._described(i, self.get_ring_buffer(i), LATENT, space) for i in self.group.layer_ids]

    def driven(self) -> Kind:
        """Return what a run writes and reads here (`kvdock run`)."""
        from kvdock_rocm.dsv4 import trace

        return trace.rows_kind(self)

    def _described(self, layer_id: int, items: torch.Tensor, role: str, space: str) -> BufferInfo:
        item_nbytes = items[0].numel() * items.element_size()
        return BufferInfo(
            name=KV,
            role=role,
            layer_id=layer_id,
            pointer=items.data_ptr(),
            nbytes=items.shape[0] * item_nbytes,
            item_nbytes=item_nbytes,
            stride_nbytes=items.stride(0) * items.element_size(),
            space=space,
        )

    def _check_loc(self, layer_id: int | None, loc: torch.Tensor) -> None:
        """With debug, verify that rows exist, and rings are somebody's; compressed rows are of one numbering with them."""
        if not self.parts.debug or loc.device.type == "meta":
            return
        outside = loc[(loc < -1) | (loc >= self.row_count)]
        if outside.numel():
            raise SlotError(
                f"group {self.group.name!r}: row {int(outside[0])} is outside 0 … {self.row_count - 1}; "
                "nothing was written"
            )
        self.check_requests(loc[(loc >= 0) & (loc < self.first_compressed)] // self.ring)


class RocmIndexPool(NativeFloats, IndexPool):
    """8-bit keys in the encoding of the device, with a float32 scale each."""

    features: ClassVar[frozenset[str]] = frozenset()
    kernel_page_slots: ClassVar[int] = INDEXER_PAGE_STEP


class RocmStatePool(CompressStatePool):
    """States in the ring of their request's row, at ``row · ring + position % ring``; row 0 is padding.

    Those of ratio 128 are all the empty state at first, of the others the last row alone is. A ring that is handed out again
    still holds what its last request wrote: `DSV4Pool.request_state_mask` says which states are a request's own.
    """

    features: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the states: the ring of the padding row, one beside it, and the empty state are more than slots.

        Raises:
            PlanError: a type that cannot hold states, or layers of another family.
        """
        (states,) = super().buffers(query)
        return (msgspec.structs.replace(states, guard=2 * query.space.page_size + 1),)

    def driven(self) -> Kind:
        """Return what a run writes and reads here (`kvdock run`)."""
        from kvdock_rocm.dsv4 import trace

        return trace.states_kind(self)

    def _fill_empty(self) -> None:
        if self.ratio != RATIO_OF[C128]:
            super()._fill_empty()
            return
        for states in self._states.values():
            states[:] = self._empty(states)


def compressed_page(query: PoolQuery, ratio: int) -> int:
    """Return the compressed rows of a page of tokens; 0 for a layer that compresses nothing."""
    return compressed_slot(query.spaces[FULL].page_size, ratio) if ratio else 0
