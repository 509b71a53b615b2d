"""Keys of the indexer: one for each compressed row of ratio 4, in the core's pages of index keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvdock.errors import PlanError
from kvdock.layout import Buffer
from kvdock.planned import Parts
from kvdock.pools.index_keys import IndexCodec, index_buffer
from kvdock.queries import PoolQuery

from kvdock_dsv4.geometry import C4, RATIO_OF
from kvdock_dsv4.pools.placed import UnkeyedPool

if TYPE_CHECKING:
    import torch
    from kvdock.testing.kinds import Kind


class IndexPool(UnkeyedPool):
    """8-bit keys with a float32 scale, or 4-bit keys with a byte for each 32 columns (`index_dtype`)."""

    features: ClassVar[frozenset[str]] = frozenset({"fp8", "hisparse"})
    options: ClassVar[frozenset[str]] = frozenset({"index_dtype"})
    keeps: ClassVar[str] = "index keys"
    kernel_page_slots: ClassVar[int] = 1
    """Keys of a page of the kernels that read them; a plugin whose kernels page by more says so here."""

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.index = IndexCodec(query, parts.kernels)
        self._pages = {layer_id: parts.tensors.rows("index_k", layer_id) for layer_id in self.group.layer_ids}
        self._parts_of = {layer_id: self.index.split(pages) for layer_id, pages in self._pages.items()}

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare a page of keys and scales for each page of compressed rows.

        Raises:
            PlanError: a data type or width that the format cannot hold, or pages that the kernels cannot read.
        """
        _check_page(query.space.page_size, cls.kernel_page_slots)
        return (index_buffer(query),)

    def slot_views(self) -> list[torch.Tensor]:
        """Return views of the keys and the scales of each layer, inside their pages."""
        return [part for pair in self._parts_of.values() for part in pair]

    def set_index_k(self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor) -> None:
        """Write keys ``[n, index_head_dim]`` to the compressed slots `loc`, quantised with scales of their own.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        self.index.check_keys(layer_id, loc, index_k)
        self._store(layer_id, loc, *self.index.encode(index_k))

    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Write keys and scales that a kernel quantised: bytes of the format, kept as they are.

        Raises:
            SlotError: the layer owns no buffer here, or the bytes do not fit; nothing is written.
        """
        self._store(layer_id, loc, *self.index.checked(layer_id, loc, index_k, index_k_scale))

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the pages of a layer as bytes: ``[pages, page_size · (key bytes + scale bytes)]``."""
        return self._pages[self.owner_for_read(layer_id)]

    def read_index_k(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Return the keys at the compressed slots `loc` as float32 ``[n, index_head_dim]``."""
        gather, slots = self.parts.kernels.gather, self.row_slots(loc)
        keys, scales = self._parts_of[self.owner_for_read(layer_id)]
        return self.index.decode(gather(keys, slots), gather(scales, slots))

    def driven(self) -> Kind:
        """Return what a run writes and reads here (`kvdock run`)."""
        from kvdock_dsv4.trace import index_kind

        return index_kind(self)

    def _store(self, layer_id: int, loc: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor) -> None:
        if layer_id not in self._parts_of:
            raise self.refuse_layer(layer_id)
        self._check_loc(layer_id, loc)
        self.parts.kernels.store_kv(*self._parts_of[layer_id], self.row_slots(loc), keys, scales)


def _check_page(page_size: int, kernel_page: int) -> None:
    ratio = RATIO_OF[C4]
    if page_size % kernel_page:
        step = kernel_page * ratio
        raise PlanError(
            f"page_size={page_size * ratio} is no multiple of the {step} tokens ({kernel_page} index keys of {ratio} tokens) "
            f"by which the kernels of the indexer page; the next that works is {-(-page_size * ratio // step) * step}"
        )
