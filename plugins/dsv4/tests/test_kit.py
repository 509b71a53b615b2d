"""The family keeps what a plugin promises as a whole, in every combination of ratios."""

from kvdock.testing.suites import CPU, PluginSuite
from small_dsv4 import kit_cases


class TestDSV4(PluginSuite):
    plugin = "dsv4"
    group = "kvdock.families"
    cases = kit_cases(CPU, max_total_tokens=8192)
