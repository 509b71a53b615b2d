"""Slots of one space, one by one: the paged allocator for pages of one token, without page arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdock.allocators import lengths
from kvdock.allocators.paged import PagedAllocator, free_ring, only_space
from kvdock.errors import PlanError, SlotError
from kvdock.layout import Buffer
from kvdock.queries import AllocatorQuery

if TYPE_CHECKING:
    import torch


class TokenAllocator(PagedAllocator):
    """Hands out single slots; a slot is its own page, so nothing is divided and `free` never waits."""

    features = frozenset({"hisparse"})
    """Not decode-context parallelism, where a page has a slot on every rank."""

    @classmethod
    def buffers(cls, query: AllocatorQuery) -> tuple[Buffer, ...]:
        """Declare the free ring, 8 bytes a slot.

        Raises:
            PlanError: the space has pages of more than one slot.
        """
        space = only_space(query)
        if space.page_size != 1:
            ranks = query.parallel.dcp_size
            over = f" over {ranks} decode-context-parallel ranks" if ranks > 1 else ""
            raise PlanError(
                f"TokenAllocator serves page_size 1, but space {space.name!r} has {space.page_size}{over}; "
                "claim PagedAllocator"
            )
        return (free_ring(space),)

    def alloc(self, need_size: int, owner: Any = None) -> torch.Tensor | None:
        """Return `need_size` slots.

        Raises:
            SlotError: `need_size` is negative, or `owner` cannot be hashed.
        """
        lengths.check_owners([owner])
        need_size = lengths.whole_count(need_size, "need_size")
        if need_size < 0:
            raise SlotError(f"{self._name}: alloc({need_size}) asks for fewer than no slots")
        return self._take(need_size, None if owner is None else [owner] * need_size)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Sequence[int] | torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return the slots of a batch that grows, request after request.

        Raises:
            SlotError: lengths that contradict each other or `extend_num_tokens`, or another number of requests
                in one argument than in the others; with debug, device lengths other than the host's, or a
                `last_loc` that is not where the request's last token can be. Nothing is taken.
        """
        extend_num_tokens = lengths.whole_count(extend_num_tokens, "extend_num_tokens")
        growth = lengths.extend_growth((prefix_lens_cpu, seq_lens_cpu), extend_num_tokens, 1)
        on_device = {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "last_loc": last_loc}
        self.verify_growth(growth, on_device, owners)
        return self._take(extend_num_tokens, self._owners_of_pages(owners, growth))

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return one slot a request.

        Raises:
            SlotError: a length below 1, and what `alloc_extend` refuses. Nothing is taken.
        """
        growth = lengths.decode_growth(seq_lens_cpu, 1)
        self.verify_growth(growth, {"seq_lens": seq_lens, "last_loc": last_loc}, owners)
        return self._take(len(growth.seq), self._owners_of_pages(owners, growth))

    def free(self, indices: torch.Tensor) -> None:
        """Give back slots, each named once; never waits for the device."""
        lengths.require_integers("slots", indices)
        self.free_pages(indices if indices.dim() == 1 else indices.reshape(-1))
