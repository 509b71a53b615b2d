"""The request tables of a decode worker: more rows than requests run, for those whose KV is still arriving."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvdock.demand import decode_extra_rows
from kvdock.errors import SlotError
from kvdock.planned import Parts
from kvdock.queries import RequestQuery
from kvdock.requests.hybrid import HybridReqToTokenPool
from kvdock.requests.table import ReqToTokenPool


class DecodeReqToTokenPool(ReqToTokenPool):
    """At most `size` requests run, and at most ``size + extra`` run or arrive; each has a row.

    A request whose KV is still arriving is admitted with ``alloc(…, arriving=True)`` and runs from `start` on.
    """

    options = ReqToTokenPool.options | {"decode_extra_slots"}

    def __init__(self, query: RequestQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self._arriving: dict[Hashable, None] = {}

    @classmethod
    def extra_rows(cls, query: RequestQuery) -> int:
        """Return the rows of requests whose KV is still arriving."""
        return decode_extra_rows(query)

    def alloc(self, requests: Sequence[Hashable], arriving: bool = False) -> list[int] | None:
        """Return a row for each request; one that has a row keeps it, and arrives or runs as before.

        ``None`` (and nothing changes) if there are not enough rows, or more than `size` requests would run.
        """
        self._enter()
        new = self.without_row(requests)
        if not arriving and len(new) > self.size - self.running:
            return None
        rows = super().alloc(requests)
        if rows is not None and arriving:
            self._arriving.update(dict.fromkeys(new))
        return rows

    def start(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Let requests run whose KV has arrived, and return their rows; one that runs goes on.

        ``None`` (and nothing changes) if more than `size` would run.

        Raises:
            SlotError: a request has no row; nothing changes.
        """
        self._enter()
        if unknown := self.without_row(requests):
            raise SlotError(f"requests {unknown} have no row in the request table, so they cannot start")
        started = [request for request in dict.fromkeys(requests) if request in self._arriving]
        if len(started) > self.size - self.running:
            return None
        for request in started:
            del self._arriving[request]
        return [self._rows[request] for request in requests]

    def free(self, request: Hashable) -> None:
        """Give back all that the request pool gave a request, whether it runs or arrives.

        Raises:
            SlotError: the request has no row.
        """
        super().free(request)
        self._arriving.pop(request, None)

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self._rows) - len(self._arriving)

    def arriving(self) -> tuple[Hashable, ...]:
        """Return the requests whose KV is still arriving, in the order of their admission."""
        return tuple(self._arriving)

    def available_size(self) -> int:
        """Return the requests that could be admitted to run at once."""
        return min(super().available_size(), self.size - self.running)

    def available_to_arrive(self) -> int:
        """Return the requests that could be admitted to arrive."""
        return super().available_size()

    def clear(self) -> None:
        """Give back everything."""
        super().clear()
        self._arriving.clear()


class HybridDecodeReqToTokenPool(DecodeReqToTokenPool, HybridReqToTokenPool):
    """Both: rows for requests that arrive, and state slots for those that run and those that arrive.

    The state of a request that arrives is written by the transfer, so it is not cleared.
    """

    options = DecodeReqToTokenPool.options | HybridReqToTokenPool.options

    def alloc(self, requests: Sequence[Hashable], arriving: bool = False) -> list[int] | None:
        """Return a row for each request, with its state and track slots, or ``None`` (and nothing changes)."""
        new = self.without_row(requests)
        rows = super().alloc(requests, arriving)
        if rows is not None and arriving:
            self.expect_states(new)
        return rows

    def start(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Let requests run whose KV and states have arrived, and return their rows; one that runs goes on.

        ``None`` (and nothing changes) if more than `size` would run.

        Raises:
            SlotError: a request has no row; nothing changes.
        """
        arrived = [request for request in requests if request in self._arriving]
        rows = super().start(requests)
        if rows is not None:
            self.states_arrived(arrived)
        return rows
