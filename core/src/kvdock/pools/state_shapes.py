"""Per-request states as shapes: what one rank keeps of a layer's convolutions, temporal state and replay rings."""

from __future__ import annotations

from collections.abc import Iterable

from kvdock import dtypes
from kvdock.errors import PlanError
from kvdock.model import ConvParams, HybridParams, LayerParams, StateParams
from kvdock.pools.grouped import group_of
from kvdock.queries import PoolQuery

Shape = tuple[int, ...]


def state_params(query: PoolQuery) -> StateParams:
    """Return the shape that all layers of the group have.

    Raises:
        PlanError: layers of different shapes, of another kind, or that keep nothing.
    """
    group = group_of(query)
    shapes = {layer.params for _, layer in group.layers}
    params = next(iter(shapes))
    if len(shapes) > 1 or not isinstance(params, StateParams):
        kinds = ", ".join(sorted({type(shape).__name__ for shape in shapes}))
        raise PlanError(f"group {group.name!r} does not hold states of one shape ({len(shapes)} of type {kinds})")
    if not params.conv and not params.temporal:
        raise PlanError(
            f"group {group.name!r} keeps neither convolutions nor a temporal state; give its layers kind 'none'"
        )
    return params


def conv_shape(query: PoolQuery, conv: ConvParams, inputs: int | None = None) -> Shape:
    """Return ``(channels, inputs)`` of one rank, or with channels last ``(inputs, channels)``.

    `inputs` is how many inputs are kept; by default what the next token needs, ``kernel - 1``.

    Raises:
        PlanError: heads that do not split over the ranks, or a convolution that keeps no input.
    """
    if conv.kernel < 2:
        raise PlanError(f"a convolution with kernel={conv.kernel} keeps no earlier inputs; leave it out of the state")
    kept = conv.kernel - 1 if inputs is None else inputs
    channels = sum(
        block.head_dim * heads_per_rank(query, block.heads, "convolution heads", replicated=block.replicated)
        for block in conv.blocks
    )
    return (kept, channels) if conv.channels_last else (channels, kept)


def temporal_shape(query: PoolQuery, params: StateParams) -> Shape:
    """Return ``(heads, …)`` of one rank; empty for layers without a temporal state.

    Raises:
        PlanError: the heads do not split over the ranks.
    """
    if not params.temporal:
        return ()
    heads, *rest = params.temporal
    return heads_per_rank(query, heads, "state heads"), *rest


def ring_shapes(query: PoolQuery, params: StateParams) -> tuple[Shape, Shape, Shape]:
    """Return the shapes of delta, key and decay of a replay ring, on one rank.

    Raises:
        PlanError: the layers have no ring, or its heads do not split over the ranks.
    """
    ring, steps = params.ring, query.options.replay_ring_length or 1
    if ring is None:
        raise PlanError(
            f"replay_rings=true, but the layers of group {group_of(query).name!r} have no step that a ring could "
            "replay; give replay_rings=false"
        )
    values = heads_per_rank(query, ring.v_heads, "value heads of a replay ring")
    keys = heads_per_rank(query, ring.k_heads, "key heads of a replay ring", replicated=True)
    decay = (values, steps, ring.k_dim) if ring.decay_per_key else (values, steps)
    return (values, steps, ring.v_dim), (keys, steps, ring.k_dim), decay


def temporal_dtype(query: PoolQuery, params: StateParams) -> str:
    """Return the data type of temporal states: the option, else the published one.

    Raises:
        PlanError: it is no float of 16 bits or more.
    """
    chosen = query.options.state_dtype
    given = chosen not in (None, "auto")
    found = dtypes.find(str(chosen) if given else params.temporal_dtype, option="state_dtype")
    if not found.is_float or found.bits < 16:
        whose = f"state_dtype={chosen!r}" if given else f"the model's temporal_dtype={params.temporal_dtype!r}"
        raise PlanError(f"{whose} cannot hold temporal states; give state_dtype=float32, bfloat16 or float16")
    return found.name


def heads_per_rank(query: PoolQuery, heads: int, what: str, *, replicated: bool = False) -> int:
    """Return the heads of one rank; with `replicated`, 1 where each is kept by several ranks.

    Raises:
        PlanError: they do not split; names both numbers and the nearest tp_size that works for the whole model.
    """
    parallel = query.parallel
    ranks = parallel.attn_tp_size
    if heads % ranks == 0:
        return heads // ranks
    if replicated and ranks % heads == 0:
        return 1
    shards = parallel.tp_size // ranks
    raise PlanError(
        f"{heads} {what} do not split over {ranks} attention ranks (tp_size={parallel.tp_size}); "
        f"the nearest tp_size that works is {_nearest_ranks(query, ranks) * shards}"
    )


def _nearest_ranks(query: PoolQuery, ranks: int) -> int:
    """Return the number of ranks nearest to `ranks` (of two, the smaller) over which every layer's heads split."""
    layers = [layer.params for layer in query.model.layers] + [layer.params for _, layer in group_of(query).layers]
    strict, loose = _heads(dict.fromkeys(layers))
    fits = [n for n in _divisors(min(strict)) if _splits(strict, n) and _loosely(loose, n)]
    return min(fits, key=lambda n: (abs(n - ranks), n))


def _heads(layers: Iterable[LayerParams]) -> tuple[set[int], set[int]]:
    """Return the counts of heads that must split, and of those that may be replicated."""
    strict: set[int] = set()
    loose: set[int] = set()
    for params in layers:
        heads = getattr(params, "num_kv_heads", None)
        loose |= {heads} if isinstance(heads, int) else set()
        state = params.state if isinstance(params, HybridParams) else params
        if isinstance(state, StateParams):
            blocks = [block for conv in state.conv for block in conv.blocks]
            strict |= {block.heads for block in blocks if not block.replicated} | set(state.temporal[:1])
            loose |= {block.heads for block in blocks if block.replicated}
    return strict or loose, loose


def _splits(heads: Iterable[int], ranks: int) -> bool:
    return all(count % ranks == 0 for count in heads)


def _loosely(heads: Iterable[int], ranks: int) -> bool:
    return all(count % ranks == 0 or ranks % count == 0 for count in heads)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
