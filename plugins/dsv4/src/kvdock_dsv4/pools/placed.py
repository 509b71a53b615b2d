"""Pools in which not every token has a row: a slot of −1 stands for a token that owns nothing here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock.errors import SlotError
from kvdock.pools import GroupedPool

if TYPE_CHECKING:
    import torch


class PlacedPool(GroupedPool):
    """Moves and copies what tokens own and leaves out slots of −1; a write to one lands in padding.

    Slots are those of the group's own space; `DSV4Pool` finds them for the slots of requests.
    """

    def row_slots(self, loc: torch.Tensor) -> torch.Tensor:
        """Return `loc` with the padding row for tokens that own nothing here."""
        return loc.clamp(min=0)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy what the slots `src_loc` own to `tgt_loc`, where both own something; reads happen first.

        Raises:
            SlotError: another number of targets than of sources; nothing is moved.
        """
        import torch

        if tgt_loc.shape != src_loc.shape:
            raise SlotError(f"{tgt_loc.numel()} target slots for {src_loc.numel()} source slots; nothing was moved")
        both = (tgt_loc >= 0) & (src_loc >= 0)
        super().move_kv_cache(torch.where(both, tgt_loc, 0), torch.where(both, src_loc, 0))

    def cut_copies(
        self, copies: Sequence[torch.Tensor], indices: torch.Tensor, start: int, end: int
    ) -> list[torch.Tensor]:
        """Return what of the copies of `indices` belongs to ``indices[start:end]``: those that own something there."""
        first, last = (int((indices[:count] >= 0).sum()) for count in (start, end))
        return [copy[first:last] for copy in copies]

    def _rows_by_view(self, loc: torch.Tensor) -> list[torch.Tensor]:
        """Return the slots of `loc` that own something, for each view; waits for the device once."""
        return [loc[loc >= 0]] * len(self._views)

    def _check_loc(self, layer_id: int | None, loc: torch.Tensor) -> None:
        super()._check_loc(layer_id, loc.clamp(min=0))
