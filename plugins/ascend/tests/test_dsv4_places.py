"""DeepSeek V4 on an NPU: where tokens lie, and six spaces in step."""

import random

import kvdock
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvdock.builder import build

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

OTHERS = ("c4", "c128", "c4_state", "c128_state")


def test_a_bundle_has_a_place_for_each_token_and_each_group(cached):
    """A prompt of 300 tokens: 75 groups of 4, 2 of 128; of states the last 44 + 128 and the last 44 tokens."""
    cache = cached()
    allocator = cache.token_to_kv_pool_allocator
    zero, seq, none = torch.tensor([0]), torch.tensor([300]), torch.tensor([-1], dtype=torch.int32)
    found = allocator.alloc_extend_bundle(zero, [0], seq, [300], none, 300, owners=["a"])
    assert {part.dtype for part in found} == {torch.int32}
    assert [len(part) for part in found] == [300, 300, 75, 2, 172, 44]
    assert torch.equal(found.swa, allocator.translate(found.full).int())
    # All six spaces were empty: the first pages, and c4's next one is not needed before token 512.
    assert found.c4.tolist() == list(range(128, 203))
    assert found.c128.tolist() == [128, 129]
    # 3 full pages, 2 of states for c4: page 2 uses the first again; c128 has one for each.
    assert found.c4_state.tolist() == [*range(256, 384), *range(128, 172)]
    assert found.c128_state.tolist() == list(range(3 * 128, 3 * 128 + 44))
    step = allocator.alloc_decode_bundle(torch.tensor([304]), [304], found.full[-1:] + 3)
    assert [len(part) for part in step] == [1, 1, 1, 0, 1, 1]
    assert step.c4.tolist() == [203]


@pytest.mark.parametrize(
    ("prefix", "seq", "c4", "c128", "s4", "s128"),
    [
        (0, 0, 0, 0, 0, 0),
        (0, 3, 0, 0, 3, 3),
        (0, 128, 32, 1, 128, 0),
        (127, 128, 1, 1, 1, 0),
        (100, 700, 150, 5, 188, 60),
    ],
)
def test_places_are_counted_as_the_rules_say(prefix, seq, c4, c128, s4, s128):
    """``seq // r − prefix // r`` groups; the tail is ``seq % 128`` tokens, and for c4 the 128 before."""
    import numpy as np
    from kvdock_ascend.dsv4.allocator import places_in

    arrays = np.array([prefix]), np.array([seq])
    found = {name: places_in(name, *arrays) for name in OTHERS}
    assert [len(found[name]) for name in OTHERS] == [c4, c128, s4, s128]
    for name, ratio in (("c4", 4), ("c128", 128)):
        assert [(prefix + int(place)) % ratio for place in found[name]] == [ratio - 1] * len(found[name])


def test_tables_say_where_a_request_lies(cached):
    cache = cached()
    slots = cache.admit("a", 300)
    table = cache.req_to_token_pool
    row, allocator = table.row_of("a"), cache.token_to_kv_pool_allocator
    found = table.tables
    columns = table.req_to_token.shape[1]
    assert {name: tuple(part.shape) for name, part in found.items()} == {
        "swa": (5, columns),
        "c4": (5, columns // 4),
        "c128": (5, columns // 128),
        "c4_state": (5, columns),
        "c128_state": (5, columns),
    }
    assert {part.dtype for part in found.values()} == {torch.int32}
    bundle = allocator.bundle(slots, [0], [300])
    assert torch.equal(found["swa"][row, :300], bundle.swa)
    assert torch.equal(found["c4"][row, :75], bundle.c4)
    assert torch.equal(found["c128"][row, :2], bundle.c128)
    assert torch.equal(found["c4_state"][row, 128:300], bundle.c4_state)
    assert not found["c4_state"][row, :128].any()
    assert torch.equal(found["c128_state"][row, 256:300], bundle.c128_state)
    assert not found["c128_state"][row, :256].any()


def test_no_reader_sees_what_a_table_keeps_of_tokens_that_left_the_window(cached):
    """What is stale lies before the window, or behind the last token; all that a step reads is where tokens are."""
    cache = cached()
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    cache.admit("a", 700)
    cache.evict(["a"], [700 - 128])
    cache.admit("b", 500)  # takes the sliding pages that were given back
    row = table.row_of("a")
    window = table.req_to_token[row, 700 - 128 : 700]
    assert torch.equal(table.tables["swa"][row, 700 - 128 : 700].long(), allocator.translate(window))
    assert (allocator.translate(window) > 0).all()
    cache.release("a")
    cache.admit("c", 130)
    row = table.row_of("c")  # the row of one that had more tokens
    for space, ratio in (("swa", 1), ("c4", 4), ("c128", 128)):
        slots = table.req_to_token[row, ratio - 1 : 130 : ratio]
        places = allocator.translate(slots) if space == "swa" else allocator.translate_beside(space, slots)
        assert torch.equal(table.tables[space][row, : 130 // ratio].long(), places)


def test_distinct_tokens_have_distinct_rows(cached):
    """P-11: by brute force over all groups of all requests."""
    cache = cached()
    lengths = {"a": 700, "b": 513, "c": 129, "d": 4}
    pool = cache.token_to_kv_pool
    for ratio in (4, 128):
        seen = []
        for request, tokens in lengths.items():
            slots = cache.admit(request, tokens) if ratio == 4 else None
            row = cache.req_to_token_pool.row_of(request)
            slots = cache.req_to_token_pool.req_to_token[row, :tokens]
            places = pool.translate_loc_from_full_to_compressed(slots, ratio)
            seen += places[places >= 0].tolist()
        assert len(seen) == sum(tokens // ratio for tokens in lengths.values())
        assert len(set(seen)) == len(seen)
        assert min(seen) >= 128


def free_sizes(cache):
    allocator = cache.token_to_kv_pool_allocator
    return {name: part.available_size() for name, part in allocator.parts.allocators.items()}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("way", ["short", "raises"])
def test_a_failure_in_one_space_takes_nothing_of_the_others(cached, name, way, monkeypatch):
    """The fourth of the inner allocators, or any other, gives nothing: those before it have what they had.

    A request of 100 tokens grows to 1,000 and begins pages in every space; so does one that begins.
    """
    cache = cached()
    slots = cache.admit("a", 100)
    before, allocator = free_sizes(cache), cache.token_to_kv_pool_allocator

    def fail(count, owners=None):
        if way == "raises":
            raise RuntimeError("the device went away")

    grown = torch.tensor([100]), [100], torch.tensor([1000]), [1000], slots[-1:], 900
    monkeypatch.setattr(allocator.parts.allocators[name], "alloc_pages", fail)
    for call in (lambda: allocator.alloc_extend(*grown, owners=["a"]), lambda: cache.admit("b", 600)):
        with pytest.raises((RuntimeError, kvdock.SlotError), match=f"went away|space '{name}' handed out less"):
            call()
        assert free_sizes(cache) == before
        allocator.check(held=slots[:1])
    monkeypatch.undo()
    found = allocator.alloc_extend(*grown, owners=["a"])
    row = cache.req_to_token_pool.row_of("a")
    cache.req_to_token_pool.write([row], [100], [1000], found)
    assert cache.admit("b", 600) is not None
    cache.check()
    cache.release("a"), cache.release("b")
    cache.close()


def test_a_space_that_is_short_is_an_answer(monkeypatch, cached):
    cache = cached()
    others = cache.token_to_kv_pool_allocator.parts.allocators
    held = others["c128_state"].alloc(others["c128_state"].available_size() - 128)
    before = free_sizes(cache)
    assert cache.admit("a", 300) is None
    assert free_sizes(cache) == before
    others["c128_state"].free(held)
    assert cache.admit("a", 300) is not None


@pytest.mark.parametrize("way", ["release", "free", "free_pages", "free in a group", "close"])
def test_everything_goes_back_with_the_full_pages(way, cached):
    cache = cached()
    before = free_sizes(cache)
    slots = cache.admit("a", 1000)
    allocator = cache.token_to_kv_pool_allocator
    assert all(free_sizes(cache)[name] < before[name] for name in before)
    if way == "release":
        cache.release("a")
    elif way == "free":
        allocator.free(slots)
    elif way == "free_pages":
        allocator.free_pages(slots[::128] // 128)
    elif way == "free in a group":
        allocator.free_group_begin()
        allocator.free(slots[:500])
        allocator.free(slots[500:])  # both name the page of tokens 384 to 511
        allocator.free_group_end()
    else:
        cache.release("a")
        cache.close()
    assert free_sizes(cache) == before
    allocator.check(held=slots[:0])


def test_what_is_trimmed_is_taken_again(cached):
    cache = cached()
    cache.admit("a", 600)
    before = free_sizes(cache)
    cache.trim(["a"], [130])
    # 3 of 5 full pages; the second of c4 began at token 512; the third of c128's states is the third full page's.
    gone = {name: free_sizes(cache)[name] - before[name] for name in before}
    assert gone == {"full": 384, "swa": 384, "c4": 128, "c128": 0, "c4_state": 0, "c128_state": 128}
    cache.release("a")
    cache.close()


def test_a_request_does_not_go_on_behind_anothers_pages(cached):
    cache = cached()
    slots = cache.admit("a", 256)
    before = free_sizes(cache)
    with pytest.raises(kvdock.SlotError, match="request 'b': prefix=256 says that its first tokens are another's"):
        cache.admit("b", 400, prefix=slots)
    grown = torch.tensor([256]), [256], torch.tensor([400]), [400], slots[-1:], 144
    with pytest.raises(kvdock.SlotError, match="'b' cannot go on behind 256 tokens that are another's"):
        cache.token_to_kv_pool_allocator.alloc_extend(*grown, owners=["b"])
    assert free_sizes(cache) == before


def test_a_restore_takes_back_every_space(cached):
    cache = cached()
    allocator = cache.token_to_kv_pool_allocator
    before, state = free_sizes(cache), allocator.backup_state()
    none = torch.tensor([-1])
    allocator.alloc_extend(torch.tensor([0]), [0], torch.tensor([900]), [900], none, 900, owners=["a"])
    allocator.restore_state(state)
    assert free_sizes(cache) == before
    with pytest.raises(kvdock.SlotError, match="another's"):
        allocator.alloc_extend(torch.tensor([128]), [128], torch.tensor([129]), [129], none + 256, 1, owners=["a"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), tokens=st.sampled_from([1024, 2048, 4096]))
def test_no_admitted_request_can_hang(seed, tokens, planned):
    """While full and sliding pages are free, none of the other spaces is short, whatever the requests are.

    As many requests as there are rows grow by chunks and by single tokens, and end, in any order.
    """
    rng = random.Random(seed)
    cache = build(
        planned(max_total_tokens=tokens, max_running_requests=4, swa_full_tokens_ratio=1.0), device="cpu", debug=False
    )
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    live, name = {}, 0
    for _ in range(60):
        if len(live) < 4 and rng.random() < 0.4:
            length = rng.choice([1, 127, 128, 129, rng.randrange(1, 600)])
            needed = -(-length // 128) * 128
            found = cache.admit(name, length)
            assert (found is not None) == (
                needed <= allocator.full_available_size() + (needed if found is not None else 0)
            )
            if found is not None:
                live[name] = length
            name += 1
        elif live and rng.random() < 0.25:
            ended = rng.choice(sorted(live))
            cache.release(ended)
            del live[ended]
        elif live:
            request = rng.choice(sorted(live))
            grown = min(2048 - live[request], rng.choice([1, 1, rng.randrange(1, 300)]))
            prefix, seq, row = live[request], live[request] + grown, table.row_of(request)
            pages = -(-seq // 128) - -(-prefix // 128)
            room = pages * 128 <= allocator.full_available_size()
            last = table.req_to_token[row, prefix - 1 : prefix]
            batch = torch.tensor([prefix]), [prefix], torch.tensor([seq]), [seq], last, grown
            slots = allocator.alloc_extend(*batch, owners=[request])
            assert (slots is not None) == room
            if slots is not None:
                table.write([row], [prefix], [seq], slots)
                live[request] = seq
    cache.check()
    for request in live:
        cache.release(request)
    assert free_sizes(cache) == {name: cache.plan.spaces[name] for name in free_sizes(cache)}


def test_hot_paths_never_wait_for_the_device(planned):
    """On the meta device every read of a value raises."""
    cache = build(planned(max_total_tokens=8192), device="meta", debug=False)
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    row = table.alloc(["a"])[0]
    numbers = torch.empty(1, dtype=torch.int64, device="meta")
    found = allocator.alloc_extend_bundle(numbers, [0], numbers, [700], numbers, 700, owners=["a"])
    assert [len(part) for part in found] == [700, 700, 175, 5, 188, 60]
    table.write([row], [0], [700], found.full)
    for seq in (701, 769):
        step = allocator.alloc_decode_bundle(numbers, [seq], numbers, owners=["a"])
        assert len(step.full) == 1
    table.write([row], [700], [701], step.full)
    allocator.free_swa_rows(table.req_to_token, [row], [0], [512])
    allocator.free_rows(table.req_to_token, [row], [0], [700], swa_starts=[512])
    assert allocator.available_size() > 0


def test_full_pages_run_out_first_when_every_request_wastes_the_most(planned):
    """4 requests of 16,384 tokens and one more hold 129 pages of rows of 4, and 2 of 128 each."""
    cache = build(
        planned(max_total_tokens=66_048, max_running_requests=4, swa_full_tokens_ratio=1.0, budget=2**29),
        device="meta",
        debug=False,
    )
    allocator = cache.token_to_kv_pool_allocator
    numbers = torch.empty(1, dtype=torch.int64, device="meta")
    assert cache.plan.spaces["full"] == 4 * 129 * 128
    for request in range(4):
        assert allocator.alloc_extend(numbers, [0], numbers, [16_385], numbers, 16_385, owners=[request]) is not None
    assert allocator.full_available_size() == 0
    left = {name: part.available_size() // 128 for name, part in allocator.parts.allocators.items()}
    # 516 full pages: 129 and 4 of rows of 4, of which each request took 33; 5 and 4 of rows of 128, 2 each.
    assert left == {"full": 0, "swa": 0, "c4": 129 + 4 - 4 * 33, "c128": 5 + 4 - 4 * 2, "c4_state": 0, "c128_state": 0}
