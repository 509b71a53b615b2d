"""Unified memory as a scheduler uses it: gates that close now and then, forward passes, compaction between steps."""

from __future__ import annotations

import contextlib
import random
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock.cache import KVCache

CLOSING, OPENING = 0.05, 0.3
"""How often a step ends with a closed gate, as if a transfer began, and how often one that is closed opens."""
COMPACTING = 0.5
"""How often pages move between two steps though nobody needs their place."""


class Moves:
    """What moves pages between the steps of a run; without unified memory, nothing."""

    def __init__(self, cache: KVCache, rng: random.Random) -> None:
        self.memory = cache.memory
        self.rng = rng
        self.gates = 0
        self._gate: object | None = None

    @property
    def may_move(self) -> bool:
        """Whether pages may move, or never do."""
        return self.memory is None or self.memory.can_move

    def forward(self) -> AbstractContextManager[None]:
        """Return what keeps pages in place while a step writes and reads."""
        return contextlib.nullcontext() if self.memory is None else self.memory.forward()

    def open(self) -> bool:
        """Open a gate that is closed; tell whether there was one."""
        if self.memory is None or self._gate is None:
            return False
        self.memory.open_gate(self._gate)
        self._gate = None
        return True

    def settle(self) -> None:
        """Let a step end: open or close a gate, and move pages though nobody needs their place."""
        if self.memory is None:
            return
        if self._gate is not None:
            if self.rng.random() < OPENING:
                self.open()
        elif self.rng.random() < CLOSING:
            self._gate = self.memory.close_gate("a transfer")
            self.gates += 1
        if self.rng.random() < COMPACTING:
            self.memory.compact(headroom_bytes=self.memory.line.high)

    def counts(self) -> dict[str, int]:
        """Return what a report says of moved pages."""
        return {} if self.memory is None else {"bytes_moved": self.memory.bytes_moved, "gates": self.gates}
