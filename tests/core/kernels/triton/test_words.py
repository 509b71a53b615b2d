"""Rows whose distances are whole units of 16 bytes move 16 bytes a thread: read in the code that is compiled."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

CODE = """
import json, re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvdock.kernels.triton_specimens_rows import BLOCK_SPECIMENS, ROW_SPECIMENS

def accesses(specimen, aligned):
    names = specimen.kernel.arg_names
    signature = {name: specimen.signature.get(name, "constexpr") for name in names}
    places = [name for name, kind in specimen.signature.items() if kind[0] == "*" or name in aligned]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in places}
    source = ASTSource(specimen.kernel, signature, constexprs=specimen.constants, attrs=attrs)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return re.findall(r"(?:ld|st)[.]global[.][.\\w]*", ptx)

chosen, aligned = json.loads(sys.argv[1])
specimens = {specimen.name: specimen for specimen in (*ROW_SPECIMENS, *BLOCK_SPECIMENS)}
print(json.dumps({name: accesses(specimens[name], aligned) for name in chosen}))
"""
WIDE = ("v2.b64", "v4.b32")


def accesses(tmp_path, specimens, aligned=()):
    """The global loads and stores of specimens where the arguments `aligned`, too, are multiples of 16."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", CODE, json.dumps([specimens, aligned])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout)


def test_rows_move_16_bytes_a_thread_whatever_their_distances(tmp_path):
    copied = ["store 8 heads of 128 in bf16", "gather latents", "copy 656-byte rows", "copy runs of latents"]
    copied += ["store keys and values", "move 64 slots of states", "spread states"]
    found = accesses(tmp_path, [*copied, "clear keys and values"])
    for specimen, instructions in found.items():
        stores = [access for access in instructions if access.startswith("st.")]
        loads = [access for access in instructions if access.startswith("ld.") and access.endswith(WIDE)]
        assert (specimen, {access.endswith(WIDE) for access in stores}) == (specimen, {True})
        assert (specimen, loads != []) == (specimen, specimen in copied)


def test_floats_are_encoded_from_16_bytes_a_thread(tmp_path):
    encoded = ["encode nvfp4 heads of 128", "encode float8_e4m3fn index keys"]
    found = accesses(tmp_path, encoded, ["value_stride", "d_page_stride", "d_slot_stride"])
    assert [any(access.startswith("ld.") and access.endswith(WIDE) for access in found[name]) for name in encoded] == [
        True,
        True,
    ]
    narrow = [access for name in encoded for access in found[name] if access.startswith("ld.global.b16")]
    assert narrow == []
