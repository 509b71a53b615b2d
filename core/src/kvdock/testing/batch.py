"""Requests beside an allocator: what each owns is kept a second time, and compared."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kvdock.allocators.base import Allocator


class Batch:
    """Requests and the slots that they own, beside an allocator."""

    def __init__(self, allocator: Allocator, rng: random.Random) -> None:
        self.allocator = allocator
        self.rng = rng
        self.requests: dict[int, list[int]] = {}
        self._next = 0

    def grow(self, requests: int, tokens: int) -> int:
        """Begin `requests` requests of `tokens` tokens; return the last."""
        for _ in range(requests):
            slots = allocated(self.try_extend([(0, tokens)]))
            self._next += 1
            self.requests[self._next] = slots
        return self._next

    def extend(self, request: int, tokens: int) -> None:
        """Give a request `tokens` more."""
        owned = self.requests[request]
        owned += allocated(self.try_extend([(len(owned), len(owned) + tokens)], [owned[-1]]))

    def decode(self) -> None:
        """Give every request one token."""
        for slots, slot in zip(self.requests.values(), allocated(self.try_decode()), strict=True):
            slots.append(slot)

    def extend_all(self, grown: dict[int, int]) -> None:
        """Let every request grow to so many tokens, in one call."""
        spans = [(len(self.requests[request]), length) for request, length in grown.items()]
        last = [self.requests[request][-1] if self.requests[request] else -1 for request in grown]
        slots = allocated(self.try_extend(spans, last))
        for request, (start, end) in zip(grown, spans, strict=True):
            self.requests[request] += slots[: end - start]
            del slots[: end - start]
        assert not slots

    def contradictions(self) -> dict[str, Callable[[], object]]:
        """Return calls that must be refused, whatever is held, by what is wrong with them."""
        allocator, page = self.allocator, self.allocator.page_size
        one = slots_of([1], allocator)
        table = one.new_zeros(2, page)
        calls: dict[str, Callable[[], object]] = {
            "an alloc of fewer than no slots": lambda: allocator.alloc(-page),
            "an extend to fewer tokens": lambda: allocator.alloc_extend(one * 2, [2], one, [1], one, -1),
            "an extend of 1 token that is told 2": lambda: allocator.alloc_extend(one * 0, [0], one, [1], -one, 2),
            "an extend without a last slot": lambda: allocator.alloc_extend(one * 0, [0], one, [1], one[:0], 1),
            "an alloc to an owner that cannot be hashed": lambda: allocator.alloc(page, owner=["a"]),
            "an extend to such an owner": lambda: allocator.alloc_extend(
                one * 0, [0], one, [1], -one, 1, owners=[["a"]]
            ),
            "a decode to such an owner": lambda: allocator.alloc_decode(one, [1], -one, owners=[["a"]]),
            "a decode to no tokens": lambda: allocator.alloc_decode(one * 0, [0], one),
            "a decode without a last slot": lambda: allocator.alloc_decode(one, [1], one[:0]),
            "free_rows of a row that is not there": lambda: allocator.free_rows(table, [2], [0], [page]),
            "free_rows beyond the last column": lambda: allocator.free_rows(table, [1], [0], [page + 1]),
            "free_rows from 1 to 0": lambda: allocator.free_rows(table, [1], [1], [0]),
            "restore_state of another's token": lambda: allocator.restore_state(object()),
            "a resize of a space that is not there": lambda: allocator.resize({"no such space": page}),
            "a resize of no space": lambda: allocator.resize({}),
            "free_group_end without a beginning": allocator.free_group_end,
        }
        return calls if page == 1 else calls | {"an alloc of a page and a slot": lambda: allocator.alloc(page + 1)}

    def few_calls(self, held: torch.Tensor) -> dict[str, Callable[[], object]]:
        """Return calls of a few pages, to be made in order; they give back `held`, four pages."""
        allocator, page = self.allocator, self.allocator.page_size
        table = held.view(1, -1)

        def take_and_restore() -> None:
            state = allocator.backup_state()
            allocator.alloc(page)
            allocator.restore_state(state)

        def free_in_a_group() -> None:
            allocator.free_group_begin()
            allocator.free(held[3 * page :])
            allocator.free_group_end()

        return {
            "alloc_extend": lambda: self.grow(2, page + 1),
            "alloc_decode": self.decode,
            "restore_state": take_and_restore,
            "free_pages": lambda: allocator.free_pages(held[:page:page] // page),
            "free": lambda: allocator.free(held[page : 2 * page]),
            "free_rows": lambda: allocator.free_rows(table, [0], [2 * page], [3 * page]),
            "free_group_end": free_in_a_group,
        }

    def try_extend(self, spans: list[tuple[int, int]], last: list[int] | None = None) -> torch.Tensor | None:
        """Ask for the tokens of `spans`; ``None`` if they are not there."""
        prefix, seq = [start for start, _ in spans], [end for _, end in spans]
        total = sum(seq) - sum(prefix)
        return self.allocator.alloc_extend(
            slots_of(prefix, self.allocator),
            prefix,
            slots_of(seq, self.allocator),
            seq,
            slots_of(last or [-1] * len(spans), self.allocator),
            total,
        )

    def try_decode(self) -> torch.Tensor | None:
        """Ask for one token a request; ``None`` if they are not there."""
        lens = [len(slots) + 1 for slots in self.requests.values()]
        last = [slots[-1] for slots in self.requests.values()]
        return self.allocator.alloc_decode(slots_of(lens, self.allocator), lens, slots_of(last, self.allocator))

    def step(self) -> None:
        """Begin, grow, decode or end requests, at random; what does not fit is left."""
        choice = self.rng.randrange(4)
        tokens = self.rng.randint(1, 3 * self.allocator.page_size)
        if choice == 0 or not self.requests:
            self._begin(tokens)
        elif choice == 1:
            self._extend_one(tokens)
        elif choice == 2:
            self._decode_all()
        else:
            self.end(self.rng.choice(sorted(self.requests)))

    def _begin(self, tokens: int) -> None:
        slots = self.try_extend([(0, tokens)])
        if slots is not None:
            self._next += 1
            self.requests[self._next] = slots.tolist()

    def _extend_one(self, tokens: int) -> None:
        owned = self.requests[self.rng.choice(sorted(self.requests))]
        slots = self.try_extend([(len(owned), len(owned) + tokens)], [owned[-1]])
        owned += [] if slots is None else slots.tolist()

    def _decode_all(self) -> None:
        found = self.try_decode()
        if found is not None:
            for slots, slot in zip(self.requests.values(), found.tolist(), strict=True):
                slots.append(slot)

    def end(self, request: int) -> None:
        """Free all of a request."""
        self.allocator.free(slots_of(self.requests.pop(request), self.allocator))

    def free_all(self) -> None:
        """Free every request."""
        for request in sorted(self.requests):
            self.end(request)

    def check(self) -> None:
        """Every slot has one owner, pages belong to one request, token by token, and free and live add up."""
        page = self.allocator.page_size
        owners: dict[int, int] = {}
        for request, slots in self.requests.items():
            for place, slot in enumerate(slots):
                assert slot >= page, f"request {request} owns padding slot {slot}"
                assert owners.setdefault(slot // page, request) == request, f"page {slot // page} has two owners"
                expected = slot // page * page if place % page == 0 else slots[place - 1] + 1
                assert slot == expected, f"token {place} of request {request} is in slot {slot}, not {expected}"
            assert len(set(slots)) == len(slots)
        assert self.allocator.available_size() + len(owners) * page == self.allocator.size
        self.allocator.check(held=slots_of([s for slots in self.requests.values() for s in slots], self.allocator))


def slots_of(values: list[int], allocator: Allocator | None = None) -> torch.Tensor:
    """Return slots as int64, on the allocator's device where one is given."""
    import torch

    device = allocator.parts.device if allocator is not None else None
    return torch.tensor(values, dtype=torch.int64, device=device)


def allocated(slots: torch.Tensor | None) -> list[int]:
    """Return the slots of an allocation that has to succeed."""
    found: list[int] = allocated_tensor(slots).tolist()
    return found


def allocated_tensor(slots: torch.Tensor | None) -> torch.Tensor:
    """Return the same as the tensor that it is."""
    assert slots is not None, "the allocation failed although there is room"
    return slots
