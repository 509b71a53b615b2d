"""Pools of block formats: shapes, everything that a slot owns, workspaces, factors, plans."""

from types import MappingProxyType

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvdock.builder import build
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, SlotError, UnsupportedCombination
from kvdock.model import IndexParams, LayerSpec, MHAParams, MLAParams, ModelSpec
from kvdock.options import Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.startup import core_only

torch = pytest.importorskip("torch")

from kvdock.pools import BlockMHAPool, BlockMLAPool, IndexerPool, RoutedPool  # noqa: E402
from kvdock.pools.storage import unique_storages  # noqa: E402

MHA_FORMATS = ["fp4", "nvfp4", "mxfp8"]
POOLS = [*((BlockMHAPool, dtype) for dtype in MHA_FORMATS), (BlockMLAPool, "fp4")]
EVERY_POOL = pytest.mark.parametrize(("cls", "dtype"), POOLS)
ROOM = 2**22
DEVICE = DeviceInfo(device_type="cpu", name="cpu", total_bytes=ROOM, free_before_load_bytes=ROOM, free_bytes=ROOM)


def make_pool(make, cls, dtype, page_size=4, tokens=12, device="cpu", **more):
    """Layers 2 and 5, and 7 which reads those of 5: 2 heads of 32 columns, or a latent of 24 + 8."""
    layer = make.mha(heads=2, dim=32, v_dim=32) if cls is BlockMHAPool else make.mla(lora=24, rope=8)
    query = make.query({2: layer, 5: layer}, page_size, dtype=dtype, shared=((7, 5),))
    return make.pool(cls, query, tokens, device, **more)


def rows(pool, *numbers):
    """A row for each number, which all formats hold exactly, apart for each number below 225.

    A block of 16 columns is 6 · 2^k throughout: e2m1 holds 6 times a power of two, and so does e4m3.
    """
    shape = next(iter(pool.rows_of(pool.query)))
    exponents = [[n % 15 - 6, n // 15 - 6] for n in numbers]
    powers = 6 * 2.0 ** torch.tensor(exponents, dtype=torch.float32).view(-1, 1, 2)
    return powers.repeat_interleave(16, dim=-1).expand(-1, *shape.heads, shape.width).contiguous()


def write(pool, layer, slots, *numbers):
    k = rows(pool, *numbers)
    pool.set_kv_buffer(layer, slots, k, -k)


def shapes(buffers):
    return {buffer.name: (buffer.dtype, buffer.shape) for buffer in buffers}


@pytest.mark.parametrize(
    ("dtype", "data", "scale", "nbytes"),
    [
        # 8 heads of 128: 64 bytes of e2m1 and 8 scales a head and side; 128 bytes of e4m3 and 4 scales.
        ("fp4_mx_block16", ("uint8", (8, 64)), ("float8_e8m0fnu", (8, 8)), 1152),
        ("nvfp4", ("uint8", (8, 64)), ("float8_e4m3fn", (8, 8)), 1152),
        ("mxfp8", ("float8_e4m3fn", (8, 128)), ("float8_e8m0fnu", (8, 4)), 2112),
    ],
)
def test_heads_take_a_byte_more_for_each_block(make, dtype, data, scale, nbytes):
    buffers = BlockMHAPool.buffers(make.query({0: make.mha(heads=8, dim=128, v_dim=128)}, 64, dtype=dtype))
    rest = {name: found for name, found in shapes(buffers).items() if name != "global_scale"}
    workspace = {f"workspace_{side}": ("float8_e4m3fn", (8, 128)) for side in "kv"} if dtype == "nvfp4" else {}
    assert rest == {"k": data, "k_scale": scale, "v": data, "v_scale": scale} | workspace
    assert sum(buffer.row_nbytes for buffer in buffers if buffer.is_kv and buffer.space) == nbytes
    assert all(buffer.guard == 64 for buffer in buffers if buffer.space)


def test_a_latent_row_of_576_takes_324_bytes(make):
    buffers = BlockMLAPool.buffers(make.query({0: make.mla(512, 64)}, dtype="fp4"))
    assert shapes(buffers) == {"kv": ("uint8", (1, 288)), "kv_scale": ("float8_e8m0fnu", (36,))}
    assert [buffer.role for buffer in buffers] == ["latent", "scale"]


def test_nvfp4_has_two_factors_a_layer_and_one_workspace_a_worker(make):
    buffers = {b.name: b for b in BlockMHAPool.buffers(make.query({0: make.mha(), 3: make.mha()}, dtype="nvfp4"))}
    factors = buffers["global_scale"]
    assert (factors.dtype, factors.shape, factors.space, factors.tensor_nbytes(0)) == ("float32", (2,), None, 16)
    assert [buffers[f"workspace_{side}"].overlay for side in "kv"] == ["target workspace_k", "target workspace_v"]
    assert not buffers["workspace_k"].is_kv


def test_widths_of_keys_and_values_may_differ_and_end_in_a_short_block(make):
    buffers = BlockMHAPool.buffers(make.query({0: make.mha(heads=1, dim=40, v_dim=24)}, dtype="fp4"))
    assert [buffer.shape for buffer in buffers] == [(1, 20), (1, 3), (1, 12), (1, 2)]


def test_an_odd_width_is_no_whole_number_of_bytes(make):
    with pytest.raises(PlanError, match="packs two elements to a byte, but a row of 'v' has 7 a head; give a data"):
        BlockMHAPool.buffers(make.query({0: make.mha(dim=8, v_dim=7)}, dtype="fp4"))
    with pytest.raises(PlanError, match="kv_cache_dtype='bfloat16' has no scales of blocks, as this pool keeps; give"):
        BlockMHAPool.buffers(make.query({0: make.mha()}))


def test_the_index_cache_does_not_follow_the_data_type_of_keys_and_values(make):
    """S-12: changing one data type does not move the other's bytes."""
    layer = LayerSpec(kind="sparse_index", params=IndexParams(index_head_dim=128))
    wide, narrow = (IndexerPool.buffers(make.query({0: layer}, dtype=dtype)) for dtype in ("auto", "fp4"))
    assert wide == narrow


@EVERY_POOL
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_what_was_written_is_read_dequantised(make, slots, cls, dtype, page_size):
    pool = make_pool(make, cls, dtype, page_size)
    write(pool, 5, slots(5, 9, dtype=torch.int32), 17, 140)
    keys, values = pool.get_kv_buffer(7)
    expected = rows(pool, 17, 140).bfloat16()
    assert keys.dtype == torch.bfloat16
    assert keys.shape == (12 // page_size + 1, page_size, *expected.shape[1:])
    assert keys[5 // page_size, 5 % page_size].equal(expected[0])
    assert keys.flatten(0, 1)[[5, 9]].equal(expected)
    assert not keys.flatten(0, 1)[[0, 1, 2, 3, 4, 6, 7, 8, 10, 11, 12]].any()
    sign, width = (1, 24) if cls is BlockMLAPool else (-1, 32)
    assert values.flatten(0, 1)[[5, 9]].equal(sign * expected[..., :width])
    assert pool.get_value_buffer(7).equal(values)
    assert not pool.get_key_buffer(2).any()


@EVERY_POOL
def test_some_slots_are_read_in_any_type(make, slots, cls, dtype):
    pool = make_pool(make, cls, dtype)
    write(pool, 2, slots(6), 33)
    keys, values = pool.read_kv(2, slots(5, 6), dtype=torch.float32)
    assert keys.dtype == torch.float32
    assert keys.equal(torch.cat((torch.zeros_like(keys[:1]), rows(pool, 33))))
    assert values.abs().equal(keys[..., : values.shape[-1]])
    assert pool.read_kv(2, slots(6))[0].dtype == torch.bfloat16


@EVERY_POOL
def test_scales_of_the_caller_divide_and_multiply(make, slots, cls, dtype):
    pool = make_pool(make, cls, dtype)
    k = rows(pool, 100)
    pool.set_kv_buffer(2, slots(6), k, k, k_scale=4.0, v_scale=torch.tensor(0.5))
    assert pool.read_kv(2, slots(6), dtype=torch.float32)[0].equal(k / 4)
    keys, values = pool.read_kv(2, slots(6), k_scale=4.0, v_scale=torch.tensor(0.5))
    assert keys.equal(k.bfloat16())
    assert values.equal(keys[..., : values.shape[-1]])


@pytest.mark.parametrize("lora", [16, 24])
def test_latent_and_rope_are_encoded_as_one_row(make, slots, lora):
    query = make.query({0: make.mla(lora, 8)}, dtype="fp4")
    parts, whole = make.pool(BlockMLAPool, query), make.pool(BlockMLAPool, query)
    row = torch.randn(2, 1, lora + 8, generator=torch.Generator().manual_seed(3)) * 10
    parts.set_mla_kv_buffer(0, slots(5, 6), row[..., :lora], row[..., lora:])
    whole.set_kv_buffer(0, slots(5, 6), row)
    for name, stored in whole.get_raw_kv_buffer(0).items():
        assert parts.get_raw_kv_buffer(0)[name].equal(stored)
    nope, rope = parts.get_mla_kv_buffer(0, slots(6), torch.float32)
    assert torch.cat((nope, rope), dim=-1).equal(whole.read_kv(0, slots(6), dtype=torch.float32)[0])
    assert nope.shape == (1, 1, lora)


def test_an_fp4_pool_survives_the_host_bit_by_bit(make):
    """P-02: 4 pages are written, copied out, zeroed and copied back, data and scales alike."""
    pool = make_pool(make, BlockMHAPool, "fp4", page_size=4, tokens=16)
    generator = torch.Generator().manual_seed(11)
    every = torch.arange(4, 20)
    for layer in (2, 5):
        k, v = (torch.randn(16, 2, 32, generator=generator) * 50 for _ in range(2))
        pool.set_kv_buffer(layer, every, k, v)
    before = [raw.clone() for raw in pool.storages()]
    copies = pool.get_cpu_copy(every)
    # 2 layers, keys and values, 2 heads: 16 bytes of data and 2 scales for each of 16 slots.
    assert sum(copy.nbytes for copy in copies) == 16 * 2 * 2 * 2 * (16 + 2)
    pool.clear()
    assert not any(raw.any() for raw in pool.storages())
    pool.load_cpu_copy(copies, every)
    assert all(raw.equal(old) for raw, old in zip(pool.storages(), before, strict=True))


@EVERY_POOL
def test_the_transfer_list_is_the_list_of_what_slots_own(make, cls, dtype):
    """P-06, G-07: pages of every data and scale tensor, in whole pages, and no scratch."""
    pool = make_pool(make, cls, dtype, page_size=16, tokens=48)
    owned = [buffer for buffer in pool.parts.tensors.buffers if buffer.is_kv and buffer.space]
    infos = pool.buffer_infos()
    assert [(info.name, info.layer_id) for info in infos] == [(b.name, i) for b in owned for i in (2, 5)]
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert len(pointers) == len(lengths) == len(items) == (4 if cls is BlockMLAPool else 8)
    assert items == [16 * buffer.row_nbytes for buffer in owned for _ in (2, 5)]
    assert lengths == [4 * item for item in items]
    roles = {"latent", "scale"} if cls is BlockMLAPool else {"key", "value", "scale"}
    assert {info.role for info in infos} == roles
    assert pool.transfer_kind == "flat"


@EVERY_POOL
def test_used_memory_is_that_of_the_storages_by_part(make, cls, dtype):
    """P-13"""
    pool = make_pool(make, cls, dtype)
    assert pool.mem_usage == sum(unique_storages(pool.storages()).values()) > 0
    assert sum(pool.breakdown().values()) == pool.mem_usage


SLOTS = st.integers(1, 12)
MANY = st.lists(SLOTS, max_size=6, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from([2, 5]), MANY),
        st.tuples(st.just("move"), MANY, MANY),
        st.tuples(st.just("swap"), MANY, MANY),
    ),
    max_size=10,
)


@EVERY_POOL
@pytest.mark.parametrize("page_size", [1, 3])
@settings(max_examples=15, deadline=None)
@given(steps=STEPS)
def test_reads_agree_with_a_dictionary(make, cls, dtype, page_size, steps):
    pool = make_pool(make, cls, dtype, page_size)
    held, number = {(layer, slot): None for layer in (2, 5) for slot in range(1, 13)}, 0
    for kind, first, second in steps:
        if kind == "write":
            numbers = range(number, number + len(second))
            number += len(second)
            write(pool, first, torch.tensor(second, dtype=torch.int64), *numbers)
            held.update({(first, slot): n for slot, n in zip(second, numbers, strict=True)})
            continue
        sources, targets = first[: len(second)], second[: len(first)]
        here, there = torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
        if kind == "move":
            pool.move_kv_cache(there, here)
        else:
            pool.load_cpu_copy(pool.get_cpu_copy(here), there)
        before = dict(held)
        held.update({(i, t): before[i, s] for i in (2, 5) for t, s in zip(targets, sources, strict=True)})
    for (layer, slot), n in held.items():
        found, _ = pool.read_kv(layer, torch.tensor([slot]), dtype=torch.float32)
        assert found.equal(torch.zeros_like(found) if n is None else rows(pool, n))


def test_factors_of_nvfp4_are_of_a_layer_and_a_side(make, slots):
    pool = make_pool(make, BlockMHAPool, "nvfp4")
    assert pool.get_raw_kv_buffer(7)["global_scale"].tolist() == [1, 1]
    pool.set_global_scales(5, 2.0**10, torch.tensor(2.0**-8))
    assert pool.get_raw_kv_buffer(7)["global_scale"].tolist() == [2**10, 2**-8]
    k, v = torch.full((1, 2, 32), 6 * 2.0**15), torch.full((1, 2, 32), 6 * 2.0**-12)
    pool.set_kv_buffer(5, slots(6), k, v)
    keys, values = pool.read_kv(5, slots(6))
    assert keys.equal(k.bfloat16())
    assert values.equal(v.bfloat16())
    # The scale of keys is 2^15 / 2^10 = 2^5: as e4m3 the exponent 5 + 7 and no mantissa.
    assert pool.get_raw_kv_buffer(5)["k_scale"][1, 2].unique().tolist() == [12 << 3]
    pool.clear()
    assert not pool.get_key_buffer(5).any()
    assert pool.get_raw_kv_buffer(5)["global_scale"].tolist() == [2**10, 2**-8]
    assert pool.get_raw_kv_buffer(2)["global_scale"].tolist() == [1, 1]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_is_positive_and_finite(make, factor):
    pool = make_pool(make, BlockMHAPool, "nvfp4")
    with pytest.raises(SlotError, match=r"layer 2: global scale v=.* is not positive and finite"):
        pool.set_global_scales(2, 2.0, factor)
    assert pool.get_raw_kv_buffer(2)["global_scale"].tolist() == [1, 1]


def test_factors_are_refused_where_there_are_none(make):
    with pytest.raises(SlotError, match="layer 2 has no global scales: BlockMHAPool keeps none in this data type"):
        make_pool(make, BlockMHAPool, "fp4").set_global_scales(2, 1.0, 1.0)
    with pytest.raises(SlotError, match="layer 7 reads the KV of layer 5"):
        make_pool(make, BlockMHAPool, "nvfp4").set_global_scales(7, 1.0, 1.0)


def test_the_workspace_holds_the_slots_that_were_loaded(make, slots):
    pool = make_pool(make, BlockMHAPool, "nvfp4")
    write(pool, 5, slots(5, 6), 96, 97)
    k, v = pool.load_workspace(7, slots(6))
    assert k.dtype == v.dtype == torch.float8_e4m3fn
    assert k.shape == (4, 4, 2, 32)
    assert k[1, 2].float().equal(rows(pool, 97)[0])
    assert v[1, 2].float().equal(-rows(pool, 97)[0])
    assert not k[1, 1].float().any()
    k, _ = pool.load_workspace(5)
    assert k[1, 1].float().equal(rows(pool, 96)[0])


def test_what_is_too_large_for_the_workspace_saturates(make, slots):
    pool = make_pool(make, BlockMHAPool, "nvfp4")
    pool.set_kv_buffer(2, slots(5), torch.full((1, 2, 32), 1536.0), torch.full((1, 2, 32), -1536.0))
    k, v = pool.load_workspace(2, slots(5))
    assert (k[1, 1, 0, 0].item(), v[1, 1, 0, 0].item()) == (448, -448)
    assert pool.read_kv(2, slots(5))[0].eq(1536).all()


def test_formats_that_are_read_as_they_lie_have_no_workspace(make):
    for cls, dtype in ((BlockMHAPool, "fp4"), (BlockMHAPool, "mxfp8"), (BlockMLAPool, "fp4")):
        with pytest.raises(SlotError, match=f"layer 2 is read without a workspace: {cls.__name__} has none"):
            make_pool(make, cls, dtype).load_workspace(2)


def test_a_plugin_may_name_the_workspace_of_its_backend(make, slots):
    class ThroughWorkspace(BlockMLAPool):
        workspace = MappingProxyType({"float4_e2m1fn_x2": "bfloat16"})

    pool = make.pool(ThroughWorkspace, make.query({0: make.mla(24, 8)}, dtype="fp4"))
    workspace = {b.name: b for b in pool.parts.tensors.buffers}["workspace_kv"]
    assert (workspace.dtype, workspace.shape) == ("bfloat16", (1, 32))
    write(pool, 0, slots(5), 3)
    (rows_read,) = pool.load_workspace(0, slots(5))
    assert rows_read[1, 1].equal(rows(pool, 3)[0].bfloat16())


@EVERY_POOL
def test_wrong_writes_change_nothing(make, slots, cls, dtype):
    pool = make_pool(make, cls, dtype)
    good = rows(pool, 1)
    for layer, loc, k, match in [
        (2, slots(5), good.to(torch.uint8), "layer 2: torch.uint8 cannot be encoded as .*; give floats"),
        (2, slots(5), good[..., :16], r"layer 2: values of shape .*; give slots \[n\] and values \[n, "),
        (2, slots(5, 6), good, "layer 2: values of shape"),
        (7, slots(5), good, "layer 7 reads the KV of layer 5"),
        (3, slots(5), good, "layer 3 has no KV in this pool"),
    ]:
        with pytest.raises(SlotError, match=match):
            pool.set_kv_buffer(layer, loc, k, k)
    with pytest.raises(SlotError, match="layer 3 has no KV in this pool"):
        pool.get_key_buffer(3)
    assert not any(pool.get_raw_kv_buffer(2)[row.name].any() for row in pool.rows_of(pool.query))


@EVERY_POOL
def test_the_hot_path_never_waits_for_the_device(make, cls, dtype):
    pool = make_pool(make, cls, dtype, device="meta")
    loc, k = torch.zeros(3, dtype=torch.int64, device="meta"), rows(pool, 1, 2, 3).to("meta")
    pool.set_kv_buffer(2, loc, k, k, 2.0, 2.0)
    pool.move_kv_cache(loc, loc)
    assert pool.read_kv(2, loc, 2.0, 2.0)[0].shape == k.shape
    assert pool.get_key_buffer(2).shape == (4, 4, *k.shape[1:])
    if dtype == "nvfp4":
        assert pool.load_workspace(2, loc)[0].shape == (4, 4, 2, 32)
    if cls is BlockMLAPool:
        pool.set_mla_kv_buffer(2, loc, k[..., :24], k[..., 24:])


def test_a_router_reaches_raw_buffers_factors_and_workspaces(make, slots):
    layer = make.mha(heads=2, dim=32, v_dim=32)
    pool = make_pool(make, BlockMHAPool, "nvfp4")
    query = msgspec.structs.replace(make.query({2: layer}, dtype="nvfp4"), group=None)
    router = RoutedPool(query, make.parts(RoutedPool, query, {"full": 12}, pools={"g": pool}))
    router.set_global_scales(5, 2.0, 2.0)
    write(pool, 5, slots(5), 110)
    assert router.read_kv(7, slots(5), dtype=torch.float32)[0].equal(rows(pool, 110))
    assert router.get_raw_kv_buffer(7)["global_scale"].tolist() == [2, 2]
    assert router.load_workspace(7, slots(5))[0][1, 1].float().equal(rows(pool, 110)[0])


MODELS = {
    "mha": [LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=32, v_head_dim=32))] * 2,
    "mla": [LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=24, qk_rope_head_dim=8))] * 2,
    "sliding": [
        LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=32, v_head_dim=32)),
        LayerSpec(kind="mha", params=MHAParams(num_kv_heads=4, head_dim=32, v_head_dim=32), window_tokens=15),
    ],
}


def make_plan(layers, **options):
    registry = core_only()
    model = ModelSpec(name="m", architecture="M", layers=tuple(MODELS[layers]), context_length=64, dtype="bfloat16")
    given = make_options({"max_running_requests": 4} | options)
    return plan_from((model,), DEVICE, given, Parallelism(), registry, budget_bytes=2**20)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(
    ("layers", "dtype"), [*((m, d) for m in ("mha", "sliding") for d in MHA_FORMATS), ("mla", "fp4_e2m1")]
)
def test_plan_build_write_and_read(layers, dtype, page_size):
    plan = make_plan(layers, kv_cache_dtype=dtype, page_size=page_size)
    cache = build(plan, debug=True)
    assert cache.allocated_bytes() == plan.total_bytes <= 2**20
    slots = cache.token_to_kv_pool_allocator.alloc(page_size)
    pool = cache.token_to_kv_pool
    for layer, part in enumerate(list(cache.pools.values())[-1:] * 2 if layers != "sliding" else cache.pools.values()):
        k = rows(part, *range(20, 20 + page_size))
        pool.set_kv_buffer(layer, slots, k, k)
        assert pool.read_kv(layer, slots, dtype=torch.float32)[0].equal(k)
    assert type(part) is (BlockMLAPool if layers == "mla" else BlockMHAPool)


def test_groups_share_one_workspace_as_large_as_the_largest():
    plan = make_plan("sliding", kv_cache_dtype="nvfp4", page_size=4, swa_full_tokens_ratio=0.25)
    full, swa = (plan.spaces[name] + 4 for name in ("full", "swa"))
    taken = {(b.owner, b.name): b.nbytes for b in plan.buffers if b.role == "workspace"}
    # Full layers have 2 heads, sliding ones 4, but a quarter of the slots.
    assert sorted(taken.values()) == [0, 0, full * 64, full * 64]
    cache = build(plan)
    k = [pool.load_workspace(pool.layer_ids[0])[0] for pool in cache.pools.values()]
    assert k[0].data_ptr() == k[1].data_ptr()
    assert sorted(view.shape[0] * view.shape[1] for view in k) == [swa, full]
    assert cache.token_to_kv_pool.mem_usage == sum(cache.token_to_kv_pool.breakdown().values())


@pytest.mark.parametrize("dtype", MHA_FORMATS)
def test_pages_side_by_side_are_refused_in_blocks(dtype):
    with pytest.raises(UnsupportedCombination, match="BlockMHAPool lacks page_major"):
        make_plan("mha", kv_cache_dtype=dtype, page_major=True)
    make_plan("mha", kv_cache_dtype="fp8", page_major=True)


@pytest.mark.parametrize("dtype", ["nvfp4", "mxfp8"])
def test_latents_come_in_one_block_format(dtype):
    with pytest.raises(UnsupportedCombination, match=f"BlockMLAPool lacks {dtype}"):
        make_plan("mla", kv_cache_dtype=dtype)
