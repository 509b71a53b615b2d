"""The form of DeepSeek V4 for AMD devices keeps what a plugin promises as a whole, in every combination of ratios."""

import pytest
from kvdock.testing.suites import CPU, PluginSuite
from kvdock_rocm import hooks
from others import cuda_device
from small_dsv4 import kit_cases

pytest.importorskip("kvdock_dsv4")


class TestRocmDSV4(PluginSuite):
    plugin = "rocm.dsv4"
    group = "kvdock.variants"
    cases = kit_cases(hooks.device_catalogue()["mi300x"], max_total_tokens=2048)
    foreign = (CPU, cuda_device("sm_90"))
