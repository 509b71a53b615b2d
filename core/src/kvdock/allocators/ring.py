"""The free list: page numbers in a ring, its ends and counts on the host.

Taking and giving k pages copies k numbers; nothing else of the list is touched, whatever its length.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, NamedTuple

from kvdock.errors import BuildError, SlotError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvdock.allocators.base import Undo


class Mark(NamedTuple):
    """A point of a `Journal` to come back to."""

    journal: Journal
    epoch: int
    rewinds: int
    position: int


class Journal:
    """Knows whether a mark can still be rewound to: only while nothing was freed since.

    `position` counts what was taken and not rewound. Rewinding to a mark retires the marks that were made
    after it: `_rewinds` pairs the number of a rewind with the lowest position reached from there on, both
    rising, so it holds at most one entry a position.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.position = 0
        self._epoch = 0
        self._count = 0
        self._rewinds: list[tuple[int, int]] = []

    def mark(self, taken: int = 0) -> Mark:
        """Return the present point, or the one before the last `taken`, where nothing else happened since."""
        return Mark(self, self._epoch, self._count, self.position - taken)

    def freed(self) -> None:
        """Retire every mark: the slots after it may come in another order now."""
        self._epoch += 1
        if self._rewinds:
            self._rewinds.clear()

    def since(self, mark: object) -> int:
        """Return how much was taken since `mark`, and go nowhere; raises as `rewind`."""
        return self.position - self._verified(mark).position

    def rewind(self, mark: object) -> int:
        """Go back to `mark` and return how much was taken since.

        Raises:
            SlotError: the mark is another's, or something was freed or an older mark restored since.
        """
        point = self._verified(mark)
        taken = self.position - point.position
        while self._rewinds and self._rewinds[-1][1] >= point.position:
            self._rewinds.pop()
        self._count += 1
        self._rewinds.append((self._count, point.position))
        self.position = point.position
        return taken

    def _verified(self, mark: object) -> Mark:
        if not isinstance(mark, Mark) or mark.journal is not self:
            raise SlotError(f"{self.name}: this state was not made by this allocator; nothing was restored")
        if mark.epoch != self._epoch:
            raise SlotError(
                f"{self.name}: slots were freed after this state was made, so they may belong to others by now; "
                "nothing was restored. Free what was allocated since instead"
            )
        later = bisect.bisect_right(self._rewinds, (mark.rewinds, self.position + 1))
        if later < len(self._rewinds) and self._rewinds[later][1] < mark.position:
            raise SlotError(f"{self.name}: an older state was restored after this one was made; nothing was restored")
        return mark


class PageRing:
    """Free page numbers ``1 … capacity``, handed out in order and taken back at the other end.

    `ids` is the declared tensor; it may be longer than `capacity` (after a resize). Pages are handed out in
    ascending order until the first ones come back. A ring on the host is read and written through numpy, which
    starts a copy in a third of the time.
    """

    def __init__(self, name: str, ids: torch.Tensor, capacity: int) -> None:
        self.journal = Journal(name)
        self._ids = ids
        self._host: NDArray[np.int64] | None = ids.numpy() if ids.is_cpu else None
        self.reset(capacity)

    @property
    def live(self) -> int:
        """Pages that are handed out."""
        return self.capacity - self.free

    @property
    def max_capacity(self) -> int:
        """Pages that the tensor has room for."""
        return int(self._ids.shape[0])

    def reset(self, capacity: int) -> None:
        """Hold the pages ``1 … capacity`` again, all free.

        Raises:
            BuildError: the tensor has no room for them.
        """
        import torch

        if capacity > self.max_capacity:
            raise BuildError(f"{self.journal.name}: {capacity} pages do not fit a ring of {self.max_capacity}")
        torch.arange(1, capacity + 1, out=self._ids[:capacity])
        self.capacity = capacity
        self.free = capacity
        self.staged = 0
        self._head = 0
        self.journal.freed()

    def take(self, count: int) -> torch.Tensor | None:
        """Return `count` page numbers in a tensor of their own, or ``None`` if there are not enough."""
        if count > self.free:
            return None
        pages = self._read(self._head, count)
        self._head = (self._head + count) % self.capacity
        self.free -= count
        self.journal.position += count
        return pages

    def give(self, pages: torch.Tensor) -> None:
        """Take back `pages` ``[n]``.

        Raises:
            SlotError: more pages than are handed out; nothing changes.
        """
        count = pages.numel()
        if not count:  # nothing was freed, so every mark stays valid
            return
        self.require_live(count)
        self._append(pages, count)
        self.free += count
        self.journal.freed()

    def stage(self, pages: torch.Tensor) -> None:
        """Copy `pages` ``[n]`` behind the free ones, to be taken back by `commit`; retires marks. Nothing is given meanwhile.

        Raises:
            SlotError: more pages than are handed out; nothing changes.
        """
        count = pages.numel()
        if not count:
            return
        self.require_live(self.staged + count)
        self._append(pages, count)
        self.staged += count
        self.journal.freed()

    def commit(self, more: torch.Tensor | None = None) -> None:
        """Take back what was staged, and `more`.

        Raises:
            SlotError: more pages than are handed out; nothing comes back, and nothing stays staged.
        """
        try:
            if more is not None:
                self.stage(more)
        except SlotError:
            self.unstage()
            raise
        self.free += self.staged
        self.staged = 0

    def unstage(self) -> None:
        """Forget what was staged."""
        self.staged = 0

    def staged_pages(self) -> torch.Tensor:
        """Return what was staged, for checks."""
        return self._read((self._head + self.free) % self.capacity, self.staged)

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
        """Take back every page handed out since `mark`; return how many, which are next in order again.

        Raises:
            SlotError: `mark` is not valid any more; nothing changes.
        """
        taken = self.journal.rewind(mark)
        self._head = (self._head - taken) % self.capacity
        self.free += taken
        return taken

    def peek(self, count: int) -> torch.Tensor:
        """Return the `count` free pages that come next, without handing them out."""
        return self._read(self._head, count)

    def checkpoint(self) -> Undo:
        """Return what undoes all that comes back, is staged or rewound since now: the ring still holds what it held."""
        head, free, staged, position = self._head, self.free, self.staged, self.journal.position

        def undo() -> None:
            self._head, self.free, self.staged, self.journal.position = head, free, staged, position

        return undo

    def _read(self, start: int, count: int) -> torch.Tensor:
        import torch

        end = start + count
        if end > self.capacity:
            return torch.cat((self._ids[start : self.capacity], self._ids[: end - self.capacity]))
        if self._host is None:
            return self._ids[start:end].clone()
        return torch.from_numpy(self._host[start:end].copy())

    def _append(self, pages: torch.Tensor, count: int) -> None:
        """Write pages behind those that are free or staged."""
        tail = (self._head + self.free + self.staged) % self.capacity
        first = min(count, self.capacity - tail)
        if first < count:
            self._write(tail, self.capacity, pages[:first])
            self._write(0, count - first, pages[first:])
        else:
            self._write(tail, tail + count, pages)

    def _write(self, start: int, end: int, pages: torch.Tensor) -> None:
        if self._host is not None and pages.is_cpu:
            self._host[start:end] = pages.numpy()
        else:
            self._ids[start:end].copy_(pages)
