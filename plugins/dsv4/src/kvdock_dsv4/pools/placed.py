"""Pools in which not every token has a row: a slot of −1 stands for a token that owns nothing here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvdock.errors import SlotError
from kvdock.planned import Parts
from kvdock.pools import GroupedPool

if TYPE_CHECKING:
    import torch


class PlacedPool(GroupedPool):
    """Moves and copies what tokens own and leaves out slots of −1; a write to one lands in padding.

    Slots are those of the group's own space; `DSV4Pool` finds them for the slots of requests.
    """

    device_types: ClassVar[frozenset[str] | None] = None
    """Any: rows are packed, written and read by torch's own operations. Hardware whose kernels read other rows objects
    to these, or has a variant that claims their kinds."""

    def check_requests(self, rows: torch.Tensor) -> None:
        """With debug, verify that request rows are handed out, or padding; raises as `verify_requests`."""
        verify_requests(self.parts, rows, f"group {self.group.name!r}: ")

    def check_distinct(self, layer_id: int, loc: torch.Tensor) -> None:
        """With debug, verify that a call writes each place once, but for padding: the ring or page before all others.

        Raises:
            SlotError: names one that it writes more often.
        """
        if not self.parts.debug or loc.device.type == "meta":
            return
        import torch

        places, counts = torch.unique(loc[loc >= self.query.space.page_size], return_counts=True)
        if (twice := places[counts > 1]).numel():
            raise SlotError(
                f"layer {layer_id}: one call writes slot {int(twice[0])} of group {self.group.name!r} more than once, and of "
                "tokens that share a place either may stay; write a request's newest ring at most, nothing was written"
            )

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


def verify_requests(parts: Parts, rows: torch.Tensor, where: str = "") -> None:
    """With debug, verify that request rows are handed out, or padding; `where` begins the message.

    Raises:
        SlotError: names one that is not.
    """
    requests = parts.request_pool
    if not parts.debug or requests is None or rows.device.type == "meta":
        return
    if dead := sorted(set(rows.flatten().tolist()) - {0, *requests.live_rows()}):
        raise SlotError(
            f"{where}request row {dead[0]} belongs to no request, and so does all that is kept for it; alloc the row first, "
            "nothing was written"
        )


def whole_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return `rows` after checking that they are request rows of `count`, padding included, each once; waits for the device.

    Raises:
        SlotError: other types or shapes, a row that does not exist, or one that is given twice.
    """
    import torch

    if rows.dtype not in (torch.int64, torch.int32) or rows.dim() != 1:
        raise SlotError(f"request rows of {rows.dtype} and shape {list(rows.shape)}; give int64 or int32 [n]")
    if rows.device.type == "meta":
        return rows
    numbers = rows.tolist()
    if outside := [row for row in numbers if not 0 <= row < count]:
        raise SlotError(f"request row {outside[0]} is outside 0 … {count - 1}; nothing was read or written")
    if len(set(numbers)) < len(numbers):
        raise SlotError(f"request rows {numbers} name one twice; give each once, nothing was read or written")
    return rows


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
