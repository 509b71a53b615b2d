"""Who began at its first token: for forms in which what lies beside tokens is one request's."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from kvdock.allocators.lengths import check_owners
from kvdock.errors import SlotError


class Begun:
    """The requests that have begun, each with the point of its allocator's history at which it did.

    `why` says in messages what keeps a request from going on behind another's tokens. Requests without a name are let
    through; so is what an allocator refuses itself, another number of names than of requests.
    """

    def __init__(self, why: str) -> None:
        self.why = why
        self._points: dict[Hashable, int] = {}

    def verify(self, prefix_lens: Iterable[int], owners: Sequence[Any] | None) -> None:
        """Verify that each request that goes on has begun.

        Raises:
            SlotError: names one that has not, or that cannot be hashed.
        """
        check_owners(owners)
        for owner, tokens in zip(owners or (), prefix_lens, strict=False):
            if tokens and owner is not None and owner not in self._points:
                raise SlotError(
                    f"request {owner!r} cannot go on behind {tokens} tokens that are another's: {self.why}; begin at its "
                    "first token (prefix_cache=false)"
                )

    def note(self, prefix_lens: Iterable[int], owners: Sequence[Any] | None, point: int) -> None:
        """Note which requests begin, now that their tokens were handed out at `point`."""
        for owner, tokens in zip(owners or (), prefix_lens, strict=False):
            if owner is not None and not tokens:
                self._points[owner] = point

    def forget(self, request: Hashable) -> None:
        """Forget that a request has begun."""
        check_owners([request])
        self._points.pop(request, None)

    def back_to(self, point: int) -> None:
        """Forget the requests that began at `point` or later."""
        self._points = {owner: place for owner, place in self._points.items() if place < point}

    def clear(self) -> None:
        """Forget all."""
        self._points.clear()
