"""What lies beside full pages: a part of a page of compressed rows, and the pages of states of their request.

A row of the map stands for a full page: its place in its request, then for each space of compressed rows the slot
at which the page's rows begin, then for each space of states the pages that its request has, in turn. So where
anything of a token lies follows from its full slot, and what a request goes on with from its last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvdock.allocators import lengths
from kvdock.layout import FULL, Buffer, Unit
from kvdock.queries import AllocatorQuery
from kvdock_dsv4.geometry import RATIO_OF, STATE_RATIO

from kvdock_ascend.dsv4.spaces import state_pages

if TYPE_CHECKING:
    import torch

PLACE = 0


class Column(NamedTuple):
    """Where a space stands in the map: from column `first` on.

    `period` full pages share a page of compressed rows, and a page of states is used by every `period`-th.
    """

    name: str
    first: int
    period: int
    is_state: bool


def columns_of(query: AllocatorQuery) -> dict[str, Column]:
    """Return the columns of the spaces that a query has beside full and sliding slots."""
    names = {space.name for space in query.spaces}
    found: dict[str, Column] = {}
    first = PLACE + 1
    for name, ratio in RATIO_OF.items():
        if name in names:
            found[name] = Column(name, first, ratio, False)
            first += 1
    for name, ratio in STATE_RATIO.items():
        if name in names:
            found[name] = Column(name, first, state_pages(query, ratio), True)
            first += found[name].period
    return found


def map_buffer(query: AllocatorQuery) -> Buffer:
    """Return the map: 8 bytes a column and full page, and a row for padding."""
    width = PLACE + 1 + sum(c.period if c.is_state else 1 for c in columns_of(query).values())
    return Buffer(name="beside", role="map", space=FULL, unit=Unit.PAGE, shape=(width,), dtype="int64")


class Beside:
    """The map, read and written; counts come from the host, and nothing waits for the device."""

    def __init__(self, rows: torch.Tensor, columns: Mapping[str, Column], page_size: int) -> None:
        self._rows = rows
        self.columns = columns
        self._page_size = page_size

    def needs(self, growth: lengths.Growth) -> dict[str, int]:
        """Return the pages of each space that a batch takes."""
        begins, ends = self._pages(growth.prefix), self._pages(growth.seq)
        return {
            name: int((self._owned(column, ends) - self._owned(column, begins)).sum())
            for name, column in self.columns.items()
        }

    def write(
        self, pages: torch.Tensor, growth: lengths.Growth, last_loc: torch.Tensor, taken: Mapping[str, torch.Tensor]
    ) -> None:
        """Map the new full pages of a batch, in order, to the pages of each space that it took."""
        import numpy as np
        import torch

        begins, ends = self._pages(growth.prefix), self._pages(growth.seq)
        counts = ends - begins
        request, place = np.repeat(np.arange(len(counts)), counts), lengths.spread(begins, counts)
        before = self._rows[(last_loc.to(torch.int64) // self._page_size).clamp(min=0)][self._tensor(request)]
        rows = before.clone()
        rows[:, PLACE] = self._tensor(place)
        for name, column in self.columns.items():
            owned = self._owned(column, begins)
            offset = (self._owned(column, ends) - owned).cumsum() - (self._owned(column, ends) - owned) - owned
            new = torch.cat((taken[name].new_zeros(1), taken[name]))
            if column.is_state:
                for turn in range(column.period):
                    is_new = (begins <= turn) & (turn < ends)
                    index = np.where(is_new, offset + turn + 1, 0)[request]
                    cell = rows[:, column.first + turn]
                    rows[:, column.first + turn] = torch.where(self._tensor(index) > 0, new[self._tensor(index)], cell)
                continue
            step = self._page_size // column.period
            block = place // column.period
            index = np.where(block >= owned[request], offset[request] + block + 1, 0)
            fresh = new[self._tensor(index)] * self._page_size + self._tensor(place % column.period * step)
            going_on = before[:, column.first] + self._tensor((place - begins[request] + 1) * step)
            rows[:, column.first] = torch.where(self._tensor(index) > 0, fresh, going_on)
        self._rows.index_copy_(0, pages, rows)

    def owned_at(self, pages: torch.Tensor, places: lengths.Ints) -> dict[str, torch.Tensor]:
        """Return the pages of each space that go back with full pages whose places in their requests are known."""
        found = {}
        for name, column in self.columns.items():
            chosen = (places < column.period if column.is_state else places % column.period == 0).nonzero()[0]
            rows = self._rows.index_select(0, pages.index_select(0, self._tensor(chosen)))
            if column.is_state:
                found[name] = rows.gather(1, self._tensor(places[chosen] + column.first).unsqueeze(1)).squeeze(1)
            else:
                found[name] = rows[:, column.first] // self._page_size
        return found

    def owned(self, pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the same for full pages whose places are not known; waits for the device once."""
        return self.owned_at(pages, lengths.to_host(self._rows.index_select(0, pages)[:, PLACE]))

    def compressed(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return the compressed slots of full slots; −1 for tokens that are not the last of their group, and for −1."""
        import torch

        wide, ratio = loc.to(torch.int64), self.columns[name].period
        page, offset = wide // self._page_size, wide % self._page_size
        base = self._rows[:, self.columns[name].first][page.clamp(min=0)]
        found = torch.where(base > 0, base + offset // ratio, 0)
        return torch.where((wide >= 0) & (offset % ratio == ratio - 1), found, -1)

    def states(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return where the states of full slots lie; 0 for padding, −1 for −1."""
        import torch

        wide, column = loc.to(torch.int64), self.columns[name]
        rows = self._rows[(wide // self._page_size).clamp(min=0)]
        turn = rows[..., PLACE] % column.period + column.first
        page = rows.gather(-1, turn.unsqueeze(-1)).squeeze(-1)
        found = torch.where(page > 0, page * self._page_size + wide % self._page_size, 0)
        return torch.where(wide >= 0, found, -1)

    def clear(self) -> None:
        """Map nothing."""
        self._rows.zero_()

    def _owned(self, column: Column, pages: lengths.Ints) -> lengths.Ints:
        """Return the pages of a space that requests of so many full pages have."""
        if column.is_state:
            return pages.clip(0, column.period)
        return -(-pages // column.period)

    def _pages(self, tokens: lengths.Ints) -> lengths.Ints:
        return lengths.pages_of(tokens, self._page_size)

    def _tensor(self, numbers: lengths.Ints) -> torch.Tensor:
        return lengths.to_device(numbers.astype("int64"), self._rows.device)
