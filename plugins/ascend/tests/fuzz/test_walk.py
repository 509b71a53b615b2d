"""A long random walk over the six spaces of DeepSeek V4 on an NPU, against sets of page numbers."""

import random

import kvdock
import pytest

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

PAGE, LONGEST = 128, 2048
MILLION = 1_000_000
LOOKS = 64
"""Steps of the walk between two looks at every slot; what a step itself claims is compared at each."""
RATIOS = {"c4": 4, "c128": 128}
TURNS = {"c4_state": 2, "c128_state": 3}
"""Pages of states of a request, ``max(2, ceil(1.8 · r / 128) + 1)``, used in turn."""


def owned(name, pages):
    """Pages of a space that a request of so many full pages has."""
    if name in TURNS:
        return min(pages, TURNS[name])
    return -(-pages // RATIOS.get(name, 1))


class Request:
    def __init__(self):
        self.tokens = self.evicted = 0
        self.pages = {name: [] for name in ("full", "swa", *RATIOS, *TURNS)}


class Walk:
    """Requests grow, leave their window and end; allocations are taken back, and fail half-way."""

    def __init__(self, cache):
        self.cache, self.allocator = cache, cache.token_to_kv_pool_allocator
        self.rows, self.sides = cache.req_to_token_pool, cache.token_to_kv_pool_allocator.parts.allocators
        self.free = {name: set(range(1, side.size // PAGE + 1)) for name, side in self.sides.items()}
        self.live, self.names = {}, 0

    def counts(self):
        return {name: side.available_size() for name, side in self.sides.items()}

    def fits(self, tokens, grown):
        begin, end = -(-tokens // PAGE), -(-(tokens + grown) // PAGE)
        lacks = {n for n in self.free if owned(n, end) - owned(n, begin) > len(self.free[n])}
        # Whoever has a row is never short of what lies beside full and sliding pages.
        assert not lacks or lacks & {"full", "swa"}
        return not lacks

    def places(self, name, slots):
        if name == "full":
            return slots.long()
        return self.allocator.translate(slots) if name == "swa" else self.allocator.translate_beside(name, slots)

    def note(self, name, begin, slots):
        """Every place of every new token, against its page; a KeyError says that the page was somebody's."""
        request = self.live[name]
        request.tokens = begin + len(slots)
        positions = torch.arange(begin, request.tokens)
        for space, pages in request.pages.items():
            # Which of its pages a token has its row in, and where in it; of compressed rows the last of each group.
            ratio, turns = RATIOS.get(space, 1), TURNS.get(space)
            rows = positions // ratio
            index, offset = rows // PAGE, rows % PAGE
            index = index % turns if turns else index
            for new in range(len(pages), owned(space, -(-request.tokens // PAGE))):
                pages.append(self._page(name, space, new * PAGE * ratio))
                self.free[space].remove(pages[-1])
            expected = torch.tensor(pages)[index] * PAGE + offset
            expected[positions % ratio != ratio - 1] = -1
            assert self.places(space, slots).equal(expected)

    def _page(self, name, space, position):
        """Return the page of a space that holds the row of a request's token, from any token of its group."""
        first = self.rows.req_to_token[self.rows.row_of(name), position].long()
        last_of_group = first + RATIOS.get(space, 1) - 1
        return int(self.places(space, last_of_group.view(1))) // PAGE

    def batch(self, name, tokens):
        request, row = self.live[name], self.rows.row_of(name)
        begin, end = [request.tokens], [request.tokens + tokens]
        last = self.rows.req_to_token[row, begin[0] - 1].view(1) if begin[0] else torch.tensor([-1])
        return torch.tensor(begin), begin, torch.tensor(end), end, last, tokens

    def grow(self, name, tokens):
        request = self.live[name]
        tokens = min(tokens, LONGEST - request.tokens)
        if not tokens:
            return
        slots = self.allocator.alloc_extend(*self.batch(name, tokens), owners=[name])
        assert (slots is not None) == self.fits(request.tokens, tokens)
        if slots is None:
            return
        self.rows.write([self.rows.row_of(name)], [request.tokens], [request.tokens + tokens], slots)
        self.note(name, request.tokens, slots)

    def chosen(self, rng):
        return rng.choice(sorted(self.live)) if self.live else None

    def admit(self, rng):
        if self.rows.available_size():
            self.names += 1
            self.rows.alloc([self.names])
            self.live[self.names] = Request()
            self.grow(self.names, rng.choice([1, 127, 128, 129, rng.randint(1, 700)]))

    def extend(self, rng):
        if (name := self.chosen(rng)) is not None:
            self.grow(name, rng.choice([1, 1, 1, rng.randint(1, 300)]))

    def evict(self, rng):
        if (name := self.chosen(rng)) is None:
            return
        request = self.live[name]
        end = max(request.evicted, rng.randint(0, max(0, request.tokens - PAGE)))
        self.cache.evict([name], [end])
        sliding = request.pages["swa"]
        for page in range(request.evicted // PAGE, end // PAGE):
            self.free["swa"].add(sliding[page])
            sliding[page] = 0
        request.evicted = end

    def trim(self, rng):
        if (name := self.chosen(rng)) is None:
            return
        request = self.live[name]
        if request.tokens <= request.evicted:
            return
        kept = rng.randint(request.evicted, request.tokens)
        self.cache.trim([name], [kept])
        self.cut(request, kept)

    def cut(self, request, tokens):
        pages = -(-tokens // PAGE)
        for name, mine in request.pages.items():
            count = owned(name, pages)
            self.free[name].update(page for page in mine[count:] if page)
            del mine[count:]
        request.tokens = tokens

    def release(self, rng):
        if (name := self.chosen(rng)) is not None:
            self.cache.release(name)
            self.cut(self.live.pop(name), 0)

    def take_back(self, rng):
        """Speculation: what was taken comes back as a whole, in every space."""
        name = self.chosen(rng)
        if name is None or self.live[name].tokens + 300 > LONGEST:
            return
        before, state = self.counts(), self.allocator.backup_state()
        self.allocator.alloc_extend(*self.batch(name, rng.randint(1, 300)), owners=[name])
        self.allocator.restore_state(state)
        assert self.counts() == before

    def fail_half_way(self, rng):
        """A space that raises after it took pages leaves all as they were."""
        name = self.chosen(rng)
        if name is None or self.live[name].tokens + 300 > LONGEST:
            return
        tokens = rng.randint(1, 300)
        side, before = self.sides[rng.choice(sorted(RATIOS | TURNS))], self.counts()

        def broken(*args, **kwargs):
            type(side).alloc_pages(side, *args, **kwargs)
            raise RuntimeError("the device went away")

        side.alloc_pages = broken
        try:
            if self.fits(self.live[name].tokens, tokens):
                try:
                    state = self.allocator.backup_state()
                    self.allocator.alloc_extend(*self.batch(name, tokens), owners=[name])
                    self.allocator.restore_state(state)
                except RuntimeError:
                    pass
        finally:
            del side.alloc_pages
        assert self.counts() == before

    def look(self):
        """Free and live add up in every space, no page has two owners, and each page is where the map says."""
        assert self.counts() == {name: len(pages) * PAGE for name, pages in self.free.items()}
        for name, side in self.sides.items():
            held = [page for request in self.live.values() for page in request.pages[name] if page]
            assert len(set(held)) == len(held)
            assert not self.free[name] & set(held)
            assert len(self.free[name]) + len(held) == side.size // PAGE
        self.cache.check()


STEPS = ("admit", "extend", "extend", "extend", "evict", "trim", "release", "take_back", "fail_half_way")


def test_a_long_walk_never_comes_apart(planned, effort):
    """A million steps with `make fuzz`, on one cache that is never cleared."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    plan = planned(max_total_tokens=4096, max_running_requests=5, swa_full_tokens_ratio=0.5)
    walk = Walk(kvdock.build(plan, device="cpu", debug=True))
    for step in range(MILLION if effort.max_examples > 100 else 1500):
        getattr(walk, rng.choice(STEPS))(rng)
        if step % LOOKS == 0:
            walk.look()
    while walk.live:
        walk.release(rng)
    walk.look()
    assert walk.counts() == {name: plan.spaces[name] for name in walk.sides}
