"""Allocators: who hands out and takes back the slots of a space."""

from kvdock.allocators.base import Allocator, Shortfall
from kvdock.allocators.paged import PagedAllocator
from kvdock.allocators.swa import SWAAllocator
from kvdock.allocators.token import TokenAllocator

__all__ = ["Allocator", "PagedAllocator", "SWAAllocator", "Shortfall", "TokenAllocator"]
