"""The request table of models with per-request states: a row, a state slot and the slots in which it is tracked."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvdock.allocators.debug import held_states as named_states
from kvdock.allocators.lengths import on_host, to_device, whole_count
from kvdock.demand import track_slots
from kvdock.errors import SlotError
from kvdock.layout import REQUESTS, STATE, Buffer
from kvdock.planned import Parts
from kvdock.queries import RequestQuery
from kvdock.requests.holdings import distinct, once_each
from kvdock.requests.states import Donated, DueStates, StateSlots, shown
from kvdock.requests.table import ReqToTokenPool

if TYPE_CHECKING:
    import torch

MAX_TRACKS = 2
"""Columns of `track_slots`: one is written while the other is whole."""


class _Held(NamedTuple):
    """State slots of a request; 0: it left its state to a prefix cache. Of two tracks, `active` is being written."""

    state: int = 0
    tracks: tuple[int, ...] = ()
    active: int = 0

    def all(self) -> list[int]:
        return [self.state, *self.tracks] if self.state else list(self.tracks)


class HybridReqToTokenPool(ReqToTokenPool):
    """Beside each row a state slot, and the slots in which the state is tracked for a prefix cache.

    `row_to_state` ``[rows + 1]`` int32 and `track_slots` ``[rows + 1, 2]`` int64 are the device's view, indexed
    by row; a row without a request, or without a second track, holds 0, the padding slot. Admission is atomic:
    a request gets its row and all of its slots, or nothing changes. A slot is cleared on first use, not on
    free: `due_states` names what was handed out and what is filled from another slot instead, and
    `KVCache.prepare_states` does both before a forward pass. No call waits for the device, and one that fails
    half-way can be made again.
    """

    options = ReqToTokenPool.options | {"state_extra_buffer"}

    def __init__(self, query: RequestQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        tensors = parts.tensors
        self.states = self._make_states(parts)
        """Who holds which state slot."""
        self.row_to_state: torch.Tensor = tensors.rows("row_to_state")
        self.tracks_per_request = track_slots(query)
        """Track slots that a request has from its admission on."""
        self.track_slots: torch.Tensor | None = tensors.rows("track_slots") if self.tracks_per_request else None
        self._held: dict[Hashable, _Held] = {}
        self._dues = [DueStates()]
        self._expected: set[int] = set()
        self._zero_maps()

    @classmethod
    def buffers(cls, query: RequestQuery) -> tuple[Buffer, ...]:
        """Declare, beside the table, the maps on the device (sized by rows) and the free state slots on the host."""
        guard = 1 + cls.extra_rows(query)
        state = Buffer(name="row_to_state", role="map", space=REQUESTS, shape=(), dtype="int32", guard=guard)
        tracks = Buffer(name="track_slots", role="map", space=REQUESTS, shape=(MAX_TRACKS,), dtype="int64", guard=guard)
        free = Buffer(
            name="free_states", role="free_ring", space=STATE, shape=(), dtype="int64", guard=0, memory="host"
        )
        return (*super().buffers(query), state, *([tracks] if track_slots(query) else []), free)

    def _make_states(self, parts: Parts) -> StateSlots:
        ring = parts.tensors.rows("free_states").numpy()
        return StateSlots(f"space {STATE!r}", ring, parts.sizes[STATE], parts.debug)

    def alloc(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Return a row for each request, with its state and track slots; what a request has already, it keeps.

        ``None`` (and nothing changes) if there are not enough rows or state slots: see `states_needed`.
        """
        self._enter()
        missing = {request: self._missing(request) for request in distinct(requests)}
        owners = [request for request, count in missing.items() for _ in range(count)]
        if len(owners) > self.states.available_size():
            return None
        new, before = self.without_row(requests), self.states.backup_state()
        rows = super().alloc(requests)
        if rows is None:
            return None
        try:
            slots = self.states.alloc(owners) or []
            self._change(self._with_slots({request: n for request, n in missing.items() if n}, slots), slots)
        except BaseException:
            self.states.restore_state(before)
            self._take_back_rows(new)
            raise
        return rows

    def free(self, request: Hashable) -> None:
        """Give back the row of a request, its state and its track slots; what it donated stays.

        Raises:
            SlotError: the request has no row, or does not hold its state slots any more; nothing changes.
        """
        row = self.row_of(request)
        held = self._held.get(request)
        if row is not None and held is not None:
            # A stale row, as a padded batch may name it, must not reach another's state.
            self.row_to_state[row].zero_()
            if self.track_slots is not None:
                self.track_slots[row].zero_()
            self._give(held.all())
            del self._held[request]
        super().free(request)

    def state_of(self, request: Hashable) -> int:
        """Return the state slot of a request.

        Raises:
            SlotError: it has no row, or left its state to a prefix cache.
        """
        slot = self._of(request).state
        if not slot:
            raise SlotError(f"request {request!r} left its state to a prefix cache; release it, or alloc it anew")
        return slot

    def states_of(self, requests: Sequence[Hashable]) -> torch.Tensor:
        """Return the state slots of requests ``[n]`` int64 on the device, from what the host knows."""
        distinct(requests)
        return self._on_device([self.state_of(request) for request in requests])

    def tracks_of(self, requests: Sequence[Hashable]) -> torch.Tensor:
        """Return the track slot that is being written, of each request ``[n]`` int64 on the device.

        Raises:
            SlotError: a request has no row, or no track slot.
        """
        holdings = self._all_tracked(requests)
        return self._on_device([holdings[request].tracks[holdings[request].active] for request in requests])

    def swap_tracks(self, requests: Sequence[Hashable]) -> None:
        """Let the other of two track slots be written from now on; a request with one goes on with it.

        Raises:
            SlotError: a request has no row or no track slot, or is named twice; nothing changes.
        """
        for request, held in self._all_tracked(once_each(requests)).items():
            self._held[request] = held._replace(active=_other(held))

    def take_second_track(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Return a second track slot of each request, taken now if it has one only; for lazy tracking.

        ``None`` (and nothing changes) if there are not enough state slots.

        Raises:
            SlotError: a request has no row, or no track slot; nothing changes.
        """
        holdings = self._all_tracked(requests)
        lacking = [request for request, held in holdings.items() if len(held.tracks) < MAX_TRACKS]
        before = self.states.backup_state()
        slots = self.states.alloc(lacking)
        if slots is None:
            return None
        try:
            self._change(self._with_slots(dict.fromkeys(lacking, 1), slots), slots)
        except BaseException:
            self.states.restore_state(before)
            raise
        return [held.tracks[_other(held)] for held in (self._held[request] for request in requests)]

    def donate(self, request: Hashable, replace: bool = True) -> int | None:
        """Pass a slot with the request's state to a prefix cache and return it; `free_states` gives it back.

        With track slots it is the one that is not being written (the only one, without a second); the request
        gets a fresh one, unless it has more than it began with. Without track slots it is a new slot to which
        the state is copied (`due_states`). With ``replace=False`` the request, which ends, gets nothing for
        what it gives: its track, or without track slots its state. ``None``, and nothing changes, if a slot
        is needed and there is none.

        Raises:
            SlotError: the request has no row or nothing to give, or nothing was written to the slot yet.
        """
        held = self._of(request)
        if self.tracks_per_request:
            return self._donate_track(request, self._tracked(request), replace)
        state = self.state_of(request)
        self._refuse_fresh(state)
        if not replace:
            self._pass_on(request, state, held._replace(state=0), [])
            return state
        slots = self.states.alloc([Donated(request)])
        if slots is None:
            return None
        for due in self._dues:
            due.fill(slots[0], state)
        return slots[0]

    def fork_state(self, request: Hashable, cached_slot: int) -> tuple[int, int]:
        """Let a request begin with the state of a prefix: return the slot that is copied, and its own.

        `due_states` lists the pair, and the request's slot is not fresh any more. `cached_slot` stays with
        its holder, who may free it at once.

        Raises:
            SlotError: the request has no state, or `cached_slot` is not live, its own, or not written yet;
                nothing changes.
        """
        target, cached_slot = self.state_of(request), whole_count(cached_slot, "cached_slot")
        if self.states.owner_of(cached_slot) is None or cached_slot in self._of(request).all():
            raise SlotError(
                f"request {request!r} cannot begin with state slot {cached_slot}, which "
                f"{'nobody holds' if self.states.owner_of(cached_slot) is None else 'is its own'}; give a slot of "
                "another holder, such as a prefix cache"
            )
        self._refuse_fresh(cached_slot)
        # Copies happen together, reads first: what is still to be filled is read from where it is filled from.
        sources = [due.fill(target, cached_slot) for due in self._dues]
        return (sources[0] if sources else cached_slot), target

    def expect_states(self, requests: Sequence[Hashable]) -> None:
        """Note that the states of requests arrive from elsewhere, such as a transfer: they are not cleared.

        Raises:
            SlotError: a request has no state; nothing changes.
        """
        slots = [self.state_of(request) for request in distinct(requests)]
        for due in self._dues:
            due.drop(slots)
        self._expected.update(slots)

    def states_arrived(self, requests: Sequence[Hashable]) -> None:
        """Note that the states that `expect_states` named are there: they may be donated and forked.

        Raises:
            SlotError: a request has no state; nothing changes.
        """
        self._expected.difference_update([self.state_of(request) for request in distinct(requests)])

    def free_states(self, slots: Sequence[int] | torch.Tensor) -> None:
        """Give back state slots that requests donated to a prefix cache.

        Raises:
            SlotError: a slot is not live, named twice, or a request's own; nothing changes.
        """
        self._enter()
        given = on_host(slots, "slots").tolist()
        for slot in given:
            owner = self.states.owner_of(slot)
            if owner is not None and not isinstance(owner, Donated):
                raise SlotError(f"state slot {slot} belongs to request {owner!r}; release that instead")
        self._give(given)

    def states_needed(self, requests: Sequence[Hashable]) -> int:
        """Return the state slots that `alloc` would take for these requests."""
        return sum(self._missing(request) for request in distinct(requests))

    def available_states(self) -> int:
        """Return the state slots that can still be handed out."""
        return self.states.available_size()

    def available_size(self) -> int:
        """Return the requests that can still be admitted: with a row, a state and its track slots."""
        return min(super().available_size(), self.states.available_size() // (1 + self.tracks_per_request))

    def due_states(self, pools: int | None = None) -> list[DueStates]:
        """Return what is to be done with live slots before their first use, for each of `pools` pools of states.

        Without `pools` for as many as before, and first for one. Whoever copied empties `copies`, whoever cleared
        after that `fresh`: each pool has lists of its own, so that what failed in one is not done twice in another.
        """
        self._enter()
        if pools is None:
            return self._dues
        first = self._dues[0] if self._dues else DueStates()
        self._dues[pools:] = [first.copy() for _ in range(pools - len(self._dues))]
        return self._dues

    def clear(self) -> None:
        """Give back every row and every state slot, those of a prefix cache as well."""
        super().clear()
        self.states.clear()
        for book in (self._held, self._expected):
            book.clear()
        self._dues = [DueStates() for _ in self._dues]
        self._zero_maps()

    def check(self, held_states: Iterable[int] | None = None) -> None:
        """Verify rows and state slots; with `held_states`, that a prefix cache holds exactly those.

        Raises:
            SlotError: names what does not add up; for slots that leaked, whose they were; `held_states` names one
                twice, or a request's own.
        """
        given = None if held_states is None else named_states(held_states)
        super().check()
        own: list[int] = []
        for request, held in self._held.items():
            wrong = [slot for slot in held.all() if self.states.owner_of(slot) != request]
            if wrong or request not in self._rows:
                raise SlotError(f"request {request!r} lost its row or its state slots {shown(wrong)}")
            own += held.all()
        if mixed := sorted(set(own).intersection(given or ())):
            raise SlotError(
                f"held_states names {shown(mixed)}, which are live requests' own ({self.states.owner_of(mixed[0])!r}); "
                "give those of a prefix cache alone"
            )
        self.states.check(None if given is None else [*own, *given])

    def _missing(self, request: Hashable) -> int:
        """Return the slots that a request lacks: all of them, unless it has a row."""
        held = self._held.get(request, _Held())
        return (not held.state) + max(0, self.tracks_per_request - len(held.tracks))

    def _with_slots(self, missing: Mapping[Hashable, int], slots: Sequence[int]) -> dict[Hashable, _Held]:
        """Return what requests hold with so many of `slots` each: the state first, where that is missing."""
        taken, found = iter(slots), {}
        for request, count in missing.items():
            held = self._held.get(request, _Held())
            own = [next(taken) for _ in range(count)]
            state = held.state or own.pop(0)
            found[request] = held._replace(state=state, tracks=(*held.tracks, *own))
        return found

    def _change(self, holdings: Mapping[Hashable, _Held], fresh: Sequence[int]) -> None:
        """Let requests hold this, `fresh` slots among it; the maps come first, so a call that fails changed nothing."""
        self._write_maps(holdings)
        self._held.update(holdings)
        for due in self._dues:
            due.fresh.update(dict.fromkeys(fresh))

    def _donate_track(self, request: Hashable, held: _Held, replace: bool) -> int | None:
        place = _other(held)
        slot = held.tracks[place]
        self._refuse_fresh(slot)
        spares = replace and len(held.tracks) <= self.tracks_per_request
        before = self.states.backup_state()
        fresh = self.states.alloc([request]) if spares else []
        if fresh is None:
            return None
        tracks = (*held.tracks[:place], *fresh, *held.tracks[place + 1 :])
        try:
            self._pass_on(request, slot, held._replace(tracks=tracks, active=held.active if fresh else 0), fresh)
        except BaseException:
            self.states.restore_state(before)
            raise
        return slot

    def _pass_on(self, request: Hashable, slot: int, left: _Held, fresh: Sequence[int]) -> None:
        self.states.pass_on([slot], Donated(request))
        try:
            self._change({request: left}, fresh)
        except BaseException:
            self.states.pass_on([slot], request)
            raise

    def _refuse_fresh(self, slot: int) -> None:
        if slot in self._expected:
            raise SlotError(f"what state slot {slot} waits for has not arrived yet; nothing was changed")
        if any(slot in due.fresh for due in self._dues):
            raise SlotError(
                f"nothing was written to state slot {slot} yet: it was handed out since the last forward pass "
                "(prepare_states); nothing was changed"
            )

    def _give(self, slots: list[int]) -> None:
        self.states.free(slots)
        for due in self._dues:
            due.drop(slots)
        self._expected.difference_update(slots)

    def _of(self, request: Hashable) -> _Held:
        self._enter()
        held = self._held.get(request)
        if held is None:
            raise SlotError(f"request {request!r} has no row in the request table; was it released before?")
        return held

    def _tracked(self, request: Hashable) -> _Held:
        held = self._of(request)
        if not held.tracks:
            why = "it gave its last one away" if self.tracks_per_request else "state_extra_buffer is off"
            raise SlotError(f"request {request!r} has no track slot ({why}); nothing was changed")
        return held

    def _all_tracked(self, requests: Iterable[Hashable]) -> dict[Hashable, _Held]:
        return {request: self._tracked(request) for request in distinct(requests)}

    def _write_maps(self, holdings: Mapping[Hashable, _Held]) -> None:
        """Write the slots that requests hold to the device's maps, one scatter a map."""
        if not holdings:
            return
        rows = self._on_device([self._rows[request] for request in holdings])
        states = self._on_device([held.state for held in holdings.values()]).to(self.row_to_state.dtype)
        padded = [slot for held in holdings.values() for slot in (*held.tracks, 0, 0)[:MAX_TRACKS]]
        tracks = None if self.track_slots is None else self._on_device(padded).view(-1, MAX_TRACKS)
        # All that can run out of memory is done.
        self.row_to_state.index_copy_(0, rows, states)
        if self.track_slots is not None and tracks is not None:
            self.track_slots.index_copy_(0, rows, tracks)

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        import numpy as np

        return to_device(np.array(numbers, dtype=np.int64), self.row_to_state.device)

    def _zero_maps(self) -> None:
        self.row_to_state.zero_()
        if self.track_slots is not None:
            self.track_slots.zero_()


def _other(held: _Held) -> int:
    """Return the place of the track that is not being written, or of the only one."""
    return (held.active + 1) % len(held.tracks)
