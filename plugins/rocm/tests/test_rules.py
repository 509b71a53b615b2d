"""What is refused on AMD devices, and what an NVIDIA device of the same torch is spared."""

import kvdock
import pytest
from kvdock.hardware import BACKEND_OPTIONS
from kvdock_rocm import settings

NVIDIA = kvdock.DeviceInfo(
    device_type="cuda",
    name="nvidia",
    total_bytes=2**37,
    free_before_load_bytes=2**37,
    free_bytes=2**37,
    capabilities=("sm_90",),
)


@pytest.mark.parametrize("page_size", [1, 16, 32, 48, 64, 256])
def test_an_indexer_takes_single_tokens_and_multiples_of_16(plan, page_size):
    assert plan("dsa", page_size=page_size).options.values.page_size == page_size


@pytest.mark.parametrize("page_size", [2, 8, 24, 65])
def test_an_indexer_of_other_pages_is_refused(objections, page_size):
    assert objections("dsa", page_size=page_size) == [
        f"page_size={page_size}: ROCm kernels read the index keys of m token by token or in pages of 16, 32, 48 … tokens; "
        "give page_size=1, 16 or 64"
    ]


def test_other_layers_may_have_any_page(plan):
    assert plan("mha", page_size=24).options.values.page_size == 24


@pytest.mark.parametrize("device", ["mi210", "mi300x", "mi325x"])
@pytest.mark.parametrize("dtype", ["fp4", "mxfp8"])
def test_blocks_are_refused_before_gfx950(objections, device, dtype):
    (reason,) = objections("mha", device, kv_cache_dtype=dtype)
    architecture = {"mi210": "gfx90a"}.get(device, "gfx942")
    assert reason == (
        f"kv_cache_dtype={dtype} is no format that {architecture} ({device}) reads: blocks with scales that are powers of "
        "two, of 4 or 8 bits, are read from gfx950 on, others nowhere; give kv_cache_dtype=bfloat16"
    )


@pytest.mark.parametrize("dtype", ["fp4", "mxfp8"])
def test_blocks_are_planned_on_gfx950(plan, dtype):
    (group,) = plan("mha", "mi355x", kv_cache_dtype=dtype).groups
    assert (group.pool_cls.plugin, group.pool_cls.name) == ("core", "BlockMHAPool")


def test_scales_that_are_no_powers_of_two_are_read_nowhere(objections):
    (reason,) = objections("mha", "mi355x", kv_cache_dtype="nvfp4")
    assert reason.startswith("kv_cache_dtype=nvfp4 is no format that gfx950 (mi355x) reads")


def test_index_keys_of_4_bits_are_for_gfx950_alone(plan, objections):
    assert objections("dsa", index_dtype="fp4") == [
        "index_dtype=fp4 keeps index keys in blocks with scales that are powers of two, which are read from gfx950 on, not "
        "on gfx942 (mi300x); give index_dtype=fp8"
    ]
    # 128 columns of 4 bits and 4 scales of a byte, in pages of 16
    index = plan("dsa", "mi355x", page_size=16, index_dtype="fp4").groups[0].buffers[1]
    assert (index.name, index.shape[1:]) == ("index_k", (16 * 68,))


@pytest.mark.parametrize("device", ["mi210", "mi355x"])
def test_an_encoding_of_another_chip_is_refused(objections, device):
    # P-03
    architecture = {"mi210": "gfx90a", "mi355x": "gfx950"}[device]
    tail = (
        f": an encoding of 8 bits that {architecture} ({device}) does not read; give float8_e4m3fn, or, if your kernels "
        "convert what they read, plugin_options={'rocm': {'foreign_floats': True}}"
    )
    foreign = "float8_e4m3fnuz"
    assert objections("mha", device, kv_cache_dtype=foreign) == [f"kv_cache_dtype={foreign}{tail}"]
    assert objections("dsa", device, index_dtype=foreign) == [f"index_dtype={foreign}{tail}"]
    assert objections("dsa", device, kv_cache_dtype="float8_e5m2fnuz", index_dtype=foreign) == [
        f"kv_cache_dtype=float8_e5m2fnuz, index_dtype={foreign}{tail}"
    ]


COMMON = "float8_e4m3fn"
CONVERTS = {"rocm": {"foreign_floats": True}}


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("mha", {"kv_cache_dtype": COMMON}, f"kv_cache_dtype={COMMON}"),
        ("mla", {"kv_cache_dtype": "torch.float8_e5m2"}, "kv_cache_dtype=torch.float8_e5m2"),
        ("dsa", {"index_dtype": COMMON}, f"index_dtype={COMMON}"),
        (
            "dsa",
            {"kv_cache_dtype": COMMON, "index_dtype": COMMON},
            f"kv_cache_dtype={COMMON}, index_dtype={COMMON}",
        ),
        ("mha", {"model_dtype": COMMON}, f"model_dtype={COMMON}"),
    ],
)
def test_the_common_encodings_are_foreign_to_gfx942_unless_kernels_convert_them(plan, objections, kind, options, named):
    # P-03: whatever buffer it is, and whatever option says so
    assert objections(kind, "mi300x", **options) == [
        f"{named}: an encoding of 8 bits that gfx942 (mi300x) does not read; give float8_e4m3fnuz, or, if your kernels "
        "convert what they read, plugin_options={'rocm': {'foreign_floats': True}}"
    ]
    assert plan(kind, "mi300x", plugin_options=CONVERTS, **options).groups
    assert plan(kind, "mi355x", **options).groups


def test_a_short_name_of_the_models_own_type_means_what_the_chip_reads(plan):
    # P-03
    (group,) = plan("mha", "mi300x", model_dtype="fp8").groups
    assert {buffer.dtype for buffer in group.buffers} == {"float8_e4m3fnuz"}


def test_a_draft_does_not_repeat_what_is_said_of_its_target(objections):
    draft = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 64,
        "hidden_size": 128,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    eagle = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    options = {"kv_cache_dtype": COMMON, "max_running_requests": 4, "draft": draft, **eagle}
    assert len(objections("mha", "mi300x", **options)) == 1


@pytest.mark.parametrize(("device", "converted"), [("mi210", True), ("mi250x", True), ("mi300x", False)])
@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_8_bits_are_planned_with_a_warning_where_the_chip_has_none(plan, device, converted, dtype):
    """gfx90a keeps them as bytes and converts each one: half the memory of bfloat16, no time."""
    found = [text for text in plan("mha", device, kv_cache_dtype=dtype).warnings if "floats of 8 bits" in text]
    encoding = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}[dtype]
    assert found == converted * [
        f"{device} has no floats of 8 bits, so each read and write of {encoding} is converted in software: "
        "that saves memory and costs time; kv_cache_dtype=bfloat16 needs no conversion"
    ]
    assert not [text for text in plan("dsa", device).warnings if "floats of 8 bits" in text]
    if converted:
        with pytest.raises(kvdock.PlanError, match=r"strict planning refuses warnings: .* has no floats of 8 bits"):
            plan("mha", device, kv_cache_dtype=dtype, strict=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"sparse_prefill_backend": "tilelang", "sparse_decode_backend": "triton"},
            "sparse_prefill_backend=tilelang reads rows of m without scales, sparse_decode_backend=triton rows with scales, "
            "and with kv_cache_dtype=fp8 there is one or the other; give sparse_decode_backend=tilelang, "
            "sparse_prefill_backend=triton, or kv_cache_dtype=bfloat16",
        ),
        (
            {"attention_backend": "triton", "sparse_decode_backend": "aiter"},
            "sparse_decode_backend=aiter reads rows of m without scales, attention_backend=triton rows with scales, "
            "and with kv_cache_dtype=fp8 there is one or the other; give sparse_prefill_backend=aiter, "
            "sparse_decode_backend=triton, or kv_cache_dtype=bfloat16",
        ),
    ],
)
@pytest.mark.parametrize("device", ["mi300x", "mi355x"])
def test_backends_that_read_different_rows_are_refused_together(plan, objections, device, options, reason):
    assert objections("dsa", device, kv_cache_dtype="fp8", **options) == [reason]
    raw, scaled = reason.partition("give ")[2].split(", ")[:2]
    for advice in (raw, scaled):
        name, _, value = advice.partition("=")
        assert plan("dsa", device, kv_cache_dtype="fp8", **options | {name: value}).groups
    assert plan("dsa", device, kv_cache_dtype="bfloat16", **options).groups
    assert plan("dsa", device, kv_cache_dtype="fp8_e5m2", **options).groups  # raw for all
    assert plan("mla", device, kv_cache_dtype="fp8", attention_backend="tilelang").groups


def test_a_backend_of_the_engines_own_reads_what_stands_beside_it(plan):
    own = {"plugin_options": {"rocm": {"backends": ["mine"]}}, "sparse_prefill_backend": "mine"}
    for backend, columns in (("aiter", 576), ("triton", 656)):
        made = plan("dsa", kv_cache_dtype="fp8", sparse_decode_backend=backend, **own)
        assert made.groups[0].buffers[0].shape[1:] == (1, columns)


@pytest.mark.parametrize("option", BACKEND_OPTIONS)
def test_a_backend_that_nobody_has_is_refused_with_the_nearest(objections, option):
    (reason,) = objections("mha", **{option: "aitr"})
    assert reason.startswith(
        f"no attention backend of mi300x is called so: {option}=aitr; did you mean 'aiter'?; give one of aiter, "
    )
    assert reason.endswith("or name your own with plugin_options={'rocm': {'backends': ['aitr']}}")


def test_a_backend_of_the_engines_own_is_taken_when_it_is_named(plan, objections):
    own = {"rocm": {"backends": ["mine"]}}
    assert plan("mha", attention_backend="mine", plugin_options=own).groups
    (reason,) = objections("mha", attention_backend="yours", decode_attention_backend="mine", plugin_options=own)
    assert "attention_backend=yours; " in reason
    assert "decode_attention_backend" not in reason


@pytest.mark.parametrize("backend", ["aiter", "triton", "tilelang", "wave", "torch", "torch_native"])
def test_backends_that_engines_have_are_known(plan, backend):
    assert plan("mha", attention_backend=backend).groups


def test_all_that_is_wrong_is_said_at_once(objections):
    reasons = objections(
        "dsa", page_size=24, kv_cache_dtype="mxfp8", index_dtype="fp4", attention_backend="fa3", device="mi300x"
    )
    starts = ["no attention backend", "page_size=24", "kv_cache_dtype=mxfp8", "index_dtype=fp4"]
    assert [start for reason, start in zip(reasons, starts, strict=True) if reason.startswith(start)] == starts


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"wide_offset": True}, "rocm has no option 'wide_offset'; did you mean 'wide_offsets'?; there are backends,"),
        (
            {"wide_offsets": 1},
            "rocm takes backends, a list of names, and wide_offsets and foreign_floats, true or false: Expected `bool",
        ),
        (
            {"backends": "mine"},
            "rocm takes backends, a list of names, and wide_offsets and foreign_floats, true or false: Expected `array",
        ),
    ],
)
def test_options_that_do_not_exist_are_refused(given, reason):
    with pytest.raises(kvdock.PlanError) as caught:
        settings.of(kvdock.CacheOptions(plugin_options={"rocm": given}))
    assert str(caught.value).startswith(f"plugin_options: {reason}")


def test_a_device_of_another_vendor_is_not_touched(plan):
    made = plan("dsa", NVIDIA, page_size=24, kv_cache_dtype="fp8_e4m3", attention_backend="fa3")
    (group,) = made.groups
    assert (group.pool_cls.plugin, group.pool_cls.name) == ("core", "DSAPool")
    assert "index_dtype" not in made.options.sources or made.options.sources["index_dtype"] == "default"


@pytest.mark.parametrize("device", ["mi210", "mi300x", "mi355x"])
@pytest.mark.parametrize("backend", ["aiter", "triton", "ck"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("embeds", [True, False])
def test_no_backend_prefills_without_a_cache(plan, device, backend, kind, embeds):
    # P-09: the plugin widens nothing, so even embedding without prefixes or chunks is refused
    asked = {"prefill_only_disable_kv_cache": True, "prefix_cache": False, "is_embedding": embeds, "page_size": 16}
    with pytest.raises(
        kvdock.UnsupportedCombination, match=rf"no attention backend of {device} is known to work without"
    ):
        plan(kind, device, attention_backend=backend, **asked)
