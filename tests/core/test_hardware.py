"""What plugins of hardware share, asked with a plugin and a module of devices that are made up."""

import types

import msgspec
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, nearest_model
from kvdock.hardware import (
    LiveDevices,
    conversion_warnings,
    first_line,
    foreign_floats,
    is_ordinal,
    live_memory,
    plugin_settings,
    sparse_backends,
)
from kvdock.layout import Buffer
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import CacheOptions, Parallelism
from kvdock.queries import PlanQuery

DEVICES = LiveDevices("acme", "the SDK", "a profile plans without one")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    backends: tuple[str, ...] = ()
    fast: bool = False


def settings(**given):
    options = CacheOptions(plugin_options={"acme": given, "other": {"fast": 7}})
    return plugin_settings(options, "acme", Settings, takes="backends, a list, and fast, true or false")


def api(count=2, driver=None, memory=(5, 9), held=0):
    def init():
        if driver is not None:
            raise RuntimeError(driver)

    return types.SimpleNamespace(
        device_count=lambda: count,
        current_device=lambda: 1,
        init=init,
        mem_get_info=lambda index: memory,
        memory_reserved=lambda index: held,
    )


def describe(index):
    return DeviceInfo(
        device_type="acme", name=f"acme {index}", total_bytes=9, free_before_load_bytes=9, free_bytes=5, index=index
    )


def find(selector, module=None):
    found = module or api()
    return DEVICES.find(found, selector, lambda: DEVICES.counted(found, "there is none"), describe)


def test_a_plugin_reads_its_own_options_alone():
    assert settings(backends=["a"]) == Settings(backends=("a",), fast=False)
    assert plugin_settings(CacheOptions(), "acme", Settings, takes="") == Settings()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"fats": True}, "acme has no option 'fats'; did you mean 'fast'?; there are backends, fast"),
        ({"fast": "no"}, "acme takes backends, a list, and fast, true or false: "),
    ],
)
def test_an_option_that_it_does_not_have_or_take_is_named(given, told):
    with pytest.raises(PlanError) as error:
        settings(**given)
    assert told in str(error.value)


def test_a_selector_is_a_live_device_if_it_is_empty_or_an_ordinal():
    assert [is_ordinal(text) for text in ("", "0", "12", "x", "-1", "1.0", "²", "٣")] == [True] * 3 + [False] * 5


def test_a_device_is_found_by_its_ordinal_or_is_the_current_one():
    assert (find("0").index, find("").index) == (0, 1)


@pytest.mark.parametrize(
    ("module", "selector", "told"),
    [
        (api(count=1), "3", "no device acme:3 is here: the SDK finds only acme:0"),
        (api(count=4), "4", "no device acme:4 is here: the SDK finds acme:0 to acme:3"),
        (api(count=0), "", "there is none: the driver shows none; a profile plans without one"),
        (api(count=0, driver="too old.\nmore"), "", "there is none: too old; a profile plans without one"),
    ],
)
def test_one_line_says_why_there_is_no_such_device(module, selector, told):
    with pytest.raises(PlanError) as error:
        find(selector, module)
    assert str(error.value) == told


def test_a_device_that_fails_when_it_is_asked_is_named():
    def fail(index):
        raise RuntimeError("ECC error.\nsee the log")

    with pytest.raises(PlanError, match=r"^no device acme:1 can be used here: ECC error; a profile plans without one$"):
        DEVICES.find(api(), "1", lambda: 2, fail)


def test_what_torch_holds_counts_as_free_before_loading_and_no_more_than_all_is_free():
    assert live_memory(api(held=2), 0) == {"total_bytes": 9, "free_before_load_bytes": 7, "free_bytes": 5}
    assert live_memory(api(held=8), 0)["free_before_load_bytes"] == 9
    assert live_memory(api(memory=(12, 9), held=1), 0) == {
        "total_bytes": 9,
        "free_before_load_bytes": 9,
        "free_bytes": 9,
    }


def test_an_error_without_words_is_named_by_its_kind():
    assert first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("turbo_fast", "turbo_fast"),
        ("TURBO-FAST", "turbo_fast"),
        ("turbo", "turbo_fast"),  # its beginning
        ("tubro_fast", "turbo_fast"),  # swapped
        ("turb_fast", "turbo_fast"),  # left out
        ("flash2", "flash2"),
        ("flsh2", "flash2"),
        ("ab-100", "ab-100-40gb"),
    ],
)
def test_a_slip_of_a_name_is_told(name, meant):
    assert nearest_model(name, ["flash2", "turbo_fast", "ab-100-40gb"]) == f"; did you mean {meant!r}?"


@pytest.mark.parametrize("name", ["flash3", "flash22", "ab-10", "ab-200", "xab-100-40gb", "gpu", "slash2", "", "7"])
def test_another_version_or_model_is_never_suggested(name):
    assert nearest_model(name, ["flash2", "turbo_fast", "ab-100-40gb", "cpu"]) == ""


def layout(**options):
    """Return the question about a plan whose keys are of one encoding and whose index keys of another."""
    buffers = (
        Buffer(name="k", role="key", shape=(8,), dtype="float8_e4m3fn", owner="full"),
        Buffer(name="v", role="value", shape=(8,), dtype="bfloat16", owner="full"),
        Buffer(name="index_k", role="index", shape=(8,), dtype="uint8", element="float8_e5m2", owner="full"),
    )
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8))
    model = ModelSpec(name="m", architecture="A", layers=(layer,), context_length=64, dtype="bfloat16")
    return PlanQuery(
        model=model,
        options=CacheOptions(**options),
        parallel=Parallelism(),
        device=describe(0),
        groups=(),
        spaces={},
        buffers=buffers,
    )


def test_every_buffer_is_judged_and_named_by_the_option_that_says_its_encoding():
    asked = layout(kv_cache_dtype="fp8", index_dtype="torch.float8_e5m2")
    assert foreign_floats(asked, ("float8_e4m3fn", "float8_e5m2")) == ""
    assert foreign_floats(asked, ("float8_e5m2",)) == "kv_cache_dtype=fp8"
    assert foreign_floats(asked, ()) == "kv_cache_dtype=fp8, index_dtype=torch.float8_e5m2"
    assert foreign_floats(layout(model_dtype="fp8"), ("float8_e5m2",)) == "model_dtype=fp8"
    assert foreign_floats(layout(index_dtype="auto"), ("float8_e4m3fn",)) == "buffer 'index_k' of 'full' in float8_e5m2"


def test_keys_in_8_bits_are_warned_of_where_the_device_has_none_and_index_keys_have_no_choice():
    able, plain = msgspec.structs.replace(describe(0), capabilities=("software_float8",)), describe(0)
    keys, _, index = layout().buffers
    (warning,) = conversion_warnings(able, (keys, index))
    assert warning.startswith("acme 0 has no floats of 8 bits, so each read and write of float8_e4m3fn is converted in")
    assert conversion_warnings(able, (index,)) == conversion_warnings(plain, (keys, index)) == ()


def test_blocks_of_8_bits_are_warned_of_where_the_device_scales_none():
    device = msgspec.structs.replace(describe(0), capabilities=("software_blocks8",))
    keys, _, index = layout().buffers
    scales = Buffer(name="k_scale", role="scale", shape=(1,), dtype="float8_e8m0fnu", owner="full")
    (warning,) = conversion_warnings(device, (keys, scales))
    assert warning.startswith("acme 0 has no blocks of 8-bit floats with a scale that is a power of two, so each read")
    assert "float8_e4m3fn in blocks is converted in software" in warning
    assert conversion_warnings(device, (keys, index)) == conversion_warnings(device, (scales,)) == ()
    assert conversion_warnings(describe(0), (keys, scales)) == ()


def test_the_backend_of_sparse_layers_is_the_first_that_is_named():
    assert sparse_backends(CacheOptions()) == (("sparse_prefill_backend", None), ("sparse_decode_backend", None))
    given = CacheOptions(attention_backend="a", prefill_attention_backend="b", sparse_decode_backend="c")
    assert sparse_backends(given) == (("prefill_attention_backend", "b"), ("sparse_decode_backend", "c"))
