"""Compressed rows of ratio 4 with a host tier: all of them on the host, those of the window on the device as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import msgspec
from kvdock.errors import PluginError, SlotError
from kvdock.layout import DEVICE, FULL, Buffer
from kvdock.planned import Parts
from kvdock.pools.base import BufferInfo
from kvdock.pools.grouped import KnowsLive
from kvdock.pools.hisparse import check_tier
from kvdock.queries import PoolQuery

from kvdock_dsv4.pools.packed import PackedPool

if TYPE_CHECKING:
    import torch
    from kvdock.testing.kinds import Kind

ON_HOST = "kv_host"


@runtime_checkable
class MapsCompressed(Protocol):
    """An allocator that knows which compressed rows are on the device."""

    def translate_to_device(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the device slots of compressed slots: −1 for −1, 0 where the rows are on the host alone."""


class HiSparsePackedPool(PackedPool):
    """Packed rows in two tiers: a row has its compressed slot on the host, and a device slot while it is resident.

    Writes and reads by compressed slot are about the device; of rows that are not resident they land in padding and
    have no meaning. `offload` copies rows to the host, which is due before their tokens leave the window, and
    `swap_in` brings them to device slots of a request's buffer, from where `read_device` reads. Rows that arrive on the
    host without a place on the device are written by `set_host_kv_buffer`; where they have one, `swap_in` fills it:
    ``swap_in(loc, row_slots(loc))``.
    """

    options: ClassVar[frozenset[str]] = frozenset({"hisparse_swap_in_block_size"})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        allocator = parts.allocator
        if allocator is None or not isinstance(allocator, MapsCompressed):
            raise PluginError(
                f"{type(self).__name__} needs an allocator that knows compressed rows on the device, not "
                f"{type(allocator).__name__}; claim DSV4HiSparseAllocator or a subclass"
            )
        self._map: MapsCompressed = allocator
        size = query.space.page_size
        pages = {layer_id: parts.tensors.rows(ON_HOST, layer_id) for layer_id in self.group.layer_ids}
        self._on_host = {layer_id: self.format.split(own, size) for layer_id, own in pages.items()}

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare pages of rows on the device, and as many as there are compressed pages in pinned host memory."""
        (rows,) = super().buffers(query)
        replace = msgspec.structs.replace
        return replace(rows, space=DEVICE), replace(rows, name=ON_HOST, memory="pinned")

    def row_slots(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the device slots of compressed slots; 0, the padding, for what is not resident."""
        return self._map.translate_to_device(loc).clamp(min=0)

    def resident(self, loc: torch.Tensor) -> torch.Tensor:
        """Return whether the rows of the compressed slots `loc` are on the device, as bool ``[n]``."""
        return self.row_slots(loc) > 0

    def offload(self, loc: torch.Tensor, layer_id: int | None = None) -> None:
        """Copy the device rows of compressed slots to the host, of one layer or of all; what is not resident stays."""
        import torch

        self._check_compressed(loc)
        device = self.row_slots(loc)
        targets = torch.where(device > 0, loc, 0)
        for on_device, on_host in self._tiers(layer_id):
            self.parts.kernels.copy_rows(on_host, targets, on_device, device)

    def swap_in(self, loc: torch.Tensor, device: torch.Tensor, layer_id: int | None = None) -> None:
        """Copy the host rows of the compressed slots `loc` to the device slots `device`; of one layer or of all.

        Raises:
            SlotError: another number of device slots; with debug, slots that nobody holds. Nothing is copied.
        """
        if loc.shape != device.shape:
            raise SlotError(f"{device.numel()} device slots for {loc.numel()} compressed slots; nothing was copied")
        check_tier(self.query, self.parts, DEVICE, device)
        self._check_compressed(loc)
        for on_device, on_host in self._tiers(layer_id):
            self.parts.kernels.copy_rows(on_device, device, on_host, loc.clamp(min=0))

    def set_host_kv_buffer(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor) -> None:
        """Write rows `k` ``[n, 1, columns]`` to the host rows of the compressed slots `loc`, packed as on the device.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        dim, store = self.format.nope_dim, self.parts.kernels.store
        self.check_rows(layer_id, (1, dim + self.format.rope_dim), loc, k)
        if layer_id not in self._on_host:
            raise self.refuse_layer(layer_id)
        self._check_compressed(loc)
        packed = self.format.pack(k[..., 0, :dim], k[..., 0, dim:])
        for rows, found in zip(self._on_host[layer_id], packed, strict=True):
            store(rows, loc.clamp(min=0).to(rows.device), found.to(rows.device))

    def read_device(self, layer_id: int, device: torch.Tensor) -> torch.Tensor:
        """Return copies ``[n, 1, columns]`` of the rows in device slots, such as those of a request's buffer."""
        gather = self.parts.kernels.gather
        data, scales = (gather(part, device) for part in self._parts_of[self.owner_for_read(layer_id)])
        return self._rows(data, scales).unsqueeze(-2)

    def read_host(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return copies ``[n, 1, columns]`` of the host rows of the compressed slots `loc`."""
        parts, gather = self._on_host[self.owner_for_read(layer_id)], self.parts.kernels.gather
        data, scales = (gather(part, loc.clamp(min=0).to(part.device)) for part in parts)
        return self._rows(data, scales).unsqueeze(-2)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy what the compressed slots `src_loc` own to `tgt_loc`: host rows, and device rows where both are resident."""
        import torch

        if tgt_loc.shape != src_loc.shape:
            raise SlotError(f"{tgt_loc.numel()} target slots for {src_loc.numel()} source slots; nothing was moved")
        both = (tgt_loc >= 0) & (src_loc >= 0)
        targets, sources = torch.where(both, tgt_loc, 0), torch.where(both, src_loc, 0)
        device, origin = self.row_slots(targets), self.row_slots(sources)
        on_device = (device > 0) & (origin > 0)
        device, origin = torch.where(on_device, device, 0), torch.where(on_device, origin, 0)
        for rows, kept in self._tiers(None):
            self.parts.kernels.move([rows], device, origin)
            self.parts.kernels.move([kept], targets.to(kept.device), sources.to(kept.device))

    def get_cpu_copy(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Return host copies of the rows of compressed slots: from the device where they are resident, else the host's."""
        import torch

        loc = indices[indices >= 0]
        device, gather = self.row_slots(loc), self.parts.kernels.gather
        here = (device > 0).cpu().unsqueeze(-1)
        return [
            torch.where(here, gather(rows, device).cpu(), gather(kept, loc.to(kept.device)).cpu())
            for rows, kept in self._tiers(None)
        ]

    def load_cpu_copy(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Write what `get_cpu_copy` returned to compressed slots: to the host, and to the device where resident."""
        self.verify_copies(copies, indices)
        loc = indices[indices >= 0]
        device, store = self.row_slots(loc), self.parts.kernels.store
        for (rows, kept), copy in zip(self._tiers(None), copies, strict=True):
            store(rows, device, copy.to(rows.device))
            store(kept, loc.to(kept.device), copy.to(kept.device))

    def driven(self) -> Kind:
        """Return what a run writes and reads here: rows go to the host as they are written."""
        from kvdock_dsv4.trace import tiered_rows_kind

        return tiered_rows_kind(self)

    def buffer_infos(self) -> list[BufferInfo]:
        """Describe the rows of both tiers, each counted in its own space."""
        buffers = self.parts.tensors.buffers
        return [self._info(buffer, layer_id) for buffer in buffers for layer_id in buffer.layers]

    def _check_compressed(self, loc: torch.Tensor) -> None:
        """With debug, verify that compressed slots exist, and that the full page of each is handed out."""
        self._check_loc(None, loc)
        if self.parts.debug and isinstance(self._map, KnowsLive) and loc.device.type != "meta":
            pages = loc.clamp(min=0) // self.query.space.page_size
            self._map.verify_live(pages * self.query.spaces[FULL].page_size)

    def _tiers(self, layer_id: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield columns, then scales, on the device and on the host; of one layer, or of all."""
        owners = self.group.layer_ids if layer_id is None else (self.owner_for_read(layer_id),)
        for owner in owners:
            yield from zip(self._parts_of[owner], self._on_host[owner], strict=True)
