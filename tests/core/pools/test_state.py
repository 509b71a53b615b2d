"""States per request: shapes on a rank, what slots own, and a vendor that lays their bytes out differently."""

import ctypes

import msgspec
import pytest
from kvdock.builder import build
from kvdock.builtin import BUILTINS
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, SlotError
from kvdock.hookspecs import CONTRACT, hookimpl
from kvdock.model import ConvBlock, ConvParams, LayerSpec, MHAParams, ModelSpec, RingParams, StateParams
from kvdock.options import Parallelism, make_options
from kvdock.planner import CachePlan, plan_from
from kvdock.plugins.loading import Registry
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.pools import StatePool, StateStore  # noqa: E402

DEVICE = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**44, free_before_load_bytes=2**44, free_bytes=2**44)


def conv(*blocks, kernel=4, channels_last=False):
    return ConvParams(
        blocks=tuple(ConvBlock(heads=h, head_dim=d) for h, d in blocks), kernel=kernel, channels_last=channels_last
    )


DELTA = StateParams(
    conv=(conv((16, 128), (16, 128), (32, 128)),),
    temporal=(32, 128, 128),
    ring=RingParams(k_heads=16, k_dim=128, v_heads=32, v_dim=128),
)
GROUPS = ConvBlock(heads=8, head_dim=128, replicated=True)
SSM = StateParams(
    conv=(ConvParams(blocks=(ConvBlock(heads=128, head_dim=64), GROUPS, GROUPS), kernel=4),), temporal=(128, 64, 128)
)
KEYED = StateParams(
    conv=(conv((32, 128), (32, 128), (32, 128), channels_last=True),),
    temporal=(32, 128, 128),
    dense_windows=True,
    ring=RingParams(k_heads=32, k_dim=128, v_heads=32, v_dim=128, decay_per_key=True),
)
SMALL = StateParams(
    conv=(conv((4, 3)), conv((2, 2), kernel=3, channels_last=True)),
    temporal=(4, 2, 3),
    ring=RingParams(k_heads=2, k_dim=3, v_heads=4, v_dim=2),
)
HEADS = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=4, head_dim=8, v_head_dim=8))


def model(*layers, dtype="bfloat16"):
    made = tuple(layer if isinstance(layer, LayerSpec) else LayerSpec(kind="state", params=layer) for layer in layers)
    return ModelSpec(name="m", architecture="A", layers=made, context_length=64, dtype=dtype)


def plan(*layers, parallel=None, dtype="bfloat16", plugins=(), granularity=1, budget=2**43, **options):
    registry = Registry()
    for name, plugin in (*BUILTINS, *plugins):
        registry.add(plugin, name=name)
    given = {"max_state_slots": 8, "max_total_tokens": 64, "prefix_cache": False, "max_running_requests": 4, **options}
    device = msgspec.structs.replace(DEVICE, granularity_bytes=granularity)
    made = make_options(given)
    return plan_from(
        (model(*layers, dtype=dtype),), device, made, parallel or Parallelism(), registry, budget_bytes=budget
    )


def shapes(made):
    return {buffer.name: (buffer.shape, buffer.dtype) for group in made.groups for buffer in group.buffers}


def states(made, **fields):
    """The state pool of a plan, with a value of its own in every element of every slot."""
    pool = build(made, **fields).token_to_kv_pool.states
    for number, view in enumerate(pool.slot_views()):
        values = torch.randn(view.shape, generator=torch.manual_seed(number)) * 50
        view.copy_(values.to(view.dtype))
    return pool


def snapshot(pool):
    return [view.clone() for view in pool.slot_views()]


@pytest.mark.parametrize(
    ("params", "layers", "parallel", "slots", "conv_shape", "temporal_shape", "slot_bytes"),
    [
        (DELTA, 36, Parallelism(tp_size=4), 789, (2048, 3), (8, 128, 128), 19_316_736),
        (DELTA, 18, Parallelism(), 197, (8192, 3), (32, 128, 128), 77_266_944 // 2),
        (SSM, 24, Parallelism(), 149, (10240, 3), (128, 64, 128), 102_137_856),
        (KEYED, 20, Parallelism(), 351, (3, 12288), (32, 128, 128), 43_417_600),
    ],
    ids=["qwen3-next-tp4", "qwen3-next-pp2-rank0", "nemotron-h-8b", "kimi-linear"],
)
def test_states_are_those_that_engines_allocate(
    params, layers, parallel, slots, conv_shape, temporal_shape, slot_bytes
):
    made = plan(*[params] * layers, HEADS, parallel=parallel, max_state_slots=slots)
    found = shapes(made)
    assert found["conv"] == ((layers, slots + 1, *conv_shape), "bfloat16")
    assert found["temporal"] == ((layers, slots + 1, *temporal_shape), "float32")
    assert made.costs.per_slot["state"].kv == slot_bytes
    pool = build(made, device="meta").token_to_kv_pool.states
    assert pool.conv_states(layers - 1).shape == (slots + 1, *conv_shape)
    assert pool.temporal_states(0).shape == (slots + 1, *temporal_shape)
    assert pool.mem_usage == (slots + 1) * slot_bytes


def test_replicated_groups_keep_one_a_rank_and_heads_split():
    found = shapes(plan(SSM, parallel=Parallelism(tp_size=16)))
    assert found["conv"][0] == (1, 9, 128 // 16 * 64 + 2 * 128, 3)
    assert found["temporal"][0] == (1, 9, 8, 64, 128)


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (Parallelism(tp_size=8, dp_size=2, dp_attention=True), 4),
        (Parallelism(tp_size=8, cp_size=4), 2),
        (Parallelism(tp_size=8), 8),
    ],
)
def test_states_split_over_the_attention_ranks(parallel, ranks):
    found = shapes(plan(DELTA, parallel=parallel))
    assert found["conv"][0][2:] == (8192 // ranks, 3)
    assert found["temporal"][0][2] == 32 // ranks


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (24, r"16 convolution heads do not split over 24 attention ranks \(tp_size=24\); .* works is 16$"),
        (3, r"16 convolution heads do not split over 3 attention ranks \(tp_size=3\); .* works is 2$"),
        (7, r"16 convolution heads do not split over 7 attention ranks .* works is 8$"),
    ],
)
def test_heads_that_do_not_split_are_refused_with_a_size_that_works(tp, message):
    with pytest.raises(PlanError, match=message) as caught:
        plan(DELTA, parallel=Parallelism(tp_size=tp))
    plan(DELTA, parallel=Parallelism(tp_size=int(str(caught.value).split()[-1])))


def test_the_advice_counts_the_heads_of_attention_layers_and_the_shards():
    few = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=3, head_dim=8, v_head_dim=8))
    ssm = StateParams(conv=(), temporal=(12, 2, 2))
    with pytest.raises(PlanError, match=r"12 state heads do not split over 5 .*tp_size=10\); .* works is 12$"):
        plan(ssm, few, parallel=Parallelism(tp_size=10, dp_size=2, dp_attention=True))
    # 4 ranks would split 12 state heads, but 4 ranks and 3 KV heads do not go together
    plan(ssm, few, parallel=Parallelism(tp_size=12, dp_size=2, dp_attention=True))


@pytest.mark.parametrize(
    ("option", "published", "expected"),
    [("auto", "float32", "float32"), ("bf16", "float32", "bfloat16"), (None, "fp16", "float16")],
)
def test_temporal_states_have_the_type_of_the_option_else_the_published_one(option, published, expected):
    params = msgspec.structs.replace(SMALL, temporal_dtype=published)
    found = shapes(plan(params, dtype="float16", state_dtype=option, replay_rings=True))
    types = {name: dtype for name, (_, dtype) in found.items()}
    assert types == {
        "conv": "float16",
        "conv.1": "float16",
        "temporal": expected,
        "replay_d": expected,
        "replay_k": expected,
        "replay_g": "float32",
        "replay_write": "int32",
    }


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "int32"])
def test_a_type_that_cannot_hold_states_is_refused(dtype):
    with pytest.raises(PlanError, match=f"state_dtype='{dtype}' cannot hold temporal states; give state_dtype=float32"):
        plan(SMALL, state_dtype=dtype)


def test_a_convolution_that_keeps_nothing_is_refused():
    with pytest.raises(PlanError, match="kernel=1 keeps no earlier inputs"):
        plan(StateParams(conv=(conv((4, 2), kernel=1),), temporal=(4, 2)))
    with pytest.raises(PlanError, match="keeps neither convolutions nor a temporal state"):
        plan(StateParams(conv=(), temporal=()))


@pytest.mark.parametrize("page_major", [False, True])
@pytest.mark.parametrize("granularity", [1, 512])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("rings", [False, True])
def test_planned_bytes_are_allocated_bytes(page_major, granularity, tp, rings):
    made = plan(
        *(SMALL, HEADS, SMALL, HEADS),
        parallel=Parallelism(tp_size=tp),
        granularity=granularity,
        page_major=page_major,
        replay_rings=rings,
        max_total_tokens=None,
        budget=2**16,
    )
    cache = build(made)
    assert made.spaces["state"] == 8
    assert cache.allocated_bytes() == made.total_bytes <= 2**16
    assert sum(cache.token_to_kv_pool.breakdown().values()) == cache.token_to_kv_pool.mem_usage


def test_a_plan_with_states_is_read_back_from_its_file():
    made = plan(SMALL, HEADS, replay_rings=True, speculative_algorithm="EAGLE", speculative_num_steps=2)
    registry = core_only()
    assert CachePlan.from_json(made.to_json(), registry).to_json() == made.to_json()


def test_layers_without_a_convolution_or_without_a_temporal_state_are_served():
    short = states(plan(StateParams(conv=(conv((6, 1), kernel=3),), temporal=())))
    assert short.conv_states(0).shape == (9, 6, 2)
    with pytest.raises(SlotError, match="layer 0 keeps convolutions alone, no temporal state; read conv_states"):
        short.temporal_states(0)
    plain = states(plan(StateParams(conv=(), temporal=(4, 2, 2))))
    assert plain.get_state(0).temporal.shape == (9, 4, 2, 2)
    with pytest.raises(SlotError, match="layer 0 keeps 0 convolutions, so there is no number 0"):
        plain.conv_states(0)


def test_a_layer_shows_its_convolutions_and_its_temporal_state():
    pool = states(plan(SMALL, HEADS, SMALL))
    state = pool.get_state(2)
    assert [view.shape for view in state.conv] == [(9, 12, 3), (9, 2, 4)]
    assert state.temporal.shape == (9, 4, 2, 3)
    pool.conv_states(2, 1)[3] = 7
    assert state.conv[1][3].eq(7).all()
    assert not pool.conv_states(0, 1)[3].eq(7).any()
    with pytest.raises(SlotError, match=r"layer 1 keeps no state in this pool; it holds the layers \[0, 2\]"):
        pool.get_state(1)
    with pytest.raises(SlotError, match="layer 0 keeps 2 convolutions, so there is no number 2"):
        pool.conv_states(0, 2)


def test_keys_and_values_are_refused_with_what_to_call():
    pool = states(plan(SMALL))
    one, slots = torch.ones(1, 1, 1), torch.tensor([1])
    for call in (
        lambda: pool.get_key_buffer(0),
        lambda: pool.get_value_buffer(0),
        lambda: pool.get_kv_buffer(0),
        lambda: pool.set_kv_buffer(0, slots, one, one),
        lambda: pool.set_mla_kv_buffer(0, slots, one, one),
        lambda: pool.get_mla_kv_buffer(0, slots),
    ):
        with pytest.raises(SlotError, match=r"layer 0 keeps a state per request, .* read it with get_state\(0\)"):
            call()
    with pytest.raises(SlotError, match="layer 9 keeps no state in this pool"):
        pool.get_key_buffer(9)


@pytest.mark.parametrize("page_major", [False, True])
def test_a_slot_that_is_handed_out_reads_zero(page_major, slots):
    # H-09: ones, then the same slot for another request: zero in every layer, and only there
    pool = states(plan(SMALL, SMALL, page_major=page_major, replay_rings=True))
    for view in pool.slot_views():
        view[3] = 1
    before = snapshot(pool)
    pool.clear_slots(slots(3, 5, dtype=torch.int32))
    for then, now in zip(before, pool.slot_views(), strict=True):
        assert not now[[3, 5]].any()
        assert torch.equal(now[[0, 1, 2, 4, 6, 7, 8]], then[[0, 1, 2, 4, 6, 7, 8]])


@pytest.mark.parametrize("page_major", [False, True])
def test_copies_read_every_source_first_and_take_everything_along(page_major, slots):
    pool = states(plan(SMALL, SMALL, page_major=page_major, replay_rings=True))
    before = snapshot(pool)
    pool.copy_slots(slots(1, 2, 3), slots(2, 3, 1))
    for then, now in zip(before, pool.slot_views(), strict=True):
        assert torch.equal(now[[1, 2, 3]], then[[3, 1, 2]])
        assert torch.equal(now[4:], then[4:])
    pool.move_kv_cache(slots(4), slots(8))
    assert all(torch.equal(now[4], now[8]) for now in pool.slot_views())
    with pytest.raises(SlotError, match="1 target slots for 2 source slots; nothing was copied"):
        pool.copy_slots(slots(1, 2), slots(3))


@pytest.mark.parametrize("page_major", [False, True])
def test_host_copies_come_back_bit_identical(page_major, slots):
    pool = states(plan(SMALL, SMALL, page_major=page_major, replay_rings=True))
    before, copies = snapshot(pool), pool.get_cpu_copy(slots(6, 2))
    pool.clear()
    assert not any(raw.any() for raw in pool.storages())
    pool.load_cpu_copy(copies, slots(1, 7))
    for then, now in zip(before, pool.slot_views(), strict=True):
        assert torch.equal(now[[1, 7]], then[[6, 2]])
    for wrong in (copies[:-1], [*copies[:-1], copies[-1].to(torch.float64)], [copy[:1] for copy in copies]):
        with pytest.raises(SlotError, match=r"do not fit the \d+ tensors of this pool for 2 state slots"):
            pool.load_cpu_copy(wrong, slots(3, 4))
    assert not any(view[[3, 4]].any() for view in pool.slot_views())


@pytest.mark.parametrize("page_major", [False, True])
def test_descriptors_name_layer_and_role_and_move_a_whole_slot(page_major):
    # P-06, G-06: an item is a slot; copying its bytes by the descriptors copies all that the slot owns
    pool = states(plan(SMALL, HEADS, SMALL, page_major=page_major, replay_rings=True))
    infos = pool.state_infos()
    assert [(info.name, info.role, info.layer_id) for info in infos] == [
        *[(name, "conv", layer) for name in ("conv", "conv.1") for layer in (0, 2)],
        *[("temporal", "temporal", layer) for layer in (0, 2)],
        *[(name, "ring", layer) for name in ("replay_d", "replay_k", "replay_g") for layer in (0, 2)],
        ("replay_write", "cursor", None),
    ]
    assert [info.item_nbytes for info in infos[:6:2]] == [12 * 3 * 2, 2 * 4 * 2, 4 * 2 * 3 * 4]
    for info in infos:
        assert (info.space, info.nbytes) == ("state", 9 * info.item_nbytes)
        ctypes.memmove(info.pointer + 2 * info.stride_nbytes, info.pointer + 5 * info.stride_nbytes, info.item_nbytes)
    assert all(torch.equal(view[2], view[5]) for view in pool.slot_views())
    pointers, lengths, items = pool.get_state_buf_infos()
    assert [length / item for length, item in zip(lengths, items, strict=True)] == [9] * len(pointers)
    for pointer, item in zip(pointers, items, strict=True):
        ctypes.memmove(pointer + 3 * item, pointer + 6 * item, item)
    assert all(torch.equal(view[3], view[6]) for view in pool.slot_views())
    assert (pool.buffer_infos(), pool.regions()) == ([], [])


def test_a_slot_of_a_page_major_pool_holds_layer_after_layer_conv_then_temporal():
    pool = states(plan(SMALL, HEADS, SMALL, page_major=True))
    (raw,) = pool.storages()
    # blocks are aligned to 16: 72 → 80 and 16 bytes of convolutions, 96 of the temporal state
    assert raw.numel() == 9 * 2 * (80 + 16 + 96)
    for place, layer in enumerate((0, 2)):
        for slot in (0, 4, 8):
            start = slot * 2 * 192 + place * 192
            state = pool.get_state(layer)
            for offset, view in ((0, state.conv[0]), (80, state.conv[1]), (96, state.temporal)):
                found = view[slot].contiguous().view(torch.uint8).flatten()
                assert torch.equal(raw[start + offset : start + offset + found.numel()], found)


def test_replay_rings_are_those_that_engines_allocate():
    made = plan(*[DELTA] * 36, HEADS, parallel=Parallelism(tp_size=4), max_state_slots=789, replay_rings=True)
    found = shapes(made)
    assert found["replay_d"] == ((36, 790, 8, 16, 128), "float32")
    assert found["replay_k"] == ((36, 790, 4, 16, 128), "float32")
    assert found["replay_g"] == ((36, 790, 8, 16), "float32")
    assert found["replay_write"] == ((790,), "int32")
    sums = {b.name: b.nbytes for group in made.groups for b in group.buffers}
    assert (sums["replay_d"], sums["replay_k"], sums["replay_g"], sums["replay_write"]) == (
        *(1_863_843_840, 931_921_920, 14_561_280, 3160),
    )
    keyed = shapes(plan(KEYED, replay_rings=True, replay_ring_length=4))
    assert keyed["replay_g"] == ((1, 9, 32, 4, 128), "float32")


def test_a_ring_begins_anew_when_its_slot_is_handed_out(slots):
    pool = states(plan(SMALL, SMALL, replay_rings=True))
    ring = pool.replay_ring(1)
    assert [tuple(view.shape) for view in ring] == [(9, 4, 16, 2), (9, 2, 16, 3), (9, 4, 16), (9,)]
    ring.cursor.fill_(5)
    pool.clear_slots(slots(2))
    assert ring.cursor.tolist() == [5, 5, 0, 5, 5, 5, 5, 5, 5]
    assert pool.replay_ring(0).cursor is ring.cursor


def test_rings_are_refused_where_there_is_nothing_to_replay():
    with pytest.raises(PlanError, match="replay_rings=true, but the layers of group 'state' have no step"):
        plan(SSM, replay_rings=True)
    with pytest.raises(SlotError, match="layer 0 has no replay ring; plan with replay_rings=true"):
        states(plan(SMALL)).replay_ring(0)


def test_debug_refuses_slots_that_do_not_exist(slots):
    # H-01: 8 state slots, 16 request rows: row 15 has no slot 15, and nothing is written out of range
    pool = states(plan(SMALL, max_running_requests=16), debug=True)
    before = snapshot(pool)
    pool.parts.request_pool.alloc(["a"])
    for call in (
        lambda: pool.clear_slots(slots(15)),
        lambda: pool.copy_slots(slots(1), slots(15)),
        lambda: pool.copy_slots(slots(15), slots(1)),
        lambda: pool.get_cpu_copy(slots(-1)),
    ):
        with pytest.raises(SlotError, match=r"group 'state': slot (15|-1) is outside 0 … 8; nothing was written"):
            call()
    assert all(torch.equal(then, now) for then, now in zip(before, pool.slot_views(), strict=True))


def test_debug_names_the_request_whose_row_holds_a_wrong_slot(slots):
    pool = states(plan(SMALL), debug=True)
    requests = pool.parts.request_pool
    (row,) = requests.alloc(["a"])
    requests.row_to_state[row] = 15
    with pytest.raises(SlotError, match=r"slot 15 \(of request 'a'\) is outside 0 … 8"):
        pool.clear_slots(requests.row_to_state[row : row + 1])


def test_debug_refuses_slots_that_nobody_holds(slots):
    pool = states(plan(SMALL), debug=True)
    requests = pool.parts.request_pool
    requests.alloc(["a"])
    pool.clear_slots(slots(0, requests.state_of("a")))
    with pytest.raises(SlotError, match="state slot 2 is not handed out; nothing was written"):
        pool.clear_slots(slots(2))
    pool.copy_slots(slots(2), slots(requests.state_of("a")))  # a source may have been given back since it was chosen


def test_no_call_waits_for_the_device():
    pool = build(plan(SMALL, replay_rings=True), device="meta").token_to_kv_pool.states
    loc = torch.zeros(2, dtype=torch.int64, device="meta")
    pool.clear_slots(loc)
    pool.copy_slots(loc, loc)


class SwappedStore(StateStore):
    """Temporal states lie with their last two dimensions swapped; copies on the host are as the core's."""

    def save(self, slots):
        return [self._swapped(i, copy) for i, copy in enumerate(super().save(slots))]

    def restore(self, copies, slots):
        super().restore([self._swapped(i, copy) for i, copy in enumerate(copies)], slots)

    def clear(self, slots):
        for view in self.views:
            view[slots.long()] = 0

    def _swapped(self, place, copy):
        return copy.transpose(-1, -2).contiguous() if self.buffers[place].role == "temporal" else copy


class SwappedPool(StatePool):
    store_cls = SwappedStore

    @classmethod
    def buffers(cls, query):
        return tuple(
            msgspec.structs.replace(b, shape=(*b.shape[:-2], b.shape[-1], b.shape[-2])) if b.role == "temporal" else b
            for b in super().buffers(query)
        )


class Vendor:
    kvdock_name = "vendor"
    kvdock_tier = "hardware"
    kvdock_contract = CONTRACT

    @hookimpl
    def get_pool_cls(self, query):
        return SwappedPool if query.kind == "state" else None


@pytest.mark.parametrize("page_major", [False, True])
def test_a_vendor_changes_how_bytes_lie_and_nothing_else(page_major, slots):
    # H-10: buffers and the storage operations alone; slots, plan, requests and snapshots stay the core's
    made = plan(SMALL, HEADS, SMALL, plugins=[("vendor", Vendor())], page_major=page_major)
    assert {group.name: group.pool_cls.name for group in made.groups} == {"state": "SwappedPool", "full": "MHAPool"}
    cache = build(made)
    assert cache.allocated_bytes() == made.total_bytes
    vendor, core = cache.token_to_kv_pool.states, states(plan(SMALL, HEADS, SMALL))
    assert vendor.temporal_states(2).shape == (9, 4, 3, 2)
    vendor.load_cpu_copy(core.get_cpu_copy(slots(1, 2, 3)), slots(3, 1, 2))
    for layer in (0, 2):
        assert torch.equal(vendor.temporal_states(layer)[[3, 1, 2]].mT, core.temporal_states(layer)[1:4])
        assert torch.equal(vendor.conv_states(layer)[[3, 1, 2]], core.conv_states(layer)[1:4])
    cache.admit("a", 3)
    cache.prepare_states()
    slot = cache.req_to_token_pool.state_of("a")
    assert not any(view[slot].any() for view in vendor.slot_views())
    assert vendor.temporal_states(0)[2 if slot != 2 else 3].any()
    vendor.copy_slots(slots(3), slots(slot))
    copies, expected = vendor.get_cpu_copy(slots(slot)), core.get_cpu_copy(slots(1))
    assert all(torch.equal(found, right) for found, right in zip(copies, expected, strict=True))
    with pytest.raises(SlotError, match="do not fit"):
        vendor.load_cpu_copy([copy.mT for copy in copies], slots(1))
