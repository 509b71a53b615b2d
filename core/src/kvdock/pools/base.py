"""The promises of every KV pool."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import msgspec

from kvdock.errors import SlotError
from kvdock.layout import Buffer
from kvdock.planned import Parts, Planned
from kvdock.pools.formats import read_rows
from kvdock.pools.storage import unique_storages
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch


class BufferInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where one layer's tensor of one buffer lies, for transfer engines.

    Item i, a page (a row for buffers that are not paged), is the `item_nbytes` bytes at ``pointer + i ·
    stride_nbytes``; `nbytes` is what all items take. `layer_id` is the global layer (``None``: no layer),
    `role` what it holds (``key``, ``value``, ``latent``, ``scale`` …), `space` the numbering of its items.
    """

    name: str
    role: str
    layer_id: int | None
    pointer: int
    nbytes: int
    item_nbytes: int
    stride_nbytes: int
    space: str | None = None


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a transfer moves item by item without gaps: `nbytes` from `pointer`, `item_nbytes` an item."""

    pointer: int
    nbytes: int
    item_nbytes: int


@runtime_checkable
class LayerTransfer(Protocol):
    """A transfer in progress that fills a pool layer by layer."""

    def wait_until(self, layer_id: int) -> None:
        """Return when the layer (its global id) has arrived."""


class Pool(Planned, abc.ABC):
    """Owns the buffers of one layer group: reads, writes, moves, copies out and in.

    Layer ids are global. Slots are int64 (or int32) tensors in the numbering of the group's space; a
    write to slot 0 lands in the padding page. Buffers are read as views ``[pages, page_size, *shape]``
    with strides, whatever the arrangement; slot s is row ``(s // page_size, s % page_size)``. All of
    `move_kv_cache`, copies, descriptors and `clear` walk the same list of buffers, so nothing that a slot
    owns is left behind.

    Where ranks share the tokens between them (``dcp_size``) slots are in the numbering that all of them have, and
    slot s is row ``s // dcp_size`` of the rank ``s % dcp_size``: views hold this rank's rows, writes of other ranks'
    tokens land in padding, and reads of them have no meaning.
    """

    layer_pairs: ClassVar[bool] = False
    """Whether a layer's keys and values are two tensors of the same pages."""

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        self.query = query
        self.parts = parts
        self._shares_tokens = query.shares_tokens
        self._transfer: LayerTransfer | None = None

    @property
    def transfer_kind(self) -> Literal["kv_pairs", "flat", "pages"]:
        """How `regions` are to be read.

        ``kv_pairs``: the keys of each layer, then the values of each; ``flat``: one after the other as
        `buffer_infos` lists them; ``pages``: one byte buffer whose items hold every layer, then what lies apart from it, tensor by tensor.
        """
        if any(buffer.storage for buffer in self.parts.tensors.buffers):
            return "pages"
        return "kv_pairs" if self.layer_pairs else "flat"

    def own_rows(self, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the rows of the slots `loc` lie on this rank, and whether they are its own, as bool ``[n]``.

        Another rank's slot has row 0, the padding. A pool that keeps all tokens, as a draft's does, owns every slot.
        Never waits for the device.
        """
        import torch

        if not self._shares_tokens:
            return loc, torch.ones_like(loc, dtype=torch.bool)
        parallel = self.query.parallel
        own = loc % parallel.dcp_size == parallel.dcp_rank
        return torch.where(own, loc // parallel.dcp_size, 0), own

    def row_slots(self, loc: torch.Tensor) -> torch.Tensor:
        """Return where the rows of the slots `loc` lie; a pool whose rows are elsewhere overrides it."""
        return self.own_rows(loc)[0] if self._shares_tokens else loc

    def register_layer_transfer(self, transfer: LayerTransfer | None) -> None:
        """Let every read of a layer wait for `transfer` first; ``None``: nothing is in progress any more."""
        self._transfer = transfer

    def wait_for_layer(self, layer_id: int) -> None:
        """Return when the transfer in progress, if any, has brought this layer."""
        if self._transfer is not None:
            self._transfer.wait_until(layer_id)

    @classmethod
    @abc.abstractmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the tensors of the group in `query`; no torch."""

    @property
    @abc.abstractmethod
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers that can be read here, those that share another's KV included."""

    @abc.abstractmethod
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the keys of a layer as a view ``[pages, page_size, heads, head_dim]``.

        Pools of block formats return a dequantised copy, as large as the layer in the model's data type.

        Raises:
            SlotError: the layer has no buffer here.
        """

    @abc.abstractmethod
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the values of a layer as a view ``[pages, page_size, heads, v_head_dim]``."""

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `get_key_buffer` and `get_value_buffer`."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def read_kv(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies ``[n, heads, dim]`` of keys and values of `n` slots ``loc`` in `dtype` (default: the model's).

        Dequantised; what a scale divided when it was written is multiplied by the scale that is given here.
        """
        import torch

        chosen = dtype or getattr(torch, self.query.model_dtype)
        (k, v), kernels, rows = self.get_kv_buffer(layer_id), self.parts.kernels, self.row_slots(loc)
        return read_rows(kernels, k, rows, k_scale, chosen), read_rows(kernels, v, rows, v_scale, chosen)

    def get_raw_kv_buffer(self, layer_id: int) -> dict[str, torch.Tensor]:
        """Return what is stored for a layer by buffer name, as it lies, for kernels that read the format itself.

        Raises:
            SlotError: the layer has no buffer here, or its pool shows none.
        """
        raise SlotError(f"layer {layer_id}: {type(self).__name__} shows no stored buffers; read get_kv_buffer")

    def set_global_scales(self, layer_id: int, k: float | torch.Tensor, v: float | torch.Tensor) -> None:
        """Set the factors of all block scales of a layer; before anything is written to it.

        Raises:
            SlotError: the layer's pool keeps none.
        """
        raise SlotError(f"layer {layer_id} has no global scales: {type(self).__name__} keeps none in this data type")

    def load_workspace(self, layer_id: int, loc: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Dequantise a layer into the workspace that attention reads through, and return its views.

        Raises:
            SlotError: the layer's pool has no workspace.
        """
        raise SlotError(f"layer {layer_id} is read without a workspace: {type(self).__name__} has none")

    @abc.abstractmethod
    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        """Write keys ``[n, heads, head_dim]`` and values of `n` slots ``loc`` into a layer that owns buffers.

        8-bit pools store ``k / k_scale`` in their format.
        """

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Write latents ``[n, 1, kv_lora_rank]`` and rope parts of `n` slots; for pools that keep latents.

        Raises:
            SlotError: the layer's pool keeps none.
        """
        raise SlotError(f"layer {layer_id} keeps no latent rows: {type(self).__name__} takes set_kv_buffer")

    def get_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the latents and rope parts of the slots `loc`; for pools that keep latents.

        Raises:
            SlotError: the layer's pool keeps none.
        """
        raise SlotError(f"layer {layer_id} keeps no latent rows: {type(self).__name__} has get_kv_buffer")

    @abc.abstractmethod
    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy everything that the slots `src_loc` own to `tgt_loc`, in every layer; reads happen first."""

    @abc.abstractmethod
    def get_cpu_copy(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Return host copies of everything that the slots `indices` own, in the order of the buffers."""

    def verify_copies(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Raise what `load_cpu_copy` would raise, and change nothing.

        Raises:
            SlotError: another number of copies than `get_cpu_copy` returns, or of other types.
        """
        expected = [copy.dtype for copy in self.get_cpu_copy(indices[:0])]
        if [copy.dtype for copy in copies] != expected:
            raise SlotError(
                f"{len(copies)} copies for {len(expected)} tensors, or of other types; load what get_cpu_copy of the "
                "same pool returned"
            )

    @abc.abstractmethod
    def load_cpu_copy(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Write what `get_cpu_copy` returned to the slots `indices`; bit-identical."""

    def cut_copies(
        self, copies: Sequence[torch.Tensor], indices: torch.Tensor, start: int, end: int
    ) -> list[torch.Tensor]:
        """Return what of the copies of the slots `indices` belongs to ``indices[start:end]``; changes nothing.

        Those slots may be others' by now. Here every token has one row in each copy.
        """
        return [copy[start:end] for copy in copies]

    @abc.abstractmethod
    def buffer_infos(self) -> list[BufferInfo]:
        """Describe every per-token tensor, buffer by buffer, layer by layer."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Zero every buffer, but for what was set for a whole layer."""

    @abc.abstractmethod
    def storages(self) -> list[torch.Tensor]:
        """Return every tensor that this pool owns or routes to, for counting bytes."""

    def regions(self) -> list[Region]:
        """Return the memory behind `buffer_infos` for a transfer of whole pages; `transfer_kind` says how it is cut."""
        return [Region(pointer=i.pointer, nbytes=i.nbytes, item_nbytes=i.item_nbytes) for i in self.buffer_infos()]

    def state_infos(self) -> list[BufferInfo]:
        """Describe every tensor of per-request states; an item is a state slot. Empty for pools without states."""
        return []

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return pointers, lengths and bytes per page of `regions`."""
        regions = self.regions()
        return [r.pointer for r in regions], [r.nbytes for r in regions], [r.item_nbytes for r in regions]

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return pointers, lengths and bytes per slot of `state_infos`; three empty lists without states."""
        infos = self.state_infos()
        return [i.pointer for i in infos], [i.nbytes for i in infos], [i.item_nbytes for i in infos]

    @property
    def mem_usage(self) -> int:
        """Bytes of the unique storages behind this pool, measured on the tensors."""
        return sum(unique_storages(self.storages()).values())

    def breakdown(self) -> dict[str, int]:
        """Return `mem_usage` by part; a storage that parts share is counted with the first of them."""
        return {type(self).__name__: self.mem_usage}

    def refuse_layer(self, layer_id: int) -> SlotError:
        """Return the error for a layer that this pool does not hold."""
        return SlotError(f"layer {layer_id} has no KV in this pool; it holds the layers {list(self.layer_ids)}")
