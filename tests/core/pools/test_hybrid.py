"""Keys and values beside per-request states: token slots reach the former alone, state slots the latter."""

import pytest
from kvdock.builder import build
from kvdock.device import DeviceInfo
from kvdock.errors import SlotError
from kvdock.model import (
    ConvBlock,
    ConvParams,
    HybridParams,
    LayerSpec,
    MHAParams,
    MLAParams,
    ModelSpec,
    NoParams,
    StateParams,
)
from kvdock.options import Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.pools import HybridLinearPool, SlidingPool  # noqa: E402

DEVICE = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**44, free_before_load_bytes=2**44, free_bytes=2**44)
HEADS = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=4))
WINDOW = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=4), window_tokens=7)
LATENT = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=16, qk_rope_head_dim=8))


def state(heads=4, dim=2):
    conv = ConvParams(blocks=(ConvBlock(heads=heads, head_dim=dim),), kernel=4)
    return LayerSpec(kind="state", params=StateParams(conv=(conv,), temporal=(heads, dim, dim)))


def plan(*layers, page=4, parallel=None, tokens=32, budget=2**42, context=64, **options):
    registry = core_only()
    model = ModelSpec(name="m", architecture="A", layers=layers, context_length=context, dtype="bfloat16")
    given = {
        "page_size": page,
        "max_total_tokens": tokens,
        "max_state_slots": 8,
        "prefix_cache": False,
        "max_running_requests": 2,
        **options,
    }
    return plan_from((model,), DEVICE, make_options(given), parallel or Parallelism(), registry, budget_bytes=budget)


def filled(made, **fields):
    """A built pool with values of its own in all that slots own."""
    pool = build(made, **fields).token_to_kv_pool
    for part in pool.parts.pools.values():
        for number, view in enumerate(part.slot_views()):
            values = torch.randint(1, 99, view.shape, generator=torch.manual_seed(number))
            view.copy_(values.to(view.dtype))
    return pool


def everything(parts):
    return [view.clone() for part in parts for view in part.slot_views()]


def same(before, parts):
    return all(torch.equal(then, now) for then, now in zip(before, everything(parts), strict=True))


def test_only_layers_with_attention_have_keys_and_they_are_found_by_their_global_ids():
    # P-12
    full = [3, 7, 11, 15, 19, 23, 26]
    cache = build(plan(*(HEADS if layer in full else state() for layer in range(27))))
    pool = cache.token_to_kv_pool
    assert isinstance(pool, HybridLinearPool)
    assert pool.layer_ids == tuple(full)
    (group,) = [group for group in cache.plan.groups if group.kind == "mha"]
    assert [(b.name, b.tensors) for b in group.buffers] == [("k", 7), ("v", 7)]
    attention = cache.pools["full"]
    assert attention.group.layer_ids.index(26) == 6
    last = attention.parts.tensors.paged("k", 26)
    assert pool.get_key_buffer(26).data_ptr() == last.data_ptr() == attention.slot_views()[6].data_ptr()
    with pytest.raises(SlotError, match=r"layer 0 keeps a state per request, no keys .* read it with get_state\(0\)"):
        pool.get_key_buffer(0)
    with pytest.raises(SlotError, match="layer 0 keeps a state"):
        pool.set_kv_buffer(0, torch.tensor([4]), torch.ones(1, 2, 8), torch.ones(1, 2, 4))
    with pytest.raises(SlotError, match=r"layer 27 has no KV in this pool; it holds the layers \[3, 7, 11"):
        pool.get_value_buffer(27)
    with pytest.raises(SlotError, match="layer 3 keeps no state; the layers"):
        pool.get_state(3)
    assert pool.states.layer_ids == tuple(sorted(set(range(27)) - set(full)))


def test_only_layers_with_attention_are_priced_by_the_token():
    # T-03: 64 layers, 16 of them full, 4 heads of 256 in 16 bits: 4 MiB a block of 64, and a state a request
    full = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=4, head_dim=256, v_head_dim=256))
    made = plan(*(full if layer % 4 == 3 else state(32, 128) for layer in range(64)), page=64, tokens=640, context=512)
    constant = 48 * (32 * 128 * 3 * 2 + 32 * 128 * 128 * 4)
    assert made.costs.per_slot["state"].kv == constant
    assert made.bytes_for(64) == 4 * 2**20 + constant
    assert made.bytes_for(192) == 12 * 2**20 + constant
    assert made.bytes_for(64, requests=3) == 3 * (4 * 2**20 + constant)
    follows = plan(*made.model.layers, page=64, tokens=640, context=512, max_state_slots=None)
    assert follows.bytes_for(64) == made.bytes_for(64)


def test_fixed_state_slots_limit_how_many_requests_have_a_length():
    made = plan(HEADS, state(), tokens=640, max_state_slots=2)
    assert made.max_length(2) > 0
    assert made.max_length(3) == 0


@pytest.mark.parametrize("full", [HEADS, LATENT], ids=["heads", "latents"])
@pytest.mark.parametrize("page_major", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_planned_bytes_are_allocated_bytes(full, page_major, dtype, tp):
    options = {"kv_cache_dtype": dtype, "page_major": page_major, "max_total_tokens": None}
    made = plan(state(), full, state(), full, parallel=Parallelism(tp_size=tp), budget=2**17, **options)
    cache = build(made)
    assert cache.allocated_bytes() == made.total_bytes <= 2**17
    pool = cache.token_to_kv_pool
    assert pool.get_key_buffer(1).element_size() == (2 if dtype == "auto" else 1)
    assert pool.conv_states(0).dtype == torch.bfloat16
    assert pool.temporal_states(2).shape == (9, 4 // tp, 2, 2)


@pytest.mark.parametrize("page_major", [False, True])
@pytest.mark.parametrize("layers", [(state(), HEADS, state()), (state(), LATENT), (state(), HEADS, WINDOW)])
def test_used_memory_is_measured_and_its_parts_add_up(layers, page_major):
    # P-13
    pool = build(plan(*layers, page_major=page_major)).token_to_kv_pool
    storages = {raw.untyped_storage().data_ptr(): raw.untyped_storage().nbytes() for raw in pool.storages()}
    assert pool.mem_usage == sum(storages.values()) == sum(pool.breakdown().values())
    assert pool.breakdown()["state"] == pool.states.mem_usage > 0


@pytest.mark.parametrize("page_major", [False, True])
def test_token_slots_leave_states_alone(page_major):
    pool = filled(plan(state(), HEADS, state(), HEADS, page_major=page_major))
    attention, before = pool.parts.pools["full"], everything([pool.states])
    pool.move_kv_cache(torch.tensor([5, 6]), torch.tensor([9, 5]))
    copies = pool.get_cpu_copy(torch.tensor([4, 5, 6, 7]))
    assert len(copies) == len(attention.slot_views()) == 4
    pool.verify_copies(copies, torch.tensor([4, 5, 6, 7]))
    pool.load_cpu_copy(copies, torch.tensor([7, 6, 5, 4]))
    for info in pool.buffer_infos():
        assert (info.space, info.layer_id in (1, 3)) == ("full", True)
    assert same(before, [pool.states])
    with pytest.raises(SlotError, match="6 copies for 4 tensors of the parts full"):
        pool.load_cpu_copy([*copies, *copies[:2]], torch.tensor([4, 5, 6, 7]))


@pytest.mark.parametrize("page_major", [False, True])
def test_state_slots_leave_keys_and_values_alone(page_major):
    pool = filled(plan(state(), HEADS, state(), page_major=page_major))
    attention = pool.parts.pools["full"]
    before = everything([attention])
    pool.states.copy_slots(torch.tensor([1]), torch.tensor([2]))
    pool.states.clear_slots(torch.tensor([4, 5]))
    assert same(before, [attention])
    assert torch.equal(pool.temporal_states(0)[1], pool.temporal_states(0)[2])
    pool.clear()
    assert not any(raw.any() for raw in pool.storages())


@pytest.mark.parametrize("page_major", [False, True])
def test_descriptors_keep_pages_and_slots_apart(page_major):
    # P-06, G-06: tokens by pages of 16, states by slots; every one with its global layer and its role
    made = plan(state(), HEADS, state(), HEADS, page=16, page_major=page_major)
    pool = build(made).token_to_kv_pool
    infos, found = pool.buffer_infos(), pool.state_infos()
    assert [(i.role, i.layer_id) for i in infos] == [("key", 1), ("key", 3), ("value", 1), ("value", 3)]
    assert [i.item_nbytes for i in infos] == [16 * 2 * 8 * 2] * 2 + [16 * 2 * 4 * 2] * 2
    assert [(i.role, i.layer_id) for i in found] == [("conv", 0), ("conv", 2), ("temporal", 0), ("temporal", 2)]
    assert [i.item_nbytes for i in found] == [8 * 3 * 2] * 2 + [4 * 2 * 2 * 4] * 2
    for lists in (pool.get_contiguous_buf_infos(), pool.get_state_buf_infos()):
        pointers, lengths, items = lists
        assert len(pointers) == len(lengths) == len(items) == (1 if page_major else 4)
        assert all(length % item == 0 for length, item in zip(lengths, items, strict=True))
    assert pool.get_contiguous_buf_infos()[1][0] // pool.get_contiguous_buf_infos()[2][0] == 3
    assert pool.get_state_buf_infos()[1][0] // pool.get_state_buf_infos()[2][0] == 9
    assert pool.transfer_kind == ("pages" if page_major else "kv_pairs")


def test_stages_of_a_pipeline_name_their_layers_as_the_whole_model_does():
    # G-06: two stages hold layers 0-15 and 16-31 between them, a hybrid with skipped layers
    none = LayerSpec(kind="none", params=NoParams())
    layers = [(state(), none, HEADS, state())[layer % 4] for layer in range(32)]

    def found(**parallel):
        pool = build(plan(*layers, parallel=Parallelism(**parallel))).token_to_kv_pool
        return {(i.role, i.layer_id) for i in (*pool.buffer_infos(), *pool.state_infos())}

    stages = [found(pp_size=2, pp_rank=rank) for rank in (0, 1)]
    assert {layer for _, layer in stages[0]} == {layer for layer in range(16) if layer % 4 != 1}
    assert not stages[0] & stages[1]
    assert stages[0] | stages[1] == found()


class Arrivals:
    """A transfer in progress that notes which layers were waited for."""

    def __init__(self):
        self.waited = []

    def wait_until(self, layer_id):
        self.waited.append(layer_id)


def test_reads_of_states_wait_for_their_layer_as_those_of_keys_do():
    pool = build(plan(state(), HEADS, state())).token_to_kv_pool
    transfer = Arrivals()
    pool.register_layer_transfer(transfer)
    pool.get_key_buffer(1)
    pool.conv_states(2)
    pool.states.temporal_states(0)
    assert transfer.waited == [1, 2, 0]


@pytest.mark.parametrize("page_major", [False, True])
def test_sliding_layers_states_and_full_layers_go_together(page_major):
    made = plan(HEADS, WINDOW, state(), swa_full_tokens_ratio=0.75, page_major=page_major)
    cache = build(made, debug=True)
    pool = cache.token_to_kv_pool
    assert isinstance(pool, SlidingPool)
    assert (pool.layer_ids, pool.states.layer_ids) == ((0, 1), (2,))
    slots = cache.admit("a", 6)
    cache.prepare_states()
    state_slot = cache.req_to_token_pool.state_of("a")
    pool.states.conv_states(2)[state_slot] = 3
    for layer in (0, 1):
        pool.set_kv_buffer(layer, slots, torch.full((6, 2, 8), 5.0), torch.full((6, 2, 4), 6.0))
    pool.move_kv_cache(slots[:2], slots[2:4])
    copies = pool.get_cpu_copy(slots)
    pool.load_cpu_copy(copies, slots)
    assert len(copies) == 4
    assert pool.states.conv_states(2)[state_slot].eq(3).all()
    with pytest.raises(SlotError, match="layer 2 keeps a state per request"):
        pool.set_kv_buffer(2, slots, torch.ones(6, 2, 8), torch.ones(6, 2, 4))
    cache.release("a")
    cache.close()


def test_a_layer_with_attention_and_a_state_side_by_side_is_in_both():
    params = HybridParams(num_kv_heads=2, head_dim=8, v_head_dim=4, state=state().params)
    cache = build(plan(LayerSpec(kind="hybrid", params=params), LayerSpec(kind="hybrid", params=params)))
    pool = cache.token_to_kv_pool
    assert pool.layer_ids == pool.states.layer_ids == (0, 1)
    pool.set_kv_buffer(1, torch.tensor([4]), torch.ones(1, 2, 8), torch.ones(1, 2, 4))
    pool.conv_states(1)[3] = 2
    assert pool.get_key_buffer(1)[1, 0].eq(1).all()
    assert cache.allocated_bytes() == cache.plan.total_bytes


def test_a_model_of_states_alone_numbers_no_tokens():
    cache = build(plan(state(), state(), max_total_tokens=None))
    pool = cache.token_to_kv_pool
    assert isinstance(pool, HybridLinearPool)
    assert (pool.layer_ids, pool.buffer_infos(), len(pool.state_infos())) == ((), [], 4)
    assert cache.allocated_bytes() == cache.plan.total_bytes


def test_states_of_two_shapes_are_two_pools_that_one_slot_addresses():
    cache = build(plan(state(4, 2), HEADS, state(2, 6)), debug=True)
    pool = cache.token_to_kv_pool
    with pytest.raises(SlotError, match="target keeps states of 2 shapes; take each of state_pools"):
        pool.states
    assert [part.layer_ids for part in pool.state_pools] == [(0,), (2,)]
    assert (pool.temporal_states(0).shape, pool.temporal_states(2).shape) == ((9, 4, 2, 2), (9, 2, 6, 6))
    for layer in (0, 2):
        pool.temporal_states(layer).fill_(1)
    cache.admit("a", 3)
    cache.prepare_states()
    slot = cache.req_to_token_pool.state_of("a")
    assert not any(pool.temporal_states(layer)[slot].any() for layer in (0, 2))


def test_a_stage_without_states_has_a_pool_of_its_only_group():
    made = plan(state(), HEADS, parallel=Parallelism(pp_size=2, pp_rank=1))
    pool = build(made).token_to_kv_pool
    assert type(pool).__name__ == "MHAPool"
    with pytest.raises(SlotError, match="target keeps states of no layer here"):
        HybridLinearPool(pool.query, pool.parts).states
