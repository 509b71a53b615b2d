"""Token frees that wait for the end of their group: a number a page, each page once at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.allocators import lengths

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Undo
    from kvdock.allocators.lengths import Ints


class FreeGroup:
    """The pages of the tokens of some frees.

    Of tokens on the host, a page that is there as a whole is noted as it comes: nobody else can name it. Of the
    other pages others may free the rest, so they are compared, once, at the end. Tokens on a device are not
    looked at before.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._whole: list[Ints] = []
        self._partial: list[torch.Tensor] = []

    def add(self, slots: torch.Tensor) -> None:
        """Note the pages of `slots`, which may change afterwards; never waits for the device."""
        import torch

        if not slots.is_cpu:
            pages = lengths.pages_of_slots(slots, self._page_size)
            self._partial.append(pages.clone() if self._page_size == 1 else pages)
            return
        whole, partial = lengths.whole_and_partial(slots.numpy(), self._page_size)
        self._whole.append(whole)
        if partial is not None:
            self._partial.append(torch.from_numpy(partial))

    def checkpoint(self) -> Undo:
        """Return what forgets all that is added since now."""
        whole, partial = len(self._whole), len(self._partial)

        def undo() -> None:
            del self._whole[whole:], self._partial[partial:]

        return undo

    def pages(self) -> torch.Tensor | None:
        """Return each page once, or ``None`` without any; waits for the device once."""
        import numpy as np
        import torch

        parts = [torch.from_numpy(np.concatenate(self._whole))] if self._whole else []
        if self._partial:
            parts.append(lengths.distinct_pages(torch.cat(self._partial), 1))
        if len(parts) < 2:
            return parts[0] if parts else None
        return torch.cat(parts)
