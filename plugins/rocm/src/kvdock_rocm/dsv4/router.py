"""What an engine sees of DeepSeek V4 on AMD devices: token slots for compressed rows, request rows and positions for rings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdock.errors import SlotError
from kvdock.layout import FULL, SWA
from kvdock.planned import Parts
from kvdock.pools import Pool, RoutedPool
from kvdock.queries import PoolQuery
from kvdock_dsv4.geometry import RATIO_OF, request_state_slot
from kvdock_dsv4.model import KIND
from kvdock_dsv4.pools.router import DSV4Pool, whole_positions

from kvdock_rocm.dsv4.pools import RocmRowsPool, RocmStatePool
from kvdock_rocm.dsv4.spaces import RATIO_OF_ROWS

if TYPE_CHECKING:
    import torch


class RocmDSV4Pool(DSV4Pool):
    """Finds where a layer's rows lie: compressed ones and index keys by token slot, all that slides by request row.

    A sliding row or a state is found by request row and position (`request_swa_locs`, `request_state_locs`), since a
    token has a place in the ring of its request and no sliding slot; so `set_kv_buffer` and its readers, which take
    token slots, are refused. Write at most the newest ring of a request at once. A row that does not exist is padding's:
    behind the last ring lie compressed rows. What a request owns of rings is copied by row (`get_request_copy`), and
    compressed rows and index keys by token slot.
    """

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        RoutedPool.__init__(self, query, parts)  # the family's asks for an allocator with sliding slots
        self.page_size = query.spaces[FULL].page_size
        spaces = {name: pool.query.space.name for name, pool in parts.pools.items()}
        self._by_kind = {(pool.query.kind, _ratio_of(spaces[name])): pool for name, pool in parts.pools.items()}
        self._ratios = {
            layer_id: RATIO_OF_ROWS[spaces[name]]
            for name, pool in parts.pools.items()
            if spaces[name] in RATIO_OF_ROWS
            for layer_id in pool.layer_ids
        }

    def routed_parts(self) -> dict[str, Pool]:
        """Return the pools of rows: each layer's sliding and compressed ones are in one."""
        return {name: pool for name, pool in self.parts.pools.items() if pool.query.kind == KIND}

    # Where rows lie.

    def request_swa_locs(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return where the sliding rows of tokens lie in the buffers of all layers, by request row and position.

        Draft tokens count on behind the request's own, one position each, whatever branch of a tree they are of.
        """
        return self._in_ring(SWA, rows, positions)

    def translate_loc_from_full_to_row(self, loc: torch.Tensor, ratio: int) -> torch.Tensor:
        """Return where the compressed rows of a ratio lie in their layers' buffers, for the slots `loc`.

        −1 for tokens that are not the last of their group, and for −1.

        Raises:
            SlotError: no layer here has this ratio.
        """
        import torch

        pool: Any = self._by_kind.get((KIND, ratio)) if ratio else None
        if pool is None:
            raise SlotError(f"no layer of {self.query.worker} here has compressed rows of ratio {ratio}")
        found = self.translate_loc_from_full_to_compressed(loc, ratio)
        return torch.where(found >= 0, found + pool.first_compressed, -1)

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor:
        """Raise: tokens have no sliding slots."""
        raise _by_row("request_swa_locs")

    def translate_loc_from_full_to_state(self, loc: torch.Tensor) -> torch.Tensor:
        """Raise: states have no slots of tokens."""
        raise _by_row("request_state_locs")

    def slots_for(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return what copies of the slots `loc` take of a part: −1 for tokens that own nothing there."""
        return self.places_for(name, loc)

    def places_for(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return where each of the slots `loc` has its row in a part: −1 for tokens that have none.

        Raises:
            SlotError: the part lies by request row, or there is no such part.
        """
        space = self._space_of(name)
        if space in RATIO_OF_ROWS:
            return self.translate_loc_from_full_to_row(loc, RATIO_OF_ROWS[space])
        if space in RATIO_OF:
            return self.translate_loc_from_full_to_compressed(loc, RATIO_OF[space])
        raise _by_row("get_request_copy")

    # Sliding rows.

    def set_swa_key_buffer(self, layer_id: int, rows: torch.Tensor, positions: torch.Tensor, k: torch.Tensor) -> None:
        """Write sliding rows `k` ``[n, 1, columns]`` of the tokens at `positions` of the request rows `rows`.

        Raises:
            SlotError: the layer is not here, or the shapes do not fit; with debug, a row is nobody's, or a place is given
                twice. Nothing is written.
        """
        pool, loc = self._rows_of(layer_id), self._checked_ring(layer_id, rows, positions)
        pool.check_distinct(layer_id, loc)
        pool.set_kv_buffer(layer_id, loc, k)

    def read_swa_key(
        self, layer_id: int, rows: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return copies ``[n, 1, columns]`` of the sliding rows of tokens that their rings still hold.

        Raises:
            SlotError: the layer is not here, or rows and positions do not fit; with debug, a row is nobody's.
        """
        loc = self._checked_ring(layer_id, rows, positions)
        found: torch.Tensor = self._rows_of(layer_id).read_kv(layer_id, loc, dtype=dtype)[0]
        return found

    def get_swa_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's sliding rows by request row: ``[request rows, ring, 1, columns]``."""
        rings: torch.Tensor = self._rows_of(layer_id).get_ring_buffer(layer_id)
        return rings

    def get_extra_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's compressed rows by page of tokens: ``[pages, rows of a page, 1, columns]``.

        Raises:
            SlotError: the layer compresses nothing.
        """
        rows: torch.Tensor = self.compressed_pool(layer_id).get_compressed_buffer(layer_id)
        return rows

    def set_kv_buffer(self, layer_id: int, loc: torch.Tensor, *rows: Any, **scales: Any) -> None:
        """Raise: sliding rows are written by request row and position."""
        raise _by_row("set_swa_key_buffer")

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Raise, as `set_kv_buffer`."""
        raise _by_row("set_swa_key_buffer")

    def read_kv(self, layer_id: int, loc: torch.Tensor, *more: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise: sliding rows are read by request row and position."""
        raise _by_row("read_swa_key")

    def get_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise, as `read_kv`."""
        raise _by_row("read_swa_key")

    # Parts.

    def compressed_pool(self, layer_id: int) -> Any:
        """Return the `RocmRowsPool` of a layer that has compressed rows.

        Raises:
            SlotError: the layer has none here.
        """
        return self._part(RocmRowsPool, KIND, layer_id, "compressed rows")

    def _rows_of(self, layer_id: int) -> Any:
        return self.parts.pools[self.part_of(layer_id)]

    def _by_request(self) -> list[Any]:
        return [pool for pool in self.parts.pools.values() if isinstance(pool, RocmRowsPool | RocmStatePool)]

    def _compressed(self, layer_id: int, loc: torch.Tensor) -> tuple[Any, torch.Tensor]:
        pool = self.compressed_pool(layer_id)
        return pool, self.checked_slots_for(pool.group.name, loc, layer_id)

    def _groups(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return the slots of the index keys of the groups whose last tokens have the slots `loc`."""
        return self.checked_slots_for(self.index_pool(layer_id).group.name, loc, layer_id)

    def _in_ring(self, space: str, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        import torch

        whole_positions(positions)
        return request_state_slot(self._known_rows(space, rows), positions.to(torch.int64), self._ring(space))

    def _checked_ring(self, layer_id: int, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return where sliding rows lie; with debug, after checking that the request rows are somebody's."""
        if rows.shape != positions.shape:
            raise SlotError(
                f"layer {layer_id}: request rows of shape {list(rows.shape)} for positions of shape "
                f"{list(positions.shape)}; give one for each token"
            )
        self._rows_of(layer_id).check_requests(rows)
        return self.request_swa_locs(rows, positions)


def _ratio_of(space: str) -> int:
    return RATIO_OF.get(space.removesuffix("_state").removesuffix("_rows"), 0)


def _by_row(method: str) -> SlotError:
    return SlotError(
        f"what slides lies in the ring of a request's row here, and no token slot tells which; call {method} with "
        "request rows and positions"
    )
