"""Where every layer slides: one pool, requests numbered in it, and pages that go back with their last token."""

import random

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import SlotError
from kvdock.layout import SizeRule, Space

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.allocators import (  # noqa: E402
    PagedAllocator,
    PureSWAAllocator,
    PureSWASortedAllocator,
    PureSWATokenAllocator,
    Shortfall,
    TokenAllocator,
)
from kvdock.testing.suites import AllocatorSuite  # noqa: E402

PAGE_SIZES = (1, 3, 4, 16)
NOTHING = torch.zeros(0, dtype=torch.int64)


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


def extend_tail(allocator, prefix, seq, last, tails):
    total = sum(seq) - sum(prefix)
    return allocator.alloc_extend_swa_tail(
        torch.tensor(prefix), prefix, torch.tensor(seq), seq, slots(*last), total, tails
    )


def row_of(held, columns=64):
    table = torch.zeros(2, columns, dtype=torch.int32)
    table[1, : held.numel()] = held
    return table


def make_model(*windows):
    params = kvdock.MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8)
    layers = tuple(kvdock.LayerSpec(kind="mha", params=params, window_tokens=window) for window in windows)
    return kvdock.ModelSpec(name="m", architecture="M", layers=layers, context_length=256, dtype="bfloat16")


MODEL = make_model(15)


def planned(page_size=4, model=MODEL, **options):
    options = {"page_size": page_size, "plugins": (), **options}
    return kvdock.plan(model, device="cpu", budget_bytes=2**18, options=options)


@pytest.mark.parametrize(
    ("page_size", "role", "cls"),
    [
        (1, "none", PureSWATokenAllocator),
        (4, "none", PureSWAAllocator),
        (1, "decode", PureSWASortedAllocator),
        (16, "prefill", PureSWASortedAllocator),
    ],
)
def test_the_plan_names_it_where_every_layer_slides(page_size, role, cls):
    plan = planned(page_size, role=role)
    (choice,) = plan.outline.allocators
    assert choice.cls is cls
    assert isinstance(kvdock.build(plan).token_to_kv_pool_allocator, PureSWAAllocator)


@pytest.mark.parametrize(("page_size", "cls"), [(1, TokenAllocator), (16, PagedAllocator)])
def test_beside_full_layers_sliding_slots_stay_plain(page_size, cls):
    plan = planned(page_size, make_model(15, None))
    assert {choice.name: choice.cls for choice in plan.outline.allocators[:2]} == {
        "allocator full": cls,
        "allocator swa": cls,
    }


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_it_costs_what_a_plain_allocator_costs(make, page_size):
    query = make.query((Space(name="swa", rule=SizeRule(), page_size=page_size),), {})
    pure, plain = (PureSWATokenAllocator, TokenAllocator) if page_size == 1 else (PureSWAAllocator, PagedAllocator)
    assert pure.buffers(query) == plain.buffers(query)


def test_the_slots_of_requests_are_the_sliding_slots(make):
    allocator = make.pure(16, 4)
    held = allocator.alloc(8)
    assert torch.equal(allocator.translate(held), held)
    found = allocator.translate(torch.tensor([[-1, 5], [0, 7]], dtype=torch.int32))
    assert (found.tolist(), found.dtype) == ([[-1, 5], [0, 7]], torch.int64)
    assert (allocator.available_size(), allocator.full_available_size(), allocator.swa_available_size()) == (8, 8, 8)


@pytest.mark.parametrize("debug", [False, True])
def test_pages_leave_with_their_last_token_and_never_twice(make, debug):
    allocator = make.pure(32, 4, debug=debug)
    held = allocator.alloc(20)
    table = row_of(held)
    for start, end, free in [(0, 3, 12), (3, 4, 16), (4, 4, 16), (4, 11, 20), (11, 15, 24)]:
        allocator.free_swa_rows(table, [1], [start], [end])
        assert allocator.available_size() == free
    allocator.check(held=held[12:])
    allocator.free_rows(table, [1], [0], [20], swa_starts=[15])
    assert allocator.available_size() == 32
    allocator.check(held=NOTHING)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("debug", [False, True])
def test_rows_begin_where_the_window_did(make, page_size, debug):
    allocator = make.pure(32 * page_size, page_size, debug=debug)
    held = [allocator.alloc(4 * page_size) for _ in range(3)]
    table = torch.zeros(3, 64, dtype=torch.int32)
    for row, own in enumerate(held):
        table[row, : own.numel()] = own
    p = page_size
    allocator.free_swa_rows(table, [0, 2], [0, 0], [2 * p, 4 * p])
    allocator.free_rows(table, [0, 1, 2], [p, p, 0], [4 * p, 4 * p, 4 * p], swa_starts=[2 * p, 0, 4 * p])
    assert allocator.available_size() == 31 * p
    allocator.check(held=held[1][:p])
    allocator.free_rows(table, [1], [0], [p])
    allocator.check(held=NOTHING)


@pytest.mark.parametrize("swa_starts", [[13], [-1], [0, 0]])
def test_swa_starts_outside_the_row_are_refused(make, swa_starts):
    allocator = make.pure(32, 4)
    held = allocator.alloc(12)
    with pytest.raises(SlotError, match="swa_starts"):
        allocator.free_rows(row_of(held), [1], [0], [12], swa_starts=swa_starts)
    allocator.check(held=held)


def test_tokens_give_back_the_pages_that_they_end(make):
    allocator = make.pure(32, 4)
    held = allocator.alloc(16)
    allocator.free_swa(torch.cat([slots(0, 3), held[:7], held[11:13], held[11:12]]))
    assert allocator.available_size() == 24
    allocator.check(held=torch.cat([held[4:8], held[12:]]))


def test_pages_go_back_by_number_unless_they_went_before(make):
    allocator = make.pure(32, 4)
    held = allocator.alloc(16)
    allocator.free_swa_pages(slots(1, 2))
    allocator.free_pages(slots(1, 2), has_swa=False)
    allocator.free_pages(slots(3))
    assert allocator.available_size() == 28
    allocator.check(held=held[12:])


def test_debug_finds_what_the_window_gave_back_before(make):
    allocator = make.pure(32, 4, debug=True)
    held = allocator.alloc(12, owner="r")
    table = row_of(held)
    allocator.free_swa_rows(table, [1], [0], [4])
    for misuse in (
        lambda: allocator.free_swa_rows(table, [1], [0], [8]),
        lambda: allocator.free_rows(table, [1], [0], [12]),
        lambda: allocator.free_pages(slots(1)),
        lambda: allocator.free_swa_pages(slots(1)),
        lambda: allocator.free_swa(held[3:4]),
    ):
        with pytest.raises(SlotError, match=r"from 4 \(owner 'r'\) are freed twice"):
            misuse()
    allocator.check(held=held[4:])


def test_a_group_frees_what_left_the_window_at_its_end(make):
    allocator = make.pure(32, 4)
    held = allocator.alloc(16)
    table = row_of(held)
    allocator.free_group_begin()
    allocator.free_swa_rows(table, [1], [0], [8])
    allocator.free_rows(table, [1], [8], [14], swa_starts=[8])
    assert allocator.available_size() == 16
    allocator.free_group_end()
    assert allocator.available_size() == 32


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("cls", [PureSWAAllocator, PureSWASortedAllocator])
def test_only_the_tail_takes_slots_and_padding_stands_for_the_rest(make, cls, debug):
    # G-03
    allocator = make.pure(32, 4, debug=debug, cls=cls)
    held = extend_tail(allocator, [0, 0], [18, 5], [-1, -1], [5, 9])
    assert held.tolist() == [0] * 12 + [4, 5, 6, 7, 8, 9] + [12, 13, 14, 15, 16]
    assert allocator.available_size() == 16
    new = allocator.alloc_decode(slots(19, 6), [19, 6], held[[17, 22]])
    assert new.tolist() == [10, 17]
    allocator.check(held=torch.cat([held[12:], new]))
    table = row_of(torch.cat([held[:18], new[:1]]))
    allocator.free_swa_rows(table, [1], [12], [16])
    allocator.free_rows(table, [1], [0], [19], swa_starts=[16])
    allocator.check(held=torch.cat([held[18:], new[1:]]))


def test_tails_take_single_slots_where_a_page_is_one(make):
    allocator = make.pure(8)
    assert extend_tail(allocator, [0, 0], [6, 2], [-1, -1], [2, 9]).tolist() == [0, 0, 0, 0, 1, 2, 3, 4]
    assert extend_tail(allocator, [0], [6], [-1], [5]) is None
    assert allocator.available_size() == 4
    assert allocator.swa_pages_needed([0], [6], [5]) == 5
    assert allocator.pages_needed([0], [6]) == 6
    assert allocator.shortfall(6, 4) == ()
    assert allocator.shortfall(6, 5) == (Shortfall(space="swa", needed=5, available=4),)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_window_never_waits_for_the_device(make, page_size):
    allocator = make.pure(64 * page_size, page_size, device="meta")
    table = torch.zeros(4, 64, dtype=torch.int32, device="meta")
    p = page_size
    allocator.alloc(20 * p)
    allocator.free_swa_rows(table, [1], [0], [2 * p])
    allocator.free_swa_rows(table, [2, 3], [0, p], [p, 2 * p])
    allocator.free_swa_pages(slots(9).to("meta"))
    allocator.free_rows(table, [1, 2], [0, 0], [3 * p, 3 * p], swa_starts=[2 * p, p])
    assert allocator.available_size() == (44 + 2 + 2 + 1 + 1 + 2) * p
    assert allocator.translate(slots(4, -1).to("meta")).device.type == "meta"


def grow(cache, request, tokens, tail=None):
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    (row,) = table.alloc([request])
    start = int(table.lengths[row])
    end, last = start + tokens, slots(int(table.req_to_token[row, start - 1]) if start else -1)
    batch = slots(start), [start], slots(end), [end], last, tokens
    found = allocator.alloc_extend(*batch) if tail is None else allocator.alloc_extend_swa_tail(*batch, [tail])
    if found is not None:
        table.write([row], [start], [end], found)
    return found


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("page_size", "role"), [(1, "none"), (4, "none"), (4, "decode")])
def test_a_request_that_arrives_prefilled_decodes_and_ends_in_a_whole_cache(page_size, role, debug):
    cache = kvdock.build(planned(page_size, role=role), debug=debug)
    allocator = cache.token_to_kv_pool_allocator
    before = allocator.available_size()
    grow(cache, "A", 101, tail=15)
    cache.hold_prefix("A", evicted=101 - 15 if page_size == 1 else 84)
    assert allocator.available_size() == before - (15 if page_size == 1 else 20)
    for length in range(101, 140):
        cache.evict(["A"], [length - 15])
        grow(cache, "A", 1)
        cache.check(held=cache.req_to_token_pool.req_to_token[1, (length - 15) // page_size * page_size : length + 1])
    cache.release("A")
    assert allocator.available_size() == before
    cache.check(held=NOTHING)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_requests_in_a_whole_cache_lose_nothing(page_size, debug):
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    cache = kvdock.build(planned(page_size, max_running_requests=4), debug=debug)
    rows, alive, fresh = cache.req_to_token_pool, {}, 0
    for _ in range(120):
        act = rng.choice(["arrive", "tail", "grow", "evict", "end"])
        if act in ("arrive", "tail") and len(alive) < 4:
            fresh, length, tail = fresh + 1, rng.randint(1, 60), rng.randint(0, 20)
            if grow(cache, fresh, length, tail if act == "tail" else None) is None:
                cache.release(fresh)
                continue
            gone = max(0, length - tail) // page_size * page_size if act == "tail" else 0
            cache.hold_prefix(fresh, evicted=gone)
            alive[fresh] = gone
        elif alive and act == "grow":
            name = rng.choice(sorted(alive))
            room = 256 - int(rows.lengths[rows.row_of(name)])
            grow(cache, name, min(room, rng.randint(1, 9)))
        elif alive and act == "evict":
            name = rng.choice(sorted(alive))
            end = rng.randint(alive[name], int(rows.lengths[rows.row_of(name)]))
            cache.evict([name], [end])
            alive[name] = end
        elif alive:
            name = rng.choice(sorted(alive))
            cache.release(name)
            del alive[name]
        own = [(rows.row_of(name), evicted // page_size * page_size) for name, evicted in alive.items()]
        held = [rows.req_to_token[row, first : int(rows.lengths[row])] for row, first in own]
        cache.check(held=torch.cat(held) if held else NOTHING)


class OnlySliding(AllocatorSuite):
    """The promises of every allocator of one space, of those that requests are numbered in where all layers slide."""

    device = DeviceInfo(
        device_type="cpu", name="cpu", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30
    )
    model = MODEL


class TestPureSWATokenAllocator(OnlySliding):
    allocator_cls = PureSWATokenAllocator
    page_sizes = (1,)


class TestPureSWAAllocator(OnlySliding):
    allocator_cls = PureSWAAllocator
    page_sizes = (2, 16)


class TestPureSWASortedAllocator(OnlySliding):
    allocator_cls = PureSWASortedAllocator
    options = {"role": "decode"}  # noqa: RUF012
    page_sizes = (1, 16)
