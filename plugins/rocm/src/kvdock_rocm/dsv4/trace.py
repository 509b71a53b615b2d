"""What a run writes and reads in the form for AMD devices (`kvdock run`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.demand import draft_tokens
from kvdock.testing.kinds import KEY, Kind, Layer, Part, Rows, Tokens, Where
from kvdock.testing.patterns import plain
from kvdock_dsv4 import trace
from kvdock_dsv4.geometry import first_needed
from kvdock_dsv4.model import params_of
from kvdock_dsv4.trace import COMPRESSED_KEY

if TYPE_CHECKING:
    import torch

    from kvdock_rocm.dsv4.pools import RocmRowsPool, RocmStatePool


def rows_kind(pool: RocmRowsPool) -> Kind:
    """Return how rows are driven: one a token in the ring of its request, and one for each group of tokens."""
    window = max(layer.window_tokens or 1 for _, layer in pool.group.layers)
    drafts = draft_tokens(pool.query)
    # What the newest token sees, itself included; drafts that were taken back leave what the next one sees beside itself.
    seen = window - 1 if drafts else window
    pattern = plain(params_of(pool.group.layers).row_dim, pool.query.kv_dtype)
    own, group = Part(KEY, (1,), (pattern,)), Part(COMPRESSED_KEY, (1,), (pattern,))
    compressed = Kind(lambda _: (group,), _write_compressed, _read_compressed, places=_places_of_groups)

    def places(layer: Layer, tokens: Tokens) -> torch.Tensor:
        found: torch.Tensor = layer.router.request_swa_locs(tokens.rows, tokens.positions)
        return _kept(tokens, tokens.lengths - seen, found)

    return Kind(
        lambda _: (own,),
        _write_ring,
        _read_ring,
        places=places,
        ahead=drafts,
        beside=(compressed,) if pool.ratio else (),
    )


def states_kind(pool: RocmStatePool) -> Kind:
    """Return how states are driven: those of the tokens of which the next compressed row is made."""
    ratio = pool.ratio

    def places(layer: Layer, tokens: Tokens) -> torch.Tensor:
        found: torch.Tensor = layer.router.request_state_locs(tokens.rows, tokens.positions, ratio)
        return _kept(tokens, first_needed(tokens.lengths, ratio), found)

    return trace.states_kind(pool)._replace(places=places)


def _kept(tokens: Tokens, first: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the places of tokens from position `first` on; 0 for those before, whose places are newer ones' by now."""
    import torch

    return torch.where(tokens.positions >= first, places, 0)


def _places_of_groups(layer: Layer, tokens: Tokens) -> torch.Tensor:
    """Return the compressed rows of tokens that end a group; 0 for others."""
    found: torch.Tensor = layer.router.translate_loc_from_full_to_row(tokens.slots, layer.pool.ratio)
    return found.clamp(min=0)


def _write_ring(layer: Layer, where: Where, rows: Rows) -> None:
    layer.pool.set_kv_buffer(layer.layer_id, where.mapped, rows[KEY])


def _read_ring(layer: Layer, where: Where) -> Rows:
    return {KEY: layer.pool.read_kv(layer.layer_id, where.mapped)[0]}


def _write_compressed(layer: Layer, where: Where, rows: Rows) -> None:
    layer.router.set_extra_key_buffer(layer.layer_id, where.slots, rows[COMPRESSED_KEY])


def _read_compressed(layer: Layer, where: Where) -> Rows:
    return {COMPRESSED_KEY: layer.router.read_extra_key(layer.layer_id, where.slots)}
