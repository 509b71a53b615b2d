"""State slots: which request, or whose prefix cache, holds each; all of it on the host."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.allocators.debug import ThreadGuard
from kvdock.allocators.lengths import whole_count
from kvdock.allocators.ring import Journal
from kvdock.errors import BuildError, SlotError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvdock.abilities import KeepsStates


class Donated(NamedTuple):
    """The owner of a slot that a request left to a prefix cache."""

    request: Hashable


@dataclasses.dataclass(slots=True)
class DueStates:
    """What is to be done with state slots before their first use, in one pool: the copies, and then the clears.

    Whoever did a part empties it (`dict.clear`), as `make_ready` does; what failed stays due.
    """

    copies: dict[int, int] = dataclasses.field(default_factory=dict)
    """Source of each target. All of it is one copy whose reads come first: a source may be a target as well."""
    fresh: dict[int, None] = dataclasses.field(default_factory=dict)
    """Slots that were handed out and that nothing fills."""

    def make_ready(self, pool: KeepsStates, on_device: Callable[[Sequence[int]], torch.Tensor]) -> None:
        """Do it: at most one copy and one clear. What was done is not done again: a source may be a target, too."""
        if self.copies:
            pool.copy_slots(on_device(list(self.copies.values())), on_device(list(self.copies)))
            self.copies.clear()
        if self.fresh:
            pool.clear_slots(on_device(list(self.fresh)))
            self.fresh.clear()

    def fill(self, target: int, source: int) -> int:
        """Note that a slot is filled from another, and return which: what is still to be filled, from where that is."""
        source = self.copies.get(source, source)
        self.copies[target] = source
        self.fresh.pop(target, None)
        return source

    def drop(self, slots: Sequence[int]) -> None:
        """Note that nothing is to be done with slots: they went back, or are filled from elsewhere."""
        for slot in slots:
            self.copies.pop(slot, None)
            self.fresh.pop(slot, None)

    def copy(self) -> DueStates:
        """Return the same for another pool."""
        return DueStates(dict(self.copies), dict(self.fresh))


class StateSlots:
    """Slots ``1 … size`` of per-request states, handed out in turn, so a freed slot rests as long as possible.

    Slot 0 is padding and never handed out. `ring` is the declared host tensor of free slots; it may be longer
    than `size` (after a resize). A call that cannot be served returns ``None`` and changes nothing; alloc and
    free cost what they hand over. Every live slot has an owner, so a double free is refused in every mode;
    with `debug` its last owner is named, and calls from a second thread are refused.
    """

    def __init__(self, name: str, ring: NDArray[np.int64], size: int, debug: bool = False) -> None:
        self.name = name
        self._ring = ring
        self._journal = Journal(name)
        self._guard = ThreadGuard(name) if debug else None
        self._owners: dict[int, Hashable] = {}
        self._last: dict[int, Hashable] | None = {} if debug else None
        self._head = 0
        self._free = self.size = size
        self._reset(size)

    def alloc(self, owners: Sequence[Hashable]) -> list[int] | None:
        """Return a slot for each of `owners` (one who needs several is named as often), or ``None``."""
        self._enter()
        if len(owners) > self._free:
            return None
        slots = [int(self._ring[(self._head + i) % self.size]) for i in range(len(owners))]
        self._head = (self._head + len(slots)) % self.size
        self._free -= len(slots)
        self._journal.position += len(slots)
        self._owners.update(zip(slots, owners, strict=True))
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give back slots.

        Raises:
            SlotError: names those that nobody holds, or that are named twice; nothing changes.
        """
        self._enter()
        self._verify(slots, "freed")
        tail = self._head + self._free
        for i, slot in enumerate(slots):
            self._ring[(tail + i) % self.size] = slot
            self._forget(slot)
        self._free += len(slots)
        if slots:
            self._journal.freed()

    def pass_on(self, slots: Sequence[int], owner: Hashable) -> None:
        """Note that live slots have another owner from now on.

        Raises:
            SlotError: names those that nobody holds, or that are named twice; nothing changes.
        """
        self._enter()
        self._verify(slots, "passed on")
        self._owners.update(dict.fromkeys(slots, owner))

    def owner_of(self, slot: int) -> Hashable | None:
        """Return who holds a slot, or ``None``."""
        return self._owners.get(slot)

    def live_slots(self) -> dict[int, Hashable]:
        """Return the owner of each slot that is handed out, by slot."""
        return dict(self._owners)

    def available_size(self) -> int:
        """Return the slots that can still be handed out."""
        self._enter()
        return self._free

    def backup_state(self) -> Any:
        """Return a token of the present allocations; O(1)."""
        self._enter()
        return self._journal.mark()

    def restore_state(self, state: Any) -> None:
        """Take back every slot handed out since `state`.

        Raises:
            SlotError: something was freed since, or the token is another's; nothing changes.
        """
        self._enter()
        taken = self._journal.rewind(state)
        self._head = (self._head - taken) % self.size
        self._free += taken
        for i in range(taken):
            self._forget(int(self._ring[(self._head + i) % self.size]))

    def clear(self) -> None:
        """Make every slot free again."""
        self._enter()
        self._reset(self.size)

    def resize(self, size: int) -> None:
        """Change the usable slots within what was allocated.

        Raises:
            SlotError: slots are live, or the size is not from 1 to what was allocated; nothing changes.
        """
        self._enter()
        size = whole_count(size, f"{self.name}: size")
        if self._owners:
            raise SlotError(f"{self.name}: {len(self._owners)} slots are live; free them before a resize")
        if not 1 <= size <= len(self._ring):
            raise SlotError(f"{self.name}: size {size} is outside 1 … {len(self._ring)}, which is what was allocated")
        self._reset(size)

    def check(self, held: Sequence[int] | None = None) -> None:
        """Verify that free and live slots add up, and that exactly the slots `held` are live if given; O(size).

        Raises:
            SlotError: names the slots, and the owners of those that leaked.
        """
        self._enter()
        free = [int(self._ring[(self._head + i) % self.size]) for i in range(self._free)]
        times = Counter([*free, *self._owners])
        if twice := sorted(slot for slot, count in times.items() if count > 1):
            raise SlotError(f"{self.name}: slots {shown(twice)} are free twice, or free and held")
        known = set(range(1, self.size + 1))
        if wrong := sorted(known ^ set(times)):
            raise SlotError(f"{self.name}: slots {shown(wrong)} are lost (neither free nor held), or do not exist")
        if held is None:
            return
        if unknown := sorted(set(held) - known):
            raise SlotError(f"{self.name}: slots {shown(unknown)} are held but do not exist; there are 1 … {self.size}")
        if leaked := sorted(self._owners.keys() - set(held)):
            raise SlotError(
                f"{self.name}: slots {shown(leaked)}{self._named(leaked)} are live but held by nobody (leaked)"
            )
        if lost := sorted(set(held) - self._owners.keys()):
            raise SlotError(f"{self.name}: slots {shown(lost)}{self._named(lost)} are held but free")

    def _verify(self, slots: Sequence[int], action: str) -> None:
        unheld = [slot for slot in slots if slot not in self._owners]
        if unheld:
            last = self._last or {}
            what = "freed twice" if all(slot in last for slot in unheld) else f"not handed out but {action}"
            raise SlotError(f"{self.name}: slots {shown(unheld)}{self._named(unheld)} are {what}; nothing was changed")
        if len(set(slots)) != len(slots):
            twice = sorted(slot for slot, count in Counter(slots).items() if count > 1)
            raise SlotError(f"{self.name}: slots {shown(twice)}{self._named(twice)} appear twice in one call")

    def _named(self, slots: Sequence[int]) -> str:
        """Return whose slots these are or, with debug, were: `` (of request 'a')``, or an empty string."""
        known = {**(self._last or {}), **self._owners}
        names = dict.fromkeys(_named(known[slot]) for slot in slots if slot in known)
        return f" ({', '.join(names)})" if names else ""

    def _forget(self, slot: int) -> None:
        owner = self._owners.pop(slot)
        if self._last is not None:
            self._last[slot] = owner

    def _reset(self, size: int) -> None:
        if not 1 <= size <= len(self._ring):
            raise BuildError(
                f"{self.name}: {size} slots do not fit a ring of {len(self._ring)}; build with the plan's sizes"
            )
        self.size = size
        self._ring[:size] = range(1, size + 1)
        self._head = 0
        self._free = size
        self._owners.clear()
        self._journal.freed()

    def _enter(self) -> None:
        if self._guard is not None:
            self._guard.enter()


def shown(slots: Sequence[int]) -> str:
    """Return slots for a message, the first eight of many."""
    return str(list(slots)) if len(slots) <= 8 else f"{list(slots[:8])} … ({len(slots)} in all)"


def _named(owner: Hashable) -> str:
    return f"left by request {owner.request!r}" if isinstance(owner, Donated) else f"of request {owner!r}"
