"""Pages in ascending order and long runs, for caches whose pages are sent to another machine.

A transfer sends one message a run, so what matters is how few runs a request gets. Free pages are kept on
the host as runs (`FreeRuns`), whatever the device; page numbers go up without waiting, and come back
through pinned memory: they are counted at once and merged when they have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvdock.allocators import lengths
from kvdock.allocators.base import Together
from kvdock.allocators.freelist import CollectsPages, FreeList
from kvdock.allocators.paged import PagedAllocator, only_space
from kvdock.allocators.ring import Journal
from kvdock.allocators.runs import FANOUT, LEVEL_GUARD_BYTES, FreeRuns, level_words
from kvdock.errors import BuildError, SlotError
from kvdock.layout import Buffer, Unit
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvdock.allocators.base import Undo

    Numbers = NDArray[np.int32]


class Event(Protocol):
    """A point in the work of a device."""

    def record(self) -> None:
        """Set it to what the device was given to do so far."""

    def query(self) -> bool:
        """Return whether the device has come so far."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Inbox:
    """Page numbers on their way from a device to the host, first in, first out.

    `memory` (pinned, int32) has room for every page once, which is as many as can be on their way.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._numbers: Numbers = memory.numpy()
        self._waiting: deque[tuple[int, int, Event | None]] = deque()
        self._end = 0

    def send(self, pages: torch.Tensor) -> None:
        """Start copying `pages`, at most as many as there is room for; never waits for the device."""
        import torch

        count, start, room = pages.shape[0], self._end, self._memory.shape[0]
        numbers = pages.to(torch.int32)
        first = min(count, room - start)
        self._memory[start : start + first].copy_(numbers[:first], non_blocking=True)
        if first < count:
            self._memory[: count - first].copy_(numbers[first:], non_blocking=True)
        self._end = (start + count) % room
        self._waiting.append((start, count, self.mark(pages.device)))

    def mark(self, device: torch.device) -> Event | None:
        """Return an event after the copies that were started; ``None`` where copies are done when they return."""
        import torch

        if device.type == "cpu":
            return None
        event: Event = getattr(torch, device.type).Event()
        event.record()
        return event

    def receive(self, wait: bool) -> Numbers | None:
        """Return the pages of the oldest copy, or ``None``: nothing is on its way, or (without `wait`) not here yet."""
        import numpy as np

        if not self._waiting:
            return None
        start, count, event = self._waiting[0]
        if event is not None and not event.query():
            if not wait:
                return None
            event.synchronize()
        self._waiting.popleft()
        past = start + count - len(self._numbers)
        if past <= 0:
            return self._numbers[start : start + count]
        return np.concatenate((self._numbers[start:], self._numbers[:past]))

    def clear(self) -> None:
        """Forget what is on its way; copies that are still running end before those that are started later."""
        self._waiting.clear()
        self._end = 0


class PageRuns(CollectsPages):
    """Free pages ``1 … capacity`` in ascending order, with the interface of `PageRing`.

    `taken` has an entry a page: what was handed out since the last free, so that it can be taken back.
    `free` counts what is on its way in `inbox`; a `take` that needs it waits for it.
    """

    def __init__(
        self, name: str, runs: FreeRuns, taken: Numbers, inbox: Inbox | None, device: torch.device, capacity: int
    ) -> None:
        super().__init__()
        self.journal = Journal(name)
        self._back: list[Numbers | torch.Tensor] = []
        self.runs = runs
        self._taken = taken
        self._inbox = inbox
        self._device = device
        self.reset(capacity)

    @property
    def live(self) -> int:
        """Pages that are handed out."""
        return self.capacity - self.free

    @property
    def max_capacity(self) -> int:
        """Pages that the buffers have room for."""
        return len(self._taken)

    def reset(self, capacity: int) -> None:
        """Hold the pages ``1 … capacity`` again, all free.

        Raises:
            BuildError: the buffers have no room for them.
        """
        if capacity > self.max_capacity:
            raise BuildError(f"{self.journal.name}: {capacity} pages do not fit runs of {self.max_capacity}")
        self.capacity = capacity
        self.free = capacity
        self._back.clear()
        self.unstage()
        self._refill(capacity)
        self._freed()

    def take(self, count: int) -> torch.Tensor | None:
        """Return `count` page numbers, ascending, or ``None`` if there are not enough.

        Raises:
            SlotError: pages were freed twice, so what is counted as free is not there; nothing changes.
        """
        if count > self.free:
            return None
        pages = self._hand_out(count)
        self._back.clear()
        self.free -= count
        self.journal.position += count
        return pages

    def give(self, pages: torch.Tensor) -> None:
        """Take back `pages` ``[n]``, in any order; never waits for the device.

        Raises:
            SlotError: more pages than are handed out; on the CPU also a page that does not exist or is named
                twice. Nothing changes.
        """
        count = pages.shape[0]
        if not count:  # nothing was freed, so every mark stays valid
            return
        self.require_live(count)
        self._collect(pages)
        self._back.append(pages)
        self.free += count
        self._freed()

    def require_live(self, count: int) -> None:
        """Refuse to take back more pages than are handed out.

        Raises:
            SlotError: always then.
        """
        if count > self.live:
            raise SlotError(
                f"{self.journal.name}: {count} pages are freed but only {self.live} are handed out; nothing was freed. "
                "Build with debug to learn which slots are freed twice"
            )

    def rewind(self, mark: object) -> int:
        """Take back every page handed out since `mark`, and return how many; costs what it takes back.

        Raises:
            SlotError: `mark` is not valid any more; nothing changes.
        """
        count = self.journal.rewind(mark)
        self._return(count)
        self.free += count
        return count

    def rewound(self, count: int) -> torch.Tensor:
        """Return the `count` pages that the last `rewind` took back."""
        import numpy as np

        start = self.journal.position - self._base
        return lengths.to_device(self._taken[start : start + count].astype(np.int64), self._device)

    def checkpoint(self) -> Undo:
        """Return what undoes all that comes back, is staged or rewound since now; to undo costs O(capacity)."""
        free, staged, position = self.free, self.staged, self.journal.position
        parts, length, count = self._parts, len(self._parts), len(self._back)

        def undo() -> None:
            if len(self._back) > count:
                self._withdraw(self._back[count:])
                del self._back[count:]
            del parts[length:]
            self.free, self._parts, self.staged, self.journal.position = free, parts, staged, position

        return undo

    def peek(self, count: int) -> torch.Tensor:
        """Return the `count` free pages that come next, without handing them out."""
        self._settle(count)
        return lengths.to_device(self.runs.peek(count), self._device)

    def _freed(self) -> None:
        self.journal.freed()
        self._base = self.journal.position

    def _hand_out(self, count: int) -> torch.Tensor:
        self._settle(count)
        pages = self.runs.take(count)
        start = self.journal.position - self._base
        self._taken[start : start + count] = pages
        try:
            return lengths.to_device(pages, self._device)
        except BaseException:
            self.runs.give(pages)
            raise

    def _collect(self, pages: torch.Tensor) -> None:
        if self._inbox is None:
            self.runs.give(pages.detach().numpy())
            return
        self._settle(0)
        self._inbox.send(pages)

    def _return(self, count: int) -> None:
        start = self.journal.position - self._base
        pages = self._taken[start : start + count]
        self.runs.give(pages)
        self._back.append(pages)

    def _withdraw(self, parts: Sequence[Numbers | torch.Tensor]) -> None:
        """Hold pages no more that came back, those that are on their way included: waits for them."""
        import numpy as np
        import torch

        self._settle(self.capacity)
        numbers = [lengths.to_host(part) if isinstance(part, torch.Tensor) else part for part in parts]
        self.runs.withdraw(np.concatenate(numbers))

    def _settle(self, count: int) -> None:
        """Merge what has arrived, and wait for more until `count` pages are here."""
        if self._inbox is None:
            return
        while (pages := self._inbox.receive(wait=self.runs.free < count)) is not None:
            self.runs.give(pages)

    def _refill(self, capacity: int) -> None:
        self.runs.reset(capacity)
        if self._inbox is not None:
            self._inbox.clear()


class CountedRuns(PageRuns):
    """The same on the ``meta`` device, where pages have no numbers: counts alone."""

    def rewound(self, count: int) -> torch.Tensor:
        """Return pages without numbers."""
        return self._numberless(count)

    def peek(self, count: int) -> torch.Tensor:
        """Return pages without numbers."""
        return self._numberless(count)

    def _numberless(self, count: int) -> torch.Tensor:
        import torch

        return torch.empty(count, dtype=torch.int64, device=self._device)

    def _hand_out(self, count: int) -> torch.Tensor:
        return self._numberless(count)

    def _collect(self, pages: torch.Tensor) -> None:
        """Keep nothing: `free` counts them."""

    def _return(self, count: int) -> None:
        """Keep nothing: `free` counts them."""

    def _withdraw(self, parts: Sequence[Numbers | torch.Tensor]) -> None:
        """Keep nothing: `free` counts them."""

    def _refill(self, capacity: int) -> None:
        """Keep nothing: `free` counts them."""


class SortedAllocator(PagedAllocator):
    """Hands out pages in ascending order and in as few runs as it can, at any page size, 1 included.

    A call gets one run where one is long enough, the lowest such, and never more runs than the lowest free
    pages would make. Nothing is sorted or merged but the pages of the call: alloc and free cost
    O(pages + log(capacity)), and so does `restore_state`, by the pages that it takes back. Off the CPU, freed
    pages are counted at once and copied to the host while it goes on; an alloc waits only if it needs them.
    """

    features = PagedAllocator.features | {"disaggregation"}
    """A prefill or decode worker sends or receives what it hands out."""

    @classmethod
    def buffers(cls, query: AllocatorQuery) -> tuple[Buffer, ...]:
        """Declare the runs and the pages handed out last (9 bytes a page of host memory), and page offsets.

        Off the CPU, freed pages arrive in pinned memory, 4 bytes a page.
        """
        space = only_space(query)

        def per_page(name: str, dtype: str = "int32", **fields: Any) -> Buffer:
            kept = {"guard": 0, "memory": "host", **fields}
            return Buffer(name=name, role="free_runs", space=space.name, unit=Unit.PAGE, shape=(), dtype=dtype, **kept)

        found = [
            # The padding page and the end behind the last page are never free, so a run has two neighbours.
            per_page("run_ends", guard=2, round_rows_to=FANOUT),
            per_page("run_levels", "uint8", guard=LEVEL_GUARD_BYTES, round_rows_to=FANOUT),
            per_page("taken"),
        ]
        if query.device.device_type != "cpu":
            found.append(per_page("arrivals", memory="pinned"))
        if space.page_size > 1:
            found.append(Buffer(name="page_offsets", role="offsets", shape=(space.page_size,), dtype="int64"))
        return tuple(found)

    def free(self, indices: torch.Tensor) -> None:
        """Give back the pages of these tokens; waits for the device once, but for pages of one token never."""
        if self.page_size == 1:
            lengths.require_integers("slots", indices)
            self.free_pages(indices.reshape(-1))
        else:
            super().free(indices)

    def restore_state(self, state: Any) -> None:
        """Take back every page handed out since `state`.

        Raises:
            SlotError: something was freed (or queued in a group) since, or `state` is not of this allocator.
        """
        self._enter()
        if self._ledger is None:
            self._runs.rewind(state)
            return
        with Together(self):
            taken = self._runs.rewind(state)
            self._ledger.give(lengths.to_host(self._runs.rewound(taken)))

    def _make_free_list(self, parts: Parts) -> FreeList:
        rows = parts.tensors.rows
        name, device = f"space {self.space!r}", parts.device
        ends, levels, taken = (rows(buffer).numpy() for buffer in ("run_ends", "run_levels", "taken"))
        runs = FreeRuns(name, ends, level_words(levels))
        capacity = self._planned_pages(len(taken))
        cls = CountedRuns if device.type == "meta" else PageRuns
        inbox = None if device.type in ("cpu", "meta") else Inbox(rows("arrivals"))
        self._runs = cls(name, runs, taken, inbox, device, capacity)
        return self._runs
