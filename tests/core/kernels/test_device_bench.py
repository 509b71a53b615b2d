"""The benchmark of kernels says what it needs, and measures every kernel where there is no accelerator, too."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[3] / "bench" / "device.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerator is here")
def test_without_an_accelerator_it_says_so_in_a_line():
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cuda is not here; run this on an accelerator, or with --device cpu --kernels reference\n"


def test_it_measures_the_reference_on_the_host(tmp_path):
    done = run("--device", "cpu", "--kernels", "reference", "--small", "--write", str(tmp_path / "tables.md"))
    assert done.returncode == 0, done.stderr
    tables = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert tables.strip() == done.stdout.strip().replace("\n\n\n", "\n\n")
    assert [line for line in tables.splitlines() if line.startswith("###")] == [
        f"### {group}, {tokens} tokens" for group in ("rows", "moves", "blocks", "arithmetic") for tokens in (16, 64)
    ]
    names = {line.split("|")[1].split(",")[0].strip() for line in tables.splitlines() if line.startswith("| ")}
    assert names == {
        *("kernel", "store_kv", "gather", "store", "store_mla", "move", "clear", "copy_rows"),
        *("store_blocks", "load_blocks", "quantize_blocks", "dequantize_blocks"),
        *("alloc_extend", "alloc_decode", "translate", "write_spans", "read_pages", "write_rows"),
    }


def test_kernels_that_nothing_can_run_or_name_are_refused():
    assert run("--device", "cpu").stderr == "Triton serves no cpu; add --kernels reference\n"
    done = run("--device", "cpu", "--kernels", "reference", "--small", "--only", "sort")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "no kernel has 'sort' in its name; groups are rows, moves, blocks, arithmetic\n"
