"""The request table of models with per-request states: a row, a state slot and the slots in which it is tracked."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvdock.allocators.debug import held_states as named_states
from kvdock.allocators.lengths import on_host, to_device, whole_count
from kvdock.demand import track_slots
from kvdock.errors import SlotError
from kvdock.layout import REQUESTS, STATE, Buffer
from kvdock.planned import Parts
from kvdock.queries import RequestQuery
from kvdock.requests.holdings import distinct
from kvdock.requests.states import Donated, StateSlots, shown
from kvdock.requests.table import ReqToTokenPool

if TYPE_CHECKING:
    import torch

MAX_TRACKS = 2
"""Columns of `track_slots`: one is written while the other is whole."""


@dataclasses.dataclass(slots=True)
class _Held:
    """State slots of a request; 0: it left its state to a prefix cache. Of two tracks, `active` is being written."""

    state: int = 0
    tracks: list[int] = dataclasses.field(default_factory=list)
    active: int = 0

    def all(self) -> list[int]:
        return [self.state, *self.tracks] if self.state else list(self.tracks)


class HybridReqToTokenPool(ReqToTokenPool):
    """Beside each row a state slot, and the slots in which the state is tracked for a prefix cache.

    `row_to_state` ``[rows + 1]`` int32 and `track_slots` ``[rows + 1, 2]`` int64 are the device's view, indexed
    by row; a row without a request, or without a second track, holds 0, the padding slot. Admission is atomic:
    a request gets its row and all of its slots, or nothing changes. A slot is cleared on first use, not on
    free: `take_fresh` names what was handed out, `take_copies` what is filled from another slot instead, and
    `KVCache.prepare_states` does both before a forward pass. No call waits for the device.
    """

    options = ReqToTokenPool.options | {"state_extra_buffer"}

    def __init__(self, query: RequestQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        tensors = parts.tensors
        self.states = StateSlots("space 'state'", tensors.rows("free_states").numpy(), parts.sizes[STATE], parts.debug)
        """Who holds which state slot."""
        self.row_to_state: torch.Tensor = tensors.rows("row_to_state")
        self.tracks_per_request = track_slots(query)
        """Track slots that a request has from its admission on."""
        self.track_slots: torch.Tensor | None = tensors.rows("track_slots") if self.tracks_per_request else None
        self._held: dict[Hashable, _Held] = {}
        self._fresh: dict[int, None] = {}
        self._expected: set[int] = set()
        self._copies: dict[int, int] = {}
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

    def alloc(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Return a row for each request, with its state and track slots; what a request has already, it keeps.

        ``None`` (and nothing changes) if there are not enough rows or state slots: see `states_needed`.
        """
        self._enter()
        missing = {request: self._missing(request) for request in distinct(requests)}
        owners = [request for request, count in missing.items() for _ in range(count)]
        if len(owners) > self.states.available_size():
            return None
        rows = super().alloc(requests)
        slots = None if rows is None else self.states.alloc(owners)
        if slots is None:
            return None
        self._fresh.update(dict.fromkeys(slots))
        self._hand_out({request: count for request, count in missing.items() if count}, slots)
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
        return self._on_device([self.state_of(request) for request in requests])

    def tracks_of(self, requests: Sequence[Hashable]) -> torch.Tensor:
        """Return the track slot that is being written, of each request ``[n]`` int64 on the device.

        Raises:
            SlotError: a request has no row, or no track slot.
        """
        return self._on_device([held.tracks[held.active] for held in map(self._tracked, requests)])

    def swap_tracks(self, requests: Sequence[Hashable]) -> None:
        """Let the other of two track slots be written from now on; a request with one goes on with it.

        Raises:
            SlotError: a request has no row, or no track slot; nothing changes.
        """
        for held in [self._tracked(request) for request in requests]:
            held.active = (held.active + 1) % len(held.tracks)

    def take_second_track(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Return a second track slot of each request, taken now if it has one only; for lazy tracking.

        ``None`` (and nothing changes) if there are not enough state slots.

        Raises:
            SlotError: a request has no row, or no track slot; nothing changes.
        """
        holdings = {request: self._tracked(request) for request in requests}
        lacking = [request for request, held in holdings.items() if len(held.tracks) < MAX_TRACKS]
        slots = self.states.alloc(lacking)
        if slots is None:
            return None
        self._fresh.update(dict.fromkeys(slots))
        for request, slot in zip(lacking, slots, strict=True):
            holdings[request].tracks.append(slot)
        self._write_maps(lacking)
        return [holdings[request].tracks[1 - holdings[request].active] for request in requests]

    def donate(self, request: Hashable, replace: bool = True) -> int | None:
        """Pass a slot with the request's state to a prefix cache and return it; `free_states` gives it back.

        With track slots it is the one that is not being written (the only one, without a second); the request
        gets a fresh one, unless it has more than it began with. Without track slots it is a new slot to which
        the state is copied (`take_copies`). With ``replace=False`` the request, which ends, gets nothing for
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
            held.state = 0
            self._pass_on(request, state)
            return state
        slots = self.states.alloc([Donated(request)])
        if slots is None:
            return None
        self._copies[slots[0]] = self._copies.get(state, state)
        return slots[0]

    def fork_state(self, request: Hashable, cached_slot: int) -> tuple[int, int]:
        """Let a request begin with the state of a prefix: return the slot that is copied, and its own.

        `take_copies` lists the pair, and the request's slot is not fresh any more. `cached_slot` stays with
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
        source = self._copies.get(cached_slot, cached_slot)
        self._copies[target] = source
        self._fresh.pop(target, None)
        return source, target

    def expect_states(self, requests: Sequence[Hashable]) -> None:
        """Note that the states of requests arrive from elsewhere, such as a transfer: they are not cleared.

        Raises:
            SlotError: a request has no state; nothing changes.
        """
        for slot in [self.state_of(request) for request in requests]:
            self._fresh.pop(slot, None)
            self._copies.pop(slot, None)
            self._expected.add(slot)

    def states_arrived(self, requests: Sequence[Hashable]) -> None:
        """Note that the states that `expect_states` named are there: they may be donated and forked.

        Raises:
            SlotError: a request has no state; nothing changes.
        """
        self._expected.difference_update([self.state_of(request) for request in requests])

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

    def take_fresh(self) -> list[int]:
        """Return the live slots that were handed out since the last call and nothing fills: clear them before use."""
        self._enter()
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh

    def take_copies(self) -> tuple[list[int], list[int]]:
        """Return the slots to copy, and those to copy them to, since the last call; before `take_fresh` are cleared.

        All of it is one copy whose reads come first: a source may be a target as well.
        """
        self._enter()
        targets, sources = list(self._copies), list(self._copies.values())
        self._copies.clear()
        return sources, targets

    def still_due(self, sources: Sequence[int], targets: Sequence[int], fresh: Sequence[int]) -> None:
        """Put back what `take_copies` and `take_fresh` returned, because it was not done."""
        self._copies.update(zip(targets, sources, strict=True))
        self._fresh.update(dict.fromkeys(fresh))

    def clear(self) -> None:
        """Give back every row and every state slot, those of a prefix cache as well."""
        super().clear()
        self.states.clear()
        for book in (self._held, self._fresh, self._copies, self._expected):
            book.clear()
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

    def _hand_out(self, missing: dict[Hashable, int], slots: list[int]) -> None:
        taken = iter(slots)
        for request, count in missing.items():
            held = self._held.setdefault(request, _Held())
            own = [next(taken) for _ in range(count)]
            if not held.state:
                held.state = own.pop(0)
            held.tracks += own
        self._write_maps(list(missing))

    def _donate_track(self, request: Hashable, held: _Held, replace: bool) -> int | None:
        place = (held.active + 1) % len(held.tracks)
        slot = held.tracks[place]
        self._refuse_fresh(slot)
        spares = replace and len(held.tracks) <= self.tracks_per_request
        fresh = self.states.alloc([request]) if spares else []
        if fresh is None:
            return None
        self._fresh.update(dict.fromkeys(fresh))
        held.tracks[place : place + 1] = fresh
        if not fresh:
            held.active = 0
        self._pass_on(request, slot)
        return slot

    def _pass_on(self, request: Hashable, slot: int) -> None:
        self.states.pass_on([slot], Donated(request))
        self._write_maps([request])

    def _refuse_fresh(self, slot: int) -> None:
        if slot in self._expected:
            raise SlotError(f"what state slot {slot} waits for has not arrived yet; nothing was changed")
        if slot in self._fresh:
            raise SlotError(
                f"nothing was written to state slot {slot} yet: it was handed out since the last forward pass "
                "(prepare_states); nothing was changed"
            )

    def _give(self, slots: list[int]) -> None:
        self.states.free(slots)
        for slot in slots:
            self._fresh.pop(slot, None)
            self._copies.pop(slot, None)
            self._expected.discard(slot)

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

    def _write_maps(self, requests: Sequence[Hashable]) -> None:
        """Write the slots of requests to the device's maps, one scatter a map."""
        if not requests:
            return
        rows = self._on_device([self._rows[request] for request in requests])
        holdings = [self._held[request] for request in requests]
        self.row_to_state.index_copy_(0, rows, self._on_device([h.state for h in holdings]).to(self.row_to_state.dtype))
        if self.track_slots is not None:
            padded = [slot for h in holdings for slot in (*h.tracks, 0, 0)[:MAX_TRACKS]]
            self.track_slots.index_copy_(0, rows, self._on_device(padded).view(-1, MAX_TRACKS))

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        import numpy as np

        return to_device(np.array(numbers, dtype=np.int64), self.row_to_state.device)

    def _zero_maps(self) -> None:
        self.row_to_state.zero_()
        if self.track_slots is not None:
            self.track_slots.zero_()
