"""Allocators whose slots are int32, as Ascend's kernels index pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvdock.allocators import (
    Allocator,
    PagedAllocator,
    PureSWAAllocator,
    PureSWASortedAllocator,
    PureSWATokenAllocator,
    SortedAllocator,
    TokenAllocator,
)
from kvdock.builtin import CorePlugin
from kvdock.queries import AllocatorQuery

from kvdock_ascend.device import DEVICE_TYPE

if TYPE_CHECKING:
    import torch

    Lens = Sequence[int] | torch.Tensor

NPU = frozenset({DEVICE_TYPE})


class Int32Slots(PagedAllocator):
    """Before another allocator of one space: hands out the same slots as int32. Pages are numbered in int64 as everywhere."""

    device_types: ClassVar[frozenset[str] | None] = NPU
    slot_dtype = "int32"

    def alloc(self, need_size: int, owner: Any = None) -> torch.Tensor | None:
        """Return `need_size` slots, whole pages in order."""
        return _narrow(super().alloc(need_size, owner))

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
        """Return the slots of a batch that grows."""
        batch = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens)
        return _narrow(super().alloc_extend(*batch, owners))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: Lens, last_loc: torch.Tensor, owners: Sequence[Any] | None = None
    ) -> torch.Tensor | None:
        """Return one slot a request."""
        return _narrow(super().alloc_decode(seq_lens, seq_lens_cpu, last_loc, owners))


class NpuPagedAllocator(Int32Slots, PagedAllocator):
    """Pages of one space."""

    features: ClassVar[frozenset[str]] = PagedAllocator.features - {"hisparse"}


class NpuSortedAllocator(Int32Slots, SortedAllocator):
    """Pages in ascending order and long runs, for caches that are sent away."""

    features: ClassVar[frozenset[str]] = SortedAllocator.features - {"hisparse"}


class _Int32Tails(Int32Slots, PureSWAAllocator):
    def alloc_extend_swa_tail(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Return slots for the newest tokens of each request, and 0 for those before."""
        return _narrow(super().alloc_extend_swa_tail(*args, **kwargs))


class NpuPureSWAAllocator(_Int32Tails):
    """Sliding pages that are the requests' own."""

    features: ClassVar[frozenset[str]] = PureSWAAllocator.features - {"hisparse"}


class NpuPureSWASortedAllocator(_Int32Tails, PureSWASortedAllocator):
    """The same in ascending order and long runs."""

    features: ClassVar[frozenset[str]] = PureSWASortedAllocator.features - {"hisparse"}


FORMS: Mapping[type[Allocator], type[Allocator]] = {
    TokenAllocator: NpuPagedAllocator,
    PagedAllocator: NpuPagedAllocator,
    SortedAllocator: NpuSortedAllocator,
    PureSWATokenAllocator: NpuPureSWAAllocator,
    PureSWAAllocator: NpuPureSWAAllocator,
    PureSWASortedAllocator: NpuPureSWASortedAllocator,
}
"""What the core would hand out a space with → its form here; a single token is a page of one."""


def allocator_cls(query: AllocatorQuery) -> type[Allocator] | None:
    """Return the form of what the core would choose for one space; composites stay the core's and ask for this."""
    chosen = CorePlugin().get_allocator_cls(query)
    return None if chosen is None else FORMS.get(chosen)


def _narrow(slots: torch.Tensor | None) -> torch.Tensor | None:
    import torch

    return None if slots is None else slots.to(torch.int32)
