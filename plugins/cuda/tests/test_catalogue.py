"""The catalogue: hand-checked bytes, and a source for each."""

import subprocess
import sys
from pathlib import Path

import pytest
from kvdock_cuda import hooks

NAMES = ["a100-40gb", "a100-80gb", "b200", "h100", "h200", "l40s", "rtx4090", "rtx5090"]
README = Path(__file__).parents[1] / "README.md"


def test_every_device_of_the_readme_is_in_the_catalogue():
    devices = README.read_text(encoding="utf-8").partition("## Devices")[2]
    listed = sorted(line.split("`")[1] for line in devices.splitlines() if line.startswith("| `"))
    assert listed == sorted(hooks.device_catalogue()) == NAMES


def test_h200_is_143771_mib_less_768_and_512():
    h200 = hooks.device_catalogue()["h200"]
    assert h200.total_bytes == 150_754_820_096
    assert h200.free_before_load_bytes == 149_412_642_816 == h200.total_bytes - 1_342_177_280
    assert h200.free_bytes == h200.free_before_load_bytes


@pytest.mark.parametrize(
    ("name", "usable_mib", "capabilities"),
    [
        ("a100-40gb", 39_680, "sm_80 software_float8 software_blocks8 memory_saver"),
        ("a100-80gb", 80_640, "sm_80 software_float8 software_blocks8 memory_saver"),
        ("l40s", 44_788, "sm_89 software_blocks8 memory_saver"),
        ("h100", 80_279, "sm_90 skip_kv_cache:fa3 skip_kv_cache:fa4 software_blocks8 memory_saver"),
        ("h200", 142_491, "sm_90 skip_kv_cache:fa3 skip_kv_cache:fa4 software_blocks8 memory_saver"),
        ("b200", 182_079, "sm_100 skip_kv_cache:fa4 fp4 memory_saver"),
        ("rtx4090", 23_284, "sm_89 software_blocks8 memory_saver"),
        ("rtx5090", 31_327, "sm_120 fp4 memory_saver"),
    ],
)
def test_usable_bytes_and_capabilities(name, usable_mib, capabilities):
    profile = hooks.device_catalogue()[name]
    assert profile.free_bytes == usable_mib * 1_048_576
    assert " ".join(profile.capabilities) == capabilities
    assert f"| {usable_mib:,} | `{profile.capabilities[0]}` |" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_is_whole(name):
    profile = hooks.device_catalogue()[name]
    assert (profile.name, profile.device_type, profile.index) == (name, "cuda", None)
    assert 0 < profile.free_before_load_bytes < profile.total_bytes
    assert profile.granularity_bytes == 2_097_152
    assert f"{profile.total_bytes // 1_048_576} MiB" in profile.source
    assert "less 768 for the driver and 512 for a CUDA context" in profile.source


def test_what_a_process_gets_is_never_less_than_planned():
    """The published totals of a process: 79.25 GiB of an A100 80GB, 178.35 GiB of a B200."""
    profiles = hooks.device_catalogue()
    assert profiles["a100-80gb"].free_bytes + 512 * 2**20 <= 79.25 * 2**30
    assert profiles["b200"].free_bytes + 512 * 2**20 <= 178.35 * 2**30


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, kvdock_cuda.hooks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
