"""Compiles kernels for devices that are not present, and says what the compiled form takes of them.

``python -m kvdock.testing.compiled`` prints it for kernels and targets, a line of JSON each: it is a process of its own
because one that interprets kernels compiles none.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvdock.kernels.triton_specimens import Specimen


class Target(NamedTuple):
    """A device to compile for: the compiler's backend, the architecture, and the lanes of a warp."""

    backend: str
    arch: int | str
    warp_size: int

    @property
    def name(self) -> str:
        """The target in one word."""
        return f"{self.backend}:{self.arch}"


TARGETS = (
    Target("cuda", 80, 32),
    Target("cuda", 90, 32),
    Target("cuda", 100, 32),
    Target("hip", "gfx942", 64),
    Target("hip", "gfx950", 64),
)
"""The architectures for which kernels are kept compiling."""


class Usage(NamedTuple):
    """What a compiled kernel takes: registers a thread, bytes a thread that did not fit there, shared bytes."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


class Compiled(NamedTuple):
    """What came of compiling a specimen for a target: its usage, or what the compiler said."""

    specimen: str
    target: str
    usage: Usage | None
    error: str = ""


def compile_for(specimen: Specimen, target: Target) -> Usage:
    """Return what a specimen takes on a target, which need not be present.

    Raises:
        RuntimeError: this process runs kernels in the interpreter, which compiles nothing.
        triton.CompilationError: the compiler refuses the kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(specimen.kernel, triton.JITFunction):
        raise RuntimeError(
            f"kernel {specimen.name!r} is interpreted, not compiled; unset TRITON_INTERPRET and start a new process"
        )
    names = specimen.kernel.arg_names
    signature = {name: specimen.signature.get(name, "constexpr") for name in names}
    constants = {name: value for name, value in specimen.constants.items() if name in names}
    options = {name: value for name, value in specimen.constants.items() if name not in names}
    source = ASTSource(specimen.kernel, signature, constexprs=constants, attrs=_aligned(specimen))
    compiled = triton.compile(source, target=GPUTarget(*target), options=options)
    registers, spilled_bytes = (
        usage_in_dump(_dump(compiled.asm["cubin"]))
        if "cubin" in compiled.asm
        else usage_in_assembly(compiled.asm["amdgcn"])
    )
    return Usage(registers, spilled_bytes, compiled.metadata.shared)


def _aligned(specimen: Specimen) -> dict[tuple[int], list[list[object]]]:
    """Say that pointers are aligned to 16 bytes, as those of tensors that start a storage are."""
    names = specimen.kernel.arg_names
    pointers = [name for name, of_type in specimen.signature.items() if of_type.startswith("*")]
    return {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}


def _dump(binary: bytes) -> str:
    """Return what the compiler's own tool says of a binary."""
    import triton

    (tool,) = Path(triton.__file__).parent.glob("backends/*/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage_in_dump(text: str) -> tuple[int, int]:
    """Return registers and spilled bytes of the kernel of which ``cuobjdump --dump-resource-usage`` speaks.

    Raises:
        ValueError: it speaks of none.
    """
    found = _numbers(r"\b(REG|STACK|LOCAL):(\d+)", text)
    if "REG" not in found:
        raise ValueError(f"no resource usage of a kernel in {text!r}")
    return found["REG"], found["STACK"] + found["LOCAL"]


def usage_in_assembly(text: str) -> tuple[int, int]:
    """Return vector registers and spilled bytes, 4 a register, of the kernel whose metadata an assembly ends with.

    Raises:
        ValueError: it has none.
    """
    found = _numbers(r"\.(vgpr_count|[sv]gpr_spill_count):\s+(\d+)", text)
    if "vgpr_count" not in found:
        raise ValueError(f"no metadata of a kernel in an assembly of {len(text)} characters")
    return found["vgpr_count"], 4 * (found["vgpr_spill_count"] + found["sgpr_spill_count"])


def _numbers(pattern: str, text: str) -> dict[str, int]:
    return {name: int(count) for name, count in re.findall(pattern, text)}


def chosen(every: bool = False) -> list[tuple[int, Target]]:
    """Return the place of each specimen and the targets for which it is compiled.

    Backends get all specimens for their first target, and for the others every third of each kernel: between chips of
    one backend little differs, and a minute is enough. `every` leaves out none.
    """
    from kvdock.kernels.triton_specimens import all_specimens

    of_kernel: dict[str, list[int]] = {}
    for place, specimen in enumerate(all_specimens()):
        of_kernel.setdefault(specimen.kernel.__name__, []).append(place)
    sample = {place for places in of_kernel.values() for place in places[::3]}
    full = {target.backend: target for target in reversed(TARGETS)}.values()
    places = range(sum(map(len, of_kernel.values())))
    return [(place, target) for target in TARGETS for place in places if every or target in full or place in sample]


def compile_all(jobs: int = 2, every: bool = False) -> Iterator[Compiled]:
    """Give what comes of the chosen specimens and targets, as they are compiled by `jobs` processes."""
    # A forked process would share the threads of torch, which are not there.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as processes:
        yield from processes.map(_compile, chosen(every))


def _compile(task: tuple[int, Target]) -> Compiled:
    from kvdock.kernels.triton_specimens import all_specimens

    specimen, target = all_specimens()[task[0]], task[1]
    try:
        return Compiled(specimen.name, target.name, compile_for(specimen, target))
    except Exception as error:  # whatever the compiler raises becomes a line of the report
        return Compiled(specimen.name, target.name, None, f"{type(error).__name__}: {error}")


def main(arguments: list[str] | None = None) -> None:
    """Print what comes of every specimen and target, a line of JSON each."""
    parser = argparse.ArgumentParser(prog="kvdock.testing.compiled", description="Compile the kernels ahead of time.")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile (default: 2)")
    parser.add_argument("--every", action="store_true", help="every kernel for every target; takes twice as long")
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    for compiled in compile_all(**given):
        print(json.dumps(compiled._asdict()), flush=True)


if __name__ == "__main__":
    main()
