"""What unified memory says of itself: queries change nothing, shortfalls name who must give, leaks and threads are told."""

import threading
from pathlib import Path

import kvdock
import pytest

torch = pytest.importorskip("torch")

from kvdock.errors import SlotError, UnsupportedCombination  # noqa: E402
from kvdock.layout import FULL, SWA  # noqa: E402

MODELS = Path(__file__).parents[2] / "models"


def fill(cache, tokens=9, keep=lambda name: name % 2):
    """Admit all that fits, and release those that are not kept."""
    names = []
    while cache.admit(len(names), tokens) is not None:
        names.append(len(names))
    cache.prepare_states()
    for name in names:
        if not keep(name):
            cache.release(name)
    return [name for name in names if keep(name)]


def everything(memory):
    """All tables, bytes and counters."""
    segments = [memory.segment(stretch.space) for stretch in memory.line.stretches]
    counters = [(s.window, s.holes, s.pages_moved, s.bytes_moved, s._narrowed) for s in segments]
    tables = [table.tobytes() for s in segments for table in (s._page_of, s._owner_of, s._holes)]
    held = list(memory._holds.values()), dict(memory._pending), memory.passes, memory.failure
    return counters, tables, memory._raw.numpy().tobytes(), held


def queries(cache):
    """Every query of the cache, of its allocators and of its memory."""
    allocator, memory, table = cache.token_to_kv_pool_allocator, cache.memory, cache.req_to_token_pool
    spaces = [stretch.space for stretch in memory.line.stretches]
    for count in (0, 1, allocator.available_size() // 4, allocator.available_size() // 4 + 1, 50):
        yield lambda count=count: allocator.shortfall(count)
        yield lambda count=count: allocator.shortfall(count, count // 2)
        yield lambda count=count: memory.shortfall(dict.fromkeys(spaces, count))
        yield lambda count=count: memory.fits(dict.fromkeys(spaces, count))
        yield lambda count=count: memory.together(tuple(spaces), count)
    for space in spaces:
        yield lambda space=space: (memory.available(space), memory.free_now(space), memory.free_after(space))
    yield lambda: (memory.shares(), memory.live(), memory.gap_bytes(), memory.can_move, memory.bytes_moved)
    yield lambda: (allocator.available_size(), allocator.live_pages(), allocator.pages_needed([3], [30]))
    yield lambda: [(side.available_size(), side.shortfall(3)) for side in getattr(allocator, "_tiers", {}).values()]
    yield lambda: (table.available_size(), cache.check(), memory.check(), cache.plan.explain())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["linear", "sliding", "three", "pure"])
def test_a_query_changes_nothing(small, kind, gated):
    cache = small.build(kind, budget_bytes=20_000)
    ticket = cache.memory.close_gate() if gated else None
    for keep in (lambda name: False, lambda name: name % 2, lambda name: True):
        fill(cache, keep=keep)
        before = everything(cache.memory)
        for ask in queries(cache):
            ask()
            assert everything(cache.memory) == before
        for name in list(cache.req_to_token_pool.live_rows().values()):
            cache.release(name)
    if gated:
        cache.memory.open_gate(ticket)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["linear", "sliding", "three", "pure"])
def test_a_shortfall_is_empty_exactly_where_an_alloc_is_served(small, kind, gated):
    cache = small.build(kind, budget_bytes=20_000)
    allocator = cache.token_to_kv_pool_allocator
    fill(cache)
    ticket = cache.memory.close_gate() if gated else None
    most = allocator.available_size() // 4
    assert allocator.shortfall(most) == ()
    (lacks,) = allocator.shortfall(most + 1)
    assert lacks.missing > 0
    assert allocator.alloc(4 * most + 4) is None
    assert allocator.alloc(4 * most) is not None
    if gated:
        cache.memory.open_gate(ticket)


def test_a_full_numbering_is_a_shortfall_that_its_own_space_alone_can_end(small):
    cache = small.build("linear")
    allocator = cache.token_to_kv_pool_allocator
    allocator.resize({FULL: 16})
    (lacks,) = allocator.shortfall(5)
    assert (lacks.space, lacks.needed, lacks.available, lacks.givers, lacks.held_by) == (FULL, 20, 16, (), ())
    assert lacks.advice == "space 'full' must give 4 slots"
    taken = allocator.alloc(12)
    assert allocator.alloc(8) is None
    (lacks,) = allocator.shortfall(2)
    assert (lacks.needed, lacks.available) == (8, 4)
    with cache.memory.gate("a transfer"):
        assert allocator.shortfall(2) == (lacks,)  # pages that may move would not help
    allocator.free(taken[:4])
    assert allocator.shortfall(2) == ()


@pytest.mark.parametrize(
    ("sizes", "short"), [({SWA: 16}, [SWA]), ({FULL: 16}, [FULL]), ({FULL: 16, SWA: 12}, [FULL, SWA])]
)
def test_of_two_sides_the_one_whose_numbering_is_full_is_named(small, sizes, short):
    cache = small.build("three")
    allocator = cache.token_to_kv_pool_allocator
    allocator.resize(sizes)
    found = allocator.shortfall(5)
    assert [lacks.space for lacks in found] == short
    assert [(lacks.needed, lacks.available, lacks.givers) for lacks in found] == [(20, sizes[s], ()) for s in short]
    assert allocator.shortfall(5, 2) == tuple(lacks for lacks in found if lacks.space == FULL)


def test_of_three_spaces_each_that_could_give_enough_alone_is_named(small):
    cache = small.build("three", budget_bytes=40_000)
    allocator, states = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.states
    slots = states.alloc(range(states.available_size() // 2))
    most = allocator.available_size() // 4
    taken = allocator.alloc(4 * most)
    (lacks,) = allocator.shortfall(2)
    assert (lacks.space, lacks.needed) == (FULL, 8)
    gives = dict(lacks.givers)
    assert set(gives) == {SWA, "state"}
    # so many states are enough, and one less is not
    states.free(slots[: gives["state"] - 1])
    assert allocator.shortfall(2)
    states.free(slots[gives["state"] - 1 : gives["state"]])
    assert allocator.shortfall(2) == ()
    # so many sliding pages are enough as well
    states.alloc(range(gives["state"]))
    few = gives[SWA] // 4 - 1
    allocator.free_swa_pages(taken[: 4 * few : 4] // 4)
    assert allocator.shortfall(2)
    allocator.free_swa_pages(taken[4 * few : 4 * few + 4 : 4] // 4)
    assert allocator.shortfall(2) == ()


def test_what_a_gate_alone_forbids_is_said(small):
    cache = small.build("linear")
    allocator, states = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.states
    slots = states.alloc(range(states.available_size()))
    states.free(slots[:3])  # holes below the others
    assert allocator.available_size() >= 4 * 9  # 3 states are as large as 9 pages
    with cache.memory.gate("a transfer"):
        (lacks,) = allocator.shortfall(9)
        assert (lacks.needed, lacks.available, lacks.held_by) == (36, allocator.available_size(), ("a transfer",))
        assert lacks.advice == "space 'full' has room once pages may move again, which a transfer forbids"
    assert allocator.shortfall(9) == ()


def test_calls_of_another_thread_are_refused_in_debug_mode(small):
    cache = small.build("three")
    allocator, memory = cache.token_to_kv_pool_allocator, cache.memory
    fill(cache)
    before = everything(memory)
    calls = {
        "compact": lambda: memory.compact(10**6, 10**6),
        "gate": memory.close_gate,
        "open": lambda: memory.open_gate(object()),
        "forward": lambda: memory.forward().__enter__(),
        "shares": memory.shares,
        "shortfall": lambda: allocator.shortfall(1),
        "a side's shortfall": lambda: allocator.full.shortfall(1),
        "alloc": lambda: allocator.alloc(4),
    }
    found = {}

    def call_all():
        for name, call in calls.items():
            try:
                found[name] = call()
            except SlotError as error:
                found[name] = "is owned by thread" in str(error)

    thread = threading.Thread(target=call_all)
    thread.start()
    thread.join()
    assert found == dict.fromkeys(calls, True)
    assert everything(memory) == before


def test_a_forward_pass_that_was_not_ended_is_told_of(small):
    cache = small.build("linear")
    begun = cache.memory.forward()
    begun.__enter__()
    cache.memory.close_gate("a transfer")
    cache.admit("a", 8)
    with pytest.raises(SlotError, match="held by a forward pass in flight, a transfer; open each gate"):
        cache.clear()
    assert cache.req_to_token_pool.row_of("a") is not None
    cache.release("a")
    with pytest.raises(SlotError, match="held by a forward pass in flight, a transfer"):
        cache.close()
    with pytest.raises(SlotError, match="the cache is closed"):
        cache.admit("b", 8)


def test_without_debug_a_closed_gate_does_not_keep_a_cache_from_its_end(small):
    cache = small.build("linear", debug=False)
    cache.memory.close_gate()
    cache.admit("a", 8)
    cache.clear()
    cache.close()
    assert cache.memory.live() == {"state": 0, "full": 0}


@pytest.mark.parametrize("table", ["_page_of", "_owner_of", "_holes"])
def test_a_damaged_table_is_found(small, table):
    cache = small.build("linear")
    fill(cache)
    segment = cache.memory.segment(FULL)
    assert segment.holes and segment.live
    place = {"_page_of": 1, "_owner_of": segment.window.low, "_holes": 0}[table]
    getattr(segment, table)[place] += 1
    with pytest.raises(SlotError, match="space 'full'"):
        cache.check()


def test_a_page_without_a_place_is_found(small):
    cache = small.build("linear")
    cache.admit("a", 8)
    segment = cache.memory.segment(FULL)
    segment.release(torch.tensor([1]))
    cache.memory.check()  # the tables agree with each other, but not with what is handed out
    with pytest.raises(SlotError, match=r"pages \[1\] \(1 in all\) have a place but are handed out to nobody"):
        cache.check()


def test_a_refusal_is_said_once():
    with pytest.raises(UnsupportedCombination) as refused:
        kvdock.plan(MODELS / "llama-3.1-8b.json", device="cpu", options={"unified_memory": True}, budget_bytes=2**30)
    assert str(refused.value).count("nothing to share out") == 1
    assert [plugin for plugin, _ in refused.value.objections] == ["core"]


@pytest.mark.parametrize("kind", ["linear", "sliding", "three"])
@pytest.mark.parametrize("count", [1.5, -1, "2", None, [3]])
def test_numbers_of_pages_that_cannot_be_are_refused(small, kind, count):
    cache = small.build(kind)
    fill(cache)
    memory = cache.memory
    before = everything(memory)
    calls = [
        lambda: memory.secure({FULL: count}),
        lambda: memory.fits({FULL: count}),
        lambda: memory.shortfall({FULL: count}),
        lambda: memory.together((FULL,), count),
        lambda: cache.token_to_kv_pool_allocator.shortfall(count),
    ]
    for call in calls:
        with pytest.raises(SlotError, match="pages"):
            call()
    assert everything(memory) == before
    cache.check()


def test_spaces_that_do_not_share_the_buffer_are_refused_by_name(small):
    memory = small.build("three").memory
    one = torch.ones(1, dtype=torch.int64)
    calls = [
        lambda: memory.secure({"nope": 1}),
        lambda: memory.fits({"nope": 1}),
        lambda: memory.shortfall({"nope": 1}),
        lambda: memory.together(("nope",), 1),
        lambda: memory.available("nope"),
        lambda: memory.free_now("nope"),
        lambda: memory.free_after("nope"),
        lambda: memory.release("nope", one),
        lambda: memory.copy("nope", one, one),
    ]
    for call in calls:
        with pytest.raises(SlotError, match="space 'nope' does not share this buffer; state, full, swa do"):
            call()


@pytest.mark.parametrize("kind", ["linear", "sliding", "three"])
def test_a_shortfall_of_any_number_says_what_is_available(small, kind):
    cache = small.build(kind)
    allocator = cache.token_to_kv_pool_allocator
    for count in (10**6, 2**63, 2**80):
        lacks = allocator.shortfall(count)
        assert lacks[0].needed == count * 4
        assert 0 <= lacks[0].available <= allocator.size
