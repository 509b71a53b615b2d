"""The sorted allocator: few runs a request, the promises of every allocator, and frees that arrive later."""

import pytest
from kvdock.errors import BuildError, SlotError
from kvdock.layout import round_up

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import kvdock  # noqa: E402
import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kvdock.allocators import SortedAllocator  # noqa: E402
from kvdock.allocators.runs import FANOUT, LEVEL_GUARD_BYTES, FreeRuns, level_words  # noqa: E402
from kvdock.allocators.sorted import Inbox, PageRuns  # noqa: E402

PAGE_SIZES = (1, 3, 16)


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


def pages_of(got, page_size):
    return (got[::page_size] // page_size).tolist()


def run_count(pages):
    return sum(1 for i, page in enumerate(pages) if not i or page != pages[i - 1] + 1)


@pytest.fixture(scope="session")
def sorted_of(make):
    """`sorted_of(size, page_size, …)`: an allocator on tensors of its own."""
    return lambda size, page_size=1, **options: make.single(size, page_size, cls=SortedAllocator, **options)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_freed_pages_come_back_in_order_before_later_ones(sorted_of, page_size):
    allocator = sorted_of(8 * page_size, page_size)
    held = allocator.alloc(6 * page_size)
    allocator.free(held[3 * page_size : 4 * page_size])
    allocator.free(held[page_size : 2 * page_size])
    assert pages_of(allocator.alloc(page_size), page_size) == [2]
    assert pages_of(allocator.alloc(3 * page_size), page_size) == [4, 7, 8]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_half_of_the_requests_leave_few_runs(sorted_of, page_size):
    rng = np.random.default_rng(3)
    allocator = sorted_of(2048 * page_size, page_size)
    sizes = rng.integers(1, 40, 200)
    held = [allocator.alloc(int(size) * page_size) for size in sizes]
    held = [got for got in held if got is not None]
    free = set(range(sum(map(len, held)) // page_size + 1, 2049))
    for i in rng.permutation(len(held))[: len(held) // 2]:
        allocator.free(held[i])
        free.update(pages_of(held[i], page_size))
    while free:
        count = min(int(rng.integers(1, 120)), len(free))
        got = pages_of(allocator.alloc(count * page_size), page_size)
        ordered = sorted(free)
        is_whole = any(
            ordered[i + count - 1] == page + count - 1 for i, page in enumerate(ordered[: 1 - count or None])
        )
        assert run_count(got) == 1 if is_whole else run_count(got) <= run_count(ordered[:count])
        assert got == sorted(got)
        assert free.issuperset(got)
        free.difference_update(got)
    assert allocator.available_size() == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_padding_page_is_never_handed_out(sorted_of, page_size):
    """A-12: alloc(all), clear, restore and again."""
    allocator = sorted_of(6 * page_size, page_size)
    state = allocator.backup_state()
    for reset in (lambda: allocator.restore_state(state), allocator.clear, allocator.clear):
        assert allocator.available_size() == allocator.size == 6 * page_size
        assert allocator.alloc(allocator.size).tolist() == list(range(page_size, 7 * page_size))
        assert allocator.alloc(page_size) is None
        reset()


@pytest.mark.parametrize("page_size", [1, 2])
def test_returned_slots_share_no_storage(sorted_of, page_size):
    """A-19: a kept result never changes, and changing a result never changes the allocator."""
    allocator = sorted_of(8, page_size)
    kept, other = allocator.alloc(2), allocator.alloc(2)
    before = kept.tolist()
    state = allocator.backup_state()
    again = allocator.alloc(2)
    again.fill_(99)
    allocator.restore_state(state)
    allocator.free(other)
    allocator.alloc(4)
    assert kept.tolist() == before
    kept.fill_(77)
    allocator.clear()
    assert allocator.alloc(8).tolist() == list(range(page_size, 8 + page_size))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_more_frees_than_live_pages_are_refused(sorted_of, page_size):
    """A-01, A-11 without checks."""
    allocator = sorted_of(8 * page_size, page_size)
    held = allocator.alloc(4 * page_size)
    allocator.free(held)
    with pytest.raises(SlotError, match="4 pages are freed but only 0 are handed out; nothing was freed"):
        allocator.free(held)
    assert allocator.available_size() == 8 * page_size
    allocator.alloc(3 * page_size)
    with pytest.raises(SlotError, match=r"pages \[1\] appear twice in one call; nothing was freed"):
        allocator.free_pages(slots(1, 1, 2))
    assert allocator.available_size() == 5 * page_size
    allocator.check(held=held[: 3 * page_size])


@pytest.mark.parametrize(("page_size", "named"), [(1, "slots 1, 2, 3, 4"), (4, "pages of 4 slots from 4, 8, 12, 16")])
def test_debug_names_slots_freed_twice(sorted_of, page_size, named):
    """A-01: size 8; a = alloc(4); free(a); free(a) raises at the second free."""
    allocator = sorted_of(8 * page_size, page_size, debug=True)
    held = allocator.alloc(4 * page_size, owner="request-7")
    allocator.free(held)
    with pytest.raises(SlotError, match=rf"space 'full': {named} \(owner 'request-7'\) are freed twice"):
        allocator.free(held)
    got = [allocator.alloc(4 * page_size) for _ in range(3)]
    assert got[2] is None
    assert len({*got[0].tolist(), *got[1].tolist()}) == 8 * page_size


def test_debug_names_duplicates_inside_one_call(sorted_of):
    """A-11: free([1, 1, 2]) after alloc of 1, 2."""
    allocator = sorted_of(8, debug=True)
    allocator.alloc(2)
    with pytest.raises(SlotError, match="slots 1 appear twice in one call"):
        allocator.free(slots(1, 1, 2))
    assert allocator.available_size() == 6


@pytest.mark.parametrize("debug", [False, True])
def test_a_restore_takes_back_what_came_from_several_runs(sorted_of, debug):
    allocator = sorted_of(12, debug=debug)
    held = allocator.alloc(12)
    allocator.free(held[[1, 2, 5, 6, 7, 10]])
    outer = allocator.backup_state()
    assert allocator.alloc(1).tolist() == [2]
    inner = allocator.backup_state()
    assert allocator.alloc(4).tolist() == [3, 6, 7, 8]
    allocator.restore_state(inner)
    assert allocator.alloc(3).tolist() == [6, 7, 8]
    allocator.restore_state(outer)
    allocator.check(held=held[[0, 3, 4, 8, 9, 11]])
    assert allocator.alloc(6).tolist() == [2, 3, 6, 7, 8, 11]
    with pytest.raises(SlotError, match="an older state was restored"):
        allocator.restore_state(inner)
    allocator.free(held[:1])
    with pytest.raises(SlotError, match="slots were freed after this state was made"):
        allocator.restore_state(outer)
    allocator.check(held=held[1:])


def test_a_queued_free_retires_a_state_and_later_ones_still_serve(sorted_of):
    allocator = sorted_of(8)
    held = allocator.alloc(4)
    state = allocator.backup_state()
    allocator.free_group_begin()
    allocator.free(held[:2])
    with pytest.raises(SlotError, match="slots were freed"):
        allocator.restore_state(state)
    later = allocator.backup_state()
    assert allocator.alloc(4).tolist() == [5, 6, 7, 8]
    allocator.restore_state(later)
    allocator.free_group_end()
    assert allocator.alloc(2).tolist() == [1, 2]
    allocator.check(held=slots(1, 2, 3, 4))


def test_a_resize_keeps_to_what_was_planned(sorted_of):
    with pytest.raises(BuildError, match="build with the plan's own sizes"):
        sorted_of(16, 4, planned={"full": 32})
    allocator = sorted_of(32, 4)
    held = allocator.alloc(4)
    with pytest.raises(SlotError, match="1 pages are live"):
        allocator.resize({"full": 16})
    allocator.free(held)
    allocator.resize({"full": 16})
    assert allocator.alloc(20) is None
    allocator.free(allocator.alloc(16))
    allocator.resize({"full": 32})
    assert pages_of(allocator.alloc(32), 4) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("pages", [1, 5, 14, 15, 4000])
def test_buffers_are_host_memory_of_9_bytes_a_page(make, page_size, pages):
    buffers = {b.name: b for b in SortedAllocator.buffers(make.query(one_space(page_size), {}))}
    assert {name for name, b in buffers.items() if b.memory == "device"} == (
        {"page_offsets"} if page_size > 1 else set()
    )
    host = [b.tensor_nbytes(pages) for b in buffers.values() if b.memory == "host"]
    assert host == [4 * round_up(pages + 2, 8), round_up(pages + 256, 8), 4 * pages]


def one_space(page_size):
    from kvdock.layout import SizeRule, Space

    return (Space(name="full", rule=SizeRule(), page_size=page_size),)


def test_pages_arrive_in_pinned_memory_off_the_cpu(make):
    import msgspec

    query = make.query(one_space(16), {})
    device = msgspec.structs.replace(query.device, device_type="cuda", name="x")
    found = {b.name: b for b in SortedAllocator.buffers(msgspec.structs.replace(query, device=device))}
    assert (found["arrivals"].memory, found["arrivals"].tensor_nbytes(100)) == ("pinned", 400)


def test_it_serves_disaggregated_roles():
    assert "disaggregation" in SortedAllocator.features


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_without_numbers_the_counts_are_kept(sorted_of, page_size):
    allocator = sorted_of(64 * page_size, page_size, device="meta", debug=False)
    state = allocator.backup_state()
    got = allocator.alloc(20 * page_size)
    assert (got.shape, got.dtype, got.device.type) == ((20 * page_size,), torch.int64, "meta")
    allocator.restore_state(state)
    assert allocator.available_size() == 64 * page_size
    assert allocator.alloc(65 * page_size) is None
    allocator.alloc(60 * page_size)
    allocator.clear()
    assert allocator.alloc(64 * page_size).shape == (64 * page_size,)


def test_tokens_are_freed_without_numbers(sorted_of):
    allocator = sorted_of(8, device="meta")
    allocator.free(allocator.alloc(6)[:4])
    assert allocator.available_size() == 6


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_disaggregated_role_plans_it_and_builds_what_it_planned(role, page_size):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    options = kvdock.CacheOptions(page_size=page_size, role=role, max_running_requests=2, plugins=())
    plan = kvdock.plan(config, budget_bytes=2**21, options=options)
    assert plan.allocator_cls.name == "SortedAllocator"
    for device in ("cpu", "meta"):
        cache = kvdock.build(plan, device=device)
        assert cache.host_bytes() == plan.host_bytes
        assert cache.token_to_kv_pool_allocator.available_size() == plan.max_total_num_tokens


class LateEvent:
    """Arrives when the test says so, or when somebody waits for it."""

    def __init__(self):
        self.is_here, self.waits = False, 0

    def query(self):
        return self.is_here

    def synchronize(self):
        self.waits += 1
        self.is_here = True


class LateInbox(Inbox):
    """Copies whose arrival the test decides."""

    def __init__(self, room):
        super().__init__(torch.zeros(room, dtype=torch.int32))
        self.events = []

    def mark(self, device):
        self.events.append(LateEvent())
        return self.events[-1]


def late_runs(capacity):
    inbox = LateInbox(capacity)
    words = lambda count: np.zeros(count, dtype=np.int32)  # noqa: E731
    levels = level_words(np.zeros(capacity + LEVEL_GUARD_BYTES, dtype=np.uint8))
    runs = FreeRuns("late", words(round_up(capacity + 2, FANOUT)), levels)
    return PageRuns("late", runs, words(capacity), inbox, torch.device("cpu"), capacity), inbox


def test_frees_on_their_way_are_counted_at_once_and_merged_when_they_are_here():
    pages, inbox = late_runs(10)
    pages.take(6)
    pages.give(slots(2, 3))
    assert (pages.free, pages.live, pages.runs.free) == (6, 4, 4)
    assert pages.take(1).tolist() == [7]
    inbox.events[0].is_here = True
    assert pages.take(1).tolist() == [2]
    assert inbox.events[0].waits == 0
    assert pages.free == pages.runs.free == 4


def test_a_take_that_would_be_short_waits_for_as_much_as_it_needs():
    pages, inbox = late_runs(10)
    pages.take(10)
    pages.give(slots(9, 8))
    pages.give(slots(1))
    pages.give(slots(5, 4))
    assert pages.take(3).tolist() == [1, 8, 9]
    assert [event.waits for event in inbox.events] == [1, 1, 0]
    assert pages.take(3) is None
    assert inbox.events[2].waits == 0
    assert pages.peek(2).tolist() == [4, 5]
    assert inbox.events[2].waits == 1


def test_arrivals_wrap_around_their_memory():
    pages, inbox = late_runs(5)
    held = pages.take(5)
    pages.give(held[:3])
    assert pages.take(3).tolist() == [1, 2, 3]
    pages.give(slots(5, 1, 4))
    pages.give(slots(3))
    assert pages.take(4).tolist() == [1, 3, 4, 5]
    assert [event.waits for event in inbox.events] == [1, 1, 1]


def test_a_reset_forgets_what_is_on_its_way():
    pages, inbox = late_runs(6)
    pages.take(6)
    pages.give(slots(2, 4))
    pages.reset(6)
    inbox.events[0].is_here = True
    assert pages.take(6).tolist() == [1, 2, 3, 4, 5, 6]


def test_an_inbox_without_events_has_its_copies_at_once():
    inbox = Inbox(torch.zeros(4, dtype=torch.int32))
    assert inbox.receive(wait=False) is None
    inbox.send(slots(7, 3))
    assert inbox.receive(wait=False).tolist() == [7, 3]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_late_arrivals_match_a_set(data):
    capacity = data.draw(st.integers(1, 20))
    pages, inbox = late_runs(capacity)
    free, live = set(range(1, capacity + 1)), []
    for _ in range(data.draw(st.integers(1, 15))):
        for event in inbox.events:
            event.is_here = event.is_here or data.draw(st.booleans())
        if data.draw(st.booleans()):
            got = pages.take(data.draw(st.integers(0, len(free)))).tolist()
            assert got == sorted(got)
            assert free.issuperset(got)
            free.difference_update(got)
            live.extend(got)
        else:
            cut = data.draw(st.integers(0, len(live)))
            pages.give(slots(*live[:cut]))
            free.update(live[:cut])
            live = live[cut:]
        assert pages.free == len(free)
    assert sorted(pages.peek(len(free)).tolist()) == sorted(free)


def laid_out(prefix, seq, last, pages, page_size):
    """Lay out one request's new tokens one by one; `pages` is an iterator of new pages."""
    out, at = [], last
    for position in range(prefix, seq):
        at = next(pages) * page_size if position % page_size == 0 else at + 1
        out.append(at)
    return out


class Requests:
    """Requests and the slots of their tokens, in plain Python."""

    def __init__(self, pages, page_size):
        self.free = set(range(1, pages + 1))
        self.page_size = page_size
        self.held = {}

    def grow(self, allocator, grown, decode):
        """Grow requests and compare; return whether it fitted."""
        old = {name: self.held.get(name, []) for name in grown}
        prefix, seq = [len(held) for held in old.values()], list(grown.values())
        last = slots(*(held[-1] if held else -1 for held in old.values()))
        if decode:
            got = allocator.alloc_decode(slots(*seq), seq, last)
        else:
            got = allocator.alloc_extend(slots(*prefix), prefix, slots(*seq), seq, last, sum(seq) - sum(prefix))
        needed = allocator.pages_needed(prefix, seq)
        if needed > len(self.free):
            assert got is None
            return False
        new = {slot // self.page_size for slot in got.tolist()} - {
            slot // self.page_size for held in old.values() for slot in held[-1:]
        }
        assert len(new) == needed
        assert self.free.issuperset(new)
        pages, expected = iter(sorted(new)), []
        for name, length in grown.items():
            tokens = laid_out(len(old[name]), length, old[name][-1] if old[name] else -1, pages, self.page_size)
            self.held[name] = old[name] + tokens
            expected += tokens
        assert got.tolist() == expected
        self.free -= new
        return True

    def release(self, allocator, name, by_rows, grouped):
        held = self.held.pop(name)
        if grouped:
            allocator.free_group_begin()
        if by_rows:
            table = torch.zeros(2, len(held), dtype=torch.int32)
            table[1] = slots(*held)
            allocator.free_rows(table, [1], [0], [len(held)])
        else:
            allocator.free(slots(*held))
        if grouped:
            allocator.free_group_end()
        self.free.update(slot // self.page_size for slot in held)

    def verify(self, allocator):
        allocator.check(held=slots(*(slot for held in self.held.values() for slot in held)))
        assert allocator.available_size() == len(self.free) * self.page_size


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_requests_match_the_model(sorted_of, page_size, debug, data):
    pages = data.draw(st.integers(1, 20))
    allocator, model = sorted_of(pages * page_size, page_size, debug=debug), Requests(pages, page_size)
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["extend", "extend", "decode", "release", "rollback"]))
        known = sorted(name for name, held in model.held.items() if held)
        longest = st.integers(0, 3 * page_size + 1)
        if action in ("extend", "rollback"):
            chosen = data.draw(st.lists(st.integers(0, 4), unique=True, max_size=4))
            grown = {name: len(model.held.get(name, [])) + data.draw(longest) for name in chosen}
            state, free, held = allocator.backup_state(), set(model.free), dict(model.held)
            if model.grow(allocator, grown, decode=False) and action == "rollback":
                allocator.restore_state(state)
                model.free, model.held = free, held
        elif known and action == "decode":
            chosen = data.draw(st.lists(st.sampled_from(known), unique=True))
            model.grow(allocator, {name: len(model.held[name]) + 1 for name in chosen}, decode=True)
        elif known:
            by_rows, grouped = data.draw(st.booleans()), data.draw(st.booleans())
            model.release(allocator, data.draw(st.sampled_from(known)), by_rows, grouped)
        model.verify(allocator)
