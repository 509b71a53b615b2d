"""What the layers of each kind keep for a token, and how it is written and read: a table by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from kvdock import dtypes
from kvdock.layout import TARGET, LayerGroup
from kvdock.model import DSAParams, IndexParams, MHAParams, MLAParams
from kvdock.pools.dsa import SCALE_BLOCK, DSAPool
from kvdock.pools.index_keys import BLOCKS, DEFAULT_DTYPE
from kvdock.testing.patterns import Pattern, in_blocks, plain, scaled_to_limit

if TYPE_CHECKING:
    import torch

    from kvdock.cache import KVCache
    from kvdock.pools.base import Pool
    from kvdock.queries import PoolQuery

KEY, VALUE, INDEX_KEY, INDEX_VALUE = "key", "value", "index key", "index value"


class Part(NamedTuple):
    """One of the rows that a layer keeps for a token: ``[heads, columns]``, or ``[columns]`` without heads.

    The columns follow one pattern after the other. `front_of` names the part whose first columns these are: it
    is written, and both are read.
    """

    name: str
    heads: tuple[int, ...]
    patterns: tuple[Pattern, ...]
    front_of: str = ""

    @property
    def columns(self) -> int:
        """Columns of a head."""
        return sum(pattern.columns for pattern in self.patterns)

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.columns * (self.heads[0] if self.heads else 1)

    def numbers(self, drawn: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens from bytes ``[n, width]``."""
        import torch

        rows = drawn.view(-1, *self.heads, self.columns)
        if len(self.patterns) == 1:
            return self.patterns[0].numbers(rows)
        cut = torch.split(rows, [pattern.columns for pattern in self.patterns], dim=-1)
        return torch.cat([p.numbers(piece).float() for p, piece in zip(self.patterns, cut, strict=True)], dim=-1)


class Layer(NamedTuple):
    """A layer that can be read: whose values it holds, and how its slots are found."""

    router: Any
    """The pool that the engine sees; takes the engine's slots."""
    pool: Any
    """The pool of the layer's group; takes the slots of the group's space."""
    worker: str
    layer_id: int
    owner: int
    kind: Kind
    parts: tuple[Part, ...]
    is_mapped: bool
    """Whether its slots are those that the request table's slots map to."""
    window: int | None
    """Earlier tokens that are still there; ``None``: all."""

    @property
    def kv_dtype(self) -> str:
        """The data type of what lies in bytes."""
        return str(self.pool.query.kv_dtype)

    @property
    def model_dtype(self) -> torch.dtype:
        """The data type in which rows are written."""
        import torch

        found: torch.dtype = getattr(torch, self.pool.query.model_dtype)
        return found


class Where(NamedTuple):
    """Slots of tokens: the engine's, and those of the layer's own space.

    `at` is where their rows lie in a cache of two tiers, a space and slots of it; ``None``: where their slots say.
    """

    slots: torch.Tensor
    mapped: torch.Tensor
    at: tuple[str, torch.Tensor] | None = None


class Tokens(NamedTuple):
    """Tokens, int64 ``[n]`` each: their slots and positions, and of each one's request the row and more.

    `lengths` are the tokens that the request then has, `firsts` the first token whose sliding slots hold what was
    written.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    firsts: torch.Tensor


Rows = dict[str, "torch.Tensor"]
"""Rows of tokens by the name of their part."""


class Kind(NamedTuple):
    """What layers of one kind keep, and how it is written and read.

    `places` is for kinds in which not every token has a row, or keeps it: it says where the rows of tokens lie in
    the layer's own space, 0 where there is none (any more). Those that have one are written and compared. `ahead`
    are the tokens that a request may write beyond its own and take back; ``None``: any number. `beside` are what the same
    layers keep at other places of the same buffer.
    """

    parts: Callable[[Pool], tuple[Part, ...]]
    write: Callable[[Layer, Where, Rows], None]
    read: Callable[[Layer, Where], Rows]
    places: Callable[[Layer, Tokens], torch.Tensor] | None = None
    ahead: int | None = None
    beside: tuple[Kind, ...] = ()


@runtime_checkable
class Driven(Protocol):
    """A pool of a kind that a plugin invented: it says what a run writes and reads for each token."""

    def driven(self) -> Kind:
        """Return what the layers of this pool keep."""


def layers_of(cache: KVCache) -> Iterator[Layer]:
    """Yield every layer of the target and its drafts that keeps something for each token here."""
    outline = cache.plan.outline
    for group in outline.groups:
        pool, space = cache.pools[group.name], outline.spaces[group.space]
        holds = any(buffer.is_kv for plan in cache.plan.groups if plan.name == group.name for buffer in plan.buffers)
        kind = pool.driven() if isinstance(pool, Driven) else KINDS.get(group.kind, HEADS)
        # A state belongs to a request, so no token has a place in it, unless its kind tells which.
        if not holds or (space.issued_by == "request_pool" and kind.places is None):
            continue
        router = cache.token_to_kv_pool if group.worker == TARGET else cache.drafts[group.worker]
        common = router, pool, group.worker
        mapped = group.space != outline.numbering
        for each in (kind, *kind.beside):
            parts = each.parts(pool)
            for layer_id, owner, window in _readers(group, pool):
                kept = window if space.window_tokens is not None else None
                yield Layer(*common, layer_id, owner, each, parts, mapped, kept)


def _readers(group: LayerGroup, pool: Pool) -> Iterator[tuple[int, int, int | None]]:
    """Yield layer, the layer whose buffers it reads, and the window of that layer's specification."""
    windows = {layer_id: spec.window_tokens for layer_id, spec in group.layers}
    stored = pool.stored_layers if isinstance(pool, DSAPool) else group.layer_ids
    for layer_id, owner in (*((layer_id, layer_id) for layer_id in group.layer_ids), *group.shared):
        if owner in stored:
            yield layer_id, owner, windows[owner]


def _of_heads(pool: Pool) -> tuple[Part, ...]:
    """Return keys and values per head; of a kind that is not core's, as its pool shows them."""
    query = pool.query
    params = _params(query)
    if isinstance(params, MHAParams):
        heads = query.parallel.kv_heads_per_rank(params.num_kv_heads)
        shapes = (heads, params.head_dim), (heads, params.v_head_dim)
    else:
        layer_id = pool.layer_ids[0]
        shown = pool.get_key_buffer(layer_id).shape, pool.get_value_buffer(layer_id).shape
        shapes = (shown[0][-2], shown[0][-1]), (shown[1][-2], shown[1][-1])
    return tuple(
        Part(name, (heads,), (_kv_pattern(query, columns),))
        for name, (heads, columns) in zip((KEY, VALUE), shapes, strict=True)
    )


def _of_latents(pool: Pool) -> tuple[Part, ...]:
    """Return the latent row, and the latent in front of it."""
    lora, rope = _latent(pool.query)
    row: tuple[Pattern, ...] = (_kv_pattern(pool.query, lora + rope),)
    if _has_scaled_rows(pool):
        row = (scaled_to_limit(lora, SCALE_BLOCK, pool.query.kv_dtype), plain(rope, "bfloat16"))
    return Part(KEY, (1,), row), Part(VALUE, (1,), (Pattern(lora),), front_of=KEY)


def _of_sparse_latents(pool: Pool) -> tuple[Part, ...]:
    """Return the latent row, and the key of its indexer."""
    params, chosen = _params(pool.query), pool.query.options.index_dtype
    if not isinstance(params, DSAParams):
        return _of_latents(pool)
    dtype = DEFAULT_DTYPE if chosen in (None, "auto") else dtypes.find(str(chosen)).name
    pattern = scaled_to_limit(params.index_head_dim, BLOCKS[dtype], dtype)
    return (*_of_latents(pool), Part(INDEX_KEY, (), (pattern,)))


def _of_indexers(pool: Pool) -> tuple[Part, ...]:
    """Return the key of an indexer, and its value where it keeps one."""
    params = _params(pool.query)
    names = (INDEX_KEY, INDEX_VALUE) if isinstance(params, IndexParams) and params.index_value else (INDEX_KEY,)
    columns = params.index_head_dim if isinstance(params, IndexParams) else 0
    return tuple(Part(name, (1,), (plain(columns, pool.query.model_dtype),)) for name in names)


def _write_heads(layer: Layer, where: Where, rows: Rows) -> None:
    layer.router.set_kv_buffer(layer.layer_id, where.slots, rows[KEY], rows[VALUE])


def _write_latents(layer: Layer, where: Where, rows: Rows) -> None:
    lora = next(part.columns for part in layer.parts if part.name == VALUE)
    row = rows[KEY]
    layer.router.set_mla_kv_buffer(layer.layer_id, where.slots, row[..., :lora], row[..., lora:])


def _write_sparse_latents(layer: Layer, where: Where, rows: Rows) -> None:
    if where.at is None:
        _write_latents(layer, where, rows)
    else:
        layer.pool.set_host_kv_buffer(layer.layer_id, where.at[1], rows[KEY])
    layer.pool.set_index_k(layer.layer_id, where.mapped, rows[INDEX_KEY])


def _write_indexers(layer: Layer, where: Where, rows: Rows) -> None:
    layer.router.set_index_buffer(layer.layer_id, where.slots, rows[INDEX_KEY], rows.get(INDEX_VALUE))


def _read_kv(layer: Layer, where: Where) -> Rows:
    """Return keys and values as they lie, or decoded where they lie in a format with scales."""
    if dtypes.find(layer.pool.query.kv_dtype).block or _has_scaled_rows(layer.pool):
        keys, values = layer.router.read_kv(layer.layer_id, where.slots)
        return {KEY: keys, VALUE: values}
    views = layer.router.get_key_buffer(layer.layer_id), layer.router.get_value_buffer(layer.layer_id)
    rows, _ = layer.pool.own_rows(where.mapped)
    return {KEY: gathered(views[0], rows), VALUE: gathered(views[1], rows)}


def _read_sparse_latents(layer: Layer, where: Where) -> Rows:
    if where.at is None:
        rows = _read_kv(layer, where)
    else:
        rows = dict(zip((KEY, VALUE), layer.pool.read_tier(layer.layer_id, *where.at), strict=True))
    return {**rows, INDEX_KEY: layer.pool.read_index_k(layer.layer_id, where.mapped)}


def _read_indexers(layer: Layer, where: Where) -> Rows:
    reads = {INDEX_KEY: layer.router.get_index_k_buffer, INDEX_VALUE: layer.router.get_index_v_buffer}
    return {part.name: gathered(reads[part.name](layer.layer_id), where.mapped) for part in layer.parts}


HEADS = Kind(_of_heads, _write_heads, _read_kv)
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "mha": HEADS,
        "mla": Kind(_of_latents, _write_latents, _read_kv),
        "dsa": Kind(_of_sparse_latents, _write_sparse_latents, _read_sparse_latents),
        "sparse_index": Kind(_of_indexers, _write_indexers, _read_indexers),
    }
)
"""Kind of a layer group → what its layers keep for a token; other kinds keep keys and values per head."""


def gathered(view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows of a view ``[pages, page_size, *shape]`` at `slots`; plain indexing, no kernel under test."""
    import torch

    page_size = view.shape[1]
    if view.element_size() == 1:
        view = view.view(torch.uint8)
    return view[slots // page_size, slots % page_size]


def _kv_pattern(query: PoolQuery, columns: int) -> Pattern:
    block = dtypes.find(query.kv_dtype).block
    return in_blocks(columns, block) if block else plain(columns, query.kv_dtype)


def _has_scaled_rows(pool: Pool) -> bool:
    return isinstance(pool, DSAPool) and pool.is_scaled


def _latent(query: PoolQuery) -> tuple[int, int]:
    """Return the widths of latent and rope."""
    params = _params(query)
    return (params.kv_lora_rank, params.qk_rope_head_dim) if isinstance(params, MLAParams | DSAParams) else (0, 0)


def _params(query: PoolQuery) -> object:
    """Return the shape of a group's layers."""
    return None if query.group is None else query.group.layers[0][1].params
