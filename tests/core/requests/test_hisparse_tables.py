"""What requests hold in two tiers: device buffers behind a gate, host slots for all that they may write, one release."""

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import SlotError
from kvdock.model import DSAParams, LayerSpec, ModelSpec
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

DEVICE = DeviceInfo(device_type="cpu", name="d", total_bytes=2**50, free_before_load_bytes=2**50, free_bytes=2**50)
DSA = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))


def cache_of(context=64, device="cpu", debug=True, **options):
    """32 device slots, 64 full and host slots, pages of 4; a buffer is 8 slots and a page of 4."""
    registry = core_only()
    model = ModelSpec(name="m", architecture="M", layers=(DSA, DSA), context_length=context, dtype="bfloat16")
    given = {"page_size": 4, "hisparse": True, "max_running_requests": 2, "hisparse_top_k": 4, "max_total_tokens": 32}
    plan = kvdock.plan(model, device=DEVICE, options=given | options, budget_bytes=2**27, registry=registry)
    return kvdock.build(plan, device=device, debug=debug)


@pytest.fixture
def cache():
    return cache_of()


@pytest.fixture
def allocator(cache):
    return cache.token_to_kv_pool_allocator


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


def device_slots(allocator, cache, request):
    """Return where each token of a request has its rows."""
    return allocator.translate(held(cache, request)).tolist()


def held(cache, *requests):
    pool = cache.req_to_token_pool
    rows = [pool.row_of(request) for request in requests]
    return torch.cat([pool.req_to_token[row, : int(pool.lengths[row])].long() for row in rows])


def grow(cache, *requests):
    """Decode a token of each request and return its slots."""
    pool = cache.req_to_token_pool
    rows = [pool.row_of(request) for request in requests]
    before = [int(pool.lengths[row]) for row in rows]
    after = [length + 1 for length in before]
    last = slots(*[int(pool.req_to_token[row, end - 1]) for row, end in zip(rows, before, strict=True)])
    found = cache.token_to_kv_pool_allocator.alloc_decode(slots(*after), after, last, owners=requests)
    pool.write(rows, before, after, found)
    return found


def free(allocator):
    return allocator.full_available_size(), allocator.device_available_size(), allocator.host_available_size()


def test_at_most_as_many_requests_hold_buffers_as_the_device_has_room_for():
    # 8,192 device slots, padded buffer 2,112 per request: at most 3
    options = {"hisparse_top_k": 1024, "hisparse_device_buffer_size": 2048, "page_size": 64, "max_total_tokens": 8192}
    cache = cache_of(4096, **options, role="decode", max_running_requests=3, decode_extra_slots=2)
    allocator = cache.token_to_kv_pool_allocator
    assert (allocator.device.size, allocator.device_slots_per_request, allocator.max_device_buffers) == (8192, 2112, 3)
    assert allocator.req_to_device_buffer.shape == (6, 2112)
    for name in range(5):
        assert cache.admit(name, 100, arriving=True) is not None
    assert allocator.device_available_size() == 8192
    for name in range(3):
        assert allocator.alloc_device_buffer(name, 100).shape == (2112,)
    before = free(allocator)
    assert before[1] == 8192 - 3 * 2112
    assert allocator.alloc_device_buffer(3, 100) is None
    assert allocator.alloc_device_buffer(3, 100, slots=64) is None
    assert free(allocator) == before
    cache.release(1)
    assert allocator.alloc_device_buffer(4, 100, slots=64).shape == (64,)
    for name in (0, 2, 3, 4):
        cache.release(name)
    cache.close()


def test_host_slots_are_reserved_for_the_prompt_and_all_that_may_follow():
    # host 1,000 tokens, request 600 prompt + 600 output: refused
    cache = cache_of(1300, page_size=8, max_total_tokens=1000, hisparse_host_to_device_ratio=1)
    allocator = cache.token_to_kv_pool_allocator
    assert cache.admit("a", 600) is not None
    before, table = free(allocator), allocator.req_to_host.clone()
    assert allocator.reserve_host("a", 600 + 600) is None
    assert free(allocator) == before == (400, 400, 1000)
    assert allocator.req_to_host.equal(table)
    assert [(lack.space, lack.missing) for lack in allocator.shortfall(0, 0, host_pages=150)] == [("host", 200)]
    # The prompt alone fits, and what follows it is not forgotten while decoding.
    assert allocator.reserve_host("a", 600).shape == (600,)
    cache.evict(["a"], [600])
    allocator.alloc_device_buffer("a", 600)
    for _ in range(8):
        grow(cache, "a")
    with pytest.raises(
        SlotError, match=r"request 'a' has host slots for 600 tokens, not for 608; reserve_host\('a', 608"
    ):
        grow(cache, "a")
    assert allocator.reserve_host("a", 608).shape == (8,)
    grow(cache, "a")
    cache.release("a")
    cache.close()


def test_host_slots_follow_the_tokens_of_a_request(cache, allocator):
    cache.admit("a", 6)
    cache.admit("b", 3)
    assert allocator.reserve_host("a", 6).tolist() == list(range(4, 12))
    assert allocator.reserve_host("b", 1).tolist() == [12, 13, 14, 15]
    assert allocator.reserve_host("a", 10).tolist() == [16, 17, 18, 19]
    assert allocator.reserve_host("a", 5).tolist() == []
    assert allocator.host_slots("a", 6, 10).tolist() == [10, 11, 16, 17]
    row = cache.req_to_token_pool.row_of("a")
    assert allocator.req_to_host[row, :14].tolist() == [*range(4, 12), 16, 17, 18, 19, 0, 0]
    for start, end, message in [(6, 13, "has host slots for 12 tokens, not for 13"), (3, 2, "has no tokens 3 … 2")]:
        with pytest.raises(SlotError, match=message):
            allocator.host_slots("a", start, end)
    with pytest.raises(SlotError, match="cannot have host slots for 69 tokens: a row has 68 columns"):
        allocator.reserve_host("a", 69)
    with pytest.raises(SlotError, match="request 'c' has no row"):
        allocator.reserve_host("c", 1)
    assert free(allocator)[2] == 64 - 16
    cache.release("a")
    assert free(allocator)[2] == 60
    assert not allocator.req_to_host[row].any()


def test_a_buffer_takes_over_what_is_resident_and_keeps_the_page_that_is_filled(cache, allocator):
    cache.admit("a", 14)
    assert device_slots(allocator, cache, "a") == list(range(4, 18))
    cache.evict(["a"], [5])  # the first page goes whole
    assert device_slots(allocator, cache, "a") == [0] * 4 + list(range(8, 18))
    buffer = allocator.alloc_device_buffer("a", device_start=4)
    assert buffer.tolist() == [*range(8, 16), *range(16, 20)]
    assert allocator.req_to_device_buffer[cache.req_to_token_pool.row_of("a")].equal(buffer)
    assert device_slots(allocator, cache, "a") == [0] * 12 + [16, 17]
    assert free(allocator) == (48, 20, 64)
    cache.check(held(cache, "a"))
    with pytest.raises(SlotError, match="request 'a' holds a device buffer already"):
        allocator.alloc_device_buffer("a", 14)
    cache.release("a")
    assert free(allocator) == (64, 32, 64)
    cache.close()


def test_a_small_buffer_gives_the_rest_back_and_grows_later(cache, allocator):
    cache.admit("a", 14)
    assert allocator.alloc_device_buffer("a", 0, slots=8).tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert free(allocator)[1] == 24
    assert allocator.grow_device_buffer("a", 8).tolist() == []
    assert allocator.grow_device_buffer("a", 9).tolist() == [20, 21, 22, 23]
    row = allocator.req_to_device_buffer[cache.req_to_token_pool.row_of("a")]
    assert row.tolist() == [4, 5, 6, 7, 20, 21, 22, 23, 16, 17, 18, 19]
    assert device_slots(allocator, cache, "a")[12:] == [16, 17]
    with pytest.raises(SlotError, match="a device buffer has 1 … 12 slots, not 13"):
        allocator.grow_device_buffer("a", 13)
    with pytest.raises(SlotError, match="request 'b' holds no device buffer"):
        allocator.grow_device_buffer("b", 12)
    cache.check(held(cache, "a"))


def test_a_buffer_that_finds_no_room_changes_nothing(cache, allocator):
    cache.admit("a", 8)
    cache.admit("b", 23)
    before = allocator.logical_to_device.clone()
    assert allocator.alloc_device_buffer("a", 0) is None
    assert free(allocator) == (32, 0, 64)
    assert allocator.logical_to_device.equal(before)
    small = allocator.alloc_device_buffer("a", 0, slots=8)
    assert small.tolist() == list(range(4, 12))
    assert allocator.grow_device_buffer("a", 12) is None
    assert allocator.req_to_device_buffer.count_nonzero() == 8
    cache.check(held(cache, "a", "b"))


def test_the_newest_page_moves_on_when_it_is_full(cache, allocator):
    cache.admit("a", 7)
    cache.admit("b", 7)
    allocator.reserve_host("a", 20)
    allocator.alloc_device_buffer("a", 0)
    assert device_slots(allocator, cache, "a") == [0, 0, 0, 0, 8, 9, 10]
    at_first = free(allocator)
    found = [grow(cache, "a", "b").tolist() for _ in range(4)]
    assert [slot for slot, _ in found] == [11, 20, 21, 22]
    assert device_slots(allocator, cache, "a") == [0] * 8 + [8, 9, 10]
    assert device_slots(allocator, cache, "b") == [*range(12, 20), 24, 25, 26]
    assert free(allocator) == (at_first[0] - 8, at_first[1] - 4, at_first[2])
    cache.check(held(cache, "a", "b"))
    with pytest.raises(SlotError, match=r"1 requests hold device buffers.*name the requests"):
        allocator.alloc_decode(slots(12), [12], slots(22))
    with pytest.raises(SlotError, match="request 'a' holds a device buffer, in which one token at a time"):
        allocator.alloc_extend(slots(11), [11], slots(13), [13], slots(22), 2, owners=["a"])
    for name in "ab":
        cache.release(name)
    assert free(allocator) == (64, 32, 64)
    cache.close()


def test_a_page_that_was_cut_off_is_mapped_anew(cache, allocator):
    cache.admit("a", 14)
    allocator.reserve_host("a", 20)
    allocator.alloc_device_buffer("a", 0)
    assert cache.trim(["a"], [10]) == 4
    assert device_slots(allocator, cache, "a") == [0] * 10
    before = free(allocator)
    with pytest.raises(SlotError, match=r"request 'a' goes on after 10 tokens, in a page that.*call map_newest"):
        grow(cache, "a")
    on_host, on_device = allocator.map_newest("a")
    assert on_host.tolist() == allocator.host_slots("a", 8, 10).tolist() == [12, 13]
    assert on_device.tolist() == device_slots(allocator, cache, "a")[8:] == [16, 17]
    grow(cache, "a")
    assert device_slots(allocator, cache, "a") == [0] * 8 + [16, 17, 18]
    assert free(allocator) == before
    cache.check(held(cache, "a"))
    cache.trim(["a"], [8])
    assert [part.tolist() for part in allocator.map_newest("a")] == [[], []]
    grow(cache, "a")
    cache.release("a")
    cache.close()


def test_what_a_prefix_cache_keeps_points_into_no_buffer(cache, allocator):
    cache.admit("a", 7)
    allocator.alloc_device_buffer("a", 0)
    grow(cache, "a")
    kept = held(cache, "a")
    assert allocator.translate(kept).tolist() == [0] * 4 + [8, 9, 10, 11]
    cache.release("a", kept=8)
    assert allocator.translate(kept).tolist() == [0] * 8
    assert free(allocator) == (56, 32, 64)
    cache.check(kept)


def test_what_was_reserved_and_grown_is_taken_back(cache, allocator):
    cache.admit("a", 14)
    allocator.alloc_device_buffer("a", 0, slots=8)
    allocator.reserve_host("a", 5)
    state, before = allocator.backup_state(), free(allocator)
    tables = allocator.req_to_host.clone(), allocator.req_to_device_buffer.clone()
    cache.admit("b", 5)
    allocator.reserve_host("b", 9)
    allocator.reserve_host("a", 20)
    allocator.grow_device_buffer("a", 12)
    allocator.restore_state(state)
    cache.req_to_token_pool.free("b")
    assert free(allocator) == before
    assert allocator.req_to_host.equal(tables[0])
    assert allocator.req_to_device_buffer.equal(tables[1])
    cache.check(held(cache, "a"))
    state = allocator.backup_state()
    allocator.release("a")
    with pytest.raises(SlotError, match="slots were freed after this state was made"):
        allocator.restore_state(state)


def test_a_row_that_was_given_away_names_its_holder(cache, allocator):
    cache.admit("a", 5)
    allocator.reserve_host("a", 5)
    allocator.full.clear()
    allocator.device.clear()
    cache.req_to_token_pool.clear()
    with pytest.raises(SlotError, match="request 'a' holds the host slots, but lost row 1"):
        allocator.check()
    cache.req_to_token_pool.alloc(["b"])
    with pytest.raises(SlotError, match="row 1 of request 'b' still lists the host slots of request 'a'"):
        allocator.reserve_host("b", 5)
    allocator.release("a")
    assert allocator.reserve_host("b", 5).shape == (8,)


def test_a_second_release_does_nothing_and_clear_forgets_all(cache, allocator):
    cache.admit("a", 7)
    allocator.reserve_host("a", 7)
    allocator.alloc_device_buffer("a", 0)
    cache.release("a")
    cache.release("a")
    allocator.release("a")
    cache.admit("b", 7)
    allocator.reserve_host("b", 7)
    allocator.alloc_device_buffer("b", 0)
    cache.clear()
    assert free(allocator) == (64, 32, 64)
    for table in (allocator.req_to_host, allocator.req_to_device_buffer, allocator.logical_to_device):
        assert not table.any()
    cache.close()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_a_request_lives_in_both_tiers_and_every_row_is_read_back(page_size, dtype):
    """Admit, write, offload, give back the device, decode in a buffer, swap in, read back, release."""
    cache = cache_of(page_size=page_size, kv_cache_dtype=dtype, hisparse_device_buffer_size=8)
    allocator, pool = cache.token_to_kv_pool_allocator, cache.token_to_kv_pool
    assert cache.allocated_bytes() == cache.plan.total_bytes
    assert cache.host_bytes() == cache.plan.host_bytes
    rows = torch.randn(30, 1, 136, generator=torch.Generator().manual_seed(5))

    def write(found, start):
        for layer in (0, 1):
            pool.set_kv_buffer(layer, found, rows[start : start + len(found)] * (layer + 1))

    def offload(found, start):
        pool.offload(found, allocator.host_slots("a", start, start + len(found)))

    found = cache.admit("a", 18)
    assert allocator.reserve_host("a", 30) is not None
    write(found, 0)
    expected = [pool.get_mla_kv_buffer(layer, found) for layer in (0, 1)]
    offload(found, 0)
    cache.evict(["a"], [18])
    assert allocator.device_available_size() == (32 if page_size == 1 else 28)
    buffer = allocator.alloc_device_buffer("a", 18 // page_size * page_size)
    assert allocator.device_available_size() == 32 - allocator.device_slots_per_request
    for step in range(18, 30):
        new = grow(cache, "a")
        write(new, step)
        expected = [
            [torch.cat(pair) for pair in zip(before, pool.get_mla_kv_buffer(layer, new), strict=True)]
            for layer, before in enumerate(expected)
        ]
        offload(new, step)
        cache.check(held(cache, "a"))
    chosen = slots(29, 3, 17, 0, 18, 22)
    on_host = torch.cat([allocator.host_slots("a", token, token + 1) for token in chosen.tolist()])
    pool.swap_in(on_host, buffer[: len(chosen)])
    for layer in (0, 1):
        latent = pool.get_key_buffer(layer).flatten(0, 1)[buffer[: len(chosen)]]
        kept = pool.parts.tensors.rows("kv_host", layer)[on_host]
        assert latent.view(torch.uint8).equal(kept.view(torch.uint8))
        seen = _decoded(pool, layer, buffer[: len(chosen)])
        for part, before in zip(seen, expected[layer], strict=True):
            assert part.equal(before[chosen])
    cache.release("a")
    cache.check(held=slots())
    assert free(allocator) == (64, 32, 64)
    cache.close()


def _decoded(pool, layer, on_device):
    """Return latents and rope of device slots, through full slots that are mapped there for a moment."""
    mapping = pool.parts.allocator.logical_to_device
    borrowed = torch.arange(40, 40 + len(on_device))
    mapping[borrowed] = on_device
    found = pool.get_mla_kv_buffer(layer, borrowed)
    mapping[borrowed] = 0
    return found


def test_a_request_that_arrives_on_the_host_decodes_from_there():
    cache = cache_of(role="decode", decode_extra_slots=2)
    allocator, pool, table = cache.token_to_kv_pool_allocator, cache.token_to_kv_pool, cache.req_to_token_pool
    found = cache.admit("a", 10, arriving=True)
    assert free(allocator) == (52, 32, 64)
    assert allocator.translate(found).tolist() == [0] * 10
    assert allocator.reserve_host("a", 20) is not None
    host = [pool.parts.tensors.rows("kv_host", layer) for layer in (0, 1)]
    for layer in (0, 1):
        host[layer][allocator.host_slots("a", 0, 10)] = torch.arange(10.0).bfloat16().view(10, 1, 1) + 10 * layer
    table.start(["a"])
    with pytest.raises(SlotError, match=r"space 'device'.*continued as last_loc"):
        grow(cache, "a")
    allocator.alloc_device_buffer("a", device_start=10)
    pool.swap_in(*allocator.map_newest("a"))
    for layer in (0, 1):
        assert pool.get_mla_kv_buffer(layer, found[8:])[0].mean(-1).flatten().tolist() == [
            8 + 10 * layer,
            9 + 10 * layer,
        ]
    grow(cache, "a")
    cache.check(held(cache, "a"))
    cache.release("a")
    assert free(allocator) == (64, 32, 64)
    cache.close()
