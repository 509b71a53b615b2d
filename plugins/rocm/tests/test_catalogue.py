"""The catalogue: hand-checked bytes, and a source for each."""

import subprocess
import sys
from pathlib import Path

import pytest
from kvdock_rocm import hooks

NAMES = ["mi210", "mi250x", "mi300x", "mi325x", "mi355x"]
README = Path(__file__).parents[1] / "README.md"


def test_every_device_of_the_readme_is_in_the_catalogue():
    devices = README.read_text(encoding="utf-8").partition("## Devices")[2]
    listed = sorted(line.split("`")[1] for line in devices.splitlines() if line.startswith("| `"))
    assert listed == sorted(hooks.device_catalogue()) == NAMES


def test_mi300x_is_196592_mib_less_512_and_512():
    """206,141,652,992 bytes are what rocm-smi prints."""
    mi300x = hooks.device_catalogue()["mi300x"]
    assert mi300x.total_bytes == 206_141_652_992
    assert mi300x.free_before_load_bytes == 205_067_911_168 == mi300x.total_bytes - 1_073_741_824
    assert mi300x.free_bytes == mi300x.free_before_load_bytes


@pytest.mark.parametrize(
    ("name", "total_mib", "usable_mib", "architecture"),
    [
        ("mi210", 65_520, 64_496, "gfx90a"),
        ("mi250x", 65_520, 64_496, "gfx90a"),
        ("mi300x", 196_592, 195_568, "gfx942"),
        ("mi325x", 262_128, 261_104, "gfx942"),
        ("mi355x", 294_896, 293_872, "gfx950"),
    ],
)
def test_bytes_and_architecture(name, total_mib, usable_mib, architecture):
    profile = hooks.device_catalogue()[name]
    assert (profile.total_bytes, profile.free_bytes) == (total_mib * 1_048_576, usable_mib * 1_048_576)
    software = ["software_float8"] if architecture == "gfx90a" else []
    assert profile.capabilities == (architecture, *software)
    assert f"| {total_mib:,} | {usable_mib:,} | `{architecture}` |" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_is_whole(name):
    profile = hooks.device_catalogue()[name]
    assert (profile.name, profile.device_type, profile.index) == (name, "cuda", None)
    assert profile.granularity_bytes == 2_097_152
    assert f"{profile.total_bytes // 1_048_576} MiB (github.com/" in profile.source
    assert "less 512 for the driver and 512 for a HIP context" in profile.source
    published = profile.source.partition("(")[2].partition(")")[0]
    assert f"(https://{published})" in README.read_text(encoding="utf-8")


def test_the_two_dies_of_an_mi250x_have_its_128_gib():
    """16 MiB of each die are the driver's before it reports a total."""
    die = hooks.device_catalogue()["mi250x"]
    assert 2 * (die.total_bytes + 16 * 2**20) == 128 * 2**30


def test_what_a_process_gets_is_never_less_than_planned():
    """The published free bytes of a process on an MI300X: 191.33 GiB of 191.98."""
    assert hooks.device_catalogue()["mi300x"].free_bytes <= 191.33 * 2**30


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, kvdock_rocm.hooks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
