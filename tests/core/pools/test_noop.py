"""A pool that keeps nothing, for work that reads no cache."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

import msgspec  # noqa: E402
from kvdock.builder import build  # noqa: E402
from kvdock.device import DeviceInfo  # noqa: E402
from kvdock.errors import SlotError  # noqa: E402
from kvdock.model import LayerSpec, MHAParams, ModelSpec  # noqa: E402
from kvdock.options import Parallelism, make_options  # noqa: E402
from kvdock.planner import plan_from  # noqa: E402
from kvdock.pools import NoOpPool  # noqa: E402
from kvdock.startup import core_only  # noqa: E402

DEVICE = DeviceInfo(
    device_type="cpu",
    name="cpu",
    total_bytes=2**24,
    free_before_load_bytes=2**24,
    free_bytes=2**24,
    capabilities=frozenset({"skip_kv_cache:torch"}),
)


def make(debug=False, heads=4, tp=2, **options):
    registry = core_only()
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=heads, head_dim=8, v_head_dim=4))
    model = ModelSpec(name="m", architecture="A", layers=(layer,) * 3, context_length=64, dtype="bfloat16")
    given = {
        "prefill_only_disable_kv_cache": True,
        "attention_backend": "torch",
        "is_embedding": True,
        "prefix_cache": False,
        "max_total_tokens": 64,
        "max_running_requests": 4,
        "page_size": 16,
        **options,
    }
    plan = plan_from((model,), DEVICE, make_options(given), Parallelism(tp_size=tp), registry, budget_bytes=2**20)
    return plan, build(plan, debug=debug)


def test_no_kv_is_planned_and_none_is_allocated():
    plan, cache = make()
    pool = cache.token_to_kv_pool
    assert type(pool) is NoOpPool
    assert plan.bytes_per_token.kv == 0
    assert sum(b.nbytes for b in plan.groups[0].buffers) == pool.mem_usage == 2  # one element of 16 bits
    assert cache.allocated_bytes() == plan.total_bytes


def test_slots_are_handed_out_all_the_same():
    plan, cache = make()
    assert plan.max_total_num_tokens == 64
    assert cache.token_to_kv_pool_allocator.alloc(64).tolist() == list(range(16, 80))


def test_placeholders_have_the_shape_of_a_page_on_this_rank():
    pool = make(tp=2)[1].token_to_kv_pool
    assert pool.get_key_buffer(2).shape == (1, 16, 2, 8)
    assert pool.get_value_buffer(2).shape == (1, 16, 2, 4)
    assert pool.get_key_buffer(0).dtype == torch.bfloat16
    with pytest.raises(SlotError, match="layer 3 has no KV in this pool"):
        pool.get_key_buffer(3)


def test_what_is_written_is_dropped_and_in_debug_mode_refused():
    k, v, loc = torch.ones(1, 2, 8), torch.ones(1, 2, 4), torch.tensor([17])
    pool = make()[1].token_to_kv_pool
    pool.set_kv_buffer(0, loc, k, v)
    assert not pool.get_key_buffer(0).any()
    with pytest.raises(SlotError, match="layer 0: KV is written although prefill_only_disable_kv_cache keeps none"):
        make(debug=True)[1].token_to_kv_pool.set_kv_buffer(0, loc, k, v)


def test_values_cannot_be_read():
    with pytest.raises(SlotError, match="keeps no KV, so there is none to read"):
        make()[1].token_to_kv_pool.read_kv(0, torch.tensor([17]))


def test_there_is_nothing_to_move_copy_or_transfer():
    """P-06: descriptors of the pool that keeps nothing are empty lists."""
    pool, loc = make()[1].token_to_kv_pool, torch.tensor([17])
    pool.move_kv_cache(loc, loc)
    assert pool.get_cpu_copy(loc) == [] == pool.buffer_infos()
    pool.load_cpu_copy([], loc)
    pool.clear()
    assert pool.get_contiguous_buf_infos() == pool.get_state_buf_infos() == ([], [], [])
    with pytest.raises(SlotError, match="1 copies for 0 tensors"):
        pool.load_cpu_copy([torch.zeros(1)], loc)
    with pytest.raises(SlotError, match="2 target slots for 1 source"):
        pool.move_kv_cache(torch.tensor([1, 2]), loc)


def test_bytes_are_those_of_one_element_whatever_the_model():
    for fields in ({"heads": 64}, {"kv_cache_dtype": "fp8_e4m3"}):
        plan, cache = make(**fields)
        assert cache.allocated_bytes() == plan.total_bytes
        assert cache.token_to_kv_pool.mem_usage == (1 if "kv_cache_dtype" in fields else 2)
    assert msgspec.structs.asdict(plan.bytes_per_token)["kv"] == 0
