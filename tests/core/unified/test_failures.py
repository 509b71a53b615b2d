"""An error at any inner call: copies of pages, writes to tables and lists, and the events of forward passes."""

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from kvdock.allocators.ring import PageRing  # noqa: E402
from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.unified.segment import Segment  # noqa: E402

TABLES = ("_page_of", "_owner_of", "_holes")


class Broken(Exception):
    """What an inner call raises."""


class Fuse:
    """Lets the n-th inner call fail, and those after it succeed."""

    left = 0

    def burn(self, what):
        self.left -= 1
        if self.left == 0:
            raise Broken(what)


FUSE = Fuse()


class Written(np.ndarray):
    """A table that burns the fuse after it was written."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        FUSE.burn("write")


class Event:
    """A forward pass that is over once somebody waited for it."""

    is_over = False

    def query(self):
        FUSE.burn("query")
        return self.is_over

    def wait(self):
        FUSE.burn("wait")
        self.is_over = True


class FailingKernels(ReferenceKernels):
    """Copies the first view, at most, when the fuse burns."""

    def move(self, views, tgt_loc, src_loc):
        half = tgt_loc.shape[0] // 2
        super().move(views[:1], tgt_loc[:half], src_loc[:half])
        FUSE.burn("move")
        super().move(views, tgt_loc, src_loc)


def spaces_of(cache):
    return [cache.memory.segment(stretch.space) for stretch in cache.memory.line.stretches]


def sides_of(cache):
    allocator = cache.token_to_kv_pool_allocator
    return list(getattr(allocator, "_tiers", {"": allocator}).values())


def build(small, kind, lazy):
    """A cache with holes in every space, a forward pass to wait for, and other bytes in each page."""
    FUSE.left = 0
    options = {"max_running_requests": 8, "prefix_cache": False, "lazy_compaction": lazy}
    cache = small.build(kind, budget_bytes=20_000, **options)
    names = []
    while cache.admit(len(names), 9) is not None:
        names.append(len(names))
    cache.prepare_states()
    with cache.memory.gate():
        for name in names[:-3:2]:
            cache.release(name)
            names.remove(name)
    memory = cache.memory
    memory._raw[memory.line.low :].random_(generator=torch.Generator().manual_seed(1))
    with memory.forward(Event()):
        pass
    for segment in spaces_of(cache):
        segment._kernels = FailingKernels()
        for table in TABLES:
            setattr(segment, table, getattr(segment, table).view(Written))
    return cache, names


def contents(cache):
    """What each live page holds."""
    found = {}
    for segment in spaces_of(cache):
        stretch = segment.stretch
        for page, place in enumerate(segment.page_of.tolist()):
            if place:
                start = stretch.at(place - stretch.first)
                found[stretch.space, page] = cache.memory._raw[start : start + stretch.page_nbytes].numpy().tobytes()
    return found


def state(cache):
    """All that callers can see, and the order in which pages come next."""
    table, found = cache.req_to_token_pool, [contents(cache), cache.memory.live(), dict(cache.req_to_token_pool._rows)]
    for side in sides_of(cache):
        ring = side._ring
        found += [ring.free, ring.staged, ring.peek(ring.free).tolist(), side.size, side._group is None]
        found += [side._ledger.live_pages().tolist(), side.available_size()]
    if hasattr(table, "states"):
        found += [table.states.live_slots(), table.states._head, table.states.available_size()]
    if hasattr(allocator := cache.token_to_kv_pool_allocator, "full_to_swa"):
        found.append(allocator.full_to_swa[torch.tensor(allocator.live_pages())].tolist())
    return found


def windows(cache):
    """What each space owns, by how often it gave something up."""
    return {(segment.space, segment._narrowed): segment.window for segment in spaces_of(cache)}


def slots_of(cache, name):
    table = cache.req_to_token_pool
    row = table.row_of(name)
    return table.req_to_token[row, : int(table.lengths[row])].long()


def growth_of(cache, names, more):
    lengths = [slots_of(cache, name).shape[0] for name in names]
    last = torch.stack([slots_of(cache, name)[-1] for name in names])
    return lengths, [length + more for length in lengths], last


def alloc(cache, names):
    allocator = cache.token_to_kv_pool_allocator
    count = allocator.available_size()
    return lambda: allocator.alloc(count)


def alloc_extend(cache, names):
    prefix, seq, last = growth_of(cache, names, 5)
    lens = torch.tensor(prefix), prefix, torch.tensor(seq), seq
    return lambda: cache.token_to_kv_pool_allocator.alloc_extend(*lens, last, 5 * len(names), names)


def alloc_decode(cache, names):
    decode = cache.token_to_kv_pool_allocator.alloc_decode
    prefix, seq, last = growth_of(cache, names, 3)
    extended = cache.token_to_kv_pool_allocator.alloc_extend(
        torch.tensor(prefix), prefix, torch.tensor(seq), seq, last, 3 * len(names), names
    )
    lasts, seq = extended[2::3].long(), [length + 1 for length in seq]
    return lambda: decode(torch.tensor(seq), seq, lasts, names)


def alloc_states(cache, names):
    states = cache.req_to_token_pool.states
    owners = [f"owner {i}" for i in range(states.available_size())]
    return lambda: states.alloc(owners)


def free(cache, names):
    slots = slots_of(cache, names[0])
    return lambda: cache.token_to_kv_pool_allocator.free(slots)


def free_group(cache, names):
    allocator = cache.token_to_kv_pool_allocator
    allocator.free_group_begin()
    allocator.free_pages(slots_of(cache, names[0])[::4] // 4)
    allocator.free(slots_of(cache, names[1]))
    return allocator.free_group_end


def free_states(cache, names):
    states = cache.req_to_token_pool.states
    (slot,) = states.alloc(["a prefix cache"])
    return lambda: states.free([slot])


def evict(cache, names):
    return lambda: cache.evict(names[:1], [8])


def release(cache, names):
    return lambda: cache.release(names[0])


def compact(cache, names):
    return lambda: cache.memory.compact(10**9, 10**9)


def restore(cache, names):
    allocator = cache.token_to_kv_pool_allocator
    mark = allocator.backup_state()
    allocator.alloc(4)
    return lambda: allocator.restore_state(mark)


ATOMIC = (alloc, alloc_extend, alloc_decode, alloc_states, evict, compact, free_states, free, free_group, restore)
RETRIED = (release,)
"""Of tokens and states one may be done: a second call does the rest."""
EAGER = (free, free_group, restore, evict, free_states, release)
"""What closes holes at once without lazy compaction."""
CASES = [
    *((kind, call, True) for kind in ("linear", "sliding") for call in (*ATOMIC, *RETRIED)),
    *((kind, call, False) for kind in ("linear", "sliding") for call in EAGER),
    *(("three", call, True) for call in (alloc, alloc_decode, evict)),
]
LACKING = {("sliding", alloc_states), ("sliding", free_states), ("linear", evict)}


def failures(small, kind, lazy, call):
    """Yield, for each inner call of `call`, the cache and the state before, after an error there."""
    for place in range(1, 200):
        cache, names = build(small, kind, lazy)
        again = call(cache, names)
        before, owned = state(cache), windows(cache)
        FUSE.left = place
        try:
            again()
        except Broken:
            if call in ATOMIC:  # what grew is given up again, unless pages of that space moved
                assert {key: owned[key] for key in windows(cache).keys() & owned} == {
                    key: window for key, window in windows(cache).items() if key in owned
                }
            yield cache, before, again
        if FUSE.left > 0:
            FUSE.left = 0
            return
    raise AssertionError("a call has no end")


@pytest.mark.parametrize(("kind", "call", "lazy"), [case for case in CASES if case[:2] not in LACKING])
def test_after_an_error_at_any_inner_call_nothing_has_changed(small, kind, call, lazy):
    count = 0
    for cache, before, again in failures(small, kind, lazy, call):
        after = state(cache)
        if call in ATOMIC or kind == "sliding":
            assert after == before
        else:  # what both still hold is what they held
            assert after[0].items() <= before[0].items()
        cache.check()
        again()
        cache.check()
        count += 1
    assert count


@pytest.mark.parametrize("what", ["move", "query", "wait", "write"])
def test_compaction_fails_at_every_kind_of_inner_call(small, monkeypatch, what):
    seen = set()
    burn = Fuse.burn
    monkeypatch.setattr(Fuse, "burn", lambda self, name: (seen.add(name), burn(self, name))[1])
    for cache, before, _ in failures(small, "three", True, alloc):
        assert state(cache) == before
    assert what in seen


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("change", ["clear", "resize"])
def test_a_ring_that_cannot_be_reset_leaves_all_as_it_was(small, monkeypatch, lazy, change):
    cache, names = build(small, "linear", lazy)
    allocator = cache.token_to_kv_pool_allocator
    if change == "resize":
        for name in names:
            cache.release(name)
    before = state(cache)

    def fail(self, capacity):
        raise Broken

    with monkeypatch.context() as patched, pytest.raises(Broken):
        patched.setattr(PageRing, "reset", fail)
        allocator.clear() if change == "clear" else allocator.resize({"full": 8})
    assert state(cache) == before
    cache.check()
    allocator.clear() if change == "clear" else allocator.resize({"full": 8})
    allocator.check(torch.zeros(0, dtype=torch.int64))


def test_a_free_is_done_although_its_holes_could_not_be_closed(small):
    cache, names = build(small, "linear", False)
    allocator, memory = cache.token_to_kv_pool_allocator, cache.memory
    holes = memory.segment("full").holes
    held = torch.cat([slots_of(cache, name) for name in names[1:]])
    before = {key: value for key, value in contents(cache).items() if key[0] == "full"}
    memory._pending.clear()
    FUSE.left = 5  # three writes of the free, then the list of holes
    allocator.free(slots_of(cache, names[0]))
    assert isinstance(memory.failure, Broken)
    assert memory.segment("full").holes == holes + 3
    allocator.check(held)
    assert {key: value for key, value in contents(cache).items() if key[0] == "full"}.items() < before.items()
    allocator.free(slots_of(cache, names[1]))
    assert (memory.failure, memory.segment("full").holes) == (None, 0)


def test_what_grew_for_a_failed_call_is_given_up_again(small, monkeypatch):
    cache = small.build("sliding")
    allocator, memory = cache.token_to_kv_pool_allocator, cache.memory
    held = allocator.alloc(4)
    shares = memory.shares()

    def fail(self, pages):
        raise Broken

    with monkeypatch.context() as patched, pytest.raises(Broken):
        patched.setattr(Segment, "back", fail)
        allocator.alloc(16)
    assert memory.shares() == shares
    with monkeypatch.context() as patched, pytest.raises(Broken):
        patched.setattr(type(allocator), "_write", lambda self, pages, words: fail(self, pages))
        allocator.alloc(16)
    assert memory.shares() == shares
    lens = torch.tensor([0]), [0], torch.tensor([9]), [9], torch.tensor([-1]), 9
    kernels = type(allocator.full.parts.kernels)
    with monkeypatch.context() as patched, pytest.raises(Broken):
        patched.setattr(kernels, "alloc_extend", lambda *arguments: fail(*arguments[:2]))
        allocator.full.alloc_extend(*lens)
    assert memory.shares() == shares
    cache.check(held)
