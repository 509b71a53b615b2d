"""What a paged allocator asks of the object that keeps its free pages."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Undo
    from kvdock.allocators.ring import Journal


class FreeList(Protocol):
    """Free pages ``1 … capacity`` of one space; counts are the host's, page numbers are tensors."""

    journal: Journal

    @property
    def capacity(self) -> int:
        """Pages that are numbered."""

    @property
    def free(self) -> int:
        """Pages that can be handed out."""

    @property
    def staged(self) -> int:
        """Pages that wait for `commit`."""

    @property
    def live(self) -> int:
        """Pages that are handed out."""

    @property
    def max_capacity(self) -> int:
        """Pages that the buffers have room for."""

    def reset(self, capacity: int) -> None:
        """Hold the pages ``1 … capacity`` again, all free."""

    def take(self, count: int) -> torch.Tensor | None:
        """Return `count` page numbers in a tensor of their own, or ``None`` if there are not enough."""

    def give(self, pages: torch.Tensor) -> None:
        """Take back `pages` ``[n]``, each named once."""

    def stage(self, pages: torch.Tensor) -> None:
        """Copy `pages` ``[n]``, each named once, to be taken back by `commit`; retires marks. Nothing is given meanwhile."""

    def commit(self, more: torch.Tensor | None = None) -> None:
        """Take back what was staged, and `more`; where that is refused, nothing comes back and nothing stays staged."""

    def unstage(self) -> None:
        """Forget what was staged."""

    def staged_pages(self) -> torch.Tensor:
        """Return what was staged, for checks."""

    def require_live(self, count: int) -> None:
        """Refuse to take back more pages than are handed out."""

    def rewind(self, mark: object) -> int:
        """Take back every page handed out since `mark`; return how many."""

    def peek(self, count: int) -> torch.Tensor:
        """Return the `count` free pages that come next, without handing them out."""

    def checkpoint(self) -> Undo:
        """Return what undoes all that comes back, is staged or rewound since now, while nothing is taken."""


class CollectsPages(abc.ABC):
    """Stages pages as tensors of their own, for a free list that takes them back at once."""

    journal: Journal
    staged = 0

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    @abc.abstractmethod
    def give(self, pages: torch.Tensor) -> None:
        """Take back `pages` ``[n]``, each named once."""

    @abc.abstractmethod
    def require_live(self, count: int) -> None:
        """Refuse to take back more pages than are handed out."""

    def stage(self, pages: torch.Tensor) -> None:
        """Copy `pages` ``[n]``, each named once, to be taken back by `commit`; retires marks.

        Raises:
            SlotError: more pages than are handed out; nothing changes.
        """
        self.require_live(self.staged + pages.shape[0])
        self.journal.freed()
        self._parts.append(pages.clone())
        self.staged += pages.shape[0]

    def commit(self, more: torch.Tensor | None = None) -> None:
        """Take back what was staged, and `more`; where that is refused, nothing comes back and nothing stays staged."""
        import torch

        parts = self._parts if more is None else [*self._parts, more]
        self.unstage()
        if parts:
            self.give(torch.cat(parts))

    def unstage(self) -> None:
        """Forget what was staged."""
        self._parts = []
        self.staged = 0

    def staged_pages(self) -> torch.Tensor:
        """Return what was staged, for checks."""
        import torch

        return torch.cat(self._parts) if self._parts else torch.zeros(0, dtype=torch.int64)
