"""Any order of calls: allocators against a plain Python model, with every promise verified after each call.

`make fuzz` runs the same machines for much longer.
"""

import random
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvdock.allocators import (  # noqa: E402
    PagedAllocator,
    PureSWAAllocator,
    PureSWASortedAllocator,
    PureSWATokenAllocator,
    SortedAllocator,
    SWAAllocator,
    TokenAllocator,
    swa_tail_start,
)
from kvdock.errors import SlotError  # noqa: E402

PAGE_SIZES = (1, 3, 4, 16, 64, 256)
NAMES = range(6)
has_requests = precondition(lambda self: self.model.requests)
slides = precondition(lambda self: self.is_sliding)


class Saved(NamedTuple):
    """A state to come back to, and the model then."""

    token: object
    snapshot: tuple
    epoch: int
    is_sure: bool = True
    """False where a free group ended since: what was queued before is back, and a restore may be refused for it."""


def tensor(values, dtype=torch.int64):
    return torch.tensor(list(values), dtype=dtype)


class AllocatorMachine(RuleBasedStateMachine):
    """Requests that come, grow, slide, shrink and go, and calls that must be refused."""

    fuzz = None
    is_composite = False

    def __init__(self):
        super().__init__()
        self.states = []

    def start(self, allocator, classes, pages):
        self.allocator = allocator
        self.size = allocator.page_size
        sides = {
            name: self.fuzz.Side(count, issubclass(classes[name], SortedAllocator)) for name, count in pages.items()
        }
        self.model = self.fuzz.Model(self.size, sides)
        self.parts = {name: getattr(allocator, name) if self.is_composite else allocator for name in pages}
        self.is_sliding = hasattr(allocator, "translate")
        self.is_debug, self.most = allocator.parts.debug, pages

    def translated(self, slots):
        return self.allocator.translate(slots).tolist() if self.is_sliding else slots.tolist()

    def known(self, data, **limits):
        return data.draw(st.lists(st.sampled_from(sorted(self.model.requests)), unique=True, **limits))

    def tokens(self):
        size = self.size
        return st.integers(0, 2 * size + 1) | st.sampled_from((1, size - 1, size, size + 1, 3 * size))

    def table_of(self, names, narrow):
        """Return a request table with a row for each name, between rows of others."""
        columns = max((self.model.length(name) for name in names), default=0) + self.size
        table = torch.full((len(names) + 2, columns), 1, dtype=torch.int32 if narrow else torch.int64)
        for row, name in enumerate(names, 1):
            table[row, : self.model.length(name)] = tensor(self.model.requests[name].slots, table.dtype)
        return table

    def take(self, spans, found, starts=None):
        """Verify what a call returned for ``{name: new length}``, or that there was no room."""
        starts = starts or {}
        if not self.model.fits(*self.model.needs(spans, starts)):
            assert found is None
            return
        assert found is not None and found.dtype == torch.int64
        self.model.grow(spans, found.tolist(), self.translated(found), starts)
        found.fill_(-1)  # it is the caller's: the allocator must not notice

    def batch(self, data, tokens):
        pairs = st.tuples(st.sampled_from(NAMES), tokens)
        chosen = data.draw(st.lists(pairs, unique_by=lambda pair: pair[0], min_size=1, max_size=4) | st.just([]))
        return {name: self.model.length(name) + more for name, more in chosen}

    def arguments(self, spans, narrow):
        """Return the arguments of an extend: lengths on the device and on the host, last slots, the new tokens."""
        prefix, seq = [self.model.length(name) for name in spans], list(spans.values())
        dtype = torch.int32 if narrow else torch.int64
        last = tensor(self.model.last(name) for name in spans)
        on_host = (prefix, seq) if narrow else (tensor(prefix), tensor(seq))
        return [tensor(prefix, dtype), on_host[0], tensor(seq, dtype), on_host[1], last, sum(seq) - sum(prefix)]

    @rule(count=st.integers(0, 8), by_page=st.booleans())
    def alloc(self, count, by_page):
        name = next((name for name in NAMES if name not in self.model.requests), None)
        if name is None:
            return
        if by_page:
            pages = self.allocator.alloc_pages(count, [name] * count)
            slots = None if pages is None else (pages[:, None] * self.size + torch.arange(self.size)).view(-1)
        else:
            slots = self.allocator.alloc(count * self.size, name)
        self.take({name: count * self.size}, slots)

    @rule(data=st.data(), narrow=st.booleans())
    def extend(self, data, narrow):
        """A-07, A-09: as many pages as the requests need each, filled as a loop over the tokens would."""
        spans = self.batch(data, self.tokens())
        before, allocator = [self.model.length(name) for name in spans], self.allocator
        numbered, _ = self.model.needs(spans, {})
        assert allocator.pages_needed(before, list(spans.values())) == numbered
        lacks = {lack.space: lack.missing for lack in allocator.shortfall(numbered)}
        missing = {name: (numbered - len(side.free)) * self.size for name, side in self.model.sides.items()}
        assert lacks == {name: slots for name, slots in missing.items() if slots > 0}
        self.take(spans, allocator.alloc_extend(*self.arguments(spans, narrow), list(spans)))

    @slides
    @rule(data=st.data(), narrow=st.booleans())
    def extend_the_tail(self, data, narrow):
        spans, size = self.batch(data, self.tokens()), self.size
        tails = {name: data.draw(self.tokens()) for name in spans}
        starts = {name: swa_tail_start(spans[name], tails[name], size) for name in spans}
        lengths = {name: self.model.length(name) for name in spans}
        arguments = [*self.arguments(spans, narrow), list(tails.values())]
        if any(lengths[name] % size and starts[name] > lengths[name] for name in spans):
            with pytest.raises(SlotError, match="leave that page's sliding slots behind"):
                self.allocator.alloc_extend_swa_tail(*arguments)
            return
        needed = self.allocator.swa_pages_needed(list(lengths.values()), list(spans.values()), list(tails.values()))
        assert needed == self.model.needs(spans, starts)[1]
        self.take(spans, self.allocator.alloc_extend_swa_tail(*arguments, list(spans)), starts)

    @rule(data=st.data(), narrow=st.booleans())
    def decode(self, data, narrow):
        spans = self.batch(data, st.just(1))
        _, _, seq, seq_cpu, last, _ = self.arguments(spans, narrow)
        self.take(spans, self.allocator.alloc_decode(seq, seq_cpu, last, list(spans)))

    @has_requests
    @rule(data=st.data(), how=st.sampled_from(("rows", "tokens", "pages")), seed=st.integers(0, 99))
    def free(self, data, how, seed):
        names = self.known(data, min_size=1, max_size=2)
        if how == "rows":
            self.free_ranges(names, {name: self.model.ranges(name) for name in names}, narrow=seed % 2)
        for name in names:
            if how == "pages":
                self.free_pages(self.model.requests[name], random.Random(seed))
            elif how == "tokens":
                self.free_tokens(self.model.requests[name], random.Random(seed))
            self.model.release(name)

    def free_pages(self, request, rng):
        for is_visible in (True, False):
            pairs = zip(request.pages, request.windows, strict=True)
            pages = [page for page, sliding in pairs if page and bool(sliding) == is_visible]
            rng.shuffle(pages)
            if is_visible:
                self.allocator.free_pages(tensor(pages))
            elif pages:
                self.allocator.free_pages(tensor(pages), has_swa=False)

    def free_tokens(self, request, rng):
        """A-08: any tokens of each page; in a group, the tokens of one page may come in several calls."""
        size, chosen, share = self.size, [], rng.choice((0.0, 0.5, 1.0))
        for page in [page for page, number in enumerate(request.pages) if number]:
            slots = request.slots[page * size : (page + 1) * size]
            chosen += [slot for slot in slots if rng.random() < share] or [rng.choice(slots)]
        rng.shuffle(chosen)
        cut = rng.randint(0, len(chosen)) if self.model.is_grouping else 0
        self.allocator.free(tensor(chosen[:cut]))
        self.allocator.free(tensor(chosen[cut:]))

    @has_requests
    @rule(data=st.data(), narrow=st.booleans())
    def truncate(self, data, narrow):
        for name in self.known(data, min_size=1, max_size=1):
            request = self.model.requests[name]
            tokens = data.draw(st.integers(request.seen, len(request.slots)))
            if tokens % self.size == 0 or request.windows[tokens // self.size]:
                self.free_ranges([name], {name: self.model.ranges(name, -(-tokens // self.size))}, narrow)
                self.model.truncate(name, tokens)

    def free_ranges(self, names, ranges, narrow):
        table, rows = self.table_of(names, narrow), dict(zip(names, range(1, len(names) + 1), strict=True))
        spans = [(rows[name], *span) for name in names for span in ranges[name]]
        row, start, end, visible = (list(column) for column in zip(*spans, strict=True)) if spans else ([], [], [], [])
        if self.is_sliding and start != visible:
            self.allocator.free_rows(table, row, start, end, swa_starts=visible)
        else:
            self.allocator.free_rows(table, row, start, end)

    @slides
    @has_requests
    @rule(data=st.data(), how=st.sampled_from(("rows", "tokens", "pages")), narrow=st.booleans())
    def leave_the_window(self, data, how, narrow):
        names = self.known(data, min_size=1, max_size=3)
        requests = {name: self.model.requests[name] for name in names}
        ends = {name: data.draw(st.integers(request.seen, len(request.slots))) for name, request in requests.items()}
        finished = {name: self.model.finished(name, ends[name]) for name in names}
        if how == "pages":
            self.allocator.free_swa_pages(tensor(requests[n].pages[page] for n in names for page in finished[n]))
        elif how == "tokens":
            self.allocator.free_swa(tensor(slot for name in names for slot in self.seen_slots(name, ends[name])))
        else:
            spans = [(row, *span) for row, name in enumerate(names, 1) for span in self.seen_ranges(name, ends[name])]
            row, start, end = (list(column) for column in zip(*spans, strict=True)) if spans else ([], [], [])
            self.allocator.free_swa_rows(self.table_of(names, narrow), row, start, end)
        for name in names:
            self.model.evict(name, ends[name])

    def seen_slots(self, name, end):
        """Return the slots of the tokens that leave; a side of its own skips what left before."""
        request, size = self.model.requests[name], self.size
        positions = range(request.seen, end)
        return [request.slots[at] for at in positions if self.is_composite or request.windows[at // size]]

    def seen_ranges(self, name, end):
        """Return the ranges of tokens that leave, without those that a tail left out."""
        request, size = self.model.requests[name], self.size
        finished = self.model.finished(name, end)
        if len(finished) == end // size - request.seen // size:
            return [(request.seen, end)]
        return [(max(request.seen, page * size), (page + 1) * size) for page in finished]

    @rule()
    def change_the_group(self):
        if self.model.is_grouping:
            self.allocator.free_group_end()
            if self.model.end_group([saved.snapshot for saved in self.states]):
                self.states = [saved._replace(is_sure=False) for saved in self.states]
            return
        with pytest.raises(SlotError):
            self.allocator.free_group_end()
        self.allocator.free_group_begin()
        self.model.is_grouping = True

    @rule()
    def back_up(self):
        self.states = [*self.states[-3:], Saved(self.allocator.backup_state(), self.model.snapshot(), self.model.epoch)]

    @precondition(lambda self: self.states)
    @rule(place=st.integers(0, 3))
    def restore(self, place):
        """A state is good until something is freed, or a state from before it is restored."""
        saved = self.states[place % len(self.states)]
        if saved.epoch != self.model.epoch:
            with pytest.raises(SlotError):
                self.allocator.restore_state(saved.token)
            return
        try:
            self.allocator.restore_state(saved.token)
        except SlotError:
            assert not saved.is_sure
            return
        self.model.restore(saved.snapshot)
        taken = saved.snapshot[2]
        self.states = [
            # What took no page at all may count as a step of a composite, so such states are left alone.
            state._replace(epoch=-1) if state.snapshot[2] > taken else state
            for state in self.states
            if not self.is_composite or state is saved or state.snapshot[2] != taken
        ]

    @rule(data=st.data(), when=st.integers(0, 9))
    def clear_or_resize(self, data, when):
        if when == 0:  # seldom, since what matters needs a long history
            self.allocator.clear()
            self.model.reset()
        elif when == 1 and not self.model.is_grouping and not self.model.requests:
            self.resize(data)

    def resize(self, data):
        chosen = {name: data.draw(st.integers(1, most)) for name, most in self.most.items() if data.draw(st.booleans())}
        self.allocator.resize({name: pages * self.size for name, pages in chosen.items()})
        self.model.reset(chosen)

    @rule(data=st.data())
    def misuse(self, data):
        """Calls that contradict themselves or what is held are refused, and nothing changes."""
        refused = data.draw(st.sampled_from(sorted(self.misuses())))
        with pytest.raises(SlotError):
            self.misuses()[refused]()
        if refused == "one side too large":
            self.model.epoch += 1  # the other side was resized and resized back

    def misuses(self):
        allocator, size, model = self.allocator, self.size, self.model
        held = max(len(side.free) < side.capacity for side in model.sides.values())
        live = model.numbering.capacity - len(model.numbering.free)
        none, one = tensor([]), tensor([1])
        table = torch.zeros(2, size, dtype=torch.int64)
        calls = {
            "a negative size": lambda: allocator.alloc(-size),
            "a prefix behind its sequence": lambda: allocator.alloc_extend(one + 1, [2], one, [1], one, -1),
            "a wrong total": lambda: allocator.alloc_extend(one - 1, [0], one, [1], one - 2, 2),
            "another batch": lambda: allocator.alloc_extend(one - 1, [0], one, [1], none, 1),
            "no token": lambda: allocator.alloc_decode(one - 1, [0], one),
            "another decode batch": lambda: allocator.alloc_decode(one, [1], none),
            "a row outside": lambda: allocator.free_rows(table, [2], [0], [size]),
            "a column outside": lambda: allocator.free_rows(table, [1], [0], [size + 1]),
            "a range backwards": lambda: allocator.free_rows(table, [1], [1], [0]),
            "another's state": lambda: allocator.restore_state(object()),
            "an unknown space": lambda: allocator.resize({"other": size}),
            "too large": lambda: allocator.resize({next(iter(self.parts)): 99 * size}),
            "more pages than are live": lambda: allocator.free_pages(one.expand(live + 1)),
        }
        if size > 1 and allocator.available_size() > size:
            calls["half a page"] = lambda: allocator.alloc(size + 1)
        if held:
            calls["a resize while slots are live"] = lambda: allocator.resize({})
        if model.is_grouping:
            calls["a group in a group"] = allocator.free_group_begin
        elif self.is_composite and not held:
            calls["one side too large"] = lambda: allocator.resize({"full": size, "swa": 99 * size})
        if self.is_debug:
            calls.update(self.debug_misuses())
        return calls

    def debug_misuses(self):
        """A-01, A-11: with debug, what is freed twice, never handed out or padding is refused by name."""
        allocator, size, free = self.allocator, self.size, sorted(self.model.numbering.free)
        calls = {
            "the padding": lambda: allocator.free(tensor([0])),
            "outside": lambda: allocator.free_pages(tensor([99])),
        }
        if free:
            calls["free pages"] = lambda: allocator.free_pages(tensor(free[:1]))
            calls["free tokens"] = lambda: allocator.free(tensor([free[-1] * size]))
            calls["a write to free slots"] = lambda: allocator.verify_live(tensor([free[0] * size]))
        held = self.model.live_slots()
        if held:
            calls["a token twice"] = lambda: allocator.free(tensor([held[0], held[0]]))
        return calls

    @invariant()
    def every_page_is_accounted_for(self):
        model, allocator = self.model, self.allocator
        for name, part in self.parts.items():
            side = model.sides[name]
            assert part.available_size() == len(side.free) * self.size
            assert part.size == side.capacity * self.size
            heads = model.heads(
                side, lambda request, side=side: request.windows if side is model.sliding else request.pages
            )
            assert len(side.free) + len(heads) == side.capacity
            part.check(held=tensor(heads))
            assert part.live_pages() == sorted(head // self.size for head in heads)
        assert allocator.available_size() == min(len(side.free) for side in model.sides.values()) * self.size
        held = tensor(model.live_slots())
        if self.is_debug:
            allocator.verify_live(held)
        if not model.is_grouping:
            allocator.check(held=held)
        if self.is_composite:
            self.both_sides_are_in_step()

    def both_sides_are_in_step(self):
        size = self.size
        expected = [
            windows * size + offset if windows else 0
            for request in self.model.requests.values()
            for page, windows in enumerate(request.windows)
            for offset in range(len(request.slots[page * size : (page + 1) * size]))
        ]
        slots = [slot for request in self.model.requests.values() for slot in request.slots]
        assert self.translated(tensor([*slots, 0, -1])) == [*expected, 0, -1]


def pages_up_to(most):
    return st.integers(1, most) | st.integers(most // 2, most)


def machine_of(fuzz, chosen, ranks=(1,)):
    """A machine whose allocators are of one class and page size of `chosen`."""

    class Machine(AllocatorMachine):
        @initialize(
            which=st.sampled_from(chosen), pages=pages_up_to(10), rank=st.sampled_from(ranks), debug=st.booleans()
        )
        def begin(self, which, pages, rank, debug):
            cls, page_size = which
            space = "swa" if issubclass(cls, PureSWAAllocator) else "full"
            self.start(fuzz.build(cls, {space: pages}, page_size, rank, debug), {space: cls}, {space: pages})

    Machine.fuzz = fuzz
    return Machine


def sliding_machine_of(fuzz, cls, page_sizes=PAGE_SIZES):
    """A machine whose allocators keep two sides in step, each of a class of core's own."""

    class Machine(AllocatorMachine):
        is_composite = True

        @initialize(
            page_size=st.sampled_from(page_sizes),
            full=pages_up_to(10),
            swa=pages_up_to(10),
            sides=st.tuples(*[st.sampled_from((PagedAllocator, SortedAllocator, TokenAllocator))] * 2),
            debug=st.booleans(),
        )
        def begin(self, page_size, full, swa, sides, debug):
            chosen = [PagedAllocator if side is TokenAllocator and page_size > 1 else side for side in sides]
            classes, pages = dict(zip(("full", "swa"), chosen, strict=True)), {"full": full, "swa": swa}
            self.start(fuzz.build_sliding(cls, classes, pages, page_size, debug), classes, pages)

    Machine.fuzz = fuzz
    return Machine


def sizes_of(*classes, page_sizes=PAGE_SIZES):
    return [(cls, page_size) for cls in classes for page_size in page_sizes]


def test_single_slots(fuzz):
    run_state_machine_as_test(machine_of(fuzz, sizes_of(TokenAllocator, page_sizes=(1,))), settings=fuzz.effort())


def test_pages(fuzz):
    run_state_machine_as_test(machine_of(fuzz, sizes_of(PagedAllocator)), settings=fuzz.effort())


def test_pages_of_two_ranks(fuzz):
    chosen = sizes_of(PagedAllocator, SortedAllocator)
    run_state_machine_as_test(machine_of(fuzz, chosen, ranks=(2,)), settings=fuzz.effort())


def test_pages_in_order(fuzz):
    run_state_machine_as_test(machine_of(fuzz, sizes_of(SortedAllocator)), settings=fuzz.effort())


def test_full_and_sliding_slots_in_step(fuzz):
    run_state_machine_as_test(sliding_machine_of(fuzz, SWAAllocator), settings=fuzz.effort())


def test_sliding_slots_alone(fuzz):
    chosen = [*sizes_of(PureSWAAllocator, PureSWASortedAllocator), (PureSWATokenAllocator, 1)]
    run_state_machine_as_test(machine_of(fuzz, chosen), settings=fuzz.effort())


class KeepsTheWindow(SWAAllocator):
    def free_swa_rows(self, table, rows, starts, ends):
        pass


class TakesOneSideFirst(SWAAllocator):
    def alloc_pages(self, count, owners=None):
        found = super().alloc_pages(count, owners)
        if found is None:
            self.full.alloc_pages(count, owners)
        return found


class FreesOnceAToken(PagedAllocator):
    def free(self, indices):
        self.free_pages(indices // self.page_size)


class TakesTheHighest(SortedAllocator):
    def alloc_pages(self, count, owners=None):
        pages = super().alloc_pages(count, owners)
        return None if pages is None else pages.flip(0)


class DecodesLate(PagedAllocator):
    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc, owners=None):
        return super().alloc_decode(seq_lens + 1, [int(length) + 1 for length in seq_lens_cpu], last_loc, owners)


@pytest.mark.parametrize("cls", [KeepsTheWindow, TakesOneSideFirst, FreesOnceAToken, TakesTheHighest, DecodesLate])
def test_a_broken_allocator_is_found(fuzz, cls):
    is_composite = issubclass(cls, SWAAllocator)
    machine = sliding_machine_of(fuzz, cls, (1, 4)) if is_composite else machine_of(fuzz, [(cls, 4)])
    with pytest.raises((AssertionError, SlotError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=fuzz.no_shrinking)
