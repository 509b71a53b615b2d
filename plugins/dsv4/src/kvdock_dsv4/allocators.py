"""Full and sliding slots in step; everything else that a token keeps lies where they say."""

from __future__ import annotations

from kvdock.allocators import SWAAllocator


class DSV4Allocator(SWAAllocator):
    """The core's sliding allocator: compressed pages and state rings go with full and sliding pages.

    A full page of 256 tokens *is* a page of 64 rows of ratio 4 and one of 2 rows of ratio 128, and a sliding page
    is a ring of states, so these are taken and given back in the same call, can be short only where their page
    is, and need no free list of their own. A form of the cache whose compressed rows have pages of their own
    declares those spaces as handed out by an allocator, and names a composite for all of them.
    """
