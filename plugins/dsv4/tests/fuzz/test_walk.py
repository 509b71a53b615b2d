"""A random walk over full and sliding pages and all that lies where they are, against sets of numbers."""

import contextlib
import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.abilities import Awaits  # noqa: E402
from kvdock.errors import SlotError  # noqa: E402

PAGE, WINDOW, RING = 128, 128, 8
TIERS = {"hisparse": True, "hisparse_top_k": 48}
DECODE = {"role": "decode", "decode_extra_slots": 3}
FORMS = {"one tier": {}, "two tiers": TIERS, "one tier, decode": DECODE, "two tiers, decode": TIERS | DECODE}
MILLION = 1_000_000
LOOKS = 64
"""Steps of the long walk between two looks at every slot; what a step itself claims is compared at each."""


NUMBERS = st.integers(0, 2**16)


class Request:
    def __init__(self):
        self.tokens = self.evicted = self.buffer = 0
        self.pages, self.sliding = [], []
        """Full page of each page of tokens, and its sliding page (0: gone)."""
        self.on_device = []
        """Pages of its compressed rows on the device, as long as there is a sliding page (0: gone)."""


class Walk(RuleBasedStateMachine):
    """Requests grow, leave their window and end; allocations are taken back, and fail half-way."""

    cache = None

    def __init__(self):
        super().__init__()
        self.cache.clear()
        self.allocator, self.pool = self.cache.token_to_kv_pool_allocator, self.cache.token_to_kv_pool
        self.rows = self.cache.req_to_token_pool
        self.full = set(range(1, self.allocator.full.size // PAGE + 1))
        self.swa = set(range(1, self.allocator.swa.size // PAGE + 1))
        self.live, self.names, self.kept = {}, 0, {}
        self.tiers = getattr(self.allocator, "device", None)
        self.device = set(range(1, self.tiers.size // self.tiers.page_size + 1)) if self.tiers else None
        self.receives = isinstance(self.rows, Awaits)

    def room(self):
        """Pages that every space has."""
        return min(len(side) for side in (self.full, self.swa, self.device) if side is not None)

    def note_page(self, request, slot, swa, slides=True):
        """A new page of tokens: a KeyError says that some page of it was somebody's, padding, or does not exist."""
        request.pages.append(slot // PAGE)
        request.sliding.append(swa // PAGE)
        self.full.remove(slot // PAGE)
        if slides:
            self.swa.remove(swa // PAGE)
        else:
            assert swa == 0
        if self.tiers:
            page = self.tiers.page_size
            place = int(self.allocator.translate_to_device(torch.tensor([slot // 4]))[0])
            request.on_device.append(place // page)
            if slides:
                assert place % page == slot // 4 % page
                self.device.remove(place // page)
            else:
                assert place == 0

    def give_window(self, request, first, last):
        """Pages of tokens leave the window: what slides, and what of them is on the device."""
        self.swa.update(page for page in request.sliding[first:last] if page)
        request.sliding[first:last] = [0] * (last - first)
        if self.tiers:
            self.device.update(page for page in request.on_device[first:last] if page)
            request.on_device[first:last] = [0] * (last - first)

    def grow(self, name, tokens, fails=None):
        """Extend a request; the model says whether there is room, and which pages may be taken."""
        request = self.live[name]
        new = -(-(request.tokens + tokens) // PAGE) - len(request.pages)
        fits = new <= self.room()
        assert self.allocator.pages_needed([request.tokens], [request.tokens + tokens]) == new
        lacking = {s.space: s.missing for s in self.allocator.shortfall(new)}
        expected = {"full": new - len(self.full), "swa": new - len(self.swa)}
        expected = {space: count * PAGE for space, count in expected.items() if count > 0}
        if self.tiers and new > len(self.device):
            expected["device"] = (new - len(self.device)) * self.tiers.page_size
        assert lacking == expected
        row = self.rows.row_of(name)
        last = self.rows.req_to_token[row, request.tokens - 1].long() if request.tokens else torch.tensor(-1)
        begin, end = [request.tokens], [request.tokens + tokens]
        slots = self.allocator.alloc_extend(torch.tensor(begin), begin, torch.tensor(end), end, last.view(1), tokens)
        assert (slots is not None) == fits
        if slots is None:
            return
        self.rows.write([row], begin, end, slots)
        request.tokens += tokens
        swa = self.pool.translate_loc_from_full_to_swa(slots).tolist()
        for place, slot in enumerate(slots.tolist()):
            page = (begin[0] + place) // PAGE
            if page == len(request.pages):
                self.note_page(request, slot, swa[place])
            assert slot == request.pages[page] * PAGE + (begin[0] + place) % PAGE
            assert swa[place] in (0, request.sliding[page] * PAGE + slot % PAGE)

    def chosen(self, which):
        return self.live and sorted(self.live)[which % len(self.live)]

    @rule(tokens=st.integers(1, 400))
    def admit(self, tokens):
        if self.rows.available_size():
            self.names += 1
            self.rows.alloc([self.names])
            self.live[self.names] = Request()
            self.grow(self.names, tokens)

    @rule(tokens=st.integers(1, 900))
    def arrive(self, tokens):
        """A prompt comes with its rows: its newest tokens alone slide, and have compressed rows on the device."""
        if not self.receives or not self.rows.available_to_arrive():
            return
        new, first = -(-tokens // PAGE), max(0, tokens - WINDOW) // PAGE
        assert self.allocator.swa_pages_needed([0], [tokens], [WINDOW]) == new - first
        sides = [side for side in (self.swa, self.device) if side is not None]
        fits = new <= len(self.full) and all(new - first <= len(side) for side in sides)
        self.names += 1
        slots = self.cache.admit(self.names, tokens, arriving=True)
        assert (slots is not None) == fits
        if slots is None:
            return
        request = self.live[self.names] = Request()
        request.tokens, request.evicted = tokens, first * PAGE
        swa = self.pool.translate_loc_from_full_to_swa(slots).tolist()
        for page in range(new):
            self.note_page(request, int(slots[page * PAGE]), swa[page * PAGE], page >= first)
        assert slots.tolist() == [request.pages[n // PAGE] * PAGE + n % PAGE for n in range(tokens)]

    @rule(which=NUMBERS)
    def start(self, which):
        """A request whose rows are there runs, unless as many as may do."""
        name = self.receives and self.chosen(which)
        if name:
            can_run = name not in self.rows.arriving() or self.rows.running < self.rows.size
            assert (self.rows.start([name]) is not None) == can_run

    @rule(which=NUMBERS, tokens=st.integers(1, 300))
    def extend(self, which, tokens):
        name = self.chosen(which)
        if name and self.live[name].tokens + tokens <= 2048:
            self.grow(name, tokens)

    @rule()
    def decode(self):
        names = [name for name in self.live if 0 < self.live[name].tokens < 2048]
        heads = [name for name in names if self.live[name].tokens % PAGE == 0]
        if not names:
            return
        seq = [self.live[name].tokens + 1 for name in names]
        rows = [self.rows.row_of(name) for name in names]
        last = torch.stack([self.rows.req_to_token[row, n - 2].long() for row, n in zip(rows, seq, strict=True)])
        slots = self.allocator.alloc_decode(torch.tensor(seq), seq, last)
        assert (slots is not None) == (len(heads) <= self.room())
        if slots is None:
            return
        self.rows.write(rows, [n - 1 for n in seq], seq, slots)
        for name, slot, swa in zip(names, slots, self.pool.translate_loc_from_full_to_swa(slots), strict=True):
            request = self.live[name]
            if name in heads:
                self.note_page(request, int(slot), int(swa))
            request.tokens += 1

    @rule(which=NUMBERS, end=NUMBERS)
    def evict(self, which, end):
        name = self.chosen(which)
        if not name:
            return
        request = self.live[name]
        end = max(request.evicted, end % (max(0, request.tokens - WINDOW) + 1))
        self.cache.evict([name], [end])
        self.give_window(request, request.evicted // PAGE, end // PAGE)
        request.evicted = end

    @rule(which=NUMBERS)
    def release(self, which):
        name = self.chosen(which)
        if name:
            self.cache.release(name)
            request = self.live.pop(name)
            self.full.update(request.pages)
            self.give_window(request, 0, len(request.pages))
            if self.tiers:
                self.device |= self.kept.pop(name, set())

    @rule(which=NUMBERS, slots=st.integers(1, 96))
    def buffer(self, which, slots):
        """Take or grow a device buffer, where there are tiers."""
        name = self.tiers and self.chosen(which)
        if not name:
            return
        request, page = self.live[name], self.tiers.page_size
        pages, held = -(-slots // page), sum(1 for r in self.live.values() if r.buffer)
        free = len(self.device)
        if request.buffer:
            more = max(0, pages - request.buffer)
            found = self.allocator.grow_device_buffer(name, slots)
        else:
            more = pages
            found = self.allocator.alloc_device_buffer(name, slots)
            if held >= self.allocator.max_device_buffers:
                assert found is None
                return
        assert (found is not None) == (more <= free)
        if found is not None:
            taken = set((found // page).tolist())
            assert len(taken) == more
            self.device -= taken
            request.buffer += more
            self.kept.setdefault(name, set()).update(taken)

    @rule(which=NUMBERS, tokens=st.integers(1, 300))
    def take_back(self, which, tokens):
        """Speculation: what was taken comes back as a whole."""
        name = self.chosen(which)
        if not name or self.live[name].tokens + tokens > 2048:
            return
        before, state = self.counts(), self.allocator.backup_state()
        begin = [self.live[name].tokens]
        row = self.rows.row_of(name)
        last = self.rows.req_to_token[row, begin[0] - 1].long() if begin[0] else torch.tensor(-1)
        end = [begin[0] + tokens]
        self.allocator.alloc_extend(torch.tensor(begin), begin, torch.tensor(end), end, last.view(1), tokens)
        zero, end = [0], [3 * tokens]
        lens = (torch.tensor(zero), zero, torch.tensor(end), end, torch.tensor([-1]), 3 * tokens)
        self.allocator.alloc_extend_swa_tail(*lens, [WINDOW])
        self.allocator.restore_state(state)
        assert self.counts() == before

    @rule(side=st.sampled_from(["full", "swa", "device"]), tokens=st.integers(1, 300))
    def fail_half_way(self, side, tokens):
        """A side that raises leaves all as they were."""
        if (side == "device" and not self.tiers) or -(-tokens // PAGE) > self.room():
            return
        before, zero, end = self.counts(), [0], [tokens]
        inner, method = self.allocator.parts.allocators[side], "alloc_extend" if side == "full" else "alloc_pages"
        with broken(inner, method):
            self.allocator.alloc_extend(torch.tensor(zero), zero, torch.tensor(end), end, torch.tensor([-1]), tokens)
        assert self.counts() == before

    @rule(side=st.sampled_from(["full", "swa", "device", "requests"]), tokens=st.integers(1, 900))
    def fail_to_arrive(self, side, tokens):
        """The same where a prompt arrives, whose row is taken last."""
        rows = self.rows.available_to_arrive() if self.receives else 0
        if not rows or (side == "device" and not self.tiers) or -(-tokens // PAGE) > self.room():
            return
        part, before = self.allocator.parts.allocators.get(side, self.rows), self.counts()
        with broken(part, {"full": "alloc_extend", "requests": "write"}.get(side, "alloc_pages")):
            self.cache.admit("nobody", tokens, arriving=True)
        assert self.counts() == before
        assert (self.rows.available_to_arrive(), self.rows.row_of("nobody")) == (rows, None)

    def counts(self):
        sides = self.allocator.full_available_size(), self.allocator.swa_available_size()
        return (*sides, self.allocator.device_available_size()) if self.tiers else sides

    @invariant()
    def free_and_live_add_up(self):
        expected = (len(self.full) * PAGE, len(self.swa) * PAGE)
        assert self.counts()[:2] == expected
        assert not self.tiers or self.counts()[2] == len(self.device) * self.tiers.page_size
        assert self.allocator.available_size() == self.room() * PAGE
        held = [page * PAGE for request in self.live.values() for page in request.pages]
        self.allocator.check(torch.tensor(held, dtype=torch.int64))

    @invariant()
    def nothing_that_lies_beside_pages_is_shared(self):
        slots = [self.rows.req_to_token[self.rows.row_of(n), : r.tokens].long() for n, r in self.live.items()]
        if not slots:
            return
        slots = torch.cat(slots)
        for ratio in (4, 128):
            places = self.pool.translate_loc_from_full_to_compressed(slots, ratio)
            places = places[places >= 0]
            assert len(places.unique()) == len(places)
            assert not len(places) or PAGE // ratio <= int(places.min())
        states = self.pool.translate_loc_from_full_to_state(slots)
        rings = [p for r in self.live.values() for p in r.sliding if p]
        assert set((states[states > 0] // RING).tolist()) == set(rings)


@contextlib.contextmanager
def broken(part, method):
    """A call that does its work and then raises; what is called inside raises the same."""

    def fails(*args, **kwargs):
        getattr(type(part), method)(part, *args, **kwargs)
        raise SlotError("broken")

    setattr(part, method, fails)
    try:
        with pytest.raises(SlotError, match="broken"):
            yield
    finally:
        delattr(part, method)


def steps_of(rng):
    """Return a step of the walk and its arguments."""
    tokens, which = rng.randint(1, 400), rng.randrange(2**16)
    few = min(tokens, 300)
    return rng.choice(
        [
            ("admit", (tokens,)),
            ("arrive", (rng.randint(1, 900),)),
            ("start", (which,)),
            ("extend", (which, few)),
            ("decode", ()),
            ("decode", ()),
            ("evict", (which, rng.randrange(2**16))),
            ("release", (which,)),
            ("buffer", (which, rng.randint(1, 96))),
            ("take_back", (which, few)),
            ("fail_half_way", (rng.choice(["full", "swa", "device"]), few)),
            ("fail_to_arrive", (rng.choice(["full", "swa", "device", "requests"]), tokens)),
        ]
    )


def walked(cache, options):
    found = cache(page_size=PAGE, budget_bytes=3 * 2**20, swa_full_tokens_ratio=0.6, **options)
    assert 8 <= found.plan.spaces["full"] // PAGE <= 60
    return found


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_the_composite_does_what_sets_of_numbers_say(cache, effort, options):
    Walk.cache = walked(cache, options)
    run_state_machine_as_test(Walk, settings=effort)


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_a_long_walk_never_comes_apart(cache, effort, options):
    """A million steps with `make fuzz`, on one cache that is never cleared."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    Walk.cache = walked(cache, options)
    walk = Walk()
    for step in range(MILLION if effort.max_examples > 100 else 1500):
        name, arguments = steps_of(rng)
        getattr(walk, name)(*arguments)
        if step % LOOKS == 0:
            walk.free_and_live_add_up()
            walk.nothing_that_lies_beside_pages_is_shared()
    for _ in tuple(walk.live):
        walk.release(0)
    walk.free_and_live_add_up()
    sizes = [side.size for side in (walk.allocator.full, walk.allocator.swa, walk.tiers) if side is not None]
    assert walk.counts() == tuple(sizes)
