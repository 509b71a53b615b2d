"""The pages of one space in a shared byte buffer: which virtual page lies where, and which places are free.

Three tables of int32, in places of the space's stretch: `page_of` (virtual page → page of the grid, the kernels' map),
`owner_of` (place → virtual page, or −1 − n for the n-th of `holes`), and `holes`, the free places in no order. Every
call costs what it touches, whatever the space's size; counts are the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvdock.errors import SlotError
from kvdock.layout import Buffer, Unit
from kvdock.unified.geometry import Stretch, Window

if TYPE_CHECKING:
    import torch

    from kvdock.kernels.interface import Kernels
    from kvdock.pools.storage import Tensors

MOVED_AT_ONCE = 2**24
"""Bytes of pages that one copy of a compaction holds beside the buffer."""


class Event(Protocol):
    """Work on a device that will be finished, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether it is finished."""

    def wait(self) -> object:
        """Let what is launched from now on wait for it; the host goes on."""


class Moves(NamedTuple):
    """Pages of the grid that a compaction copied, source to target; no place is in both."""

    source: torch.Tensor
    target: torch.Tensor


def table_buffers(space: str) -> tuple[Buffer, ...]:
    """Declare the tables of a space, 12 bytes a page."""
    page_of = Buffer(name="page_of", role="map", space=space, unit=Unit.PAGE, shape=(), dtype="int32")
    names = ("owner_of", "map"), ("holes", "free_ring")
    return (
        page_of,
        *(
            Buffer(name=name, role=role, space=space, unit=Unit.PAGE, shape=(), dtype="int32", guard=0)
            for name, role in names
        ),
    )


class Owned(NamedTuple):
    """What a space owned at some time, and how often it had given something up by then."""

    window: Window
    narrowed: int


class Segment:
    """What one space owns of the buffer: the places `window`, of which `holes` are free.

    `UnifiedMemory` alone changes windows; whoever hands out virtual pages backs and releases them.
    """

    def __init__(self, stretch: Stretch, tables: Tensors, pages: torch.Tensor, kernels: Kernels) -> None:
        self.stretch = stretch
        self.page_of = tables.rows("page_of")
        """Page of the grid of each virtual page; 0, the padding, for page 0 and those that are not live."""
        self._owner_of, self._holes = tables.rows("owner_of"), tables.rows("holes")
        self._pages = pages
        self._apart: list[torch.Tensor] = []
        self._kernels = kernels
        self.bytes_moved = self.pages_moved = self._narrowed = 0
        self.reset(Window(0, 0))

    @property
    def live(self) -> int:
        """Pages that are backed."""
        return self.window.high - self.window.low - self.holes

    def reset(self, window: Window) -> None:
        """Own the places of a window without a live page, which are all holes."""
        self.window = Window(window.low, window.low)
        self.holes = 0
        self._narrowed += 1
        self.page_of.zero_()
        self.widen(window)

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return where virtual slots lie: −1 for −1, and slot 0 for those of the padding. Never waits."""
        return self._kernels.translate(self.page_of, slots, self.stretch.page_size)

    def move_along(self, views: Sequence[torch.Tensor]) -> None:
        """Let views ``[pages, page_size, …]`` of this space that lie apart from its pages move with them."""
        self._apart += [view.unsqueeze(1) for view in views]

    def back(self, pages: torch.Tensor) -> None:
        """Give virtual pages ``[n]`` a place each, from the holes, of which there are enough."""
        count = pages.shape[0]
        places = self._holes[self.holes - count : self.holes]
        self._bind(pages, places)
        self.holes -= count

    def release(self, pages: torch.Tensor) -> None:
        """Make holes of the places of virtual pages ``[n]``."""
        places = self.page_of.index_select(0, pages) - self.stretch.first
        self.page_of.index_fill_(0, pages, 0)
        self._dig(places)

    def widen(self, window: Window) -> None:
        """Own a window that holds the present one; what is new are holes."""
        import torch

        old = self.window
        for low, high in ((window.low, min(old.low, window.high)), (max(old.high, window.low), window.high)):
            if high > low:
                self._dig(torch.arange(low, high, dtype=torch.int32, device=self.page_of.device))
        self.window = window

    def backup(self) -> Owned:
        """Return what is owned now, for `retract`."""
        return Owned(self.window, self._narrowed)

    def retract(self, owned: Owned) -> None:
        """Own what was owned then, where it only grew since and what was handed out since came back; else do nothing.

        Never waits: whatever lies outside is a hole.
        """
        import torch

        if owned.narrowed != self._narrowed or owned.window == self.window:
            return
        outside = self._outside(owned.window)
        if outside:
            self._fill(-1 - torch.cat(outside))
        self.window = owned.window

    def _outside(self, window: Window) -> list[torch.Tensor]:
        """Return what the tables say of the places outside a window within the present one."""
        old = self.window
        if window.low == window.high:
            parts = [range(old.low, old.high)]
        else:
            parts = [range(old.low, window.low), range(window.high, old.high)]
        return [self._owner_of[part.start : part.stop] for part in parts if part]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all that virtual pages ``[n]`` hold to others."""
        pages = (self.page_of.index_select(0, found).long() for found in (target, source))
        self._kernels.move([self._pages, *self._apart], *pages)

    def narrow(self, window: Window) -> Moves | None:
        """Own a window within the present one: pages outside move into its holes, of which there are enough.

        Costs what lies outside; waits for the device for the number of pages that move.
        """
        import torch

        live, parts = self.live, self._outside(window)
        self.window = window
        self._narrowed += 1
        if not live and window.low == window.high:
            self.holes = 0
            return None
        if not parts:
            return None
        owners = torch.cat(parts)
        is_live = owners >= 0
        self._fill(-1 - owners[~is_live])
        moved = owners[is_live].long()
        if not moved.shape[0]:
            return None
        source = self.page_of.index_select(0, moved)
        targets = self._holes[self.holes - moved.shape[0] : self.holes]
        self.holes -= moved.shape[0]
        self._bind(moved, targets)
        return self._copy(source.long(), self.page_of.index_select(0, moved).long())

    def owned(self, view: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a view ``[pages, …]`` of this space's grid that are its own: the padding, its window."""
        first = self.stretch.first
        return [view[:1], view[first + self.window.low : first + self.window.high]]

    def check(self) -> None:
        """Verify that tables and counts agree; O(places).

        Raises:
            SlotError: names the space and what is wrong.
        """
        import torch

        low, high = self.window
        owners = self._owner_of[low:high].long()
        is_live = owners >= 0
        holes = self._holes[: self.holes].long()
        named = torch.cat((holes, (self.page_of[self.page_of != 0] - self.stretch.first).long()))
        if not torch.equal(named.sort().values, torch.arange(low, high, device=named.device)):
            raise SlotError(f"space {self.stretch.space!r}: a place is lost, or is two pages' or a page's and free")
        backed = owners[is_live]
        places = is_live.nonzero().view(-1) + low + self.stretch.first
        if not torch.equal(self.page_of[backed].long(), places) or (backed == 0).any():
            raise SlotError(f"space {self.stretch.space!r}: the maps of pages to places and back differ")
        if not torch.equal(-1 - self._owner_of[holes].long(), torch.arange(self.holes, device=holes.device)):
            raise SlotError(f"space {self.stretch.space!r}: the list of holes is damaged")

    def _bind(self, pages: torch.Tensor, places: torch.Tensor) -> None:
        self.page_of.index_copy_(0, pages, places + self.stretch.first)
        self._owner_of.index_copy_(0, places.long(), pages.to(self._owner_of.dtype))

    def _dig(self, places: torch.Tensor) -> None:
        """Add free places to the holes."""
        import torch

        end = self.holes + places.shape[0]
        self._holes[self.holes : end] = places
        marks = torch.arange(-1 - self.holes, -1 - end, -1, dtype=torch.int32, device=places.device)
        self._owner_of.index_copy_(0, places.long(), marks)
        self.holes = end

    def _fill(self, indices: torch.Tensor) -> None:
        """Take the holes at `indices` out of the list; those at its end take their places in it."""
        left = self.holes - indices.shape[0]
        tail = self._holes[left : self.holes].clone()
        indices = indices.long()
        # Where a hole of the tail is itself taken out, it stands for none.
        tail[indices[indices >= left] - left] = -1
        kept, vacant = tail[tail >= 0], indices[indices < left]
        self._holes.index_copy_(0, vacant, kept)
        self._owner_of.index_copy_(0, kept.long(), (-1 - vacant).to(self._owner_of.dtype))
        self.holes = left

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Moves:
        at_once = max(1, MOVED_AT_ONCE // self.stretch.page_nbytes)
        for start in range(0, source.shape[0], at_once):
            here = slice(start, start + at_once)
            self._kernels.move([self._pages, *self._apart], target[here], source[here])
        self.pages_moved += source.shape[0]
        self.bytes_moved += source.shape[0] * self.stretch.page_nbytes
        return Moves(source, target)
