"""8-bit floats as the chip reads them, buffer by buffer."""

from pathlib import Path

import kvdock
import pytest

MODELS = Path(__file__).parents[3] / "tests" / "models"
CONVERTS = {"plugin_options": {"rocm": {"foreign_floats": True}}}
"""Some kernels of one chip keep the other encoding."""

DRAFT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 512,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def dtypes_of(group):
    return {buffer.name: buffer.dtype for buffer in group.buffers}


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize(
    ("device", "asked", "kept"),
    [
        ("mi300x", "fp8", "float8_e4m3fnuz"),
        ("mi325x", "fp8_e4m3", "float8_e4m3fnuz"),
        ("mi300x", "fp8_e5m2", "float8_e5m2fnuz"),
        ("mi300x", "torch.float8_e4m3", "float8_e4m3fnuz"),
        ("mi355x", "fp8", "float8_e4m3fn"),
        ("mi355x", "fp8_e5m2", "float8_e5m2"),
        ("mi300x", "float8_e4m3fnuz", "float8_e4m3fnuz"),
        ("mi300x", "bfloat16", "bfloat16"),
    ],
)
def test_a_short_name_means_what_the_chip_reads_and_a_full_one_itself(plan, kind, device, asked, kept):
    # P-03
    (group,) = plan(kind, device, kv_cache_dtype=asked).groups
    assert set(dtypes_of(group).values()) == {kept}


def test_the_cores_pool_serves_what_needs_no_other_encoding(plan):
    classes = {
        (device, dtype): plan("mha", device, kv_cache_dtype=dtype).groups[0].pool_cls.plugin
        for device in ("mi210", "mi300x", "mi355x")
        for dtype in ("bfloat16", "fp8")
    }
    assert [key for key, plugin in classes.items() if plugin == "rocm"] == [("mi300x", "fp8")]


@pytest.mark.parametrize(
    ("device", "options", "source"),
    [
        ("mi300x", {}, ("float8_e4m3fnuz", "rocm")),
        ("mi300x", {"index_dtype": "float8_e4m3fn", **CONVERTS}, ("float8_e4m3fn", "user")),
        ("mi355x", {}, ("auto", "default")),
    ],
)
def test_index_keys_have_the_chips_encoding_by_default(plan, device, options, source):
    # P-03
    made = plan("dsa", device, **options)
    assert (made.options.values.index_dtype, made.options.sources["index_dtype"]) == source


@pytest.mark.parametrize(
    ("device", "options", "rows", "keys"),
    [
        ("mi300x", {"kv_cache_dtype": "fp8"}, "float8_e4m3fnuz", "float8_e4m3fnuz"),
        (
            "mi300x",
            {"kv_cache_dtype": "fp8", "index_dtype": "float8_e4m3fn", **CONVERTS},
            "float8_e4m3fnuz",
            "float8_e4m3fn",
        ),
        ("mi300x", {"kv_cache_dtype": "float8_e4m3fn", **CONVERTS}, "float8_e4m3fn", "float8_e4m3fnuz"),
        ("mi300x", {"kv_cache_dtype": "bfloat16", "index_dtype": "fp8"}, "bfloat16", "float8_e4m3fnuz"),
        ("mi300x", {"kv_cache_dtype": "bfloat16", "index_dtype": "auto"}, "bfloat16", "float8_e4m3fnuz"),
        ("mi355x", {"kv_cache_dtype": "fp8"}, "float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_rows_and_index_keys_have_encodings_of_their_own(plan, device, options, rows, keys):
    # P-03: per buffer; index keys are bytes in pages, so their codec names the encoding
    pytest.importorskip("torch")
    pool = kvdock.build(plan("dsa", device, budget=2**26, page_size=64, **options), device="meta").token_to_kv_pool
    assert str(pool.get_key_buffer(0).dtype) == f"torch.{rows}"
    assert pool.index.format.dtype == keys


@pytest.mark.parametrize(("device", "largest", "dtype"), [("mi300x", 240, "e4m3fnuz"), ("mi355x", 448, "e4m3fn")])
def test_what_is_too_large_saturates_at_the_encodings_end_and_storage_is_bytes(plan, device, largest, dtype):
    # P-03
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    cache = kvdock.build(plan("mha", device, budget=2**26, kv_cache_dtype="fp8"), device="cpu")
    pool, slots = cache.token_to_kv_pool, torch.tensor([1, 2])
    pool.set_kv_buffer(0, slots, torch.full((2, 2, 128), 1000.0), torch.full((2, 2, 128), -1.5))
    keys, values = pool.get_kv_buffer(0)
    assert str(keys.dtype) == f"torch.float8_{dtype}"
    assert keys.view(torch.uint8).shape == keys.shape
    assert {raw.dtype for raw in pool.storages()} == {torch.uint8}
    read_k, read_v = pool.read_kv(0, slots)
    assert read_k.unique().tolist() == [largest]
    assert read_v.unique().tolist() == [-1.5]
    # −1.5 is sign, exponent bias 8 or 7, mantissa 100: the same value has other bytes in the other encoding
    assert values.view(torch.uint8)[1, 0, 0, 0] == {"e4m3fnuz": 0b1_1000_100, "e4m3fn": 0b1_0111_100}[dtype]


@pytest.mark.parametrize(
    ("model", "sees", "native"),
    [
        ("gpt-oss-20b", "SlidingPool", {"RocmMHAPool": 2}),
        ("qwen3-next-80b-a3b", "HybridLinearPool", {"RocmMHAPool": 1}),
        ("kimi-linear-48b-a3b", "HybridLinearPool", {"RocmMLAPool": 1}),
        ("minimax-m3-synthetic", "SparsePool", {"RocmMHAPool": 1}),
        ("mistral-7b-v0.1", "PureSlidingPool", {"RocmMHAPool": 1}),
    ],
)
@pytest.mark.parametrize(("device", "dtype"), [("mi300x", "float8_e4m3fnuz"), ("mi355x", "float8_e4m3fn")])
def test_inner_pools_have_the_encoding_too(plan, model, sees, native, device, dtype):
    # P-03: composites ask for each of their pools
    pytest.importorskip("torch")
    options = {"kv_cache_dtype": "fp8", "page_size": 64, "context_length": 16384, "max_running_requests": 4}
    made = plan(MODELS / f"{model}.json", device, budget=2**32, **options)
    kinds = [group for group in made.groups if group.kind in ("mha", "mla")]
    assert {d for group in kinds for d in dtypes_of(group).values()} == {dtype}
    names = [group.pool_cls.name for group in made.groups if group.pool_cls.plugin == "rocm"]
    assert {name: names.count(name) for name in names} == (native if device == "mi300x" else {})
    pool = kvdock.build(made, device="meta").token_to_kv_pool
    assert type(pool).__name__ == sees
    for group in kinds:
        assert str(pool.get_key_buffer(group.layers[0]).dtype) == f"torch.{dtype}"


def test_a_draft_has_the_encoding_of_its_target(plan):
    # P-03
    eagle = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    made = plan("mha", kv_cache_dtype="fp8", max_running_requests=4, draft=DRAFT, **eagle)
    assert {(group.worker, *dtypes_of(group).values()) for group in made.groups} == {
        ("target", "float8_e4m3fnuz", "float8_e4m3fnuz"),
        ("draft", "float8_e4m3fnuz", "float8_e4m3fnuz"),
    }


def test_no_encoding_changes_the_bytes(plan):
    """2 heads of 128 columns, keys and values, a byte each."""
    sizes = {device: plan("mha", device, kv_cache_dtype="fp8").bytes_per_token.kv for device in ("mi300x", "mi355x")}
    assert sizes == {"mi300x": 512, "mi355x": 512}
