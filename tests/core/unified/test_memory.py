"""One buffer for several spaces: what is free, who must give, what holds pages, and where bytes lie."""

import random

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.errors import BuildError, SlotError  # noqa: E402
from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.layout import SizeRule, Space  # noqa: E402
from kvdock.pools.storage import allocate, unique_storages  # noqa: E402
from kvdock.unified import UnifiedMemory  # noqa: E402
from kvdock.unified.geometry import Line, Stretch  # noqa: E402
from kvdock.unified.segment import table_buffers  # noqa: E402

CPU = torch.device("cpu")


def memory_of(line, is_lazy=True):
    """Unified memory on a buffer and tables of its own."""
    memory = UnifiedMemory(line, torch.zeros(line.high, dtype=torch.uint8), ReferenceKernels(), is_lazy)
    for stretch in line.stretches:
        space = {stretch.space: Space(name=stretch.space, rule=SizeRule(), page_size=stretch.page_size)}
        sizes = {stretch.space: stretch.places * stretch.page_size}
        memory.join(stretch.space, allocate(table_buffers(stretch.space), sizes, space, CPU))
    return memory


def pair(pages=100, state=16):
    """`pages` pages of 16 bytes behind two paddings, from which states of `state` bytes are taken as well."""
    low, high = 16 + state, 16 + state + 16 * pages
    states = Stretch("state", 1, state, low, 1, (high - low) // state)
    return memory_of(Line((states, Stretch("kv", 1, 16, low, low // 16, pages)), low, high))


def three():
    """States of 112 bytes, sliding pages of 48 and 120 pages of 32."""
    low, high = 192, 192 + 32 * 120
    states, sliding = Stretch("state", 1, 112, low, 1, 34), Stretch("swa", 1, 48, 32 + 48 * 4, 4, (high - 224) // 48)
    return Line((states, sliding, Stretch("kv", 1, 32, low, 6, 120)), low, high)


def take(memory, space, pages):
    assert memory.secure({space: len(pages)})
    memory.segment(space).back(torch.tensor(pages))


def give(memory, space, pages):
    memory.release(space, torch.tensor(pages))


def bytes_of(memory, space, page):
    segment = memory.segment(space)
    stretch = segment.stretch
    start = stretch.start + (int(segment.page_of[page]) - stretch.first) * stretch.page_nbytes
    return memory._raw[start : start + stretch.page_nbytes]


def test_a_shortfall_says_which_side_must_give_how_much():
    # H-05: 100 pages, the KV side holds 98, a state of one page's bytes each needs 3: the gap is 2
    memory = pair()
    take(memory, "kv", range(1, 99))
    assert memory.available("state") == 2
    assert not memory.secure({"state": 3})
    (lacks,) = memory.shortfall({"state": 3})
    assert (lacks.needed, lacks.available, lacks.missing, lacks.givers) == (3, 2, 1, (("kv", 1),))
    assert lacks.advice == "space 'state' must give 1 slots, or space 'kv' must give 1"
    give(memory, "kv", [40])
    assert memory.shortfall({"state": 3}) == ()
    assert memory.secure({"state": 3})
    take(memory, "state", [1, 2, 3])
    memory.check()
    assert memory.segment("kv").pages_moved <= 1


def test_no_page_moves_while_a_gate_is_closed():
    # H-06
    memory = pair()
    take(memory, "kv", range(1, 101))
    give(memory, "kv", range(1, 51))
    places = memory.segment("kv").page_of.clone()
    with memory.gate("a transfer"), memory.gate("another"):
        assert memory.compact(headroom_bytes=10**6) == 0
        assert not memory.secure({"state": 1})
        assert (memory.available("state"), memory.free_after("state")) == (0, 50)
        (lacks,) = memory.shortfall({"state": 1})
        assert lacks.held_by == ("a transfer", "another")
        assert "once pages may move again, which a transfer, another forbids" in lacks.advice
        assert torch.equal(memory.segment("kv").page_of, places)
    assert memory.secure({"state": 50})
    memory.check()


def test_capacity_is_computed_afresh_each_time():
    # H-06: the gate is toggled 100 times, and every answer is that of the tables
    memory, rng = pair(), random.Random(6)
    take(memory, "kv", range(1, 91))
    live, ticket = set(range(1, 91)), None
    for _ in range(100):
        ticket = memory.close_gate() if ticket is None else memory.open_gate(ticket)
        page = rng.choice(sorted(live))
        live.remove(page)
        give(memory, "kv", [page])
        if len(live) < 40:
            back = sorted(set(range(1, 101)) - live)[:50]
            take(memory, "kv", back)
            live.update(back)
        segment = memory.segment("kv")
        gap = 100 - (segment.window.high - segment.window.low)
        assert memory.available("state") == (100 - len(live) if memory.can_move else gap)
        assert memory.live() == {"state": 0, "kv": len(live)}
        memory.check()


def test_two_batches_of_moves_lose_no_page_and_keep_every_byte():
    # H-06: one event, several batches
    class Event:
        waits = 0

        def query(self):
            return False

        def wait(self):
            Event.waits += 1

    memory = pair()
    take(memory, "kv", range(1, 101))
    for page in range(1, 101):
        bytes_of(memory, "kv", page).fill_(page)
    with memory.forward(Event()):
        assert not memory.can_move
    give(memory, "kv", range(1, 101, 2))
    assert memory.secure({"state": 20}) and memory.secure({"state": 40})
    assert Event.waits == 1  # the first batch waits, and what follows it on the device follows the pass as well
    assert memory.segment("kv").pages_moved > 0
    memory.check()
    assert memory.live() == {"state": 0, "kv": 50}
    assert all(bytes_of(memory, "kv", page).eq(page).all() for page in range(2, 101, 2))


def test_three_spaces_reach_their_most_and_never_overlap():
    # H-07: 10,000 steps of taking, giving and compacting
    sizes = {"state": 112, "swa": 48, "kv": 32}
    low, high, line = 192, 192 + 32 * 120, three()
    memory, rng = memory_of(line), random.Random(7)
    for space, most in (("state", 34), ("swa", 79), ("kv", 120)):
        assert memory.available(space) == most
        take(memory, space, range(1, most + 1))
        assert memory.available(space) == 0
        give(memory, space, range(1, most + 1))
    live = {space: {} for space in sizes}
    for step in range(10_000):
        space = rng.choice(list(sizes))
        if rng.random() < 0.5:
            count = rng.randint(1, 6)
            used = sum(len(own) * sizes[name] for name, own in live.items())
            if memory.secure({space: count}):
                pages = [page for page in range(1, 121) if page not in live[space]][:count]
                memory.segment(space).back(torch.tensor(pages))
                for page in pages:
                    live[space][page] = step % 251
                    bytes_of(memory, space, page).fill_(step % 251)
            else:
                assert used + count * sizes[space] > high - low - 48  # a page of the grid between the ends
        elif live[space]:
            pages = rng.sample(sorted(live[space]), rng.randint(1, len(live[space])))
            give(memory, space, pages)
            for page in pages:
                del live[space][page]
        else:
            memory.compact(rng.randint(0, 500), high)
        if step % 50 == 0:
            memory.check()
            for name, own in live.items():
                assert all(bytes_of(memory, name, page).eq(value).all() for page, value in own.items())
    assert memory.bytes_moved > 0


def test_a_space_that_could_not_make_way_owns_what_it_did(monkeypatch):
    memory = memory_of(three())
    take(memory, "swa", range(1, 11))  # in the middle of the gap; for states it has to go up
    for page in range(1, 11):
        bytes_of(memory, "swa", page).fill_(page)
    windows, free = memory._windows(), memory.shares()

    def fail(self, views, tgt_loc, src_loc):
        raise ZeroDivisionError

    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(ReferenceKernels, "move", fail)
        memory.secure({"state": 25})
    assert (memory._windows(), memory.shares(), memory.bytes_moved) == (windows, free, 0)
    memory.check()
    take(memory, "state", range(1, 26))
    assert memory.bytes_moved > 0
    assert all(bytes_of(memory, "swa", page).eq(page).all() for page in range(1, 11))


def test_without_lazy_compaction_a_free_leaves_no_hole():
    line = pair().line
    memory = memory_of(line, is_lazy=False)
    take(memory, "kv", range(1, 61))
    give(memory, "kv", [3, 50, 17])
    assert memory.segment("kv").holes == 0
    with memory.gate():
        give(memory, "kv", [4, 5])
        assert memory.segment("kv").holes == 2


@pytest.mark.parametrize(("max_bytes", "moved"), [(64, 64), (65, 64), (79, 64), (80, 80), (16, 16)])
def test_one_call_of_compact_moves_no_more_than_it_may(max_bytes, moved):
    memory = pair()
    take(memory, "kv", range(1, 101))
    give(memory, "kv", range(51, 101))  # the lowest places, at which the space grows, are taken
    assert memory.compact(max_bytes, headroom_bytes=10**6) == moved
    assert memory.segment("kv").holes == 50 - moved // 16
    while memory.compact(max_bytes, headroom_bytes=10**6):
        memory.check()
    assert (memory.segment("kv").live, memory.segment("kv").holes) == (50, 0)


@pytest.mark.parametrize("max_bytes", [1, 159, 160, 319])
def test_a_page_that_is_larger_than_the_limit_moves_alone(max_bytes):
    memory = pair(state=160)
    take(memory, "state", range(1, 9))
    give(memory, "state", range(1, 5))
    assert [memory.compact(max_bytes, headroom_bytes=10**6) for _ in range(5)] == [160, 160, 160, 160, 0]
    assert memory.segment("state").holes == 0
    assert memory.compact(0, headroom_bytes=10**6) == 0


def test_a_state_that_is_larger_than_the_default_limit_moves_by_default(small):
    # states of 18 MiB, as of real models; a sixteenth of the buffer is less than two of them
    from kvdock.model import LayerSpec, ModelSpec, StateParams
    from kvdock.unified.memory import MOVED_BYTES

    params = small.layers["linear"][1].params
    large = LayerSpec(
        kind="state", params=StateParams(conv=params.conv, temporal=(36, 64, 2048), temporal_dtype="float32")
    )
    model = ModelSpec(
        name="m", architecture="M", layers=(small.layers["linear"][0], large), context_length=64, dtype="float32"
    )
    cache = small.build_model(model, budget_bytes=200 * 2**20)
    states, memory = cache.req_to_token_pool.states, cache.memory
    slots = states.alloc(range(states.available_size()))
    assert cache.token_to_kv_pool_allocator.alloc(cache.token_to_kv_pool_allocator.available_size()) is not None
    states.free(slots[:2])
    page = memory.line.stretches[0].page_nbytes
    assert page > MOVED_BYTES and memory.line.high // 16 < 2 * page
    assert memory.compact() == page
    assert memory.gap_bytes() >= page


@pytest.mark.parametrize(
    ("limits", "named"), [((-1,), "max_bytes=-1"), ((1.5,), "max_bytes"), ((1, -2), "headroom_bytes=-2")]
)
def test_limits_of_compact_that_are_no_numbers_of_bytes_are_refused(limits, named):
    with pytest.raises(SlotError, match=named):
        pair().compact(*limits)


def test_compact_stops_where_there_is_room_enough():
    memory = pair()
    take(memory, "kv", range(1, 51))
    give(memory, "kv", range(1, 31))
    assert memory.compact() == 0  # half of the buffer is a gap
    assert memory.segment("kv").holes == 30


def test_a_gate_opens_once():
    memory = pair()
    ticket = memory.close_gate()
    for other in (object(), {}, None):
        with pytest.raises(SlotError, match="never closed"):
            memory.open_gate(other)
    assert not memory.can_move
    memory.open_gate(ticket)
    with pytest.raises(SlotError, match="open already"):
        memory.open_gate(ticket)


@pytest.mark.parametrize("what", [None, "", 3])
def test_a_gate_says_in_words_what_holds_pages(what):
    memory = pair()
    with pytest.raises(SlotError, match="say in words"):
        memory.close_gate(what)
    assert memory.can_move


class Pass:
    """A forward pass on a device: over when the test says so."""

    def __init__(self, is_over=False):
        self.is_over, self.waits = is_over, 0

    def query(self):
        return self.is_over

    def wait(self):
        self.waits += 1


@pytest.mark.parametrize("event", ["not an event", 3, Pass])
def test_what_is_no_event_is_refused_before_the_pass(event):
    memory = pair()
    with pytest.raises(SlotError, match=r"give one with query\(\) and wait\(\)"), memory.forward(event):
        raise AssertionError("the pass began")
    assert memory.can_move
    take(memory, "kv", range(1, 101))
    give(memory, "kv", range(51, 101))
    assert memory.compact(160, 10**6) == 160


def test_passes_that_are_over_are_forgotten_and_others_are_waited_for():
    memory, running = pair(), [Pass() for _ in range(3)]
    for event in running:
        with memory.forward(event):
            pass
    for _ in range(1000):
        with memory.forward(Pass(is_over=True)):
            pass
        assert len(memory._pending) <= 2 * len(running) + 1
    for _ in range(1000):
        with memory.forward(running[0]):  # an engine may record one event again and again
            pass
    assert len(memory._pending) <= 2 * len(running) + 1
    take(memory, "kv", range(1, 101))
    give(memory, "kv", range(51, 101))
    memory.compact(160, 10**6)
    assert [event.waits for event in running] == [1, 1, 1]
    assert not memory._pending


def test_a_pass_that_fails_is_waited_for_as_well():
    memory, event = pair(), Pass()
    with pytest.raises(ZeroDivisionError), memory.forward(event):
        raise ZeroDivisionError
    assert memory.can_move and list(memory._pending.values()) == [event]


def test_only_spaces_of_the_line_join_and_each_once():
    memory = pair()
    with pytest.raises(BuildError, match="space 'kv' cannot join a buffer of state, kv"):
        memory.join("kv", None)
    with pytest.raises(BuildError, match="space 'swa' cannot join"):
        memory.join("swa", None)


@pytest.mark.parametrize("kind", ["linear", "sliding", "three", "pure"])
def test_views_share_one_buffer_and_planned_bytes_are_allocated(small, kind):
    # P-04: the bytes of unique storages are those of the plan
    cache = small.build(kind)
    assert cache.allocated_bytes() == cache.plan.total_bytes <= cache.plan.budget_bytes
    storages = [t for pool in cache.pools.values() for t in pool.storages()]
    shared = {key: size for key, size in unique_storages(storages).items() if size >= cache.memory.line.high}
    assert len(shared) == 1
    kv = sum(b.nbytes for group in cache.plan.groups for b in group.buffers)
    assert sum(shared.values()) <= kv
    assert cache.plan.unused_bytes < 4 * max(s.page_nbytes for s in cache.memory.line.stretches)


def test_every_row_of_a_page_lies_in_one_span(small):
    # P-07: values written through layer views lie in the page that the table names
    cache = small.build("sliding")
    cache.admit("a", 12)
    allocator, pool = cache.token_to_kv_pool_allocator, cache.token_to_kv_pool
    slots = cache.req_to_token_pool.req_to_token[1, :12].long()
    keys = torch.arange(12.0).view(12, 1, 1).expand(12, 1, 8)
    pool.set_kv_buffer(0, slots, keys, -keys)
    segment = allocator.full.segment
    line, raw = cache.memory.line, cache.memory._raw
    stretch = line.stretches[-1]
    for page in (slots[::4] // 4).tolist():
        start = stretch.start + (int(segment.page_of[page]) - stretch.first) * stretch.page_nbytes
        span = raw[start : start + stretch.page_nbytes].view(torch.float32)
        assert span.numel() == 2 * 4 * 8
        assert span.abs().sum() == 2 * keys[slots // 4 == page].sum()
    found = pool.read_kv(0, slots)
    assert torch.equal(found[0], keys) and torch.equal(found[1], -keys)


def test_regions_say_what_they_are(small):
    # P-08: one region a group, whose items are pages; layers are counted by the descriptors
    cache = small.build("linear")
    kv = cache.pools["full"]
    assert kv.transfer_kind == "pages"
    (region,) = kv.regions()
    stretch = cache.memory.line.stretches[-1]
    assert (region.item_nbytes, region.nbytes % region.item_nbytes) == (stretch.page_nbytes, 0)
    assert {info.layer_id for info in kv.buffer_infos()} == {0}
    assert all(info.stride_nbytes == stretch.page_nbytes for info in kv.buffer_infos())


def test_a_copy_of_a_state_outlives_its_source(small):
    cache = small.build("linear", budget_bytes=40_000)
    rows, (states,) = cache.req_to_token_pool, [p for n, p in cache.pools.items() if n == "state"]
    cache.admit("a", 4)
    cache.prepare_states()
    place = states.placed(torch.tensor([rows.state_of("a")]))
    states.temporal_states(1)[place] = 3.0
    kept = rows.donate("a", replace=True)
    cache.release("a")  # before the copy is made
    cache.admit("b", 4)
    cache.prepare_states()
    assert states.temporal_states(1)[states.placed(torch.tensor([kept]))].eq(3).all()
    assert states.temporal_states(1)[states.placed(torch.tensor([rows.state_of("b")]))].eq(0).all()


def test_clearing_one_pool_leaves_the_pages_of_others(small):
    cache = small.build("sliding")
    cache.admit("a", 8)
    slots = cache.req_to_token_pool.req_to_token[1, :8].long()
    ones = torch.ones(8, 1, 8)
    for layer in range(4):
        cache.token_to_kv_pool.set_kv_buffer(layer, slots, ones, ones)
    cache.pools["swa"].clear()
    assert cache.token_to_kv_pool.read_kv(0, slots)[0].eq(1).all()
    assert cache.token_to_kv_pool.read_kv(1, slots)[0].eq(0).all()
    cache.clear()
    assert not cache.memory._raw.any()


@pytest.mark.parametrize("kind", ["linear", "sliding", "three"])
def test_a_request_lives_without_memory(small, kind):
    from kvdock.builder import build

    cache = build(small.plan(kind), device="meta", debug=False)
    before = cache.memory.shares()
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    assert cache.admit("a", 9).is_meta
    cache.prepare_states()
    mark = allocator.backup_state()
    seq, last = torch.tensor([10], device="meta"), torch.tensor([1], device="meta")
    allocator.alloc_decode(seq, [10], last)
    allocator.restore_state(mark)
    cache.evict(["a"], [0])
    cache.release("a")
    assert [share._replace(free_now=0) for share in cache.memory.shares()] == [
        share._replace(free_now=0) for share in before
    ]
    assert table.available_size() > 0
