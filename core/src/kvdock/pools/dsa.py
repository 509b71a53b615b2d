"""Sparse latent attention: a latent row per token, and the key by which an indexer finds it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from kvdock import dtypes
from kvdock.errors import PlanError
from kvdock.layout import Buffer
from kvdock.planned import Parts
from kvdock.pools.formats import read_rows
from kvdock.pools.index_keys import IndexCodec, index_buffer, recast
from kvdock.pools.mha import kv_buffer
from kvdock.pools.mla import MLAPool, common_latent
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch

RowLayout = Literal["raw", "scaled"]
SCALE_BLOCK = 128
"""Latent columns of a scaled row that share a float32 scale."""
E4M3 = frozenset({"float8_e4m3fn", "float8_e4m3fnuz"})
"""Formats that are too narrow for latents without scales."""


class DSAPool(MLAPool):
    """Latent rows and index keys. Keys of the indexer are 8 or 4 bits wide, whatever the rows are (`index_dtype`).

    A raw row is ``kv_lora_rank + qk_rope_head_dim`` columns in the format of the cache. A scaled row is bytes:
    the latent in 8 bits, a float32 scale for each 128 of its columns, then the rope part in bfloat16. Scaled
    rows are quantised where they are written and `get_mla_kv_buffer` dequantises them; `get_key_buffer`
    returns them as they are stored, and `get_value_buffer` their 8-bit latents without the scales.

    Index keys lie in pages of bytes: the keys of all its slots first, then their scales. A slot is no row of
    that buffer, but moves, copies and transfers take its key and its scales along. Every rank keeps the index keys of
    all tokens, also where ranks share the rows between them.
    """

    features: ClassVar[frozenset[str]] = frozenset({"fp8", "page_major", "context_parallel", "dcp"})
    options: ClassVar[frozenset[str]] = frozenset({"index_dtype"})
    kernel_page_tokens: ClassVar[int] = 1
    """Tokens of a page of the kernels that read index keys; a plugin whose kernels page by more says so here."""

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.qk_rope_head_dim = common_latent(query)[1]
        self.index = IndexCodec(query, parts.kernels)
        self._pages = {layer_id: parts.tensors.rows("index_k", layer_id) for layer_id in self.stored_layers}
        self._parts_of = {layer_id: self.index.split(pages) for layer_id, pages in self._pages.items()}

    @classmethod
    def row_layout(cls, query: PoolQuery) -> RowLayout:
        """Return how rows are kept: ``scaled`` in e4m3, else ``raw``; a device whose kernels want other rows overrides it."""
        return "scaled" if query.kv_dtype in E4M3 else "raw"

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare a row a slot, and a page of index keys a page, for each layer; page 0 is padding.

        Raises:
            PlanError: layers of different shapes, a data type or a width that the formats cannot hold, or pages
                that the kernels cannot read.
        """
        _check_page(query.space.page_size, cls.kernel_page_tokens)
        return row_buffer(query, cls.row_layout(query)), index_buffer(query)

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """Global ids of the layers that have tensors here."""
        return self.group.layer_ids

    @cached_property
    def is_scaled(self) -> bool:
        """Whether rows are scaled bytes."""
        return self.row_layout(self.query) == "scaled"

    def readable(self, name: str) -> dict[int, torch.Tensor]:
        """Return the paged view of a buffer by the id of each layer that reads one; scaled rows stay bytes."""
        stored = self.stored(name)
        found = {layer_id: stored[owner] for layer_id, owner in self._owner_of.items() if owner in stored}
        return found if self.is_scaled else {layer_id: self.codec.decode(view) for layer_id, view in found.items()}

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the rows of a layer ``[pages, page_size, 1, columns]``, scaled ones as the bytes that they are."""
        stored = self._rows_for_reading(layer_id)
        return stored if self.is_scaled else self.codec.decode(stored)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the latent columns of the rows, as a view; of scaled rows the 8-bit latents without their scales."""
        return self._latents(self.get_key_buffer(layer_id))

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `get_key_buffer` and the latents in it."""
        rows = self.get_key_buffer(layer_id)
        return rows, self._latents(rows)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write whole rows `k` ``[n, 1, kv_lora_rank + qk_rope_head_dim]``, or scaled rows as bytes; `v` is not read.

        Scaled rows find their own scales; `k_scale` is for raw rows of 8 bits.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        view = self._owned(layer_id)
        if self.is_scaled and k.element_size() > 1:
            lora = self.kv_lora_rank
            self.set_mla_kv_buffer(layer_id, loc, k[..., :lora], k[..., lora:])
            return
        self.check_write(layer_id, view, loc, k)
        if layer_id in self._kv:
            row = k.view(self.codec.stored) if self.is_scaled else self.codec.encode(k, k_scale)
            self.parts.kernels.store(view, self.row_slots(loc), row)

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Write latents ``[n, 1, kv_lora_rank]`` and rope parts ``[n, 1, qk_rope_head_dim]`` of the slots `loc`.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        view = self._owned(layer_id)
        self.check_write(layer_id, view[..., : self.qk_rope_head_dim], loc, cache_k_rope)
        self.check_write(layer_id, view[..., : self.kv_lora_rank], loc, cache_k_nope)
        if layer_id not in self._kv:
            return
        slots, encode = self.row_slots(loc), self.codec.encode
        if self.is_scaled:
            self.parts.kernels.store(view, slots, self._pack(cache_k_nope, cache_k_rope))
        else:
            self.parts.kernels.store_mla(view, slots, encode(cache_k_nope), encode(cache_k_rope))

    def get_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the latents and rope parts of the slots `loc`.

        In `dst_dtype`; by default raw rows as they are stored, and scaled ones in bfloat16.
        """
        stored = self.parts.kernels.gather(self._rows_for_reading(layer_id), self.row_slots(loc))
        if self.is_scaled:
            return self._unpack(stored, dst_dtype)
        rows = self.codec.decode(stored)
        rows = rows if dst_dtype is None else rows.to(dst_dtype)
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]

    def read_kv(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the rows and of their latents for the slots `loc`; scaled rows know their own scales."""
        import torch

        chosen: torch.dtype = dtype or getattr(torch, self.query.model_dtype)
        if self.is_scaled:
            latent, rope = self.get_mla_kv_buffer(layer_id, loc, chosen)
            return torch.cat([latent, rope], -1), latent
        (rows, latents), slots, kernels = self.get_kv_buffer(layer_id), self.row_slots(loc), self.parts.kernels
        return read_rows(kernels, rows, slots, k_scale, chosen), read_rows(kernels, latents, slots, v_scale, chosen)

    def get_raw_kv_buffer(self, layer_id: int) -> dict[str, torch.Tensor]:
        """Return the stored rows ``kv`` and the pages ``index_k`` of a layer."""
        return {"kv": self._rows_for_reading(layer_id), "index_k": self._pages_for_reading(layer_id)}

    def set_index_k(self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor) -> None:
        """Write the index keys ``[n, index_head_dim]`` of the slots `loc`, quantised with scales of their own.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        self._owned(layer_id)
        self.index.check_keys(layer_id, loc, index_k)
        if layer_id in self._parts_of:
            self._store_index(layer_id, loc, *self.index.encode(index_k))

    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Write index keys and scales that a kernel quantised: bytes ``[n, …]`` of the format, kept as they are.

        Raises:
            SlotError: the layer owns no buffer here, or the bytes do not fit; nothing is written.
        """
        self._owned(layer_id)
        data, scales = self.index.checked(layer_id, loc, index_k, index_k_scale)
        if layer_id in self._parts_of:
            self._store_index(layer_id, loc, data, scales)

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the pages of index keys of a layer as bytes: ``[pages, page_size · (key bytes + scale bytes)]``.

        Raises:
            SlotError: the layer has no index keys here.
        """
        return self._pages_for_reading(layer_id)

    def read_index_k(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return the index keys of the slots `loc` as float32 ``[n, index_head_dim]``."""
        keys, scales = self.index.split(self._pages_for_reading(layer_id))
        gather = self.parts.kernels.gather
        return self.index.decode(gather(keys, loc), gather(scales, loc))

    def get_index_k_scale(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return the scales of the slots `loc` ``[n, scales]``: float32, or exponents' bytes for 4-bit keys."""
        scales = self.index.split(self._pages_for_reading(layer_id))[1]
        return self.index.scales(self.parts.kernels.gather(scales, loc))

    def slot_views(self) -> list[torch.Tensor]:
        """Return views of all that a slot owns: its rows, then its key and its scales inside the pages of each layer."""
        return super().slot_views() + self.whole_views()

    def whole_views(self) -> list[torch.Tensor]:
        """Return views of the index keys and scales of each layer, inside their pages."""
        return [part for pair in self._parts_of.values() for part in pair]

    def _rows_for_reading(self, layer_id: int) -> torch.Tensor:
        return self._kv[self.owner_for_read(layer_id)]

    def _pages_for_reading(self, layer_id: int) -> torch.Tensor:
        return self._pages[self.owner_for_read(layer_id)]

    def _store_index(self, layer_id: int, loc: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor) -> None:
        self._check_loc(layer_id, loc)
        key_view, scale_view = self._parts_of[layer_id]
        self.parts.kernels.store_kv(key_view, scale_view, loc, keys, scales)

    def _latents(self, rows: torch.Tensor) -> torch.Tensor:
        latents = rows[..., : self.kv_lora_rank]
        return latents.view(self.codec.format) if self.is_scaled else latents

    def _pack(self, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Return scaled rows ``[n, 1, bytes]``."""
        import torch

        data, scales = self.parts.kernels.quantize_blocks(latent, self.query.kv_dtype, SCALE_BLOCK)
        return torch.cat([data, recast(scales, torch.uint8), recast(rope.to(torch.bfloat16), torch.uint8)], -1)

    def _unpack(self, rows: torch.Tensor, dst_dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        lora, tail = self.kv_lora_rank, 2 * self.qk_rope_head_dim
        data, rope = rows[..., :lora], rows[..., -tail:]
        factors = recast(rows[..., lora:-tail], torch.float32)
        latent = self.parts.kernels.dequantize_blocks(data, factors, self.query.kv_dtype, SCALE_BLOCK)
        dtype = torch.bfloat16 if dst_dtype is None else dst_dtype
        return latent.to(dtype), recast(rope, torch.bfloat16).to(dtype)


def row_buffer(query: PoolQuery, layout: RowLayout) -> Buffer:
    """Return the buffer of latent rows: columns of `kv_cache_dtype`, or bytes with scales in them.

    Raises:
        PlanError: scaled rows whose latent is no whole number of blocks, or of another type than 8-bit floats.
    """
    lora, rope = common_latent(query)
    raw = kv_buffer(query, "kv", "latent", (1, lora + rope))
    if layout == "raw":
        return raw
    if lora % SCALE_BLOCK:
        raise PlanError(
            f"kv_lora_rank={lora} is no whole number of blocks of {SCALE_BLOCK}, which share a scale with "
            f"kv_cache_dtype={query.options.kv_cache_dtype}; give kv_cache_dtype=bfloat16 or fp8_e5m2"
        )
    if dtypes.find(raw.dtype).bits != 8:
        raise PlanError(f"scaled rows are of 8-bit floats, not of {raw.dtype}; give kv_cache_dtype=fp8_e4m3")
    shape = (1, lora + lora // SCALE_BLOCK * 4 + 2 * rope)
    return msgspec.structs.replace(raw, dtype="uint8", element=raw.dtype, shape=shape)


def _check_page(page_size: int, kernel_page: int) -> None:
    if page_size % kernel_page:
        near = max(1, (2 * page_size + kernel_page) // (2 * kernel_page)) * kernel_page
        raise PlanError(
            f"page_size={page_size} is no multiple of the {kernel_page} tokens by which the kernels of index keys page; "
            f"the nearest that works is {near}"
        )
