"""What every allocator of one space promises, as tests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, ClassVar

import pytest

from kvdock.builder import build
from kvdock.errors import SlotError
from kvdock.testing.suite_base import Suite

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kvdock.allocators.base import Allocator
    from kvdock.cache import KVCache
    from kvdock.planner import CachePlan


class AllocatorSuite(Suite):
    """The promises of an allocator of one space, and of several in step that have equally many slots."""

    allocator_cls: ClassVar[type[Allocator]]

    @pytest.fixture
    def allocator(self, cache: KVCache) -> Allocator:
        """Give the allocator under test."""
        found = cache.token_to_kv_pool_allocator
        assert type(found) is self.allocator_cls, cache.plan.explain()
        return found

    @pytest.fixture
    def batch(self, allocator: Allocator, seed: int) -> Batch:
        """Give random requests, grown and freed through the allocator."""
        return Batch(allocator, random.Random(seed))

    @pytest.fixture
    def debugged(self, plan: CachePlan) -> Allocator:
        """Give the same allocator, built with debug."""
        pytest.importorskip("torch")
        return build(plan, device=self.torch_device, debug=True).token_to_kv_pool_allocator

    def test_everything_is_free_at_first(self, plan: CachePlan, allocator: Allocator) -> None:
        """A fresh allocator has what the plan says, in whole pages."""
        assert allocator.available_size() == allocator.size == plan.max_total_num_tokens
        assert allocator.size % allocator.page_size == 0
        allocator.check(held=_slots([]))

    def test_all_of_it_can_be_handed_out_once(self, allocator: Allocator) -> None:
        """Every usable slot is handed out exactly once, and padding never."""
        page = allocator.page_size
        slots = _allocated(allocator.alloc(allocator.size))
        assert sorted(slots) == list(range(page, allocator.size + page))
        assert allocator.available_size() == 0
        assert allocator.alloc(page) is None

    def test_slots_of_a_page_are_consecutive(self, allocator: Allocator) -> None:
        """Slots come in the class's type, page by page, each page in order."""
        import torch

        page = allocator.page_size
        found = allocator.alloc(3 * page)
        assert found is not None
        assert found.dtype == getattr(torch, allocator.slot_dtype)
        for start in range(0, 3 * page, page):
            first = int(found[start])
            assert first % page == 0
            assert found[start : start + page].tolist() == list(range(first, first + page))

    def test_a_call_that_cannot_be_served_changes_nothing(self, batch: Batch) -> None:
        """Alloc, extend and decode answer ``None`` when a page is missing, and nothing is lost."""
        allocator, page = batch.allocator, batch.allocator.page_size
        batch.grow(1, page)
        free = allocator.available_size()
        assert allocator.alloc(free + page) is None
        assert batch.try_extend([(0, free + 1)]) is None
        rest = allocator.alloc(free)
        assert rest is not None
        assert batch.try_decode() is None
        assert allocator.available_size() == 0
        allocator.free(rest)
        assert allocator.available_size() == free
        batch.check()

    def test_a_refused_call_changes_nothing(self, batch: Batch) -> None:
        """Calls that contradict themselves raise `SlotError` before anything is taken or given back."""
        batch.grow(2, batch.allocator.page_size)
        free, state = batch.allocator.available_size(), batch.allocator.backup_state()
        for call in batch.contradictions():
            with pytest.raises(SlotError):
                call()
            assert batch.allocator.available_size() == free
            batch.check()
        batch.allocator.restore_state(state)
        batch.check()

    def test_extends_equal_a_loop_over_the_tokens(self, batch: Batch) -> None:
        """Short and empty extends, and those over a bound, are laid out token by token, with just the pages they need."""
        page = batch.allocator.page_size
        spans = [(0, 0), (0, 1), (page - 1, page + 1), (page, page), (page, page), (page + 1, 3 * page), (0, 2 * page)]
        for prefix, _ in spans:
            batch.grow(1, prefix)
        grown = dict(zip(batch.requests, [seq for _, seq in spans], strict=True))
        needed = batch.allocator.pages_needed([prefix for prefix, _ in spans], list(grown.values()))
        spare = batch.allocator.alloc(batch.allocator.available_size() - needed * page)
        batch.extend_all(grown)
        assert batch.allocator.available_size() == 0
        batch.allocator.free(_allocated_tensor(spare))
        batch.check()

    def test_extend_fills_the_last_page_first(self, batch: Batch) -> None:
        """A request of half a page grows to a page and a half: its own page first, then one new page."""
        page = batch.allocator.page_size
        request = batch.grow(1, max(1, page // 2))
        before = batch.allocator.available_size()
        batch.extend(request, page + max(1, page // 2) - len(batch.requests[request]))
        slots = batch.requests[request]
        assert slots[:page] == list(range(slots[0], slots[0] + page))
        assert batch.allocator.available_size() == before - page
        batch.check()

    def test_decode_takes_a_page_exactly_at_the_bound(self, batch: Batch) -> None:
        """Over two pages of decoding, the free slots fall by a page whenever a page is full."""
        page = batch.allocator.page_size
        request = batch.grow(1, 1)
        for length in range(2, 2 * page + 2):
            before = batch.allocator.available_size()
            batch.decode()
            taken = before - batch.allocator.available_size()
            assert taken == (page if (length - 1) % page == 0 else 0)
            assert len(batch.requests[request]) == length
        batch.check()

    def test_any_token_gives_back_its_page_once(self, allocator: Allocator) -> None:
        """Freeing several tokens of one page gives back that page, not several."""
        page = allocator.page_size
        slots = allocator.alloc(2 * page)
        assert slots is not None
        allocator.free(slots[: max(1, page - 1)])
        assert allocator.available_size() == allocator.size - page
        allocator.check(held=slots[page:])

    def test_pages_and_rows_can_be_freed(self, allocator: Allocator) -> None:
        """`free_pages` and `free_rows` give back what `free` would."""
        import torch

        page = allocator.page_size
        slots = allocator.alloc(4 * page)
        assert slots is not None
        allocator.free_pages(slots[: 2 * page : page] // page)
        table = torch.zeros(2, 4 * page, dtype=torch.int32, device=slots.device)
        table[1] = slots.to(torch.int32)
        allocator.free_rows(table, [1], [2 * page], [3 * page])
        assert allocator.available_size() == allocator.size - page
        allocator.check(held=slots[3 * page :])

    def test_no_slot_has_two_owners(self, batch: Batch) -> None:
        """Random requests grow, decode and end; every slot has one owner and every page is accounted for."""
        for _ in range(150):
            batch.step()
            batch.check()
        batch.free_all()
        assert batch.allocator.available_size() == batch.allocator.size

    def test_needed_pages_are_exact(self, batch: Batch) -> None:
        """`pages_needed` is what an extend takes, and `shortfall` says what is missing for more."""
        allocator, page = batch.allocator, batch.allocator.page_size
        batch.grow(1, page + 1)
        assert allocator.pages_needed([0, page - 1, page], [1, page, page + 1]) == (3 if page == 1 else 2)
        pages = allocator.available_size() // page
        assert allocator.shortfall(pages) == ()
        lacking = allocator.shortfall(pages + 2)
        assert {lack.missing for lack in lacking} == {2 * page}

    def test_a_free_group_waits_for_its_end(self, allocator: Allocator) -> None:
        """Frees inside a group take effect together, and tokens of one page may come in several calls."""
        page = allocator.page_size
        slots = allocator.alloc(2 * page)
        assert slots is not None
        allocator.free_group_begin()
        for place in range(2 * page):
            allocator.free(slots[place : place + 1])
        assert allocator.available_size() == allocator.size - 2 * page
        allocator.free_group_end()
        assert allocator.available_size() == allocator.size
        allocator.check(held=_slots([]))

    def test_restore_takes_back_allocations(self, batch: Batch) -> None:
        """A restore undoes every allocation since the backup, and the same slots come again."""
        allocator, page = batch.allocator, batch.allocator.page_size
        batch.grow(2, page + 1)
        state, free = allocator.backup_state(), allocator.available_size()
        first = _allocated(allocator.alloc(2 * page))
        allocator.restore_state(state)
        assert allocator.available_size() == free
        batch.check()
        assert _allocated(allocator.alloc(2 * page)) == first

    def test_restore_after_a_free_is_refused(self, allocator: Allocator) -> None:
        """Once something was freed the token is void, and the refusal changes nothing."""
        page = allocator.page_size
        held = allocator.alloc(2 * page)
        assert held is not None
        state = allocator.backup_state()
        allocator.free(held[:page])
        free = allocator.available_size()
        with pytest.raises(SlotError):
            allocator.restore_state(state)
        assert allocator.available_size() == free
        allocator.check(held=held[page:])

    def test_restoring_an_older_state_voids_newer_ones(self, batch: Batch) -> None:
        """What was allocated between two states is gone with the older one, so the newer one means nothing."""
        allocator, page = batch.allocator, batch.allocator.page_size
        older = allocator.backup_state()
        assert allocator.alloc(page) is not None
        newer = allocator.backup_state()
        allocator.restore_state(older)
        with pytest.raises(SlotError):
            allocator.restore_state(newer)
        assert allocator.available_size() == allocator.size
        allocator.restore_state(older)
        batch.check()

    def test_nothing_waits_for_the_device(self, plan: CachePlan) -> None:
        """Calls with counts of the host run on the ``meta`` device, where no value can be read back."""
        pytest.importorskip("torch")
        allocator = build(plan, device="meta", debug=False).token_to_kv_pool_allocator
        page, batch = allocator.page_size, Batch(allocator, random.Random(0))
        slots = _allocated_tensor(allocator.alloc(6 * page))
        state = allocator.backup_state()
        assert batch.try_extend([(0, page + 1), (1, 2), (page, page)], [-1, page, page]) is not None
        allocator.restore_state(state)
        allocator.free_pages(slots[:page:page])
        allocator.free_group_begin()
        table = slots.view(2, 3 * page)
        allocator.free_rows(table, [0, 1], [page, 0], [2 * page, page])
        allocator.free_group_end()
        assert allocator.available_size() == allocator.size - 3 * page

    def test_with_debug_a_wrong_free_raises_at_once(self, debugged: Allocator) -> None:
        """Slots that are freed twice (in two calls or in one), free or padding are refused, and nothing changes."""
        page = debugged.page_size
        held, gone = _allocated_tensor(debugged.alloc(page)), _allocated_tensor(debugged.alloc(page))
        debugged.free(gone)
        padding = held[:1] * 0
        twice, unknown, outside = held[:1].repeat(2), padding + debugged.size, padding + 2 * debugged.size
        for slots in (gone, gone[:1], twice, unknown, outside, padding):
            with pytest.raises(SlotError):
                debugged.free(slots)
        for pages in (gone[:1] // page, twice // page, unknown // page, outside // page, padding):
            with pytest.raises(SlotError):
                debugged.free_pages(pages)
        assert debugged.available_size() == debugged.size - page
        debugged.check(held=held)

    def test_a_double_free_makes_no_room(self, allocator: Allocator) -> None:
        """Without debug a second free may go unnoticed, but never are more slots available than there are."""
        page = allocator.page_size
        slots = _allocated_tensor(allocator.alloc(page))
        for _ in range(3):
            try:
                allocator.free(slots)
            except SlotError:
                continue
        assert allocator.available_size() <= allocator.size

    def test_returned_slots_are_the_callers(self, batch: Batch) -> None:
        """Overwriting what was returned does not reach the allocator."""
        slots = batch.allocator.alloc(2 * batch.allocator.page_size)
        assert slots is not None
        kept = slots.clone()
        slots.zero_()
        batch.allocator.free(kept)
        batch.grow(1, 1)
        batch.check()

    def test_clear_frees_everything(self, batch: Batch) -> None:
        """After `clear` all slots are free and the allocator goes on."""
        batch.grow(3, batch.allocator.page_size)
        batch.allocator.clear()
        batch.requests.clear()
        batch.check()
        batch.grow(1, 1)
        batch.check()

    def test_resize_needs_an_empty_allocator(self, allocator: Allocator) -> None:
        """A smaller size holds at once; with live slots it is refused and nothing changes."""
        page, size = allocator.page_size, allocator.size
        space = allocator.query.spaces[0].name
        held = allocator.alloc(page)
        assert held is not None
        with pytest.raises(SlotError):
            allocator.resize({space: size - page})
        assert allocator.available_size() == size - page
        allocator.free(held)
        allocator.resize({space: size - page})
        assert allocator.available_size() == size - page
        with pytest.raises(SlotError):
            allocator.resize({space: size + page})
        assert allocator.available_size() == size - page


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
            slots = _allocated(self.try_extend([(0, tokens)]))
            self._next += 1
            self.requests[self._next] = slots
        return self._next

    def extend(self, request: int, tokens: int) -> None:
        """Give a request `tokens` more."""
        owned = self.requests[request]
        owned += _allocated(self.try_extend([(len(owned), len(owned) + tokens)], [owned[-1]]))

    def decode(self) -> None:
        """Give every request one token."""
        for slots, slot in zip(self.requests.values(), _allocated(self.try_decode()), strict=True):
            slots.append(slot)

    def extend_all(self, grown: dict[int, int]) -> None:
        """Let every request grow to so many tokens, in one call."""
        spans = [(len(self.requests[request]), length) for request, length in grown.items()]
        last = [self.requests[request][-1] if self.requests[request] else -1 for request in grown]
        slots = _allocated(self.try_extend(spans, last))
        for request, (start, end) in zip(grown, spans, strict=True):
            self.requests[request] += slots[: end - start]
            del slots[: end - start]
        assert not slots

    def contradictions(self) -> list[Callable[[], object]]:
        """Return calls that must be refused, whatever is held."""
        allocator, page = self.allocator, self.allocator.page_size
        one = _slots([1], allocator)
        table = one.new_zeros(2, page)
        calls: list[Callable[[], object]] = [
            lambda: allocator.alloc(-page),
            lambda: allocator.alloc_extend(one * 2, [2], one, [1], one, -1),
            lambda: allocator.alloc_extend(one * 0, [0], one, [1], -one, 2),
            lambda: allocator.alloc_extend(one * 0, [0], one, [1], one[:0], 1),
            lambda: allocator.alloc_decode(one * 0, [0], one),
            lambda: allocator.alloc_decode(one, [1], one[:0]),
            lambda: allocator.free_rows(table, [2], [0], [page]),
            lambda: allocator.free_rows(table, [1], [0], [page + 1]),
            lambda: allocator.free_rows(table, [1], [1], [0]),
            lambda: allocator.restore_state(object()),
            lambda: allocator.resize({"no such space": page}),
            lambda: allocator.resize({}),
            allocator.free_group_end,
        ]
        return calls if page == 1 else [*calls, lambda: allocator.alloc(page + 1)]

    def try_extend(self, spans: list[tuple[int, int]], last: list[int] | None = None) -> torch.Tensor | None:
        """Ask for the tokens of `spans`; ``None`` if they are not there."""
        prefix, seq = [start for start, _ in spans], [end for _, end in spans]
        total = sum(seq) - sum(prefix)
        return self.allocator.alloc_extend(
            _slots(prefix, self.allocator),
            prefix,
            _slots(seq, self.allocator),
            seq,
            _slots(last or [-1] * len(spans), self.allocator),
            total,
        )

    def try_decode(self) -> torch.Tensor | None:
        """Ask for one token a request; ``None`` if they are not there."""
        lens = [len(slots) + 1 for slots in self.requests.values()]
        last = [slots[-1] for slots in self.requests.values()]
        return self.allocator.alloc_decode(_slots(lens, self.allocator), lens, _slots(last, self.allocator))

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
        self.allocator.free(_slots(self.requests.pop(request), self.allocator))

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
        self.allocator.check(held=_slots([s for slots in self.requests.values() for s in slots], self.allocator))


def _slots(values: list[int], allocator: Allocator | None = None) -> torch.Tensor:
    import torch

    device = allocator.parts.device if allocator is not None else None
    return torch.tensor(values, dtype=torch.int64, device=device)


def _allocated(slots: torch.Tensor | None) -> list[int]:
    found: list[int] = _allocated_tensor(slots).tolist()
    return found


def _allocated_tensor(slots: torch.Tensor | None) -> torch.Tensor:
    assert slots is not None, "the allocation failed although there is room"
    return slots
