"""Values that tell where they belong: small numbers from request, position, layer and column.

They are exact in the pool's data type, so what is read back is compared bit by bit. A token of another
request, position, layer or side (key or value) differs in about every column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.errors import KVDockError
from kvdock.testing.kinds import Layer, Part, Tokens, Where, layers_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kvdock.cache import KVCache

BLOCK_TOKENS = 1024
"""Tokens that are compared at once, so that a check of a long request takes little memory."""
# Odd 63-bit constants: products of int64 wrap, which is what mixes.
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x2545F4914F6CDD1D)


class RunError(KVDockError):
    """A cache did not do what its plan promised; a fault of pools or allocators, not of the requests."""


class WrongValue(RunError):
    """A value that was read back is not the one that was written.

    Attributes:
        request, position, layer_id: where it was found.
    """

    def __init__(self, message: str, *, request: int, position: int, layer_id: int) -> None:
        super().__init__(message)
        self.request = request
        self.position = position
        self.layer_id = layer_id


class Values:
    """Writes the values of tokens to every layer of a cache, and compares what is read back."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        self._allocator: Any = cache.token_to_kv_pool_allocator
        self._columns: dict[tuple[str, int, str], torch.Tensor] = {}
        self.seed = seed
        self.layers = tuple(layers_of(cache))
        self.owners = tuple(layer for layer in self.layers if layer.layer_id == layer.owner)
        self._is_mapped = any(layer.is_mapped and layer.kind.places is None for layer in self.layers)
        limits = [layer.kind.ahead for layer in self.layers if layer.kind.ahead is not None]
        self.most_ahead: int | None = min(limits, default=None)
        """Tokens that a request may write beyond its own and take back; ``None``: any number."""
        self._widest = max((part.width for layer in self.owners for part in layer.parts), default=0)
        self.checks = 0

    def salt(self, request: int, attempt: int) -> int:
        """Return the number that the values of a request follow; `attempt` tells values that it takes back."""
        mixed = (self.seed * _ODD[1] + request * _ODD[0] + attempt * _ODD[2]) % 2**64
        return (mixed ^ mixed >> 31) * _ODD[3] % 2**63

    def write(
        self,
        salts: torch.Tensor,
        tokens: Tokens,
        at: tuple[str, torch.Tensor] | None = None,
    ) -> None:
        """Write what tokens keep to every layer that owns buffers; `at` as in `Where`."""
        slots = tokens.slots
        hashed = hashed_bytes(salts, tokens.positions, self._widest)
        where = Where(slots, self._mapped(slots), at)
        placed: dict[Any, Placed] = {}
        for layer in self.owners:
            if layer.kind.places is not None:
                found = _placed(layer, layer.kind.places, tokens, hashed, placed)
                if found.where.slots.shape[0]:
                    self._write_layer(layer, found.hashed, found.where)
            else:
                self._write_layer(layer, hashed, where if layer.is_mapped else Where(slots, slots, at))

    def _write_layer(self, layer: Layer, hashed: torch.Tensor, where: Where) -> None:
        written = [part for part in layer.parts if not part.front_of]
        rows = {part.name: self._expected(layer, part, hashed).to(layer.model_dtype) for part in written}
        layer.kind.write(layer, where, rows)

    def check(
        self,
        request: int,
        salts: torch.Tensor,
        seen: tuple[int, int],
        found: Tokens,
    ) -> None:
        """Compare the tokens `found` (positions ascending) of a request, written with `salts`, in every layer.

        `seen` is the first token that was not given back, and the token that looks: layers with a window
        are compared from the later of the first and the oldest that it sees.

        Raises:
            WrongValue: names the first value that differs.
        """
        import torch

        evicted, looking = seen
        for start in range(0, len(found.positions), BLOCK_TOKENS):
            block = Tokens(*(column[start : start + BLOCK_TOKENS] for column in found))
            tokens = hashed_bytes(salts[start : start + BLOCK_TOKENS], block.positions, self._widest)
            mapped = self._mapped(block.slots)
            placed: dict[Any, Placed] = {}
            for layer in self.layers:
                if layer.kind.places is not None:
                    there = _placed(layer, layer.kind.places, block, tokens, placed)
                    if there.where.slots.shape[0]:
                        self._check_layer(layer, request, there.positions, there.hashed, there.where)
                    continue
                first = 0
                if layer.window is not None:
                    first = int(torch.searchsorted(block.positions, max(evicted, looking - layer.window)))
                where = Where(block.slots[first:], (mapped if layer.is_mapped else block.slots)[first:])
                self._check_layer(layer, request, block.positions[first:], tokens[first:], where)

    def compare(self, layer: Layer, request: int, salts: torch.Tensor, positions: torch.Tensor, where: Where) -> None:
        """Compare tokens of a request, written with `salts`, in one layer, as many as memory takes at once.

        Raises:
            WrongValue: names the first value that differs.
        """
        self._check_layer(layer, request, positions, hashed_bytes(salts, positions, self._widest), where)

    def _check_layer(
        self, layer: Layer, request: int, positions: torch.Tensor, tokens: torch.Tensor, where: Where
    ) -> None:
        if layer.pool.query.shares_tokens:  # other ranks keep the other tokens
            own = layer.pool.own_rows(where.mapped)[1]
            positions, tokens, where = positions[own], tokens[own], Where(where.slots[own], where.mapped[own])
        rows = layer.kind.read(layer, where)
        for part in layer.parts:
            wrong = first_difference(rows[part.name], self._expected(layer, part, tokens), layer.kv_dtype)
            if wrong is not None:
                position = int(positions[wrong])
                raise WrongValue(
                    f"request {request}, position {position}, layer {layer.layer_id} ({layer.worker}): the {part.name} "
                    f"in slot {int(where.mapped[wrong])} is not the one that was written",
                    request=request,
                    position=position,
                    layer_id=layer.layer_id,
                )
        self.checks += len(positions)

    def _mapped(self, slots: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._allocator.translate(slots) if self._is_mapped else slots
        return found

    def _expected(self, layer: Layer, part: Part, tokens: torch.Tensor) -> torch.Tensor:
        """Return the numbers of one part of a layer for tokens ``[n, heads, columns]``."""
        if part.front_of:
            whole = next(other for other in layer.parts if other.name == part.front_of)
            return self._expected(layer, whole, tokens)[..., : part.columns]
        columns = self._column_bytes(layer, part, tokens.device)
        return part.numbers(tokens[:, : part.width] + columns)

    def _column_bytes(self, layer: Layer, part: Part, device: torch.device) -> torch.Tensor:
        key = (layer.worker, layer.owner, part.name)
        if key not in self._columns:
            self._columns[key] = column_bytes(self, *key, part.width, device)
        return self._columns[key]


class Placed(NamedTuple):
    """Those of some tokens that have a row in a pool of layers: their positions, hashes and places."""

    positions: torch.Tensor
    hashed: torch.Tensor
    where: Where


def _placed(
    layer: Layer,
    find: Callable[[Layer, Tokens], torch.Tensor],
    tokens: Tokens,
    hashed: torch.Tensor,
    known: dict[Any, Placed],
) -> Placed:
    """Return which tokens have a row in a layer; asked once for all layers of a pool, since `known` remembers it."""
    key = id(layer.pool), find
    if key not in known:
        places = find(layer, tokens)
        has_row = places > 0
        known[key] = Placed(tokens.positions[has_row], hashed[has_row], Where(tokens.slots[has_row], places[has_row]))
    return known[key]


def column_bytes(values: Values, worker: str, owner: int, name: str, width: int, device: torch.device) -> torch.Tensor:
    """Return uint8 ``[width]`` that tell the columns, the layers and the parts apart."""
    import torch

    salt = values.salt(owner + 1, sum(map(ord, worker + name)))
    return _mixed(torch.arange(width, dtype=torch.int64, device=device) * _ODD[1] + salt).to(torch.uint8)


def first_difference(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> int | None:
    """Return the first row in which `found` is not `expected`, or ``None``; bytes hold `dtype`, compared bit by bit."""
    import torch

    right = expected.to(found.dtype)
    if found.dtype == torch.uint8:
        right = expected.to(torch.float32).to(getattr(torch, dtype)).view(torch.uint8)
    if torch.equal(found, right):
        return None
    return int((found != right).flatten(1).any(1).nonzero()[0])


def hashed_bytes(salts: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return uint8 ``[n, width]``: the eight bytes of a token's hash, repeated."""
    import torch

    hashes = _mixed(salts + positions * _ODD[0])
    return hashes.view(-1, 1).view(torch.uint8).repeat(1, -(-width // 8))[:, :width]


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers in which every bit depends on every bit of the old ones."""
    numbers = (numbers ^ numbers >> 30) * _ODD[1]
    numbers = (numbers ^ numbers >> 27) * _ODD[2]
    return numbers ^ numbers >> 31
