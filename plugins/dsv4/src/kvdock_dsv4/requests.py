"""Request rows whose online states are cleared before their first use."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from kvdock.errors import SlotError
from kvdock.planned import Parts
from kvdock.queries import RequestQuery
from kvdock.requests import DecodeReqToTokenPool, ReqToTokenPool
from kvdock.requests.states import DueStates


class OnlineReqToTokenPool(ReqToTokenPool):
    """A request table whose rows name states as well: the state of a row that is handed out begins empty.

    States have no slots of their own, so none can be kept for others: a request begins with its own. What is due
    of them is done by `KVCache.prepare_states` before a forward pass.
    """

    def __init__(self, query: RequestQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self._dues = [DueStates()]

    def alloc(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Return a row for each request, its state to be cleared; one that has a row keeps both."""
        new = self.without_row(requests)
        rows = super().alloc(requests)
        if rows is not None:
            self._begin(new)
        return rows

    def free(self, request: Hashable) -> None:
        """Give back the row of a request; nothing is due for its state any more.

        Raises:
            SlotError: the request has no row.
        """
        row = self.row_of(request)
        super().free(request)
        if row is not None:
            self._drop([row])

    def expect_states(self, requests: Sequence[Hashable]) -> None:
        """Say that the states of these requests are loaded from elsewhere, so that they are not cleared."""
        self._drop([row for row in map(self.row_of, requests) if row is not None])

    def fork_state(self, request: Hashable, cached_slot: int) -> tuple[int, int]:
        """Raise: a state belongs to one request's row, and prefixes end where no state is needed.

        Raises:
            SlotError: always.
        """
        raise SlotError(
            f"request {request!r} cannot begin with state {cached_slot}: states of requests are not shared in this "
            "model; begin with a prefix of whole pages, which needs none"
        )

    def due_states(self, pools: int | None = None) -> list[DueStates]:
        """Return the rows whose states are to be cleared, in each of `pools` pools; whoever does it empties them."""
        while len(self._dues) < (pools or 0):
            self._dues.append(self._dues[0].copy())
        return self._dues[: pools if pools is not None else None]

    def check(self, held_states: Iterable[int] | None = None) -> None:
        """Verify that free and live rows add up; no state is held beside those of live requests.

        Raises:
            SlotError: names the rows that do not, or the states that are said to be held.
        """
        if named := list(held_states or ()):
            raise SlotError(f"state slots {named} are held, but states of this model are held by request rows alone")
        super().check()

    def clear(self) -> None:
        """Give back every row."""
        super().clear()
        self._dues = [DueStates()]

    def _begin(self, requests: Sequence[Hashable]) -> None:
        for due in self._dues:
            due.fresh.update(dict.fromkeys(self._rows[request] for request in requests))

    def _drop(self, rows: Sequence[int]) -> None:
        for due in self._dues:
            due.drop(rows)


class OnlineDecodeReqToTokenPool(DecodeReqToTokenPool, OnlineReqToTokenPool):
    """Both: rows for requests that arrive; the state of one that arrives is written by the transfer."""

    def alloc(self, requests: Sequence[Hashable], arriving: bool = False) -> list[int] | None:
        """Return a row for each request, or ``None`` (and nothing changes)."""
        new = self.without_row(requests)
        rows = super().alloc(requests, arriving)
        if rows is not None and arriving:
            self.expect_states(new)
        return rows
