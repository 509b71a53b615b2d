"""Kernels compile for every target without a device, and keep what they hold in registers."""

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from kvdock.kernels import triton_slots  # noqa: E402
from kvdock.kernels.triton_specimens import SLOT_SPECIMENS, all_specimens  # noqa: E402
from kvdock.testing import compiled  # noqa: E402

MODULES = sorted(path.stem for path in Path(triton_slots.__file__).parent.glob("triton_*.py"))
DUMP = """Resource usage:
 Common:
  GLOBAL:0
 Function extend_kernel:
  REG:80 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:960 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
ASSEMBLY = """amdhsa.kernels:
  - .agpr_count:     0
    .sgpr_count:     30
    .sgpr_spill_count: 2
    .vgpr_count:     40
    .vgpr_spill_count: 3
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What comes of every specimen and target; compiled in a process of its own, since this one may interpret."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))
    command = [sys.executable, "-m", "kvdock.testing.compiled", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_specimen_compiles(report):
    names = [specimen.name for specimen in all_specimens()]
    assert [line for line in report if line["error"]] == []
    pairs = [(line["specimen"], line["target"]) for line in report]
    assert pairs == [(names[place], target.name) for place, target in compiled.chosen()]
    assert {name for name, target in pairs if target == "cuda:80"} == set(names)
    assert {name for name, target in pairs if target == "hip:gfx942"} == set(names)


def test_names_of_specimens_differ():
    names = [specimen.name for specimen in all_specimens()]
    assert len(set(names)) == len(names)


def test_every_target_gets_every_kernel():
    kernels = {specimen.kernel.__name__ for specimen in all_specimens()}
    found = {(all_specimens()[place].kernel.__name__, target) for place, target in compiled.chosen()}
    assert found == {(kernel, target) for kernel in kernels for target in compiled.TARGETS}
    assert len(compiled.chosen(every=True)) == len(all_specimens()) * len(compiled.TARGETS)


def test_nothing_spills(report):
    spilled = [line for line in report if line["usage"] and compiled.Usage(*line["usage"]).spilled_bytes]
    assert spilled == []


def test_every_kernel_takes_registers(report):
    assert [line for line in report if line["usage"] and not 0 < compiled.Usage(*line["usage"]).registers <= 255] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_that_is_launched_has_a_specimen(module):
    shown = {id(specimen.kernel) for specimen in all_specimens()}
    assert [name for name, kernel in launched(module).items() if id(kernel) not in shown] == []


def test_launches_are_found():
    assert set(launched("triton_slots")) == {
        "extend_kernel",
        "decode_kernel",
        "write_rows_kernel",
        "write_spans_kernel",
        "read_pages_kernel",
        "translate_kernel",
    }


def launched(name):
    """The kernels of a module: ``kernel[grid](…)``, ``launch(kernel, …)``, and what is called a kernel by name."""
    module = importlib.import_module(f"kvdock.kernels.{name}")
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    given = [call.func.value for call in calls if isinstance(call.func, ast.Subscript)]
    given += [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "launch"]
    names = {node.id for node in given if isinstance(node, ast.Name)} & vars(module).keys()
    names |= {name for name in vars(module) if name.endswith("_kernel")}
    return {name: vars(module)[name] for name in sorted(names)}


def test_a_kernel_that_does_not_compile_is_an_error_of_its_line():
    broken = SLOT_SPECIMENS[0]._replace(signature={**SLOT_SPECIMENS[0].signature, "out": "i64"})
    code = (
        "from kvdock.testing import compiled\n"
        "from kvdock.kernels import triton_specimens as t\n"
        f"broken = t.SLOT_SPECIMENS[0]._replace(signature={broken.signature!r})\n"
        "t.all_specimens = lambda: (broken,)\n"
        "print(compiled._compile((0, compiled.TARGETS[0])).error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("CompilationError: ")


def test_an_interpreting_process_compiles_nothing():
    code = (
        "from kvdock.testing import compiled\n"
        "from kvdock.kernels.triton_specimens import SLOT_SPECIMENS\n"
        "compiled.compile_for(SLOT_SPECIMENS[0], compiled.TARGETS[0])\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "kernel 'extend *i64 page 1' is interpreted, not compiled; unset TRITON_INTERPRET" in done.stderr


def test_usage_is_read_from_dumps_and_assemblies():
    assert compiled.usage_in_dump(DUMP) == (80, 24)
    assert compiled.usage_in_assembly(ASSEMBLY) == (40, 20)


def test_texts_that_tell_nothing_are_refused():
    with pytest.raises(ValueError, match="no resource usage of a kernel in 'Fatbin ELF'"):
        compiled.usage_in_dump("Fatbin ELF")
    with pytest.raises(ValueError, match="no metadata of a kernel in an assembly of 6 characters"):
        compiled.usage_in_assembly("s_endp")
