"""Pools in which not every token has a row: a slot of −1 stands for a token that owns nothing here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

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


class UnkeyedPool(PlacedPool):
    """A pool of a layer group that has no keys and values of attention; a subclass has methods for what it keeps."""

    keeps: ClassVar[str]
    """What it keeps, for messages."""

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Raise: there are no keys."""
        raise self._refuse_kv(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Raise: there are no values."""
        raise self._refuse_kv(layer_id)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Raise: there are no keys and values."""
        raise self._refuse_kv(layer_id)

    def _refuse_kv(self, layer_id: int) -> SlotError:
        return SlotError(f"group {self.group.name!r} keeps {self.keeps} of layer {layer_id}, no keys and values")
