"""The keys of a sparse indexer: bytes in pages, all keys of a page first, then all their scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvdock import dtypes
from kvdock.errors import PlanError, SlotError
from kvdock.layout import Buffer, Unit
from kvdock.model import DSAParams
from kvdock.pools.grouped import group_of, require_tensors
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch

    from kvdock.kernels.interface import Kernels

DEFAULT_DTYPE = "float8_e4m3fn"
BLOCKS = {"float8_e4m3fn": 128, "float8_e4m3fnuz": 128, "float4_e2m1fn_x2": 32}
"""Formats of index keys, with the elements that share a scale."""
SCALE_NBYTES = {8: 4, 4: 1}
"""Bytes of a scale by the bits of an element: a float32, or the exponent of a power of two."""


class IndexFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the key of one token in one layer lies in bytes: `dim` elements, and a scale for each `block` of them."""

    dim: int
    dtype: str
    block: int

    @property
    def scales(self) -> int:
        """Scales of a key."""
        return self.dim // self.block

    @property
    def key_nbytes(self) -> int:
        """Bytes of the elements."""
        return dtypes.packed_nbytes(self.dim, self.dtype)

    @property
    def scale_nbytes(self) -> int:
        """Bytes of all scales of a key."""
        return self.scales * SCALE_NBYTES[dtypes.find(self.dtype).bits]

    @property
    def nbytes(self) -> int:
        """Bytes of a key and its scales: 132 for 128 columns of 8 bits, 68 for 128 of 4."""
        return self.key_nbytes + self.scale_nbytes


def index_format(query: PoolQuery) -> IndexFormat:
    """Return the format of a group's index keys: `index_dtype`, whatever keys and values are kept in.

    Raises:
        PlanError: no such format, layers without an indexer or of different widths, or a width that is no
            whole number of blocks.
    """
    chosen = query.options.index_dtype
    dtype = DEFAULT_DTYPE if chosen in (None, "auto") else dtypes.find(str(chosen), option="index_dtype").name
    dim, block = _common_dim(query), BLOCKS.get(dtype)
    if block is None:
        raise PlanError(f"index_dtype={chosen!r} cannot hold index keys in this pool; give auto, fp8 or fp4")
    if dim % block:
        raise PlanError(
            f"index_head_dim={dim} is no whole number of blocks of {block}, which share a scale with index_dtype={dtype}"
        )
    return IndexFormat(dim=dim, dtype=dtype, block=block)


def index_buffer(query: PoolQuery) -> Buffer:
    """Return the buffer of a group's index keys of all ranks' tokens, a page a row, with one tensor for each layer.

    Raises:
        PlanError: as `index_format`.
    """
    group, found = group_of(query), index_format(query)
    return Buffer(
        name="index_k",
        role="index",
        space=group.space,
        unit=Unit.PAGE,
        shape=(query.space.page_size * found.nbytes,),
        widen=query.parallel.dcp_size,
        dtype="uint8",
        element=found.dtype if dtypes.find(found.dtype).bits == 8 else "",
        layers=group.layer_ids,
        worker=query.worker,
        is_kv=True,
    )


class IndexCodec:
    """Writes and reads index keys in the pages of one group."""

    def __init__(self, query: PoolQuery, kernels: Kernels) -> None:
        self.format = index_format(query)
        self._page_size = query.space.page_size
        self._kernels = kernels

    def split(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys ``[pages, page_size, key_nbytes]`` and the scales of pages ``[pages, bytes]``, as views."""
        end = self._page_size * self.format.key_nbytes
        shape = (pages.shape[0], self._page_size, -1)
        return pages[:, :end].view(shape), pages[:, end:].view(shape)

    def check_keys(self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor) -> None:
        """Verify that `index_k` is one key of `dim` columns for each slot of `loc`.

        Raises:
            SlotError: it is not; gives both shapes.
        """
        require_tensors(layer_id, slots=loc, keys=index_k)
        self._check(layer_id, loc, "index keys", index_k, self.format.dim)

    def encode(self, index_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of keys ``[n, dim]`` and those of their scales."""
        import torch

        data, scales = self._kernels.quantize_blocks(index_k, self.format.dtype, self.format.block)
        return data, recast(scales, torch.uint8)

    def checked(
        self, layer_id: int, loc: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of keys and scales that are in the format already.

        Raises:
            SlotError: another number of them than of slots, or of another width in bytes.
        """
        import torch

        require_tensors(layer_id, slots=loc, keys=keys, scales=scales)

        data, factors = (
            recast(keys, torch.uint8),
            recast(scales.unsqueeze(-1) if scales.dim() == 1 else scales, torch.uint8),
        )
        self._check(layer_id, loc, "bytes of index keys", data, self.format.key_nbytes)
        self._check(layer_id, loc, "bytes of scales", factors, self.format.scale_nbytes)
        return data, factors

    def scales(self, stored: torch.Tensor) -> torch.Tensor:
        """Return stored scales ``[n, scale_nbytes]`` as ``[n, scales]``: float32, or exponents as they are."""
        import torch

        return stored if self.format.scale_nbytes == self.format.scales else recast(stored, torch.float32)

    def decode(self, keys: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return stored keys as float32 ``[n, dim]``."""
        return self._kernels.dequantize_blocks(keys, self.scales(scales), self.format.dtype, self.format.block)

    def _check(self, layer_id: int, loc: torch.Tensor, what: str, values: torch.Tensor, width: int) -> None:
        if loc.dim() != 1 or tuple(values.shape) != (loc.shape[0], width):
            raise SlotError(
                f"layer {layer_id}: {what} of shape {list(values.shape)} for slots of shape {list(loc.shape)}; "
                f"give slots [n] and [n, {width}]"
            )


def recast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of `values` as another type, the last dimension longer or shorter by as much.

    Unlike a plain ``view`` it takes tensors of one element or none, whatever their strides are.
    """
    if values.dtype is dtype:
        return values
    width = values.shape[-1] * values.element_size() // dtype.itemsize
    flat = values.contiguous().as_strided((values.numel(),), (1,))
    return flat.view(dtype).view(*values.shape[:-1], width)


def _common_dim(query: PoolQuery) -> int:
    """Return the columns of an index key, which all layers of the group have."""
    group = group_of(query)
    found: dict[int, int] = {}
    for layer_id, layer in group.layers:
        if not isinstance(layer.params, DSAParams):
            raise PlanError(f"layer {layer_id} of group {group.name!r} is of kind {layer.kind!r}, which has no indexer")
        found.setdefault(layer.params.index_head_dim, layer_id)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise PlanError(
            f"layers {first} and {second} of group {group.name!r} have index keys of different widths; "
            "a group holds layers of one shape"
        )
    return next(iter(found))
