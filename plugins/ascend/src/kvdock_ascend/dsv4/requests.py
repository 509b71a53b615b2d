"""The request table with those that kernels of Ascend devices read beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvdock.allocators import lengths
from kvdock.errors import PluginError
from kvdock.layout import REQUESTS, SWA, Buffer
from kvdock.queries import RequestQuery
from kvdock.requests import DecodeReqToTokenPool, ReqToTokenPool
from kvdock_dsv4.geometry import C4, C4_STATE, C128, C128_STATE, RATIO_OF

from kvdock_ascend.device import DEVICE_TYPE
from kvdock_ascend.dsv4.allocator import tail_start

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvdock_ascend.dsv4.allocator import DSV4NpuAllocator

TABLES = {
    SWA: "req_to_swa",
    C4: "req_to_c4",
    C128: "req_to_c128",
    C4_STATE: "req_to_c4_state",
    C128_STATE: "req_to_c128_state",
}
"""Space → the table of its slots by request row: a column a token, or a column a group."""


class DSV4NpuReqToTokenPool(ReqToTokenPool):
    """Five tables more, int32, written with the slots of the tokens: `tables` by the name of the space.

    Sliding slots and states have a column a token, compressed rows one for each 4 and 128 tokens. Of states the tail
    alone is written (`tail_start`), 0 before it. What a row held before it was handed out stays until it is written, and so does what
    left the window since.
    """

    device_types: ClassVar[frozenset[str] | None] = frozenset({DEVICE_TYPE})
    _places: DSV4NpuAllocator | None = None

    @classmethod
    def buffers(cls, query: RequestQuery) -> tuple[Buffer, ...]:
        """Declare the request table, and the five beside it."""
        guard = 1 + cls.extra_rows(query)
        more = tuple(
            Buffer(
                name=name,
                role="table",
                space=REQUESTS,
                shape=(max(1, query.columns // RATIO_OF.get(space, 1)),),
                dtype="int32",
                guard=guard,
            )
            for space, name in TABLES.items()
        )
        return (*super().buffers(query), *more)

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        """The table of each space ``[rows + 1, columns]``, int32."""
        return {space: self.parts.tensors.rows(name) for space, name in TABLES.items()}

    def take_places_from(self, allocator: DSV4NpuAllocator) -> None:
        """Ask this allocator where the tokens lie that are written from now on."""
        self._places = allocator

    def write(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], slots: torch.Tensor) -> None:
        """Write `slots` into columns ``starts … ends`` of each row, and where they lie into the other tables.

        Raises:
            SlotError: as `ReqToTokenPool.write`; nothing is written.
        """
        super().write(rows, starts, ends, slots)
        if self._places is None:
            raise PluginError("no allocator says where tokens lie; claim DSV4NpuAllocator with this request pool")
        ranges = lengths.checked_ranges(self.req_to_token.shape, rows, starts, ends)
        import numpy as np

        counts = ranges.ends - ranges.starts
        row, position = np.repeat(ranges.rows, counts), lengths.spread(ranges.starts, counts)
        self._write_table(SWA, row, position, self._places.translate(slots))
        known = {space.name for space in self._places.query.spaces}
        for space in (C4, C128):
            if space in known:
                chosen = (position % RATIO_OF[space] == RATIO_OF[space] - 1).nonzero()[0]
                picked = slots.index_select(0, self._tensor(chosen, slots.device))
                places = self._places.translate_beside(space, picked)
                self._write_table(space, row[chosen], position[chosen] // RATIO_OF[space], places)
        for space in (C4_STATE, C128_STATE):
            if space in known:
                in_tail = position >= np.repeat(tail_start(space, ranges.ends, self._places.drafts), counts)
                places = self._places.translate_beside(space, slots) * self._tensor(in_tail, slots.device)
                self._write_table(space, row, position, places)

    def _write_table(
        self, space: str, rows: NDArray[np.int64], columns: NDArray[np.int64], places: torch.Tensor
    ) -> None:
        table = self.tables[space]
        inside = (columns < table.shape[1]).nonzero()[0]  # the last tokens may be no whole group
        if len(inside) < len(columns):
            rows, columns = rows[inside], columns[inside]
            places = places.index_select(0, self._tensor(inside, places.device))
        on = table.device
        self.parts.kernels.write_rows(table, self._tensor(rows, on), self._tensor(columns, on), places)

    @staticmethod
    def _tensor(numbers: Any, device: torch.device) -> torch.Tensor:
        return lengths.to_device(numbers.astype("int64"), device)


class DSV4NpuDecodeReqToTokenPool(DecodeReqToTokenPool, DSV4NpuReqToTokenPool):
    """The same with rows for requests that arrive."""
