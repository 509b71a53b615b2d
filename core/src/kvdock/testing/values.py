"""Values that tell where they belong: small numbers from request, position, layer and column.

They are exact in the pool's data type, so what is read back is compared bit by bit. A token of another
request, position, layer or side (key or value) differs in about every column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.errors import KVDockError
from kvdock.testing.kinds import Layer, Part, Tokens, Where, layers_of

if TYPE_CHECKING:
    import torch

    from kvdock.cache import KVCache

BLOCK_TOKENS = 1024
"""Tokens that are compared at once, so that a check of a long request takes little memory."""
BATCH_NUMBERS = 1 << 18
"""Numbers of a part that are computed at once, for as many layers as they suffice for, so that they stay in caches."""
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
        self._columns: dict[tuple[str, tuple[int, ...], str], torch.Tensor] = {}
        self.seed = seed
        self.layers = tuple(layers_of(cache))
        self.owners = tuple(layer for layer in self.layers if layer.layer_id == layer.owner)
        self._read_together, self._written_together = tuple(_alike(self.layers)), tuple(_alike(self.owners))
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
        for layers in self._written_together:
            first = layers[0]
            if first.kind.places is not None:
                found = _placed(first, tokens, hashed)
                self._write_layers(layers, found.hashed, found.where)
            else:
                self._write_layers(layers, hashed, where if first.is_mapped else Where(slots, slots, at))

    def _write_layers(self, layers: tuple[Layer, ...], hashed: torch.Tensor, where: Where) -> None:
        """Write tokens to layers that are alike; `hashed` are their bytes."""
        if not hashed.shape[0]:
            return
        dtype = layers[0].model_dtype
        written = [part for part in layers[0].parts if not part.front_of]
        for some in _shares(layers, hashed):
            rows = {part.name: self._expected(some, part, hashed).to(dtype) for part in written}
            for place, layer in enumerate(some):
                layer.kind.write(layer, where, {name: found[place] for name, found in rows.items()})

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
            for layers in self._read_together:
                layer = layers[0]
                if layer.kind.places is not None:
                    self._check_layers(layers, request, _placed(layer, block, tokens))
                    continue
                first = 0
                if layer.window is not None:
                    first = int(torch.searchsorted(block.positions, max(evicted, looking - layer.window)))
                where = Where(block.slots[first:], (mapped if layer.is_mapped else block.slots)[first:])
                self._check_layers(layers, request, Placed(block.positions[first:], tokens[first:], where))

    def compare(self, layer: Layer, request: int, salts: torch.Tensor, positions: torch.Tensor, where: Where) -> None:
        """Compare tokens of a request, written with `salts`, in one layer, as many as memory takes at once.

        Raises:
            WrongValue: names the first value that differs.
        """
        hashed = hashed_bytes(salts, positions, self._widest)
        self._check_layers((layer,), request, Placed(positions, hashed, where))

    def _check_layers(self, layers: tuple[Layer, ...], request: int, there: Placed) -> None:
        """Compare tokens of a request in layers that are alike, one layer after the other."""
        pool, kv_dtype = layers[0].pool, layers[0].kv_dtype
        if pool.query.shares_tokens:  # other ranks keep the other tokens
            there = there.only(pool.own_rows(there.where.mapped)[1])
        if not len(there.positions):
            return
        for some in _shares(layers, there.hashed):
            expected = {part.name: self._expected(some, part, there.hashed) for part in some[0].parts}
            right: dict[tuple[str, torch.dtype], torch.Tensor] = {}
            for place, layer in enumerate(some):
                rows = layer.kind.read(layer, there.where)
                for name, numbers in expected.items():
                    key = name, rows[name].dtype
                    if key not in right:
                        right[key] = stored_as(rows[name].dtype, numbers, kv_dtype)
                    wrong = first_difference(rows[name], right[key][place])
                    if wrong is not None:
                        raise _wrong(layer, request, name, there, wrong)
                self.checks += len(there.positions)

    def _mapped(self, slots: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._allocator.translate(slots) if self._is_mapped else slots
        return found

    def _expected(self, layers: tuple[Layer, ...], part: Part, tokens: torch.Tensor) -> torch.Tensor:
        """Return the numbers of one part of layers that are alike for tokens ``[layers, n, heads, columns]``."""
        if part.front_of:
            whole = next(other for other in layers[0].parts if other.name == part.front_of)
            return self._expected(layers, whole, tokens)[..., : part.columns]
        drawn = tokens[:, : part.width] + self._column_bytes(layers, part, tokens.device)
        numbers = part.numbers(drawn)
        return numbers.view(*drawn.shape[:2], *numbers.shape[1:])

    def _column_bytes(self, layers: tuple[Layer, ...], part: Part, device: torch.device) -> torch.Tensor:
        """Return uint8 ``[layers, 1, width]``."""
        import torch

        worker, owners = layers[0].worker, tuple(layer.owner for layer in layers)
        key = worker, owners, part.name
        if key not in self._columns:
            found = [column_bytes(self, worker, owner, part.name, part.width, device) for owner in owners]
            self._columns[key] = torch.stack(found).unsqueeze(1)
        return self._columns[key]


class Placed(NamedTuple):
    """Those of some tokens that have a row in a pool of layers: their positions, hashes and places."""

    positions: torch.Tensor
    hashed: torch.Tensor
    where: Where

    def only(self, chosen: torch.Tensor) -> Placed:
        """Return those at the indices, or of the mask, `chosen`."""
        where = Where(self.where.slots[chosen], self.where.mapped[chosen])
        return Placed(self.positions[chosen], self.hashed[chosen], where)


def _placed(layer: Layer, tokens: Tokens, hashed: torch.Tensor) -> Placed:
    """Return which tokens have a row in a layer whose kind tells, and so in all that are alike."""
    places = tokens.slots if layer.kind.places is None else layer.kind.places(layer, tokens)
    return Placed(tokens.positions, hashed, Where(tokens.slots, places)).only(places > 0)


def _alike(layers: Iterable[Layer]) -> Iterator[tuple[Layer, ...]]:
    """Yield layers by pool, kind and window, in their order: tokens have the same places in them."""
    for _, found in groupby(layers, lambda layer: (id(layer.pool), layer.kind, layer.window)):
        yield tuple(found)


def _shares(layers: tuple[Layer, ...], hashed: torch.Tensor) -> Iterator[tuple[Layer, ...]]:
    """Yield as many layers at once as `BATCH_NUMBERS` suffices for."""
    widest = max(part.width for part in layers[0].parts)
    step = max(1, BATCH_NUMBERS // max(1, widest * hashed.shape[0]))
    for start in range(0, len(layers), step):
        yield layers[start : start + step]


def _wrong(layer: Layer, request: int, name: str, there: Placed, at: int) -> WrongValue:
    position = int(there.positions[at])
    return WrongValue(
        f"request {request}, position {position}, layer {layer.layer_id} ({layer.worker}): the {name} "
        f"in slot {int(there.where.mapped[at])} is not the one that was written",
        request=request,
        position=position,
        layer_id=layer.layer_id,
    )


def column_bytes(values: Values, worker: str, owner: int, name: str, width: int, device: torch.device) -> torch.Tensor:
    """Return uint8 ``[width]`` that tell the columns, the layers and the parts apart."""
    import torch

    salt = values.salt(owner + 1, sum(map(ord, worker + name)))
    return _mixed(torch.arange(width, dtype=torch.int64, device=device) * _ODD[1] + salt).to(torch.uint8)


def stored_as(dtype: torch.dtype, numbers: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Return numbers as a pool shows them: in `dtype`, or where these are bytes, those of `kv_dtype`."""
    import torch

    if dtype == torch.uint8:
        return numbers.to(torch.float32).to(getattr(torch, kv_dtype)).view(torch.uint8)
    return numbers.to(dtype)


def first_difference(found: torch.Tensor, right: torch.Tensor) -> int | None:
    """Return the first row in which `found` is not `right`, or ``None``; compared bit by bit."""
    import torch

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
