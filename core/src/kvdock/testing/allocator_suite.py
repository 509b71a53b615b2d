"""What every allocator of one space promises, as tests."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, ClassVar

import pytest

from kvdock.builder import build
from kvdock.errors import SlotError
from kvdock.testing.batch import Batch, allocated, allocated_tensor, slots_of
from kvdock.testing.counting import bytes_made
from kvdock.testing.refusing import refused
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
        allocator.check(held=slots_of([]))

    def test_all_of_it_can_be_handed_out_once(self, allocator: Allocator) -> None:
        """Every usable slot is handed out exactly once, and padding never."""
        page = allocator.page_size
        slots = allocated(allocator.alloc(allocator.size))
        assert sorted(slots) == list(range(page, allocator.size + page))
        assert allocator.available_size() == 0
        assert allocator.alloc(page) is None

    def test_slots_of_a_page_are_consecutive(self, allocator: Allocator) -> None:
        """Slots come in the class's type, page by page, each page in order."""
        import torch

        page = allocator.page_size
        found = allocator.alloc(3 * page)
        assert found is not None
        assert found.dtype == getattr(torch, allocator.slot_dtype), _of_type("alloc", found, allocator)
        for start in range(0, 3 * page, page):
            first = int(found[start])
            assert first % page == 0
            assert found[start : start + page].tolist() == list(range(first, first + page))

    def test_a_call_that_cannot_be_served_changes_nothing(self, batch: Batch) -> None:
        """Alloc, extend and decode answer ``None`` when a page is missing, and nothing is lost."""
        allocator, page = batch.allocator, batch.allocator.page_size
        batch.grow(1, page)
        free = allocator.available_size()
        for much in (free + page, 8 * allocator.size):
            assert allocator.alloc(much) is None
            assert allocator.available_size() == free, f"an alloc of {much} slots was not served, and {free} were free"
        assert batch.try_extend([(0, free + 1)]) is None
        rest = allocator.alloc(free)
        assert rest is not None
        assert batch.try_decode() is None
        assert allocator.available_size() == 0
        allocator.free(rest)
        assert allocator.available_size() == free
        batch.check()

    def test_a_decode_that_lacks_one_page_takes_none(self, batch: Batch) -> None:
        """Two requests are at a bound and one page is free: the decode answers ``None``, and the page is still free."""
        allocator, page = batch.allocator, batch.allocator.page_size
        batch.grow(2, page)
        assert allocator.alloc(allocator.available_size() - page) is not None
        assert batch.try_decode() is None
        assert batch.try_extend([(0, 1), (0, 1)]) is None
        free = allocator.available_size()
        assert free == page, f"decode and extend of two pages were not served, and of {page} free slots {free} are left"

    def test_no_slots_are_an_empty_answer(self, allocator: Allocator) -> None:
        """An alloc of no slots is served, with none; freeing none changes nothing."""
        slots = allocated_tensor(allocator.alloc(0))
        assert tuple(slots.shape) == (0,)
        allocator.free(slots)
        assert allocator.available_size() == allocator.size

    def test_a_refused_call_changes_nothing(self, batch: Batch) -> None:
        """Calls that contradict themselves raise `SlotError` before anything is taken or given back."""
        batch.grow(2, batch.allocator.page_size)
        free, state = batch.allocator.available_size(), batch.allocator.backup_state()
        for what, call in batch.contradictions().items():
            with refused(what, "verify the arguments before anything is taken or given back"):
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
        batch.allocator.free(allocated_tensor(spare))
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
        allocator.check(held=slots_of([]))

    def test_what_is_undone_never_happened(self, allocator: Allocator) -> None:
        """A checkpoint undoes frees, a free group and a restore, for a composite whose other part failed."""
        import torch

        page = allocator.page_size
        slots = allocated_tensor(allocator.alloc(4 * page))
        free = allocator.available_size()

        def at_once() -> None:
            allocator.free(slots[page:])

        def in_a_group() -> None:
            allocator.free_group_begin()
            allocator.free(slots[:1])
            allocator.free_pages(slots[page : 3 * page : page].long() // page)
            allocator.free_group_end()

        for change in (at_once, in_a_group, in_a_group):
            undo = allocator.checkpoint()
            change()
            assert allocator.available_size() > free
            undo()
            assert allocator.available_size() == free
            allocator.check(held=slots)
        state = allocator.backup_state()
        more = allocated_tensor(allocator.alloc(2 * page))
        undo = allocator.checkpoint()
        allocator.restore_state(state)
        undo()
        allocator.check(held=torch.cat((slots, more)))
        allocator.restore_state(state)
        allocator.free(slots)
        allocator.check(held=slots_of([]))
        assert allocator.available_size() == allocator.size

    def test_restore_takes_back_allocations(self, batch: Batch) -> None:
        """A restore undoes every allocation since the backup, and the same slots come again."""
        allocator, page = batch.allocator, batch.allocator.page_size
        batch.grow(2, page + 1)
        state, free = allocator.backup_state(), allocator.available_size()
        first = allocated(allocator.alloc(2 * page))
        allocator.restore_state(state)
        assert allocator.available_size() == free
        batch.check()
        assert allocated(allocator.alloc(2 * page)) == first

    def test_restore_after_a_free_is_refused(self, allocator: Allocator) -> None:
        """Once something was freed the token is void, and the refusal changes nothing."""
        page = allocator.page_size
        held = allocator.alloc(2 * page)
        assert held is not None
        state = allocator.backup_state()
        allocator.free(held[:page])
        free = allocator.available_size()
        with refused("restore_state after a free", "what was freed would come back as held"):
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
        with refused("restore_state of a state from after the one that was restored", "its allocations are gone"):
            allocator.restore_state(newer)
        assert allocator.available_size() == allocator.size
        allocator.restore_state(older)
        batch.check()

    def test_nothing_waits_for_the_device(self, plan: CachePlan) -> None:
        """Calls with counts of the host run on the ``meta`` device, where no value can be read back."""
        pytest.importorskip("torch")
        allocator = build(plan, device="meta", debug=False).token_to_kv_pool_allocator
        page, batch = allocator.page_size, Batch(allocator, random.Random(0))
        slots = allocated_tensor(allocator.alloc(6 * page))
        state = allocator.backup_state()
        assert batch.try_extend([(0, page + 1), (1, 2), (page, page)], [-1, page, page]) is not None
        batch.requests = {1: list(range(page, 2 * page)), 2: [3 * page]}
        assert batch.try_decode() is not None
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
        held, gone = allocated_tensor(debugged.alloc(page)), allocated_tensor(debugged.alloc(page))
        debugged.free(gone)
        padding = held[:1] * 0
        wrong = {
            "freed before": gone,
            "freed before (one of them)": gone[:1],
            "named twice": held[:1].repeat(2),
            "never handed out": padding + debugged.size,
            "beyond the last one": padding + 2 * debugged.size,
            "padding": padding,
        }
        for what, slots in wrong.items():
            why = "with debug such slots are found (verify_slots, verify_pages) before anything changes"
            with refused(f"free of slots {slots[:2].tolist()}…, {what},", why):
                debugged.free(slots)
            pages = slots[:1] // page if what != "named twice" else slots // page
            with refused(f"free_pages of pages {pages.tolist()}, {what},", why):
                debugged.free_pages(pages)
        assert debugged.available_size() == debugged.size - page
        debugged.check(held=held)

    def test_with_debug_another_thread_is_refused(self, debugged: Allocator) -> None:
        """The first caller owns the allocator; a call from another thread raises, and nothing changes."""
        page = debugged.page_size
        caught: list[SlotError] = []
        held = allocated_tensor(debugged.alloc(page))

        def call() -> None:
            try:
                debugged.alloc(page)
            except SlotError as error:
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(caught) == 1, "a call from another thread was served"
        assert debugged.available_size() == debugged.size - page
        debugged.check(held=held)

    def test_calls_cost_what_they_hand_over(self, page_size: int) -> None:
        """Calls of a few pages make no more tensors and arrays in a pool that is 64 times as large."""
        pytest.importorskip("torch")
        made = [self._bytes_made(page_size, times) for times in (1, 64)]
        grown = {name: (made[0][name], many) for name, many in made[1].items() if many > 2 * made[0][name] + 4096}
        assert grown == {}, "bytes that a call makes in a small pool, and in a large one"

    def _bytes_made(self, page_size: int, times: int) -> dict[str, int]:
        """Return what each kind of call makes, the second time that it is made."""
        plan = self.planned(page_size, times=times)
        allocator = build(plan, device=self.torch_device, debug=False).token_to_kv_pool_allocator
        found: dict[str, int] = {}
        for _ in range(2):
            batch = Batch(allocator, random.Random(0))
            held = allocated_tensor(allocator.alloc(4 * page_size))
            for name, call in batch.few_calls(held).items():
                found[name] = bytes_made(call)
            batch.free_all()
        return found

    def test_a_double_free_makes_no_room(self, allocator: Allocator) -> None:
        """Without debug a second free may go unnoticed, but never are more slots available than there are."""
        page = allocator.page_size
        slots = allocated_tensor(allocator.alloc(page))
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
        asks: list[Callable[[], torch.Tensor | None]] = [lambda: batch.try_extend([(0, 3)]), batch.try_decode]
        for ask in asks:
            slots = allocated_tensor(ask())
            assert str(slots.dtype) == f"torch.{batch.allocator.slot_dtype}", _of_type(
                "extend or decode", slots, batch.allocator
            )
            kept = slots.clone()
            slots.zero_()
            held = [slot for owned in batch.requests.values() for slot in owned]
            batch.allocator.check(held=slots_of([*held, *kept.tolist()], batch.allocator))
            pages = {slot // batch.allocator.page_size for slot in held}
            free = [slot for slot in kept.tolist() if slot // batch.allocator.page_size not in pages]
            batch.allocator.free(slots_of(free, batch.allocator))
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
        with refused(f"resize while {page} slots are held", "a held slot may lie beyond the new size"):
            allocator.resize({space: size - page})
        assert allocator.available_size() == size - page
        allocator.free(held)
        allocator.resize({space: size - page})
        assert allocator.available_size() == size - page
        with refused(f"resize to {size + page} slots where {size} were allocated", "there are no rows behind them"):
            allocator.resize({space: size + page})
        assert allocator.available_size() == size - page


def _of_type(call: str, slots: torch.Tensor, allocator: Allocator) -> str:
    name = type(allocator).__name__
    return f"{call} returns {slots.dtype}, but slot_dtype of {name} is {allocator.slot_dtype!r}; make one of them the other"
