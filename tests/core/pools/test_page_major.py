"""Pages that hold all their layers side by side: the same answers, one span a page."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.builder import build  # noqa: E402
from kvdock.device import DeviceInfo  # noqa: E402
from kvdock.errors import SlotError, UnsupportedCombination  # noqa: E402
from kvdock.model import LayerSpec, MHAParams, MLAParams, ModelSpec  # noqa: E402
from kvdock.options import Parallelism, make_options  # noqa: E402
from kvdock.planner import plan_from  # noqa: E402
from kvdock.startup import core_only  # noqa: E402

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**24, free_before_load_bytes=2**24, free_bytes=2**24)
MHA = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=4))
NARROW = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=1, head_dim=3, v_head_dim=1), window_tokens=7)
MLA = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=16, qk_rope_head_dim=8))


def plan(*layers, tokens=8, page_size=4, granularity=1, **options):
    registry = core_only()
    model = ModelSpec(name="m", architecture="A", layers=layers, context_length=64, dtype="bfloat16")
    given = {"page_size": page_size, "max_total_tokens": tokens, "max_running_requests": 2, **options}
    device = DeviceInfo(**{f: getattr(CPU, f) for f in CPU.__struct_fields__} | {"granularity_bytes": granularity})
    return plan_from((model,), device, make_options(given), Parallelism(), registry, budget_bytes=2**22)


def fill(pool, slots):
    """Write a value of its own to every element of every slot and return what was written, by layer."""
    written = {}
    for layer in pool.layer_ids:
        keys, values = pool.get_kv_buffer(layer)
        k = torch.randn(len(slots), *keys.shape[2:], generator=torch.manual_seed(layer)).to(keys.dtype)
        v = torch.randn(len(slots), *values.shape[2:], generator=torch.manual_seed(100 + layer)).to(values.dtype)
        pool.set_kv_buffer(layer, torch.tensor(slots), k, v)
        written[layer] = (k, v)
    return written


def rows(view, slots):
    page_size = view.shape[1]
    return torch.stack([view[s // page_size, s % page_size] for s in slots])


def test_each_page_is_one_span_of_the_byte_buffer():
    """P-07: 2 layers, pages of 4, 3 pages with the padding page."""
    made = plan(MHA, MHA, page_major=True)
    pool = build(made).token_to_kv_pool
    (raw,) = pool.storages()
    page_bytes = 2 * 4 * (2 * 8 + 2 * 4) * 2
    assert raw.numel() == 3 * page_bytes == pool.mem_usage
    (region,) = pool.regions()
    assert (region.pointer, region.nbytes, region.item_nbytes) == (raw.data_ptr(), 3 * page_bytes, page_bytes)
    for layer in (0, 1):
        for view in pool.get_kv_buffer(layer):
            for page in range(3):
                start = view[page].data_ptr() - raw.data_ptr()
                end = start + view[page].numel() * view.element_size()
                assert page * page_bytes <= start < end <= (page + 1) * page_bytes


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("dtype", ["auto", "float32", "fp8_e4m3"])
def test_reads_are_those_of_the_other_arrangement(page_size, dtype):
    slots = [page_size, 2 * page_size - 1, 2 * page_size]
    found = []
    for page_major in (False, True):
        made = plan(
            MHA, MHA, MHA, page_size=page_size, tokens=2 * page_size, kv_cache_dtype=dtype, page_major=page_major
        )
        cache = build(made)
        assert cache.allocated_bytes() == made.total_bytes
        pool = cache.token_to_kv_pool
        fill(pool, slots)
        pool.move_kv_cache(torch.tensor(slots[:1]), torch.tensor(slots[1:2]))
        copies = pool.get_cpu_copy(torch.tensor(slots))
        pool.load_cpu_copy(copies, torch.tensor([slots[2], slots[0], slots[1]]))
        found.append([view.view(torch.uint8) for layer in (0, 1, 2) for view in pool.get_kv_buffer(layer)])
    for plain, paged in zip(*found, strict=True):
        assert torch.equal(plain, paged.contiguous())


def test_odd_rows_are_padded_to_blocks_of_16_bytes_and_planned_so():
    made = plan(NARROW, NARROW, tokens=12, page_size=4, hybrid_swa="off", page_major=True)
    # a block of keys: 4 rows of 6 bytes, 24, up to 32; of values: 4 rows of 2 bytes, 8, up to 16
    assert sum(b.nbytes for b in made.groups[0].buffers) == 4 * 2 * (32 + 16)
    assert made.bytes_per_token.kv == 2 * (32 + 16) // 4
    assert build(made).allocated_bytes() == made.total_bytes


def test_each_side_of_a_sliding_model_has_a_byte_buffer_of_its_own():
    made = plan(MHA, NARROW, MHA, tokens=32, page_major=True, granularity=4096)
    cache = build(made)
    assert cache.allocated_bytes() == made.total_bytes
    assert [len(pool.storages()) for pool in cache.pools.values()] == [1, 1]
    assert all(raw.numel() % 4096 == 0 for pool in cache.pools.values() for raw in pool.storages())
    assert [kind.transfer_kind for kind in cache.pools.values()] == ["pages", "pages"]
    assert len(cache.token_to_kv_pool.regions()) == 2


def test_latent_rows_lie_in_pages_too():
    made = plan(MLA, MLA, page_major=True)
    pool = build(made).token_to_kv_pool
    k = torch.arange(2 * 24, dtype=torch.bfloat16).view(2, 1, 24)
    pool.set_kv_buffer(1, torch.tensor([4, 7]), k)
    assert torch.equal(rows(pool.get_key_buffer(1), [4, 7]), k)
    assert not pool.get_key_buffer(0).any()


def test_descriptors_say_how_far_apart_the_pages_of_a_layer_are():
    """P-06, P-08, G-06: every layer's tensor with its id and role, whatever the arrangement; the kind is said, not guessed."""
    paged, plain = (build(plan(MHA, MHA, page_major=flag)).token_to_kv_pool for flag in (True, False))
    for pool in (paged, plain):
        assert [(i.role, i.layer_id) for i in pool.buffer_infos()] == [
            ("key", 0),
            ("key", 1),
            ("value", 0),
            ("value", 1),
        ]
        assert all(i.nbytes == 3 * i.item_nbytes for i in pool.buffer_infos())
    assert {i.stride_nbytes for i in paged.buffer_infos()} == {384}
    assert all(i.stride_nbytes == i.item_nbytes for i in plain.buffer_infos())
    assert (paged.transfer_kind, plain.transfer_kind) == ("pages", "kv_pairs")
    pointers, lengths, items = plain.get_contiguous_buf_infos()
    assert len(pointers) == len(lengths) == len(items) == 4
    assert all(length % item == 0 for length, item in zip(lengths, items, strict=True))
    assert items == [4 * 2 * 8 * 2] * 2 + [4 * 2 * 4 * 2] * 2  # page bytes
    assert [len(part) for part in paged.get_contiguous_buf_infos()] == [1, 1, 1]


def test_rows_of_pages_that_lie_apart_are_no_one_view():
    pool = build(plan(MHA, MHA, page_major=True)).token_to_kv_pool
    with pytest.raises(SlotError, match=r"buffer 'k' lies page by page.* read it with paged\(\)"):
        pool.parts.tensors.rows("k", 0)
    assert build(plan(MHA, MHA, page_size=1, page_major=True)).token_to_kv_pool.parts.tensors.rows("k", 0).shape[
        1:
    ] == (2, 8)


def test_the_plan_names_the_byte_buffer():
    text = plan(MHA, MHA, page_major=True).explain()
    assert "full: k (key): 2 x [12, 2, 8] bfloat16, 768 bytes, in full pages" in text


@pytest.mark.parametrize("option", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_a_backend_that_cannot_read_pages_apart_is_refused(option):
    with pytest.raises(
        UnsupportedCombination, match=r"page_major=true lays pages apart.* flashy does not read; give one"
    ):
        plan(MHA, page_major=True, **{option: "flashy"})
    assert plan(MHA, page_major=True, **{option: "triton"})
