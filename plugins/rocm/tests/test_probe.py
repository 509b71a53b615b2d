"""Probing through a torch that is made up: what it is asked, and the one line where there is no device."""

import subprocess
import sys
import types

import pytest
from kvdock import PlanError
from kvdock_rocm import hooks, probe

GIB = 2**30
PROFILE = "a profile such as mi300x plans without a device"


def fake_torch(
    *,
    count=2,
    cuda=None,
    hip="6.4.2",
    init_error=None,
    memory=(100 * GIB, 192 * GIB),
    held=0,
    architecture="gfx942:sramecc+:xnack-",
    built=("gfx90a", "gfx942", "gfx950"),
    name="AMD Made-Up",
):
    """A torch of `count` devices; what takes an ordinal refuses anything but one of them, given as a number."""

    def of_device(answer):
        def ask(index):
            assert type(index) is int and 0 <= index < count
            return answer(index)

        return ask

    def init():
        if init_error is not None:
            raise RuntimeError(init_error)

    def mem_get_info(index):
        if isinstance(memory, Exception):
            raise memory
        return memory

    return types.SimpleNamespace(
        __version__="2.9.0+made.up",
        version=types.SimpleNamespace(cuda=cuda, hip=hip),
        cuda=types.SimpleNamespace(
            init=init,
            device_count=lambda: count,
            current_device=lambda: 1,
            mem_get_info=of_device(mem_get_info),
            memory_reserved=of_device(lambda index: held),
            get_device_name=of_device(lambda index: name and f"{name} {index}"),
            get_device_properties=of_device(lambda index: types.SimpleNamespace(gcnArchName=architecture)),
            get_arch_list=lambda: list(built),
        ),
    )


def test_a_device_is_described_by_its_ordinal():
    found = probe.find(fake_torch(), "0")
    assert (found.device_type, found.name, found.index) == ("cuda", "AMD Made-Up 0", 0)
    assert (found.total_bytes, found.free_before_load_bytes, found.free_bytes) == (192 * GIB, 100 * GIB, 100 * GIB)
    assert (found.capabilities, found.granularity_bytes) == (("gfx942",), 2 * 2**20)
    assert found.source == "torch.cuda.mem_get_info of torch 2.9.0+made.up"


def test_without_an_ordinal_it_is_the_current_device():
    assert probe.find(fake_torch(), "").index == 1


def test_weights_that_are_loaded_were_free_before():
    found = probe.find(fake_torch(held=30 * GIB), "0")
    assert (found.free_before_load_bytes, found.free_bytes) == (130 * GIB, 100 * GIB)


def test_free_memory_never_exceeds_the_total():
    """An integrated device counts what the host has free."""
    found = probe.find(fake_torch(memory=(300 * GIB, 128 * GIB), held=GIB), "0")
    assert (found.free_before_load_bytes, found.free_bytes, found.total_bytes) == (128 * GIB, 128 * GIB, 128 * GIB)


def test_a_device_without_a_name_is_called_by_its_architecture():
    assert probe.find(fake_torch(name=""), "1").name == "gfx942 (rocm:1)"


@pytest.mark.parametrize(
    ("torch", "selector", "line"),
    [
        (
            fake_torch(hip=None),
            "0",
            f"no ROCm device can be used: torch 2.9.0+made.up is a build for CPUs alone; {PROFILE}",
        ),
        (
            fake_torch(hip=None, cuda="12.8"),
            "",
            "no ROCm device can be used: torch 2.9.0+made.up is a build for CUDA 12.8, which kvdock-cuda probes as "
            f"cuda:0; {PROFILE}",
        ),
        (
            fake_torch(count=0, init_error="No HIP GPUs are available\nmore"),
            "0",
            f"torch 2.9.0+made.up finds no ROCm device: No HIP GPUs are available; {PROFILE}",
        ),
        (
            fake_torch(count=0),
            "0",
            f"torch 2.9.0+made.up finds no ROCm device: the driver shows none; {PROFILE}",
        ),
        (fake_torch(), "2", "no device rocm:2 is here: torch finds rocm:0 to rocm:1"),
        (fake_torch(count=1), "7", "no device rocm:7 is here: torch finds only rocm:0"),
        (
            fake_torch(memory=RuntimeError("HIP error: device busy.\nmore")),
            "1",
            f"no device rocm:1 can be used here: HIP error: device busy; {PROFILE}",
        ),
        (
            fake_torch(architecture="gfx1201", built=("gfx942", "gfx90a")),
            "0",
            "device rocm:0 is gfx1201, and torch 2.9.0+made.up has no code for it (for gfx90a, gfx942 alone); install "
            f"one that has; {PROFILE}",
        ),
        (
            fake_torch(architecture="gfx90a", built=("gfx9-generic", "gfx9-4-generic")),
            "0",
            "device rocm:0 is gfx90a, and torch 2.9.0+made.up has no code for it (for gfx9-4-generic, gfx9-generic alone); "
            f"install one that has; {PROFILE}",
        ),
    ],
    ids=["cpu", "cuda", "driver", "none", "index", "one", "busy", "architecture", "generic"],
)
def test_why_there_is_no_device_is_one_line(torch, selector, line):
    with pytest.raises(PlanError) as caught:
        probe.find(torch, selector)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("architecture", "built"),
    [
        ("gfx942", ("gfx942:sramecc+:xnack-",)),
        ("gfx942", ("gfx9-4-generic",)),
        ("gfx1201", ("gfx942", "gfx12-generic")),
        ("gfx1201", ()),  # a torch that tells nothing
    ],
)
def test_torch_has_code_for_a_device(architecture, built):
    assert probe.find(fake_torch(architecture=architecture, built=built), "0").capabilities == (architecture,)


@pytest.mark.parametrize("selector", ["mi300x", "-1", "0x1", "٣", " "])
def test_a_selector_that_is_no_number_is_no_live_device(selector):
    assert hooks.probe_device(selector) is None


def test_the_hook_probes_the_torch_that_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert hooks.probe_device("1").name == "AMD Made-Up 1"


def test_without_torch_the_hook_says_so():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvdock import PlanError; from kvdock_rocm import hooks\n"
        "try: hooks.probe_device('0')\n"
        "except PlanError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no ROCm device can be probed without torch (")
    assert done.stdout.endswith(f"; {PROFILE}\n")
