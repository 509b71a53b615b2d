"""What a run writes and reads in the form for Ascend devices (`kvdock run`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.demand import draft_tokens
from kvdock.testing.kinds import INDEX_KEY, KEY, Kind, Layer, Part, Rows, Tokens, Where
from kvdock.testing.patterns import Pattern, plain
from kvdock.testing.values import RunError
from kvdock_dsv4.geometry import RATIO_OF, STATE_RATIO, first_needed
from kvdock_dsv4.model import params_of

INT8_LIMIT = 127

if TYPE_CHECKING:
    import torch
    from kvdock.pools.grouped import GroupedPool

    from kvdock_ascend.dsv4.pools import NpuCompressStatePool, NpuIndexPool, NpuRowsPool

CODES = tuple(float(code) for code in range(-8, 8))
"""Steps of a driven index key; its first column is the largest that 8 bits hold, so its scale is a power of two."""


def rows_kind(pool: NpuRowsPool) -> Kind:
    """Return how rows are driven: one a token in the window, or one for each group of tokens."""
    part = Part(KEY, (1,), (plain(params_of(pool.group.layers).row_dim, pool.query.kv_dtype),))
    if pool.query.space.name in RATIO_OF:
        return Kind(lambda _: (part,), _write_compressed, _read_compressed, places=_places)
    return Kind(lambda _: (part,), _write_rows, _read_rows)


def states_kind(pool: NpuCompressStatePool) -> Kind:
    """Return how states are driven: those of the tokens of which the next compressed rows are made."""
    columns = pool.get_states(pool.layer_ids[0]).kv.shape[-1]
    parts = tuple(Part(f"{pool.query.kind} {i}", (), (plain(columns, "bfloat16"),)) for i in range(2))
    return Kind(lambda _: parts, _write_states, _read_states, places=_places, ahead=draft_tokens(pool.query))


def index_kind(pool: NpuIndexPool) -> Kind:
    """Return how index keys are driven: one for each group of tokens, as whole steps of a scale."""
    steps = Pattern(pool.index_head_dim, block=pool.index_head_dim, top=float(INT8_LIMIT), codes=CODES)
    part = Part(INDEX_KEY, (), (steps,))
    return Kind(lambda _: (part,), _write_index, _read_index, places=_places)


def _places(layer: Layer, tokens: Tokens) -> torch.Tensor:
    """Return where tokens have their rows in the layer's space; 0 for those that have none, or none any more.

    Raises:
        RunError: the table of a request names another place for a state that its next row is made of.
    """
    import torch

    pool: GroupedPool = layer.pool
    space = pool.query.space.name
    found: torch.Tensor = layer.router.places_for(pool.group.name, tokens.slots).clamp(min=0)
    if space not in STATE_RATIO:
        return found
    is_needed = tokens.positions >= first_needed(tokens.lengths, STATE_RATIO[space])
    named = layer.router.parts.request_pool.tables[space][tokens.rows, tokens.positions]
    if (wrong := (is_needed & (named != found)).nonzero()).numel():
        place = int(wrong[0])
        raise RunError(
            f"the table of {space} names {int(named[place])} for position {int(tokens.positions[place])} of request row "
            f"{int(tokens.rows[place])}, whose state lies at {int(found[place])}"
        )
    return torch.where(is_needed, found, 0)


def _write_rows(layer: Layer, where: Where, rows: Rows) -> None:
    layer.router.set_kv_buffer(layer.layer_id, where.slots, rows[KEY], rows[KEY])


def _read_rows(layer: Layer, where: Where) -> Rows:
    return {KEY: layer.router.read_kv(layer.layer_id, where.slots)[0]}


def _write_compressed(layer: Layer, where: Where, rows: Rows) -> None:
    layer.router.set_extra_key_buffer(layer.layer_id, where.slots, rows[KEY])


def _read_compressed(layer: Layer, where: Where) -> Rows:
    return {KEY: layer.router.read_extra_key(layer.layer_id, where.slots)}


def _write_states(layer: Layer, where: Where, rows: Rows) -> None:
    layer.pool.set_states(layer.layer_id, where.mapped, *(rows[part.name] for part in layer.parts))


def _read_states(layer: Layer, where: Where) -> Rows:
    found = layer.pool.read_states(layer.layer_id, where.mapped)
    return {part.name: vector for part, vector in zip(layer.parts, found, strict=True)}


def _write_index(layer: Layer, where: Where, rows: Rows) -> None:
    layer.router.set_index_k(layer.layer_id, where.slots, rows[INDEX_KEY])


def _read_index(layer: Layer, where: Where) -> Rows:
    return {INDEX_KEY: layer.router.read_index_k(layer.layer_id, where.slots)}
