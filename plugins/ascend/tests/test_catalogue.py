"""Profiles of Ascend devices: totals that are published, and usable bytes that follow from them."""

import subprocess
import sys

import pytest
from kvdock_ascend import device, hooks

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "total_mib", "usable_mib"),
    [("910b-32gb", 32_768, 28_800), ("910b-64gb", 65_536, 61_568), ("910c", 65_536, 61_568)],
)
def test_usable_bytes_are_the_total_less_firmware_and_context(name, total_mib, usable_mib):
    found = hooks.device_catalogue()[name]
    assert found.device_type == "npu"
    assert found.total_bytes == total_mib * MIB
    assert found.free_bytes == found.free_before_load_bytes == usable_mib * MIB
    assert found.granularity_bytes == 2 * MIB
    assert "github.com/" in found.source
    assert device.reads_bfloat16(found)


def test_usable_bytes_are_less_than_a_process_was_seen_to_get():
    """60.96 GiB of a 910B, 61.27 GiB of a die of a 910C."""
    cards = hooks.device_catalogue()
    assert cards["910b-64gb"].free_bytes < 60.96 * 2**30
    assert cards["910c"].free_bytes < 61.27 * 2**30


def test_importing_the_plugin_imports_neither_torch_nor_torch_npu():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['torch_npu'] = None\n"
        "from kvdock_ascend import hooks\n"
        "assert len(hooks.device_catalogue()) == 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
