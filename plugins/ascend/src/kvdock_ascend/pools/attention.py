"""Keys and values, latents and index keys: pages that follow each other, all layers in one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from kvdock.errors import SlotError
from kvdock.layout import Buffer
from kvdock.model import DSAParams
from kvdock.planned import Parts
from kvdock.pools import MHAPool
from kvdock.pools.base import Region
from kvdock.pools.grouped import GroupedPool, common_shape
from kvdock.pools.mha import kv_buffer
from kvdock.pools.mla import common_latent
from kvdock.queries import PoolQuery

from kvdock_ascend import settings
from kvdock_ascend.device import DEVICE_TYPE

if TYPE_CHECKING:
    import torch
    from kvdock.testing.kinds import Kind

KEYS, VALUES, INDEX = "k", "v", "index_k"


class StackedPool(GroupedPool):
    """A group whose buffers hold all layers one after the other: ``[layers, pages + 1, page_size, heads, dim]``."""

    device_types: ClassVar[frozenset[str] | None] = frozenset({DEVICE_TYPE})
    features: ClassVar[frozenset[str]] = frozenset({"context_parallel", "dcp"})

    def all_layers(self, name: str) -> torch.Tensor:
        """Return a buffer whole, ``[layers, pages + 1, page_size, …]``, layers in the order of the group."""
        first = self.parts.tensors.paged(name, self.group.layer_ids[0])
        shape = (len(self.group.layer_ids), *first.shape)
        return first.as_strided(shape, (first.numel(), *first.stride()))

    def transfer_buffers(self) -> list[Region]:
        """Return one region a buffer, which a transfer engine registers; `regions` are the layers inside them."""
        found = []
        for name in self.parts.tensors.names:
            whole = self.all_layers(name)
            nbytes = whole.numel() * whole.element_size()
            item_nbytes = nbytes // (whole.shape[0] * whole.shape[1])
            found.append(Region(pointer=whole.data_ptr(), nbytes=nbytes, item_nbytes=item_nbytes))
        return found


class NpuMHAPool(StackedPool, MHAPool):
    """Keys and values per head.

    Fused inference attention reads them slot by slot: then `get_key_buffer` and `get_value_buffer` return the same
    memory as ``[slots, 1, heads, dim]``.
    """

    features: ClassVar[frozenset[str]] = StackedPool.features

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare keys and values of all layers, a tensor of each; page 0 is padding."""
        return tuple(stacked(query, buffer) for buffer in super().buffers(query))

    def readable(self, name: str) -> dict[int, torch.Tensor]:
        """Return the view of a buffer that attention reads, by the id of each layer that reads one."""
        found = super().readable(name)
        if not settings.uses_fia(self.query):
            return found
        return {layer_id: view.view(-1, 1, *view.shape[2:]) for layer_id, view in found.items()}


class NpuMLAPool(StackedPool):
    """Latents and rope parts apart: `get_key_buffer` is the latent of a token, `get_value_buffer` its rope part.

    Replicated on every rank, as latents are.
    """

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.kv_lora_rank, self.qk_rope_head_dim = common_latent(query)
        self._latents, self._ropes = self.stored(KEYS), self.stored(VALUES)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare latents and rope parts of all layers, a tensor of each; page 0 is padding.

        Raises:
            PlanError: layers of different shapes, or a data type that cannot hold latents.
        """
        lora, rope = common_latent(query)
        return (
            stacked(query, kv_buffer(query, KEYS, "latent", (1, lora))),
            stacked(query, kv_buffer(query, VALUES, "rope", (1, rope))),
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the latents of a layer ``[pages, page_size, 1, kv_lora_rank]``."""
        return self._latents[self.owner_for_read(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the rope parts of a layer ``[pages, page_size, 1, qk_rope_head_dim]``."""
        return self._ropes[self.owner_for_read(layer_id)]

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write latents `k` and rope parts `v`, or whole rows `k` without `v`, of the slots `loc`; scales are not used.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        latents = self.owned_for_write(self._latents, layer_id)
        ropes, lora = self._ropes[layer_id], self.kv_lora_rank
        latent, rope = (k[..., :lora], k[..., lora:]) if v is None else (k, v)
        self.check_write(layer_id, ropes, loc, rope)
        self.check_write(layer_id, latents, loc, latent)
        encode = self.codec.encode
        self.parts.kernels.store_kv(latents, ropes, self.row_slots(loc), encode(latent), encode(rope))

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Write latents ``[n, 1, kv_lora_rank]`` and rope parts ``[n, 1, qk_rope_head_dim]`` of the slots `loc`."""
        self.set_kv_buffer(layer_id, loc, cache_k_nope, cache_k_rope)

    def get_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the latents and rope parts of the slots `loc`, in `dst_dtype` (default: as stored)."""
        return self.read_kv(layer_id, loc, dtype=dst_dtype or self.codec.format)

    def driven(self) -> Kind:
        """Return what a run writes and reads here (`kvdock run`)."""
        from kvdock_ascend import trace

        return trace.latents_kind(self)


class NpuDSAPool(NpuMLAPool):
    """Latents, rope parts and the indexer's keys, all of one type and without scales."""

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.index_head_dim = common_index_dim(query)
        self._index = self.stored(INDEX)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the index keys of all layers beside latents and rope parts; every rank keeps those of all tokens."""
        index = kv_buffer(query, INDEX, "index", (1, common_index_dim(query)))
        whole = msgspec.structs.replace(index, widen=query.parallel.dcp_size)
        return (*super().buffers(query), stacked(query, whole))

    def whole_views(self) -> list[torch.Tensor]:
        """Return the index keys of each layer, which every rank keeps of all tokens."""
        return list(self._index.values())

    def set_index_k(self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor) -> None:
        """Write the index keys ``[n, index_head_dim]`` of the slots `loc`.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        view = self.owned_for_write(self._index, layer_id)
        self.check_rows(layer_id, (self.index_head_dim,), loc, index_k)
        self.parts.kernels.store(view, loc, self.codec.encode(index_k).unsqueeze(1))

    def read_index_k(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return the index keys of the slots `loc` as float32 ``[n, index_head_dim]``."""
        import torch

        return self.parts.kernels.gather(self.get_index_k_buffer(layer_id), loc).squeeze(1).to(torch.float32)

    def get_index_k_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the index keys of a layer ``[pages, page_size, 1, index_head_dim]``."""
        return self._index[self.owner_for_read(layer_id)]

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Raise: index keys have no scales here; read `get_index_k_buffer`."""
        raise SlotError(f"layer {layer_id}: index keys have no scales on {DEVICE_TYPE}; read get_index_k_buffer")


def stacked(query: PoolQuery, buffer: Buffer) -> Buffer:
    """Return a buffer with all its layers in one tensor, which begins where transfers want it to."""
    return msgspec.structs.replace(buffer, stacked=True, base_align=settings.base_align(query))


def common_index_dim(query: PoolQuery) -> int:
    """Return the columns of an index key, which all layers of the group have.

    Raises:
        PlanError: two layers differ, or one has no indexer; names them.
    """

    def width(params: Any) -> int | None:
        return params.index_head_dim if isinstance(params, DSAParams) else None

    return common_shape(query, width, lacks="which has no indexer", differ="have index keys of different widths")
