"""What a run writes and reads in pools that keep latents and rope parts apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.testing.kinds import INDEX_KEY, KEY, VALUE, Kind, Layer, Part, Rows, Where, gathered
from kvdock.testing.patterns import plain

if TYPE_CHECKING:
    from kvdock.pools.base import Pool

    from kvdock_ascend.pools.attention import NpuMLAPool


def latents_kind(pool: NpuMLAPool) -> Kind:
    """Return the kind of a pool of latents, with index keys where it keeps them."""
    index_dim = getattr(pool, "index_head_dim", 0)

    def parts(_: Pool) -> tuple[Part, ...]:
        widths = {KEY: pool.kv_lora_rank, VALUE: pool.qk_rope_head_dim}
        rows = tuple(Part(name, (1,), (plain(width, pool.query.kv_dtype),)) for name, width in widths.items())
        return (*rows, Part(INDEX_KEY, (), (plain(index_dim, pool.query.kv_dtype),))) if index_dim else rows

    return Kind(parts, _write, _read)


def _write(layer: Layer, where: Where, rows: Rows) -> None:
    layer.router.set_mla_kv_buffer(layer.layer_id, where.slots, rows[KEY], rows[VALUE])
    if INDEX_KEY in rows:
        layer.router.set_index_k(layer.layer_id, where.slots, rows[INDEX_KEY])


def _read(layer: Layer, where: Where) -> Rows:
    views = layer.router.get_key_buffer(layer.layer_id), layer.router.get_value_buffer(layer.layer_id)
    own, _ = layer.pool.own_rows(where.mapped)
    rows = {KEY: gathered(views[0], own), VALUE: gathered(views[1], own)}
    if any(part.name == INDEX_KEY for part in layer.parts):
        rows[INDEX_KEY] = layer.pool.read_index_k(layer.layer_id, where.mapped)
    return rows
