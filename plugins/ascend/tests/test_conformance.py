"""This plugin keeps the promises of kvdock's pools and allocators."""

from typing import ClassVar

import msgspec
import pytest
from kvdock.allocators import SWAAllocator
from kvdock.model import DSAParams, LayerSpec, MLAParams
from kvdock.testing.suites import SLIDING_MODEL, SMALL_MODEL, AllocatorSuite, PoolSuite, SlidingAllocatorSuite
from kvdock_ascend import allocators, device, hooks
from kvdock_ascend.pools import NpuDSAPool, NpuMHAPool, NpuMLAPool

CARD = msgspec.structs.replace(device.catalogue()["910b-64gb"], granularity_bytes=1)
"""Small caches are compared slot by slot, so storages are not rounded up to 2 MiB here."""


class Ascend:
    plugins = (("ascend", hooks),)
    device = CARD


def of_layers(layer):
    return msgspec.structs.replace(SMALL_MODEL, layers=(layer,) * 3)


class TestMHA(Ascend, PoolSuite):
    pool_cls = NpuMHAPool


class TestMLA(Ascend, PoolSuite):
    pool_cls = NpuMLAPool
    model = of_layers(LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=16, qk_rope_head_dim=8)))


class TestDSA(Ascend, PoolSuite):
    pool_cls = NpuDSAPool
    model = of_layers(LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=16, qk_rope_head_dim=8, index_head_dim=8)))


class OverOperators:
    """The same pools with the kernels of an NPU, over a strict stand-in for its operators."""

    @pytest.fixture
    def pool(self, cache, npu_pool):
        return npu_pool(cache)[0]


class TestMHAOverOperators(OverOperators, TestMHA):
    page_sizes = (16,)


class TestMLAOverOperators(OverOperators, TestMLA):
    page_sizes = (16,)


class TestDSAOverOperators(OverOperators, TestDSA):
    page_sizes = (16,)


class TestAligned(Ascend, PoolSuite):
    pool_cls = NpuDSAPool
    model = TestDSA.model
    options: ClassVar = {"plugin_options": {"ascend": {"align_transfers": True}}}
    budget_bytes = 7 * 2**20


class TestPages(Ascend, AllocatorSuite):
    allocator_cls = allocators.NpuPagedAllocator


class TestSorted(Ascend, AllocatorSuite):
    allocator_cls = allocators.NpuSortedAllocator
    options: ClassVar = {"role": "prefill"}


class TestBothSides(Ascend, SlidingAllocatorSuite):
    """The core's composite over this plugin's allocators: its slots are theirs."""

    allocator_cls = SWAAllocator


class TestSliding(Ascend, SlidingAllocatorSuite):
    allocator_cls = allocators.NpuPureSWAAllocator
    model = msgspec.structs.replace(SLIDING_MODEL, layers=SLIDING_MODEL.layers[:1] * 2)
    options: ClassVar = {}


class TestSlidingSorted(TestSliding):
    allocator_cls = allocators.NpuPureSWASortedAllocator
    options: ClassVar = {"role": "prefill"}
