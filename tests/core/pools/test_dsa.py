"""Latent rows and index keys: bytes, layouts, and what a slot owns inside its page."""

import ctypes

import kvdock
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, SlotError, UnsupportedCombination
from kvdock.layout import Unit
from kvdock.model import DSAParams, LayerSpec, ModelSpec
from kvdock.options import CacheOptions
from kvdock.startup import core_only
from kvdock.storages import bytes_of

torch = pytest.importorskip("torch")

from kvdock.pools import DSAPool  # noqa: E402

PAGES = (1, 3, 16, 64, 256)
INDEX = ("fp8", "fp4")


def dsa(lora=128, rope=8, index=128, **more):
    params = DSAParams(kv_lora_rank=lora, qk_rope_head_dim=rope, index_head_dim=index)
    return LayerSpec(kind="dsa", params=params, **more)


def query_of(make, page_size=4, dtype="bfloat16", index="auto", layers=None, **fields):
    options = CacheOptions(kv_cache_dtype=dtype, index_dtype=index)
    return make.query(layers or {0: dsa(), 3: dsa()}, page_size, options=options, **fields)


def pool_of(make, page_size=4, tokens=None, cls=DSAPool, device="cpu", **fields):
    return make.pool(cls, query_of(make, page_size, **fields), tokens or 3 * page_size, device)


def plan_of(layers, budget=2**30, page_size=64, registry=None, **options):
    if registry is None:
        registry = core_only()
    device = DeviceInfo(device_type="cpu", name="d", total_bytes=2**50, free_before_load_bytes=2**50, free_bytes=2**50)
    model = ModelSpec(name="m", architecture="M", layers=tuple(layers), context_length=1024, dtype="bfloat16")
    given_options = {"page_size": page_size, **options}
    return kvdock.plan(model, device=device, options=given_options, budget_bytes=budget, registry=registry)


def numbers(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("dtype", "per_token"), [("fp8_e4m3", 48_068), ("bfloat16", 78_324)])
def test_a_token_costs_its_row_and_its_index_key(dtype, per_token):
    # S-04: 61 * (656 + 132) with scaled rows, 61 * (1152 + 132) with rows of 16 bits
    plan = plan_of([dsa(512, 64)] * 61, kv_cache_dtype=dtype, max_running_requests=8)
    assert plan.bytes_per_token.kv == per_token
    group = sum(buffer.nbytes for buffer in plan.groups[0].buffers)
    assert group == per_token * (plan.spaces["full"] + 64)
    cache = kvdock.build(plan, device="meta")
    assert cache.token_to_kv_pool.breakdown()["index_k"] == 61 * 132 * (plan.spaces["full"] + 64)
    assert cache.allocated_bytes() == plan.total_bytes


@pytest.mark.parametrize(
    ("dtype", "tokens", "row", "stored", "rows_nbytes", "index_nbytes"),
    [
        ("auto", 411_264, 576, "bfloat16", 28_904_841_216, 3_312_013_056),
        ("fp8_e4m3", 745_856, 656, "uint8", 29_848_734_720, 6_006_147_840),
    ],
)
def test_tensors_of_a_published_size(make, dtype, tokens, row, stored, rows_nbytes, index_nbytes):
    query = query_of(make, 64, dtype, layers={i: dsa(512, 64) for i in range(61)})
    rows, keys = DSAPool.buffers(query)
    assert (rows.rows(tokens), *rows.shape) == (tokens + 64, 1, row)
    assert rows.dtype == stored
    assert (keys.rows(tokens // 64), *keys.shape) == (tokens // 64 + 1, 8448)
    assert (keys.unit, keys.dtype, keys.role) == (Unit.PAGE, "uint8", "index")
    assert bytes_of((rows, keys), query.spaces, {"full": tokens}) == [rows_nbytes, index_nbytes]


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_index_keys_cost_what_their_own_type_costs(make, dtype):
    # S-12: 132 and 68 bytes a token and layer; neither type moves the other's bytes
    row = {"bfloat16": 1152, "fp8_e4m3": 656, "fp8_e5m2": 576}[dtype]
    for index, nbytes in (("auto", 132), ("fp8", 132), ("fp4", 68), ("mxfp4", 68)):
        query = query_of(make, 1, dtype, index, layers={0: dsa(512, 64)})
        assert [buffer.row_nbytes for buffer in DSAPool.buffers(query)] == [row, nbytes]


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("page", PAGES)
def test_planned_bytes_are_allocated_bytes(make, page, dtype, index):
    query = query_of(make, page, dtype, index)
    row = {"bfloat16": 272, "fp8_e4m3": 128 + 4 + 16, "fp8_e5m2": 136}[dtype]
    expected = 2 * 8 * page * (row + {"fp8": 132, "fp4": 68}[index])
    assert sum(bytes_of(DSAPool.buffers(query), query.spaces, {"full": 7 * page})) == expected
    assert make.pool(DSAPool, query, 7 * page).mem_usage == expected


def test_a_scaled_row_is_latent_then_scales_then_rope(make, slots):
    pool = pool_of(make, dtype="fp8_e4m3", layers={0: dsa(256, 8)})
    latent = torch.zeros(1, 1, 256)
    latent[..., 0], latent[..., 200] = 224.0, -7.0
    pool.set_mla_kv_buffer(0, slots(5), latent, torch.full((1, 1, 8), 0.3))
    row = pool.get_key_buffer(0)[1, 1, 0]
    assert (row.dtype, row.shape) == (torch.uint8, (256 + 8 + 16,))
    # the largest of each block becomes 448 (0x7e), its scale is amax / 448; -448 is 0xfe
    assert row[0] == 0x7E
    assert row[200] == 0xFE
    assert row[1:200].count_nonzero() == 0
    assert row[256:264].view(torch.float32).tolist() == [0.5, 0.015625]
    assert row[264:].view(torch.bfloat16).equal(torch.full((8,), 0.3, dtype=torch.bfloat16))
    nope, rope = pool.get_mla_kv_buffer(0, slots(5))
    assert nope.dtype == rope.dtype == torch.bfloat16
    assert nope[0, 0, [0, 200]].tolist() == [224.0, -7.0]
    assert pool.get_value_buffer(0)[1, 1, 0, [0, 200]].float().tolist() == [448.0, -448.0]


def test_scaled_rows_are_within_half_a_step_of_what_was_written(make, slots):
    pool = pool_of(make, dtype="fp8_e4m3", layers={0: dsa(512, 64)})
    latent, rope = numbers(3, 1, 512, scale=1e-3), numbers(3, 1, 64, seed=1, scale=1e3)
    pool.set_mla_kv_buffer(0, slots(4, 9, 15), latent, rope)
    found, tail = pool.get_mla_kv_buffer(0, slots(4, 9, 15), torch.float32)
    step = latent.view(3, 4, 128).abs().amax(-1, keepdim=True) / 448
    # e4m3 has 3 bits of mantissa: half a step is 1/16 of a value, or half of 2**-9 scales below the smallest normal
    bound = (latent.view(3, 4, 128).abs() / 16).clamp(min=0) + step * 2**-10
    assert ((found - latent).view(3, 4, 128).abs() <= bound * 1.0001).all()
    assert tail.equal(rope.bfloat16().float())
    rows, values = pool.read_kv(0, slots(4, 9, 15), dtype=torch.float32)
    assert rows.equal(torch.cat([found, tail], -1))
    assert values.equal(found)


def test_whole_rows_are_quantised_and_bytes_are_kept(make, slots):
    pool = pool_of(make, dtype="fp8_e4m3")
    rows = numbers(2, 1, 136)
    pool.set_kv_buffer(0, slots(4, 5), rows, rows[..., :128])
    pool.set_mla_kv_buffer(0, slots(6, 7), rows[..., :128], rows[..., 128:])
    view = pool.get_key_buffer(0)[1]
    assert view[0:2].equal(view[2:4])
    pool.set_kv_buffer(3, slots(9, 10), view[0:2])
    assert pool.get_key_buffer(3)[2, 1:3].equal(view[0:2])


def test_raw_rows_of_8_bits_have_no_scales(make, slots):
    pool = pool_of(make, dtype="fp8_e5m2")
    pool.set_mla_kv_buffer(0, slots(5), torch.full((1, 1, 128), 1e9), torch.full((1, 1, 8), 1.25))
    key = pool.get_key_buffer(0)
    assert (key.dtype, key.shape) == (torch.float8_e5m2, (4, 4, 1, 136))
    nope, rope = pool.get_mla_kv_buffer(0, slots(5), torch.bfloat16)
    assert nope.eq(57344).all()
    assert rope.eq(1.25).all()
    pool.set_kv_buffer(0, slots(6), torch.full((1, 1, 136), 8.0), k_scale=4.0)
    assert pool.read_kv(0, slots(6), 4.0, 4.0)[0].eq(8).all()


def test_a_device_may_keep_raw_rows_in_e4m3(make, slots):
    class RawPool(DSAPool):
        @classmethod
        def row_layout(cls, query):
            return "raw"

    pool = pool_of(make, dtype="fp8_e4m3", cls=RawPool)
    assert pool.get_key_buffer(0).dtype == torch.float8_e4m3fn
    assert RawPool.buffers(pool.query)[0].shape == (1, 136)


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_holds_all_keys_and_then_all_scales(make, page, index):
    pool = pool_of(make, page, index=index)
    key_nbytes, scale_nbytes = pool.index.format.key_nbytes, pool.index.format.scale_nbytes
    assert (key_nbytes, scale_nbytes) == {"fp8": (128, 4), "fp4": (64, 4)}[index]
    loc = torch.arange(page, 4 * page)
    count = len(loc)
    keys = (torch.arange(count * key_nbytes) % 251).to(torch.uint8).view(count, key_nbytes)
    scales = (torch.arange(count * scale_nbytes) % 241).to(torch.uint8).view(count, scale_nbytes)
    pool.set_index_k_scale_buffer(3, loc, keys, scales)
    pages = pool.get_index_k_with_scale_buffer(3)
    assert pages.shape == (4, page * (key_nbytes + scale_nbytes))
    assert pages[1:, : page * key_nbytes].reshape(count, -1).equal(keys)
    assert pages[1:, page * key_nbytes :].reshape(count, -1).equal(scales)
    assert not pages[0].any()
    assert not pool.get_index_k_with_scale_buffer(0).any()


@pytest.mark.parametrize("page", PAGES)
def test_index_keys_are_quantised_by_their_largest(make, page):
    pool = pool_of(make, page)
    loc = torch.tensor([page, 2 * page, 4 * page - 1])
    keys = torch.zeros(3, 128)
    keys[0, 5], keys[1, :] = 896.0, -3.0
    pool.set_index_k(0, loc, keys)
    assert pool.get_index_k_scale(0, loc).flatten().tolist() == pytest.approx([2.0, 3 / 448, 1.0])
    assert torch.allclose(pool.read_index_k(0, loc), keys, rtol=1e-6)
    assert pool.get_index_k_with_scale_buffer(0)[1, 5] == 0x7E


def test_4_bit_index_keys_have_a_power_of_two_for_32(make, slots):
    pool = pool_of(make, index="fp4")
    key = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -6.0] * 4 + [0.25] * 32 + [96.0] * 32 + [0.0] * 32)
    pool.set_index_k(0, slots(6), key.view(1, 128))
    assert pool.read_index_k(0, slots(6)).flatten().equal(key)
    # exponents, biased by 127: 6 = 1.5 * 2**2, so 2**0; 0.25 = 2**-2, so 2**-4; 96 = 1.5 * 2**6, so 2**4
    assert pool.get_index_k_scale(0, slots(6)).flatten().tolist() == [127, 123, 131, 0]


def test_a_key_is_as_exact_as_its_format(make, slots):
    keys = numbers(2, 128, scale=3.0)
    for index, bound in (("fp8", 1 / 16), ("fp4", 1 / 4)):
        pool = pool_of(make, index=index)
        pool.set_index_k(0, slots(5, 10), keys)
        off = (pool.read_index_k(0, slots(5, 10)) - keys).abs()
        # a step at the bottom of a block is a small share of its largest value; 4 bits saturate at 6 of 8
        assert (off <= keys.abs() * bound + keys.abs().amax() * bound / 4).all()
        assert off.max() > 0


def test_odd_values_do_not_spoil_a_block(make, slots):
    pool = pool_of(make)
    keys = torch.zeros(3, 128)
    keys[0, 3], keys[1, 3], keys[2, 3] = float("inf"), 1e-44, float("nan")
    keys[0, 4] = 1.0
    pool.set_index_k(0, slots(5, 6, 7), keys)
    found = pool.read_index_k(0, slots(5, 6, 7))
    assert found[0, 3] == pytest.approx(torch.finfo(torch.float32).max)
    assert not found[0, 4:].any()
    assert not found[1].isnan().any()
    assert found[2].isnan().all()


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("page", PAGES)
def test_distinct_tokens_lie_in_distinct_bytes(make, page, index):
    # P-11: every byte of every page belongs to one slot
    pool = pool_of(make, page, index=index)
    pages = pool.get_index_k_with_scale_buffer(0)
    taken = torch.zeros_like(pages, dtype=torch.int64)
    for slot in range(4 * page):
        pages.zero_()
        loc = torch.tensor([slot])
        ones = [torch.full((1, n), 255, dtype=torch.uint8) for n in (pool.index.format.key_nbytes, 4)]
        pool.set_index_k_scale_buffer(0, loc, *ones)
        taken += pages.ne(0)
    assert taken.eq(1).all()


class KernelPool(DSAPool):
    kernel_page_tokens = 32 * 4


def test_pages_are_whole_pages_of_the_kernels(make):
    # P-11: kernels that page by 32 states of 4 tokens take pages of 640 tokens, and 96 are refused
    assert pool_of(make, 640, cls=KernelPool).get_index_k_with_scale_buffer(0).shape == (4, 640 * 132)
    for page, near in ((96, 128), (16, 128), (200, 256), (704, 768)):
        with pytest.raises(PlanError, match=rf"page_size={page} is no multiple of the 128 tokens .* works is {near}$"):
            KernelPool.buffers(query_of(make, page))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("page", PAGES)
def test_a_move_takes_rows_keys_and_scales_along(make, page, index, dtype):
    pool = pool_of(make, page, index=index, dtype=dtype)
    source = torch.tensor([page, 2 * page, 4 * page - 1])
    target = torch.tensor([2 * page, 4 * page - 1, page + page // 2])
    rows, keys = numbers(3, 1, 136), numbers(3, 128, seed=2)
    for layer in (0, 3):
        pool.set_kv_buffer(layer, source, rows + layer)
        pool.set_index_k(layer, source, keys + layer)
    before = [(*pool.get_mla_kv_buffer(i, source), pool.read_index_k(i, source)) for i in (0, 3)]
    pool.move_kv_cache(target, source)
    for layer, (nope, rope, index_k) in zip((0, 3), before, strict=True):
        found = pool.get_mla_kv_buffer(layer, target)
        assert found[0].equal(nope)
        assert found[1].equal(rope)
        assert pool.read_index_k(layer, target).equal(index_k)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("page", PAGES)
def test_copies_come_back_bit_by_bit_in_other_slots(make, page, index, dtype):
    pool = pool_of(make, page, index=index, dtype=dtype)
    source, target = torch.tensor([page, 3 * page]), torch.tensor([4 * page - 1, 2 * page])
    rows, keys = numbers(2, 1, 136), numbers(2, 128, seed=2)
    pool.set_kv_buffer(3, source, rows)
    pool.set_index_k(3, source, keys)
    rows_before, index_before = pool.get_mla_kv_buffer(3, source)[0], pool.read_index_k(3, source)
    copies = pool.get_cpu_copy(source)
    assert len(copies) == 2 + 2 * 2
    pool.clear()
    pool.load_cpu_copy(copies, target)
    assert pool.get_mla_kv_buffer(3, target)[0].equal(rows_before)
    assert pool.read_index_k(3, target).equal(index_before)
    with pytest.raises(SlotError, match="these 5 copies do not fit the 6 tensors"):
        pool.load_cpu_copy(copies[:5], target)


def test_the_transfer_list_is_every_tensor_of_the_pool(make, slots):
    # G-07, P-06
    pool = pool_of(make, 16, dtype="fp8_e4m3")
    infos = pool.buffer_infos()
    named = [(info.name, info.role, info.layer_id) for info in infos]
    assert named == [("kv", "latent", 0), ("kv", "latent", 3), ("index_k", "index", 0), ("index_k", "index", 3)]
    assert sum(info.nbytes for info in infos) == pool.mem_usage
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert len(pointers) == len(lengths) == len(items) == 4
    assert items == [16 * 148] * 2 + [16 * 132] * 2
    assert all(length % item == 0 for length, item in zip(lengths, items, strict=True))


@pytest.mark.parametrize("page_major", [False, True])
@pytest.mark.parametrize("index", INDEX)
def test_a_page_moved_by_its_descriptors_is_whole(index, page_major):
    plan = plan_of([dsa()] * 2, 2**20, 16, index_dtype=index, page_major=page_major, max_total_tokens=64)
    cache = kvdock.build(plan, device="cpu")
    assert cache.allocated_bytes() == plan.total_bytes
    pool = cache.token_to_kv_pool
    loc, rows, keys = torch.arange(16, 32), numbers(16, 1, 136), numbers(16, 128, seed=4)
    for layer in (0, 1):
        pool.set_kv_buffer(layer, loc, rows + layer)
        pool.set_index_k(layer, loc, keys + layer)
    for info in pool.buffer_infos():
        at = [info.pointer + page * info.stride_nbytes for page in (3, 1)]
        ctypes.memmove(*at, info.item_nbytes)
    for layer in (0, 1):
        assert pool.get_key_buffer(layer)[3].equal((rows + layer).bfloat16())
        assert pool.read_index_k(layer, loc + 32).equal(pool.read_index_k(layer, loc))
        assert pool.read_index_k(layer, loc).abs().sum() > 0
    assert pool.transfer_kind == ("pages" if page_major else "flat")


def test_layers_that_share_read_the_owners_index_and_write_none(make, slots):
    pool = pool_of(make, shared=((4, 3),))
    pool.set_index_k(3, slots(5), torch.ones(1, 128))
    assert pool.read_index_k(4, slots(5)).eq(1).all()
    assert set(pool.get_raw_kv_buffer(4)) == {"kv", "index_k"}
    with pytest.raises(SlotError, match="layer 4 reads the KV of layer 3"):
        pool.set_index_k(4, slots(5), torch.ones(1, 128))
    for read in (pool.get_key_buffer, pool.get_index_k_with_scale_buffer, pool.get_raw_kv_buffer):
        with pytest.raises(SlotError, match="layer 1 has no KV"):
            read(1)


def test_keys_of_other_shapes_are_refused_and_nothing_is_written(make, slots):
    pool = pool_of(make)
    with pytest.raises(SlotError, match=r"layer 0: index keys of shape \[1, 64\] .* give slots \[n\] and \[n, 128\]"):
        pool.set_index_k(0, slots(5), torch.ones(1, 64))
    with pytest.raises(SlotError, match=r"layer 0: index keys of shape \[2, 128\]"):
        pool.set_index_k(0, slots(5), torch.ones(2, 128))
    with pytest.raises(SlotError, match=r"bytes of scales of shape \[1, 8\] .* \[n, 4\]"):
        pool.set_index_k_scale_buffer(0, slots(5), torch.ones(1, 128, dtype=torch.uint8), torch.ones(1, 2))
    with pytest.raises(SlotError, match=r"bytes of index keys of shape \[1, 512\]"):
        pool.set_index_k_scale_buffer(0, slots(5), torch.ones(1, 128), torch.ones(1, 1))
    with pytest.raises(SlotError, match="layer 0: values of shape"):
        pool.set_mla_kv_buffer(0, slots(5), torch.ones(1, 1, 127), torch.ones(1, 1, 8))
    assert not any(view.any() for view in pool.slot_views())


def test_with_debug_a_slot_outside_is_named(make, slots):
    query = query_of(make)
    pool = DSAPool(query, make.parts(DSAPool, query, {"full": 12, "swa": 12}, debug=True))
    with pytest.raises(SlotError, match="layer 3: slot 16 is outside"):
        pool.set_index_k(3, slots(16), torch.ones(1, 128))


def test_every_read_waits_for_a_transfer_in_progress(make, slots):
    class Transfer:
        def __init__(self):
            self.waited = []

        def wait_until(self, layer_id):
            self.waited.append(layer_id)

    pool, transfer = pool_of(make), Transfer()
    pool.register_layer_transfer(transfer)
    for read in (pool.get_key_buffer, pool.get_value_buffer, pool.get_index_k_with_scale_buffer):
        read(3)
    for read in (pool.get_mla_kv_buffer, pool.read_index_k, pool.get_index_k_scale):
        read(0, slots(5))
    assert transfer.waited == [3, 3, 3, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "layer", "message"),
    [
        ({"dtype": "fp8_e4m3"}, dsa(lora=96), "kv_lora_rank=96 is no whole number of blocks of 128"),
        ({}, dsa(index=64), "index_head_dim=64 is no whole number of blocks of 128"),
        ({"index": "fp4"}, dsa(index=48), "index_head_dim=48 is no whole number of blocks of 32"),
        (
            {"index": "bfloat16"},
            dsa(),
            "index_dtype='bfloat16' cannot hold index keys in this pool; give auto, fp8 or fp4",
        ),
        ({"index": "mxfp8"}, dsa(), "index_dtype='mxfp8' cannot hold index keys"),
    ],
)
def test_widths_and_types_that_do_not_fit_are_refused(make, options, layer, message):
    with pytest.raises(PlanError, match=message):
        DSAPool.buffers(query_of(make, layers={0: layer}, **options))


def test_layers_of_two_index_widths_are_no_group(make):
    with pytest.raises(PlanError, match="layers 0 and 1 of group 'g' have index keys of different widths"):
        DSAPool.buffers(query_of(make, layers={0: dsa(), 1: dsa(index=256)}))
    with pytest.raises(PlanError, match="layer 0 of group 'g' is of kind 'mla', which has no indexer"):
        DSAPool.buffers(query_of(make, layers={0: make.mla()}))


def test_4_bit_rows_have_no_pool():
    with pytest.raises(UnsupportedCombination, match="DSAPool lacks fp4"):
        plan_of([dsa()], kv_cache_dtype="fp4")


def test_an_index_dtype_that_nothing_reads_is_an_error(make):
    with pytest.raises(PlanError, match="nothing in this plan reads index_dtype='fp4'"):
        plan_of([make.mla()], index_dtype="fp4")


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_the_hot_path_never_waits_for_the_device(make, dtype, index):
    pool = pool_of(make, dtype=dtype, index=index, device="meta")
    loc = torch.zeros(3, dtype=torch.int64, device="meta")
    nope, rope, keys = (torch.zeros(*shape, device="meta") for shape in ((3, 1, 128), (3, 1, 8), (3, 128)))
    pool.set_mla_kv_buffer(0, loc, nope, rope)
    pool.set_index_k(0, loc, keys)
    stored = pool.index.split(pool.get_index_k_with_scale_buffer(0))
    pool.set_index_k_scale_buffer(0, loc, *(part[:3, 0] for part in stored))
    pool.move_kv_cache(loc, loc)
    assert pool.get_mla_kv_buffer(0, loc)[0].shape == (3, 1, 128)
    assert pool.read_index_k(0, loc).shape == (3, 128)


MANY = st.lists(st.integers(1, 15), max_size=8, unique=True)
STEPS = st.lists(st.tuples(st.sampled_from(["write", "move", "swap"]), MANY, MANY), max_size=12)


@pytest.mark.parametrize("page", [1, 3, 4])
@settings(max_examples=25)
@given(steps=STEPS)
def test_random_steps_keep_rows_and_index_keys_together(make, page, steps):
    tokens = -(-15 // page) * page
    pool = pool_of(make, page, tokens, dtype="fp8_e5m2")
    held = dict.fromkeys(range(1, 16), 0)
    written = 0
    for kind, first, second in steps:
        pairs = list(zip(first, second, strict=False))
        targets, sources = ([pair[i] for pair in pairs] for i in (0, 1))
        to, of = (torch.tensor(each, dtype=torch.int64) for each in (targets, sources))
        if kind == "write":
            numbers_ = [float(2 ** ((written + i) % 12)) for i in range(len(first))]
            loc, column = torch.tensor(first, dtype=torch.int32), torch.tensor(numbers_).view(-1, 1)
            pool.set_kv_buffer(3, loc, column.expand(-1, 136).unsqueeze(1))
            pool.set_index_k(3, loc, column.expand(-1, 128))
            held |= dict(zip(first, numbers_, strict=True))
            written += len(first)
            continue
        if kind == "move":
            pool.move_kv_cache(to, of)
        else:
            pool.load_cpu_copy(pool.get_cpu_copy(of), to)
        held |= dict(zip(targets, [held[s] for s in sources], strict=True))
    every = torch.arange(1, 16)
    expected = torch.tensor([float(held[slot]) for slot in range(1, 16)]).view(-1, 1)
    assert pool.read_index_k(3, every).eq(expected).all()
    assert pool.read_kv(3, every, dtype=torch.float32)[0][:, 0].eq(expected).all()
