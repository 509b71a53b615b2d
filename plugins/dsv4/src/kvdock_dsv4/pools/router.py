"""What an engine sees of DeepSeek V4: requests' slots in, and for each part where its rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvdock.allocators.lengths import require_integers
from kvdock.errors import PluginError, SlotError
from kvdock.layout import SWA
from kvdock.planned import Parts
from kvdock.pools import Pool, RoutedPool
from kvdock.pools.sliding import MapsSliding
from kvdock.queries import PoolQuery

from kvdock_dsv4.geometry import (
    C4,
    C4_STATE,
    C128,
    C128_STATE,
    RATIO_OF,
    STATE_RATIO,
    compressed_slot,
    first_needed,
    online_slot,
    request_state_slot,
    state_slot,
)
from kvdock_dsv4.model import KIND
from kvdock_dsv4.pools.index import IndexPool
from kvdock_dsv4.pools.packed import PackedPool
from kvdock_dsv4.pools.placed import verify_requests, whole_rows
from kvdock_dsv4.pools.states import CompressStatePool, Online, OnlineStatePool, Ring
from kvdock_dsv4.sizing import INDEX, INDEX_STATE, STATE

if TYPE_CHECKING:
    import torch

Part = TypeVar("Part", bound=Pool)


class DSV4Pool(RoutedPool):
    """Finds, for the full slots of requests, sliding rows, compressed rows, index keys and states of each layer.

    `set_kv_buffer` and its readers are about sliding rows, which every layer has. Compressed rows and index keys
    are written with the slot of the *last* token that they stand for; the slot of another token lands in padding.
    States that follow sliding pages are found by token slots, those that follow requests by request row and
    position; a row that does not exist is padding's.
    """

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        allocator = parts.allocator
        if allocator is None or not isinstance(allocator, MapsSliding):
            raise PluginError(
                f"{type(self).__name__} needs an allocator that translates full slots, not {type(allocator).__name__}; "
                "claim SWAAllocator or a subclass for the spaces 'full' and 'swa'"
            )
        self._map: MapsSliding = allocator
        self.page_size = query.spaces[SWA].page_size
        self._by_kind: dict[tuple[str, int], Pool] = {}
        for pool in parts.pools.values():
            key = pool.query.kind, RATIO_OF.get(pool.query.space.name.removesuffix("_state"), 0)
            self._by_kind[key] = pool
        self._compressed_names = {
            RATIO_OF[pool.query.space.name]: name
            for name, pool in reversed([*parts.pools.items()])
            if pool.query.space.name in RATIO_OF
        }
        """Ratio → the first part whose slots are compressed by it."""
        self._ratios = {
            layer_id: RATIO_OF[space]
            for space in RATIO_OF
            for pool in parts.pools.values()
            if pool.query.space.name == space
            for layer_id in pool.layer_ids
        }

    def routed_parts(self) -> dict[str, Pool]:
        """Return the sliding rows, which every layer has: those that `set_kv_buffer` is about."""
        return {name: pool for name, pool in self.token_parts.items() if pool.query.space.name == SWA}

    def ratio_of(self, layer_id: int) -> int:
        """Return the tokens that a compressed row of a layer stands for; 0: it has none."""
        return self._ratios.get(layer_id, 0)

    # Where rows lie.

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the sliding slots of the slots `loc` as int64: −1 for −1, 0 where it was given back.

        Raises:
            SlotError: slots are no tensor of whole numbers.
        """
        require_integers("slots", loc)
        return self._map.translate(loc)

    def translate_loc_from_full_to_compressed(self, loc: torch.Tensor, ratio: int) -> torch.Tensor:
        """Return the compressed slots of the slots `loc`; −1 for tokens that are not the last of their group, and for −1.

        Raises:
            SlotError: no layer compresses by this ratio, or slots are no tensor of whole numbers.
        """
        import torch

        require_integers("slots", loc)
        self._states_of(ratio)
        wide = loc.to(torch.int64)
        return torch.where(wide % ratio == ratio - 1, compressed_slot(wide, ratio), -1)

    def translate_loc_from_full_to_state(self, loc: torch.Tensor) -> torch.Tensor:
        """Return where the states of the slots `loc` lie that follow sliding pages; 0 where those were given back.

        Raises:
            SlotError: no layer has such states.
        """
        import torch

        self._states_of(RATIO_OF[C4])
        swa = self.translate_loc_from_full_to_swa(loc)
        return torch.where(swa > 0, state_slot(swa, self.page_size, self._ring(C4_STATE)), swa)

    def request_state_locs(
        self, rows: torch.Tensor, positions: torch.Tensor, ratio: int = RATIO_OF[C128]
    ) -> torch.Tensor:
        """Return where the states of tokens lie that follow request rows, by row and position; online: by row.

        Raises:
            SlotError: there are no states of this ratio, or they do not follow request rows; floats.
        """
        import torch

        space = self._space_by_request(ratio)
        pool = self._by_kind.get((STATE, ratio))
        if isinstance(pool, OnlineStatePool):
            return online_slot(self._known_rows(space, rows), 0, pool.banks)
        whole_positions(positions)
        return request_state_slot(self._known_rows(space, rows), positions.to(torch.int64), self._ring(space))

    def request_state_mask(self, lengths: torch.Tensor, ratio: int = RATIO_OF[C128]) -> torch.Tensor:
        """Return which states of a request's ring are its own and are still needed, bool ``[n, ring]``.

        Those of which the row is made to which the last of so many written tokens belongs. Others are of earlier tokens, or
        of whoever had the ring before, which is not cleared when it is handed out: read the empty state for them.

        Raises:
            SlotError: there are no rings of this ratio that follow request rows.
        """
        import torch

        space = self._space_by_request(ratio)
        if isinstance(self._by_kind.get((STATE, ratio)), OnlineStatePool):
            raise SlotError(f"states of ratio {ratio} are one running state a request here, which is all its own")
        last = lengths.to(torch.int64).unsqueeze(-1) - 1
        ring = self._ring(space)
        newest = last - (last - torch.arange(ring, device=last.device)) % ring
        return (newest >= first_needed(last, ratio)) & (newest >= 0)

    def slots_for(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return what copies of the slots `loc` take of a part: −1 for tokens that own nothing there.

        A ring goes with the first tokens of its page, one row each, so that a page has its ring in a copy once.
        """
        import torch

        places = self.places_for(name, loc)
        if self._space_of(name) != C4_STATE:
            return places
        return torch.where(loc % self.page_size < self._ring(C4_STATE), places, -1)

    def places_for(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return where each of the slots `loc` has its row in a part: −1 for tokens that have none.

        Raises:
            SlotError: there is no such part; names those that there are.
        """
        space = self._space_of(name)
        if space in RATIO_OF:
            return self.translate_loc_from_full_to_compressed(loc, RATIO_OF[space])
        if space == C4_STATE:
            return self.translate_loc_from_full_to_state(loc)
        return self.translate_loc_from_full_to_swa(loc)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy all that the slots `src_loc` own to `tgt_loc`, in every part; reads happen first.

        Compressed rows move where both tokens are the last of a group. Of states that share a place in a ring
        either may stay: move whole pages, or at most a ring of tokens that follow each other.
        """
        for name, pool in self.token_parts.items():
            self.checked_slots_for(name, tgt_loc), self.checked_slots_for(name, src_loc)
            pool.move_kv_cache(self.places_for(name, tgt_loc), self.places_for(name, src_loc))

    # Compressed rows and index keys.

    def set_extra_key_buffer(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor) -> None:
        """Write compressed rows `k` ``[n, 1, columns]`` for the groups whose last tokens have the slots `loc`.

        Raises:
            SlotError: the layer compresses nothing, or the shapes do not fit; nothing is written.
        """
        pool, slots = self._compressed(layer_id, loc)
        pool.set_kv_buffer(layer_id, slots, k)

    def read_extra_key(self, layer_id: int, loc: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return copies ``[n, 1, columns]`` of the compressed rows of the groups whose last tokens have the slots `loc`."""
        pool, slots = self._compressed(layer_id, loc)
        return pool.read_kv(layer_id, slots, dtype=dtype)[0]

    def get_extra_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the pages of a layer's compressed rows as bytes ``[pages, bytes of a page]``.

        Raises:
            SlotError: the layer compresses nothing.
        """
        return self.compressed_pool(layer_id).get_raw_kv_buffer(layer_id)["kv"]

    def get_swa_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the pages of a layer's sliding rows as bytes ``[pages, bytes of a page]``."""
        return self.get_raw_kv_buffer(layer_id)["kv"]

    def set_index_k(self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor) -> None:
        """Write index keys ``[n, index_head_dim]`` for the groups whose last tokens have the slots `loc`."""
        self.index_pool(layer_id).set_index_k(layer_id, self._groups(layer_id, loc), index_k)

    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Write index keys and scales that a kernel quantised, as `set_index_k`."""
        pool, slots = self.index_pool(layer_id), self._groups(layer_id, loc)
        pool.set_index_k_scale_buffer(layer_id, slots, index_k, index_k_scale)

    def read_index_k(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return the index keys of the groups whose last tokens have the slots `loc` as float32 ``[n, index_head_dim]``."""
        return self.index_pool(layer_id).read_index_k(layer_id, self._groups(layer_id, loc))

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the pages of a layer's index keys and scales as bytes."""
        return self.index_pool(layer_id).get_index_k_with_scale_buffer(layer_id)

    # States.

    def get_attention_compress_states(self, layer_id: int) -> Ring | Online:
        """Return the states of a layer's compressed rows, by their slots."""
        return self.state_pool(layer_id).get_states(layer_id)

    def get_indexer_compress_states(self, layer_id: int) -> Ring | Online:
        """Return the states of a layer's index keys, by their slots."""
        return self.index_state_pool(layer_id).get_states(layer_id)

    def get_request_copy(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return host copies of what request rows own beside their tokens, part after part.

        Raises:
            SlotError: a row does not exist, or is given twice; with debug, it is nobody's.
        """
        self._verify_requests(rows)
        return [copy for pool in self._by_request() for copy in pool.get_request_copy(rows)]

    def load_request_copy(self, copies: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Write what `get_request_copy` returned to the request rows `rows`; bit-identical.

        Raises:
            SlotError: the copies do not fit, or as `get_request_copy`; nothing is written.
        """
        self._verify_requests(rows)
        pools = self._by_request()
        counts = [len(pool.group.layer_ids) for pool in pools]
        if len(copies) != sum(counts):
            raise SlotError(f"{len(copies)} copies for {sum(counts)} tensors; load what get_request_copy returned")
        shares = []
        for pool, count in zip(pools, counts, strict=True):
            shares.append((pool, copies[:count]))
            copies = copies[count:]
        for pool, share in shares:
            pool.verify_request_copy(share, rows)
        for pool, share in shares:
            pool.load_request_copy(share, rows)

    # Parts.

    def compressed_pool(self, layer_id: int) -> PackedPool:
        """Return the pool of a layer's compressed rows.

        Raises:
            SlotError: the layer has none here.
        """
        return self._part(PackedPool, KIND, layer_id, "compressed rows")

    def index_pool(self, layer_id: int) -> IndexPool:
        """Return the pool of a layer's index keys; raises as `compressed_pool`."""
        return self._part(IndexPool, INDEX, layer_id, "index keys")

    def state_pool(self, layer_id: int) -> CompressStatePool:
        """Return the pool of the states of a layer's compressed rows; raises as `compressed_pool`."""
        return self._part(CompressStatePool, STATE, layer_id, "states")

    def index_state_pool(self, layer_id: int) -> CompressStatePool:
        """Return the pool of the states of a layer's index keys; raises as `compressed_pool`."""
        return self._part(CompressStatePool, INDEX_STATE, layer_id, "states of index keys")

    def _space_of(self, name: str) -> str:
        """Return the space of a part."""
        pool = self.parts.pools.get(name) if isinstance(name, str) else None
        if pool is None:
            raise SlotError(f"no part is called {name!r}; there are {', '.join(self.parts.pools)}")
        return pool.query.space.name

    def _part(self, cls: type[Part], kind: str, layer_id: int, what: str) -> Part:
        ratio = self.ratio_of(layer_id)
        pool: Any = self._by_kind.get((kind, ratio)) if ratio else None
        if not isinstance(pool, cls):
            raise SlotError(f"layer {layer_id} of compress ratio {ratio} keeps no {what}")
        return pool

    def _by_request(self) -> list[CompressStatePool]:
        pools = [pool for pool in self.parts.pools.values() if isinstance(pool, CompressStatePool)]
        return [pool for pool in pools if pool.query.space.name == C128_STATE]

    def _verify_requests(self, rows: torch.Tensor) -> None:
        """Verify that request rows exist, each once, whether or not any part keeps something by row."""
        requests = self.parts.request_pool
        if requests is not None:
            whole_rows(rows, requests.req_to_token.shape[0])
            verify_requests(self.parts, rows)

    def _compressed(self, layer_id: int, loc: torch.Tensor) -> tuple[PackedPool, torch.Tensor]:
        return self.compressed_pool(layer_id), self._groups(layer_id, loc)

    def _groups(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return the compressed slots of the groups whose last tokens have the slots `loc`."""
        ratio = self.ratio_of(layer_id)
        if not ratio:
            raise SlotError(f"layer {layer_id} of compress ratio 0 compresses nothing")
        if self.parts.debug:
            self.checked_slots_for(self._compressed_names[ratio], loc, layer_id)
        return self.translate_loc_from_full_to_compressed(loc, ratio)

    def _ring(self, space: str) -> int:
        return self.query.spaces[space].page_size

    def _known_rows(self, space: str, rows: torch.Tensor) -> torch.Tensor:
        """Return request rows as int64; the padding row for those that do not exist, whose places would be others'."""
        import torch

        whole_positions(rows)
        wide = rows.to(torch.int64)
        count = self.parts.sizes[space] // self._ring(space) + 1
        return torch.where((wide >= 0) & (wide < count), wide, 0)

    def _states_of(self, ratio: int) -> str:
        """Return the space of a ratio's states, which each ratio of the model has.

        Raises:
            SlotError: the model has no layer of this ratio; names those that it has.
        """
        there = {own: name for name, own in STATE_RATIO.items() if name in self.query.spaces}
        if ratio not in there:
            listed = ", ".join(map(str, there)) or "no ratio"
            raise SlotError(f"no layer compresses by a ratio of {ratio}; this model's layers have {listed}")
        return there[ratio]

    def _space_by_request(self, ratio: int) -> str:
        """Return the space of a ratio's states, which follow request rows."""
        space = self._states_of(ratio)
        if self.query.spaces[space].issued_by != "request_pool":
            raise SlotError(
                f"states of ratio {ratio} follow sliding pages, not request rows; call translate_loc_from_full_to_state with "
                "token slots"
            )
        return space


def whole_positions(numbers: torch.Tensor) -> None:
    """Verify that request rows or positions are whole numbers.

    Raises:
        SlotError: they are of another type.
    """
    import torch

    if numbers.dtype not in (torch.int64, torch.int32):
        raise SlotError(f"request rows and positions of {numbers.dtype}; give int64 or int32")
