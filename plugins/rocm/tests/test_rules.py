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
        f": the encoding of gfx942, which {architecture} ({device}) does not read; give fp8_e4m3 or fp8_e5m2, which mean "
        "the device's own"
    )
    foreign = "float8_e4m3fnuz"
    assert objections("mha", device, kv_cache_dtype=foreign) == [f"kv_cache_dtype={foreign}{tail}"]
    assert objections("dsa", device, index_dtype=foreign) == [f"index_dtype={foreign}{tail}"]
    assert objections("dsa", device, kv_cache_dtype="float8_e5m2fnuz", index_dtype=foreign) == [
        f"kv_cache_dtype=float8_e5m2fnuz, index_dtype={foreign}{tail}"
    ]


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
        ({"wide_offsets": 1}, "rocm takes backends, a list of names, and wide_offsets, true or false: Expected `bool"),
        (
            {"backends": "mine"},
            "rocm takes backends, a list of names, and wide_offsets, true or false: Expected `array",
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
