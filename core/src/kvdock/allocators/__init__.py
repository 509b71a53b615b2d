"""Allocators: who hands out and takes back the slots of a space."""

from kvdock.allocators.base import Allocator, Shortfall, Together, Undo
from kvdock.allocators.hisparse import HiSparseAllocator
from kvdock.allocators.paged import PagedAllocator
from kvdock.allocators.pure_swa import PureSWAAllocator, PureSWASortedAllocator, PureSWATokenAllocator
from kvdock.allocators.sorted import SortedAllocator
from kvdock.allocators.swa import SWAAllocator
from kvdock.allocators.token import TokenAllocator
from kvdock.allocators.window import swa_tail_start, swa_tail_tokens

__all__ = [
    "Allocator",
    "HiSparseAllocator",
    "PagedAllocator",
    "PureSWAAllocator",
    "PureSWASortedAllocator",
    "PureSWATokenAllocator",
    "SWAAllocator",
    "Shortfall",
    "SortedAllocator",
    "Together",
    "TokenAllocator",
    "Undo",
    "swa_tail_start",
    "swa_tail_tokens",
]
