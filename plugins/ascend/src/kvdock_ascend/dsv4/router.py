"""What an engine sees of DeepSeek V4 on Ascend devices: requests' slots in, and for each part where its rows lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvdock.errors import PluginError, SlotError
from kvdock.planned import Parts
from kvdock.queries import PoolQuery
from kvdock_dsv4.geometry import C4_STATE, C128, RATIO_OF, STATE_RATIO
from kvdock_dsv4.model import KIND
from kvdock_dsv4.pools.router import DSV4Pool, whole_positions
from kvdock_dsv4.sizing import INDEX, INDEX_STATE, STATE

from kvdock_ascend.device import DEVICE_TYPE
from kvdock_ascend.dsv4.allocator import DSV4NpuAllocator
from kvdock_ascend.dsv4.pools import NpuCompressStatePool, NpuIndexPool, NpuRowsPool

if TYPE_CHECKING:
    import torch


class DSV4NpuPool(DSV4Pool):
    """The same calls as on other devices; where compressed rows and states lie is the allocator's affair here.

    All that a request owns is found by its tokens, so copies by request row hold nothing.
    """

    device_types: ClassVar[frozenset[str] | None] = frozenset({DEVICE_TYPE})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        if not isinstance(parts.allocator, DSV4NpuAllocator):
            raise PluginError(
                f"{type(self).__name__} needs DSV4NpuAllocator, not {type(parts.allocator).__name__}; claim both"
            )
        self._places = parts.allocator

    def translate_loc_from_full_to_compressed(self, loc: torch.Tensor, ratio: int) -> torch.Tensor:
        """Return the compressed slots of the slots `loc`; −1 for tokens that are not the last of their group, and for −1.

        Raises:
            SlotError: no layer compresses by this ratio.
        """
        self._states_of(ratio)
        name = next(name for name, own in RATIO_OF.items() if own == ratio)
        return self._places.translate_beside(name, loc)

    def translate_loc_from_full_to_state(self, loc: torch.Tensor, name: str = C4_STATE) -> torch.Tensor:
        """Return where the states of the slots `loc` lie in a space of states; older tokens' places are newer ones' now."""
        return self._places.translate_beside(name, loc)

    def request_state_locs(
        self, rows: torch.Tensor, positions: torch.Tensor, ratio: int = RATIO_OF[C128]
    ) -> torch.Tensor:
        """Return where the states of a ratio lie, by request row and position, of tokens that the request table holds.

        A row that does not exist and a position beyond its columns are padding's.

        Raises:
            SlotError: there are no states of this ratio; floats; or this cache has no request table.
        """
        import torch

        space = self._states_of(ratio)
        whole_positions(positions)
        requests = self.parts.request_pool
        if requests is None:
            raise SlotError("states by request row are found through the request table, and this cache has none")
        table, wide = requests.req_to_token, positions.to(torch.int64)
        inside = (wide >= 0) & (wide < table.shape[1])
        slots = table[self._known_rows(space, rows), torch.where(inside, wide, 0)]
        return self.translate_loc_from_full_to_state(torch.where(inside, slots, 0), space)

    def slots_for(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return what copies of the slots `loc` take of a part: −1 for tokens that own nothing there."""
        return self.places_for(name, loc)

    def places_for(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return where each of the slots `loc` has its row in a part: −1 for tokens that have none.

        Raises:
            SlotError: there is no such part; names those that there are.
        """
        space = self._space_of(name)
        if space in RATIO_OF:
            return self.translate_loc_from_full_to_compressed(loc, RATIO_OF[space])
        if space in STATE_RATIO:
            return self.translate_loc_from_full_to_state(loc, space)
        return self.translate_loc_from_full_to_swa(loc)

    def get_swa_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's sliding rows ``[pages, page_size, 1, columns]``."""
        return self.get_key_buffer(layer_id)

    def get_extra_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's compressed rows ``[pages, page_size, 1, columns]``.

        Raises:
            SlotError: the layer compresses nothing.
        """
        rows: torch.Tensor = self.compressed_pool(layer_id).get_key_buffer(layer_id)
        return rows

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Raise: keys and scales are two tensors here, those of `index_pool`."""
        raise SlotError(f"layer {layer_id}: index keys and scales lie apart here; read index_pool({layer_id})")

    def compressed_pool(self, layer_id: int) -> Any:
        """Return the `NpuRowsPool` of a layer's compressed rows.

        Raises:
            SlotError: the layer has none here.
        """
        return self._part(NpuRowsPool, KIND, layer_id, "compressed rows")

    def index_pool(self, layer_id: int) -> Any:
        """Return the `NpuIndexPool` of a layer; raises as `compressed_pool`."""
        return self._part(NpuIndexPool, INDEX, layer_id, "index keys")

    def state_pool(self, layer_id: int) -> Any:
        """Return the `NpuCompressStatePool` of a layer's compressed rows; raises as `compressed_pool`."""
        return self._part(NpuCompressStatePool, STATE, layer_id, "states")

    def index_state_pool(self, layer_id: int) -> Any:
        """Return the `NpuCompressStatePool` of a layer's index keys; raises as `compressed_pool`."""
        return self._part(NpuCompressStatePool, INDEX_STATE, layer_id, "states of index keys")

    def _ring(self, space: str) -> int:
        """Return the states that the tokens of a request use in turn: those of all its pages."""
        return self.query.spaces[space].rule.per_request[0]

    def _space_by_request(self, ratio: int) -> str:
        """Return the space of a ratio's states; those of both lie in pages of their request."""
        return self._states_of(ratio)
