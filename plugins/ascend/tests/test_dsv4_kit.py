"""The form of DeepSeek V4 for NPUs keeps what a plugin promises as a whole, in every combination of ratios."""

import pytest
from kvdock.testing.suites import CPU, PluginSuite
from kvdock_ascend import hooks
from others import cuda_device
from small_dsv4 import kit_cases

pytest.importorskip("kvdock_dsv4")


class TestAscendDSV4(PluginSuite):
    plugin = "ascend.dsv4"
    group = "kvdock.variants"
    cases = kit_cases(hooks.device_catalogue()["910c"], max_total_tokens=2048, swa_full_tokens_ratio=0.5)
    foreign = (CPU, cuda_device())
