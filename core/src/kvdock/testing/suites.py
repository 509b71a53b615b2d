"""Conformance suites: what plugins, devices, pools, allocators and kernels promise, as tests that a vendor subclasses.

A subclass names the plugin, a device profile and the class; pytest collects the rest::

    class TestAcmePool(PoolSuite):
        plugins = (("acme", hooks),)
        device = catalogue()["acme-1-mini"]
        pool_cls = AcmePool

Everything is planned by the planner and built by the builder, so the suites see a class as an engine
does. A check that cannot hold is replaced by `unsupported`, which takes the reason; a subclass that drops
or replaces a check in another way is refused when it is made.
"""

from __future__ import annotations

from kvdock.testing.allocator_suite import AllocatorSuite
from kvdock.testing.device_suite import DeviceSuite
from kvdock.testing.kernel_suite import KernelSuite
from kvdock.testing.plugin_suite import CPU, Case, PluginSuite
from kvdock.testing.pool_suite import PoolSuite
from kvdock.testing.sliding_suite import SLIDING_MODEL, SlidingAllocatorSuite
from kvdock.testing.suite_base import SMALL_MODEL, unsupported

__all__ = [
    "CPU",
    "SLIDING_MODEL",
    "SMALL_MODEL",
    "AllocatorSuite",
    "Case",
    "DeviceSuite",
    "KernelSuite",
    "PluginSuite",
    "PoolSuite",
    "SlidingAllocatorSuite",
    "unsupported",
]
