"""Rows in two tiers: spaces and costs, writes through the map, copies between device and host."""

import kvdock
import pytest
from kvdock.allocators import PagedAllocator
from kvdock.demand import device_buffer_size, device_slots_per_request
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, PluginError, SlotError, UnsupportedCombination
from kvdock.layout import Buffer
from kvdock.model import DSAParams, LayerSpec, MLAParams, ModelSpec
from kvdock.options import CacheOptions, Parallelism
from kvdock.queries import Query
from kvdock.startup import core_only
from kvdock.testing.mocks import mock_plugin

torch = pytest.importorskip("torch")

from kvdock.pools import DSAPool, HiSparseDSAPool  # noqa: E402

DEVICE = DeviceInfo(device_type="cpu", name="d", total_bytes=2**50, free_before_load_bytes=2**50, free_bytes=2**50)


def dsa(lora=128, rope=8):
    return LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=lora, qk_rope_head_dim=rope, index_head_dim=128))


class Paged(PagedAllocator):
    features = PagedAllocator.features | {"hisparse"}


class Tiers(Paged):
    """Keeps the map and decides nothing: tests write it."""

    @classmethod
    def buffers(cls, query):
        page = query.spaces[0].page_size
        return (Buffer(name="map", role="map", space="full", shape=(), dtype="int64", guard=page),)

    def __init__(self, query, parts):
        self.query, self.parts = query, parts
        self.size, self.page_size = parts.sizes["full"], query.spaces[0].page_size
        self.logical_to_device = parts.tensors.rows("map")


def registry_of(composite=Tiers):
    registry = core_only()
    claims = mock_plugin("tiers", "hardware", allocator=lambda query: Paged if len(query.spaces) == 1 else composite)
    registry.add(claims, name="tiers", tier="hardware")
    return registry


def model_of(layers, context):
    return ModelSpec(name="m", architecture="M", layers=tuple(layers), context_length=context, dtype="bfloat16")


def plan_of(layers, budget=2**22, context=256, composite=Tiers, **options):
    given = {"page_size": 4, "hisparse": True, "max_running_requests": 2, "hisparse_top_k": 8, **options}
    model, registry = model_of(layers, context), registry_of(composite)
    return kvdock.plan(model, device=DEVICE, options=given, budget_bytes=budget, registry=registry)


def cache_of(device="cpu", debug=False, **options):
    given = {"max_total_tokens": 24, "hisparse_host_to_device_ratio": 2, "context_length": 16, **options}
    return kvdock.build(plan_of([dsa()] * 2, **given), device=device, debug=debug)


@pytest.fixture
def cache():
    """24 device slots, 48 slots and host slots, pages of 4; slots 8, 9 and 13 have their rows on the device."""
    made = cache_of()
    mapping = made.token_to_kv_pool_allocator.logical_to_device
    mapping[8], mapping[9], mapping[13] = 4, 27, 6
    return made


@pytest.mark.parametrize(("ratio", "per_token"), [(4, 102_480), (2, 86_376), (1, 78_324)])
def test_index_keys_are_charged_for_every_token_that_is_numbered(ratio, per_token):
    # S-05: 61 * 1152 + 61 * 132 * ratio; a ratio of 1 is the plain cost of S-04
    options = {"page_size": 64, "hisparse_top_k": 64, "hisparse_host_to_device_ratio": ratio}
    plan = plan_of([dsa(512, 64)] * 61, 2**28, **options)
    tokens = plan.spaces["device"]
    assert plan.costs.per_slot["device"].kv + ratio * plan.costs.per_slot["full"].kv == per_token
    assert (
        plan.bytes_per_token.kv == per_token / ratio
    )  # of a token that is numbered: its rows are on the device in turn
    assert plan.spaces == {"full": tokens * ratio, "device": tokens, "host": tokens * ratio, "requests": 2}
    assert plan.max_total_num_tokens == tokens * ratio
    rows, keys, on_host = plan.groups[0].buffers
    assert rows.nbytes == 61 * 1152 * (tokens + 64)
    assert keys.nbytes == 61 * 132 * (tokens * ratio + 64)
    assert on_host.nbytes == 61 * 1152 * (tokens * ratio + 64)
    assert (rows.space, keys.space, on_host.space) == ("device", "full", "host")
    assert [buffer.memory for buffer in (rows, keys, on_host)] == ["device", "device", "pinned"]
    assert plan.host_bytes >= on_host.nbytes
    cache = kvdock.build(plan_of([dsa()] * 2, **options), device="meta")
    assert cache.allocated_bytes() == cache.plan.total_bytes
    assert cache.host_bytes() == cache.plan.host_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_planned_bytes_are_allocated_bytes(dtype):
    cache = cache_of(kv_cache_dtype=dtype, index_dtype="fp4")
    row = {"bfloat16": 272, "fp8_e4m3": 148, "fp8_e5m2": 136}[dtype]
    assert cache.token_to_kv_pool.breakdown() == {
        "kv": 2 * 28 * row,
        "index_k": 2 * 52 * 68,
        "kv_host": 2 * 52 * row,
    }
    assert cache.allocated_bytes() == cache.plan.total_bytes


@pytest.mark.parametrize(
    ("options", "size", "slots"),
    [
        ({"hisparse_device_buffer_size": 2048, "page_size": 64}, 2048, 2112),
        ({"page_size": 64}, 4096, 4160),
        ({"hisparse_top_k": 100, "page_size": 16}, 200, 224),
        ({"hisparse_top_k": 100, "hisparse_device_buffer_size": 100}, 100, 101),
        ({"context_length": 1000, "page_size": 64}, 4096, 1088),
    ],
)
def test_a_request_takes_its_device_buffer_and_a_page(options, size, slots):
    given = CacheOptions(**{"hisparse_top_k": 2048, **options})
    query = Query(model=model_of([dsa()], 2**16), options=given, parallel=Parallelism(), device=DEVICE)
    assert device_buffer_size(query) == size
    assert device_slots_per_request(query) == slots


def test_the_automatic_limit_is_what_the_device_holds_buffers_for():
    # 8,192 device slots hold three buffers of 2,112
    options = {"page_size": 64, "hisparse_top_k": 1024, "hisparse_device_buffer_size": 2048, "max_total_tokens": 8192}
    plan = plan_of([dsa()], 2**30, 4096, max_running_requests=None, **options)
    assert plan.spaces["device"] == 8192
    assert plan.max_running_requests == 3
    assert plan.limits[1].factor == "device slots // 2112"


def test_a_plan_holds_one_device_buffer_at_least():
    with pytest.raises(PlanError, match="max_total_tokens=16 is below the 20 tokens that one request needs"):
        cache_of(max_total_tokens=16)
    with pytest.raises(PlanError, match="hisparse_device_buffer_size=7 is less than hisparse_top_k=8"):
        cache_of(hisparse_device_buffer_size=7)


def test_rows_are_written_through_the_map_and_keys_are_not(cache, slots):
    pool = cache.token_to_kv_pool
    pool.set_kv_buffer(1, slots(8, 9, 13), torch.tensor([1.0, 2, 3]).view(3, 1, 1).expand(3, 1, 136))
    pool.set_index_k(1, slots(8, 9, 40), torch.tensor([4.0, 5, 6]).view(3, 1).expand(3, 128))
    rows = pool.get_key_buffer(1)
    assert rows.shape == (7, 4, 1, 136)
    assert [float(rows.flatten(0, 1)[slot].mean()) for slot in (4, 27, 6)] == [1, 2, 3]
    assert rows.count_nonzero() == 3 * 136
    assert pool.read_index_k(1, slots(8, 9, 40, 13)).mean(1).tolist() == [4, 5, 6, 0]
    assert pool.get_mla_kv_buffer(1, slots(9, 13))[0].mean(-1).flatten().tolist() == [2, 3]
    assert pool.read_kv(1, slots(13, 8))[1].mean(-1).flatten().tolist() == [3, 1]
    assert not pool.get_key_buffer(0).any()


def test_writes_to_rows_that_are_not_resident_land_in_padding(cache, slots):
    pool = cache.token_to_kv_pool
    ones = torch.ones(3, 1, 136)
    pool.set_kv_buffer(0, slots(10, -1, 0), ones)
    pool.set_mla_kv_buffer(0, slots(11, -1, 44), ones[..., :128], ones[..., 128:])
    assert not pool.get_key_buffer(0).flatten(0, 1)[1:].any()
    assert pool.resident(slots(8, 9, 10, 0, -1)).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_rows_go_to_the_host_and_come_back_to_other_slots(slots, dtype):
    cache = cache_of(kv_cache_dtype=dtype)
    pool, mapping = cache.token_to_kv_pool, cache.token_to_kv_pool_allocator.logical_to_device
    mapping[8], mapping[9] = 4, 27
    rows = torch.randn(2, 1, 136, generator=torch.Generator().manual_seed(1))
    for layer in (0, 1):
        pool.set_kv_buffer(layer, slots(8, 9), rows * (layer + 1))
    before = [pool.get_mla_kv_buffer(layer, slots(8, 9)) for layer in (0, 1)]
    pool.offload(slots(8, 9, 10), slots(51, 4, 5))
    host = pool.parts.tensors.rows("kv_host", 0)
    assert host.device.type == "cpu"
    assert host[51].equal(pool.get_key_buffer(0)[1, 0])
    assert not host[5].any()
    assert not host[1:4].any()
    mapping[8], mapping[9] = 10, 0
    pool.swap_in(slots(51), slots(10))
    for layer in (0, 1):
        for now, then in zip(pool.get_mla_kv_buffer(layer, slots(8)), before[layer], strict=True):
            assert now.equal(then[:1])


def test_one_layer_may_be_copied_alone(cache, slots):
    pool = cache.token_to_kv_pool
    for layer in (0, 1):
        pool.set_kv_buffer(layer, slots(8), torch.full((1, 1, 136), layer + 1.0))
    pool.offload(slots(8), slots(5), layer_id=1)
    host = [pool.parts.tensors.rows("kv_host", layer) for layer in (0, 1)]
    assert not host[0].any()
    assert host[1][5].eq(2).all()
    pool.swap_in(slots(5), slots(20), layer_id=1)
    assert pool.get_key_buffer(1)[5, 0].eq(2).all()
    assert not pool.get_key_buffer(0)[5].any()
    with pytest.raises(SlotError, match="layer 7 has no KV"):
        pool.swap_in(slots(5), slots(20), layer_id=7)
    for copy in (pool.offload, pool.swap_in):
        with pytest.raises(SlotError, match="host slots for"):
            copy(slots(8, 9), slots(5))


def test_a_move_takes_keys_and_the_rows_that_are_resident(cache, slots):
    pool = cache.token_to_kv_pool
    pool.set_kv_buffer(0, slots(8, 13), torch.tensor([1.0, 2]).view(2, 1, 1).expand(2, 1, 136))
    pool.set_index_k(0, slots(8, 40), torch.tensor([3.0, 4]).view(2, 1).expand(2, 128))
    pool.move_kv_cache(slots(9, 13), slots(8, 40))
    assert pool.get_mla_kv_buffer(0, slots(9, 13))[0].mean(-1).flatten().tolist() == [1, 2]
    assert pool.read_index_k(0, slots(9, 13)).mean(1).tolist() == [3, 4]
    with pytest.raises(SlotError, match="1 target slots for 2 source slots"):
        pool.move_kv_cache(slots(9), slots(8, 13))


def test_copies_are_of_resident_slots_and_come_back_bit_by_bit(cache, slots):
    pool = cache.token_to_kv_pool
    rows, keys = torch.randn(2, 1, 136), torch.randn(2, 128)
    pool.set_kv_buffer(1, slots(8, 9), rows)
    pool.set_index_k(1, slots(8, 9), keys)
    latents, index = pool.get_mla_kv_buffer(1, slots(8, 9))[0], pool.read_index_k(1, slots(8, 9))
    copies = pool.get_cpu_copy(slots(8, 9))
    assert len(copies) == 2 + 2 * 2
    pool.clear()
    pool.load_cpu_copy(copies, slots(13, 8))
    assert pool.get_mla_kv_buffer(1, slots(13, 8))[0].equal(latents)
    assert pool.read_index_k(1, slots(13, 8)).equal(index)
    before = [view.clone() for view in (pool.get_key_buffer(1), pool.get_index_k_with_scale_buffer(1))]
    with pytest.raises(SlotError, match="the rows of slot 10 are not on the device; swap them in first"):
        pool.get_cpu_copy(slots(8, 10))
    with pytest.raises(SlotError, match="the rows of slot 10 are not on the device"):
        pool.load_cpu_copy(copies, slots(8, 10))
    with pytest.raises(SlotError, match="these 6 copies do not begin with the rows of 2 layers for 1 slots"):
        pool.load_cpu_copy(copies, slots(8))
    with pytest.raises(SlotError, match="do not fit"):
        pool.load_cpu_copy(copies[:5], slots(8, 9))
    assert before[0].equal(pool.get_key_buffer(1))
    assert before[1].equal(pool.get_index_k_with_scale_buffer(1))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_rows_that_are_written_to_the_host_are_those_of_the_device(slots, dtype):
    cache = cache_of(kv_cache_dtype=dtype)
    pool, mapping = cache.token_to_kv_pool, cache.token_to_kv_pool_allocator.logical_to_device
    mapping[8], mapping[9] = 4, 27
    rows = torch.randn(2, 1, 136, generator=torch.Generator().manual_seed(2))
    pool.set_kv_buffer(1, slots(8, 9), rows)
    pool.set_host_kv_buffer(1, slots(51, 4), rows)
    on_device, on_host = (pool.parts.tensors.rows(name, 1) for name in ("kv", "kv_host"))
    assert on_host[[51, 4]].view(torch.uint8).equal(on_device[[4, 27]].view(torch.uint8))
    assert not pool.parts.tensors.rows("kv_host", 0).view(torch.uint8).any()
    expected = pool.read_kv(1, slots(8, 9))
    for space, at in [("device", slots(4, 27)), ("host", slots(51, 4))]:
        for found, before in zip(pool.read_tier(1, space, at), expected, strict=True):
            assert found.dtype == torch.bfloat16
            assert found.equal(before)
    assert pool.read_tier(1, "host", slots(51), torch.float32)[1].shape == (1, 1, 128)


def test_rows_of_tiers_are_refused_by_what_does_not_fit(cache, slots):
    pool = cache.token_to_kv_pool
    with pytest.raises(SlotError, match="rows lie in the spaces 'device' and 'host', not in 'full'"):
        pool.read_tier(0, "full", slots(8))
    with pytest.raises(SlotError, match="layer 7 has no KV"):
        pool.set_host_kv_buffer(7, slots(5), torch.ones(1, 1, 136))
    with pytest.raises(SlotError, match=r"layer 0: rows of shape \(1, 1, 136\) for 2 host slots; give \[2, 1, 136\]"):
        pool.set_host_kv_buffer(0, slots(5, 6), torch.ones(1, 1, 136))
    assert not pool.parts.tensors.rows("kv_host", 0).any()


def test_copies_of_host_rows_need_no_row_on_the_device(cache, slots):
    """A request that is swapped out and comes back to other slots: one of them resident, one not."""
    pool = cache.token_to_kv_pool
    rows, keys = torch.randn(2, 1, 136), torch.randn(2, 128)
    pool.set_host_kv_buffer(1, slots(20, 21), rows)
    pool.set_index_k(1, slots(30, 31), keys)
    index = pool.read_index_k(1, slots(30, 31))
    copies = pool.get_cpu_copy(slots(30, 31), slots(20, 21))
    assert len(copies) == len(pool.get_cpu_copy(slots(8, 9)))
    pool.clear()
    pool.load_cpu_copy(copies, slots(8, 40), slots(5, 6))
    assert pool.read_tier(1, "host", slots(5, 6))[0].equal(rows.bfloat16())
    assert pool.read_tier(1, "device", slots(4))[0].equal(rows[:1].bfloat16())
    assert pool.read_index_k(1, slots(8, 40)).equal(index)
    assert not pool.parts.tensors.rows("kv", 1)[1:4].any() and not pool.parts.tensors.rows("kv", 1)[5:].any()
    for call in (
        lambda: pool.get_cpu_copy(slots(8, 40), slots(5)),
        lambda: pool.load_cpu_copy(copies, slots(8), slots()),
    ):
        with pytest.raises(SlotError, match="host slots for"):
            call()


@pytest.mark.parametrize("threads", [None, 512])
def test_the_threads_of_a_swap_in_block_are_kept_for_kernels(threads):
    pool = cache_of(hisparse_swap_in_block_size=threads).token_to_kv_pool
    assert pool.swap_in_block_size == (threads or 960)


def test_the_transfer_list_is_every_tensor_of_both_tiers(cache):
    # G-07, P-06
    pool = cache.token_to_kv_pool
    infos = pool.buffer_infos()
    assert [(info.name, info.space) for info in infos[::2]] == [
        ("kv", "device"),
        ("index_k", "full"),
        ("kv_host", "host"),
    ]
    assert [info.item_nbytes for info in infos[::2]] == [4 * 272, 4 * 132, 4 * 272]
    assert [info.layer_id for info in infos] == [0, 1] * 3
    assert all(info.nbytes % info.item_nbytes == 0 for info in infos)
    assert sum(info.nbytes for info in infos) == pool.mem_usage


def test_with_debug_slots_are_checked_in_the_numbering_of_requests(slots):
    pool = cache_of(debug=True).token_to_kv_pool
    pool.parts.allocators["full"].alloc(48)
    pool.set_kv_buffer(0, slots(51), torch.ones(1, 1, 136))
    with pytest.raises(SlotError, match="layer 0: slot 52 is outside 0 … 51"):
        pool.set_kv_buffer(0, slots(52), torch.ones(1, 1, 136))


def test_writes_never_wait_for_the_device():
    pool = cache_of("meta").token_to_kv_pool
    loc = torch.zeros(3, dtype=torch.int64, device="meta")
    pool.set_kv_buffer(0, loc, torch.zeros(3, 1, 136, device="meta"))
    pool.set_index_k(0, loc, torch.zeros(3, 128, device="meta"))
    pool.move_kv_cache(loc, loc)
    assert pool.resident(loc).shape == (3,)
    assert pool.get_mla_kv_buffer(0, loc)[0].shape == (3, 1, 128)


def test_an_allocator_without_a_map_is_refused():
    class Blind(Tiers):
        def __init__(self, query, parts):
            super().__init__(query, parts)
            del self.logical_to_device

    with pytest.raises(PluginError, match="needs an allocator with a map logical_to_device, not Blind"):
        kvdock.build(plan_of([dsa()] * 2, composite=Blind), device="meta")


def test_other_kinds_of_layers_and_features_are_refused():
    mla = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=16, qk_rope_head_dim=8))
    with pytest.raises(UnsupportedCombination, match="MLAPool lacks hisparse"):
        plan_of([mla])
    with pytest.raises(UnsupportedCombination, match="HiSparseDSAPool lacks page_major"):
        plan_of([dsa()], page_major=True)
    with pytest.raises(UnsupportedCombination, match="HiSparseDSAPool lacks layer_split"):
        plan_of([dsa()], layer_split=True)


def test_without_the_option_there_is_one_tier():
    plan = plan_of([dsa()] * 2, hisparse=False, hisparse_top_k=None)
    assert plan.groups[0].pool_cls.name == DSAPool.__name__ != HiSparseDSAPool.__name__
    assert set(plan.spaces) == {"requests", "full"}
    with pytest.raises(PlanError, match="nothing in this plan reads hisparse_top_k=8"):
        plan_of([dsa()] * 2, hisparse=False)


def test_with_debug_slots_of_the_tiers_are_checked():
    """By the core's own allocator, which knows who holds slots of each tier."""
    model = model_of([dsa()], 64)
    options = {"page_size": 64, "hisparse": True, "max_running_requests": 2, "hisparse_top_k": 8}
    cache = kvdock.build(kvdock.plan(model, device=DEVICE, options=options, budget_bytes=2**24), "cpu", debug=True)
    pool, slots = cache.token_to_kv_pool, cache.admit("a", 8)
    on_device = pool.row_slots(slots[:1])
    nobodys = {name: torch.tensor([cache.plan.spaces[name] - 1]) for name in ("device", "host")}
    row = torch.ones(1, 1, 136, dtype=torch.bfloat16)
    refused = {
        "space 'device': .* never handed out": lambda: pool.swap_in(torch.tensor([0]), nobodys["device"]),
        "space 'device': slot 1000000 is outside": lambda: pool.swap_in(torch.tensor([0]), torch.tensor([10**6])),
        "space 'host': .* never handed out": lambda: pool.swap_in(nobodys["host"], on_device),
        "space 'host': pages": lambda: pool.offload(slots[:1], nobodys["host"]),
        "space 'host': .* are written": lambda: pool.set_host_kv_buffer(0, nobodys["host"], row),
    }
    for message, call in refused.items():
        with pytest.raises(SlotError, match=message):
            call()
