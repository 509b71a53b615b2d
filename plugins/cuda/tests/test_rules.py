"""What is planned for NVIDIA devices, what is refused, and what an AMD device of the same torch is spared."""

import itertools

import kvdock
import msgspec
import pytest
from kvdock.model import DSAParams, MLAParams
from kvdock.planner import plan_from
from kvdock.pools import MHAPool
from kvdock.startup import core_only
from kvdock_cuda import hooks

MHA = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=2, head_dim=128, v_head_dim=128))
DSA = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128))
MLA = kvdock.LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=512, qk_rope_head_dim=64))
AMD = kvdock.DeviceInfo(
    device_type="cuda",
    name="amd",
    total_bytes=2**37,
    free_before_load_bytes=2**37,
    free_bytes=2**37,
    capabilities=("gfx942",),
)
NO_KV = {"prefill_only_disable_kv_cache": True, "is_embedding": True, "prefix_cache": False}


def plan(*layers, device="h200", beside=None, **options):
    registry = core_only()
    registry.add(hooks, name="cuda", tier="hardware", distribution="kvdock-cuda", version="0.1.0")
    if beside is not None:
        beside.kvdock_contract = "0.1"
        registry.add(beside, name="cuda.odd", tier="variant", distribution="odd", version="0.1.0")
    model = kvdock.ModelSpec(name="m", architecture="A", layers=layers, context_length=4096, dtype="bfloat16")
    info = device if isinstance(device, kvdock.DeviceInfo) else hooks.device_catalogue()[device]
    return plan_from((model,), info, kvdock.CacheOptions(**options), kvdock.Parallelism(), registry, budget_bytes=2**30)


def pool_of(made):
    (group,) = made.groups
    return group.pool_cls.plugin, group.pool_cls.name


def objections(*layers, **asked):
    with pytest.raises(kvdock.UnsupportedCombination) as caught:
        plan(*layers, **asked)
    return [reason for plugin, reason in caught.value.objections if plugin == "cuda" and reason != "declined"]


def test_an_indexer_gets_pages_of_64():
    made = plan(DSA)
    assert (made.options.values.page_size, made.options.sources["page_size"]) == (64, "cuda")
    assert plan(MHA).options.sources["page_size"] == "default"


@pytest.mark.parametrize("page_size", [1, 16, 32, 128])
def test_an_indexer_of_other_pages_is_refused(page_size):
    assert objections(DSA, page_size=page_size) == [
        f"page_size={page_size}: CUDA kernels read the index keys of m in pages of 64 tokens; give page_size=64"
    ]


def test_other_layers_may_have_any_page():
    assert plan(MHA, page_size=24).options.values.page_size == 24


@pytest.mark.parametrize("dtype", ["fp4", "nvfp4"])
def test_4_bits_are_refused_before_sm_100(dtype):
    assert objections(MHA, kv_cache_dtype=dtype) == [
        f"kv_cache_dtype={dtype} needs 4-bit floats, which devices have from sm_100 on, and h200 is sm_90; "
        "give kv_cache_dtype=fp8_e4m3"
    ]
    assert plan(MHA, kv_cache_dtype="fp8_e4m3").groups


def test_index_keys_of_4_bits_are_refused_before_sm_100():
    tail = " needs 4-bit floats, which devices have from sm_100 on, and h200 is sm_90; give "
    assert objections(DSA, index_dtype="fp4") == [f"index_dtype=fp4{tail}index_dtype=fp8_e4m3"]
    index = plan(DSA, device="b200", index_dtype="fp4").groups[0].buffers[1]
    assert (index.name, index.shape[1:]) == ("index_k", (64 * 68,))


@pytest.mark.parametrize("device", ["b200", "rtx5090"])
@pytest.mark.parametrize("dtype", ["fp4", "nvfp4"])
def test_4_bits_are_planned_from_sm_100_on(device, dtype):
    assert pool_of(plan(MHA, device=device, kv_cache_dtype=dtype)) == ("core", "BlockMHAPool")


def test_all_that_is_wrong_is_said_at_once():
    assert [text.split("=")[0] for text in objections(DSA, page_size=16, kv_cache_dtype="fp4")] == [
        "page_size",
        "kv_cache_dtype",
    ]


def test_an_encoding_of_others_is_refused():
    # P-03
    foreign = "float8_e4m3fnuz"
    tail = " is an encoding of other vendors' devices, which no kernel of h200 reads; give fp8_e4m3"
    for layer in (MHA, MLA, DSA):
        assert objections(layer, kv_cache_dtype=foreign) == [f"kv_cache_dtype={foreign}{tail}"]
    assert objections(DSA, index_dtype=foreign) == [f"index_dtype={foreign}{tail}"]
    assert objections(MHA, model_dtype=foreign) == [f"model_dtype={foreign}{tail}"]
    assert objections(DSA, kv_cache_dtype="float8_e5m2fnuz", index_dtype=foreign) == [
        f"kv_cache_dtype=float8_e5m2fnuz, index_dtype={foreign}{tail}"
    ]


def test_what_no_option_says_is_named_by_its_buffer():
    # P-03: a pool that keeps an encoding of its own
    class Odd(MHAPool):
        @classmethod
        def buffers(cls, query):
            return tuple(msgspec.structs.replace(each, dtype="float8_e4m3fnuz") for each in super().buffers(query))

    class Plugin:
        @kvdock.hookimpl
        def get_pool_cls(self, query):
            return Odd if query.group is not None else None

    with pytest.raises(kvdock.UnsupportedCombination, match="buffer 'k' of 'full' in float8_e4m3fnuz, buffer 'v' of"):
        plan(MHA, beside=Plugin(), kv_cache_dtype="fp8")


@pytest.mark.parametrize(("device", "converted"), [("a100-80gb", True), ("l40s", False), ("h200", False)])
def test_8_bits_are_planned_with_a_warning_where_the_device_has_none(device, converted):
    """sm_80 keeps them as bytes and converts each one."""
    found = [text for text in plan(MHA, device=device, kv_cache_dtype="fp8").warnings if "floats of 8 bits" in text]
    assert found == converted * [
        "a100-80gb has no floats of 8 bits, so each read and write of float8_e4m3fn is converted in software: that saves "
        "memory and costs time; kv_cache_dtype=bfloat16 needs no conversion"
    ]
    assert not [text for text in plan(DSA, device=device).warnings if "floats of 8 bits" in text]


def test_8_bits_are_the_common_encoding():
    # P-03
    (group,) = plan(MHA, kv_cache_dtype="fp8").groups
    assert {buffer.dtype for buffer in group.buffers} == {"float8_e4m3fn"}


@pytest.mark.parametrize(("device", "backend"), [("h100", "fa3"), ("h200", "fa4"), ("b200", "fa4")])
def test_prefill_without_kv_works_on_the_backends_that_need_none(device, backend):
    # P-09
    made = plan(MHA, device=device, attention_backend=backend, **NO_KV)
    assert pool_of(made) == ("core", "NoOpPool")


@pytest.mark.parametrize(("device", "backend"), [("a100-80gb", "fa3"), ("b200", "fa3"), ("rtx5090", "fa4")])
def test_prefill_without_kv_is_refused_elsewhere(device, backend):
    # P-09
    with pytest.raises(kvdock.UnsupportedCombination, match="known to work without a KV cache"):
        plan(MHA, device=device, attention_backend=backend, **NO_KV)


@pytest.mark.parametrize(
    ("options", "pool", "columns"),
    [
        ({"sparse_decode_backend": "trtllm"}, ("cuda", "RawDSAPool"), 576),
        ({"sparse_prefill_backend": "trtllm"}, ("cuda", "RawDSAPool"), 576),
        ({"attention_backend": "trtllm_mla"}, ("cuda", "RawDSAPool"), 576),
        ({"attention_backend": "trtllm", "sparse_prefill_backend": "trtllm_mla"}, ("cuda", "RawDSAPool"), 576),
        ({"sparse_prefill_backend": "flashmla", "sparse_decode_backend": "fa3"}, ("core", "DSAPool"), 656),
        ({}, ("core", "DSAPool"), 656),
    ],
)
def test_rows_are_raw_for_trtllm_and_scaled_for_others(options, pool, columns):
    """512 + 64 bytes raw; 512 + 4 scales of 4 bytes + 64 columns of bfloat16 scaled."""
    made = plan(DSA, kv_cache_dtype="fp8_e4m3", **options)
    assert pool_of(made) == pool
    rows = next(buffer for buffer in made.groups[0].buffers if buffer.name == "kv")
    assert rows.shape[1:] == (1, columns)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"sparse_prefill_backend": "trtllm", "sparse_decode_backend": "flashmla_kv"},
            "sparse_prefill_backend=trtllm reads rows of m without scales, sparse_decode_backend=flashmla_kv rows with "
            "scales, and with kv_cache_dtype=fp8_e4m3 there is one or the other; give sparse_decode_backend=trtllm, "
            "sparse_prefill_backend=flashmla_kv, or kv_cache_dtype=bfloat16",
        ),
        (
            {"attention_backend": "trtllm", "prefill_attention_backend": "flashmla"},
            "attention_backend=trtllm reads rows of m without scales, prefill_attention_backend=flashmla rows with "
            "scales, and with kv_cache_dtype=fp8_e4m3 there is one or the other; give sparse_prefill_backend=trtllm, "
            "sparse_decode_backend=flashmla, or kv_cache_dtype=bfloat16",
        ),
    ],
)
def test_backends_that_read_different_rows_are_refused_together(options, reason):
    assert objections(DSA, kv_cache_dtype="fp8_e4m3", **options) == [reason]
    for advice in reason.partition("give ")[2].split(", ")[:2]:
        name, _, value = advice.partition("=")
        assert plan(DSA, kv_cache_dtype="fp8_e4m3", **options | {name: value}).groups
    for dtype in ("bfloat16", "fp8_e5m2"):  # raw for all
        assert plan(DSA, kv_cache_dtype=dtype, **options).groups
    assert plan(MLA, kv_cache_dtype="fp8_e4m3", attention_backend="trtllm", decode_attention_backend="flashmla").groups


def test_a_backend_of_the_engines_own_reads_what_stands_beside_it():
    own = {"plugin_options": {"cuda": {"backends": ["mine"]}}, "sparse_prefill_backend": "mine"}
    for backend, columns in (("trtllm", 576), ("flashmla_kv", 656)):
        made = plan(DSA, kv_cache_dtype="fp8_e4m3", sparse_decode_backend=backend, **own)
        assert made.groups[0].buffers[0].shape[1:] == (1, columns)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e5m2"])
def test_rows_that_are_raw_anyway_stay_with_the_core(dtype):
    assert pool_of(plan(DSA, kv_cache_dtype=dtype, attention_backend="trtllm")) == ("core", "DSAPool")


def test_raw_rows_on_the_host_and_over_ranks_have_pools_of_their_own():
    raw = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "trtllm"}
    assert pool_of(plan(DSA, hisparse=True, max_running_requests=1, **raw)) == ("cuda", "RawHiSparseDSAPool")


def test_a_device_of_another_vendor_is_not_touched():
    made = plan(DSA, device=AMD, page_size=16, kv_cache_dtype="fp8_e4m3", attention_backend="trtllm")
    assert pool_of(made) == ("core", "DSAPool")
    assert plan(DSA, device=AMD).options.sources["page_size"] == "default"


def capable(*capabilities):
    return msgspec.structs.replace(hooks.device_catalogue()["h200"], name="a card", capabilities=capabilities)


def test_a_device_that_is_too_old_is_refused():
    assert objections(MHA, device=capable("sm_75")) == [
        "a card is sm_75, and kernels are written for sm_80 and later, which have bfloat16 and Triton; give another "
        "device, or budget_bytes in place of a device"
    ]
    assert plan(MHA, device=capable("sm_80")).groups
    assert plan(MHA, device=capable("sm_100")).groups


@pytest.mark.parametrize(
    "option",
    [
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "sparse_prefill_backend",
        "sparse_decode_backend",
    ],
)
def test_a_backend_that_nobody_has_is_refused_with_the_nearest(option):
    """The row of a slot has 576 or 656 bytes by this name."""
    (reason,) = objections(DSA, kv_cache_dtype="fp8_e4m3", **{option: "trtlm"})
    assert reason.startswith(
        f"no attention backend of h200 is called so: {option}=trtlm; did you mean 'trtllm'?; give one of cudnn, "
    )
    assert reason.endswith("or name your own with plugin_options={'cuda': {'backends': ['trtlm']}}")


def test_a_backend_of_the_engine_is_named_by_the_user():
    own = {"cuda": {"backends": ["mine"]}}
    assert plan(MHA, attention_backend="mine", plugin_options=own).groups
    with pytest.raises(kvdock.PlanError, match="cuda has no option 'backend'; did you mean 'backends'"):
        plan(MHA, plugin_options={"cuda": {"backend": ["mine"]}})


PREFILL_ONLY = list(
    itertools.product([True, False], [False, True], [None, 512], ["mha", "mla"], ["fa3", "fa4", "flashinfer"])
)


@pytest.mark.parametrize(("embeds", "radix", "chunk", "kind", "backend"), PREFILL_ONLY)
def test_prefill_without_kv_is_for_embedding_alone(embeds, radix, chunk, kind, backend):
    # P-09
    options = {
        "prefill_only_disable_kv_cache": True,
        "page_size": 16,
        "is_embedding": embeds,
        "prefix_cache": radix,
        "attention_backend": backend,
    } | ({} if chunk is None else {"chunked_prefill_size": chunk})
    layers = [MHA if kind == "mha" else MLA] * 4
    if embeds and not radix and chunk is None and kind == "mha" and backend != "flashinfer":
        made = plan(*layers, **options)
        assert (pool_of(made), made.bytes_per_token.kv) == (("core", "NoOpPool"), 0)
    else:
        with pytest.raises(kvdock.UnsupportedCombination):
            plan(*layers, **options)


def test_no_buffer_has_an_addressing_limit():
    """S-23: the kernels count in 64 bits, so a layer may have more than 2^31 elements and no buffer says otherwise."""
    made = plan(MHA, DSA, page_size=64, kv_cache_dtype="fp8_e4m3", attention_backend="trtllm")
    assert {buffer.max_tensor_bytes for buffer in made.outline.buffers} == {None}
