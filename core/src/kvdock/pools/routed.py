"""What an engine sees when layers live in several groups: one pool that finds each layer's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from kvdock.errors import PluginError, SlotError
from kvdock.layout import Buffer
from kvdock.planned import Parts
from kvdock.pools.base import BufferInfo, LayerTransfer, Pool, Region
from kvdock.pools.grouped import KnowsLive
from kvdock.pools.state import State, StatePool
from kvdock.pools.storage import unique_storages
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch


class RoutedPool(Pool):
    """Routes by layer id and owns nothing: whatever concerns all layers reaches every part, in their order.

    Token slots address the parts that are counted in tokens; states are addressed by slots of their own, so
    what moves, copies or describes tokens leaves them alone. The parts were given the same options as this
    pool, whole. A subclass whose parts number slots differently overrides `slots_for`.
    """

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.token_parts = {name: pool for name, pool in parts.pools.items() if not _is_per_request(pool)}
        """Parts that token slots address, by group name."""
        self.state_pools = tuple(pool for pool in parts.pools.values() if isinstance(pool, StatePool))
        """Parts that keep a state per request, one for each shape of state."""
        self._part_of: dict[int, str] = {}
        for name, pool in self.routed_parts().items():
            for layer_id in pool.layer_ids:
                other = self._part_of.setdefault(layer_id, name)
                if other != name:
                    raise PluginError(
                        f"layer {layer_id} is in the groups {other!r} and {name!r}, and {type(self).__name__} "
                        "routes a layer to one; claim a pool class that knows which buffers are where"
                    )

    def routed_parts(self) -> dict[str, Pool]:
        """Return the parts that keep keys and values, by group name: an indexer stands beside those of its layer."""
        return {name: pool for name, pool in self.token_parts.items() if pool.query.kind != "sparse_index"}

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare nothing: the parts own the tensors."""
        return ()

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers that token slots address, ascending."""
        return tuple(sorted(self._part_of))

    def part_of(self, layer_id: int) -> str:
        """Return the name of the group that keeps a layer.

        Raises:
            SlotError: none does.
        """
        name = self._part_of.get(layer_id)
        if name is None:
            keeps = [pool.refuse_kv(layer_id) for pool in self.state_pools if layer_id in pool.layer_ids]
            raise keeps[0] if keeps else self.refuse_layer(layer_id)
        return name

    @property
    def states(self) -> StatePool:
        """The pool of this worker's states.

        Raises:
            SlotError: none of its layers on this rank keeps one, or they are of several shapes.
        """
        if len(self.state_pools) != 1:
            found = f"{len(self.state_pools)} shapes; take each of state_pools" if self.state_pools else "no layer here"
            raise SlotError(f"{self.query.worker} keeps states of {found}")
        return self.state_pools[0]

    def states_of_layer(self, layer_id: int) -> StatePool:
        """Return the pool that keeps the state of a layer.

        Raises:
            SlotError: the layer keeps none.
        """
        for pool in self.state_pools:
            if layer_id in pool.layer_ids:
                return pool
        held = sorted(layer for pool in self.state_pools for layer in pool.layer_ids)
        raise SlotError(f"layer {layer_id} keeps no state; the layers {held} do")

    def get_state(self, layer_id: int) -> State:
        """Return the states of a layer, by slot."""
        return self.states_of_layer(layer_id).get_state(layer_id)

    def conv_states(self, layer_id: int, place: int = 0) -> torch.Tensor:
        """Return the inputs that one of a layer's convolutions still needs, by slot."""
        return self.states_of_layer(layer_id).conv_states(layer_id, place)

    def temporal_states(self, layer_id: int) -> torch.Tensor:
        """Return the temporal state of a layer, by slot."""
        return self.states_of_layer(layer_id).temporal_states(layer_id)

    def slots_for(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return the slots of a part for the slots that the engine knows; here both are the same."""
        return loc

    def checked_slots_for(self, name: str, loc: torch.Tensor, layer_id: int | None = None) -> torch.Tensor:
        """Return `slots_for`; with debug, after verifying that the engine's own slots are handed out (or padding).

        A slot that was given back may still translate to one that is live, so the part alone cannot tell.

        Raises:
            SlotError: with debug, names the slots.
        """
        allocator = self.parts.allocator
        if self.parts.debug and isinstance(allocator, KnowsLive) and loc.device.type != "meta":
            try:
                allocator.verify_live(loc)
            except SlotError as error:
                raise SlotError(
                    f"{'' if layer_id is None else f'layer {layer_id}, '}group {name!r}: {error}"
                ) from error
        return self.slots_for(name, loc)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the keys of a layer, in the numbering of its group."""
        return self.parts.pools[self.part_of(layer_id)].get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the values of a layer, in the numbering of its group."""
        return self.parts.pools[self.part_of(layer_id)].get_value_buffer(layer_id)

    def read_kv(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dequantised copies of keys and values of the engine's slots `loc`."""
        name = self.part_of(layer_id)
        return self.parts.pools[name].read_kv(layer_id, self.slots_for(name, loc), k_scale, v_scale, dtype)

    def get_raw_kv_buffer(self, layer_id: int) -> dict[str, torch.Tensor]:
        """Return what is stored for a layer by buffer name, in the numbering of its group."""
        return self.parts.pools[self.part_of(layer_id)].get_raw_kv_buffer(layer_id)

    def set_global_scales(self, layer_id: int, k: float | torch.Tensor, v: float | torch.Tensor) -> None:
        """Set the factors of all block scales of a layer."""
        self.parts.pools[self.part_of(layer_id)].set_global_scales(layer_id, k, v)

    def load_workspace(self, layer_id: int, loc: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Dequantise the engine's slots `loc` of a layer (default: all) into the workspace, in its group's numbering."""
        name = self.part_of(layer_id)
        slots = None if loc is None else self.slots_for(name, loc)
        return self.parts.pools[name].load_workspace(layer_id, slots)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        """Write keys and values of the engine's slots `loc`."""
        name = self.part_of(layer_id)
        slots = self.checked_slots_for(name, loc, layer_id)
        self.parts.pools[name].set_kv_buffer(layer_id, slots, k, v, k_scale, v_scale)

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Write latents and rope parts of the engine's slots `loc`."""
        name = self.part_of(layer_id)
        slots = self.checked_slots_for(name, loc, layer_id)
        self.parts.pools[name].set_mla_kv_buffer(layer_id, slots, cache_k_nope, cache_k_rope)

    def get_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the latents and rope parts of the engine's slots `loc`."""
        name = self.part_of(layer_id)
        return self.parts.pools[name].get_mla_kv_buffer(layer_id, self.slots_for(name, loc), dst_dtype)

    def set_index_k(self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor) -> None:
        """Write the index keys of the engine's slots `loc`, for layers whose pool keeps them beside latents."""
        name = self.part_of(layer_id)
        self._with_index(name, layer_id).set_index_k(layer_id, self.checked_slots_for(name, loc, layer_id), index_k)

    def read_index_k(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return dequantised copies of the index keys of the engine's slots `loc`."""
        name = self.part_of(layer_id)
        found: torch.Tensor = self._with_index(name, layer_id).read_index_k(layer_id, self.slots_for(name, loc))
        return found

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the pages of index keys and scales of a layer, in the numbering of its group."""
        name = self.part_of(layer_id)
        pages: torch.Tensor = self._with_index(name, layer_id).get_index_k_with_scale_buffer(layer_id)
        return pages

    def _with_index(self, name: str, layer_id: int) -> Any:
        pool = self.parts.pools[name]
        if not hasattr(pool, "set_index_k"):
            raise SlotError(f"layer {layer_id} keeps no index keys: its pool is a {type(pool).__name__}")
        return pool

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy all that slots own, in every part."""
        for name, pool in self.token_parts.items():
            pool.move_kv_cache(self.checked_slots_for(name, tgt_loc), self.checked_slots_for(name, src_loc))

    def get_cpu_copy(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Return host copies of all that slots own, part after part."""
        return [
            copy
            for name, pool in self.token_parts.items()
            for copy in pool.get_cpu_copy(self.checked_slots_for(name, indices))
        ]

    def load_cpu_copy(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Write what `get_cpu_copy` returned.

        Raises:
            SlotError: the copies of some part do not fit it; nothing is written, in any part.
        """
        self.verify_copies(copies, indices)
        for name, (share, slots) in self._shares(copies, indices).items():
            self.token_parts[name].load_cpu_copy(share, slots)

    def verify_copies(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        """Raise what `load_cpu_copy` would raise, and change nothing."""
        for name, (share, slots) in self._shares(copies, indices).items():
            self.token_parts[name].verify_copies(share, slots)

    def cut_copies(
        self, copies: Sequence[torch.Tensor], indices: torch.Tensor, start: int, end: int
    ) -> list[torch.Tensor]:
        """Return what of the copies of the slots `indices` belongs to ``indices[start:end]``, part after part."""
        found: list[torch.Tensor] = []
        first = 0
        for name, count in self._counts(copies, indices).items():
            share, slots = copies[first : first + count], self.slots_for(name, indices)
            found += self.token_parts[name].cut_copies(share, slots, start, end)
            first += count
        return found

    def _counts(self, copies: Sequence[torch.Tensor], indices: torch.Tensor) -> dict[str, int]:
        """Return how many of the copies are each part's.

        Raises:
            SlotError: another number of copies than the parts return.
        """
        counts = {name: len(pool.get_cpu_copy(indices[:0])) for name, pool in self.token_parts.items()}
        if len(copies) != sum(counts.values()):
            raise SlotError(
                f"{len(copies)} copies for {sum(counts.values())} tensors of the parts "
                f"{', '.join(counts)}; load what get_cpu_copy of the same pool returned"
            )
        return counts

    def _shares(
        self, copies: Sequence[torch.Tensor], indices: torch.Tensor
    ) -> dict[str, tuple[Sequence[torch.Tensor], torch.Tensor]]:
        """Return the copies and the slots of each part.

        Raises:
            SlotError: another number of copies than the parts return.
        """
        shares: dict[str, tuple[Sequence[torch.Tensor], torch.Tensor]] = {}
        start = 0
        for name, count in self._counts(copies, indices).items():
            shares[name] = (copies[start : start + count], self.checked_slots_for(name, indices))
            start += count
        return shares

    def buffer_infos(self) -> list[BufferInfo]:
        """Describe the per-token tensors of every part; `space` says whose pages they are counted in."""
        return [info for pool in self.token_parts.values() for info in pool.buffer_infos()]

    def regions(self) -> list[Region]:
        """Return the regions of every part."""
        return [region for pool in self.token_parts.values() for region in pool.regions()]

    def state_infos(self) -> list[BufferInfo]:
        """Describe the states of every part."""
        return [info for pool in self.parts.pools.values() for info in pool.state_infos()]

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return pointers, lengths and bytes per slot of the states of every part."""
        found: tuple[list[int], list[int], list[int]] = ([], [], [])
        for pool in self.parts.pools.values():
            for column, own in zip(found, pool.get_state_buf_infos(), strict=True):
                column.extend(own)
        return found

    @property
    def transfer_kind(self) -> Literal["kv_pairs", "flat", "pages"]:
        """What the only part that token slots address is, or ``flat`` where there are several."""
        kinds = [pool.transfer_kind for pool in self.token_parts.values()]
        return kinds[0] if len(kinds) == 1 else "flat"

    def register_layer_transfer(self, transfer: LayerTransfer | None) -> None:
        """Let every read of a layer, in any part, wait for `transfer` first."""
        super().register_layer_transfer(transfer)
        for pool in self.parts.pools.values():
            pool.register_layer_transfer(transfer)

    def clear(self) -> None:
        """Zero every buffer of every part."""
        for pool in self.parts.pools.values():
            pool.clear()

    def storages(self) -> list[torch.Tensor]:
        """Return the tensors of every part, and what a subclass declared for itself."""
        parts = [raw for pool in self.parts.pools.values() for raw in pool.storages()]
        return parts + self.parts.tensors.storages()

    def breakdown(self) -> dict[str, int]:
        """Return the bytes of each part by group name; a shared storage counts with the first."""
        seen: dict[int, int] = {}
        found: dict[str, int] = {}
        own = {"": self.parts.tensors.storages()} if self.parts.tensors.names else {}
        for name, storages in {**{n: p.storages() for n, p in self.parts.pools.items()}, **own}.items():
            new = {key: size for key, size in unique_storages(storages).items() if key not in seen}
            seen.update(new)
            found[name or type(self).__name__] = sum(new.values())
        return found


def _is_per_request(pool: Pool) -> bool:
    """Return whether a part's slots are handed out by request, so that token slots mean nothing to it."""
    return pool.query.group is not None and pool.query.space.issued_by == "request_pool"
