"""How buffers share memory: each in tensors of its own, page by page in one byte buffer, or over each other.

Several spaces may share one byte buffer (unified memory): the pages of each lie on a grid of its own over all of it.

An arrangement changes where bytes lie, never which buffers there are. `bytes_of` is the one answer to how
many bytes buffers take; sizing, the report and the tensors follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from kvdock.layout import Buffer, Space, Unit, round_up

BLOCK_ALIGN = 16
"""Bytes that a block inside a page is aligned to: the widest access of a device."""

SHARED, WITHIN = "shared", "within"
"""`Buffer.storage` of buffers in a byte buffer that spaces share: whose pages measure it, and what lies inside it."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a page that one layer of one buffer fills: `nbytes` (aligned) from `offset` on."""

    buffer: str
    layer_id: int | None
    offset: int
    nbytes: int
    owner: str = ""


class PageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A byte buffer of `pages` pages of `page_nbytes` bytes; a page holds, layer after layer, a block of each buffer.

    Page 0 begins `offset` bytes after the buffer, where several spaces share it.
    """

    blocks: tuple[Block, ...]
    page_nbytes: int
    pages: int
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, padding included."""
        return self.pages * self.page_nbytes


def fits_pages(buffer: Buffer, space: Space) -> bool:
    """Return whether a buffer can lie page by page: one padding page, a row a unit, no rounding or address limits."""
    guard = space.page_size if buffer.unit is Unit.SLOT else 1
    return (
        buffer.space == space.name
        and buffer.guard == guard
        and buffer.widen == 1
        and buffer.round_rows_to == buffer.base_align == 1
        and buffer.memory == "device"
        and buffer.max_tensor_bytes is None
        and not buffer.overlay
    )


def block_nbytes(buffer: Buffer, page_size: int) -> int:
    """Return the bytes of a block: a page's rows of one layer, aligned."""
    rows = page_size if buffer.unit is Unit.SLOT else 1
    return round_up(rows * buffer.row_nbytes, BLOCK_ALIGN)


def lay_pages(buffers: Sequence[Buffer], space: Space, size: int) -> PageLayout:
    """Return where the blocks of `buffers` lie in the pages of a space of `size` usable slots.

    Layers come in ascending order, buffers without layers last; a layer's buffers in the order of declaration.
    """
    blocks: list[Block] = []
    offset = 0
    for layer_id, buffer in _by_layer(buffers):
        nbytes = block_nbytes(buffer, space.page_size)
        blocks.append(Block(buffer=buffer.name, layer_id=layer_id, offset=offset, nbytes=nbytes, owner=buffer.owner))
        offset += nbytes
    return PageLayout(blocks=tuple(blocks), page_nbytes=offset, pages=_pages(buffers[0], space, size))


def _pages(buffer: Buffer, space: Space, size: int) -> int:
    """Return the pages that the rows of a buffer fill, padding included."""
    guard = buffer.guard if buffer.unit is Unit.PAGE else -(-buffer.guard // space.page_size)
    return -(-size // space.page_size) + guard


def _by_layer(buffers: Sequence[Buffer]) -> Iterator[tuple[int | None, Buffer]]:
    for layer_id in sorted({layer for buffer in buffers for layer in buffer.layers}):
        yield from ((layer_id, buffer) for buffer in buffers if layer_id in buffer.layers)
    yield from ((None, buffer) for buffer in buffers if not buffer.layers)


def shared_groups(buffers: Iterable[Buffer]) -> dict[tuple[str, str, str], list[Buffer]]:
    """Return the buffers that share memory, by form (``pages`` or ``overlay``), owner and name."""
    groups: dict[tuple[str, str, str], list[Buffer]] = {}
    for buffer in buffers:
        if buffer.storage == SHARED:
            groups.setdefault(("pages", "", SHARED), []).append(buffer)
        elif buffer.storage and buffer.storage != WITHIN:
            groups.setdefault(("pages", buffer.owner, buffer.storage), []).append(buffer)
        elif buffer.overlay:
            groups.setdefault(("overlay", "", buffer.overlay), []).append(buffer)
    return groups


def bytes_of(
    buffers: Sequence[Buffer], spaces: Mapping[str, Space], sizes: Mapping[str, int], granularity_bytes: int = 1
) -> list[int]:
    """Return the bytes of each buffer, every rounding included; they add up to what is allocated.

    Of buffers that share a byte buffer the first carries its rounding; of buffers that lie over each other
    the largest (the first of several) carries all; what lies inside another space's byte buffer carries nothing.
    """
    found = [
        0 if buffer.storage or buffer.overlay else _own_nbytes(buffer, spaces, sizes, granularity_bytes)
        for buffer in buffers
    ]
    if not any(buffer.storage or buffer.overlay for buffer in buffers):
        return found
    place = {(buffer.owner, buffer.name): i for i, buffer in enumerate(buffers)}
    for (form, _, _), members in shared_groups(buffers).items():
        share = _pages_share if form == "pages" else _overlay_share
        for buffer, nbytes in zip(members, share(members, spaces, sizes, granularity_bytes), strict=True):
            found[place[buffer.owner, buffer.name]] = nbytes
    return found


def _own_nbytes(buffer: Buffer, spaces: Mapping[str, Space], sizes: Mapping[str, int], granularity: int) -> int:
    step = granularity if buffer.memory == "device" else 1
    return buffer.tensors * round_up(buffer.tensor_nbytes(buffer.units_in(spaces, sizes)), step)


def _pages_share(
    members: Sequence[Buffer], spaces: Mapping[str, Space], sizes: Mapping[str, int], granularity: int
) -> list[int]:
    space = spaces[str(members[0].space)]
    pages = _pages(members[0], space, sizes[space.name])
    shares = [pages * block_nbytes(b, space.page_size) * max(1, len(b.layers)) for b in members]
    total = sum(shares)
    shares[0] += round_up(total, granularity) - total
    return shares


def _overlay_share(
    members: Sequence[Buffer], spaces: Mapping[str, Space], sizes: Mapping[str, int], granularity: int
) -> list[int]:
    each = [_own_nbytes(buffer, spaces, sizes, granularity) for buffer in members]
    largest = max(each)
    first = each.index(largest)
    return [nbytes if i == first else 0 for i, nbytes in enumerate(each)]
