"""The summary of a run: how many suites and checks there were, and why some were not made."""

import re
import subprocess
import sys

import pytest

SUITES = """
from kvdock.device import DeviceInfo
from kvdock.testing.mocks import mock_plugin
from kvdock.testing.suites import DeviceSuite, unsupported

GOOD = DeviceInfo(device_type="made-up", name="made-up-1", total_bytes=2**30, free_before_load_bytes=2**30,
                  free_bytes=2**30, source="made up")


class TestGood(DeviceSuite):
    plugin = "made-up"
    plugins = (("made-up", mock_plugin("made-up", "hardware", devices={GOOD.name: GOOD}, live=lambda selector: None)),)
    test_names_are_nobody_elses = unsupported("two distributions list the same device on purpose")


class TestCpu(DeviceSuite):
    plugin = "cpu"
    missing = "0"


def test_of_something_else():
    pass
"""
pytestmark = pytest.mark.once
WORKERS = pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "workers"])


def run(folder, text, *options):
    (folder / "test_suites.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", *options, "test_suites.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@WORKERS
def test_suites_and_checks_are_counted_and_reasons_given(tmp_path, workers):
    if workers:
        pytest.importorskip("xdist")
    said = run(tmp_path, SUITES, *workers)
    assert "kvdock conformance" in said
    assert "test_suites.py::TestGood (DeviceSuite): 18 passed, 1 unsupported\n" in said
    assert "  unsupported: test_names_are_nobody_elses: two distributions list the same device on purpose\n" in said
    assert "test_suites.py::TestCpu (DeviceSuite): 9 passed, 1 failed, 9 skipped\n" in said
    assert "  skipped: test_sources_are_given: cpu lists no profiles\n" in said
    assert "2 suites, 38 checks: 27 passed, 1 failed, 1 unsupported, 9 skipped\n" in said


def test_a_quiet_run_has_totals_failures_and_reasons_alone(tmp_path):
    said = run(tmp_path, SUITES, "-q").partition("kvdock conformance")[2]
    lines = re.findall(r"^\S.*$", said, re.MULTILINE)
    assert lines[:3] == [
        "test_suites.py::TestGood (DeviceSuite): unsupported: test_names_are_nobody_elses: "
        "two distributions list the same device on purpose",
        "test_suites.py::TestCpu (DeviceSuite): 9 passed, 1 failed, 9 skipped",
        "2 suites, 38 checks: 27 passed, 1 failed, 1 unsupported, 9 skipped",
    ]


def test_a_run_without_suites_has_no_summary(tmp_path):
    said = run(tmp_path, "def test_of_something_else():\n    pass\n")
    assert "1 passed" in said
    assert "kvdock conformance" not in said


def test_a_run_without_suites_imports_nothing_of_kvdock(tmp_path):
    """But for the plugin itself: an installed kvdock costs other test suites nothing."""
    text = """
import sys

def test_modules():
    found = sorted(name for name in sys.modules if name.startswith("kvdock") and name.count(".") > 0)
    assert found == ["kvdock.testing", "kvdock.testing.fixtures"]
"""
    assert "1 passed" in run(tmp_path, text)
