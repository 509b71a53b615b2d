"""acme keeps the promises of kvdock's plugins, devices, pools and allocators."""

from kvdock.testing.suites import AllocatorSuite, Case, DeviceSuite, PluginSuite, PoolSuite
from kvdock_acme import device, hooks
from kvdock_acme.allocators import AcmeAllocator
from kvdock_acme.pools import AcmePool

MINI = device.catalogue()["acme-1-mini"]


class TestAcme(PluginSuite):
    plugin = "acme"
    cases = (Case(device=MINI),)


class TestAcmeDevices(DeviceSuite):
    plugin = "acme"
    plugins = (("acme", hooks),)


class TestAcmePool(PoolSuite):
    plugins = (("acme", hooks),)
    device = MINI
    pool_cls = AcmePool


class TestAcmeAllocator(AllocatorSuite):
    plugins = (("acme", hooks),)
    device = MINI
    allocator_cls = AcmeAllocator
