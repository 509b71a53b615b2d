"""What allocators of sliding slots promise beside the rest, as tests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kvdock.builder import build
from kvdock.errors import SlotError
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.testing.allocator_suite import AllocatorSuite
from kvdock.testing.batch import Batch
from kvdock.testing.refusing import refused

if TYPE_CHECKING:
    import torch

    from kvdock.planner import CachePlan

_HEADS = MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=8)

SLIDING_MODEL = ModelSpec(
    name="conformance",
    architecture="Conformance",
    layers=(LayerSpec(kind="mha", params=_HEADS, window_tokens=31), LayerSpec(kind="mha", params=_HEADS)),
    context_length=256,
    dtype="bfloat16",
)
"""A layer that slides and one that does not."""


class SlidingAllocatorSuite(AllocatorSuite):
    """The promises of an allocator whose tokens leave a window: of full and sliding slots in step, or of these alone."""

    model: ClassVar[ModelSpec] = SLIDING_MODEL
    options: ClassVar[Mapping[str, Any]] = {"swa_full_tokens_ratio": 1.0}
    """As many sliding slots as full ones, so that either side can be filled."""

    @pytest.fixture
    def window(self, allocator: Any, seed: int) -> Window:
        """Give random requests whose oldest tokens leave the window."""
        return Window(allocator, random.Random(seed))

    def test_every_slot_translates_to_one_of_its_own(self, allocator: Any) -> None:
        """A slot keeps its place in its page, −1 stays −1 and padding is padding."""
        page = allocator.page_size
        slots = allocator.alloc(allocator.size)
        assert slots is not None
        found = allocator.translate(slots).tolist()
        assert sorted(found) == list(range(page, allocator.size + page))
        assert [slot % page for slot in found] == [slot % page for slot in slots.tolist()]
        assert allocator.translate(slots[:2] * 0 + slots.new_tensor([-1, 0])).tolist() == [-1, 0]

    def test_a_page_goes_back_with_its_last_token(self, window: Window) -> None:
        """Tokens leave one by one; a page that is partly visible stays, and the full side keeps everything."""
        allocator, page = window.allocator, window.allocator.page_size
        request = window.grow(1, 2 * page + 1)
        swa, full = allocator.swa_available_size(), allocator.full_available_size()
        for end in range(1, 2 * page + 2):
            window.evict(request, end)
            assert allocator.swa_available_size() == swa + end // page * page
            assert window.is_alone or allocator.full_available_size() == full
        window.check_windows()

    def test_windows_can_be_freed_by_tokens_and_by_pages(self, window: Window) -> None:
        """`free_swa` looks for last tokens, `free_swa_pages` takes the numbers of pages that still have one."""
        allocator, page = window.allocator, window.allocator.page_size
        slots = allocator.alloc(3 * page)
        assert slots is not None
        before, finished = allocator.swa_available_size(), (2 * page - 1) // page * page
        allocator.free_swa(slots[: 2 * page - 1])
        assert allocator.swa_available_size() == before + finished
        allocator.free_swa_pages(slots[2 * page :: page] // page)
        assert allocator.swa_available_size() == before + finished + page

    def test_rows_are_freed_from_where_their_window_begins(self, window: Window) -> None:
        """What left the window is not given back again, and nothing is left behind."""
        allocator, page = window.allocator, window.allocator.page_size
        first, second = window.grow(1, 3 * page), window.grow(1, 2 * page + 1)
        window.evict(first, 2 * page)
        window.release(first)
        window.release(second)
        assert allocator.swa_available_size() == allocator.full_available_size() == allocator.size
        window.check_windows()

    def test_only_the_tail_gets_sliding_slots(self, window: Window) -> None:
        """Of a prompt that arrives whole, the newest tokens alone have sliding slots, from a page bound on."""
        allocator, page = window.allocator, window.allocator.page_size
        swa, tokens, tail = allocator.swa_available_size(), 4 * page, page + 1
        start = (tokens - tail) // page * page
        assert allocator.swa_pages_needed([0], [tokens], [tail]) * page == tokens - start
        slots = window.extend_tail(tokens, tail)
        found = allocator.translate(slots).tolist()
        assert found[:start] == [0] * start
        assert all(slot >= page for slot in found[start:])
        assert swa - allocator.swa_available_size() == tokens - start
        window.check_windows()

    def test_a_short_sliding_side_takes_nothing_of_the_full_one(self, window: Window) -> None:
        """Alloc, extend and decode answer ``None``, and the shortfall names the side that lacks pages."""
        if window.is_alone:
            pytest.skip("the sliding slots are the only ones")
        allocator, page = window.allocator, window.allocator.page_size
        allocator.resize({"swa": 2 * page})
        window.swa_size = 2 * page
        window.grow(2, page)
        full = allocator.full_available_size()
        assert [(lack.space, lack.missing) for lack in allocator.shortfall(1)] == [("swa", page)]
        assert allocator.alloc(page) is None
        assert window.try_extend([(0, 1)]) is None
        assert window.try_decode() is None
        assert (allocator.full_available_size(), allocator.swa_available_size()) == (full, 0)
        window.check_windows()

    def test_a_group_gives_back_the_pages_that_were_mapped_when_they_were_queued(self, window: Window) -> None:
        """Window frees and frees of whole requests wait together, and a state from before is void."""
        allocator, page = window.allocator, window.allocator.page_size
        first, second = window.grow(1, 2 * page), window.grow(1, 2 * page)
        state, before = allocator.backup_state(), allocator.swa_available_size()
        allocator.free_group_begin()
        window.evict(first, page)
        window.release(second)
        assert allocator.swa_available_size() == before
        allocator.free_group_end()
        assert allocator.swa_available_size() == before + 3 * page
        with refused("restore_state after a free group", "pages went back to both sides since"):
            allocator.restore_state(state)
        window.check_windows()

    def test_a_restore_is_for_both_sides_or_neither(self, window: Window) -> None:
        """A state that was made while a window free was queued is good for both sides after the group, or refused."""
        allocator, page = window.allocator, window.allocator.page_size
        request = window.grow(1, 2 * page)
        allocator.free_group_begin()
        window.evict(request, page)
        state = allocator.backup_state()
        later = window.grow(1, 3 * page)
        allocator.free_group_end()
        try:
            allocator.restore_state(state)
            del window.requests[later]
        except SlotError:
            pass
        window.check_windows()

    def test_window_frees_never_wait_for_the_device(self, plan: CachePlan) -> None:
        """With counts of the host they run on the ``meta`` device, where no value can be read back."""
        pytest.importorskip("torch")
        allocator: Any = build(plan, device="meta", debug=False).token_to_kv_pool_allocator
        page = allocator.page_size
        slots = allocator.alloc(6 * page)
        allocator.free_swa_rows(slots.view(2, 3 * page), [0, 1], [0, 0], [page, 2 * page])
        allocator.free_swa_pages(slots[:page:page])
        assert allocator.swa_available_size() == allocator.size - 2 * page
        allocator.free_rows(slots.view(2, 3 * page), [0, 1], [0, 0], [3 * page] * 2, swa_starts=[2 * page] * 2)
        assert allocator.swa_available_size() == allocator.full_available_size() == allocator.size

    def test_both_sides_stay_in_step(self, window: Window) -> None:
        """Random requests grow, decode, leave the window and end; no sliding slot has two owners or is lost."""
        allocator = window.allocator
        for _ in range(150):
            window.step()
            window.slide()
            window.check_windows()
        window.free_all()
        assert allocator.swa_available_size() == allocator.full_available_size() == allocator.size


class Window(Batch):
    """Requests, and the first token of each that sliding layers still see."""

    allocator: Any

    def __init__(self, allocator: Any, rng: random.Random) -> None:
        super().__init__(allocator, rng)
        self.seen: dict[int, int] = {}
        self.swa_size: int = allocator.swa_available_size()
        self.is_alone = len(allocator.query.spaces) == 1
        """Whether requests are numbered in sliding slots, so that a page that leaves is gone."""

    def evict(self, request: int, end: int) -> None:
        """Give back the sliding pages of the tokens before `end`."""
        start = self.seen.get(request, 0)
        self.allocator.free_swa_rows(self._table(request), [1], [start], [end])
        self.seen[request] = end

    def slide(self) -> None:
        """Let some tokens of a random request leave the window."""
        if self.requests:
            request = self.rng.choice(sorted(self.requests))
            self.evict(request, self.rng.randint(self.seen.get(request, 0), len(self.requests[request]) - 1))

    def release(self, request: int) -> None:
        """Free all that a request still has."""
        table, length = self._table(request), len(self.requests.pop(request))
        self.allocator.free_rows(table, [1], [0], [length], swa_starts=[self.seen.pop(request, 0)])

    def end(self, request: int) -> None:
        """Free a request by its row."""
        self.release(request)

    def extend_tail(self, tokens: int, tail: int) -> torch.Tensor:
        """Begin a request of which only the newest `tail` tokens get sliding slots; return its slots."""
        import torch

        numbers = torch.tensor([0, tokens, -1], device=self.allocator.parts.device)
        found = self.allocator.alloc_extend_swa_tail(
            numbers[:1], [0], numbers[1:2], [tokens], numbers[2:], tokens, [tail]
        )
        assert found is not None
        self._next += 1
        self.requests[self._next] = found.tolist()
        self.seen[self._next] = (tokens - tail) // self.allocator.page_size * self.allocator.page_size
        return torch.as_tensor(found)

    def check_windows(self) -> None:
        """What is seen has sliding slots of its own and what is not has none, and both sides add up."""
        import torch

        allocator, page = self.allocator, self.allocator.page_size
        held = [slot for request, slots in self.requests.items() for slot in slots[self._first_kept(request) :]]
        seen = [slot for request, slots in self.requests.items() for slot in slots[self._first_seen(request) :]]
        device = allocator.parts.device
        sliding = allocator.translate(torch.tensor(seen, dtype=torch.int64, device=device)).tolist()
        assert len(set(sliding)) == len(sliding)
        assert min(sliding, default=page) >= page
        gone = [slot for request, slots in self.requests.items() for slot in slots[: self._first_seen(request)]]
        if not self.is_alone:
            assert not allocator.translate(torch.tensor(gone, dtype=torch.int64, device=device)).any()
        pages = {slot // page for slot in sliding}
        assert allocator.swa_available_size() + len(pages) * page == self.swa_size
        allocator.check(held=torch.tensor(held, dtype=torch.int64, device=device))

    def _first_seen(self, request: int) -> int:
        page: int = self.allocator.page_size
        return self.seen.get(request, 0) // page * page

    def _first_kept(self, request: int) -> int:
        return self._first_seen(request) if self.is_alone else 0

    def _table(self, request: int) -> torch.Tensor:
        import torch

        slots = torch.tensor(self.requests[request], dtype=torch.int32, device=self.allocator.parts.device)
        return torch.stack((slots * 0, slots))
