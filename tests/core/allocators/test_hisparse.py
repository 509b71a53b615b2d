"""Tokens in two tiers: numbering and device pages in step, rows that leave the device, and the promises of a composite."""

import inspect
import random

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, SlotError
from kvdock.layout import SizeRule, Space
from kvdock.model import DSAParams, LayerSpec, ModelSpec
from kvdock.startup import core_only
from kvdock.testing.suites import AllocatorSuite, unsupported

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.allocators import (  # noqa: E402
    Allocator,
    HiSparseAllocator,
    PagedAllocator,
    SortedAllocator,
    TokenAllocator,
    lengths,
)

DEVICE = DeviceInfo(device_type="cpu", name="d", total_bytes=2**50, free_before_load_bytes=2**50, free_bytes=2**50)
DSA = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))


def plan_of(context=64, budget=2**26, **options):
    registry = core_only()
    model = ModelSpec(name="m", architecture="M", layers=(DSA, DSA), context_length=context, dtype="bfloat16")
    given = {"page_size": 4, "hisparse": True, "max_running_requests": 2, "hisparse_top_k": 4, **options}
    return kvdock.plan(model, device=DEVICE, options=given, budget_bytes=budget, registry=registry)


def cache_of(device="cpu", debug=True, **options):
    """32 device slots, 64 full and host slots, pages of 4; a buffer is 8 slots and a page of 4."""
    return kvdock.build(plan_of(**{"max_total_tokens": 32, **options}), device=device, debug=debug)


@pytest.fixture
def allocator():
    return cache_of().token_to_kv_pool_allocator


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


def extend(allocator, *spans, last=None, logical=False, owners=None):
    prefix, seq = [start for start, _ in spans], [end for _, end in spans]
    call = allocator.alloc_logical_extend if logical else allocator.alloc_extend
    at = slots(*(last or [-1] * len(spans)))
    return call(slots(*prefix), prefix, slots(*seq), seq, at, sum(seq) - sum(prefix), owners)


def decode(allocator, lens, last, owners=None):
    return allocator.alloc_decode(slots(*lens), lens, slots(*last), owners)


def free(allocator):
    return allocator.full_available_size(), allocator.device_available_size(), allocator.host_available_size()


def table_of(found):
    return torch.cat((slots(*[0] * len(found)), found)).view(2, -1).to(torch.int32)


def test_a_plan_names_it_and_charges_its_map_and_tables():
    plan = plan_of(max_total_tokens=32)
    assert plan.allocator_cls.name == "HiSparseAllocator"
    buffers = {buffer.name: buffer for buffer in plan.outline.allocators[-1].buffers}
    sizes = {
        name: buffer.tensor_nbytes(buffer.units_in(plan.outline.spaces, plan.sizes)) for name, buffer in buffers.items()
    }
    assert sizes == {
        "logical_to_device": 8 * (64 + 4),
        "req_to_device_buffer": 8 * 3 * (8 + 4),
        "req_to_host": 4 * 3 * (64 + 4),
        "page_offsets": 8 * 4,
    }
    cache = kvdock.build(plan, debug=False)
    assert (cache.allocated_bytes(), cache.host_bytes()) == (plan.total_bytes, plan.host_bytes)
    assert free(cache.token_to_kv_pool_allocator) == (64, 32, 64)


def test_each_new_page_gets_a_device_page_and_slots_keep_their_place(allocator):
    found = extend(allocator, (0, 6), (0, 3))
    assert found.tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    allocator.device.alloc_pages(1)
    more = decode(allocator, [7, 4, 1], [9, 14, -1])
    assert more.tolist() == [10, 15, 16]
    assert allocator.translate(torch.cat((found, more))).tolist() == [*found.tolist(), 10, 15, 20]
    assert allocator.translate(slots(-1, 0, 3, 40)).tolist() == [-1, 0, 0, 0]
    assert allocator.logical_to_device.shape == (68,)
    assert free(allocator) == (48, 12, 64)
    assert allocator.available_size() == 12


def test_a_call_that_one_side_cannot_serve_changes_nothing(allocator):
    held = allocator.alloc(28)
    before = allocator.logical_to_device.clone()
    assert allocator.alloc(8) is None
    assert allocator.alloc_pages(2) is None
    assert extend(allocator, (0, 5)) is None
    assert extend(allocator, (0, 37), logical=True) is None
    rest = allocator.alloc(4)
    assert decode(allocator, [29], [int(held[-1])]) is None
    assert free(allocator) == (32, 0, 64)
    allocator.free(rest)
    assert allocator.logical_to_device.equal(before)
    allocator.check(held)


def test_what_is_missing_is_said_by_side(allocator):
    allocator.alloc(20)
    assert allocator.shortfall(3) == ()
    assert [(lack.space, lack.missing) for lack in allocator.shortfall(12)] == [("full", 4), ("device", 36)]
    assert [(lack.space, lack.missing) for lack in allocator.shortfall(12, 0, 17)] == [("full", 4), ("host", 4)]
    assert allocator.pages_needed([0, 3], [5, 4]) == 2


def test_rows_that_left_the_device_leave_their_slots_behind(allocator):
    found = extend(allocator, (0, 14))
    table = table_of(found)
    allocator.free_device_rows(table, [1], [0], [8])
    assert free(allocator) == (48, 24, 64)
    assert allocator.translate(found).tolist() == [0] * 8 + found[8:].tolist()
    allocator.check(found)
    allocator.free_device_rows(table, [1], [8], [12])
    assert decode(allocator, [15], [int(found[-1])]).tolist() == [18]
    allocator.free_rows(table, [1], [0], [14], device_starts=[12])
    assert free(allocator) == (64, 32, 64)
    assert not allocator.logical_to_device.any()
    allocator.check(slots())


def test_tokens_of_the_host_take_no_device_slots(allocator):
    allocator.restore_state(_used_and_taken_back(allocator))
    found = extend(allocator, (0, 50), logical=True)
    assert free(allocator) == (12, 32, 64)
    assert allocator.translate(found).tolist() == [0] * 50
    more = extend(allocator, (50, 54), last=[int(found[-1])], logical=True)
    assert more.tolist() == [54, 55, 56, 57]
    allocator.check(torch.cat((found, more)))
    table = table_of(torch.cat((found, more)))
    allocator.free_rows(table, [1], [0], [54], device_starts=[54])
    assert free(allocator) == (64, 32, 64)
    allocator.check(slots())


def _used_and_taken_back(allocator):
    """Return a state after which pages were mapped: what they mapped to means nothing any more."""
    state = allocator.backup_state()
    allocator.alloc(32)
    return state


def test_a_prompt_is_as_long_with_a_host_tier_as_without():
    # full 100,000 tokens, device 10,000, prompt 50,000
    common = {"page_size": 10, "context": 60_000, "budget": 2**30}
    tiers = plan_of(**common, max_total_tokens=10_000, hisparse_host_to_device_ratio=10)
    plain = plan_of(**common, max_total_tokens=100_000, hisparse=False, hisparse_top_k=None)
    assert tiers.spaces["device"] == 10_000
    for plan in (tiers, plain):
        assert plan.max_total_num_tokens == plan.spaces["full"] == 100_000
        assert plan.max_request_tokens == 60_000
    on_host = kvdock.build(tiers, device="meta").token_to_kv_pool_allocator
    there = [torch.empty(1, dtype=torch.int64, device="meta")] * 3
    assert on_host.alloc_logical_extend(there[0], [0], there[1], [50_000], there[2], 50_000).shape == (50_000,)
    cache = kvdock.build(tiers)
    assert cache.admit("a", 10_000) is not None
    allocator = cache.token_to_kv_pool_allocator
    for start in range(10_000, 50_000, 10_000):
        cache.evict(["a"], [start])
        row = cache.req_to_token_pool.row_of("a")
        last = int(cache.req_to_token_pool.req_to_token[row, start - 1])
        found = extend(allocator, (start, start + 10_000), last=[last], owners=["a"])
        cache.req_to_token_pool.write([row], [start], [start + 10_000], found)
    assert free(allocator) == (50_000, 0, 100_000)
    cache.release("a")
    cache.check(held=slots())
    assert free(allocator) == (100_000, 10_000, 100_000)


def interface(cls):
    return {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))}


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("inner", [Allocator, PagedAllocator, TokenAllocator, SortedAllocator])
def test_it_offers_whatever_those_inside_offer(inner):
    # wrappers forward every capability
    offered = interface(HiSparseAllocator)
    for name, method in interface(inner).items():
        assert name in offered, name
        assert arguments(offered[name])[: len(arguments(method))] == arguments(method), name


def test_what_those_inside_verify_is_verified_through_it(allocator):
    # each call reaches the side that knows
    kept, gone = allocator.alloc(8), allocator.alloc(4)
    allocator.free(gone)
    assert allocator.live_pages() == [1, 2]
    for verify in (allocator.verify_slots, allocator.verify_live):
        verify(kept)
        with pytest.raises(SlotError, match="space 'full': pages of 4 slots from 12"):
            verify(gone)
    allocator.verify_pages(slots(1, 2))
    with pytest.raises(SlotError, match="pages of 4 slots from 12 are freed twice"):
        allocator.verify_pages(slots(3))
    growth = lengths.decode_growth([7], 4)
    allocator.verify_growth(growth, {"seq_lens": slots(7), "last_loc": slots(9)})
    allocator.free_device_pages(slots(2))
    with pytest.raises(SlotError, match=r"space 'device'.*continued as last_loc"):
        allocator.verify_growth(growth, {"seq_lens": slots(7), "last_loc": slots(9)})


@pytest.mark.parametrize("role", ["none", "decode"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_inner_allocators_are_the_hooks_own(page_size, role):
    allocator = cache_of(
        page_size=page_size, role=role, decode_extra_slots=None if role == "none" else 2
    ).token_to_kv_pool_allocator
    expected = SortedAllocator if role == "decode" else TokenAllocator if page_size == 1 else PagedAllocator
    assert {type(side) for side in (allocator.full, allocator.device, allocator.host)} == {expected}
    assert allocator.req_to_host.shape[0] == allocator.req_to_device_buffer.shape[0] == (5 if role == "decode" else 3)


def test_frees_twice_and_frees_of_rows_that_left_are_named(allocator):
    found = extend(allocator, (0, 8))
    allocator.free_device_rows(table_of(found), [1], [0], [4])
    state = free(allocator)
    with pytest.raises(SlotError, match=r"device slots are freed twice.*device_starts"):
        allocator.free_device_rows(table_of(found), [1], [0], [4])
    with pytest.raises(SlotError, match="device slots are freed twice"):
        allocator.free_rows(table_of(found), [1], [0], [8])
    with pytest.raises(SlotError, match="device_starts \\[9\\] lie outside the rows that end at \\[8\\]"):
        allocator.free_rows(table_of(found), [1], [0], [8], device_starts=[9])
    with pytest.raises(SlotError, match="2 device_starts for 1 rows"):
        allocator.free_rows(table_of(found), [1], [0], [8], device_starts=[0, 0])
    assert free(allocator) == state
    allocator.free_pages(slots(1), has_device=False)
    with pytest.raises(SlotError, match="freed twice"):
        allocator.free_pages(slots(1), has_device=False)
    allocator.free_pages(slots(2))
    allocator.check(slots())


def test_tokens_are_freed_with_the_device_pages_that_are_left(allocator):
    found = extend(allocator, (0, 14))
    allocator.free_device_pages(slots(1, 3))
    allocator.free(found[:9])
    assert free(allocator) == (60, 28, 64)
    allocator.check(found[12:])


def test_a_free_group_waits_for_its_end(allocator):
    found = extend(allocator, (0, 16))
    allocator.free_group_begin()
    for token in found[:8].tolist():
        allocator.free(slots(token))
    allocator.free_device_pages(slots(3))
    assert free(allocator) == (48, 16, 64)
    allocator.free_group_end()
    assert free(allocator) == (56, 28, 64)
    allocator.check(found[8:])


def test_the_end_of_a_group_that_freed_on_one_side_refuses_a_restore_on_all(allocator):
    kept = allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free_device_pages(slots(1))
    state = allocator.backup_state()
    more = allocator.alloc(4)
    allocator.free_group_end()
    with pytest.raises(SlotError, match="slots were freed after this state was made"):
        allocator.restore_state(state)
    assert free(allocator) == (52, 24, 64)
    allocator.check(torch.cat((kept, more)))


def test_a_restore_takes_back_what_was_handed_out(allocator):
    found = extend(allocator, (0, 6))
    state, before = allocator.backup_state(), free(allocator)
    again = [extend(allocator, (0, 9)).tolist()]
    extend(allocator, (0, 9), logical=True)
    allocator.restore_state(state)
    assert free(allocator) == before
    allocator.check(found)
    assert extend(allocator, (0, 9)).tolist() == again[0]
    state = allocator.backup_state()
    allocator.free_device_pages(slots(1))
    with pytest.raises(SlotError, match="slots were freed after this state was made"):
        allocator.restore_state(state)
    with pytest.raises(SlotError, match="not made by this allocator"):
        allocator.restore_state(None)


def test_it_is_cleared_and_resized_only_when_empty(allocator):
    allocator.alloc(8)
    with pytest.raises(SlotError, match="2 pages are live"):
        allocator.resize({"full": 32})
    assert (allocator.size, free(allocator)) == (64, (56, 24, 64))
    allocator.clear()
    assert free(allocator) == (64, 32, 64)
    assert not allocator.logical_to_device.any()
    allocator.resize({"full": 32, "device": 16})
    assert (allocator.size, free(allocator), allocator.max_device_buffers) == (32, (32, 16, 64), 1)
    with pytest.raises(SlotError, match="size 36 is no whole number of pages of 4 slots up to 32"):
        allocator.resize({"full": 16, "device": 36})
    assert free(allocator) == (32, 16, 64)
    with pytest.raises(SlotError, match="resize names \\['swa'\\]"):
        allocator.resize({"swa": 4})


def test_a_damaged_map_is_found(allocator):
    found = extend(allocator, (0, 8))
    for slot, word, message in [
        (5, 9, "the slots of the page from 4 map to no one device page"),
        (1, 4, "map to no one device page"),
    ]:
        kept = int(allocator.logical_to_device[slot])
        allocator.logical_to_device[slot] = word
        with pytest.raises(SlotError, match=message):
            allocator.check(found)
        allocator.logical_to_device[slot] = kept
    allocator.logical_to_device[8:12] = allocator.logical_to_device[4:8]
    with pytest.raises(SlotError, match="a device page has two owners"):
        allocator.check(found)
    allocator.logical_to_device[8:12] = 0
    with pytest.raises(SlotError, match="space 'device': 1 pages, at slots \\[8\\]"):
        allocator.check(found)


def test_no_hot_path_waits_for_the_device():
    cache = cache_of("meta", debug=False, page_size=4)
    allocator, pool = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    many = [torch.empty(2, dtype=torch.int64, device="meta")] * 3
    (row, _) = pool.alloc(["a", "b"])
    found = allocator.alloc_extend(many[0], [0, 0], many[1], [6, 5], many[2], 11, owners=["a", "b"])
    pool.write([row, row + 1], [0, 0], [6, 5], found)
    assert allocator.reserve_host("a", 20).shape == (20,)
    allocator.free_device_rows(pool.req_to_token, [row], [0], [4])
    assert allocator.alloc_device_buffer("a", 4).shape == (12,)
    for length in (7, 8, 9):
        assert allocator.alloc_decode(many[0], [length, length - 1], many[2], owners=["a", "b"]).shape == (2,)
    pool.write([row, row + 1], [6, 5], [9, 8], torch.empty(6, dtype=torch.int64, device="meta"))
    assert [part.shape for part in allocator.map_newest("a")] == [(1,), (1,)]
    assert allocator.translate(found).shape == (11,)
    cache.release("a")
    cache.release("b")
    assert free(allocator) == (64, 32, 64)


def test_other_spaces_and_uneven_pages_are_refused(make):
    def query(**sizes):
        return make.query(tuple(Space(name=name, rule=SizeRule(), page_size=size) for name, size in sizes.items()), {})

    with pytest.raises(PlanError, match=r"keeps the spaces 'full', 'device' and 'host', not \['device', 'full'\]"):
        HiSparseAllocator.buffers(query(full=4, device=4))
    with pytest.raises(PlanError, match="have pages of 4, 8 and 4 slots"):
        HiSparseAllocator.buffers(query(full=4, device=8, host=4))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_requests_never_share_a_page_and_leak_none(page_size, seed):
    """Requests grow, leave the device, get buffers, decode and end; after each step every tier adds up."""
    rng = random.Random(seed)
    cache = cache_of(page_size=page_size, max_running_requests=4, max_total_tokens=48, hisparse_host_to_device_ratio=3)
    allocator, pool = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    gone, buffered, names, steps = {}, set(), iter(range(1000)), 0
    for _ in range(150):
        live = list(pool.live_rows().values())
        choice = rng.randrange(5)
        if choice == 0 or not live:
            name, tokens = next(names), rng.randint(1, 20)
            if cache.admit(name, tokens) is not None:
                gone[name] = 0
                if allocator.reserve_host(name, min(64, tokens + 20)) is None:
                    cache.release(name)
        elif choice == 1:
            steps += _decode_all(cache, live, buffered)
        elif choice == 2:
            name = rng.choice(live)
            gone[name] = max(gone[name], rng.randint(0, int(pool.lengths[pool.row_of(name)])) // page_size * page_size)
            cache.evict([name], [gone[name]])
        elif choice == 3:
            name = rng.choice(live)
            if (
                name not in buffered
                and allocator.alloc_device_buffer(
                    name, gone[name], rng.choice([1, 8, allocator.device_slots_per_request])
                )
                is not None
            ):
                buffered.add(name)
        else:
            name = rng.choice(live)
            cache.release(name)
            buffered.discard(name)
        cache.check(held=_held(pool))
    for name in list(pool.live_rows().values()):
        cache.release(name)
    cache.check(held=slots())
    assert free(allocator) == (144, 48, 144)
    assert not allocator.logical_to_device.any()
    assert steps > 10


def _decode_all(cache, live, buffered):
    """Return the tokens that requests with buffers wrote."""
    allocator, pool = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    rows = [pool.row_of(name) for name in live]
    before = [int(pool.lengths[row]) for row in rows]
    last = [int(pool.req_to_token[row, length - 1]) for row, length in zip(rows, before, strict=True)]
    for name, length in zip(live, before, strict=True):
        if length % allocator.page_size and name in buffered:
            assert int(allocator.translate(pool.req_to_token[pool.row_of(name), length - 1 : length])) > 0
        if length == 64 or allocator.reserve_host(name, length + 1) is None:
            return 0
    found = decode(allocator, [length + 1 for length in before], last, live)
    if found is None:
        return 0
    pool.write(rows, before, [length + 1 for length in before], found)
    assert int(allocator.translate(found).min()) >= allocator.page_size
    return len(buffered)


def _held(pool):
    rows = [pool.req_to_token[row, : int(pool.lengths[row])].long() for row in pool.live_rows()]
    return torch.cat(rows) if rows else slots()


class TestHiSparseAllocator(AllocatorSuite):
    """What an allocator of one space promises, where the device has as many slots as there are numbers."""

    allocator_cls = HiSparseAllocator
    device = DEVICE
    model = ModelSpec(name="m", architecture="M", layers=(DSA,), context_length=256, dtype="bfloat16")
    budget_bytes = 2**22
    page_sizes, seeds = (16,), (1,)
    options = {  # noqa: RUF012
        "hisparse": True,
        "hisparse_top_k": 4,
        "hisparse_host_to_device_ratio": 1,
        "max_running_requests": 4,
    }
    test_needed_pages_are_exact = unsupported("two sides lack slots, and both are named")


def test_a_nested_restore_takes_back_what_each_request_reserved():
    cache = cache_of()
    allocator = cache.token_to_kv_pool_allocator
    for request in "ab":
        cache.admit(request, 4)
    outer = allocator.backup_state()
    allocator.reserve_host("b", 8)
    allocator.reserve_host("a", 0)  # nothing to take, nothing to give back
    inner = allocator.backup_state()
    allocator.reserve_host("a", 8)
    allocator.restore_state(inner)
    assert allocator.host_slots("b", 0, 8).shape == (8,)
    allocator.restore_state(outer)
    with pytest.raises(SlotError, match="host slots for 0 tokens"):
        allocator.host_slots("b", 0, 4)
    cache.check()


def test_host_slots_that_cannot_be_noted_go_back(monkeypatch):
    cache = cache_of()
    allocator = cache.token_to_kv_pool_allocator
    cache.admit("a", 4)
    free = allocator.host_available_size()
    with monkeypatch.context() as patch:
        patch.setattr(allocator._host_slots, "add", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            allocator.reserve_host("a", 8)
    assert allocator.host_available_size() == free
    cache.check()


def test_pages_of_another_type_are_refused():
    allocator = cache_of().token_to_kv_pool_allocator
    for free in (allocator.free_pages, allocator.free_device_pages):
        with pytest.raises(SlotError, match="pages"):
            free(torch.tensor([1.7]))
        with pytest.raises(SlotError, match="pages"):
            free([1])
