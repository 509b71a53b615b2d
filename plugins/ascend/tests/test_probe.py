"""Probing through a torch that is made up: what it is asked, and the one line where there is no device."""

import sys
import types

import pytest
from kvdock import PlanError
from kvdock_ascend import hooks, ops, probe

GIB = 2**30
PROFILE = "; a profile such as 910b-64gb plans without a device"


def fake_torch(*, count=2, memory=(50 * GIB, 61 * GIB), held=0, name="Ascend910B3"):
    """A torch of `count` devices; what takes an ordinal refuses anything but one of them, given as a number."""

    def of_device(answer):
        def ask(index):
            assert type(index) is int and 0 <= index < count
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    return types.SimpleNamespace(
        __version__="2.7.1+made.up",
        npu=types.SimpleNamespace(
            device_count=lambda: count,
            current_device=lambda: 1,
            mem_get_info=of_device(memory),
            memory_reserved=of_device(held),
            get_device_name=of_device(name),
        ),
    )


def test_a_device_is_described_by_its_ordinal():
    found = probe.find(fake_torch(held=8 * GIB), "0")
    assert (found.device_type, found.name, found.index) == ("npu", "Ascend910B3", 0)
    assert (found.free_bytes, found.free_before_load_bytes, found.total_bytes) == (50 * GIB, 58 * GIB, 61 * GIB)
    assert found.capabilities == ("Ascend910B3",)
    assert found.granularity_bytes == 2 * 2**20


def test_without_an_ordinal_it_is_the_current_device():
    assert probe.find(fake_torch(), "").index == 1


def test_memory_that_torch_holds_never_makes_more_than_there_is():
    assert probe.find(fake_torch(held=60 * GIB), "0").free_before_load_bytes == 61 * GIB


def test_a_device_without_a_name_gets_one():
    assert probe.find(fake_torch(name=""), "0").name == "ascend:0"


@pytest.mark.parametrize(
    ("torch", "selector", "message"),
    [
        (fake_torch(count=0), "0", "torch_npu finds no Ascend device; look at npu-smi info" + PROFILE),
        (fake_torch(), "2", "no device ascend:2 is here: torch_npu finds ascend:0 to ascend:1"),
        (fake_torch(count=1), "1", "no device ascend:1 is here: torch_npu finds only ascend:0"),
        (
            fake_torch(memory=RuntimeError("driver went away.\nmore")),
            "0",
            "no device ascend:0 can be used here: driver went away" + PROFILE,
        ),
    ],
)
def test_a_failure_is_one_line(torch, selector, message):
    with pytest.raises(PlanError) as caught:
        probe.find(torch, selector)
    assert str(caught.value) == message


def test_without_torch_the_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PlanError, match=r"^no Ascend device can be used without torch \(.*; a profile such as"):
        hooks.probe_device("0")


def test_without_torch_npu_the_line_says_so(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(PlanError, match=r"without torch_npu \(.*install the torch_npu that belongs to torch \d"):
        hooks.probe_device("")
    with pytest.raises(PlanError, match="without torch_npu"):
        ops.load()
    with pytest.raises(PlanError, match="without torch_npu"):
        hooks.get_kernels(hooks.device_catalogue()["910c"])


@pytest.mark.parametrize("selector", ["910b-64gb", "x", "٣"])
def test_what_is_no_number_is_no_live_device(selector):
    assert hooks.probe_device(selector) is None
