"""States of compression: what the next compressed rows are made of, in rings, or as a running maximum, sum and row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvdock.errors import SlotError
from kvdock.layout import Buffer
from kvdock.planned import Parts
from kvdock.pools.base import BufferInfo, Region
from kvdock.pools.grouped import group_of
from kvdock.queries import PoolQuery

from kvdock_dsv4.geometry import banks_of, online_slot, request_state_slot
from kvdock_dsv4.model import DSV4Params, params_of
from kvdock_dsv4.pools.placed import UnkeyedPool, whole_rows
from kvdock_dsv4.settings import state_dtype
from kvdock_dsv4.sizing import INDEX_STATE, state_guard

if TYPE_CHECKING:
    import torch
    from kvdock.testing.kinds import Kind

STATES = "states"


class Ring(NamedTuple):
    """What the tokens of a ring left: rows and their scores, ``[…, columns]``; columns twice where windows overlap."""

    kv: torch.Tensor
    score: torch.Tensor


class Online(NamedTuple):
    """The running maximum and sum of the scores, and the row that they weigh: ``[…, columns]`` each."""

    maximum: torch.Tensor
    total: torch.Tensor
    kv: torch.Tensor


class CompressStatePool(UnkeyedPool):
    """A state a slot; the last row of each layer is the empty state, of which a row that has no past is made.

    Where states follow sliding pages, a page has a ring and page 0 is padding; where they follow requests, a
    request has one and row 0 is padding. `DSV4Pool` says where a token's state lies. Nothing is cleared when a
    ring is handed out again: its other states are those of whoever had it before, so a kernel reads what was written
    since, and the empty state for what was not (`DSV4Pool.request_state_mask`).
    """

    features: ClassVar[frozenset[str]] = frozenset({"fp8", "hisparse"})
    options: ClassVar[frozenset[str]] = frozenset({"state_dtype"})
    keeps: ClassVar[str] = "states"
    parts_of_row: ClassVar[int] = 2
    """Vectors side by side in a state: the row, then its score."""

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.ratio = _ratio(query)
        self.ring = query.space.page_size
        self._states = {layer_id: parts.tensors.rows(STATES, layer_id) for layer_id in self.group.layer_ids}
        self._fill_empty()

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the states: ``2 · columns`` a slot, twice where windows overlap; the last row is the empty state.

        Raises:
            PlanError: a type that cannot hold states, or layers of another family.
        """
        ratio = _ratio(query)
        width = cls.parts_of_row * columns_of(query)
        return (_buffer(query, width, state_dtype(query), state_guard(query, ratio), round_rows_to=ratio),)

    @property
    def empty_slot(self) -> int:
        """Where the empty state lies, in every layer: the last row."""
        return next(iter(self._states.values())).shape[0] - 1

    def get_states(self, layer_id: int) -> Ring | Online:
        """Return the states of a layer by slot, as views ``[rows, columns]``.

        Raises:
            SlotError: the layer keeps none here.
        """
        return self._named(self._states[self.owner_for_read(layer_id)])

    def get_raw_kv_buffer(self, layer_id: int) -> dict[str, torch.Tensor]:
        """Return the states of a layer as they lie: ``states`` ``[rows, width]``."""
        return {STATES: self._states[self.owner_for_read(layer_id)]}

    def set_states(self, layer_id: int, loc: torch.Tensor, *vectors: torch.Tensor) -> None:
        """Write the vectors of a state, ``[n, columns]`` each in the order of `get_states`, to the slots `loc`.

        Raises:
            SlotError: the layer keeps none here, or the shapes do not fit; with debug, a ring that is nobody's, or a place
                that is given twice. Nothing is written.
        """
        import torch

        states = self._states[self.owner_for_read(layer_id)]
        columns = states.shape[1] // self.parts_of_row
        if len(vectors) != self.parts_of_row:
            raise SlotError(f"layer {layer_id}: {len(vectors)} vectors of a state; give {self.parts_of_row}")
        for vector in vectors:
            self.check_rows(layer_id, (columns,), loc, vector)
        self.check_distinct(layer_id, loc)
        row = torch.cat([vector.to(states.dtype) for vector in vectors], -1)
        self.parts.kernels.store(states.unsqueeze(1), self.row_slots(loc), row)

    def read_states(self, layer_id: int, loc: torch.Tensor) -> Ring | Online:
        """Return copies ``[n, columns]`` of the states at the slots `loc`."""
        states = self._states[self.owner_for_read(layer_id)].unsqueeze(1)
        return self._named(self.parts.kernels.gather(states, self.row_slots(loc)))

    def clear(self) -> None:
        """Zero every state but the empty one."""
        super().clear()
        self._fill_empty()

    def get_request_copy(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return host copies of what the request rows `rows` own here; where states follow pages, none.

        Raises:
            SlotError: a row does not exist, or is given twice; with debug, it is nobody's.
        """
        return self.get_cpu_copy(self._slots_of(rows)) if self._is_by_request else []

    def load_request_copy(self, copies: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Write what `get_request_copy` returned to the request rows `rows`; bit-identical.

        Raises:
            SlotError: the copies are of another pool or for another number of rows, or as `get_request_copy`; nothing is
                written.
        """
        self.verify_request_copy(copies, rows)
        if self._is_by_request:
            self.load_cpu_copy(copies, self._slots_of(rows))

    def verify_request_copy(self, copies: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Raise what `load_request_copy` would raise, and change nothing."""
        if self._is_by_request:
            self.verify_copies(copies, self._slots_of(rows))
        elif copies:
            raise SlotError(f"group {self.group.name!r} keeps nothing by request, but {len(copies)} copies are given")

    def slots_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return every slot of request rows, row by row."""
        import torch

        offsets = torch.arange(self.ring, dtype=torch.int64, device=rows.device)
        return request_state_slot(rows.to(torch.int64).unsqueeze(-1), offsets, self.ring).flatten()

    @property
    def row_count(self) -> int:
        """Request rows that have states here, padding included."""
        return self.parts.sizes[self.group.space] // self.ring + 1

    def _slots_of(self, rows: torch.Tensor) -> torch.Tensor:
        return self.slots_of_rows(whole_rows(rows, self.row_count))

    def _check_loc(self, layer_id: int | None, loc: torch.Tensor) -> None:
        super()._check_loc(layer_id, loc)
        if self._is_by_request:
            self.check_requests(loc.clamp(min=0) // self.ring)

    @property
    def _is_by_request(self) -> bool:
        return self.query.space.issued_by == "request_pool"

    def slot_views(self) -> list[torch.Tensor]:
        """Return the states of each layer, every row a slot, the empty state included."""
        return [states.unsqueeze(1) for states in self._states.values()]

    def buffer_infos(self) -> list[BufferInfo]:
        """Return none: no page of tokens has states of its own for each token. See `state_infos`."""
        return []

    def regions(self) -> list[Region]:
        """Return none, as `buffer_infos`."""
        return []

    def state_infos(self) -> list[BufferInfo]:
        """Describe the states layer by layer; an item is the ring of a sliding page, or all that a request row owns."""
        return super().buffer_infos()

    def driven(self) -> Kind:
        """Return what a run writes and reads here (`kvdock run`)."""
        from kvdock_dsv4.trace import states_kind

        return states_kind(self)

    def _named(self, states: torch.Tensor) -> Ring | Online:
        return Ring(*states.chunk(2, -1))

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        """Return one empty state of the width of `states`."""
        row = states.new_zeros(states.shape[-1])
        row[states.shape[-1] // 2 :] = -math.inf
        return row

    def _fill_empty(self) -> None:
        for states in self._states.values():
            states[-1] = self._empty(states)


class OnlineStatePool(CompressStatePool):
    """One float32 state a request row: maximum, sum and row of the tokens of its last, unfinished group.

    With speculation a row has a bank for its own state and one after each draft token; `commit` makes one of
    these its own. A state is the empty one from `clear_slots` on, when its row is handed out.
    """

    parts_of_row: ClassVar[int] = 3

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.banks = banks_of(query)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare ``3 · columns`` a request row and bank; a padding row, and two rows beside, the last one empty."""
        width = cls.parts_of_row * columns_of(query)
        return (_buffer(query, width, "float32", guard=3, widen=banks_of(query)),)

    def clear_slots(self, slots: torch.Tensor) -> None:
        """Put the request rows `slots`, all banks of them, into the empty state."""
        rows = self.slots_of_rows(slots)
        for states in self._states.values():
            self.parts.kernels.store(states.unsqueeze(1), rows, self._empty(states).expand(rows.shape[0], -1))

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all that the request rows `source` own to `target`; every source is read first.

        Raises:
            SlotError: another number of targets than of sources; nothing is copied.
        """
        self.move_kv_cache(self.slots_of_rows(target), self.slots_of_rows(source))

    def commit(self, rows: torch.Tensor, accepted: torch.Tensor) -> None:
        """Make the state after draft token ``accepted[i]``, from 1, the own state of request row ``rows[i]``.

        0 leaves it as it is. In every layer, without waiting for the device.

        Raises:
            SlotError: another number of rows; nothing is written.
        """
        self.move_kv_cache(online_slot(rows, 0, self.banks), online_slot(rows, accepted, self.banks))

    def slots_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return every bank of request rows, row by row."""
        import torch

        banks = torch.arange(self.banks, dtype=torch.int64, device=rows.device)
        return (rows.to(torch.int64).unsqueeze(-1) * self.banks + banks).flatten()

    def _check_loc(self, layer_id: int | None, loc: torch.Tensor) -> None:
        """With debug, verify that slots exist: they are rows times banks here."""
        if not self.parts.debug or loc.device.type == "meta":
            return
        outside = loc[(loc < -1) | (loc > self.empty_slot)]
        if outside.numel():
            raise SlotError(
                f"group {self.group.name!r}: state {int(outside[0])} is outside 0 … {self.empty_slot}; nothing was written"
            )
        self.check_requests(loc.clamp(min=0) // self.banks)

    def _named(self, states: torch.Tensor) -> Ring | Online:
        return Online(*states.chunk(3, -1))

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        row = states.new_zeros(states.shape[-1])
        row[: states.shape[-1] // 3] = -math.inf
        return row


def columns_of(query: PoolQuery) -> int:
    """Return the columns of one vector of a group's states: those of its rows, or of its index keys where they are made.

    Twice as many where windows overlap.
    """
    params = params_of(group_of(query).layers)
    dim = params.row_dim if query.kind != INDEX_STATE else params.index_head_dim or 0
    return dim * (2 if params.compress_ratio == 4 else 1)


def state_role(query: PoolQuery) -> str:
    """Return the role of a group's states: a layer of ratio 4 has two kinds, which a transfer tells apart."""
    return "index_state" if query.kind == INDEX_STATE else "state"


def _ratio(query: PoolQuery) -> int:
    params: DSV4Params = params_of(group_of(query).layers)
    return params.compress_ratio


def _buffer(query: PoolQuery, width: int, dtype: str, guard: int, round_rows_to: int = 1, widen: int = 1) -> Buffer:
    group = group_of(query)
    return Buffer(
        name=STATES,
        role=state_role(query),
        space=group.space,
        shape=(width,),
        dtype=dtype,
        layers=group.layer_ids,
        guard=guard,
        widen=widen,
        round_rows_to=round_rows_to,
        worker=query.worker,
        is_kv=True,
    )
