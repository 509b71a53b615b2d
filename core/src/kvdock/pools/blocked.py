"""Pools of block formats: elements of 4 or 8 bits, and a scale for each block of a row beside them."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvdock import dtypes
from kvdock.dtypes import DType
from kvdock.errors import PlanError, SlotError
from kvdock.layout import Buffer
from kvdock.planned import Parts
from kvdock.pools.formats import Codec
from kvdock.pools.grouped import GroupedPool, group_of
from kvdock.pools.mha import common_params, kv_buffer
from kvdock.pools.mla import common_latent
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch


class Row(NamedTuple):
    """What a slot holds in one layer: `heads` of `width` elements, and scales for `scale_heads`."""

    name: str
    role: str
    heads: tuple[int, ...]
    width: int
    scale_heads: tuple[int, ...]


class BlockPool(GroupedPool):
    """A pool of one group in a block format; a subclass says what the rows are.

    Data and scales are buffers of their own: moves, copies and transfers take both. Values are encoded where
    they are written and decoded where they are read, so `get_key_buffer` and `get_value_buffer` return copies:
    as large as the layer in the model's data type, with as much again in float32 on the way. Kernels that
    read the format take `get_raw_kv_buffer`; a few slots are read by `read_kv`.

    A format with e4m3 scales has a factor a layer for each kind of row, 1 unless `set_global_scales` sets it.
    """

    workspace: ClassVar[Mapping[str, str]] = {}
    """Data type of the cache → that of the scratch that attention reads it through; formats read as they lie are not in.

    A plugin whose backend reads through one names it here. It is as large as one layer, is there once for all
    groups of a worker, and holds what `load_workspace` put there last.
    """

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.format = block_format(query)
        self._rows = {row.name: row for row in self.rows_of(query)}
        self._data = {name: self.stored(name) for name in self._rows}
        self._scales = {name: self.stored(f"{name}_scale") for name in self._rows}
        self._globals: dict[int, torch.Tensor] = {}
        if has_global_scales(self.format):
            self._globals = {i: parts.tensors.rows("global_scale", i)[0].fill_(1) for i in self.group.layer_ids}

    @classmethod
    @abc.abstractmethod
    def rows_of(cls, query: PoolQuery) -> tuple[Row, ...]:
        """Return the kinds of rows that a slot has in each layer; no torch."""

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare data and scales of each kind of row, global scales and workspaces where the format has them.

        Raises:
            PlanError: layers of different shapes, heads that do not split over the ranks, or rows of an odd
                number of elements in a format of 4 bits.
        """
        return tuple(cls._declared(query))

    @classmethod
    def _declared(cls, query: PoolQuery) -> Iterator[Buffer]:
        found, rows = block_format(query), cls.rows_of(query)
        for row in rows:
            shape = (*row.heads, _bytes_of(row, found))
            yield kv_buffer(query, row.name, row.role, shape, "uint8" if found.bits == 4 else found.element)
            blocks = -(-row.width // found.block)
            yield kv_buffer(query, f"{row.name}_scale", "scale", (*row.scale_heads, blocks), found.scale)
        if has_global_scales(found):
            yield _global_scales(query)
        if found.name in cls.workspace:
            yield from (_workspace(query, row, cls.workspace[found.name]) for row in rows)

    def set_global_scales(self, layer_id: int, k: float | torch.Tensor, v: float | torch.Tensor) -> None:
        """Set the factors of all block scales of a layer's keys and values; before anything is written to it.

        A value is worth element · block scale · factor. The factor at which a largest magnitude is just
        reached is that magnitude / (6 · 448). It stays when the pool is cleared.

        Raises:
            SlotError: the format has none, the layer owns no buffer here, or a number is not positive and finite.
        """
        if not self._globals:
            super().set_global_scales(layer_id, k, v)
        factors = self.owned_for_write(self._globals, layer_id)
        for name, factor in (("k", k), ("v", v)):
            if isinstance(factor, int | float) and not 0 < factor < float("inf"):
                raise SlotError(f"layer {layer_id}: global scale {name}={factor} is not positive and finite")
        factors[0], factors[1] = k, v

    def load_workspace(self, layer_id: int, loc: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Dequantise the slots `loc` of a layer (default: all) into the workspace, each at its own slot.

        Returns a view ``[pages, page_size, heads, dim]`` for each kind of row, valid until the next call for
        any layer of the worker; 8-bit ones saturate.

        Raises:
            SlotError: the layer has no buffer here, or its format is read without a workspace.
        """
        import torch

        if self.format.name not in self.workspace:
            return super().load_workspace(layer_id, loc)
        codec = Codec(self.workspace[self.format.name])
        views = []
        for name in self._rows:
            view = self.parts.tensors.paged(f"workspace_{name}")
            values = codec.encode(self.read_rows(name, layer_id, loc, dtype=torch.float32))
            if loc is None:
                view.copy_(values)
            else:
                self.parts.kernels.store(view, loc, values)
            views.append(codec.decode(view))
        return tuple(views)

    def clear(self) -> None:
        """Zero every buffer but the global scales, which belong to the model and not to what it wrote."""
        kept = {layer_id: factors.clone() for layer_id, factors in self._globals.items()}
        super().clear()
        for layer_id, factors in kept.items():
            self._globals[layer_id].copy_(factors)

    def check_values(self, name: str, layer_id: int, loc: torch.Tensor, values: torch.Tensor) -> None:
        """Verify that `values` are floats, one row for each slot of `loc`, for a layer that owns buffers.

        Raises:
            SlotError: names the layer, and the shapes, the type or the slot; nothing is written.
        """
        row = self._rows[name]
        if layer_id not in self._data[name]:
            raise self.refuse_write(layer_id)
        if not values.is_floating_point():
            raise SlotError(f"layer {layer_id}: {values.dtype} cannot be encoded as {self.format.name}; give floats")
        self.check_rows(layer_id, (*row.heads, row.width), loc, values)

    def write_rows(
        self,
        name: str,
        layer_id: int,
        loc: torch.Tensor,
        values: torch.Tensor,
        scale: float | torch.Tensor | None = None,
    ) -> None:
        """Encode ``values / scale`` and write it to the slots `loc`; nothing is checked."""
        import torch

        divided = values if scale is None else values.to(torch.float32) / scale
        data, scales = self._data[name][layer_id], self._scales[name][layer_id]
        self.parts.kernels.store_blocks(data, scales, loc, divided, self.format, self._global(name, layer_id))

    def read_rows(
        self,
        name: str,
        layer_id: int,
        loc: torch.Tensor | None = None,
        scale: float | torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the decoded rows of the slots `loc` times `scale`; in pages, of every slot, without `loc`."""
        import torch

        owner = self.owner_for_read(layer_id)
        chosen = dtype or getattr(torch, self.query.model_dtype)
        first = chosen if scale is None else torch.float32
        data, scales = self._data[name][owner], self._scales[name][owner]
        rows = self.parts.kernels.load_blocks(data, scales, loc, self.format, first, self._global(name, owner))
        return rows if scale is None else (rows * scale).to(chosen)

    def _global(self, name: str, layer_id: int) -> torch.Tensor | None:
        return self._globals[layer_id][list(self._rows).index(name)] if self._globals else None


class BlockMHAPool(BlockPool):
    """Multi-head, grouped-query and multi-query attention in a block format."""

    features: ClassVar[frozenset[str]] = frozenset({"fp4", "nvfp4", "mxfp8", "context_parallel"})
    workspace: ClassVar[Mapping[str, str]] = {"nvfp4": "float8_e4m3fn"}

    @classmethod
    def rows_of(cls, query: PoolQuery) -> tuple[Row, ...]:
        """Return keys and values of the heads of this rank."""
        params = common_params(query)
        heads = (query.parallel.kv_heads_per_rank(params.num_kv_heads),)
        return Row("k", "key", heads, params.head_dim, heads), Row("v", "value", heads, params.v_head_dim, heads)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a dequantised copy of the keys of a layer."""
        return self.read_rows("k", layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a dequantised copy of the values of a layer."""
        return self.read_rows("v", layer_id)

    def read_kv(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dequantised copies of the keys and values of the slots `loc`."""
        keys = self.read_rows("k", layer_id, loc, k_scale, dtype)
        return keys, self.read_rows("v", layer_id, loc, v_scale, dtype)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Encode and write keys and values of the slots `loc`, divided by the scales if there are any.

        Raises:
            SlotError: the layer owns no buffer here, or shapes or types do not fit; nothing is written.
        """
        self.check_values("v", layer_id, loc, v)
        self.check_values("k", layer_id, loc, k)
        self.write_rows("k", layer_id, loc, k, k_scale)
        self.write_rows("v", layer_id, loc, v, v_scale)


class BlockMLAPool(BlockPool):
    """Multi-head latent attention in a block format: blocks run over the whole row, latent and rope."""

    features: ClassVar[frozenset[str]] = frozenset({"fp4", "context_parallel"})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.kv_lora_rank, self.qk_rope_head_dim = common_latent(query)

    @classmethod
    def rows_of(cls, query: PoolQuery) -> tuple[Row, ...]:
        """Return the row of latent and rope, the same on every rank."""
        return (Row("kv", "latent", (1,), sum(common_latent(query)), ()),)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a dequantised copy of the rows of a layer."""
        return self.read_rows("kv", layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the latent columns of a dequantised copy of the rows."""
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one dequantised copy of the rows, and its latent columns as a view."""
        rows = self.get_key_buffer(layer_id)
        return rows, rows[..., : self.kv_lora_rank]

    def read_kv(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dequantised copies of whole rows and, as a view of them, their latent columns; both times `k_scale`."""
        rows = self.read_rows("kv", layer_id, loc, k_scale, dtype)
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
        """Encode and write whole rows `k` ``[n, 1, kv_lora_rank + qk_rope_head_dim]``; `v` is a part of them, not read.

        Raises:
            SlotError: the layer owns no buffer here, or shapes or types do not fit; nothing is written.
        """
        self.check_values("kv", layer_id, loc, k)
        self.write_rows("kv", layer_id, loc, k, k_scale)

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Encode latents ``[n, 1, kv_lora_rank]`` and rope parts ``[n, 1, qk_rope_head_dim]`` together, and write them.

        Raises:
            SlotError: the layer owns no buffer here, or shapes or types do not fit; nothing is written.
        """
        import torch

        self.check_rows(layer_id, (1, self.kv_lora_rank), loc, cache_k_nope)
        self.check_rows(layer_id, (1, self.qk_rope_head_dim), loc, cache_k_rope)
        self.set_kv_buffer(layer_id, loc, torch.cat((cache_k_nope, cache_k_rope), dim=-1))

    def get_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dequantised latents and rope parts of the slots `loc`, in `dst_dtype` (default: the model's)."""
        rows = self.read_rows("kv", layer_id, loc, dtype=dst_dtype)
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]


def block_format(query: PoolQuery) -> DType:
    """Return the block format that keys and values are kept in.

    Raises:
        PlanError: the cache is kept in no such format.
    """
    found = dtypes.find(query.kv_dtype)
    if not found.block:
        known = ", ".join(name for name, dtype in dtypes.DTYPES.items() if dtype.block)
        raise PlanError(f"kv_cache_dtype={query.kv_dtype!r} has no scales of blocks, as this pool keeps; give {known}")
    return found


def has_global_scales(found: DType) -> bool:
    """Return whether a format needs a factor for each layer: e4m3 scales reach from 2 ** -9 to 448 alone."""
    return found.scale == "float8_e4m3fn"


def _bytes_of(row: Row, found: DType) -> int:
    if row.width * found.bits % 8:
        raise PlanError(
            f"kv_cache_dtype={found.name!r} packs two elements to a byte, but a row of {row.name!r} has {row.width} a "
            "head; give a data type of 8 bits or more"
        )
    return row.width * found.bits // 8


def _global_scales(query: PoolQuery) -> Buffer:
    """Return the factors of keys and of values, a pair a layer."""
    return Buffer(
        name="global_scale",
        role="global_scale",
        shape=(2,),
        dtype="float32",
        layers=group_of(query).layer_ids,
        stacked=True,
        worker=query.worker,
        is_kv=True,
    )


def _workspace(query: PoolQuery, row: Row, dtype: str) -> Buffer:
    """Return the scratch of one kind of row, which lies over that of the worker's other groups."""
    name = f"workspace_{row.name}"
    return Buffer(
        name=name,
        role="workspace",
        space=group_of(query).space,
        shape=(*row.heads, row.width),
        dtype=dtype,
        guard=query.space.page_size,
        overlay=f"{query.worker} {name}",
        worker=query.worker,
    )
