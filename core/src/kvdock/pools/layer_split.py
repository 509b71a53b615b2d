"""Sparse latent attention whose layers are split over the ranks that share a context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from kvdock.errors import BuildError, SlotError
from kvdock.layout import Buffer
from kvdock.planned import Parts
from kvdock.pools.dsa import DSAPool
from kvdock.pools.grouped import group_of
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch

SCRATCH = "scratch"
"""Role of the tensors into which other ranks' layers are read."""


class LayerSplitDSAPool(DSAPool):
    """Each of `cp_size` ranks stores a contiguous share of the layers and reads the others' from their owners.

    **Reads are collective.** What reads a layer (`get_key_buffer`, `get_value_buffer`, `get_kv_buffer`,
    `get_mla_kv_buffer`, `get_index_k_with_scale_buffer`, `read_index_k`, `get_index_k_scale`) broadcasts it from its
    owner over the process group that `build` was given, so all ranks call the same reads of the same layers in
    the same order. What is read is what the owner had written by then. Rows of another rank's layer arrive in one
    scratch layer and its index keys in a second one: they are valid until the next read of that kind.

    **Writes are local.** All ranks hold the new KV of a chunk and call the same writes; the owner stores and the
    others check the shapes and drop the values. Moves, copies and transfers concern a rank's own layers;
    a transfer collects the layers of all ranks.
    """

    features: ClassVar[frozenset[str]] = frozenset({"fp8", "context_parallel", "layer_split"})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self._rank, ranks = query.parallel.cp_rank, query.parallel.cp_size
        shares = [own_share(self.group.layer_ids, ranks, rank) for rank in range(ranks)]
        self._rank_of = {layer_id: rank for rank, share in enumerate(shares) for layer_id in share}
        self._row_scratch = parts.tensors.paged("kv_scratch")
        self._page_scratch = parts.tensors.rows("index_k_scratch")
        if parts.group is not None:
            _check_group(parts.group, self._rank, ranks)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the rows and index keys of this rank's layers, and a scratch layer of both.

        Raises:
            PlanError: as `DSAPool.buffers`.
        """
        whole = super().buffers(query)
        own = own_share(group_of(query).layer_ids, query.parallel.cp_size, query.parallel.cp_rank)
        replace = msgspec.structs.replace
        stored = tuple(replace(buffer, layers=own) for buffer in whole if own)
        scratch = [replace(b, name=f"{b.name}_scratch", role=SCRATCH, layers=(), is_kv=False) for b in whole]
        return (*stored, *scratch)

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """Global ids of the layers that this rank stores."""
        return own_share(self.group.layer_ids, self.query.parallel.cp_size, self.query.parallel.cp_rank)

    def owner_rank(self, layer_id: int) -> int:
        """Return the rank that stores what a layer reads.

        Raises:
            SlotError: no rank does.
        """
        owner = self._owner_of.get(layer_id)
        if owner is None:
            raise self.refuse_layer(layer_id)
        return self._rank_of[owner]

    def stored(self, name: str) -> dict[int, torch.Tensor]:
        """Return the paged view of a buffer by the id of each layer that this rank stores."""
        return {layer_id: self.parts.tensors.paged(name, layer_id) for layer_id in self.stored_layers}

    def _owned(self, layer_id: int) -> torch.Tensor:
        """Return the rows of a layer that may be written; the scratch, for its shape, where another rank stores it."""
        if layer_id in self._rank_of and layer_id not in self._kv:
            return self._row_scratch
        return super()._owned(layer_id)

    def _rows_for_reading(self, layer_id: int) -> torch.Tensor:
        owner = self.owner_for_read(layer_id)
        return self._shared(owner, self._kv.get(owner, self._row_scratch))

    def _pages_for_reading(self, layer_id: int) -> torch.Tensor:
        owner = self.owner_for_read(layer_id)
        return self._shared(owner, self._pages.get(owner, self._page_scratch))

    def _shared(self, layer_id: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` after a broadcast from the rank that stores the layer: into it there, out of it here.

        Raises:
            SlotError: another rank stores the layer, and no process group reaches it.
        """
        group, rank = self.parts.group, self._rank_of[layer_id]
        if group is None:
            if rank == self._rank:
                return tensor
            raise SlotError(
                f"layer {layer_id} is stored by rank {rank} of the layer split and this is rank {self._rank}; "
                "give build() the process group of the ranks that share the context"
            )
        import torch
        from torch import distributed

        source = distributed.get_global_rank(group, rank)
        distributed.broadcast(tensor.view(torch.uint8), src=source, group=group)
        return tensor

    def _counted(self) -> list[Buffer]:
        """Return the buffers whose rows belong to slots; what lies in the scratch is other ranks' own."""
        return [buffer for buffer in super()._counted() if buffer.role != SCRATCH]


def own_share(layer_ids: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
    """Return the contiguous layers that a rank stores; the first ``len(layer_ids) % ranks`` ranks store one more."""
    short, longer = divmod(len(layer_ids), ranks)
    start = rank * short + min(rank, longer)
    return layer_ids[start : start + short + (rank < longer)]


def _check_group(group: Any, rank: int, ranks: int) -> None:
    """Verify that the process group is that of the ranks of the plan.

    Raises:
        BuildError: it has another size, or this process another rank in it.
    """
    from torch import distributed

    found = (distributed.get_rank(group), distributed.get_world_size(group))
    if found != (rank, ranks):
        raise BuildError(
            f"layer_split: the plan is for rank {rank} of {ranks} that share a context, but this process is rank "
            f"{found[0]} of {found[1]} in the group; give build() the group of these ranks, in the order of cp_rank"
        )
