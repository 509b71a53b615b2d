"""Latent rows, packed: those of the window, and the compressed ones that stand for several tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvdock.errors import PlanError
from kvdock.layout import Buffer, Unit
from kvdock.planned import Parts
from kvdock.pools.grouped import group_of
from kvdock.queries import PoolQuery

from kvdock_dsv4.geometry import RATIO_OF
from kvdock_dsv4.model import params_of
from kvdock_dsv4.packing import ELEMENT, PackedFormat
from kvdock_dsv4.pools.placed import PlacedPool

if TYPE_CHECKING:
    import torch
    from kvdock.testing.kinds import Kind

COMPRESSED = "compressed_latent"
"""Role of rows that stand for several tokens, so that a layer's two kinds of rows are told apart."""


class PackedPool(PlacedPool):
    """A packed row a slot, in pages of bytes; keys and values are one row for all heads.

    Rows are quantised where they are written. `get_key_buffer` dequantises all of them; kernels that read the
    format take the pages of `get_raw_kv_buffer`.
    """

    features: ClassVar[frozenset[str]] = frozenset({"fp8", "hisparse"})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.format = packed_format(query)
        size = query.space.page_size
        self._pages = {layer_id: parts.tensors.rows("kv", layer_id) for layer_id in self.group.layer_ids}
        self._parts_of = {layer_id: self.format.split(pages, size) for layer_id, pages in self._pages.items()}

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare a page of packed rows a page, padded to a whole number of rows of columns; page 0 is padding.

        Raises:
            PlanError: rows of another type than 8-bit floats, or of a width that does not divide into blocks.
        """
        group, found = group_of(query), packed_format(query)
        return (
            Buffer(
                name="kv",
                role=COMPRESSED if group.space in RATIO_OF else "latent",
                space=group.space,
                unit=Unit.PAGE,
                shape=(query.space.page_size * found.nbytes,),
                row_bytes_align=found.data_nbytes,
                dtype="uint8",
                element=ELEMENT,
                layers=group.layer_ids,
                worker=query.worker,
                is_kv=True,
            ),
        )

    def slot_views(self) -> list[torch.Tensor]:
        """Return views of the columns and the scales of each layer's rows, inside their pages."""
        return [part for pair in self._parts_of.values() for part in pair]

    def get_raw_kv_buffer(self, layer_id: int) -> dict[str, torch.Tensor]:
        """Return the pages of a layer as bytes: ``kv`` ``[pages, bytes of a page]``, without its padding."""
        return {"kv": self._pages[self.owner_for_read(layer_id)]}

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a dequantised copy of all rows of a layer: ``[pages, page_size, 1, columns]``."""
        return self._rows(*self._parts_of[self.owner_for_read(layer_id)]).unsqueeze(-2)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return what `get_key_buffer` does: values are the keys."""
        return self.get_key_buffer(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one dequantised copy as keys and as values."""
        rows = self.get_key_buffer(layer_id)
        return rows, rows

    def read_kv(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dequantised copies ``[n, 1, columns]`` of the slots `loc`, as keys and as values."""
        gather, slots = self.parts.kernels.gather, self.row_slots(loc)
        data, scales = (gather(part, slots) for part in self._parts_of[self.owner_for_read(layer_id)])
        rows = self._rows(data, scales, dtype).unsqueeze(-2)
        return rows, rows

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write rows `k` ``[n, 1, columns]`` to the slots `loc`; `v` is not read, and rows find their own scales.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        dim = self.format.nope_dim
        self.check_rows(layer_id, (1, dim + self.format.rope_dim), loc, k)
        self._store(layer_id, loc, k[..., 0, :dim], k[..., 0, dim:])

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Write columns without ``[n, 1, nope_dim]`` and with a position ``[n, 1, rope_dim]`` to the slots `loc`.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        self.check_rows(layer_id, (1, self.format.nope_dim), loc, cache_k_nope)
        self.check_rows(layer_id, (1, self.format.rope_dim), loc, cache_k_rope)
        self._store(layer_id, loc, cache_k_nope[..., 0, :], cache_k_rope[..., 0, :])

    def get_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of both parts of the rows at `loc`, in `dst_dtype` or in bfloat16."""
        import torch

        rows, _ = self.read_kv(layer_id, loc, dtype=dst_dtype or torch.bfloat16)
        return rows[..., : self.format.nope_dim], rows[..., self.format.nope_dim :]

    def driven(self) -> Kind:
        """Return what a run writes and reads here (`kvdock run`)."""
        from kvdock_dsv4.trace import rows_kind

        return rows_kind(self)

    def _store(self, layer_id: int, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
        if layer_id not in self._parts_of:
            raise self.refuse_layer(layer_id)
        data, scales = self._parts_of[layer_id]
        self.parts.kernels.store_kv(data, scales, self.row_slots(loc), *self.format.pack(nope, rope))

    def _rows(self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        import torch

        chosen: torch.dtype = dtype or getattr(torch, self.query.model_dtype)
        nope, rope = self.format.unpack(data, scales)
        return torch.cat([nope.to(chosen), rope.to(chosen)], -1)


def packed_format(query: PoolQuery) -> PackedFormat:
    """Return the format of a group's rows.

    Raises:
        PlanError: `kv_cache_dtype` is no e4m3, or a width does not divide into blocks.
    """
    if query.kv_dtype != ELEMENT:
        raise PlanError(
            f"kv_cache_dtype={query.options.kv_cache_dtype!r} cannot hold packed rows, whose columns are floats in e4m3; "
            "leave kv_cache_dtype out"
        )
    params = params_of(group_of(query).layers)
    return PackedFormat(nope_dim=params.nope_dim, rope_dim=params.rope_dim)
