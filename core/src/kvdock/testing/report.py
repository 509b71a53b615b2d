"""How far a run is, and what it did."""

from __future__ import annotations

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is."""

    arrived: int
    finished: int
    tokens_written: int
    steps: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did.

    `checks` counts compared values, a token in a layer each. `rejected` requests were longer than
    `longest_tokens`, what the plan can hold. `unfinished` ones were taken back at `max_steps`.
    `failed_admissions` counts the times that a request found no room, `preemptions` the times that one
    was swapped out, `shared_tokens` the tokens that requests took from prefixes of others, `rollbacks` the
    times that a decode speculated in vain. `state_checks` counts compared states, one tensor of a layer each, `forks`
    the requests that began with the state of a prefix, `tracked` the states that were written to track slots,
    `committed` those that were a draft's snapshot, `received` the requests that arrived with their KV. `swapped_in` counts rows that a
    step brought from the host to a request's device buffer, a token in a layer each, `found_on_device` those that it
    found there, `device_buffers` the buffers that were given, `grown_buffers` the times that one grew.
    `bytes_moved` counts what compactions of unified memory copied, `gates` the times that pages had to stay. `problems` says what `check` found afterwards; empty: everything is in order.
    """

    arrived: int
    finished: int
    rejected: int
    unfinished: int
    longest_tokens: int
    steps: int
    tokens_written: int
    seconds: float
    peak_slots: dict[str, int]
    failed_admissions: int
    preemptions: int
    checks: int
    planned_bytes: int
    allocated_bytes: int
    problems: tuple[str, ...]
    shared_tokens: int = 0
    rollbacks: int = 0
    state_checks: int = 0
    forks: int = 0
    tracked: int = 0
    committed: int = 0
    received: int = 0
    swapped_in: int = 0
    found_on_device: int = 0
    device_buffers: int = 0
    grown_buffers: int = 0
    bytes_moved: int = 0
    gates: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens written in a second of wall time, their checks included."""
        return self.tokens_written / self.seconds if self.seconds else 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing leaked and the planned bytes are the allocated ones."""
        return not self.problems
