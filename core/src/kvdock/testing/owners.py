"""A second book beside the allocators: who holds each slot of each space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvdock.testing.values import RunError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

FREE, KEPT = -1, -2
"""Holders of a slot that are no request: nobody, and the prefixes that outlive their request."""


class Owners:
    """Finds slots that are handed out twice, or that are padding; kept on the host, slot by slot."""

    def __init__(self, sizes: Mapping[str, int], page_size: int) -> None:
        import numpy as np

        self._page_size = page_size
        self._holders = {name: np.full(size + page_size, FREE, dtype=np.int64) for name, size in sizes.items()}

    def verify_free(self, space: str, slots: torch.Tensor, request: int) -> NDArray[np.int64]:
        """Return `slots` on the host, after verifying that they may be handed to a request.

        Raises:
            RunError: one is padding, does not exist, comes twice, or is somebody's.
        """
        import numpy as np

        holders, numbers = self._holders[space], _numbers(slots)
        self._refuse(space, request, numbers[numbers < self._page_size], "which is padding")
        self._refuse(space, request, numbers[numbers >= len(holders)], f"but the last one is {len(holders) - 1}")
        values, counts = np.unique(numbers, return_counts=True)
        self._refuse(space, request, values[counts > 1], "twice at once")
        taken = numbers[holders[numbers] != FREE]
        holder = int(holders[taken[0]]) if len(taken) else FREE
        whose = "that a kept prefix holds" if holder == KEPT else f"that request {holder} holds"
        self._refuse(space, request, taken, whose)
        return numbers

    def take(self, space: str, slots: torch.Tensor, request: int) -> None:
        """Note that a request got `slots`.

        Raises:
            RunError: they cannot be handed out.
        """
        self._holders[space][self.verify_free(space, slots, request)] = request

    def give(self, space: str, slots: torch.Tensor, holder: int = FREE) -> None:
        """Note that `slots` are another's now, or free."""
        self._holders[space][_numbers(slots)] = holder

    def _refuse(self, space: str, request: int, slots: NDArray[np.int64], why: str) -> None:
        if len(slots):
            raise RunError(f"request {request} was handed slot {int(slots[0])} of space {space!r}, {why}")


def _numbers(slots: torch.Tensor) -> NDArray[np.int64]:
    import numpy as np

    return slots.detach().cpu().numpy().astype(np.int64)
