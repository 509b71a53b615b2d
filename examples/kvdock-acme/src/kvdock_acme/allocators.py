"""Slots of acme: whole pages, handed out as the core does."""

from __future__ import annotations

from kvdock.allocators import PagedAllocator

from kvdock_acme.device import DEVICE_TYPE


class AcmeAllocator(PagedAllocator):
    """Hands out pages of 16 tokens and more; one class for every space of an acme device."""

    device_types = frozenset({DEVICE_TYPE})
