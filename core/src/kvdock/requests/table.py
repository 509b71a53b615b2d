"""The request table: one row of token slots a request, its bookkeeping on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from kvdock.allocators.debug import ThreadGuard
from kvdock.allocators.lengths import Ranges, checked_ranges, require_row, to_host
from kvdock.errors import BuildError, SlotError
from kvdock.layout import REQUESTS, Buffer
from kvdock.planned import Parts
from kvdock.queries import RequestQuery
from kvdock.requests.base import RequestPool
from kvdock.requests.holdings import distinct, nameless, one_each

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


MOST_SLOTS = 2**31 - 1
"""The largest slot that a table of int32 can name."""

_LONG_RANGE = 64
"""Columns a range from which the host copies range by range: that needs no index as long as the slots."""


class ReqToTokenPool(RequestPool):
    """Rows ``1 … size`` of ``req_to_token``, handed out in turn, so a freed row rests as long as possible.

    A subclass may have rows beside those of the running requests (`extra_rows`).

    `lengths[row]` is the number of columns written so far (the largest end), so that a release knows what to
    free; `truncate` lowers it, and a row starts at 0 again when it is handed out. `generation[row]` counts its owners and survives
    `clear`. Both are read-only for callers. The columns of a new row hold what its last owner left.
    """

    features = frozenset({"speculation", "disaggregation"})
    """Rows have columns for the tokens that drafts write past the context; a prefill worker needs nothing more."""
    options = frozenset({"speculative_num_steps", "speculative_topk", "speculative_num_draft_tokens"})
    generation: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __init__(self, query: RequestQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self.req_to_token = parts.tensors.rows("req_to_token")
        self.size = parts.sizes[REQUESTS]
        self.row_count = self.size + self.extra_rows(query)
        if self.size < 1 or self.req_to_token.shape[0] != self.row_count + 1:
            raise BuildError(
                f"the request table has {self.req_to_token.shape[0]} rows for {self.row_count} requests and one "
                "padding row; build with the plan's own sizes"
            )
        self._free_rows = parts.tensors.rows("free_rows").numpy()
        self.generation = parts.tensors.rows("generation").numpy()
        self.lengths = parts.tensors.rows("lengths").numpy()
        self._guard = ThreadGuard("the request pool") if parts.debug else None
        self._rows: dict[Hashable, int] = {}
        self._owners: dict[int, Hashable] = {}
        self._head = 0
        self._free = self.row_count
        self.generation[:] = 0
        self._reset()

    @classmethod
    def extra_rows(cls, query: RequestQuery) -> int:
        """Return the rows beside those of the running requests: none."""
        return 0

    @classmethod
    def buffers(cls, query: RequestQuery) -> tuple[Buffer, ...]:
        """Declare the table on the device; free rows, generations and lengths on the host."""
        extra, columns = cls.extra_rows(query), (query.columns,)
        return (
            Buffer(name="req_to_token", role="table", space=REQUESTS, shape=columns, dtype="int32", guard=1 + extra),
            _host_buffer("free_rows", "free_ring", guard=extra),
            _host_buffer("generation", "generation", guard=1 + extra),
            _host_buffer("lengths", "lengths", guard=1 + extra),
        )

    def alloc(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Return a row for each request; one that has a row keeps it. ``None`` if there are not enough.

        Raises:
            SlotError: a text instead of a list of names, a name that cannot be hashed, or ``None``.
        """
        self._enter()
        new = self.without_row(requests)
        if len(new) > self._free:
            return None
        for request in new:
            row = int(self._free_rows[self._head])
            self._head = (self._head + 1) % self.row_count
            self._free -= 1
            self._rows[request] = row
            self._owners[row] = request
            self.generation[row] += 1
            self.lengths[row] = 0
        return [self._rows[request] for request in requests]

    def free(self, request: Hashable) -> None:
        """Give back the row of a request; its slots are the allocator's affair.

        Raises:
            SlotError: the request has no row.
        """
        row = self.row_of(request)
        if row is None:
            raise SlotError(f"request {request!r} has no row in the request table; was it freed before?")
        del self._rows[request], self._owners[row]
        self._free_rows[(self._head + self._free) % self.row_count] = row
        self._free += 1

    def _take_back_rows(self, requests: Sequence[Hashable]) -> None:
        """Undo the last `alloc`, which gave `requests` their rows: these come next again."""
        for request in requests:
            row = self._rows.pop(request)
            del self._owners[row]
            self.generation[row] -= 1
        self._head = (self._head - len(requests)) % self.row_count
        self._free += len(requests)

    def row_of(self, request: Hashable) -> int | None:
        """Return the row of a request, or ``None``.

        Raises:
            SlotError: the name is ``None`` or cannot be hashed.
        """
        self._enter()
        if request is None:
            raise nameless()
        try:
            return self._rows.get(request)
        except TypeError as error:
            raise SlotError(f"request {request!r} is no name: {error}; nothing was changed") from error

    def without_row(self, requests: Sequence[Hashable]) -> list[Hashable]:
        """Return those of `requests` that have no row, each once.

        Raises:
            SlotError: a text instead of a list of names, a name that cannot be hashed, or ``None``.
        """
        return [request for request in distinct(requests) if request not in self._rows]

    def live_rows(self) -> dict[int, Hashable]:
        """Return the request of each row that is handed out, by row."""
        return dict(self._owners)

    def truncate(self, requests: Sequence[Hashable], lengths: Sequence[int]) -> None:
        """Forget what each request wrote from ``lengths[i]`` on; neither slots nor the table are touched.

        Raises:
            SlotError: a request has no row or is named twice, or a length is negative or more than it wrote;
                nothing changes.
        """
        self._enter()
        rows = []
        for request, length in zip(requests, one_each(requests, lengths, "lengths").tolist(), strict=True):
            row = self._rows.get(request)
            if row is None or not 0 <= length <= self.lengths[row]:
                wrote = "has no row" if row is None else f"wrote {self.lengths[row]} tokens"
                raise SlotError(f"request {request!r} {wrote}, so it cannot go back to {length}; nothing was changed")
            rows.append((row, length))
        for row, length in rows:
            self.lengths[row] = length

    def request_of(self, row: int) -> Hashable | None:
        """Return the request that holds `row`, or ``None``."""
        return self._owners.get(row)

    def write(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], slots: torch.Tensor) -> None:
        """Write `slots`, request after request, into columns ``starts … ends``; one scatter, never waits.

        Raises:
            SlotError: a row that nobody holds, columns beyond the table, another number of slots, or no tensor of
                whole numbers in one dimension; with debug, a range behind columns that nobody wrote, or a number
                that is no slot. Nothing is written.
        """
        self._enter()
        require_row("slots", slots)
        ranges = checked_ranges(self.req_to_token.shape, rows, starts, ends)
        for row in ranges.rows.tolist():
            if row not in self._owners:
                raise SlotError(f"row {row} of the request table belongs to no request; alloc it first")
        counts = ranges.ends - ranges.starts
        if int(counts.sum()) != slots.shape[0]:
            raise SlotError(f"{slots.shape[0]} slots for {int(counts.sum())} columns; nothing was written")
        if self.parts.debug:
            self._refuse_gaps(ranges)
            self._refuse_numbers(slots)
        self._scatter(ranges, counts, slots)
        self._lengthen(ranges)

    def available_size(self) -> int:
        """Return the rows that can still be handed out."""
        self._enter()
        return self._free

    def clear(self) -> None:
        """Give back every row; generations go on counting."""
        self._enter()
        self._reset()

    def check(self) -> None:
        """Verify that free and live rows add up.

        Raises:
            SlotError: names the rows that are lost, free twice, or both free and held.
        """
        self._enter()
        free = [int(self._free_rows[(self._head + i) % self.row_count]) for i in range(self._free)]
        held = sorted(self._owners)
        twice = sorted(row for row, times in Counter(free + held).items() if times > 1)
        if twice:
            raise SlotError(f"rows {twice} of the request table are free twice, or free and held")
        lost = sorted(set(range(1, self.row_count + 1)) - set(free) - set(held))
        if lost or held != sorted(self._rows.values()):
            raise SlotError(f"rows {lost or held} of the request table are lost: neither free nor held by a request")

    def _refuse_gaps(self, ranges: Ranges) -> None:
        import numpy as np

        wrote: dict[int, int] = {}
        for i in np.lexsort((ranges.starts, ranges.rows)).tolist():
            row, start, end = int(ranges.rows[i]), int(ranges.starts[i]), int(ranges.ends[i])
            length = wrote.get(row, int(self.lengths[row]))
            if start > length:
                raise SlotError(
                    f"request {self._owners[row]!r} wrote {length} tokens, so slots from column {start} on leave "
                    f"columns {length} … {start} without any; write those too, or 0 for tokens that left the window of "
                    "every layer, which hold_prefix(request, evicted=…) names. Nothing was written"
                )
            wrote[row] = max(length, end)

    def _refuse_numbers(self, slots: torch.Tensor) -> None:
        if slots.is_meta:
            return
        numbers = to_host(slots)
        if len(wrong := numbers[(numbers < 0) | (numbers > MOST_SLOTS)]):
            raise SlotError(
                f"slots {wrong[:8].tolist()} ({len(wrong)} in all) are none: the table holds 0 … {MOST_SLOTS}. Nothing "
                "was written"
            )

    def _scatter(self, ranges: Ranges, counts: NDArray[np.int64], slots: torch.Tensor) -> None:
        if len(counts) == 1:
            row, start, end = int(ranges.rows[0]), int(ranges.starts[0]), int(ranges.ends[0])
            self.req_to_token[row, start:end].copy_(slots)
            return
        if slots.shape[0] >= _LONG_RANGE * len(counts) and slots.is_cpu and self.req_to_token.is_cpu:
            self._copy_ranges(ranges, slots.numpy())
            return
        self.parts.kernels.write_spans(self.req_to_token, ranges.rows, ranges.starts, ranges.ends, slots)

    def _copy_ranges(self, ranges: Ranges, slots: NDArray[np.int64]) -> None:
        table, start = self.req_to_token.numpy(), 0
        for row, first, last in zip(ranges.rows.tolist(), ranges.starts.tolist(), ranges.ends.tolist(), strict=True):
            end = start + last - first
            table[row, first:last] = slots[start:end]
            start = end

    def _lengthen(self, ranges: Ranges) -> None:
        import numpy as np

        np.maximum.at(self.lengths, ranges.rows, ranges.ends)

    def _reset(self) -> None:
        self._free_rows[:] = range(1, self.row_count + 1)
        self._head = 0
        self._free = self.row_count
        self._rows.clear()
        self._owners.clear()
        self.lengths[:] = 0

    def _enter(self) -> None:
        if self._guard is not None:
            self._guard.enter()


def _host_buffer(name: str, role: str, guard: int) -> Buffer:
    return Buffer(name=name, role=role, space=REQUESTS, shape=(), dtype="int64", guard=guard, memory="host")
