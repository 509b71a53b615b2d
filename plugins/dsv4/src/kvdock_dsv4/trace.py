"""What a run writes and reads in a cache of DeepSeek V4 (`kvdock run`): rows, index keys and states, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock import dtypes
from kvdock.demand import draft_tokens
from kvdock.pools.index_keys import index_format
from kvdock.testing.kinds import INDEX_KEY, KEY, Kind, Layer, Part, Rows, Tokens, Where
from kvdock.testing.patterns import plain, scaled_to_limit
from kvdock.testing.values import RunError

from kvdock_dsv4.geometry import C4_STATE, RATIO_OF, first_needed, window_of
from kvdock_dsv4.packing import BLOCK, ELEMENT, ROPE_DTYPE
from kvdock_dsv4.pools.hisparse import HiSparsePackedPool
from kvdock_dsv4.pools.index import IndexPool
from kvdock_dsv4.pools.packed import PackedPool
from kvdock_dsv4.pools.states import CompressStatePool, OnlineStatePool

if TYPE_CHECKING:
    import torch

COMPRESSED_KEY = "compressed row"


def rows_kind(pool: PackedPool) -> Kind:
    """Return how the packed rows of a pool are driven: one a token in the window, or one for each group of tokens."""
    found = pool.format
    patterns = (scaled_to_limit(found.nope_dim, BLOCK, ELEMENT), plain(found.rope_dim, ROPE_DTYPE))
    if pool.query.space.name in RATIO_OF:
        part = Part(COMPRESSED_KEY, (1,), patterns)
        return Kind(lambda _: (part,), _write_compressed, _read_compressed, places=_places_of_groups)
    own = Part(KEY, (1,), patterns)
    return Kind(lambda _: (own,), _write_rows, _read_rows)


def tiered_rows_kind(pool: HiSparsePackedPool) -> Kind:
    """Return how packed rows of two tiers are driven: each goes to the host, and is read where it is."""
    return rows_kind(pool)._replace(write=_write_tiers, read=_read_tiers, places=_places_of_tiers)


def index_kind(pool: IndexPool) -> Kind:
    """Return how index keys are driven: one for each group of tokens."""
    found = index_format(pool.query)
    part = Part(INDEX_KEY, (), (scaled_to_limit(found.dim, found.block, dtypes.find(found.dtype).name),))
    return Kind(lambda _: (part,), _write_index, _read_index, places=_places_of_groups)


def states_kind(pool: CompressStatePool) -> Kind:
    """Return how states are driven: those of the tokens of which the next compressed row is made."""
    vectors, width = pool.parts_of_row, next(iter(pool.get_raw_kv_buffer(pool.layer_ids[0]).values())).shape[1]
    names = [f"{pool.query.kind} {i}" for i in range(vectors)]
    parts = tuple(Part(name, (), (plain(width // vectors, "bfloat16"),)) for name in names)
    if isinstance(pool, OnlineStatePool):
        return Kind(lambda _: parts, _write_states, _read_states, places=_place_of_request, ahead=0)
    follows_pages = pool.query.space.name == C4_STATE
    places = _places_in_pages if follows_pages else _places_in_request
    return Kind(lambda _: parts, _write_states, _read_states, places=places, ahead=draft_tokens(pool.query))


def _write_rows(layer: Layer, where: Where, rows: Rows) -> None:
    layer.router.set_kv_buffer(layer.layer_id, where.slots, rows[KEY], rows[KEY])


def _read_rows(layer: Layer, where: Where) -> Rows:
    return {KEY: layer.router.read_kv(layer.layer_id, where.slots)[0]}


def _write_compressed(layer: Layer, where: Where, rows: Rows) -> None:
    layer.router.set_extra_key_buffer(layer.layer_id, where.slots, rows[COMPRESSED_KEY])


def _read_compressed(layer: Layer, where: Where) -> Rows:
    return {COMPRESSED_KEY: layer.router.read_extra_key(layer.layer_id, where.slots)}


def _write_tiers(layer: Layer, where: Where, rows: Rows) -> None:
    """Write rows to the device and copy them to the host; those that arrive for no window go to the host directly."""
    _write_compressed(layer, where, rows)
    layer.pool.offload(where.mapped, layer.layer_id)
    absent = ~layer.pool.resident(where.mapped)
    layer.pool.set_host_kv_buffer(layer.layer_id, where.mapped[absent], rows[COMPRESSED_KEY][absent])


def _read_tiers(layer: Layer, where: Where) -> Rows:
    import torch

    here = layer.pool.resident(where.mapped)[:, None, None]
    on_host = layer.pool.read_host(layer.layer_id, where.mapped)
    return {COMPRESSED_KEY: torch.where(here, _read_compressed(layer, where)[COMPRESSED_KEY], on_host)}


def _write_index(layer: Layer, where: Where, rows: Rows) -> None:
    layer.router.set_index_k(layer.layer_id, where.slots, rows[INDEX_KEY])


def _read_index(layer: Layer, where: Where) -> Rows:
    return {INDEX_KEY: layer.router.read_index_k(layer.layer_id, where.slots)}


def _write_states(layer: Layer, where: Where, rows: Rows) -> None:
    layer.pool.set_states(layer.layer_id, where.mapped, *(rows[part.name] for part in layer.parts))


def _read_states(layer: Layer, where: Where) -> Rows:
    found = layer.pool.read_states(layer.layer_id, where.mapped)
    return {part.name: vector for part, vector in zip(layer.parts, found, strict=True)}


def _places_of_groups(layer: Layer, tokens: Tokens) -> torch.Tensor:
    """Return the compressed slots of tokens that end a group; 0 for others."""
    found: torch.Tensor = layer.router.translate_loc_from_full_to_compressed(tokens.slots, _ratio(layer))
    return found.clamp(min=0)


def _places_of_tiers(layer: Layer, tokens: Tokens) -> torch.Tensor:
    """Return the same; whoever has a sliding slot has its rows on the device.

    Raises:
        RunError: names the first token of which that is not so.
    """
    places = _places_of_groups(layer, tokens)
    is_due = (places > 0) & (tokens.positions >= tokens.firsts)
    absent = tokens.slots[is_due & ~layer.pool.resident(places)]
    if absent.numel():
        raise RunError(f"slot {int(absent[0])} did not leave the window, but its rows are not on the device")
    return places


def _places_in_pages(layer: Layer, tokens: Tokens) -> torch.Tensor:
    """Return where the states of tokens lie in the ring of their page, of the newest tokens in it; 0 for others.

    A page that is full keeps twice a group, another what its next row is made of; what was written before the sliding
    slots were lost is not kept.
    """
    import torch

    page, ratio = layer.router.page_size, _ratio(layer)
    last = torch.minimum(tokens.lengths, (tokens.positions // page + 1) * page)
    first = torch.where(last % page == 0, last - window_of(ratio), first_needed(last, ratio))
    is_kept = (tokens.positions >= first) & (tokens.positions >= tokens.firsts)
    places: torch.Tensor = layer.router.translate_loc_from_full_to_state(tokens.slots)
    return torch.where(is_kept, places, 0)


def _places_in_request(layer: Layer, tokens: Tokens) -> torch.Tensor:
    """Return where the states of the tokens of an unfinished group lie in the ring of their request; 0 for others."""
    import torch

    is_kept = tokens.positions >= first_needed(tokens.lengths, _ratio(layer))
    places: torch.Tensor = layer.router.request_state_locs(tokens.rows, tokens.positions)
    return torch.where(is_kept, places, 0)


def _place_of_request(layer: Layer, tokens: Tokens) -> torch.Tensor:
    """Return the place of the one state of a request for its last token, while its group is unfinished; 0 for others."""
    import torch

    is_last = (tokens.positions == tokens.lengths - 1) & (tokens.lengths % _ratio(layer) != 0)
    places: torch.Tensor = layer.router.request_state_locs(tokens.rows, tokens.positions)
    return torch.where(is_last, places, 0)


def _ratio(layer: Layer) -> int:
    ratio: int = layer.router.ratio_of(layer.layer_id)
    return ratio
