"""One latent row per token for all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvdock.layout import Buffer
from kvdock.model import DSAParams, LayerParams, MLAParams
from kvdock.planned import Parts
from kvdock.pools.formats import read_rows
from kvdock.pools.grouped import GroupedPool, common_shape
from kvdock.pools.mha import kv_buffer
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch


class MLAPool(GroupedPool):
    """Multi-head latent attention: a row is `kv_lora_rank` latent columns, then `qk_rope_head_dim` of rope.

    The key of a slot is its whole row and its value the latent columns of the same row. The row is
    replicated on every rank: tensor parallelism does not split it.
    """

    features: ClassVar[frozenset[str]] = frozenset({"fp8", "page_major", "context_parallel", "dcp"})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.kv_lora_rank = common_latent(query)[0]
        self._kv, self._rows = self.stored("kv"), self.readable("kv")

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare one row a slot for each layer that owns one; page 0 is padding.

        Raises:
            PlanError: layers of different shapes, or a data type that cannot hold latents.
        """
        return (kv_buffer(query, "kv", "latent", (1, sum(common_latent(query)))),)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the rows of a layer ``[pages, page_size, 1, kv_lora_rank + qk_rope_head_dim]``."""
        self.owner_for_read(layer_id)
        return self._rows[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the latent columns of the same rows, as a view."""
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def read_kv(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of whole rows and, as a view of them, their latent columns; both times `k_scale`."""
        import torch

        chosen = dtype or getattr(torch, self.query.model_dtype)
        slots, kernels = self.row_slots(loc), self.parts.kernels
        rows = read_rows(kernels, self.get_key_buffer(layer_id), slots, k_scale, chosen)
        return rows, rows[..., : self.kv_lora_rank]

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write whole rows `k` ``[n, 1, kv_lora_rank + qk_rope_head_dim]``; `v` is a part of them and not read.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        view = self._owned(layer_id)
        self.check_write(layer_id, view, loc, k)
        self.parts.kernels.store(view, self.row_slots(loc), self.codec.encode(k, k_scale))

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Write latents ``[n, 1, kv_lora_rank]`` and rope parts ``[n, 1, qk_rope_head_dim]`` of the slots `loc`.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        view = self._owned(layer_id)
        self.check_write(layer_id, view[..., self.kv_lora_rank :], loc, cache_k_rope)
        self.check_write(layer_id, view[..., : self.kv_lora_rank], loc, cache_k_nope)
        encode, slots = self.codec.encode, self.row_slots(loc)
        self.parts.kernels.store_mla(view, slots, encode(cache_k_nope), encode(cache_k_rope))

    def get_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the latents and rope parts of the slots `loc`, in `dst_dtype` (default: as stored)."""
        owner = self.owner_for_read(layer_id)
        rows = self.codec.decode(self.parts.kernels.gather(self._kv[owner], self.row_slots(loc)))
        if dst_dtype is not None:
            rows = rows.to(dst_dtype)
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]

    def _owned(self, layer_id: int) -> torch.Tensor:
        return self.owned_for_write(self._kv, layer_id)


def common_latent(query: PoolQuery) -> tuple[int, int]:
    """Return `kv_lora_rank` and `qk_rope_head_dim`, which all layers of the group have.

    Raises:
        PlanError: two layers differ, or one keeps no latent; names them.
    """
    return common_shape(query, _latent, lacks="which has no latent", differ="have latents of different widths")


def _latent(params: LayerParams) -> tuple[int, int] | None:
    return (params.kv_lora_rank, params.qk_rope_head_dim) if isinstance(params, MLAParams | DSAParams) else None
