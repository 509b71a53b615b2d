"""What a slot of each kind of layer must look like, and what a pool keeps beside what it declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvdock.model import DSAParams, LayerParams, MHAParams, MLAParams, SparseParams
from kvdock.options import Parallelism
from kvdock.planned import Parts, Planned
from kvdock.pools.storage import unique_storages

if TYPE_CHECKING:
    import torch

    from kvdock.pools.base import Pool

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""What one slot holds: the shape of its key and of its value."""


def wrong_rows(pool: Pool) -> list[str]:
    """Return for each layer whose key or value has not the shape of the model on this rank, what is wrong with it."""
    group, found = pool.query.group, []
    for layer_id, layer in () if group is None else group.layers:
        rows = rows_of(pool, layer_id)
        expected = expected_rows(layer.params, pool.query.parallel)
        if expected and rows not in expected:
            parallel = pool.query.parallel
            ranks = f"tp_size={parallel.tp_size}, {parallel.attn_tp_size} attention ranks"
            found.append(
                f"layer {layer_id}: a slot of {type(pool).__name__} has a key of {_shown(rows[0])} and a value of "
                f"{_shown(rows[1])}, but {layer.params} on one rank ({ranks}) has {_shown(expected[0][0])} and "
                f"{_shown(expected[0][1])}; take heads from query.parallel.kv_heads_per_rank, widths from the layer's "
                "params, or decline what the layout cannot hold"
            )
    return found


def rows_of(pool: Pool, layer_id: int) -> Shapes:
    """Return the shapes of a slot's key and value, as `read_kv` gives them."""
    import torch

    keys, values = pool.read_kv(layer_id, torch.zeros(0, dtype=torch.int64, device=pool.parts.device))
    return tuple(keys.shape[1:]), tuple(values.shape[1:])


def expected_rows(params: LayerParams, parallel: Parallelism) -> tuple[Shapes, ...]:
    """Return the shapes that a slot may have; none for kinds whose rows the core does not know.

    A latent row is the key, with the latent in it as value; or latent and rope part are key and value.
    """
    if isinstance(params, MHAParams | SparseParams):
        heads = parallel.kv_heads_per_rank(params.num_kv_heads)
        return (((heads, params.head_dim), (heads, params.v_head_dim)),)
    if isinstance(params, MLAParams | DSAParams):
        lora, rope = params.kv_lora_rank, params.qk_rope_head_dim
        return ((1, lora + rope), (1, lora)), ((1, lora), (1, rope))
    return ()


def kept_beside(pool: Pool) -> dict[str, int]:
    """Return the bytes of tensors that a pool keeps in its attributes though they are none of its storages, by attribute."""
    declared = unique_storages(pool.storages()).keys()
    found = {}
    for name, value in vars(pool).items():
        own = unique_storages(_tensors(value, set()))
        if beside := sum(nbytes for address, nbytes in own.items() if address not in declared):
            found[name] = beside
    return found


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: in containers, and in the attributes of what is neither planned nor handed to it."""
    import torch

    if id(value) in seen or isinstance(value, type | Parts | Planned):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each, seen)
    elif isinstance(value, tuple | list | set | frozenset):
        for each in value:
            yield from _tensors(each, seen)
    elif type(value).__module__.partition(".")[0] not in ("builtins", "torch"):
        yield from _tensors(getattr(value, "__dict__", ()), seen)


def _shown(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(str(extent) for extent in shape)}]"
