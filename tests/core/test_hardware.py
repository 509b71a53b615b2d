"""What plugins of hardware share, asked with a plugin and a module of devices that are made up."""

import types

import msgspec
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.hardware import LiveDevices, first_line, is_ordinal, live_memory, plugin_settings
from kvdock.options import CacheOptions

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
