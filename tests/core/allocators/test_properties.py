"""Random traces against plain Python models: deques of free pages, a loop per token."""

from collections import deque

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

PAGE_SIZES = (1, 3, 4, 16, 64)
MAX_PAGES = 12


def by_token(prefix, seq, last, pages, page_size):
    """Lay out one request's tokens one by one; `pages` is an iterator of new pages."""
    out, at = [], last
    for position in range(prefix, seq):
        at = next(pages) * page_size if position % page_size == 0 else at + 1
        out.append(at)
    return out


class Side:
    """One space: free pages in the order in which they will be handed out."""

    def __init__(self, pages):
        self.free = deque(range(1, pages + 1))

    def take(self, count):
        return [self.free.popleft() for _ in range(count)]


class Model:
    """Requests with their full slots, and per request how many tokens have left the window."""

    def __init__(self, page_size, sides):
        self.page_size = page_size
        self.sides = sides
        self.requests = {}
        self.evicted = {}
        self.map = {}

    def needed(self, grown):
        """Pages that requests `{name: new length}` need."""
        p = self.page_size
        return sum(-(-n // p) - -(-len(self.requests.get(r, [])) // p) for r, n in grown.items())

    def fits(self, pages):
        return all(len(side.free) >= pages for side in self.sides)

    def grow(self, grown):
        full = iter(self.sides[0].take(self.needed(grown)))
        other = iter(self.sides[-1].take(self.needed(grown))) if len(self.sides) > 1 else None
        out = []
        for name, length in grown.items():
            held = self.requests.setdefault(name, [])
            last = held[-1] if held else -1
            new = by_token(len(held), length, last, full, self.page_size)
            if other is not None:
                new_swa = by_token(len(held), length, self.map.get(last, -1), other, self.page_size)
                self.map.update(zip(new, new_swa, strict=True))
            held.extend(new)
            out.extend(new)
        return out

    def release(self, name):
        held = self.requests.pop(name)
        start = self.evicted.pop(name, 0) // self.page_size
        pages = [slot // self.page_size for slot in held[:: self.page_size]]
        if len(self.sides) > 1:
            self.sides[1].free.extend(self.map[page * self.page_size] // self.page_size for page in pages[start:])
        self.sides[0].free.extend(pages)
        for slot in held:
            self.map.pop(slot, None)

    def evict(self, name, end):
        p, held = self.page_size, self.requests[name]
        for page in range(self.evicted.get(name, 0) // p, end // p):
            self.sides[1].free.append(self.map[held[page * p]] // p)
            for slot in held[page * p : (page + 1) * p]:
                self.map[slot] = 0
        self.evicted[name] = end


def grow(allocator, model, grown, decode):
    prefix = [len(model.requests.get(name, [])) for name in grown]
    seq = list(grown.values())
    last = torch.tensor([model.requests[n][-1] if model.requests.get(n) else -1 for n in grown], dtype=torch.int64)
    as_tensor = lambda lens: torch.tensor(lens, dtype=torch.int32)  # noqa: E731
    if decode:
        return allocator.alloc_decode(as_tensor(seq), seq, last)
    return allocator.alloc_extend(as_tensor(prefix), prefix, as_tensor(seq), seq, last, sum(seq) - sum(prefix))


def step(data, allocator, model):
    names = st.integers(0, 4)
    action = data.draw(st.sampled_from(["extend", "extend", "decode", "release", "evict", "rollback"]))
    known = sorted(name for name, held in model.requests.items() if held)
    if action in ("extend", "rollback"):
        chosen = data.draw(st.lists(names, unique=True, max_size=4))
        longest = st.integers(0, 3 * model.page_size + 1)
        grown = {n: len(model.requests.get(n, [])) + data.draw(longest) for n in chosen}
        do_grow(allocator, model, grown, decode=False, rollback=action == "rollback")
    elif not known:
        return
    elif action == "decode":
        chosen = data.draw(st.lists(st.sampled_from(known), unique=True))
        do_grow(allocator, model, {n: len(model.requests[n]) + 1 for n in chosen}, decode=True)
    elif action == "release":
        do_release(data, allocator, model, data.draw(st.sampled_from(known)))
    elif len(model.sides) > 1:
        name = data.draw(st.sampled_from(known))
        end = data.draw(st.integers(model.evicted.get(name, 0), len(model.requests[name]) - 1))
        do_evict(data, allocator, model, name, end)


def do_grow(allocator, model, grown, decode, rollback=False):
    state = allocator.backup_state()
    got = grow(allocator, model, grown, decode)
    needed = model.needed(grown)
    assert needed == allocator.pages_needed([len(model.requests.get(n, [])) for n in grown], list(grown.values()))
    if not model.fits(needed):
        assert got is None
    elif rollback:
        allocator.restore_state(state)
    else:
        assert got.dtype == torch.int64
        assert got.tolist() == model.grow(grown)


def row_table(model, name):
    table = torch.zeros(2, MAX_PAGES * model.page_size, dtype=torch.int32)
    table[1, : len(model.requests[name])] = torch.tensor(model.requests[name])
    return table


def do_evict(data, allocator, model, name, end):
    start = model.evicted.get(name, 0)
    if data.draw(st.booleans()):
        allocator.free_swa_rows(row_table(model, name), [1], [start], [end])
    else:
        allocator.free_swa(torch.tensor(model.requests[name][start:end], dtype=torch.int64))
    model.evict(name, end)
    reorder(allocator, model)


def do_release(data, allocator, model, name):
    held = model.requests[name]
    by_rows, grouped = data.draw(st.booleans()), data.draw(st.booleans())
    if grouped:
        allocator.free_group_begin()
    if not by_rows:
        allocator.free(torch.tensor(held, dtype=torch.int64))
    elif len(model.sides) > 1:
        evicted = model.evicted.get(name, 0)
        allocator.free_rows(row_table(model, name), [1], [0], [len(held)], swa_starts=[evicted])
    else:
        allocator.free_rows(row_table(model, name), [1], [0], [len(held)])
    if grouped:
        allocator.free_group_end()
    model.release(name)
    reorder(allocator, model)


def reorder(allocator, model):
    """Adopt the order of pages that came back together: it is not promised, the set is."""
    inner = [allocator] if len(model.sides) == 1 else [allocator.full, allocator.swa]
    for side, part in zip(model.sides, inner, strict=True):
        state = part.backup_state()
        order = [slot // model.page_size for slot in part.alloc(part.available_size()).tolist()[:: model.page_size]]
        part.restore_state(state)
        assert sorted(order) == sorted(side.free)
        side.free = deque(order)


def verify(allocator, model):
    held = [slot for own in model.requests.values() for slot in own]
    assert len(held) == len(set(held))
    assert not held or min(held) >= model.page_size
    allocator.check(held=torch.tensor(held, dtype=torch.int64))
    assert allocator.available_size() == min(len(side.free) for side in model.sides) * model.page_size
    if len(model.sides) > 1:
        slots = sorted(model.map)
        mapped = allocator.translate(torch.tensor(slots, dtype=torch.int64)).tolist()
        assert mapped == [model.map[slot] for slot in slots]
        live = [slot for slot in mapped if slot]
        assert len(live) == len(set(live))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_single_allocators_match_the_model(make, page_size, debug, data):
    pages = data.draw(st.integers(1, MAX_PAGES))
    allocator = make.single(pages * page_size, page_size, debug=debug)
    model = Model(page_size, [Side(pages)])
    for _ in range(data.draw(st.integers(1, 12))):
        step(data, allocator, model)
        verify(allocator, model)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_sliding_composite_matches_the_model(make, page_size, debug, data):
    full, swa = data.draw(st.integers(1, MAX_PAGES)), data.draw(st.integers(1, MAX_PAGES))
    allocator = make.swa(full * page_size, swa * page_size, page_size, debug=debug)
    model = Model(page_size, [Side(full), Side(swa)])
    for _ in range(data.draw(st.integers(1, 12))):
        step(data, allocator, model)
        verify(allocator, model)


@pytest.mark.parametrize("page_size", [*PAGE_SIZES, 128])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_extends_equal_a_loop_per_token(make, page_size, data):
    """A-09: random batches, with exactly the pages that they need."""
    lens = st.integers(0, 3 * page_size + 2)
    batch = data.draw(st.lists(st.tuples(lens, lens), max_size=6))
    prefix, seq = [min(pair) for pair in batch], [max(pair) for pair in batch]
    allocator = make.single(MAX_PAGES * page_size * 8, page_size)
    first = Model(page_size, [Side(MAX_PAGES * 8)])
    do_grow(allocator, first, dict(enumerate(prefix)), decode=False)
    needed = first.needed(dict(enumerate(seq)))
    spare = allocator.available_size() - needed * page_size
    first.sides[0].take(spare // page_size)
    allocator.alloc(spare)
    do_grow(allocator, first, dict(enumerate(seq)), decode=False)
    assert allocator.available_size() == 0
