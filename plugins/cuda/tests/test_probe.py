"""Probing through a torch that is made up: what it is asked, and the one line where there is no device."""

import subprocess
import sys
import types

import pytest
from kvdock import PlanError
from kvdock_cuda import hooks, probe

GIB = 2**30


def fake_torch(
    *,
    count=2,
    cuda="12.8",
    hip=None,
    init_error=None,
    memory=(100 * GIB, 140 * GIB),
    held=0,
    major=9,
    built=("sm_80", "sm_90", "sm_100"),
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
            get_device_name=of_device(lambda index: f"NVIDIA Made-Up {index}"),
            get_device_capability=of_device(lambda index: (major, 0)),
            get_arch_list=lambda: list(built),
        ),
    )


def test_a_device_is_described_by_its_ordinal():
    found = probe.find(fake_torch(), "0")
    assert (found.device_type, found.index, found.name) == ("cuda", 0, "NVIDIA Made-Up 0")
    assert (found.free_bytes, found.total_bytes) == (107_374_182_400, 150_323_855_360)
    assert found.granularity_bytes == 2_097_152
    assert found.capabilities == ("sm_90", "skip_kv_cache:fa3", "skip_kv_cache:fa4", "software_blocks8", "memory_saver")
    assert found.source == "torch.cuda.mem_get_info of torch 2.9.0+made.up"


def test_without_an_ordinal_it_is_the_current_device():
    assert probe.find(fake_torch(), "").index == 1


def test_what_torch_holds_counts_as_free_before_loading():
    """30 GiB of weights are loaded: 100 GiB are free now, 130 were before."""
    found = probe.find(fake_torch(held=30 * GIB), "0")
    assert (found.free_bytes, found.free_before_load_bytes) == (100 * GIB, 130 * GIB)


def test_free_memory_of_the_host_does_not_exceed_the_device():
    found = probe.find(fake_torch(memory=(120 * GIB, 62 * GIB), held=GIB), "0")
    assert found.free_bytes == found.free_before_load_bytes == found.total_bytes == 62 * GIB


def test_a_newer_device_has_4_bits_and_another_backend():
    assert probe.find(fake_torch(major=10), "0").capabilities == ("sm_100", "skip_kv_cache:fa4", "fp4", "memory_saver")


@pytest.mark.parametrize(
    ("torch", "selector", "line"),
    [
        (
            fake_torch(cuda=None),
            "0",
            "no CUDA device can be used: torch 2.9.0+made.up is a build for CPUs alone; "
            "a profile such as h200 plans without a device",
        ),
        (
            fake_torch(cuda=None, hip="6.4"),
            "",
            "no CUDA device can be used: torch 2.9.0+made.up is a build for ROCm 6.4, which kvdock-rocm probes as "
            "rocm:0; a profile such as h200 plans without a device",
        ),
        (
            fake_torch(count=0, init_error="Found no NVIDIA driver on your system.\nPlease check"),
            "0",
            "torch 2.9.0+made.up finds no CUDA device: Found no NVIDIA driver on your system; "
            "a profile such as h200 plans without a device",
        ),
        (
            fake_torch(count=0),
            "0",
            "torch 2.9.0+made.up finds no CUDA device: the driver shows none; a profile such as h200 plans without "
            "a device",
        ),
        (fake_torch(), "2", "no device cuda:2 is here: torch finds cuda:0 to cuda:1"),
        (fake_torch(count=1), "7", "no device cuda:7 is here: torch finds only cuda:0"),
        (
            fake_torch(memory=RuntimeError("CUDA error: device busy\nmore")),
            "1",
            "no device cuda:1 can be used here: CUDA error: device busy; a profile such as h200 plans without a device",
        ),
    ],
    ids=["cpu", "rocm", "driver", "none", "index", "one", "busy"],
)
def test_why_there_is_no_device_is_one_line(torch, selector, line):
    with pytest.raises(PlanError) as caught:
        probe.find(torch, selector)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("major", "built"),
    [
        (9, ("sm_80", "sm_90")),
        (9, ("sm_90a",)),
        (10, ("sm_80", "compute_90")),  # compiled anew for what is later
        (12, ("sm_120f",)),
        (5, ()),  # a torch that tells nothing
    ],
)
def test_torch_has_code_for_a_device(major, built):
    assert probe.find(fake_torch(major=major, built=built), "0").capabilities[0] == f"sm_{major}0"


@pytest.mark.parametrize(
    ("major", "built"),
    [(7, ("sm_80", "sm_90", "compute_90")), (12, ("sm_80", "sm_90")), (12, ("sm_80", "sm_90a", "compute_90a"))],
)
def test_a_device_that_torch_has_no_code_for_is_refused(major, built):
    with pytest.raises(PlanError) as caught:
        probe.find(fake_torch(major=major, built=built), "0")
    assert str(caught.value) == (
        f"device cuda:0 is sm_{major}0, and torch 2.9.0+made.up has no code for it (the oldest: sm_80); install one that "
        "has; a profile such as h200 plans without a device"
    )


@pytest.mark.parametrize("selector", ["h200", "-1", "0x1", "٣", " "])
def test_a_selector_that_is_no_number_is_no_live_device(selector):
    assert hooks.probe_device(selector) is None


def test_the_hook_probes_the_torch_that_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert hooks.probe_device("1").name == "NVIDIA Made-Up 1"


def test_without_torch_the_hook_says_so():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvdock import PlanError; from kvdock_cuda import hooks\n"
        "try: hooks.probe_device('0')\n"
        "except PlanError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no CUDA device can be probed without torch (")
    assert done.stdout.endswith("; a profile such as h200 plans without a device\n")
