"""States of requests: written after each step as a function of request and tokens, compared at the next one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvdock.demand import draft_tokens
from kvdock.pools.state import CONV, TEMPORAL, StatePool
from kvdock.requests.hybrid import HybridReqToTokenPool
from kvdock.testing.values import RunError, Values, WrongValue, column_bytes, hashed_bytes

if TYPE_CHECKING:
    import torch

    from kvdock.cache import KVCache
    from kvdock.testing.slots import Request

TRACKING = 0.5
"""How often a step that ends with a page writes the state to a track slot, where requests have some."""
COMMITTING = 0.25
"""How often a state comes from a draft's snapshot, where there are snapshots."""
_APART = 2**32
"""What tells the hash of a state from that of the token before it."""
_HALF = 127
"""States are sums of two numbers up to this, which every float of 16 bits or more holds."""


class Cell(NamedTuple):
    """One tensor of a layer's state ``[slots + 1, …, last]``, and what is the same in every slot.

    `base` ``[…, 1]`` and `columns` ``[last]`` are numbers up to `_HALF` that tell layer and place.
    """

    name: str
    view: torch.Tensor
    base: torch.Tensor
    columns: torch.Tensor
    is_ring: bool

    def fill(self, row: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return `out`, filled with the state that `row`, the bytes of a request and its tokens, stands for."""
        import torch

        last = (row[: len(self.columns)] + self.columns) & _HALF
        return torch.add(self.base, last.to(self.base.dtype), out=out)


class Layer(NamedTuple):
    """The cells of a layer's state: convolutions, the temporal state, replay rings."""

    pool: StatePool
    layer_id: int
    cells: tuple[Cell, ...]


class Kept(NamedTuple):
    """A state slot that a prefix cache holds, and the tokens that its state has seen."""

    slot: int
    tokens: int


Copies = list[list["torch.Tensor"]]
"""The state of a request on the host, pool by pool."""


class States:
    """What a scheduler does with the states of requests; without states in the plan, nothing.

    The state of a request with `tokens` tokens differs from that of every other request and number of tokens
    in about every element; with no token it is zero.
    """

    def __init__(self, cache: KVCache, values: Values, rng: random.Random) -> None:
        rows = cache.req_to_token_pool
        self.cache = cache
        self.values = values
        self.rng = rng
        self.rows = rows if isinstance(rows, HybridReqToTokenPool) else None
        self.pools = [pool for pool in cache.pools.values() if isinstance(pool, StatePool)]
        self.layers = [
            Layer(pool, layer_id, tuple(self._cells_of(pool, layer_id)))
            for pool in self.pools
            for layer_id in pool.layer_ids
        ]
        self._widest = max((len(cell.columns) for layer in self.layers for cell in layer.cells), default=0)
        self._scratch: dict[tuple[object, ...], torch.Tensor] = {}
        self.has_snapshots = any(pool.snapshot_buffers(pool.query) for pool in self.pools)
        self.checks = self.forks = self.tracked = self.committed = 0

    def __bool__(self) -> bool:
        """Whether requests have states in this plan, those of layers on other ranks included."""
        return self.rows is not None

    def counts(self) -> dict[str, int]:
        """Return what a report says of states."""
        return {
            "state_checks": self.checks,
            "forks": self.forks,
            "tracked": self.tracked,
            "committed": self.committed,
        }

    def available(self) -> dict[str, int]:
        """Return the free state slots."""
        return {} if self.rows is None else {"state": self.rows.available_states()}

    def check(self, request: Request) -> None:
        """Compare the state of a request with what it must be after the tokens that it has.

        Raises:
            WrongValue: names request, position and layer.
        """
        if self.rows is None:
            return
        import torch

        slot, row = self.rows.state_of(request.name), self._row(request, request.length)
        for layer in self.layers:
            place = self._place(layer.pool, slot)
            for cell in layer.cells:
                expected = self._scratch_of(cell)
                cell.fill(row, expected) if request.length else expected.zero_()
                if not torch.equal(cell.view[place], expected):
                    raise self._wrong(request, layer, f"{cell.name} state", slot)
            self._check_cursor(request, layer, slot)
            self.checks += len(layer.cells)

    def _scratch_of(self, cell: Cell) -> torch.Tensor:
        """Return a tensor shaped as one slot, the same one for all cells of that shape."""
        key = (cell.view.shape[1:], cell.view.dtype)
        if key not in self._scratch:
            self._scratch[key] = cell.view[0].clone()
        return self._scratch[key]

    def _wrong(self, request: Request, layer: Layer, name: str, slot: int) -> WrongValue:
        layer_id, worker = layer.layer_id, layer.pool.query.worker
        position = max(0, request.length - 1)
        what = "is not the one that was written" if request.length else "is not zero before its first token"
        return WrongValue(
            f"request {request.name}, position {position}, layer {layer_id} ({worker}): the {name} in slot {slot} {what}",
            request=request.name,
            position=position,
            layer_id=layer_id,
        )

    def _check_cursor(self, request: Request, layer: Layer, slot: int) -> None:
        """Compare the cursor of the replay rings, which all layers of a pool share."""
        cursor = layer.pool.cursor
        if cursor is not None and int(cursor[self._place(layer.pool, slot)]) != _cursor(layer.pool, request.length):
            raise self._wrong(request, layer, "replay cursor", slot)

    def write(self, request: Request, salt: int | None = None, more: int = 0) -> None:
        """Write the state of a request after the tokens that it has; `salt` stands for tokens that are not its own."""
        if self.rows is not None:
            self._write_slot(self.rows.state_of(request.name), request, request.length + more, salt)

    def advance(self, request: Request) -> None:
        """Let the state follow the tokens, as the layers' kernels would: at once, or through a draft's snapshot."""
        if self.rows is None:
            return
        if self.has_snapshots and self.rng.random() < COMMITTING:
            self._commit(request)
        else:
            self.write(request)
        if self.rows.tracks_per_request and request.length % self._page_size == 0 and self.rng.random() < TRACKING:
            self._track(request)

    def save(self, request: Request) -> Copies:
        """Return the state of a request on the host."""
        return [] if self.rows is None else [pool.get_cpu_copy(self._slot(request)) for pool in self.pools]

    def load(self, request: Request, copies: Copies) -> None:
        """Bring the state of a request back to its slot, which may be another one."""
        if self.rows is not None:
            self.rows.expect_states([request.name])
            for pool, share in zip(self.pools, copies, strict=True):
                pool.load_cpu_copy(share, self._slot(request))
            self.rows.states_arrived([request.name])

    def tokens_to_donate(self, request: Request) -> int:
        """Return after how many tokens the state was that a request could leave to a prefix cache; 0: none."""
        if self.rows is None or not self.rows.tracks_per_request:
            return request.length
        return request.tracks.get(self._whole_track(request), 0)

    def donate(self, request: Request, replace: bool) -> Kept | None:
        """Let a request leave `tokens_to_donate`; ``None`` if there is no state slot for it."""
        if self.rows is None:
            return None
        tokens = self.tokens_to_donate(request)
        slot = self.rows.donate(request.name, replace=replace)
        if slot is None:
            return None
        request.tracks.pop(slot, None)
        return Kept(slot, tokens)

    def fork(self, request: Request, kept: Kept | None) -> None:
        """Let a request begin with a kept state."""
        if self.rows is not None and kept is not None:
            self.rows.fork_state(request.name, kept.slot)
            self.forks += 1

    def give(self, kept: Kept | None) -> None:
        """Give a kept state back."""
        if self.rows is not None and kept is not None:
            self.rows.free_states([kept.slot])

    def speculate(self, requests: Sequence[Request], ahead: Sequence[int], salts: Sequence[int]) -> list[Copies]:
        """Let requests' states run `ahead` with values that are not their own; return what `roll_back` needs.

        With snapshots the states themselves stay, as verification leaves them.
        """
        if self.rows is None or not self.has_snapshots:
            saved = [self.save(request) for request in requests]
            for request, more, salt in zip(requests, ahead, salts, strict=True):
                self.write(request, salt, more)
            return saved
        for request, more, salt in zip(requests, ahead, salts, strict=True):
            self._write_snapshot(request, self.rng.randrange(self._steps), request.length + more, salt)
        return []

    def roll_back(self, requests: Sequence[Request], saved: Sequence[Copies]) -> None:
        """Give requests back the states that they had."""
        for request, copies in zip(requests, saved, strict=False):
            self.load(request, copies)

    def _commit(self, request: Request) -> None:
        """Write the state after a request's last token as a draft's snapshot, and accept it."""
        step = self.rng.randrange(self._steps)
        self._write_snapshot(request, step, request.length, None)
        rows, steps, slots = self._numbers(request.row), self._numbers(step), self._slot(request)
        for pool in self.pools:
            pool.commit(rows, steps, slots)
            if pool.cursor is not None and int(pool.cursor[self._place(pool, int(slots))]):
                raise RunError(f"request {request.name}: a commit left the replay cursor of slot {int(slots)} in place")
        # A ring holds steps beside the state, which the commit made whole.
        self._write_slot(int(slots), request, request.length, only_rings=True)
        self.committed += 1

    def _write_snapshot(self, request: Request, step: int, tokens: int, salt: int | None) -> None:
        import torch

        row, rows = self._row(request, tokens, salt), self._numbers(request.row)
        for layer in self.layers:
            cells = [cell for cell in layer.cells if not cell.is_ring]
            numbers = [(cell.name, cell.fill(row, torch.empty_like(cell.view[0])).unsqueeze(0)) for cell in cells]
            windows = [found for name, found in numbers if name != TEMPORAL]
            temporal = next((found for name, found in numbers if name == TEMPORAL), None)
            layer.pool.write_snapshot(layer.layer_id, rows, step, windows, temporal)

    def _track(self, request: Request) -> None:
        """Write the state to the track slot in turn; where tracking is lazy, take a second one for the next time."""
        if self.rows is None:
            return
        slots = self._tracks(request)
        active = int(self.rows.tracks_of([request.name])[0])
        if len(slots) == 1 and active in request.tracks and self._is_lazy:
            # What is taken now is cleared before the next step, so nothing is written to it yet.
            if self.rows.take_second_track([request.name]) is not None:
                self.rows.swap_tracks([request.name])
            return
        self._write_slot(active, request, request.length)
        request.tracks[active] = request.length
        self.rows.swap_tracks([request.name])
        self.tracked += 1

    def _tracks(self, request: Request) -> list[int]:
        if self.rows is None or self.rows.track_slots is None:
            return []
        return [slot for slot in self.rows.track_slots[request.row].tolist() if slot]

    def _whole_track(self, request: Request) -> int:
        """Return the track slot that is not being written."""
        if self.rows is None:
            return 0
        active = int(self.rows.tracks_of([request.name])[0])
        return next((slot for slot in self._tracks(request) if slot != active), active)

    def _cells_of(self, pool: StatePool, layer_id: int) -> Iterator[Cell]:
        conv, temporal = pool.needed_state(layer_id)
        views = [(CONV, view, False) for view in conv] + ([] if temporal is None else [(TEMPORAL, temporal, False)])
        if pool.cursor is not None:
            ring = pool.replay_ring(layer_id)
            views += [(f"replay {name}", getattr(ring, name), True) for name in ("delta", "key", "decay")]
        for place, (name, view, is_ring) in enumerate(views):
            *outer, last = view.shape[1:]
            key = self.values, pool.query.worker, layer_id
            base = column_bytes(*key, f"{name} {place}", math.prod(outer), view.device) & _HALF
            columns = column_bytes(*key, f"{place} {name}", last, view.device)
            yield Cell(name, view, base.view(*outer, 1).to(view.dtype), columns, is_ring)

    @property
    def _page_size(self) -> int:
        return self.cache.plan.options.values.page_size or 1

    @property
    def _is_lazy(self) -> bool:
        return self.cache.plan.options.values.state_extra_buffer == "lazy"

    @property
    def _steps(self) -> int:
        return min(draft_tokens(pool.query) for pool in self.pools)

    def _numbers(self, *numbers: int) -> torch.Tensor:
        import torch

        return torch.tensor(numbers, dtype=torch.int64, device=self.cache.req_to_token_pool.req_to_token.device)

    def _slot(self, request: Request) -> torch.Tensor:
        return self._numbers() if self.rows is None else self._numbers(self.rows.state_of(request.name))

    def _place(self, pool: StatePool, slot: int) -> int:
        """Return the row of a slot, which in unified memory is where it lies at this moment."""
        return int(pool.row_slots(self._numbers(slot)))

    def _row(self, request: Request, tokens: int, salt: int | None = None) -> torch.Tensor:
        """Return numbers up to `_HALF` that tell request and tokens, uint8 ``[widest]``."""
        import torch

        last = self._numbers(tokens - 1)
        salts = request.salts(last) if salt is None else torch.full_like(last, salt)
        return hashed_bytes(salts, last + _APART, self._widest)[0] & _HALF

    def _write_slot(
        self, slot: int, request: Request, tokens: int, salt: int | None = None, only_rings: bool = False
    ) -> None:
        row = self._row(request, tokens, salt)
        for layer in self.layers:
            place = self._place(layer.pool, slot)
            for cell in layer.cells:
                if cell.is_ring or not only_rings:
                    cell.fill(row, cell.view[place])
        for pool in self.pools:
            if pool.cursor is not None:
                pool.cursor[self._place(pool, slot)] = _cursor(pool, tokens)


def _cursor(pool: StatePool, tokens: int) -> int:
    return tokens % (pool.query.options.replay_ring_length or 1)
