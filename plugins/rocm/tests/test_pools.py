"""Rows of sparse latents, and what narrow offsets reach; bytes worked out by hand."""

from pathlib import Path

import kvdock
import pytest

MODELS = Path(__file__).parents[3] / "tests" / "models"


def pool_of(made):
    (group,) = made.groups
    return group.pool_cls.plugin, group.pool_cls.name


def columns(made, name="kv"):
    return next(buffer for buffer in made.groups[0].buffers if buffer.name == name).shape[1:]


@pytest.mark.parametrize("device", ["mi300x", "mi355x"])
@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({}, 576),
        ({"attention_backend": "aiter"}, 576),
        ({"attention_backend": "tilelang"}, 576),
        ({"sparse_decode_backend": "tilelang"}, 576),
        ({"attention_backend": "tilelang", "sparse_prefill_backend": "aiter"}, 576),
        ({"sparse_prefill_backend": "triton"}, 656),
        ({"attention_backend": "triton"}, 656),
        ({"attention_backend": "aiter", "sparse_prefill_backend": "triton", "sparse_decode_backend": "triton"}, 656),
    ],
)
def test_rows_are_raw_for_tilelang_and_aiter_and_scaled_for_others(plan, device, options, nbytes):
    """512 + 64 bytes raw; 512 + 4 scales of 4 bytes + 64 columns of bfloat16 scaled."""
    made = plan("dsa", device, kv_cache_dtype="fp8_e4m3", page_size=64, **options)
    assert columns(made) == (1, nbytes)
    # a page holds 64 keys of 128 bytes, then 64 scales of 4 bytes
    assert columns(made, "index_k") == (64 * 132,)
    assert made.bytes_per_token.kv == nbytes + 132


def test_the_core_serves_scaled_rows_in_its_own_encoding(plan):
    assert pool_of(plan("dsa", "mi355x", kv_cache_dtype="fp8", attention_backend="triton")) == ("core", "DSAPool")
    assert pool_of(plan("dsa", "mi300x", kv_cache_dtype="fp8", attention_backend="triton")) == ("rocm", "RocmDSAPool")


def test_wide_rows_are_raw_anyway(plan):
    made = plan("dsa", "mi355x", kv_cache_dtype="bfloat16", attention_backend="aiter")
    assert pool_of(made) == ("core", "DSAPool")
    assert columns(made) == (1, 576)
    assert made.bytes_per_token.kv == 2 * 576 + 132


@pytest.mark.parametrize("device", ["mi300x", "mi355x"])
def test_rows_on_the_host_and_over_ranks_have_pools_of_their_own(plan, device):
    raw = {"kv_cache_dtype": "fp8_e4m3", "page_size": 64}
    hosted = plan("dsa", device, hisparse=True, max_running_requests=1, **raw)
    assert pool_of(hosted) == ("rocm", "RocmHiSparseDSAPool")
    assert {columns(hosted, name) for name in ("kv", "kv_host")} == {(1, 576)}
    split = plan("dsa", device, layer_split=True, role="prefill", parallel={"tp_size": 2, "cp_size": 2}, **raw)
    assert pool_of(split) == ("rocm", "RocmLayerSplitDSAPool")
    assert columns(split, "kv_scratch") == (1, 576)


def test_a_published_model_has_61_layers_of_raw_rows(plan):
    """DeepSeek V3.2: 61 · (576 + 132) bytes."""
    made = plan(MODELS / "deepseek-v3.2.json", budget=2**34, kv_cache_dtype="fp8", page_size=64, max_running_requests=8)
    assert made.bytes_per_token.kv == 61 * 708


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mha", {}),
        ("mla", {}),
        ("dsa", {"page_size": 64}),
        ("dsa", {"page_size": 64, "attention_backend": "triton"}),
        ("dsa", {"page_size": 64, "hisparse": True}),
        ("mha", {"page_major": True, "attention_backend": "triton", "page_size": 16}),
        ("mha", {"attention_backend": "aiter"}),
    ],
)
@pytest.mark.parametrize("built_on", ["cpu", "meta"])
def test_planned_bytes_are_allocated_bytes(plan, kind, options, built_on):
    pytest.importorskip("torch")
    made = plan(kind, budget=2**26, kv_cache_dtype="fp8", max_running_requests=1, context_length=256, **options)
    assert made.groups[0].pool_cls.plugin == "rocm"
    cache = kvdock.build(made, device=built_on)
    assert cache.allocated_bytes() == made.total_bytes
    assert sum(pool.mem_usage for pool in cache.pools.values()) == sum(
        buffer.nbytes for group in made.groups for buffer in group.buffers
    )


def test_raw_rows_are_written_and_read_back(plan):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    made = plan("dsa", budget=2**26, kv_cache_dtype="fp8", page_size=16, attention_backend="aiter")
    pool, slots = kvdock.build(made, device="cpu").token_to_kv_pool, torch.tensor([17, 18])
    latent, rope = torch.full((2, 1, 512), 0.25), torch.full((2, 1, 64), -3.0)
    pool.set_mla_kv_buffer(0, slots, latent, rope)
    found = pool.get_mla_kv_buffer(0, slots, torch.float32)
    assert torch.equal(found[0], latent)
    assert torch.equal(found[1], rope)
    rows = pool.get_raw_kv_buffer(0)["kv"]
    assert (rows.dtype, rows.shape[1:]) == (torch.uint8, (16, 1, 576))
    # e4m3 with bias 8: 0.25 is 2^-2, exponent 6; −3 is −1.5 · 2, exponent 9
    assert rows[1, 1, 0, 0] == 0b0_0110_000
    assert rows[1, 1, 0, 512] == 0b1_1001_100


def test_scaled_rows_are_scaled_to_the_end_of_the_chips_encoding(plan):
    """The largest of 128 latents becomes 240 · scale; 8 bits keep three bits of the others."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    made = plan("dsa", budget=2**26, kv_cache_dtype="fp8", page_size=16, attention_backend="triton")
    pool, slots = kvdock.build(made, device="cpu").token_to_kv_pool, torch.tensor([17])
    latent = torch.linspace(-960, 960, 512).view(1, 1, 512)
    pool.set_mla_kv_buffer(0, slots, latent, torch.zeros(1, 1, 64))
    scales = pool.get_raw_kv_buffer(0)["kv"][1, 1, 0, 512:528].clone().view(torch.float32)
    assert scales.tolist() == pytest.approx([4.0, 480 / 240, 480 / 240, 4.0], rel=0.01)
    found = pool.get_mla_kv_buffer(0, slots, torch.float32)[0]
    assert ((found - latent).abs() <= latent.abs() / 16 + 4.0 * 2**-8).all()


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        # 2 heads of 128 columns: 256 elements a token; 2^31 − 1 of them hold 8,388,607 rows, whole pages only
        ({"attention_backend": "aiter"}, 8_388_606),
        ({"prefill_attention_backend": "aiter", "page_size": 64}, 8_388_607 // 64 * 64 - 64),
        ({"attention_backend": "aiter", "kv_cache_dtype": "fp8"}, 8_388_606),
    ],
)
def test_small_pages_end_where_the_offsets_of_aiters_prefill_do(plan, options, tokens):
    # S-23
    made = plan("mha", budget=2**36, max_running_requests=8, **options)
    assert made.max_total_num_tokens == tokens
    assert made.bound.startswith("addressing limit of buffer")
    assert pool_of(made) == ("rocm", "RocmMHAPool")


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "aiter", "page_size": 128},
        {"attention_backend": "triton"},
        {"attention_backend": "triton", "decode_attention_backend": "aiter"},
        {"attention_backend": "aiter", "plugin_options": {"rocm": {"wide_offsets": True}}},
        {},
    ],
)
def test_other_pages_backends_and_fixed_kernels_have_no_end(plan, options):
    # S-23
    made = plan("mha", budget=2**36, max_running_requests=8, **options)
    assert made.max_total_num_tokens > 60_000_000
    assert pool_of(made) == ("core", "MHAPool")
