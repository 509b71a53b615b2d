"""Debug mode: who owns which page, kept on the host beside any allocator.

One `Ledger` serves every class. It reads slots back from the device, so it is slow, and exact: a call
that it refuses has changed nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdock.allocators.lengths import Growth, on_host, require_integers
from kvdock.allocators.lengths import to_host as _to_host
from kvdock.errors import SlotError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvdock.allocators.base import Undo
    from kvdock.requests.base import RequestPool

    Ints = NDArray[np.int64]

_NEVER, _LIVE, _QUEUED, _FREED = range(4)
_SHOWN = 8
"""Slots that a message lists before it stops."""


class ThreadGuard:
    """Refuses calls from any thread but the one that made the first call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: int | None = None

    def enter(self) -> None:
        """Note a call.

        Raises:
            SlotError: another thread called before.
        """
        caller = threading.get_ident()
        if self._thread is None:
            self._thread = caller
        if caller != self._thread:
            raise SlotError(
                f"{self.name} is owned by thread {self._thread} but called from thread {caller} "
                f"({threading.current_thread().name}); nothing locks, so call it from one thread"
            )


class Ledger:
    """Live pages and their owners; finds double frees, foreign slots and repeats inside a call."""

    def __init__(self, name: str, page_size: int, capacity: int, request_pool: RequestPool | None = None) -> None:
        self.guard = ThreadGuard(name)
        self.name = name
        self._request_pool = request_pool
        self.page_size = page_size
        self.reset(capacity)

    def reset(self, capacity: int) -> None:
        """Forget everything; pages ``1 … capacity`` exist and were never handed out."""
        import numpy as np

        self._changes: list[tuple[Ints, Any, set[int], set[int]]] = []
        self._state = np.full(capacity + 1, _NEVER, dtype=np.int8)
        self._owners: dict[int, Any] = {}
        self._queued_slots: set[int] = set()

    def take(self, pages: torch.Tensor, owners: Sequence[Any] | None) -> None:
        """Note pages that were handed out, with an owner each if known."""
        numbers = _to_host(pages)
        self._changes.clear()
        self._state[numbers] = _LIVE
        for i, page in enumerate(numbers.tolist()):
            self._owners[page] = None if owners is None else owners[i]

    def verify(self, pages: torch.Tensor) -> None:
        """Verify that `pages` can be freed.

        Raises:
            SlotError: names those that are not live, or appear twice.
        """
        numbers = _to_host(pages)
        self._refuse_unknown(numbers)
        self._refuse(numbers[self._state[numbers] == _QUEUED], "are freed twice in one free group")
        self._refuse(_repeated(numbers), "appear twice in one call")

    def verify_slots(self, slots: torch.Tensor) -> None:
        """Verify that `slots` can be freed; slots of one page may come in several calls of a free group.

        Raises:
            SlotError: names those that are not live, or appear twice.
        """
        numbers = _to_host(slots)
        self._refuse_unknown(numbers // self.page_size)
        repeated = _repeated(numbers).tolist()
        if repeated:
            named = self.named(_pages(repeated, self.page_size))
            raise SlotError(f"{self.name}: slots {_shown(repeated)}{named} appear twice in one call; nothing was freed")
        again = sorted(self._queued_slots.intersection(numbers.tolist()))
        if again:
            named = self.named(_pages(again, self.page_size))
            raise SlotError(f"{self.name}: slots {_shown(again)}{named} are freed twice in one free group")

    def queue(self, numbers: Ints) -> None:
        """Note pages that a free group holds, with all their slots."""
        size = self.page_size
        slots = {slot for page in numbers.tolist() for slot in range(page * size, (page + 1) * size)}
        self._become(_QUEUED, numbers, slots - self._queued_slots)

    def queue_slots(self, numbers: Ints) -> None:
        """Note slots that a free group holds."""
        self._become(_QUEUED, numbers // self.page_size, set(numbers.tolist()) - self._queued_slots)

    def give(self, numbers: Ints) -> None:
        """Note pages that are free again; their last owners are remembered for messages."""
        self._become(_FREED, numbers, set())

    def checkpoint(self) -> Undo:
        """Return what undoes every change since now, while nothing is taken; owners are kept."""
        count = len(self._changes)

        def undo() -> None:
            while len(self._changes) > count:
                numbers, states, queued, left = self._changes.pop()
                self._state[numbers] = states
                self._queued_slots = (self._queued_slots - queued) | left

        return undo

    def close_group(self) -> None:
        """Note that the free group is over: what it held is free."""
        import numpy as np

        left, self._queued_slots = self._queued_slots, set()
        self._become(_FREED, np.flatnonzero(self._state == _QUEUED), set(), left)

    def _become(self, state: int, numbers: Ints, queued: set[int], left: set[int] | None = None) -> None:
        """Let pages have another state; slots are `queued` in a free group, or have `left` it."""
        self._changes.append((numbers, self._state[numbers], queued, left or set()))
        self._state[numbers] = state
        self._queued_slots |= queued

    def verify_live(self, slots: torch.Tensor) -> None:
        """Verify that `slots` may be written: live, or padding; what waits in a free group may not.

        Raises:
            SlotError: names those that are not.
        """
        pages = _to_host(slots) // self.page_size
        self._refuse_given(pages[pages != 0], "written")

    def verify_gone(self, slots: torch.Tensor, request: Any) -> None:
        """Verify that none of `slots` is live and was handed out for `request`.

        Raises:
            SlotError: names those that are.
        """
        live = set(self.live_pages().tolist())
        pages = dict.fromkeys((_to_host(slots) // self.page_size).tolist())
        left = [page for page in pages if page in live and self._owners.get(page) == request]
        if left:
            raise SlotError(
                f"{self.name}: request {request!r} says that the slots of pages from "
                f"{_shown([page * self.page_size for page in left])} were given back before, but they are still its "
                "own; give them back with evict. Nothing was changed"
            )

    def verify_growth(self, growth: Growth, on_device: Mapping[str, torch.Tensor]) -> None:
        """Verify that device lengths are the host's, and that last slots are live where a page goes on.

        Raises:
            SlotError: names what differs, or the slot.
        """
        for name, expected in (("prefix_lens", growth.prefix), ("seq_lens", growth.seq)):
            found = _to_host(on_device[name]) if name in on_device else expected
            if (found != expected).any():
                raise SlotError(
                    f"{self.name}: {name} holds {found.tolist()[:_SHOWN]} on the device, but the host says "
                    f"{expected.tolist()[:_SHOWN]}; nothing was taken"
                )
        used = growth.prefix % self.page_size
        last, used = _to_host(on_device["last_loc"])[used != 0], used[used != 0]
        pages = last // self.page_size
        self._refuse_given(pages, "continued as last_loc")
        wrong = last[last % self.page_size != used - 1]
        if len(wrong):
            raise SlotError(
                f"{self.name}: last_loc {_shown(wrong.tolist())}{self.named(wrong // self.page_size)} does not have "
                f"the place in its page of {self.page_size} that the length gives; nothing was taken"
            )

    def live_pages(self) -> Ints:
        """Return the pages that are handed out."""
        import numpy as np

        live: Ints = np.flatnonzero((self._state == _LIVE) | (self._state == _QUEUED))
        return live

    def _refuse_unknown(self, pages: Ints, action: str = "freed") -> None:
        outside = (pages < 1) | (pages >= len(self._state))
        self._refuse(pages[outside], f"were never handed out but are {action}")
        state = self._state[pages]
        self._refuse(pages[state == _NEVER], f"were never handed out but are {action}")
        what = "are freed twice" if action == "freed" else f"were freed but are {action}"
        self._refuse(pages[state == _FREED], what)

    def _refuse_given(self, pages: Ints, action: str) -> None:
        self._refuse_unknown(pages, action)
        self._refuse(pages[self._state[pages] == _QUEUED], f"were freed (they wait in a free group) but are {action}")

    def _refuse(self, pages: Ints, what: str) -> None:
        if not len(pages):
            return
        numbers = sorted(set(pages.tolist()))
        named = self.named(pages)
        slots = [page * self.page_size for page in numbers]
        unit = "slots" if self.page_size == 1 else f"pages of {self.page_size} slots from"
        raise SlotError(f"{self.name}: {unit} {_shown(slots)}{named} {what}; nothing was changed")

    def named(self, pages: Ints) -> str:
        """Return whose pages these are: in the rows of the request table now, or as their allocation said."""
        owners = {repr(self._owners[page]) for page in pages.tolist() if self._owners.get(page) is not None}
        owned = f" (owner {', '.join(sorted(owners))})" if owners else ""
        return owned or named_holders(self._request_pool, pages, self.page_size)


def held_pages(held: torch.Tensor, page_size: int, capacity: int, name: str) -> Ints:
    """Return the pages of the slots that a check is told to be held, each once; `name` says of which allocator.

    Raises:
        SlotError: no tensor of whole numbers, a slot that is named twice, is padding or does not exist.
    """
    import numpy as np

    require_integers("held", held)
    numbers = _to_host(held)
    if len(twice := _repeated(numbers)):
        raise SlotError(f"{name}: held names slots {_shown(twice.tolist())} more than once; give each slot once")
    pages = np.unique(numbers // page_size)
    if len(outside := numbers[(numbers < page_size) | (numbers >= (capacity + 1) * page_size)]):
        raise SlotError(
            f"{name}: held names slots {_shown(outside.tolist())}, which are padding or do not exist; there are "
            f"{page_size} … {(capacity + 1) * page_size - 1}"
        )
    return pages


def held_states(held: Iterable[int] | torch.Tensor) -> list[int]:
    """Return the state slots that a check is told to be held.

    Raises:
        SlotError: no whole numbers, or one that is named twice.
    """
    import torch

    if isinstance(held, torch.Tensor):
        require_integers("held_states", held)
        numbers = _to_host(held)
    else:
        numbers = on_host(list(held), "held_states")
    if len(twice := _repeated(numbers)):
        raise SlotError(f"held_states names {_shown(twice.tolist())} more than once; give each slot once")
    found: list[int] = numbers.tolist()
    return found


def named_holders(pool: RequestPool | None, pages: Ints, page_size: int, besides: Any = None) -> str:
    """Return `` (of request 'a')`` for the live requests, but for `besides`, whose rows hold `pages`; else an empty string.

    Reads the rows back from the device, so it is for messages alone.
    """
    import numpy as np

    if pool is None or not len(pages):
        return ""
    found = [
        repr(request)
        for row, request in pool.live_rows().items()
        if request != besides
        and np.isin(_to_host(pool.req_to_token[row, : int(pool.lengths[row])]) // page_size, pages).any()
    ]
    return f" (of request {', '.join(found)})" if found else ""


def _pages(slots: Sequence[int], page_size: int) -> Ints:
    import numpy as np

    return np.asarray(slots, dtype=np.int64) // page_size


def _repeated(numbers: Ints) -> Ints:
    import numpy as np

    values, counts = np.unique(numbers, return_counts=True)
    return values[counts > 1]


def _shown(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:_SHOWN])
    return shown if len(numbers) <= _SHOWN else f"{shown} … ({len(numbers)} in all)"
