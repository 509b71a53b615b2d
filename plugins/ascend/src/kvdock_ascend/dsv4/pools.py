"""Rows, index keys and states of DeepSeek V4 in plain pages, all layers in one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvdock.errors import SlotError
from kvdock.layout import Buffer
from kvdock.planned import Parts
from kvdock.pools.grouped import check_kv_dtype, group_of
from kvdock.queries import PoolQuery
from kvdock_dsv4.geometry import RATIO_OF
from kvdock_dsv4.model import params_of
from kvdock_dsv4.pools.packed import COMPRESSED
from kvdock_dsv4.pools.placed import PlacedPool
from kvdock_dsv4.pools.states import Ring, columns_of, state_role
from kvdock_dsv4.settings import state_dtype

from kvdock_ascend.pools.attention import INDEX, StackedPool, common_index_dim, stacked

if TYPE_CHECKING:
    import torch
    from kvdock.testing.kinds import Kind

ROWS, SCALE, STATES = "kv", "index_scale", "states"
INT8_LIMIT = 127


class PlainPool(StackedPool, PlacedPool):
    """Plain pages of one space; a slot of −1 stands for a token that owns nothing here."""

    features: ClassVar[frozenset[str]] = frozenset()


class NpuRowsPool(PlainPool):
    """A latent row a slot, in the type of the cache: those of the window, or those that stand for several tokens.

    Keys and values are one row for all heads.
    """

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self._rows = self.stored(ROWS)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the rows ``[1, columns]``; page 0 is padding.

        Raises:
            PlanError: rows of different widths, or a type that cannot hold them.
        """
        columns = params_of(group_of(query).layers).row_dim
        role = COMPRESSED if query.space.name in RATIO_OF else "latent"
        return (_buffer(query, ROWS, role, (1, columns), check_kv_dtype(query)),)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the rows of a layer ``[pages, page_size, 1, columns]``."""
        return self._rows[self.owner_for_read(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return what `get_key_buffer` does: values are the keys."""
        return self.get_key_buffer(layer_id)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write rows `k` ``[n, 1, columns]`` to the slots `loc`; `v` and scales are not read.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        rows = self.owned_for_write(self._rows, layer_id)
        self.check_write(layer_id, rows, loc, k)
        self.parts.kernels.store(rows, self.row_slots(loc), self.codec.encode(k))

    def driven(self) -> Kind:
        """Return what a run writes and reads here (`kvdock run`)."""
        from kvdock_ascend.dsv4 import trace

        return trace.rows_kind(self)


class NpuIndexPool(PlainPool):
    """Keys of the indexer in 8-bit integers, with a float16 scale each."""

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.index_head_dim = common_index_dim(query)
        self._keys, self._scales = self.stored(INDEX), self.stored(SCALE)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare keys ``[1, index_head_dim]`` and scales ``[1, 1]``: ``index_head_dim + 2`` bytes a slot."""
        return (
            _buffer(query, INDEX, "index", (1, common_index_dim(query)), "int8"),
            _buffer(query, SCALE, "scale", (1, 1), "float16"),
        )

    def set_index_k(self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor) -> None:
        """Write keys ``[n, index_head_dim]`` to the compressed slots `loc`, each with the scale that its largest needs.

        What is read differs from the key by half a step at most: its largest number over 127, and 2^-24 where that is
        below the smallest float16, of which small scales are multiples. Numbers beyond ±127 · 65504 are kept as that.

        Raises:
            SlotError: the layer owns no keys here, or the shapes do not fit; nothing is written.
        """
        import torch

        self.check_rows(layer_id, (self.index_head_dim,), loc, index_k)
        wide = index_k.to(torch.float32)
        scale = _float16_scale(wide.abs().amax(-1, keepdim=True))
        step = torch.where(scale > 0, scale, 1).to(torch.float32)
        keys = (wide / step).round().clamp(-INT8_LIMIT, INT8_LIMIT).to(torch.int8)
        self.set_index_k_scale_buffer(layer_id, loc, keys, scale)

    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Write int8 keys ``[n, index_head_dim]`` and float16 scales ``[n, 1]`` that a kernel quantised.

        Raises:
            SlotError: as `set_index_k`, or other types; nothing is written.
        """
        keys = self.owned_for_write(self._keys, layer_id)
        scales = self._scales[layer_id]
        self.check_rows(layer_id, (1,), loc, index_k_scale)
        self.check_rows(layer_id, (self.index_head_dim,), loc, index_k)
        if (index_k.dtype, index_k_scale.dtype) != (keys.dtype, scales.dtype):
            raise SlotError(
                f"layer {layer_id}: index keys of {index_k.dtype} and scales of {index_k_scale.dtype}; give "
                f"{keys.dtype} and {scales.dtype}, nothing was written"
            )
        slots = self.row_slots(loc)
        self.parts.kernels.store_kv(keys, scales, slots, index_k.unsqueeze(1), index_k_scale.unsqueeze(1))

    def read_index_k(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return the keys at the compressed slots `loc` as float32 ``[n, index_head_dim]``."""
        import torch

        owner, gather, slots = self.owner_for_read(layer_id), self.parts.kernels.gather, self.row_slots(loc)
        keys, scales = gather(self._keys[owner], slots), gather(self._scales[owner], slots)
        return (keys.to(torch.float32) * scales.to(torch.float32)).squeeze(1)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the keys of a layer ``[pages, page_size, 1, index_head_dim]``, int8."""
        return self._keys[self.owner_for_read(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the scales of a layer ``[pages, page_size, 1, 1]``, float16."""
        return self._scales[self.owner_for_read(layer_id)]

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Raise: the indexer's keys are no keys of attention (`set_index_k`)."""
        raise SlotError(f"group {self.group.name!r} keeps index keys of layer {layer_id}; write them with set_index_k")

    def driven(self) -> Kind:
        """Return what a run writes and reads here (`kvdock run`)."""
        from kvdock_ascend.dsv4 import trace

        return trace.index_kind(self)


class NpuCompressStatePool(PlainPool):
    """A state a slot, of which the next compressed rows are made; page 0 is the empty state: rows 0, scores −∞.

    A request's newest tokens use its few pages in turn. Nothing is cleared when a page is handed out
    (`DSV4Pool.request_state_mask`). Slots of page 0 own nothing: writes, moves and copies leave it as it is.
    """

    options: ClassVar[frozenset[str]] = frozenset({"state_dtype"})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self._states = self.stored(STATES)
        self._fill_empty()

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare rows and scores side by side, ``2 · columns`` a slot.

        Raises:
            PlanError: a type that cannot hold states, or layers of another family.
        """
        return (_buffer(query, STATES, state_role(query), (2 * columns_of(query),), state_dtype(query)),)

    def get_states(self, layer_id: int) -> Ring:
        """Return the rows and scores of a layer by slot, ``[pages, page_size, columns]`` each, as views.

        Raises:
            SlotError: the layer keeps none here.
        """
        return Ring(*self._states[self.owner_for_read(layer_id)].chunk(2, -1))

    def set_states(self, layer_id: int, loc: torch.Tensor, *vectors: torch.Tensor) -> None:
        """Write rows and scores ``[n, columns]`` to the slots `loc`; padding, page 0 and −1, stays the empty state.

        Raises:
            SlotError: the layer keeps none here, or the shapes do not fit; with debug, a slot that is nobody's or is given
                twice. Nothing is written.
        """
        import torch

        states = self._states[self.owner_for_read(layer_id)]
        if len(vectors) != 2:
            raise SlotError(f"layer {layer_id}: {len(vectors)} vectors of a state; give a row and its scores")
        for vector in vectors:
            self.check_rows(layer_id, (states.shape[-1] // 2,), loc, vector)
        self.check_distinct(layer_id, loc)
        slots, empty = self.row_slots(self._owned(loc)), states[0, 0]
        row = torch.cat([vector.to(states.dtype) for vector in vectors], -1)
        self.parts.kernels.store(states, slots, torch.where(slots.unsqueeze(-1) > 0, row, empty))

    def read_states(self, layer_id: int, loc: torch.Tensor) -> Ring:
        """Return copies ``[n, columns]`` of the rows and scores at the slots `loc`."""
        states = self._states[self.owner_for_read(layer_id)]
        return Ring(*self.parts.kernels.gather(states, self.row_slots(loc)).chunk(2, -1))

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the states of the slots `src_loc` to `tgt_loc`, where neither is padding; reads happen first.

        Raises:
            SlotError: another number of targets than of sources; nothing is moved.
        """
        super().move_kv_cache(self._owned(tgt_loc), self._owned(src_loc))

    def cut_copies(
        self, copies: Sequence[torch.Tensor], indices: torch.Tensor, start: int, end: int
    ) -> list[torch.Tensor]:
        """Return what of the copies of `indices` belongs to ``indices[start:end]``; padding has no part in them."""
        return super().cut_copies(copies, self._owned(indices), start, end)

    def clear(self) -> None:
        """Zero every state but the empty one."""
        super().clear()
        self._fill_empty()

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the states of a layer as they lie ``[pages, page_size, 2 · columns]``."""
        return self._states[self.owner_for_read(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return what `get_key_buffer` does."""
        return self.get_key_buffer(layer_id)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Raise: states are no keys (`set_states`)."""
        raise SlotError(f"group {self.group.name!r} keeps states of layer {layer_id}; write them with set_states")

    def driven(self) -> Kind:
        """Return what a run writes and reads here (`kvdock run`)."""
        from kvdock_ascend.dsv4 import trace

        return trace.states_kind(self)

    def _rows_by_view(self, loc: torch.Tensor) -> list[torch.Tensor]:
        return super()._rows_by_view(self._owned(loc))

    def _owned(self, loc: torch.Tensor) -> torch.Tensor:
        """Return `loc` with −1 for slots of page 0, which is the empty state of all requests."""
        return loc.masked_fill(loc < self.query.space.page_size, -1)

    def _fill_empty(self) -> None:
        for states in self._states.values():
            rows, scores = states[0].chunk(2, -1)
            rows.zero_()
            scores.fill_(-math.inf)


def _float16_scale(largest: torch.Tensor) -> torch.Tensor:
    """Return the float16 scale of numbers up to `largest`, float32: finite, and rounded up where float16 is coarse.

    Below its smallest normal number float16 has multiples of 2^-24 alone: the nearest may be far too small, or 0.
    """
    import torch

    kind = torch.finfo(torch.float16)
    scale, step = largest / INT8_LIMIT, kind.smallest_normal * kind.eps
    scale = torch.where(scale < kind.smallest_normal, (scale / step).ceil() * step, scale)
    return scale.clamp(max=kind.max).to(torch.float16)


def _buffer(query: PoolQuery, name: str, role: str, shape: tuple[int, ...], dtype: str) -> Buffer:
    group = group_of(query)
    plain = Buffer(
        name=name,
        role=role,
        space=group.space,
        shape=shape,
        dtype=dtype,
        layers=group.layer_ids,
        guard=query.space.page_size,
        worker=query.worker,
        is_kv=True,
    )
    return stacked(query, plain)
