"""Pages of tokens of requests that share none: what slides lies with a request's row, so each begins at its first token."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.allocators import PagedAllocator, SortedAllocator
from kvdock.allocators.lengths import on_host
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery
from kvdock_dsv4.begun import Begun

if TYPE_CHECKING:
    import torch

    Lens = Sequence[int] | torch.Tensor


class BegunState(NamedTuple):
    """What `RocmPagedAllocator.backup_state` returns."""

    pages: Any
    begun: int


class RocmPagedAllocator(PagedAllocator):
    """The core's pages of tokens; compressed rows and index keys go with them, so nothing else can be short.

    A request that goes on behind another's tokens is refused, if its name is given: their sliding rows are not its own.
    A name begins with its first token and is forgotten with `release`.
    """

    def __init__(self, query: AllocatorQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self._begun = Begun("sliding rows and states of a token are in the rings of its request's row")
        self._count = 0

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Lens,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Lens,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return the slots of a batch that grows.

        Raises:
            SlotError: a request goes on that did not begin here, and what the allocator itself refuses. Nothing is taken.
        """
        prefix = on_host(prefix_lens_cpu, "prefix_lens_cpu").tolist() if owners is not None else []
        self._begun.verify(prefix, owners)
        found = super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, owners
        )
        if found is not None:
            self._note_begun(prefix, owners)
        return found

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: Lens, last_loc: torch.Tensor, owners: Sequence[Any] | None = None
    ) -> torch.Tensor | None:
        """Return one slot a request; raises as `alloc_extend`."""
        prefix = (on_host(seq_lens_cpu, "seq_lens_cpu") - 1).tolist() if owners is not None else []
        self._begun.verify(prefix, owners)
        found = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc, owners)
        if found is not None:
            self._note_begun(prefix, owners)
        return found

    def release(self, request: Hashable) -> None:
        """Forget that a request has begun; its pages go back with its row."""
        self._begun.forget(request)

    @property
    def unshared(self) -> str:
        """Why nothing of a request can be kept for another, or lent to it."""
        return self._begun.why

    def backup_state(self) -> BegunState:
        """Return a token of the present allocations."""
        return BegunState(super().backup_state(), self._count)

    def restore_state(self, state: Any) -> None:
        """Take back every page handed out since `state`, and who began since."""
        if not isinstance(state, BegunState):
            super().restore_state(state)
            return
        super().restore_state(state.pages)
        self._begun.back_to(state.begun)

    def clear(self) -> None:
        """Make every page free again."""
        super().clear()
        self._begun.clear()

    def _note_begun(self, prefix: Sequence[int], owners: Sequence[Any] | None) -> None:
        self._begun.note(prefix, owners, self._count)
        self._count += 1


class RocmSortedAllocator(RocmPagedAllocator, SortedAllocator):
    """The same in order, where caches are sent away."""
