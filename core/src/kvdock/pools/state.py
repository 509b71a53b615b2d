"""States per request: the inputs that convolutions still need, the temporal state of linear and state-space layers.

A state is addressed by a slot of its space alone, never by token slots: prefixes that requests share cannot
alias their states.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

from kvdock.errors import SlotError
from kvdock.layout import Buffer
from kvdock.planned import Parts
from kvdock.pools.base import BufferInfo, Region
from kvdock.pools.grouped import GroupedPool, group_of
from kvdock.pools.snapshots import Snapshots, SnapshotViews, numbered, snapshot_buffers
from kvdock.pools.state_shapes import conv_shape, ring_shapes, state_params, temporal_dtype, temporal_shape
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch

    from kvdock.kernels.interface import Kernels

CONV, TEMPORAL = "conv", "temporal"
RING_NAMES = ("replay_d", "replay_k", "replay_g")
CURSOR = "replay_write"


class State(NamedTuple):
    """The states of one layer, by slot: ``[slots + 1, …]`` a convolution, and the temporal state if there is one."""

    conv: tuple[torch.Tensor, ...]
    temporal: torch.Tensor | None


class ReplayRing(NamedTuple):
    """The last steps of one layer, by slot, and where the next one is written, the same for all layers.

    `delta` ``[slots + 1, v_heads, steps, v_dim]``, `key` ``[slots + 1, k_heads, steps, k_dim]``, `decay`
    ``[slots + 1, v_heads, steps]`` (a number more for each key column where it differs), `cursor` ``[slots + 1]``.
    """

    delta: torch.Tensor
    key: torch.Tensor
    decay: torch.Tensor
    cursor: torch.Tensor


class StateStore:
    """How the bytes of states are cleared, copied, saved and restored; which slots, and whose, is the pool's affair.

    `views` are ``[slots + 1, 1, …]`` and hold all that a slot owns, buffer by buffer, layer by layer; `buffers`
    names the declaration of each. A device whose states lie differently overrides what it must and names the
    class in `StatePool.store_cls`.
    """

    def __init__(self, kernels: Kernels, views: Sequence[torch.Tensor], buffers: Sequence[Buffer]) -> None:
        self.kernels = kernels
        self.views = views
        self.buffers = buffers

    def clear(self, slots: torch.Tensor) -> None:
        """Put slots into the state of a request that begins: zeros, and a ring's cursor at its first step."""
        self.kernels.clear(self.views, slots)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all that slots own; every source is read before any target is written."""
        self.kernels.move(self.views, target, source)

    def save(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Return host copies ``[n, …]`` of all that slots own, one a view."""
        return [self.kernels.gather(view, slots).cpu() for view in self.views]

    def restore(self, copies: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        """Write what `save` returned."""
        for view, copy in zip(self.views, copies, strict=True):
            self.kernels.store(view, slots, copy.to(view.device, non_blocking=True))


@runtime_checkable
class _NamesStates(Protocol):
    """A request pool that knows which request's row names a state slot, and which slots are handed out."""

    row_to_state: torch.Tensor
    states: _Owned

    def live_rows(self) -> dict[int, Hashable]:
        """Return the request of each row that is handed out."""


class _Owned(Protocol):
    def owner_of(self, slot: int) -> Hashable | None:
        """Return who holds a slot, or ``None``."""


class StatePool(GroupedPool):
    """Convolution inputs and temporal states of the layers of one shape; with speculation, their draft snapshots.

    Views are ``[slots + 1, …]``; slot 0 is padding, and slot s is row ``row_slots(s)``. What a slot holds when it is handed out is the last owner's
    until `clear_slots`. With debug, slots that do not exist or are not handed out are refused.
    """

    features: ClassVar[frozenset[str]] = frozenset({"page_major", "unified_memory", "replay_rings", "context_parallel"})
    options: ClassVar[frozenset[str]] = frozenset(
        {
            "state_dtype",
            "replay_rings",
            "replay_ring_length",
            "speculative_num_steps",
            "speculative_topk",
            "speculative_num_draft_tokens",
        }
    )
    store_cls: ClassVar[type[StateStore]] = StateStore
    """How the bytes of a slot are cleared, copied, saved and restored."""

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        tensors, layers = parts.tensors, self.group.layer_ids
        names = [name for name in tensors.names if name.split(".")[0] == CONV]
        self._conv = {layer: [tensors.rows(name, layer) for name in names] for layer in layers}
        self._temporal = {layer: tensors.rows(TEMPORAL, layer) for layer in layers if TEMPORAL in tensors.names}
        self._snapshots = Snapshots(query, parts) if self.snapshot_buffers(query) else None
        self.cursor: torch.Tensor | None = tensors.rows(CURSOR) if CURSOR in tensors.names else None
        """Next step of each slot's replay rings, int32 ``[slots + 1]``; ``None`` without rings."""

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the states, their replay rings, and their draft snapshots.

        Raises:
            PlanError: layers of different shapes, heads that do not split over the ranks, a data type that
                cannot hold states, or rings for layers that have none.
        """
        return (*cls.state_buffers(query), *cls.ring_buffers(query), *cls.snapshot_buffers(query))

    @classmethod
    def state_buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the convolutions, then the temporal state, of all layers: one tensor each."""
        params = state_params(query)
        found = [
            state_buffer(query, numbered(CONV, place), CONV, conv_shape(query, conv), query.model_dtype)
            for place, conv in enumerate(params.conv)
        ]
        if params.temporal:
            shape, dtype = temporal_shape(query, params), temporal_dtype(query, params)
            found.append(state_buffer(query, TEMPORAL, TEMPORAL, shape, dtype))
        return tuple(found)

    @classmethod
    def ring_buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare delta, key and decay of each layer's ring, and one cursor a slot; none without replay_rings."""
        if not query.options.replay_rings:
            return ()
        params = state_params(query)
        kept = temporal_dtype(query, params)
        rings = zip(RING_NAMES, ring_shapes(query, params), (kept, kept, "float32"), strict=True)
        space = group_of(query).space
        cursor = Buffer(name=CURSOR, role="cursor", space=space, shape=(), dtype="int32", worker=query.worker)
        return (*(state_buffer(query, name, "ring", shape, dtype) for name, shape, dtype in rings), cursor)

    @classmethod
    def snapshot_buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare what is kept after each draft token; none without speculation."""
        return snapshot_buffers(query)

    @cached_property
    def store(self) -> StateStore:
        """The storage operations on all that a slot owns."""
        owners = [buffer for buffer in self._counted() for _ in buffer.layers or (None,)]
        return self.store_cls(self.parts.kernels, self._views, owners)

    def get_state(self, layer_id: int) -> State:
        """Return the states of a layer, by slot.

        Raises:
            SlotError: the layer keeps no state here.
        """
        owner = self.owner_for_read(layer_id)
        return State(conv=tuple(self._conv[owner]), temporal=self._temporal.get(owner))

    def needed_state(self, layer_id: int) -> State:
        """Return of `get_state` what the next token needs, as views: without room that a device keeps behind it."""
        return self.get_state(layer_id)

    def conv_states(self, layer_id: int, place: int = 0) -> torch.Tensor:
        """Return the inputs that one of a layer's convolutions still needs, by slot.

        Raises:
            SlotError: the layer keeps no state here, or not as many convolutions.
        """
        found = self.get_state(layer_id).conv
        if not 0 <= place < len(found):
            raise SlotError(f"layer {layer_id} keeps {len(found)} convolutions, so there is no number {place}")
        return found[place]

    def temporal_states(self, layer_id: int) -> torch.Tensor:
        """Return the temporal state of a layer, by slot.

        Raises:
            SlotError: the layer keeps none.
        """
        found = self.get_state(layer_id).temporal
        if found is None:
            raise SlotError(f"layer {layer_id} keeps convolutions alone, no temporal state; read conv_states")
        return found

    def replay_ring(self, layer_id: int) -> ReplayRing:
        """Return the replay ring of a layer, by slot.

        Raises:
            SlotError: the layer keeps no state here, or the plan has no rings.
        """
        owner = self.owner_for_read(layer_id)
        if self.cursor is None:
            raise SlotError(f"layer {layer_id} has no replay ring; plan with replay_rings=true")
        delta, key, decay = (self.parts.tensors.rows(name, owner) for name in RING_NAMES)
        return ReplayRing(delta=delta, key=key, decay=decay, cursor=self.cursor)

    def clear_slots(self, slots: torch.Tensor) -> None:
        """Put slots into the state of a request that begins: zero in every layer; what they held is gone.

        Raises:
            SlotError: with debug, a slot does not exist or is not handed out; nothing is written.
        """
        self._check_loc(None, slots)
        self.store.clear(self.placed(slots))

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all that the slots `source` own to `target`, in every layer; reads happen first.

        Raises:
            SlotError: another number of targets than of sources; with debug, a slot does not exist, or a target
                is not handed out. Nothing is written.
        """
        if source.shape != target.shape:
            raise SlotError(f"{target.numel()} target slots for {source.numel()} source slots; nothing was copied")
        # A source may have been given back since it was chosen: nothing was written to it before this copy.
        self._check_range(source)
        self._check_loc(None, target)
        self.store.copy(self.placed(source), self.placed(target))

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Do as `copy_slots`: slots are those of states here."""
        self.copy_slots(src_loc, tgt_loc)

    def get_cpu_copy(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Return host copies of all that the state slots `indices` own, as the store saves them."""
        self._check_loc(None, indices)
        return self.store.save(self.placed(indices))

    def load_cpu_copy(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Write what `get_cpu_copy` returned to the state slots `indices`; bit-identical.

        Raises:
            SlotError: the copies are of another pool or for another number of slots; nothing is written.
        """
        self.verify_copies(copies, indices)
        self.store.restore(copies, self.placed(indices))

    def verify_copies(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Raise what `load_cpu_copy` would raise, and change nothing."""
        empty = self.store.save(indices[:0])
        expected = [((indices.shape[0], *copy.shape[1:]), copy.dtype) for copy in empty]
        if [(tuple(copy.shape), copy.dtype) for copy in copies] != expected:
            raise SlotError(
                f"these {len(copies)} copies do not fit the {len(expected)} tensors of this pool for "
                f"{indices.shape[0]} state slots; load what get_cpu_copy of the same pool returned for as many slots"
            )
        self._check_loc(None, indices)

    def snapshot_views(self, layer_id: int) -> SnapshotViews:
        """Return the draft snapshots of a layer as they lie, by request row.

        Raises:
            SlotError: the layer keeps no state here, or the plan has no speculation.
        """
        owner = self.owner_for_read(layer_id)
        return self._with_snapshots().views(owner)

    def write_snapshot(
        self,
        layer_id: int,
        rows: torch.Tensor,
        step: int,
        conv_window: torch.Tensor | Sequence[torch.Tensor],
        temporal: torch.Tensor | None = None,
    ) -> None:
        """Write what the request rows `rows` hold after their draft token `step`, counted from 0.

        `conv_window` is ``[n, …]``, shaped as in `needed_state`; one for each convolution where there are several.
        Along a chain a window must continue the step before: they share all inputs but one.

        Raises:
            SlotError: no such layer or step, or values that do not fit; nothing is written.
        """
        import torch

        owner, snapshots = self.owner_for_read(layer_id), self._with_snapshots()
        self._check_rows(rows)
        windows = [conv_window] if isinstance(conv_window, torch.Tensor) else conv_window
        snapshots.write(owner, rows, step, windows, temporal)

    def window(self, layer_id: int, rows: torch.Tensor, step: int | torch.Tensor, place: int = 0) -> torch.Tensor:
        """Return copies ``[n, …]`` of the conv windows of request rows at a step, or at one step a row.

        Raises:
            SlotError: no such layer, step or convolution.
        """
        owner, snapshots = self.owner_for_read(layer_id), self._with_snapshots()
        if not 0 <= place < len(self._conv[owner]):
            raise SlotError(
                f"layer {layer_id} keeps {len(self._conv[owner])} convolutions, so there is no number {place}"
            )
        self._check_rows(rows)
        return snapshots.window(owner, rows, step, place)

    def commit(self, rows: torch.Tensor, steps: torch.Tensor, slots: torch.Tensor) -> None:
        """Make the snapshot after draft token ``steps[i]`` of row ``rows[i]`` the state of slot ``slots[i]``.

        For each request that was verified; in every layer, without waiting for the device. A replay ring of
        the slot begins anew, for the state that is written holds all steps.

        Raises:
            SlotError: not as many rows as steps and slots, or no speculation; with debug, one that does not
                exist. Nothing is written.
        """
        snapshots = self._with_snapshots()
        if not rows.shape == steps.shape == slots.shape:
            raise SlotError(f"{rows.numel()} rows, {steps.numel()} steps, {slots.numel()} slots; nothing was written")
        self._check_rows(rows)
        self._check_loc(None, slots)
        if self.parts.debug and steps.device.type != "meta":
            for step in steps.tolist():
                snapshots.check_step(step)
        slots = self.placed(slots)
        snapshots.commit(rows, steps, slots, self._committed)
        if self.cursor is not None:
            self.parts.kernels.clear([self.parts.tensors.paged(CURSOR)], slots)

    def buffer_infos(self) -> list[BufferInfo]:
        """Return none: nothing here is counted in tokens. See `state_infos`."""
        return []

    def regions(self) -> list[Region]:
        """Return none: nothing here is counted in tokens."""
        return []

    def state_infos(self) -> list[BufferInfo]:
        """Describe all that a slot owns, buffer by buffer, layer by layer; an item is a slot."""
        return super().buffer_infos()

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return pointers, lengths and bytes per slot of memory without gaps: where slots hold all layers, of all."""
        infos, layout = self.state_infos(), self.parts.tensors.page_layout
        if layout:
            inside = {block.buffer for block in layout.blocks}
            first = self.parts.tensors.storages_of(layout.blocks[0].buffer)[0].data_ptr() + layout.offset
            apart = [info for info in infos if info.name not in inside]
            found = [(first, layout.nbytes, layout.page_nbytes), *((i.pointer, i.nbytes, i.item_nbytes) for i in apart)]
        else:
            found = [(info.pointer, info.nbytes, info.item_nbytes) for info in infos]
        return [pointer for pointer, _, _ in found], [size for _, size, _ in found], [item for _, _, item in found]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Refuse: a state has no keys."""
        raise self.refuse_kv(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Refuse: a state has no values."""
        raise self.refuse_kv(layer_id)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Refuse: a state has neither keys nor values."""
        raise self.refuse_kv(layer_id)

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Refuse: a state has no latent rows."""
        raise self.refuse_kv(layer_id)

    def get_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse: a state has no latent rows."""
        raise self.refuse_kv(layer_id)

    def refuse_kv(self, layer_id: int) -> SlotError:
        """Return the error for keys or values that are asked for."""
        if layer_id not in self._owner_of:
            return self.refuse_layer(layer_id)
        return SlotError(
            f"layer {layer_id} keeps a state per request, no keys and values; read it with get_state({layer_id})"
        )

    def refuse_layer(self, layer_id: int) -> SlotError:
        """Return the error for a layer that this pool does not hold."""
        return SlotError(f"layer {layer_id} keeps no state in this pool; it holds the layers {list(self.layer_ids)}")

    @cached_property
    def _committed(self) -> list[list[torch.Tensor]]:
        """Paged views of each layer's convolutions and temporal state, the targets of a commit."""
        names = [n for n in self.parts.tensors.names if n.split(".")[0] in (CONV, TEMPORAL)]
        return [[self.parts.tensors.paged(name, layer) for name in names] for layer in self.group.layer_ids]

    def _with_snapshots(self) -> Snapshots:
        if self._snapshots is None:
            raise SlotError("there are no draft snapshots: this plan has no speculative_algorithm")
        return self._snapshots

    def _check_rows(self, rows: torch.Tensor) -> None:
        """With debug, verify that request rows exist."""
        if not self.parts.debug or rows.device.type == "meta":
            return
        limit = self._with_snapshots().rows
        for row in rows.tolist():
            if not 0 <= row < limit:
                raise SlotError(
                    f"group {self.group.name!r}: request row {row} is outside 0 … {limit - 1}; nothing was written"
                )

    def _check_range(self, slots: torch.Tensor) -> None:
        super()._check_loc(None, slots)

    def _check_loc(self, layer_id: int | None, loc: torch.Tensor) -> None:
        """With debug, verify that state slots exist and are handed out (or padding)."""
        super()._check_loc(layer_id, loc)
        requests = self.parts.request_pool
        if not self.parts.debug or loc.device.type == "meta" or not isinstance(requests, _NamesStates):
            return
        for slot in loc.tolist():
            if slot and requests.states.owner_of(slot) is None:
                raise SlotError(
                    f"group {self.group.name!r}: state slot {slot}{self._holder(slot)} is not handed out; "
                    "nothing was written"
                )

    def _holder(self, slot: int) -> str:
        """Return which requests' rows name a state slot, for a message."""
        requests = self.parts.request_pool
        if not isinstance(requests, _NamesStates):
            return ""
        rows, live = (requests.row_to_state == slot).nonzero().flatten().tolist(), requests.live_rows()
        names = [repr(live[row]) for row in rows if row in live]
        return f" (of request {', '.join(names)})" if names else ""


def state_buffer(query: PoolQuery, name: str, role: str, shape: tuple[int, ...], dtype: str) -> Buffer:
    """Return a buffer with a row a slot for each layer of the group, all layers in one tensor; slot 0 is padding."""
    group = group_of(query)
    return Buffer(
        name=name,
        role=role,
        space=group.space,
        shape=shape,
        dtype=dtype,
        layers=group.layer_ids,
        stacked=True,
        worker=query.worker,
        is_kv=True,
    )
