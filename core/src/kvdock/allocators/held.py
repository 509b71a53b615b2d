"""Pages that requests hold beside their tokens: slots in a row of a table on the device, counts on the host."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.allocators import lengths
from kvdock.allocators.base import Together
from kvdock.errors import SlotError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvdock.allocators.base import Allocator


class HeldPages:
    """Pages of one allocator, by request, in its row of a table ``[rows + 1, columns]`` of slots; 0: no slot.

    A request's pages lie in blocks: each begins at a base column and grows to the right. Slots beyond the last
    column are held, but not listed. What was added since the last free can be undone.
    """

    def __init__(self, what: str, inner: Allocator, table: torch.Tensor) -> None:
        self.what = what
        self.table = table
        self.inner = inner
        self._size = inner.page_size
        self._rows: dict[Hashable, int] = {}
        self._holders: dict[int, Hashable] = {}
        self._blocks: dict[Hashable, dict[int, int]] = {}
        self._added: list[tuple[Hashable, int, int]] = []
        self.table.zero_()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request: object) -> bool:
        lengths.check_owners([request])
        return request in self._rows

    def rows(self) -> dict[Hashable, int]:
        """Return the row of each request that holds pages."""
        return dict(self._rows)

    def holder_of(self, row: int) -> Hashable | None:
        """Return the request whose pages lie in `row`, or ``None``."""
        return self._holders.get(row)

    def count(self, request: Hashable, base: int = 0) -> int:
        """Return the pages that a request holds in the block at `base`."""
        lengths.check_owners([request])
        return self._blocks.get(request, {}).get(base, 0)

    def check_row(self, request: Hashable, row: int) -> None:
        """Verify that `row` can take pages of `request`.

        Raises:
            SlotError: it still holds another's, who lost the row without giving them back.
        """
        other = self._holders.get(row, request)
        if other != request:
            raise SlotError(
                f"row {row} of request {request!r} still lists {self.what} of request {other!r}, which lost its row "
                "without a release; call release for it first"
            )

    def add(self, request: Hashable, row: int, slots: torch.Tensor, base: int = 0) -> None:
        """Note `slots` (whole pages, from the allocator) as the next ones of the block at `base`; none are no entry.

        Raises:
            SlotError: what `check_row` refuses; nothing is noted.
        """
        self.check_row(request, row)
        if not slots.shape[0]:
            return
        held = self.count(request, base)
        start = base + held * self._size
        listed = slots[: self.table.shape[1] - start]
        self.table[row, start : start + listed.shape[0]].copy_(listed)
        pages = slots.shape[0] // self._size
        self._rows[request], self._holders[row] = row, request
        self._blocks.setdefault(request, {})[base] = held + pages
        self._added.append((request, base, pages))

    def take(self, request: Hashable, row: int, count: int) -> torch.Tensor | None:
        """Return the slots of `count` more pages that a request holds from now on, or ``None``; after an error none are taken.

        Raises:
            SlotError: what `check_row` refuses.
        """
        before = self.inner.backup_state()
        try:
            slots = self.inner.alloc(count * self._size, request)
            if slots is not None:
                self.add(request, row, slots)
        except BaseException:
            self.inner.restore_state(before)
            raise
        return slots

    def pages(self, requests: Iterable[Hashable]) -> torch.Tensor:
        """Return the page numbers that `requests` hold, ``[n]`` int64; never waits."""
        import torch

        heads = [
            self.table[self._rows[request], base : base + pages * self._size : self._size]
            for request in requests
            for base, pages in self._blocks[request].items()
        ]
        found = torch.cat(heads) if heads else self.table.new_zeros(0)
        return lengths.pages_of_slots(found, self._size).to(torch.int64)

    def free(self, request: Hashable) -> None:
        """Give back all pages of a request; a request without any holds none. After an error it keeps what it holds.

        Raises:
            SlotError: with debug, a page that is not live.
        """
        if request not in self._rows:
            return
        with Together(self.inner):
            self.inner.free_pages(self.pages([request]))
            self._drop(request)
        self._added.clear()

    def mark(self) -> int:
        """Return a point for `undo`, valid until the next `settle` or free."""
        return len(self._added)

    def undo(self, mark: int) -> None:
        """Forget what was added since `mark`: the allocator took the pages back."""
        while len(self._added) > mark:
            request, base, pages = self._added.pop()
            blocks = self._blocks[request]
            blocks[base] -= pages
            start = base + blocks[base] * self._size
            self.table[self._rows[request], start : start + pages * self._size].zero_()
            if not any(blocks.values()):
                self._drop(request)

    def settle(self) -> None:
        """Give up undoing what was added so far."""
        self._added.clear()

    def clear(self) -> None:
        """Forget every page of every request."""
        self.table.zero_()
        for book in (self._rows, self._holders, self._blocks):
            book.clear()
        self._added.clear()

    def _drop(self, request: Hashable) -> None:
        self.table[self._rows[request]].zero_()  # first: it may fail
        del self._holders[self._rows.pop(request)], self._blocks[request]


class Placement(NamedTuple):
    """Where the new full pages of a decode get their device pages: of their own, or a buffer's newest one.

    `heads` are the places in the batch whose token starts a page; `is_held` says of each whether its request
    holds a buffer; `requests` are those that do.
    """

    heads: lengths.Ints
    is_held: NDArray[np.bool_]
    requests: list[Hashable]


class DeviceBuffers(HeldPages):
    """Device pages that requests read from: pages at the first columns, and the page of the newest tokens at the last.

    `newest_at` is the page of a request, counted from its first token, that its newest page holds now.
    """

    def __init__(self, inner: Allocator, table: torch.Tensor) -> None:
        super().__init__("the device buffer", inner, table)
        self.newest_base = table.shape[1] - self._size
        self.newest_at: dict[Hashable, int] = {}

    def slots(self, request: Hashable) -> int:
        """Return the device slots that a request holds, those of its newest page included."""
        return (self.count(request) + self.count(request, self.newest_base)) * self._size

    def checked_pages(self, slots: int | None) -> int:
        """Return the pages that take `slots` device slots; without a number those of a whole buffer.

        Raises:
            SlotError: fewer than one, or more than a whole buffer.
        """
        whole = int(self.table.shape[1])
        (asked,) = lengths.on_host([whole if slots is None else slots], "slots").tolist()
        if not 1 <= asked <= whole:
            raise SlotError(f"a device buffer has 1 … {whole} slots, not {asked}; nothing was taken")
        return -(-int(asked) // self._size)

    def newest_pages(self, requests: Sequence[Hashable]) -> torch.Tensor:
        """Return the device page of each request's newest tokens, ``[n]``."""
        import numpy as np

        rows = np.array([self._rows[request] for request in requests], dtype=np.int64)
        column = self.table[:, self.newest_base]
        return lengths.pages_of_slots(column.index_select(0, lengths.to_device(rows, column.device)), self._size)

    def place(self, growth: lengths.Growth, owners: Sequence[Any] | None) -> Placement:
        """Return where the new pages of a decode of the requests `owners` lie.

        Raises:
            SlotError: some request holds a buffer and `owners` are missing, or one goes on in a page that its
                newest page does not hold.
        """
        import numpy as np

        heads = growth.page_heads()
        if not self._rows:
            return Placement(heads, np.zeros(len(heads), dtype=np.bool_), [])
        if owners is None:
            raise SlotError(
                f"{len(self)} requests hold device buffers, in which their newest tokens lie; name the requests of the "
                "batch (owners); nothing was taken"
            )
        lengths.check_batch(len(growth.seq), owners)
        for request, tokens in zip(owners, growth.prefix.tolist(), strict=True):
            self._check_place(request, tokens)
        is_held = np.array([owners[i] in self for i in heads.tolist()], dtype=np.bool_)
        return Placement(heads, is_held, [owners[i] for i in heads[is_held].tolist()])

    def words(self, placed: Placement, pages: torch.Tensor) -> torch.Tensor:
        """Return `pages` for those without a buffer, and newest pages for the others, in the order of the batch."""
        if not placed.requests:
            return pages
        words = pages.new_zeros(len(placed.heads))
        own, held = ((found).nonzero()[0] for found in (~placed.is_held, placed.is_held))
        words.index_copy_(0, lengths.to_device(own, words.device), pages)
        return words.index_copy_(0, lengths.to_device(held, words.device), self.newest_pages(placed.requests))

    def holds(self, requests: Sequence[Hashable], pages: Sequence[int]) -> NDArray[np.bool_]:
        """Return of each request whether its newest page holds its page ``pages[i]``; a prefix never lies there."""
        import numpy as np

        return np.array(
            [self.newest_at.get(r) == page for r, page in zip(requests, pages, strict=True)], dtype=np.bool_
        )

    def place_newest(self, request: Hashable, page: int | None) -> None:
        """Note which page of a request its newest page holds now, if any."""
        self.newest_at.pop(request, None)
        if page is not None:
            self.newest_at[request] = page

    def move_on(self, requests: Sequence[Hashable], pages: Sequence[int]) -> None:
        """Note that each request's newest page holds its page ``pages[i]`` now."""
        self.newest_at.update(zip(requests, pages, strict=True))

    def clear(self) -> None:
        """Forget every page of every request."""
        super().clear()
        self.newest_at.clear()

    def _check_place(self, request: Hashable, tokens: int) -> None:
        page = tokens // self._size
        if request in self and tokens % self._size and self.newest_at.get(request) != page:
            raise SlotError(
                f"request {request!r} goes on after {tokens} tokens, in a page that its newest device page does not "
                "hold; call map_newest for it and swap in the rows that it names. Nothing was taken"
            )

    def _drop(self, request: Hashable) -> None:
        super()._drop(request)
        self.newest_at.pop(request, None)


class HostSlots(HeldPages):
    """Host pages of requests, a slot a token in the order of its tokens."""

    def __init__(self, inner: Allocator, table: torch.Tensor) -> None:
        super().__init__("the host slots", inner, table)

    def tokens(self, request: Hashable) -> int:
        """Return the tokens for which a request has host slots."""
        return min(self.count(request) * self._size, int(self.table.shape[1]))

    def slots(self, request: Hashable, start: int, end: int) -> torch.Tensor:
        """Return the host slots of the tokens ``start … end`` of a request, ``[n]`` int64.

        Raises:
            SlotError: it reserved fewer.
        """
        self.require(request, end)
        (first, last) = lengths.on_host([start, end], "start and end").tolist()
        if not 0 <= first <= last:
            raise SlotError(f"request {request!r} has no tokens {first} … {last}")
        return self.table[self._rows[request], first:last].long() if last else self.table.new_zeros(0).long()

    def require(self, request: Hashable, tokens: int) -> None:
        """Verify that a request has host slots for its first `tokens` tokens.

        Raises:
            SlotError: it has not.
        """
        if tokens > self.tokens(request):
            raise SlotError(
                f"request {request!r} has host slots for {self.tokens(request)} tokens, not for {tokens}; "
                f"reserve_host({request!r}, {tokens}) or more (its prompt and all that it may write) first"
            )
