"""Where buffers lie: declared `Buffer` structs become tensors, a tensor per layer.

`allocate` takes exactly the bytes that a `Buffer` declares; pools read their tensors through `Tensors`,
as rows or as views ``[pages, page_size, *shape]`` with strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvdock import dtypes
from kvdock.errors import BuildError, SlotError
from kvdock.layout import Buffer, Space, Unit, round_up

if TYPE_CHECKING:
    import torch


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A buffer in memory: its raw byte tensors and a view ``[rows, *shape]`` per layer.

    The views are in the order of ``buffer.layers``; a buffer without layers has one. `page_size` is 1 for
    buffers whose rows are pages or count nothing.
    """

    buffer: Buffer
    raw: tuple[torch.Tensor, ...]
    views: tuple[torch.Tensor, ...]
    page_size: int = 1

    def view(self, layer_id: int | None) -> torch.Tensor:
        """Return the rows of one layer.

        Raises:
            SlotError: the buffer has no tensor for this layer, or one per layer and none is named.
        """
        layers = self.buffer.layers
        if layer_id is None and len(self.views) == 1:
            return self.views[0]
        if layer_id not in layers:
            held = f"it holds the layers {list(layers)}" if layers else "it belongs to no layer"
            raise SlotError(f"buffer {self.buffer.name!r} has no tensor for layer {layer_id}; {held}")
        return self.views[layers.index(layer_id)]


class Tensors:
    """The tensors of one pool, allocator or request pool, by buffer name."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self._placed = {part.buffer.name: part for part in placed}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers, in the order in which they were declared."""
        return tuple(self._placed)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The declarations that the tensors were made from."""
        return tuple(part.buffer for part in self._placed.values())

    def rows(self, name: str, layer_id: int | None = None) -> torch.Tensor:
        """Return the view ``[rows, *shape]`` of a buffer; `layer_id` may be left out if it has one tensor.

        Raises:
            SlotError: no such buffer, or no tensor for this layer.
        """
        return self._find(name).view(layer_id)

    def paged(self, name: str, layer_id: int | None = None) -> torch.Tensor:
        """Return the same memory as ``[pages, page_size, *shape]``; for buffers that are counted in slots.

        Raises:
            SlotError: no such buffer, or no tensor for this layer.
        """
        part = self._find(name)
        view, page_size = part.view(layer_id), part.page_size
        pages = view.shape[0] // page_size
        return view[: pages * page_size].view(pages, page_size, *view.shape[1:])

    def storages(self, memory: str | None = None) -> list[torch.Tensor]:
        """Return the raw byte tensors, all or those in ``device``, ``host`` or ``pinned`` memory."""
        return [raw for part in self._placed.values() if memory in (None, part.buffer.memory) for raw in part.raw]

    def storages_of(self, name: str) -> list[torch.Tensor]:
        """Return the raw byte tensors of one buffer."""
        return list(self._find(name).raw)

    def nbytes(self, memory: str = "device") -> int:
        """Return the bytes of the tensors in one kind of memory, measured on them."""
        return sum(unique_storages(self.storages(memory)).values())

    def _find(self, name: str) -> Placed:
        part = self._placed.get(name)
        if part is None:
            raise SlotError(f"no buffer is called {name!r} here; there are {', '.join(self._placed) or 'none'}")
        return part


def allocate(
    buffers: Sequence[Buffer],
    sizes: Mapping[str, int],
    spaces: Mapping[str, Space],
    device: torch.device,
    granularity_bytes: int = 1,
) -> Tensors:
    """Return zeroed tensors for `buffers`: on `device`, or on the host for those that ask for it.

    Each device tensor takes its declared bytes rounded up to `granularity_bytes`. On the ``meta`` device
    no device memory is taken; host buffers are real everywhere.

    Raises:
        BuildError: the memory is not there, or a buffer cannot be laid out.
    """
    return Tensors(
        [_place(buffer, buffer.units_in(spaces, sizes), spaces, device, granularity_bytes) for buffer in buffers]
    )


def unique_storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage behind `tensors` once, by address (by tensor where there is none)."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr() or id(tensor)] = storage.nbytes()
    return found


def _place(
    buffer: Buffer, units: int, spaces: Mapping[str, Space], device: torch.device, granularity_bytes: int
) -> Placed:
    """Allocate one buffer and make its views."""
    width = _checked_width(buffer)
    step = granularity_bytes if buffer.memory == "device" else 1
    nbytes = round_up(buffer.tensor_nbytes(units), step)
    raw = tuple(_zeros(buffer, nbytes, device) for _ in range(buffer.tensors))
    wholes = [_typed(buffer, width, tensor, buffer.rows(units)) for tensor in raw]
    views = tuple(view for whole in wholes for view in whole.unbind(0))
    is_paged = buffer.space is not None and buffer.unit is Unit.SLOT
    page_size = spaces[str(buffer.space)].page_size if is_paged else 1
    return Placed(buffer=buffer, raw=raw, views=views, page_size=page_size)


def _checked_width(buffer: Buffer) -> tuple[int, ...]:
    """Return the shape of a row in elements of the storage dtype; 4-bit elements lie two to a byte.

    Raises:
        BuildError: heads of an odd number of 4-bit elements, or a row or base that is no whole number of elements.
    """
    dtype, stored = dtypes.find(buffer.dtype), dtypes.find(dtypes.find(buffer.dtype).storage)
    item = stored.bits // 8
    for what, value in (("a row", buffer.row_nbytes), ("the aligned base", buffer.base_align)):
        if value > 1 and value % item:
            raise BuildError(
                f"buffer {buffer.name!r}: {what} of {value} bytes holds no whole number of {stored.name} elements"
            )
    if dtype.bits == stored.bits or not buffer.shape:
        return buffer.shape
    last = buffer.shape[-1] * dtype.bits
    if last % stored.bits:
        raise BuildError(
            f"buffer {buffer.name!r}: the last extent of {buffer.shape} is no whole number of bytes in {dtype.name}"
        )
    return (*buffer.shape[:-1], last // stored.bits)


def _zeros(buffer: Buffer, nbytes: int, device: torch.device) -> torch.Tensor:
    import torch

    on_host = buffer.memory != "device"
    pinned = buffer.memory == "pinned" and device.type not in ("cpu", "meta")
    where = torch.device("cpu") if on_host else device
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, device=where, pin_memory=pinned)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BuildError(
            f"buffer {buffer.name!r} of {buffer.owner or 'this part'} asked for {nbytes:,} bytes on {where} "
            f"({buffer.tensors} such tensors) and got none: {reason}; free memory there or plan for a smaller budget"
        ) from None


def _typed(buffer: Buffer, width: tuple[int, ...], raw: torch.Tensor, rows: int) -> torch.Tensor:
    """View raw bytes as ``[layers, rows, *width]``; rows are strided where they are padded to an alignment."""
    import torch

    stored: torch.dtype = getattr(torch, dtypes.find(buffer.dtype).storage)
    layers = buffer.layers_per_tensor
    start = _base(buffer, raw)
    used = raw[start : start + layers * rows * buffer.row_nbytes]
    padded = used.view(stored).view(layers, rows, buffer.row_nbytes // stored.itemsize)
    return padded[..., : math.prod(width)].view(layers, rows, *width)


def _base(buffer: Buffer, raw: torch.Tensor) -> int:
    """Return the offset of the first aligned byte; the declared bytes leave room for it."""
    if buffer.base_align == 1 or raw.device.type == "meta":
        return 0
    return -raw.data_ptr() % buffer.base_align
