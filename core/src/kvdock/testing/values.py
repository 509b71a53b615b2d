"""Values that tell where they belong: small integers from request, position, layer and column.

They are exact in the pool's data type, so what is read back is compared bit by bit. A token of another
request, position, layer or side (key or value) differs in about every column.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.errors import KVDockError

if TYPE_CHECKING:
    import torch

    from kvdock.builder import KVCache
    from kvdock.layout import LayerGroup
    from kvdock.pools.base import Pool

KEY, VALUE = "key", "value"
BLOCK_TOKENS = 1024
"""Tokens that are compared at once, so that a check of a long request takes little memory."""
_EXACT_INTEGERS = {"float8_e4m3fn": 16, "float8_e4m3fnuz": 16, "float8_e5m2": 8, "float8_e5m2fnuz": 8}
"""How many integers from 0 a narrow type holds exactly (a power of two); wider types hold 256 and more."""
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


class Layer(NamedTuple):
    """A layer that can be read: whose values it holds, and how its slots are found."""

    pool: Pool
    worker: str
    layer_id: int
    owner: int
    kind: str
    is_mapped: bool
    """Whether its slots are those that the request table's slots map to."""
    window: int | None
    """Earlier tokens that are still there; ``None``: all."""


class Values:
    """Writes the values of tokens to every layer of a cache, and compares what is read back."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        import torch

        query = cache.plan.outline.pools[0].query
        self._model_dtype: torch.dtype = getattr(torch, query.model_dtype)
        self._format: torch.dtype = getattr(torch, query.kv_dtype)
        self._mask = _EXACT_INTEGERS.get(query.kv_dtype, 256) - 1
        self._allocator: Any = cache.token_to_kv_pool_allocator
        self._columns: dict[tuple[str, int, str], torch.Tensor] = {}
        self.seed = seed
        self.layers = tuple(layers_of(cache))
        self.owners = tuple(layer for layer in self.layers if layer.layer_id == layer.owner)
        self._is_mapped = any(layer.is_mapped for layer in self.layers)
        shapes = [_view(layer, part).shape[2:] for layer in self.owners for part in (KEY, VALUE)]
        self._widest = max((shape.numel() for shape in shapes), default=0)
        self.checks = 0

    def salt(self, request: int, attempt: int) -> int:
        """Return the number that the values of a request follow; `attempt` tells values that it takes back."""
        mixed = (self.seed * _ODD[1] + request * _ODD[0] + attempt * _ODD[2]) % 2**64
        return (mixed ^ mixed >> 31) * _ODD[3] % 2**63

    def write(self, salts: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values of tokens (int64 ``[n]`` each) to every layer that owns buffers."""
        tokens = _token_bytes(salts, positions, self._widest)
        for layer in self.owners:
            if layer.kind == "mla":
                self._write_latent(layer, tokens, slots)
                continue
            keys, values = (self._expected(layer, part, tokens).to(self._model_dtype) for part in (KEY, VALUE))
            layer.pool.set_kv_buffer(layer.layer_id, slots, keys, values)

    def _write_latent(self, layer: Layer, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        pool: Any = layer.pool
        row = self._expected(layer, KEY, tokens).to(self._model_dtype)
        latent = pool.get_value_buffer(layer.layer_id).shape[-1]
        pool.set_mla_kv_buffer(layer.layer_id, slots, row[..., :latent], row[..., latent:])

    def check(
        self,
        request: int,
        salts: torch.Tensor,
        seen: tuple[int, int],
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Compare the tokens `positions` ``[n]`` (ascending) of a request, written with `salts`, in every layer.

        `seen` is the first token that was not given back, and the token that looks: layers with a window
        are compared from the later of the first and the oldest that it sees.

        Raises:
            WrongValue: names the first value that differs.
        """
        import torch

        evicted, looking = seen
        for start in range(0, len(positions), BLOCK_TOKENS):
            here = slice(start, start + BLOCK_TOKENS)
            block, found = positions[here], slots[here]
            tokens = _token_bytes(salts[here], block, self._widest)
            mapped = self._allocator.translate(found) if self._is_mapped else found
            for layer in self.layers:
                first = 0
                if layer.window is not None:
                    first = int(torch.searchsorted(block, max(evicted, looking - layer.window)))
                where = (mapped if layer.is_mapped else found)[first:]
                self._check_layer(layer, request, block[first:], tokens[first:], where)

    def _check_layer(
        self, layer: Layer, request: int, positions: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for part in (KEY, VALUE):
            found = _gather(_view(layer, part), slots)
            expected = self._expected(layer, part, tokens)
            wrong = self._differs(found, expected)
            if wrong is not None:
                position = int(positions[wrong])
                raise WrongValue(
                    f"request {request}, position {position}, layer {layer.layer_id} ({layer.worker}): the {part} in "
                    f"slot {int(slots[wrong])} is not the one that was written",
                    request=request,
                    position=position,
                    layer_id=layer.layer_id,
                )
        self.checks += len(positions)

    def _differs(self, found: torch.Tensor, expected: torch.Tensor) -> int | None:
        """Return the first row in which two tensors differ, bit by bit, or ``None``."""
        import torch

        right = expected.to(found.dtype)
        if found.dtype == torch.uint8:
            right = expected.to(torch.float32).to(self._format).view(torch.uint8)
        if torch.equal(found, right):
            return None
        return int((found != right).flatten(1).any(1).nonzero()[0])

    def _expected(self, layer: Layer, part: str, tokens: torch.Tensor) -> torch.Tensor:
        """Return the integers of a layer's keys or values for tokens, uint8 ``[n, heads, width]``."""
        shape = _view(layer, part).shape[2:]
        columns = self._column_bytes(layer, part, shape.numel(), tokens.device)
        return ((tokens[:, : shape.numel()] + columns) & self._mask).view(-1, *shape)

    def _column_bytes(self, layer: Layer, part: str, width: int, device: torch.device) -> torch.Tensor:
        import torch

        # The value of a latent layer is the front of its key, so it is told by the same bytes.
        part = KEY if layer.kind == "mla" else part
        key = (layer.worker, layer.owner, part)
        if key not in self._columns:
            salt = self.salt(layer.owner + 1, sum(map(ord, layer.worker + part)))
            columns = torch.arange(self._widest, dtype=torch.int64, device=device)
            self._columns[key] = _mixed(columns * _ODD[1] + salt).to(torch.uint8)
        return self._columns[key][:width]


def layers_of(cache: KVCache) -> Iterator[Layer]:
    """Yield every layer of the target and its drafts whose keys and values can be read."""
    outline = cache.plan.outline
    pools = {"target": cache.token_to_kv_pool, **cache.drafts}
    for group in outline.groups:
        if not any(buffer.is_kv for plan in cache.plan.groups if plan.name == group.name for buffer in plan.buffers):
            continue
        space = outline.spaces[group.space]
        mapped = group.space != outline.numbering
        for layer_id, owner, window in _readers(group):
            kept = window if space.window_tokens is not None else None
            yield Layer(pools[group.worker], group.worker, layer_id, owner, group.kind, mapped, kept)


def _readers(group: LayerGroup) -> Iterator[tuple[int, int, int | None]]:
    """Yield layer, the layer whose buffers it reads, and the window of that layer's specification."""
    windows = {layer_id: spec.window_tokens for layer_id, spec in group.layers}
    for layer_id in group.layer_ids:
        yield layer_id, layer_id, windows[layer_id]
    for layer_id, owner in group.shared:
        yield layer_id, owner, windows[owner]


def _view(layer: Layer, part: str) -> torch.Tensor:
    """Return a layer's keys or values as the pool shows them, ``[pages, page_size, heads, width]``."""
    pool = layer.pool
    return pool.get_key_buffer(layer.layer_id) if part == KEY else pool.get_value_buffer(layer.layer_id)


def _gather(view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows of a view ``[pages, page_size, *shape]`` at `slots`; plain indexing, no kernel under test."""
    import torch

    page_size = view.shape[1]
    if view.element_size() == 1:
        view = view.view(torch.uint8)
    return view[slots // page_size, slots % page_size]


def _token_bytes(salts: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return uint8 ``[n, width]``: the eight bytes of a token's hash, repeated."""
    import torch

    hashes = _mixed(salts + positions * _ODD[0])
    return hashes.view(-1, 1).view(torch.uint8).repeat(1, -(-width // 8))[:, :width]


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers in which every bit depends on every bit of the old ones."""
    numbers = (numbers ^ numbers >> 30) * _ODD[1]
    numbers = (numbers ^ numbers >> 27) * _ODD[2]
    return numbers ^ numbers >> 31
