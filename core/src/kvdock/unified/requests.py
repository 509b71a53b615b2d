"""State slots of unified memory: virtual ones for requests and prefix caches, each backed by a page of the buffer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvdock.allocators.lengths import to_device
from kvdock.layout import STATE, Buffer
from kvdock.planned import Parts
from kvdock.queries import RequestQuery
from kvdock.requests.hybrid import HybridReqToTokenPool
from kvdock.requests.states import StateSlots
from kvdock.unified.allocators import memory_of
from kvdock.unified.memory import UnifiedMemory
from kvdock.unified.segment import table_buffers

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvdock.unified.segment import Segment


class BackedStates(StateSlots):
    """State slots of which each has a place in the shared buffer while somebody holds it."""

    def __init__(
        self, ring: NDArray[np.int64], size: int, debug: bool, memory: UnifiedMemory, segment: Segment
    ) -> None:
        self._memory = memory
        self._segment = segment
        super().__init__(f"space {STATE!r}", ring, size, debug)

    def alloc(self, owners: Sequence[Hashable]) -> list[int] | None:
        """Return a slot for each of `owners`, or ``None`` where the buffer or the numbering has no room."""
        mark, owned = self.backup_state()
        if len(owners) > self._free or not self._memory.secure({STATE: len(owners)}):
            return None
        try:
            slots = super().alloc(owners) or []
            self._segment.back(self._on_device(slots))
        except BaseException:
            super().restore_state(mark)
            self._segment.retract(owned, 0)
            raise
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give back slots and their places."""
        self._enter()
        self._verify(slots, "freed")
        if slots:
            self._memory.release(STATE, self._on_device(slots))
        super().free(slots)

    def available_size(self) -> int:
        """Return the slots that could be handed out now, others' holes included where pages may move."""
        return min(super().available_size(), self._memory.available(STATE))

    def backup_state(self) -> Any:
        """Return a token of the present allocations."""
        return super().backup_state(), self._segment.backup()

    def restore_state(self, state: Any) -> None:
        """Take back every slot handed out since `state`, wherever it lies by now, and what the space grew for it."""
        mark, owned = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        self._enter()
        if taken := self._journal.since(mark):
            slots = [int(self._ring[(self._head - 1 - i) % self.size]) for i in range(taken)]
            self._memory.release(STATE, self._on_device(slots), owned)
        super().restore_state(mark)

    def check(self, held: Sequence[int] | None = None) -> None:
        """Verify slots, and that exactly those that somebody holds have a place."""
        super().check(held)
        self._segment.check_live(sorted(self._owners))

    def _reset(self, size: int) -> None:
        with self._segment.emptied():
            super()._reset(size)

    def _on_device(self, slots: Sequence[int]) -> torch.Tensor:
        import numpy as np

        return to_device(np.array(slots, dtype=np.int64), self._segment.page_of.device)


class UnifiedReqToTokenPool(HybridReqToTokenPool):
    """Rows, and state slots that share their memory with keys and values; `row_to_state` holds virtual slots.

    How many states there can be follows from what the other spaces hold, so `available_size` falls when they grow.
    """

    features: ClassVar[frozenset[str]] = frozenset({"unified_memory"})
    options = HybridReqToTokenPool.options | {"lazy_compaction"}

    @classmethod
    def buffers(cls, query: RequestQuery) -> tuple[Buffer, ...]:
        """Declare, beside tables and maps, where each state lies."""
        return (*super().buffers(query), *table_buffers(STATE))

    def check(self, held_states: Any = None) -> None:
        """Verify rows, state slots, and the tables of every space."""
        super().check(held_states)
        memory_of(self.parts).check()

    def _give(self, slots: list[int]) -> None:
        """Give back state slots; what is still to be filled from one of them is filled first, for its place is others' then."""
        copies = {target: source for due in self._dues for target, source in due.copies.items()}
        if copies.keys() and not set(slots).isdisjoint(copies.values()):
            source, target = self._on_device(list(copies.values())), self._on_device(list(copies))
            memory_of(self.parts).copy(STATE, source, target)
            for due in self._dues:
                due.copies.clear()
        super()._give(slots)

    def _make_states(self, parts: Parts) -> StateSlots:
        memory = memory_of(parts)
        segment = memory.join(STATE, parts.tensors)
        ring = parts.tensors.rows("free_states").numpy()
        return BackedStates(ring, parts.sizes[STATE], parts.debug, memory, segment)
