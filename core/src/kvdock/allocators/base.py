"""The promises of every allocator of token slots."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvdock.allocators import lengths
from kvdock.layout import Buffer
from kvdock.planned import Parts, Planned
from kvdock.queries import AllocatorQuery

if TYPE_CHECKING:
    import torch


Undo = Callable[[], None]
"""Brings an allocator, or a part of one, back to where it was."""


class Together:
    """Lets what allocators give back in a ``with`` block be given back by all of them, or after any error by none."""

    __slots__ = ("_undo",)

    def __init__(self, *parts: Allocator) -> None:
        self._undo = [part.checkpoint() for part in parts]

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, *_: object) -> None:
        """Undo all of it where an error ends the block."""
        if kind is not None:
            for undo in self._undo:
                undo()


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """What an allocation lacked: per space the slots asked for, available and missing (whole pages).

    In unified memory another space may give back bytes instead: `givers` names each that could do so alone, with its
    slots. `held_by` names what forbids to move pages, where that alone is in the way.
    """

    space: str
    needed: int
    available: int
    givers: tuple[tuple[str, int], ...] = ()
    held_by: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        """Slots that must be freed in this space before the same call succeeds."""
        return max(0, self.needed - self.available)

    @property
    def advice(self) -> str:
        """What would let the same call succeed, in words."""
        if self.held_by:
            return f"space {self.space!r} has room once pages may move again, which {', '.join(self.held_by)} forbids"
        others = "".join(f", or space {name!r} must give {slots}" for name, slots in self.givers)
        return f"space {self.space!r} must give {self.missing} slots{others}"


class Allocator(Planned, abc.ABC):
    """Hands out and takes back slots of a space, or of several spaces in step.

    * Atomic: a call that cannot be served returns ``None`` and changes nothing, in every part.
    * O(k): alloc and free cost what they hand over, whatever the capacity.
    * Counts come from the host (`*_cpu`, lists, ints); no call but `free` waits for the device.
    * ``free + live == capacity`` (`check`); slot 0 (page 0) is padding and never handed out.
    * Returned slots are of `slot_dtype`, on the allocator's device, and share no storage with it.
    * Owned by one thread; nothing locks.

    With ``debug`` a double free, a free of a slot never handed out and a call from another thread raise
    `SlotError` at once, naming the slots; without it a free of more than is live raises, the rest is
    undefined, and `available_size` still never exceeds the capacity.
    """

    slot_dtype: str = "int64"
    """Integer type of the slots that are handed out; page numbers are int64 whatever it is."""
    page_size: int
    """Tokens of one page; 1 for token allocators."""
    size: int
    """Usable slots (of the space that requests are numbered in)."""

    def __init__(self, query: AllocatorQuery, parts: Parts) -> None:
        self.query = query
        self.parts = parts

    @classmethod
    @abc.abstractmethod
    def buffers(cls, query: AllocatorQuery) -> tuple[Buffer, ...]:
        """Declare free rings, bitmaps and maps; no torch."""

    @abc.abstractmethod
    def alloc(self, need_size: int, owner: Any = None) -> torch.Tensor | None:
        """Return `need_size` slots ``[need_size]`` (whole pages), or ``None`` if there are not enough."""

    def alloc_pages(self, count: int, owners: Sequence[Any] | None = None) -> torch.Tensor | None:
        """Return `count` page numbers ``[count]``, int64, or ``None`` if there are not enough.

        `owners` names a holder of each page for debug messages. Here pages come by way of `alloc`, without
        owners; a class that keeps pages hands them out bare.
        """
        slots = self.alloc(lengths.whole_count(count, "count") * self.page_size)
        if slots is None:
            return None
        return lengths.pages_of_slots(slots[:: self.page_size], self.page_size).long()

    @abc.abstractmethod
    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Sequence[int] | torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return slots for the tokens ``prefix … seq`` of each request, ``[extend_num_tokens]``.

        A request's last page is filled from `last_loc` (the slot of its last token, −1 without one) first,
        then whole pages follow, then a partial one; a request's slots are consecutive inside a page.
        """

    @abc.abstractmethod
    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int] | torch.Tensor,
        last_loc: torch.Tensor,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return one slot a request, ``[batch]``; `seq_lens` count the new token.

        A new page is taken exactly when ``(seq_len - 1) % page_size == 0``.
        """

    @abc.abstractmethod
    def free(self, indices: torch.Tensor) -> None:
        """Give back slots. Any slot of a page gives back the whole page, once. May wait for the device once."""

    @abc.abstractmethod
    def free_pages(self, pages: torch.Tensor) -> None:
        """Give back pages by number ``[n]``; each at most once."""

    @abc.abstractmethod
    def free_rows(self, table: torch.Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Give back the tokens ``starts[i] … ends[i]`` of request rows of `table` ``[rows, columns]``.

        A page of which any token is in the range goes back whole, so `starts` are page bounds unless the
        caller gives up the rest of the page as well. Never waits for the device.
        """

    def verify_pages(self, pages: torch.Tensor) -> None:
        """Raise what `free_pages` would raise for `pages`, as far as this class can tell, and change nothing."""
        return

    def verify_slots(self, indices: torch.Tensor) -> None:
        """With debug, raise what `free` would raise for `indices`, as far as this class can tell."""
        return

    def verify_live(self, slots: torch.Tensor) -> None:
        """With debug, verify that `slots` may be written (handed out, or padding), as far as this class can tell.

        What waits in a free group may not be written any more.
        """
        return

    def verify_gone(self, slots: torch.Tensor, request: Any) -> None:
        """With debug, verify that what tokens of `request` give back early is not live, as far as this class can tell.

        `slots` are those of whole pages of such tokens.
        """
        return

    def verify_growth(
        self, growth: lengths.Growth, on_device: Mapping[str, torch.Tensor], owners: Sequence[Any] | None = None
    ) -> None:
        """Raise what an extend or decode would raise for its device tensors, by name, and change nothing.

        Raises:
            SlotError: another number of requests than the host's; with debug, what else this class can tell.
        """
        lengths.check_batch(len(growth.seq), owners, **on_device)

    def live_pages(self) -> list[int] | None:
        """Return the pages that are handed out, ascending, or ``None`` where a class cannot tell; slow, for checks."""
        return None

    @abc.abstractmethod
    def available_size(self) -> int:
        """Return the slots that an `alloc` could hand out now, in whole pages."""

    @abc.abstractmethod
    def pages_needed(self, prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
        """Return the exact new pages for requests that grow from `prefix_lens` to `seq_lens` tokens.

        From numbers alone: it reads nothing of the allocator, so any thread may ask.
        """

    @abc.abstractmethod
    def shortfall(self, pages: int) -> tuple[Shortfall, ...]:
        """Say what each space lacks to hand out `pages` pages; empty when it would succeed."""

    @abc.abstractmethod
    def free_group_begin(self) -> None:
        """Collect the frees that follow; physical pages are recorded as they are queued."""

    @abc.abstractmethod
    def free_group_end(self) -> None:
        """Give back everything collected since `free_group_begin`."""

    @abc.abstractmethod
    def backup_state(self) -> Any:
        """Return a small token for `restore_state`; O(1)."""

    @abc.abstractmethod
    def restore_state(self, state: Any) -> None:
        """Take back every allocation since `backup_state`, in O(1).

        Raises:
            SlotError: something was freed since, or the token is another allocator's; nothing changes.
        """

    @abc.abstractmethod
    def checkpoint(self) -> Undo:
        """Return what undoes every free, restore and end of a free group since now; O(1).

        For whoever drives several allocators as one, where another of them fails. Good while nothing is handed out
        since, and only at once: states for `restore_state` from before may stay void.
        """

    @abc.abstractmethod
    def clear(self) -> None:
        """Make every slot free again."""

    @abc.abstractmethod
    def resize(self, sizes: dict[str, int]) -> None:
        """Change the capacity within what was allocated; only while nothing is handed out.

        Raises:
            SlotError: slots are live, a free group is open, or a size is no whole number or exceeds the buffers;
                nothing changes.
        """

    @abc.abstractmethod
    def check(self, held: torch.Tensor | None = None) -> None:
        """Verify conservation, and that exactly the slots `held` are live when given; may be slow.

        A page is held if any of its slots is named, so one slot a page will do, and all slots do as well; each
        at most once. What an open free group holds may be among them or not: it is nobody's, and not free yet.

        Raises:
            SlotError: names the slots that leaked, are free twice, are held but free, do not exist, or are named
                twice; `held` is no tensor of whole numbers.
        """
