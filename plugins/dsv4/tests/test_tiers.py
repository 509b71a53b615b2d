"""Compressed rows of ratio 4 in two tiers: sizes, what is on the device, buffers, copies."""

import inspect

import kvdock
import pytest
from kvdock.errors import BudgetError, PluginError, SlotError, UnsupportedCombination
from kvdock_dsv4.allocators import DSV4Allocator
from kvdock_dsv4.tiers import DSV4HiSparseAllocator

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.planned import Parts  # noqa: E402
from kvdock_dsv4.pools.hisparse import HiSparsePackedPool  # noqa: E402

GIB40 = 40 * 2**30
TIERS = {"hisparse": True, "hisparse_top_k": 64}
C4 = 1


@pytest.fixture
def tiered(cache):
    return cache(budget_bytes=2**23, **TIERS)


def test_the_device_holds_a_share_and_the_host_all_of_the_rows(plan, flash):
    found = plan(flash, GIB40, max_running_requests=64, hisparse=True, hisparse_host_to_device_ratio=4)
    n = found.spaces["full"]
    assert found.spaces["c4"] == n // 4  # of index keys, and of host rows
    assert found.spaces["device"] == n // 16 // 64 * 64
    kept = {b.name: b for g in found.groups if g.name == "c4" for b in g.buffers}
    assert (kept["kv"].space, kept["kv"].memory) == ("device", "device")
    assert (kept["kv_host"].space, kept["kv_host"].memory) == ("c4", "pinned")
    assert kept["kv_host"].nbytes == found.host_bytes - sum(
        b.nbytes for b in found.tables if b.memory in ("host", "pinned")
    )
    assert kept["kv"].nbytes == 21 * (found.spaces["device"] // 64 + 1) * 37440


def test_a_higher_ratio_holds_more_tokens_and_the_request_limit_is_the_full_sides(plan, flash):
    # the limit of one request is the same with a host tier and without
    plain = plan(flash, GIB40, max_running_requests=16)
    tiers = plan(flash, GIB40, max_running_requests=16, hisparse=True, hisparse_host_to_device_ratio=4)
    assert tiers.max_total_num_tokens > plain.max_total_num_tokens
    assert tiers.max_request_tokens == plain.max_request_tokens == tiers.max_length() == 1_048_576


def test_requests_are_no_more_than_buffers(plan, small):
    # 8,192 slots hold three padded buffers of 2,112
    options = {"hisparse": True, "hisparse_top_k": 1024, "hisparse_device_buffer_size": 2048, "page_size": 256}
    model = small | {"max_position_embeddings": 8192}
    found = plan(model, 2**28, max_total_tokens=8192 * 8, **options)
    each = found.outline.spaces["device"].rule.needs
    assert found.spaces["device"] == 8192
    assert each == 2048 + 512 // 4  # the buffer, and the rows of the pages on which a window can lie
    assert found.max_running_requests == 8192 // each == 3


def test_requests_that_arrive_have_the_rows_of_their_window_on_the_device(plan, small):
    # G-04: 8 · 8,192 tokens, 1 of 8 of them for those that run; then 5 · 2 pages of 64 rows, all of them beside it
    options = {"hisparse": True, "hisparse_top_k": 1024, "hisparse_device_buffer_size": 2048, "page_size": 256}
    model = small | {"max_position_embeddings": 8192}
    found = plan(model, 2**28, max_total_tokens=8192 * 8, role="decode", decode_extra_slots=5, **options)
    assert found.spaces["device"] == 8192 + 5 * 2 * 64
    assert found.max_running_requests == 8192 // (2048 + 512 // 4) == 3
    limit = next(limit for limit in found.limits if limit.name == "requests")
    assert (limit.factor, limit.raised_by[0]) == ("tokens // 17408", "hisparse_device_buffer_size (a smaller one)")
    kept = {b.name: b for g in found.groups if g.name == "c4" for b in g.buffers}
    # Two layers; a row is 64 + 2 · 16 + 8 bytes, a page of 64 of them is padded to whole rows of 96 columns.
    page = -(-64 * 104 // 96) * 96
    assert kept["kv"].nbytes == 2 * page * (8192 // 64 + 5 * 2 + 1)
    # The host has a row for each group of 4 tokens, whoever they are, and the padding page.
    assert kept["kv_host"].nbytes == 2 * page * (8192 * 8 // 4 // 64 + 1)
    table = next(b for b in found.tables if b.name == "req_to_device_buffer")
    assert table.shape == (3 + 5 + 1, 2048)


def test_a_request_holds_as_many_device_slots_on_a_decode_worker(plan, flash):
    def held(**options):
        found = plan(flash, GIB40, max_running_requests=8, hisparse=True, **options)
        return {need.name: need.needed for need in kvdock.serves(found, requests=8, length=9856).spaces}["device"]

    # A buffer of 4,096 compressed rows, and those of the two pages on which a window lies.
    assert held() == held(role="decode") == 8 * (4096 + 2 * 64)


def test_the_smallest_decode_worker_has_a_buffer_for_a_request(plan, small):
    options = {"role": "decode", "decode_extra_slots": 50, "max_running_requests": 1, "swa_full_tokens_ratio": 0.5}
    with pytest.raises(BudgetError) as least:
        plan(small, 1, **options, **TIERS)
    found = plan(small, least.value.needed_bytes, **options, **TIERS)
    # Of 2,048 tokens 1 of 8 has a row on the device: 128 of a buffer, 128 of a window; what arrives is beside them.
    assert (found.max_running_requests, found.spaces["full"]) == (1, 2048)
    assert found.spaces["device"] == 256 + 50 * 128


def test_arrivals_take_nothing_from_other_roles(plan, flash):
    def slots(**options):
        found = plan(
            flash, max_total_tokens=2**20, budget_bytes=GIB40, max_running_requests=8, hisparse=True, **options
        )
        return found.spaces["device"], found.spaces["c4"], found.max_running_requests

    device, compressed, requests = slots()
    assert (device, compressed, requests) == (2**20 // 8, 2**20 // 4, 8)
    assert slots(role="prefill") == (device, compressed, requests)
    assert slots(role="decode") == (device + 16 * 2 * 64, compressed, requests)  # twice the requests may arrive
    assert slots(role="decode", decode_extra_slots=0) == (device, compressed, requests)


def test_what_is_not_served_with_tiers_is_refused(plan, small):
    with pytest.raises(UnsupportedCombination, match="hisparse"):
        no_index = small | {"compress_ratios": [0, 128, 128, 0]}
        plan(no_index, max_running_requests=2, **TIERS)


def test_the_wrapper_forwards_every_capability(tiered):
    # whatever the logical allocator offers
    offered = {name for name, _ in inspect.getmembers(DSV4Allocator, callable) if not name.startswith("_")}
    assert not {name for name in offered if not hasattr(DSV4HiSparseAllocator, name)}
    allocator = tiered.token_to_kv_pool_allocator
    assert (allocator.page_size, allocator.device.page_size) == (256, 64)
    assert not {name for name in vars(allocator.logical) if not name.startswith("_")} - set(vars(allocator))
    assert allocator.size == allocator.logical.size == tiered.plan.max_total_num_tokens


def admitted(found, name, tokens):
    slots = found.admit(name, tokens)
    pool = found.pools["c4"]
    ends = found.token_to_kv_pool.translate_loc_from_full_to_compressed(slots, 4)
    return slots, ends[ends >= 0], pool


def write(pool, loc, seed=0):
    rows = torch.randn(len(loc), 1, 80, generator=torch.Generator().manual_seed(seed)).bfloat16()
    pool.set_kv_buffer(C4, loc, rows)
    return pool.read_kv(C4, loc)[0]


def test_rows_are_on_the_device_until_their_tokens_leave_the_window(tiered):
    _, loc, pool = admitted(tiered, "a", 600)
    written = write(pool, loc)
    assert pool.resident(loc).all()
    pool.offload(loc)
    free = tiered.token_to_kv_pool_allocator.device_available_size()
    tiered.evict(["a"], [511])  # one page left the window, the second not all of it
    assert pool.resident(loc).tolist() == [False] * 64 + [True] * 86
    assert tiered.token_to_kv_pool_allocator.device_available_size() == free + 64
    assert pool.read_host(C4, loc).equal(written)
    assert pool.read_kv(C4, loc[64:])[0].equal(written[64:])


@pytest.fixture
def decoding(cache):
    return cache(budget_bytes=2**23, max_running_requests=2, role="decode", decode_extra_slots=3, **TIERS)


def test_a_prompt_arrives_on_the_host_and_the_rows_of_its_window_on_the_device_too(decoding):
    allocator = decoding.token_to_kv_pool_allocator
    full, device = allocator.full_available_size(), allocator.device_available_size()
    # 1,300 tokens are 6 pages; the newest 128 lie on pages 4 and 5: tokens from 1,024, rows from 256.
    assert allocator.swa_pages_needed([0], [1300], [128]) == 2
    slots = decoding.admit("a", 1300, arriving=True)
    loc = decoding.token_to_kv_pool.translate_loc_from_full_to_compressed(slots, 4)
    loc, pool = loc[loc >= 0], decoding.pools["c4"]
    assert full - allocator.full_available_size() == 6 * 256
    assert device - allocator.device_available_size() == 2 * 64
    assert pool.resident(loc).tolist() == [False] * 256 + [True] * 69

    rows = torch.randn(325, 1, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    pool.set_host_kv_buffer(C4, loc, rows)
    arrived = pool.read_host(C4, loc)
    assert arrived.equal(write(pool, loc, seed=1)) is False  # what is not resident was not written there
    pool.parts.tensors.rows("kv", C4).zero_()
    pool.swap_in(loc, pool.row_slots(loc), C4)
    assert pool.read_kv(C4, loc[256:])[0].equal(arrived[256:])
    assert (arrived - rows).abs().max() < 0.3  # 8 bits

    assert decoding.req_to_token_pool.start(["a"]) is not None
    decoding.evict(["a"], [1280])  # page 4 left the window
    assert device - allocator.device_available_size() == 64
    decoding.release("a")
    assert allocator.device_available_size() == device
    decoding.check(held=torch.zeros(0, dtype=torch.int64))


def test_rows_that_arrive_are_refused_where_they_do_not_fit(decoding):
    pool, loc = decoding.pools["c4"], torch.tensor([64])
    before = pool.parts.tensors.rows("kv_host", C4).clone()
    with pytest.raises(SlotError, match=r"layer 1: values of shape \[1, 1, 79\]"):
        pool.set_host_kv_buffer(C4, loc, torch.zeros(1, 1, 79))
    with pytest.raises(SlotError, match="layer 2"):
        pool.set_host_kv_buffer(2, loc, torch.zeros(1, 1, 80))
    assert pool.parts.tensors.rows("kv_host", C4).equal(before)


def test_rows_of_requests_that_arrive_have_buffers_of_their_own(decoding):
    allocator, table = decoding.token_to_kv_pool_allocator, decoding.req_to_token_pool
    for name in "abcde":
        decoding.admit(name, 300, arriving=True)
    assert decoding.admit("f", 300, arriving=True) is None  # two that run, three that arrive
    assert allocator.req_to_device_buffer.shape == (5 + 1, 128)
    last = table.row_of("e")
    slots = allocator.alloc_device_buffer("e")
    assert allocator.req_to_device_buffer[last].equal(slots)
    for name in "abcde":
        decoding.release(name)
    assert allocator.device_available_size() == allocator.device.size


def test_a_short_device_refuses_the_tail_alone(decoding):
    allocator = decoding.token_to_kv_pool_allocator
    taken = allocator.device.alloc(allocator.device_available_size() - 2 * 64)
    assert decoding.admit("a", 2048, arriving=True) is not None  # 8 pages, 1 of them the tail
    assert [(s.space, s.missing) for s in allocator.shortfall(8, 2)] == [("device", 7 * 64)]
    assert [(s.space, s.missing) for s in allocator.shortfall(8, 2, 2)] == [("device", 64)]
    before = allocator.full_available_size(), allocator.swa_available_size()
    assert decoding.admit("b", 1300, arriving=True) is None
    assert (allocator.full_available_size(), allocator.swa_available_size()) == before
    decoding.release("a")
    allocator.device.free(taken)
    decoding.check(held=torch.zeros(0, dtype=torch.int64))


def test_a_buffer_brings_rows_back_and_goes_with_its_request(tiered):
    _, loc, pool = admitted(tiered, "a", 600)
    written, allocator = write(pool, loc), tiered.token_to_kv_pool_allocator
    pool.offload(loc, C4)
    tiered.evict(["a"], [512])
    slots = allocator.alloc_device_buffer("a", 64)
    more = allocator.grow_device_buffer("a", 128)
    assert slots.shape == more.shape == (64,)
    row = tiered.req_to_token_pool.row_of("a")
    assert allocator.req_to_device_buffer[row].equal(torch.cat((slots, more)))
    pool.swap_in(loc[:64], slots, C4)
    assert pool.read_device(C4, slots).equal(written[:64])
    with pytest.raises(SlotError, match="holds a device buffer already"):
        allocator.alloc_device_buffer("a")
    tiered.release("a")
    tiered.check(held=torch.zeros(0, dtype=torch.int64))
    assert not allocator.req_to_device_buffer.any()
    assert allocator.device_available_size() == allocator.device.size


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.alloc_device_buffer("nobody"), "has no row"),
        (lambda a: a.alloc_device_buffer("a", 0), "has 1 … 128 slots, not 0"),
        (lambda a: a.alloc_device_buffer("a", 129), "has 1 … 128 slots, not 129"),
        (lambda a: a.grow_device_buffer("a", 64), "holds no device buffer"),
        (lambda a: a.restore_state(None), "not made by this allocator"),
        (lambda a: a.resize({"device": 64}), "are live"),
    ],
)
def test_misuse_of_tiers_changes_nothing(tiered, call, message):
    admitted(tiered, "a", 300)
    before = tiered.token_to_kv_pool_allocator.device_available_size()
    with pytest.raises(SlotError, match=message):
        call(tiered.token_to_kv_pool_allocator)
    assert tiered.token_to_kv_pool_allocator.device_available_size() == before


def test_buffers_are_taken_back_with_what_was_allocated_beside_them(tiered):
    slots, _, _ = admitted(tiered, "a", 300)
    allocator = tiered.token_to_kv_pool_allocator
    state, free = allocator.backup_state(), allocator.device_available_size()
    allocator.alloc_device_buffer("a", 64)
    allocator.alloc(256)
    allocator.restore_state(state)
    assert allocator.device_available_size() == free
    allocator.check(slots)
    assert allocator.alloc_device_buffer("a", 64) is not None


def test_copies_bring_rows_back_wherever_they_were(tiered):
    slots, loc, pool = admitted(tiered, "a", 600)
    written = write(pool, loc)
    pool.offload(loc)
    tiered.evict(["a"], [256])
    copies = tiered.token_to_kv_pool.get_cpu_copy(slots)
    tiered.release("a")
    _, loc, _ = admitted(tiered, "b", 600)
    tiered.token_to_kv_pool.load_cpu_copy(copies, tiered.req_to_token_pool.req_to_token[2, :600].long())
    assert pool.read_kv(C4, loc)[0].equal(written)
    assert pool.read_host(C4, loc).equal(written)


def test_moves_take_host_rows_and_what_is_resident_of_both(tiered):
    slots, loc, pool = admitted(tiered, "a", 256)
    written = write(pool, loc)
    pool.offload(loc)
    target, there, _ = admitted(tiered, "b", 256)
    tiered.token_to_kv_pool.move_kv_cache(target, slots)
    assert pool.read_kv(C4, there)[0].equal(written)
    assert pool.read_host(C4, there).equal(written)


def test_transfers_are_told_of_both_tiers(tiered):
    infos = [(i.name, i.layer_id, i.space) for i in tiered.pools["c4"].buffer_infos()]
    assert infos == [("kv", 1, "device"), ("kv", 3, "device"), ("kv_host", 1, "c4"), ("kv_host", 3, "c4")]


def test_a_pool_of_two_tiers_needs_an_allocator_that_knows_them(cache, tiered):
    pool = tiered.pools["c4"]
    fields = {name: getattr(pool.parts, name) for name in pool.parts.__struct_fields__}
    plain = cache().token_to_kv_pool_allocator
    with pytest.raises(PluginError, match="needs an allocator that knows compressed rows on the device"):
        HiSparsePackedPool(pool.query, Parts(**fields | {"allocator": plain}))


def test_planned_bytes_are_allocated_bytes_on_both_sides(tiered):
    assert tiered.allocated_bytes() == tiered.plan.total_bytes
    assert tiered.host_bytes() == tiered.plan.host_bytes > 0


def test_frees_of_every_form_give_back_all_that_lies_beside(tiered):
    allocator = tiered.token_to_kv_pool_allocator
    at_first = allocator.full_available_size(), allocator.swa_available_size(), allocator.device_available_size()
    for give in (
        lambda slots: allocator.free(slots),
        lambda slots: allocator.free_pages(slots[::256] // 256),
        lambda slots: (allocator.free_swa(slots[:512]), allocator.free(slots)),
        lambda slots: (allocator.free_swa_pages(slots[::256] // 256), allocator.free_pages(slots[::256] // 256, False)),
    ):
        give(allocator.alloc(3 * 256))
        assert at_first == (
            allocator.full_available_size(),
            allocator.swa_available_size(),
            allocator.device_available_size(),
        )
        allocator.check(torch.zeros(0, dtype=torch.int64))
    allocator.free_group_begin()
    slots = allocator.alloc(2 * 256)
    allocator.free(slots[:256])
    allocator.free(slots[256:])
    allocator.free_group_end()
    allocator.check(torch.zeros(0, dtype=torch.int64))
    allocator.resize({"full": 2048, "swa": 1024, "device": 256})
    assert (allocator.size, allocator.device_available_size()) == (2048, 256)
    allocator.clear()


def test_buffers_are_no_more_than_the_device_could_hold_whole_ones_of(tiered):
    allocator = tiered.token_to_kv_pool_allocator
    allocator.resize({"full": 2048, "swa": 1024, "device": 6 * 64})
    assert allocator.max_device_buffers == 2  # of 128 slots, and a page of 64 beside each
    for name in "abc":
        admitted(tiered, name, 256)
    assert [len(allocator.alloc_device_buffer(name, 64)) for name in "ab"] == [64, 64]
    assert allocator.device_available_size() == 64
    assert allocator.alloc_device_buffer("c", 64) is None


def test_rows_leave_the_device_with_the_last_token_of_their_page(tiered):
    slots, loc, pool = admitted(tiered, "a", 512)
    allocator = tiered.token_to_kv_pool_allocator
    free = allocator.device_available_size(), allocator.swa_available_size()
    allocator.free_swa(slots[:255])
    assert (allocator.device_available_size(), allocator.swa_available_size()) == free
    allocator.free_swa(slots[255:300])
    assert (allocator.device_available_size(), allocator.swa_available_size()) == (free[0] + 64, free[1] + 256)
    assert pool.resident(loc).tolist() == [False] * 64 + [True] * 64


def test_a_prompt_arrives_where_its_tail_fits(decoding):
    allocator = decoding.token_to_kv_pool_allocator
    taken = allocator.swa.alloc(allocator.swa_available_size() - 2 * 256)
    assert decoding.admit("a", 1300, arriving=True) is not None  # 6 pages, 2 of them the tail
    assert allocator.swa_available_size() == 0
    decoding.release("a")
    allocator.swa.free(taken)


def test_a_buffer_that_goes_back_in_a_group_voids_states_from_inside(tiered):
    admitted(tiered, "a", 300)
    allocator = tiered.token_to_kv_pool_allocator
    allocator.alloc_device_buffer("a")
    allocator.free_group_begin()
    allocator.release("a")
    state = allocator.backup_state()
    allocator.free_group_end()
    with pytest.raises(SlotError, match="were freed after this state was made"):
        allocator.restore_state(state)


def test_a_refused_resize_changes_no_space(tiered):
    allocator = tiered.token_to_kv_pool_allocator
    before = allocator.size, allocator.swa.size, allocator.device.size
    with pytest.raises(SlotError, match="up to"):
        allocator.resize({"device": 64, "full": 2**30})
    assert (allocator.size, allocator.swa.size, allocator.device.size) == before
    assert allocator.device_available_size() == before[2]


def test_nothing_is_left_of_buffers_after_a_clear(tiered):
    slots, _, _ = admitted(tiered, "a", 300)
    allocator = tiered.token_to_kv_pool_allocator
    allocator.alloc_device_buffer("a")
    tiered.check(slots)  # a buffer is nobody's leak
    tiered.clear()
    assert not allocator.req_to_device_buffer.any()
    admitted(tiered, "a", 300)
    assert allocator.alloc_device_buffer("a", 64).shape == (64,)


def test_what_left_the_device_is_not_copied_to_the_host_again(tiered):
    _, loc, pool = admitted(tiered, "a", 600)
    written = write(pool, loc)
    pool.offload(loc)
    tiered.evict(["a"], [512])
    rows = pool.parts.tensors.rows("kv_host", C4)
    last = rows[-1].clone()
    pool.offload(torch.cat((loc, loc.new_tensor([-1]))))
    assert pool.read_host(C4, loc).equal(written)
    assert rows[-1].equal(last)


def test_a_slot_of_nothing_is_padding_on_the_host(tiered):
    _, loc, pool = admitted(tiered, "a", 600)
    write(pool, loc)
    none, last = torch.tensor([-1]), pool.parts.tensors.rows("kv_host", C4)[-1]
    last.fill_(1)
    row = torch.randn(1, 1, 80, generator=torch.Generator().manual_seed(2)).bfloat16()
    pool.set_host_kv_buffer(C4, none, row)
    assert last.eq(1).all()
    assert pool.read_host(C4, none).equal(pool.read_host(C4, torch.tensor([0])))
    slots = tiered.token_to_kv_pool_allocator.alloc_device_buffer("a", 64)
    pool.swap_in(none, slots[:1], C4)
    assert pool.read_device(C4, slots[:1]).equal(pool.read_host(C4, torch.tensor([0])))


def test_copies_are_of_the_device_where_rows_are_newer_there(tiered):
    slots, loc, pool = admitted(tiered, "a", 256)
    write(pool, loc)
    pool.offload(loc)
    newer = write(pool, loc, seed=5)
    copies = tiered.token_to_kv_pool.get_cpu_copy(slots)
    _, there, _ = admitted(tiered, "b", 256)
    row = tiered.req_to_token_pool.row_of("b")
    tiered.token_to_kv_pool.load_cpu_copy(copies, tiered.req_to_token_pool.req_to_token[row, :256].long())
    assert pool.read_kv(C4, there)[0].equal(newer)


def test_moves_write_no_device_row_whose_source_is_on_the_host_alone(tiered):
    _, loc, pool = admitted(tiered, "a", 600)
    written = write(pool, loc)
    pool.offload(loc)
    tiered.evict(["a"], [256])
    _, there, _ = admitted(tiered, "b", 256)
    here = write(pool, there, seed=3)
    pool.offload(there)
    pool.move_kv_cache(there, loc[:64])
    assert pool.read_kv(C4, there)[0].equal(here)
    assert pool.read_host(C4, there).equal(written[:64])
    pool.move_kv_cache(there[:1], torch.tensor([-1]))
    pool.move_kv_cache(torch.tensor([-1]), loc[64:65])
    assert pool.read_host(C4, there).equal(written[:64])


def test_a_layer_is_copied_alone(tiered):
    _, loc, pool = admitted(tiered, "a", 256)
    other = 3
    rows = torch.randn(64, 1, 80, generator=torch.Generator().manual_seed(4)).bfloat16()
    for layer in (C4, other):
        pool.set_kv_buffer(layer, loc, rows)
    pool.offload(loc, C4)
    assert pool.read_host(C4, loc).equal(pool.read_kv(C4, loc)[0])
    assert not pool.parts.tensors.rows("kv_host", other).any()
    pool.offload(loc, other)
    assert pool.read_host(other, loc).equal(pool.read_kv(other, loc)[0])


def test_a_check_finds_a_device_page_of_two_pages(tiered):
    slots, _, _ = admitted(tiered, "a", 600)
    allocator = tiered.token_to_kv_pool_allocator
    first, second = (int(slots[token]) // 256 for token in (0, 256))
    allocator.c4_to_device[first] = allocator.c4_to_device[second]
    with pytest.raises(SlotError, match="a device page has two owners; the map c4_to_device is damaged"):
        tiered.check(slots)


def test_with_debug_slots_of_both_tiers_are_checked(tiered):
    """A copy between tiers names slots that do not exist, and those that nobody holds; nothing is copied."""
    pool = tiered.token_to_kv_pool.compressed_pool(C4)
    slots = tiered.admit("a", 300)
    own = slots[3:4] // 4
    on_device = pool.row_slots(own)
    last = {name: torch.tensor([tiered.plan.spaces[name] - 1]) for name in ("c4", "device")}
    before = [part.clone() for tiers in pool._tiers(None) for part in tiers]
    refused = {
        "space 'device': .* never handed out": lambda: pool.swap_in(own, last["device"]),
        "space 'device': slot 1000000 is outside": lambda: pool.swap_in(own, torch.tensor([10**6])),
        "space 'device': slot -5 is outside": lambda: pool.swap_in(own, torch.tensor([-5])),
        "space 'full': .* never handed out": lambda: pool.swap_in(last["c4"], on_device),
        "space 'full': pages": lambda: pool.offload(last["c4"]),
        "space 'full': .* are written": lambda: pool.set_host_kv_buffer(
            C4, last["c4"], torch.ones(1, 1, 80, dtype=torch.bfloat16)
        ),
    }
    for message, call in refused.items():
        with pytest.raises(SlotError, match=message):
            call()
    after = [part for tiers in pool._tiers(None) for part in tiers]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    pool.swap_in(own, on_device)
    pool.offload(own)
