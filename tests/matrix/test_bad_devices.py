"""A device that is not there, is too old, or is another vendor's: one line, over the command line and in Python.

The torch is made up, the plugins are those that are installed. Nothing is ever planned or built on the CPU instead.
"""

import sys
import types
from pathlib import Path

import kvdock
import pytest
from click.testing import CliRunner
from kvdock.cli import main

MODEL = str(Path(__file__).parents[2] / "tests" / "models" / "llama-3.1-8b.json")
GIB = 2**30


def made_up(*, cuda=None, hip=None, count=1, init=None, capability=(9, 0), architecture="gfx942", built=()):
    """A torch that is a build for `cuda`, for `hip`, or for CPUs alone, and finds `count` devices."""

    def start():
        if init is not None:
            raise RuntimeError(init)

    return types.SimpleNamespace(
        __version__="2.9.0+made.up",
        set_num_threads=lambda count: None,
        version=types.SimpleNamespace(cuda=cuda, hip=hip),
        cuda=types.SimpleNamespace(
            init=start,
            device_count=lambda: count,
            current_device=lambda: 0,
            mem_get_info=lambda index: (60 * GIB, 64 * GIB),
            memory_reserved=lambda index: 0,
            get_device_name=lambda index: "Made-Up",
            get_device_capability=lambda index: capability,
            get_device_properties=lambda index: types.SimpleNamespace(gcnArchName=architecture),
            get_arch_list=lambda: list(built),
        ),
    )


NVIDIA, AMD = {"cuda": "12.8"}, {"hip": "6.4"}
NO_DRIVER = "Found no NVIDIA driver on your system.\nPlease check"
REFUSED = {
    "built for CPUs": ({}, "cuda:0", "no CUDA device can be used: torch 2.9.0+made.up is a build for CPUs alone"),
    "built for CPUs, rocm": ({}, "rocm:0", "no ROCm device can be used: torch 2.9.0+made.up is a build for CPUs alone"),
    "built for AMD": (AMD, "cuda:0", "no CUDA device can be used: torch 2.9.0+made.up is a build for ROCm 6.4, which"),
    "built for NVIDIA": (NVIDIA, "rocm", "no ROCm device can be used: torch 2.9.0+made.up is a build for CUDA 12.8,"),
    "no driver": (
        {**NVIDIA, "count": 0, "init": NO_DRIVER},
        "cuda",
        "torch 2.9.0+made.up finds no CUDA device: Found no NVIDIA driver on your system; a profile",
    ),
    "no device": ({**AMD, "count": 0}, "rocm:0", "torch 2.9.0+made.up finds no ROCm device: the driver shows none"),
    "no such ordinal": (NVIDIA, "cuda:3", "no device cuda:3 is here: torch finds only cuda:0"),
    "no such ordinal, rocm": ({**AMD, "count": 8}, "rocm:8", "no device rocm:8 is here: torch finds rocm:0 to rocm:7"),
    "too old for this torch": (
        {**NVIDIA, "capability": (7, 0), "built": ("sm_80", "sm_90")},
        "cuda:0",
        "device cuda:0 is sm_70, and torch 2.9.0+made.up has no code for it (the oldest: sm_80)",
    ),
    "too old for kernels": (
        {**NVIDIA, "capability": (7, 5), "built": ("sm_75", "sm_80")},
        "cuda:0",
        "this combination of model, device and options is refused: cuda: Made-Up is sm_75, and kernels are written for",
    ),
    "too old for this torch, rocm": (
        {**AMD, "architecture": "gfx906", "built": ("gfx9-4-generic", "gfx90a")},
        "rocm:0",
        "device rocm:0 is gfx906, and torch 2.9.0+made.up has no code for it (for gfx9-4-generic, gfx90a alone)",
    ),
    "a name of the other vendor": (NVIDIA, "rocm:h200", "device 'rocm:h200' is not here (plugin 'rocm' lists"),
    "several names": (
        NVIDIA,
        "h200,b200",
        "device='h200,b200' names several, and a plan is for one; give one of them, or compare them with --compare "
        "device=h200,b200",
    ),
    "another model of a device": (NVIDIA, "h800", "no device is called 'h800' (known: "),
}


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize("case", REFUSED)
def test_one_line_says_why_a_device_cannot_serve(monkeypatch, command, case):
    # L-02
    torch, selector, why = REFUSED[case]
    monkeypatch.setitem(sys.modules, "torch", made_up(**torch))
    done = CliRunner().invoke(main, [command, MODEL, "--device", selector])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"kvdock: {why}")
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("case", REFUSED)
def test_in_python_it_is_an_error_of_kvdock(monkeypatch, case):
    # L-02
    torch, selector, why = REFUSED[case]
    monkeypatch.setitem(sys.modules, "torch", made_up(**torch))
    with pytest.raises(kvdock.KVDockError) as caught:
        kvdock.plan(MODEL, device=selector)
    assert " ".join(str(caught.value).split()).startswith(why)


@pytest.mark.parametrize("device", ["cuda:0", "rocm:0"])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_without_torch_no_live_device_is_planned_for(monkeypatch, command, device):
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(main, [command, MODEL, "--device", device])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "torch" in done.stderr


@pytest.mark.filterwarnings("default::kvdock.plugins.loading.PluginWarning")
@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_hardware_that_is_asked_for_by_name_is_never_the_cpu(monkeypatch, name):
    # L-02
    monkeypatch.setitem(sys.modules, "torch", made_up())
    planned = CliRunner().invoke(main, ["plan", MODEL, "--plugin", name])
    assert (planned.exit_code, planned.stdout) == (2, "")
    assert planned.stderr.splitlines()[-1].startswith("kvdock: no accelerator is here; name one with device=")
    ran = CliRunner().invoke(main, ["run", MODEL, "--plugin", name])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr == (
        f"kvdock: --plugin {name} asks for hardware, and no device is named to run on; give --device {name}:0, or "
        "--device cpu\n"
    )


def test_slips_of_a_name_are_told_and_other_devices_never_suggested():
    told = {
        "H200": "did you mean 'h200'?",
        "a100": "did you mean 'a100-40gb'?",
        "mi300": "did you mean 'mi300x'?",
        "cuda:b20": "is not here (plugin",
        **dict.fromkeys(["h20", "h800", "gb200", "b300", "v100", "mi100", "rtx3090", "tpu", "gpu"], " (known: "),
    }
    for name, text in told.items():
        with pytest.raises(kvdock.PlanError) as caught:
            kvdock.plan(MODEL, device=name)
        assert text in str(caught.value)
        assert ("did you mean" in str(caught.value)) == text.startswith("did you mean")
