"""The promises of every request pool."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from kvdock.layout import Buffer
from kvdock.planned import Parts, Planned
from kvdock.queries import RequestQuery

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class RequestPool(Planned, abc.ABC):
    """Request → row of ``req_to_token`` ``[rows + 1, columns]`` int32; row 0 is padding, never handed out.

    A request is named by any hashable id but ``None`` and keeps its row until it is freed (chunked prefill
    asks again and gets the same row).
    """

    req_to_token: torch.Tensor
    size: int
    """Usable rows."""
    generation: NDArray[np.int64]
    """How often each row was handed out, on the host."""
    lengths: NDArray[np.int64]
    """Tokens of each row, on the host: the largest column end written since the row was handed out or truncated."""

    def __init__(self, query: RequestQuery, parts: Parts) -> None:
        self.query = query
        self.parts = parts

    @classmethod
    @abc.abstractmethod
    def buffers(cls, query: RequestQuery) -> tuple[Buffer, ...]:
        """Declare the tables; no torch."""

    @abc.abstractmethod
    def alloc(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Return a row for each request, or ``None`` (and nothing changes) if there are not enough."""

    @abc.abstractmethod
    def free(self, request: Hashable) -> None:
        """Give back the row of a request.

        Raises:
            SlotError: the request has no row.
        """

    @abc.abstractmethod
    def row_of(self, request: Hashable) -> int | None:
        """Return the row of a request, or ``None``."""

    @abc.abstractmethod
    def live_rows(self) -> dict[int, Hashable]:
        """Return the request of each row that is handed out, by row."""

    @abc.abstractmethod
    def truncate(self, requests: Sequence[Hashable], lengths: Sequence[int]) -> None:
        """Forget what each request wrote from ``lengths[i]`` on, because its slots were taken back or freed.

        Host only: neither slots nor the table are touched. `KVCache.truncate` also verifies that nothing
        of what is forgotten was evicted or is another's.

        Raises:
            SlotError: a request has no row or is named twice, or a length is negative or more than it wrote;
                nothing changes.
        """

    @abc.abstractmethod
    def write(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        """Write `slots` ``[sum(ends - starts)]``, request after request, into columns ``starts … ends``.

        Raises:
            SlotError: a row was not handed out, or a column is beyond the table; with debug, a range that begins
                behind what the row holds. Nothing is written.
        """

    @abc.abstractmethod
    def available_size(self) -> int:
        """Return the rows that can still be handed out."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Give back every row."""

    @abc.abstractmethod
    def check(self) -> None:
        """Verify that free and live rows add up.

        Raises:
            SlotError: names the rows that do not.
        """
