"""Unified memory: one byte buffer that every space of a hybrid model can fill.

Everything above the allocator holds virtual slots; which page of the buffer a virtual page is, tables say. Spaces lie
one after the other, each grows from its end, and compaction moves the outermost pages into holes.
"""

from kvdock.unified.allocators import UnifiedAllocator, UnifiedPureSWAAllocator, UnifiedSWAAllocator
from kvdock.unified.memory import UnifiedMemory
from kvdock.unified.requests import UnifiedReqToTokenPool
from kvdock.unified.segment import Event

__all__ = [
    "Event",
    "UnifiedAllocator",
    "UnifiedMemory",
    "UnifiedPureSWAAllocator",
    "UnifiedReqToTokenPool",
    "UnifiedSWAAllocator",
]
