"""Sparse latent attention with a host tier: index keys for all tokens here, their rows mostly on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import msgspec

from kvdock.errors import PluginError, SlotError
from kvdock.layout import DEVICE, HOST, Buffer
from kvdock.planned import Parts
from kvdock.pools.dsa import DSAPool
from kvdock.pools.formats import read_rows
from kvdock.pools.grouped import KnowsLive, verify_inside
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch


@runtime_checkable
class MapsDevice(Protocol):
    """An allocator that knows which tokens have their rows on the device."""

    logical_to_device: torch.Tensor
    """Slot (of the numbering of requests) → device slot, int64; 0 where the rows are not on the device."""


def check_tier(query: PoolQuery, parts: Parts, space: str, slots: torch.Tensor) -> None:
    """With debug, verify that slots of the space ``device`` or ``host`` exist and are handed out, or padding.

    Raises:
        SlotError: names one that is not, and who held it last.
    """
    if not parts.debug or slots.device.type == "meta":
        return
    verify_inside(f"space {space!r}", slots, parts.sizes[space] + query.spaces[space].page_size)
    side = getattr(parts.allocator, space, None)
    if isinstance(side, KnowsLive):
        side.verify_live(slots)


class HiSparseDSAPool(DSAPool):
    """Index keys for every slot, rows on the device for those that are resident, and rows on the host.

    Requests are numbered in the group's space, as index keys are; rows lie in the spaces ``device`` and ``host``. The
    engine's slots are translated with the allocator's map wherever rows are written, read or moved. A write to a
    slot whose rows are not resident lands in padding; a read of one has no meaning. `get_key_buffer` returns all
    device rows, in the numbering of ``device``. The pool keeps no map and no table: the allocator decides what is
    resident, and says so in its map before it calls `swap_in` and after it calls `offload`.

    A step reads what its indexer chose: rows that are not resident are brought to the request's device buffer by
    `swap_in`, and read there by their device slots. `offload` keeps the host rows complete as rows are written;
    rows that arrive on the host without ever being on the device are written by `set_host_kv_buffer`.
    """

    features: ClassVar[frozenset[str]] = frozenset({"fp8", "hisparse"})
    options: ClassVar[frozenset[str]] = DSAPool.options | {"hisparse_swap_in_block_size"}

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        allocator = parts.allocator
        if allocator is None or not isinstance(allocator, MapsDevice):
            raise PluginError(
                f"{type(self).__name__} needs an allocator with a map logical_to_device, not "
                f"{type(allocator).__name__}; claim one for the spaces {self.group.space}, {DEVICE} and {HOST}"
            )
        self._map: MapsDevice = allocator
        self._host = self.stored("kv_host")
        self.swap_in_block_size = query.options.hisparse_swap_in_block_size
        """Threads of a block of the engine's swap-in kernel, as the plan has them; copies of torch have no blocks."""

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare rows on the device, index keys for every slot, and rows in pinned host memory.

        Raises:
            PlanError: as `DSAPool.buffers`.
        """
        rows, keys = super().buffers(query)
        replace = msgspec.structs.replace
        on_host = replace(rows, name="kv_host", space=HOST, memory="pinned")
        return replace(rows, space=DEVICE), keys, on_host

    def row_slots(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the device slots of the slots `loc`; 0, the padding, for what is not resident."""
        return self.parts.kernels.translate(self._map.logical_to_device, loc).clamp(min=0)

    def resident(self, loc: torch.Tensor) -> torch.Tensor:
        """Return whether the rows of each slot of `loc` are on the device, as bool ``[n]``."""
        return self.row_slots(loc) > 0

    def offload(self, logical: torch.Tensor, host: torch.Tensor, layer_id: int | None = None) -> None:
        """Copy the device rows of the slots `logical` to the host slots `host`; of one layer, or of all.

        The rows of slots that are not resident go to host padding. Their map entries stay the allocator's business.

        Raises:
            SlotError: another number of host slots than of slots, or no such layer; with debug, slots that nobody holds.
                Nothing is copied.
        """
        import torch

        _check_pairs(logical, host)
        self._check_loc(layer_id, logical)
        check_tier(self.query, self.parts, HOST, host)
        device = self.row_slots(logical)
        targets = torch.where(device > 0, host.to(device.device), 0)
        for on_device, on_host in self._tiers(layer_id):
            self.parts.kernels.copy_rows(on_host, targets, on_device, device)

    def swap_in(self, host: torch.Tensor, device: torch.Tensor, layer_id: int | None = None) -> None:
        """Copy the rows of the host slots `host` to the device slots `device`; of one layer, or of all.

        Raises:
            SlotError: another number of host slots than of device slots, or no such layer; with debug, slots that nobody
                holds. Nothing is copied.
        """
        _check_pairs(device, host)
        check_tier(self.query, self.parts, DEVICE, device)
        check_tier(self.query, self.parts, HOST, host)
        for on_device, on_host in self._tiers(layer_id):
            self.parts.kernels.copy_rows(on_device, device, on_host, host)

    def set_host_kv_buffer(self, layer_id: int, host: torch.Tensor, k: torch.Tensor) -> None:
        """Write rows `k` ``[n, 1, kv_lora_rank + qk_rope_head_dim]`` to the host slots `host`, stored as on the device.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; with debug, host slots that nobody holds.
                Nothing is written.
        """
        self._owned(layer_id)
        lora, width = self.kv_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim
        if tuple(k.shape) != (host.numel(), 1, width):
            raise SlotError(
                f"layer {layer_id}: rows of shape {tuple(k.shape)} for {host.numel()} host slots; give "
                f"[{host.numel()}, 1, {width}]"
            )
        check_tier(self.query, self.parts, HOST, host)
        row = self._pack(k[..., :lora], k[..., lora:]) if self.is_scaled else self.codec.encode(k)
        view = self._host[layer_id]
        self.parts.kernels.store(view, host.to(view.device), row.to(view.device))

    def read_tier(
        self, layer_id: int, space: str, slots: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the rows in slots of the space ``device`` or ``host``, and their latents, as `read_kv` does.

        `slots` are of that space: those of a request's buffer, say, after `swap_in`.

        Raises:
            SlotError: the layer has no rows here, or `space` has none.
        """
        import torch

        tiers = {DEVICE: self._kv, HOST: self._host}
        if space not in tiers:
            raise SlotError(f"rows lie in the spaces {DEVICE!r} and {HOST!r}, not in {space!r}")
        view = tiers[space][self.owner_for_read(layer_id)]
        chosen: torch.dtype = dtype or getattr(torch, self.query.model_dtype)
        slots = slots.to(view.device)
        if self.is_scaled:
            latent, rope = self._unpack(self.parts.kernels.gather(view, slots), chosen)
            return torch.cat([latent, rope], -1), latent
        rows = read_rows(self.parts.kernels, self.codec.decode(view), slots, None, chosen)
        return rows, rows[..., : self.kv_lora_rank]

    def slot_views(self) -> list[torch.Tensor]:
        """Return views of what slots of the group's own space own: keys and scales inside their pages."""
        return [part for pair in self._parts_of.values() for part in pair]

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy index keys, and the device rows of slots that are resident, to `tgt_loc`; reads happen first.

        Host rows stay where they are: host slots belong to a request's tokens, not to their slots.

        Raises:
            SlotError: another number of targets than of sources; nothing is moved.
        """
        import torch

        super().move_kv_cache(tgt_loc, src_loc)
        source, target = self.row_slots(src_loc), self.row_slots(tgt_loc)
        self.parts.kernels.move(list(self._kv.values()), torch.where(source > 0, target, 0), source)

    def get_cpu_copy(self, indices: torch.Tensor, host: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return host copies of the rows and the index keys of the slots `indices`.

        The rows are those on the device, or with `host` those of the host slots ``host[i]``, resident or not.

        Raises:
            SlotError: the rows of a slot are not on the device, and `host` is not given (names the slot), or it has
                another number of slots.
        """
        if host is None:
            self._check_resident(indices)
        else:
            _check_pairs(indices, host)
        slots = self.row_slots(indices) if host is None else host
        views, gather = self._kv if host is None else self._host, self.parts.kernels.gather
        return [gather(view, slots.to(view.device)).cpu() for view in views.values()] + super().get_cpu_copy(indices)

    def load_cpu_copy(
        self, copies: Sequence[torch.Tensor], indices: torch.Tensor, host: torch.Tensor | None = None
    ) -> None:
        """Write what `get_cpu_copy` returned to the slots `indices`; bit-identical.

        All are resident, or `host` gives host slots: then rows go there, and to the device where they are resident.

        Raises:
            SlotError: the copies are of another pool or for another number of slots, or the rows of a slot are
                not on the device and `host` is not given; nothing is written.
        """
        self.verify_copies(copies, indices, host)
        store, rows = self.parts.kernels.store, self.row_slots(indices)
        views = [(view, rows) for view in self._kv.values()]
        if host is not None:
            on_host = [(view, host.to(view.device)) for view in self._host.values()]
            for (view, loc), copy in zip(on_host, copies, strict=False):
                store(view, loc, copy.to(view.device))
        views += [(view, indices) for view in self._views]
        for (view, loc), copy in zip(views, copies, strict=True):
            store(view, loc, copy.to(view.device, non_blocking=True))

    def verify_copies(
        self, copies: Sequence[torch.Tensor], indices: torch.Tensor, host: torch.Tensor | None = None
    ) -> None:
        """Raise what `load_cpu_copy` would raise, and change nothing."""
        if host is not None:
            _check_pairs(indices, host)
        rows = list(self._kv.values())
        expected = [((indices.shape[0], *view.shape[2:]), view.dtype) for view in rows]
        if [(tuple(copy.shape), copy.dtype) for copy in copies[: len(rows)]] != expected:
            raise SlotError(
                f"these {len(copies)} copies do not begin with the rows of {len(rows)} layers for {indices.shape[0]} "
                "slots; load what get_cpu_copy of the same pool returned for as many slots"
            )
        super().verify_copies(copies[len(rows) :], indices)
        if host is None:
            self._check_resident(indices)

    def _check_resident(self, indices: torch.Tensor) -> None:
        if indices.device.type == "meta":
            return
        absent = indices[~self.resident(indices)]
        if absent.numel():
            raise SlotError(
                f"group {self.group.name!r}: the rows of slot {int(absent[0])} are not on the device; swap them in "
                "first, or copy them from the host rows"
            )

    def _tiers(self, layer_id: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the device and the host rows of one layer, or of all."""
        if layer_id is not None:
            self._owned(layer_id)
        for owner in self.stored_layers if layer_id is None else (layer_id,):
            yield self._kv[owner], self._host[owner]

    def _counted(self) -> list[Buffer]:
        """Return every buffer: rows of both tiers and index keys, each counted in its own space."""
        return list(self.parts.tensors.buffers)


def _check_pairs(slots: torch.Tensor, host: torch.Tensor) -> None:
    if slots.shape != host.shape:
        raise SlotError(f"{host.numel()} host slots for {slots.numel()} slots; nothing was copied")
