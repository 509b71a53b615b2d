"""Where buffers lie: declared `Buffer` structs become tensors, whatever their arrangement.

`allocate` takes exactly the bytes that `storages.bytes_of` counts; pools read their tensors through `Tensors`,
as rows or as views ``[pages, page_size, *shape]`` with strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvdock import dtypes
from kvdock.errors import BuildError, SlotError
from kvdock.layout import Buffer, Space, Unit, round_up
from kvdock.storages import BLOCK_ALIGN, SHARED, WITHIN, PageLayout, bytes_of, lay_pages

if TYPE_CHECKING:
    import torch

Within = Callable[[Buffer, "torch.device"], AbstractContextManager[object]]
"""Gives the context in which the device tensors of a buffer are taken: a memory pool, memory that can be released."""


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A buffer in memory: its raw byte tensors and views per layer, as rows and as pages.

    Views are in the order of ``buffer.layers``; a buffer without layers has one. `rows` are ``[rows, *shape]``
    (none where pages of several rows lie apart), `pages` ``[pages, page_size, *shape]`` for buffers that are
    counted in slots, and their rows otherwise.
    """

    buffer: Buffer
    raw: tuple[torch.Tensor, ...]
    rows: tuple[torch.Tensor, ...]
    pages: tuple[torch.Tensor, ...]

    def view(self, views: tuple[torch.Tensor, ...], layer_id: int | None) -> torch.Tensor:
        """Return the one of `views` that belongs to a layer.

        Raises:
            SlotError: the buffer has no tensor for this layer, or one per layer and none is named.
        """
        layers = self.buffer.layers
        if layer_id is None and len(views) == 1:
            return views[0]
        if layer_id not in layers:
            held = f"it holds the layers {list(layers)}" if layers else "it belongs to no layer"
            raise SlotError(f"buffer {self.buffer.name!r} has no tensor for layer {layer_id}; {held}")
        return views[layers.index(layer_id)]


class SharedBuffer(NamedTuple):
    """One byte buffer for the pages of several spaces, and where each space's lie in it."""

    raw: torch.Tensor
    layouts: Mapping[str, PageLayout]


class Tensors:
    """The tensors of one pool, allocator or request pool, by buffer name."""

    def __init__(
        self, placed: Sequence[Placed], page_layout: PageLayout | None = None, within: Within | None = None
    ) -> None:
        self._placed = {part.buffer.name: part for part in placed}
        self._within = within  # a memory pool has to live as long as its tensors
        self.page_layout = page_layout
        """Where blocks lie in the byte buffer of the buffers that share one; ``None``: none do."""

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
            SlotError: no such buffer, no tensor for this layer, or its pages of several rows lie apart.
        """
        part = self._find(name)
        if not part.rows:
            raise SlotError(f"buffer {name!r} lies page by page, so its rows are no one view; read it with paged()")
        return part.view(part.rows, layer_id)

    def paged(self, name: str, layer_id: int | None = None) -> torch.Tensor:
        """Return the same memory as ``[pages, page_size, *shape]``; for buffers that are counted in slots.

        Raises:
            SlotError: no such buffer, or no tensor for this layer.
        """
        part = self._find(name)
        return part.view(part.pages, layer_id)

    def storages(self, memory: str | None = None) -> list[torch.Tensor]:
        """Return the raw byte tensors, each once: all, or those in ``device``, ``host`` or ``pinned`` memory."""
        found = [raw for part in self._placed.values() if memory in (None, part.buffer.memory) for raw in part.raw]
        return list({id(raw): raw for raw in found}.values())

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
    overlays: Mapping[str, torch.Tensor] | None = None,
    within: Within | None = None,
    *,
    shared_buffer: SharedBuffer | None = None,
) -> Tensors:
    """Return zeroed tensors for `buffers`: on `device`, or on the host for those that ask for it.

    Each device tensor takes its declared bytes rounded up to `granularity_bytes`. On the ``meta`` device
    no device memory is taken; host buffers are real everywhere. Buffers of one owner that share a byte
    buffer get views of it; `overlays` holds the memory of those that lie over others', and `shared_buffer` that of
    several spaces. `within` says where device memory is taken from; what it refers to lives as long as the tensors.

    Raises:
        BuildError: the memory is not there, or a buffer cannot be laid out.
    """
    paged = [buffer for buffer in buffers if buffer.storage]
    layout: PageLayout | None = None
    shared: dict[str, Placed] = {}
    if paged and paged[0].storage in (SHARED, WITHIN):
        layout, shared = _place_in_shared(paged, spaces, shared_buffer)
    elif paged:
        layout, shared = _page_storage(paged, sizes, spaces, device, granularity_bytes, within)
    placed = []
    for buffer in buffers:
        if buffer.name in shared:
            placed.append(shared[buffer.name])
            continue
        units = buffer.units_in(spaces, sizes)
        raw = (overlays or {}).get(buffer.overlay)
        step = granularity_bytes if buffer.memory == "device" else 1
        placed.append(_place(buffer, units, spaces, device, step, raw, within))
    return Tensors(placed, layout, within)


def allocate_overlays(
    buffers: Sequence[Buffer],
    sizes: Mapping[str, int],
    spaces: Mapping[str, Space],
    device: torch.device,
    granularity_bytes: int = 1,
    within: Within | None = None,
) -> dict[str, torch.Tensor]:
    """Return the memory under buffers that lie over each other, by name; as large as the largest."""
    over = [buffer for buffer in buffers if buffer.overlay]
    found: dict[str, torch.Tensor] = {}
    for buffer, nbytes in zip(over, bytes_of(over, spaces, sizes, granularity_bytes), strict=True):
        if nbytes:
            found[buffer.overlay] = zeros(buffer, nbytes, device, within)
    return found


def unique_storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage behind `tensors` once, by address (by tensor where there is none)."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr() or id(tensor)] = storage.nbytes()
    return found


def measured(tensors: Iterable[Tensors], memory: Sequence[str]) -> int:
    """Return the bytes of all that lies in these kinds of memory, each storage once."""
    raw = [tensor for part in tensors for kind in memory for tensor in part.storages(kind)]
    return sum(unique_storages(raw).values())


def _place(
    buffer: Buffer,
    units: int,
    spaces: Mapping[str, Space],
    device: torch.device,
    step: int,
    raw: torch.Tensor | None = None,
    within: Within | None = None,
) -> Placed:
    """Make the views of one buffer, in memory of its own unless `raw` is given."""
    width = _checked_width(buffer)
    nbytes = round_up(buffer.tensor_nbytes(units), step)
    own = (raw,) if raw is not None else tuple(zeros(buffer, nbytes, device, within) for _ in range(buffer.tensors))
    wholes = [_typed(buffer, width, tensor, buffer.rows(units)) for tensor in own]
    rows = tuple(view for whole in wholes for view in whole.unbind(0))
    page_size = _page_size(buffer, spaces)
    pages = tuple(_in_pages(view, page_size) for view in rows) if page_size else rows
    return Placed(buffer=buffer, raw=own, rows=rows, pages=pages)


def _page_size(buffer: Buffer, spaces: Mapping[str, Space]) -> int:
    """Return the slots of a page for buffers that are counted in slots; 1 for those without a space, 0 for pages."""
    if buffer.unit is not Unit.SLOT:
        return 0
    return 1 if buffer.space is None else spaces[buffer.space].page_size


def _in_pages(view: torch.Tensor, page_size: int) -> torch.Tensor:
    pages = view.shape[0] // page_size
    return view[: pages * page_size].view(pages, page_size, *view.shape[1:])


def _page_storage(
    buffers: Sequence[Buffer],
    sizes: Mapping[str, int],
    spaces: Mapping[str, Space],
    device: torch.device,
    granularity_bytes: int,
    within: Within | None,
) -> tuple[PageLayout, dict[str, Placed]]:
    """Allocate one byte buffer and return where its blocks lie, and each buffer's views of it."""
    space = spaces[str(buffers[0].space)]
    layout = lay_pages(buffers, space, sizes[space.name])
    raw = zeros(buffers[0], round_up(layout.nbytes, granularity_bytes), device, within)
    return layout, {buffer.name: _place_in_pages(buffer, layout, raw, space) for buffer in buffers}


def _place_in_shared(
    buffers: Sequence[Buffer], spaces: Mapping[str, Space], shared: SharedBuffer | None
) -> tuple[PageLayout, dict[str, Placed]]:
    """Return where the blocks of an owner lie in the pages of its space, and views of the buffer that it shares."""
    space = spaces[str(buffers[0].space)]
    if shared is None or space.name not in shared.layouts:
        raise BuildError(f"space {space.name!r} lies in a shared byte buffer, and there is none; build from the plan")
    whole = shared.layouts[space.name]
    own = tuple(block for block in whole.blocks if block.owner == buffers[0].owner)
    layout = msgspec.structs.replace(whole, blocks=own)
    return layout, {buffer.name: _place_in_pages(buffer, layout, shared.raw, space) for buffer in buffers}


def _place_in_pages(buffer: Buffer, layout: PageLayout, raw: torch.Tensor, space: Space) -> Placed:
    import torch

    stored: torch.dtype = getattr(torch, dtypes.find(buffer.dtype).storage)
    item = stored.itemsize
    words = raw[: (layout.offset + layout.nbytes) // BLOCK_ALIGN * BLOCK_ALIGN].view(stored)
    width, is_slot = _checked_width(buffer), buffer.unit is Unit.SLOT
    shape = (layout.pages, space.page_size, *width) if is_slot else (layout.pages, *width)
    inner = (buffer.row_nbytes // item,) if is_slot else ()
    strides = (layout.page_nbytes // item, *inner, *_strides(width))
    blocks = {block.layer_id: block.offset for block in layout.blocks if block.buffer == buffer.name}
    offsets = [(layout.offset + blocks[layer_id]) // item for layer_id in buffer.layers or (None,)]
    views = tuple(words.as_strided(shape, strides, offset) for offset in offsets)
    if not is_slot:
        return Placed(buffer=buffer, raw=(raw,), rows=views, pages=views)
    rows = tuple(view[:, 0] for view in views) if space.page_size == 1 else ()
    return Placed(buffer=buffer, raw=(raw,), rows=rows, pages=views)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


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


def zeros(buffer: Buffer, nbytes: int, device: torch.device, within: Within | None = None) -> torch.Tensor:
    """Return zeroed bytes for a buffer, where its kind of memory is; on the device in the context that `within` gives.

    Raises:
        BuildError: the memory is not there.
    """
    import torch

    on_host = buffer.memory != "device"
    pinned = buffer.memory == "pinned" and device.type not in ("cpu", "meta")
    where = torch.device("cpu") if on_host else device
    inside: AbstractContextManager[object] = nullcontext() if on_host or within is None else within(buffer, where)
    try:
        with inside:
            found = torch.zeros(nbytes, dtype=torch.uint8, device=where, pin_memory=pinned)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BuildError(
            f"buffer {buffer.name!r} of {buffer.owner or 'this part'} asked for {nbytes:,} bytes on {where} "
            f"({buffer.tensors} such tensors) and got none: {reason}; free memory there or plan for a smaller budget"
        ) from None
    return found


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
