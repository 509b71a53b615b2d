"""The CPU keeps the promises of devices."""

from kvdock.testing.suites import DeviceSuite


class TestCpu(DeviceSuite):
    plugin = "cpu"
