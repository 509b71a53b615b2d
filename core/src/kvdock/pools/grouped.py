"""What pools of one layer group share: one list of buffers that everything walks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from kvdock import dtypes
from kvdock.allocators.debug import named_holders
from kvdock.errors import PlanError, PluginError, SlotError
from kvdock.layout import Buffer, LayerGroup, Unit
from kvdock.model import LayerParams
from kvdock.planned import Parts
from kvdock.pools.base import BufferInfo, Pool, Region
from kvdock.pools.formats import Codec
from kvdock.pools.storage import unique_storages
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch

View = TypeVar("View")


@runtime_checkable
class KnowsLive(Protocol):
    """An allocator that can tell, in debug mode, which slots may be written."""

    def verify_live(self, slots: torch.Tensor) -> None:
        """Raise `SlotError` for slots that are not handed out."""


class GroupedPool(Pool):
    """A pool of one group: finds tensors by global layer id and moves all that a slot owns together.

    A subclass declares its buffers and reads them through `stored` (as they lie) and `readable` (in their
    format). One whose slots own more than whole rows, such as a place inside a page of bytes, overrides
    `slot_views`.
    """

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.group = group_of(query)
        self._owner_of = {layer_id: layer_id for layer_id in self.group.layer_ids} | dict(self.group.shared)
        self._live = parts.allocators.get(self.group.space)
        # The request table holds the slots of one space alone; in another its numbers would name the wrong request.
        is_numbering = parts.allocator is None or parts.allocator.query.spaces[0].name == self.group.space
        self._request_pool = parts.request_pool if is_numbering else None
        self._segment = None if parts.memory is None else parts.memory.segment(self.group.space)
        """Where slots lie in unified memory; ``None``: where their numbers say."""
        if self._segment is not None:
            self._segment.move_along(self._views_of([b for b in self._counted() if not b.storage]))

    def own_rows(self, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the rows of the slots `loc` lie on this rank, and whether they are its own, as bool ``[n]``."""
        rows, own = super().own_rows(loc)
        return self.placed(rows), own

    def row_slots(self, loc: torch.Tensor) -> torch.Tensor:
        """Return where the rows of the slots `loc` lie: in unified memory wherever their pages are at this moment."""
        return self.placed(super().row_slots(loc))

    def placed(self, loc: torch.Tensor) -> torch.Tensor:
        """Return where rows lie: `loc` itself, but in unified memory wherever their pages are at this moment."""
        return loc if self._segment is None else self._segment.rows(loc)

    @cached_property
    def codec(self) -> Codec:
        """How values lie in tensors of the cache's data type, for pools that keep no blocks."""
        return Codec(self.query.kv_dtype)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers that can be read, ascending."""
        return tuple(sorted(self._owner_of))

    def owner_for_read(self, layer_id: int) -> int:
        """Return the layer whose buffers a layer reads, once what a transfer brings of them has arrived.

        Raises:
            SlotError: the layer has no buffer here.
        """
        owner = self._owner_of.get(layer_id)
        if owner is None:
            raise self.refuse_layer(layer_id)
        self.wait_for_layer(owner)
        return owner

    def stored(self, name: str) -> dict[int, torch.Tensor]:
        """Return the paged view of a buffer by the id of each layer that owns one."""
        return {layer_id: self.parts.tensors.paged(name, layer_id) for layer_id in self.group.layer_ids}

    def readable(self, name: str) -> dict[int, torch.Tensor]:
        """Return the paged view of a buffer, in its format, by the id of each layer that reads one."""
        stored = self.stored(name)
        return {layer_id: self.codec.decode(stored[owner]) for layer_id, owner in self._owner_of.items()}

    def get_raw_kv_buffer(self, layer_id: int) -> dict[str, torch.Tensor]:
        """Return what is stored for a layer by buffer name, as it lies; 8-bit and narrower floats are bytes."""
        owner, tensors = self.owner_for_read(layer_id), self.parts.tensors
        return {
            buffer.name: tensors.rows(buffer.name, owner)[0]
            if buffer.space is None
            else tensors.paged(buffer.name, owner)
            for buffer in tensors.buffers
            if owner in buffer.layers
        }

    def slot_views(self) -> list[torch.Tensor]:
        """Return ``[pages, page_size, …]`` views of everything that a slot owns, buffer by buffer, layer by layer."""
        return self._views_of(self._counted())

    def _views_of(self, buffers: Sequence[Buffer]) -> list[torch.Tensor]:
        tensors = self.parts.tensors
        return [
            tensors.paged(buffer.name, layer_id)
            for buffer in buffers
            if buffer.unit is Unit.SLOT
            for layer_id in buffer.layers or (None,)
        ]

    def whole_views(self) -> list[torch.Tensor]:
        """Return those of `slot_views`, the last ones, in which every rank keeps all tokens though it shares the rest."""
        return []

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy all that the slots `src_loc` own to `tgt_loc`, in every layer; reads happen first.

        Rows stay on their rank: where ranks share the tokens, a slot whose target is another rank's keeps its rows, and
        so does the target.

        Raises:
            SlotError: another number of targets than of sources; with debug, also a target of another rank than
                its source. Nothing is moved.
        """
        if tgt_loc.shape != src_loc.shape:
            raise SlotError(f"{tgt_loc.numel()} target slots for {src_loc.numel()} source slots; nothing was moved")
        self._check_loc(None, tgt_loc)
        self._check_loc(None, src_loc)
        move = self.parts.kernels.move
        if self._shares_tokens:
            self._check_same_rank(tgt_loc, src_loc)
            move(self._rank_views, *self._moved_rows(tgt_loc, src_loc))
            move(self.whole_views(), tgt_loc, src_loc)
        else:
            move(self._views, self.placed(tgt_loc), self.placed(src_loc))

    def _moved_rows(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of targets and sources; padding for both where one of them is not this rank's."""
        import torch

        (targets, is_target), (sources, is_source) = self.own_rows(tgt_loc), self.own_rows(src_loc)
        both = is_target & is_source
        return torch.where(both, targets, 0), torch.where(both, sources, 0)

    def get_cpu_copy(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Return host copies of all that the slots `indices` own here, one tensor a view of `slot_views`.

        Where ranks share the tokens these are the rows of this rank's tokens alone, in order.
        """
        self._check_loc(None, indices)
        gather = self.parts.kernels.gather
        return [gather(view, rows).cpu() for view, rows in zip(self._views, self._rows_by_view(indices), strict=True)]

    def load_cpu_copy(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Write what `get_cpu_copy` returned to the slots `indices`; bit-identical.

        Where ranks share the tokens, each slot is of the rank that the copied one was of: the same place in its page.

        Raises:
            SlotError: the copies are of another pool or for another number of slots; nothing is written.
        """
        self.verify_copies(copies, indices)
        for view, rows, copy in zip(self._views, self._rows_by_view(indices), copies, strict=True):
            self.parts.kernels.store(view, rows, copy.to(view.device, non_blocking=True))

    def verify_copies(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Raise what `load_cpu_copy` would raise, and change nothing.

        Raises:
            SlotError: the copies are of another pool or for another number of slots.
        """
        views = self._views
        slots = self._rows_by_view(indices)
        expected = [((len(rows), *view.shape[2:]), view.dtype) for view, rows in zip(views, slots, strict=True)]
        if [(tuple(copy.shape), copy.dtype) for copy in copies] != expected:
            raise SlotError(
                f"these {len(copies)} copies do not fit the {len(views)} tensors of this pool for "
                f"{indices.shape[0]} slots; load what get_cpu_copy of the same pool returned for as many slots"
            )
        self._check_loc(None, indices)

    def _rows_by_view(self, loc: torch.Tensor) -> list[torch.Tensor]:
        """Return where the slots `loc` lie in each of `slot_views`; of shared tokens this rank's alone, which waits once."""
        if not self._shares_tokens:
            return [self.placed(loc)] * len(self._views)
        rows, own = self.own_rows(loc)
        kept = rows[own]
        return [kept] * len(self._rank_views) + [loc] * len(self.whole_views())

    def buffer_infos(self) -> list[BufferInfo]:
        """Describe each per-token tensor; an item is a page, and the padding page is part of the tensor.

        Where ranks share the tokens a page is one of the numbering that all have: an item holds this rank's rows of it,
        or all where every rank keeps all.
        """
        return [self._info(buffer, layer_id) for buffer in self._counted() for layer_id in buffer.layers or (None,)]

    def regions(self) -> list[Region]:
        """Return one region a tensor, or where the pool lies page by page the byte buffer and what is not part of it."""
        tensors = self.parts.tensors
        if not tensors.page_layout:
            return super().regions()
        (raw,) = tensors.storages_of(tensors.page_layout.blocks[0].buffer)
        layout = tensors.page_layout
        pages = Region(pointer=raw.data_ptr() + layout.offset, nbytes=layout.nbytes, item_nbytes=layout.page_nbytes)
        apart = [b for b in self._counted() if not b.storage]
        infos = [self._info(buffer, layer_id) for buffer in apart for layer_id in buffer.layers or (None,)]
        return [pages, *(Region(pointer=i.pointer, nbytes=i.nbytes, item_nbytes=i.item_nbytes) for i in infos)]

    def clear(self) -> None:
        """Zero every buffer; of one that spaces share the pages that this one owns."""
        tensors, segment = self.parts.tensors, self._segment
        for buffer in tensors.buffers:
            if segment is not None and buffer.storage:
                zeroed = [part for view in self._views_of([buffer]) for part in segment.owned(view)]
            else:
                zeroed = tensors.storages_of(buffer.name)
            for part in zeroed:
                part.zero_()

    def storages(self) -> list[torch.Tensor]:
        """Return the raw tensors of this pool."""
        return self.parts.tensors.storages()

    def breakdown(self) -> dict[str, int]:
        """Return the bytes of each buffer by name; a byte buffer that buffers share counts with the first."""
        tensors = self.parts.tensors
        found: dict[str, int] = {}
        seen: set[int] = set()
        for name in tensors.names:
            own = unique_storages(tensors.storages_of(name))
            found[name] = sum(nbytes for key, nbytes in own.items() if key not in seen)
            seen |= own.keys()
        return found

    @cached_property
    def _views(self) -> list[torch.Tensor]:
        return self.slot_views()

    @cached_property
    def _rank_views(self) -> list[torch.Tensor]:
        """Those of `slot_views` that hold the rows of this rank's tokens alone, where ranks share them."""
        return self._views[: len(self._views) - len(self.whole_views())]

    def _counted(self) -> list[Buffer]:
        """Return the buffers whose rows belong to the slots or pages of this group's space.

        What lies over others' buffers holds whatever was read last, so nothing of it belongs to a slot.
        """
        return [b for b in self.parts.tensors.buffers if b.space == self.group.space and not b.overlay]

    def _info(self, buffer: Buffer, layer_id: int | None) -> BufferInfo:
        tensors = self.parts.tensors
        is_slot = buffer.unit is Unit.SLOT
        items = tensors.paged(buffer.name, layer_id) if is_slot else tensors.rows(buffer.name, layer_id)
        item_nbytes = (self.query.space.page_size if is_slot else 1) * buffer.widen * buffer.row_nbytes
        return BufferInfo(
            name=buffer.name,
            role=buffer.role,
            layer_id=layer_id,
            pointer=items.data_ptr(),
            nbytes=items.shape[0] // buffer.widen * item_nbytes,
            item_nbytes=item_nbytes,
            stride_nbytes=items.stride(0) * buffer.widen * items.element_size(),
            space=buffer.space,
        )

    def owned_for_write(self, views: Mapping[int, View], layer_id: int) -> View:
        """Return the entry of a layer in `views`, which are by the layers that own buffers.

        Raises:
            SlotError: the layer owns none here.
        """
        view = views.get(layer_id)
        if view is None:
            raise self.refuse_write(layer_id)
        return view

    def refuse_write(self, layer_id: int) -> SlotError:
        """Return the error for a write to a layer that owns no buffer here."""
        owner = self._owner_of.get(layer_id)
        if owner is None:
            return self.refuse_layer(layer_id)
        return SlotError(f"layer {layer_id} reads the KV of layer {owner} and owns none; write to layer {owner}")

    def check_write(self, layer_id: int, view: torch.Tensor, loc: torch.Tensor, values: torch.Tensor) -> None:
        """Verify that `values` are one row of `view` for each slot of `loc`; with debug, the slots as well.

        Raises:
            SlotError: names the layer, the shapes, or the slot; nothing is written.
        """
        self.check_rows(layer_id, view.shape[2:], loc, values)

    def check_rows(self, layer_id: int, shape: tuple[int, ...], loc: torch.Tensor, values: torch.Tensor) -> None:
        """Verify that `values` are one row of `shape` for each slot of `loc`; raises as `check_write` does."""
        require_tensors(layer_id, slots=loc, values=values)
        if values.shape[1:] != shape or values.shape[0] != loc.shape[0] or loc.dim() != 1:
            raise SlotError(
                f"layer {layer_id}: values of shape {list(values.shape)} for slots of shape {list(loc.shape)}; "
                f"give slots [n] and values [n, {', '.join(str(extent) for extent in shape)}]"
            )
        if loc.dtype not in _slot_dtypes():
            raise SlotError(f"layer {layer_id}: slots of type {loc.dtype}; give int64 or int32, nothing was written")
        if self.parts.debug:
            self._check_loc(layer_id, loc)

    def _check_loc(self, layer_id: int | None, loc: torch.Tensor) -> None:
        """With debug, verify that slots exist and are handed out (or padding)."""
        if not self.parts.debug or loc.device.type == "meta":
            return
        limit = (self.parts.sizes[self.group.space] + self.query.space.page_size) * self.query.parallel.dcp_size
        where = f"group {self.group.name!r}" if layer_id is None else f"layer {layer_id}"
        verify_inside(where, loc, limit, self._holder)
        if isinstance(self._live, KnowsLive):
            try:
                self._live.verify_live(loc)
            except SlotError as error:
                raise SlotError(f"{where}: {error}") from error

    def _check_same_rank(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """With debug, verify that each source lies on the rank of its target."""
        if not self.parts.debug or tgt_loc.device.type == "meta":
            return
        ranks = self.query.parallel.dcp_size
        for target, source in zip(tgt_loc.tolist(), src_loc.tolist(), strict=True):
            if target % ranks != source % ranks:
                raise SlotError(
                    f"group {self.group.name!r}: slot {source}{self._holder(source)} is of rank {source % ranks} of the "
                    f"{ranks} that share the tokens, and slot {target} of rank {target % ranks}; move to a slot that is a "
                    f"multiple of {ranks} away, nothing was moved"
                )

    def _holder(self, slot: int) -> str:
        """Return which request's row holds a slot, for a message."""
        import numpy as np

        return named_holders(self._request_pool, np.asarray([slot]), 1)


def verify_inside(where: str, loc: torch.Tensor, limit: int, holder: Callable[[int], str] = lambda slot: "") -> None:
    """Verify that slots are from 0 to before `limit`; waits for the device, for debug mode. `holder` says whose a slot is.

    Raises:
        SlotError: names the first that is not.
    """
    slots = loc.detach().cpu()
    outside = slots[(slots < 0) | (slots >= limit)]
    if outside.numel():
        slot = int(outside[0])
        raise SlotError(f"{where}: slot {slot}{holder(slot)} is outside 0 … {limit - 1}; nothing was written")


def require_tensors(layer_id: int, **given: object) -> None:
    """Verify that what a write is given are tensors.

    Raises:
        SlotError: names the first that is none, before anything is written.
    """
    for name, value in given.items():
        if not hasattr(value, "is_cpu"):
            raise SlotError(
                f"layer {layer_id}: {name} are a {type(value).__name__}; give a tensor, nothing was written"
            )


def group_of(query: PoolQuery) -> LayerGroup:
    """Return the group that a query is about.

    Raises:
        PluginError: it is about none: then a pool that routes is asked for.
    """
    if query.group is None:
        raise PluginError("a pool of one group was asked for no group; claim a RoutedPool where query.group is None")
    return query.group


Shape = TypeVar("Shape", bound=Hashable)


def common_shape(query: PoolQuery, shape: Callable[[LayerParams], Shape | None], *, lacks: str, differ: str) -> Shape:
    """Return the `shape` that all layers of the group have.

    `lacks` ends the sentence on a layer without one (`shape` answers ``None``), `differ` says what is wrong with
    two layers; ``{0}`` and ``{1}`` in it stand for their shapes.

    Raises:
        PlanError: a layer has none, or two differ; names them.
    """
    group = group_of(query)
    found: dict[Shape, int] = {}
    for layer_id, layer in group.layers:
        own = shape(layer.params)
        if own is None:
            raise PlanError(f"layer {layer_id} of group {group.name!r} is of kind {layer.kind!r}, {lacks}")
        found.setdefault(own, layer_id)
    if len(found) > 1:
        (first, first_id), (second, second_id) = list(found.items())[:2]
        raise PlanError(
            f"layers {first_id} and {second_id} of group {group.name!r} {differ.format(first, second)}; "
            "a group holds layers of one shape"
        )
    return next(iter(found))


def check_kv_dtype(query: PoolQuery) -> str:
    """Return the data type of keys and values, after checking that torch can convert to it.

    Raises:
        PlanError: it is no float of 8 to 64 bits.
    """
    dtype = dtypes.find(query.kv_dtype)
    if not dtype.is_float or (dtype.bits < 16 and dtype.feature != "fp8"):
        raise PlanError(
            f"kv_cache_dtype={query.kv_dtype!r} cannot hold keys and values in this pool; "
            "give auto, bfloat16, float16, float32, fp8_e4m3, fp8_e5m2, mxfp8, fp4 or nvfp4"
        )
    return dtype.name


@lru_cache(maxsize=1)
def _slot_dtypes() -> tuple[torch.dtype, torch.dtype]:
    """Return the types that slots come in: what allocators return, and what request tables hold."""
    import torch

    return torch.int64, torch.int32
