"""The core's own pools and allocators keep the promises, and no promise can be dropped in silence."""

from typing import ClassVar

import pytest
from kvdock.allocators import (
    PagedAllocator,
    PureSWAAllocator,
    PureSWASortedAllocator,
    PureSWATokenAllocator,
    SortedAllocator,
    SWAAllocator,
    TokenAllocator,
)
from kvdock.device import DeviceInfo
from kvdock.model import DSAParams, LayerSpec, MHAParams, MLAParams, ModelSpec
from kvdock.pools import BlockMHAPool, DSAPool, MHAPool, MLAPool
from kvdock.testing.suites import AllocatorSuite, PoolSuite, SlidingAllocatorSuite, unsupported

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**24, free_before_load_bytes=2**24, free_bytes=2**24)


def make_model(*layers):
    return ModelSpec(name="m", architecture="A", layers=layers, context_length=256, dtype="bfloat16")


def mha(heads, dim, v_dim, **more):
    return LayerSpec(kind="mha", params=MHAParams(num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim), **more)


class TestMHAPool(PoolSuite):
    device = CPU
    pool_cls = MHAPool
    page_sizes = (1, 16)


class TestMHAPoolWithUnevenHeads(PoolSuite):
    device = CPU
    pool_cls = MHAPool
    model = make_model(mha(2, 8, 4), mha(2, 8, 4))
    page_sizes = (8,)


class TestMHAPoolOfSlidingLayers(PoolSuite):
    """The first group of a sliding model, in its own numbering."""

    device = CPU
    pool_cls = MHAPool
    model = make_model(mha(2, 8, 8, window_tokens=31), mha(2, 8, 8))
    page_sizes = (8,)


class TestMHAPoolOfSharedLayers(PoolSuite):
    device = CPU
    pool_cls = MHAPool
    model = make_model(mha(2, 8, 8), mha(2, 8, 8, shares_kv_with=0))
    page_sizes = (8,)


class TestMLAPool(PoolSuite):
    device = CPU
    pool_cls = MLAPool
    model = make_model(*[LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=16, qk_rope_head_dim=8))] * 2)
    page_sizes = (1, 16)
    values_are_in_keys = True


class TestMLAPoolInPages(TestMLAPool):
    options: ClassVar = {"page_major": True}
    page_sizes = (16,)


class TestMHAPoolInPages(PoolSuite):
    device = CPU
    pool_cls = MHAPool
    options: ClassVar = {"page_major": True}
    page_sizes = (1, 16)


class TestBlockMHAPool(PoolSuite):
    """Small whole numbers are exact in blocks of 8-bit floats with a power of two as scale."""

    device = CPU
    pool_cls = BlockMHAPool
    options: ClassVar = {"kv_cache_dtype": "mxfp8"}
    page_sizes = (16,)


class TestDSAPool(PoolSuite):
    """G-07: index keys are in the transfer list."""

    device = CPU
    pool_cls = DSAPool
    model = make_model(
        *[LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))] * 2
    )
    page_sizes = (1, 16)
    values_are_in_keys = True


class TestDSAPoolOfSharedLayers(PoolSuite):
    device = CPU
    pool_cls = DSAPool
    model = make_model(
        *[
            LayerSpec(
                kind="dsa",
                params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128),
                shares_kv_with=owner,
            )
            for owner in (None, 0)
        ]
    )
    page_sizes = (16,)
    values_are_in_keys = True


class TestTokenAllocator(AllocatorSuite):
    device = CPU
    allocator_cls = TokenAllocator
    page_sizes = (1,)


class TestPagedAllocator(AllocatorSuite):
    device = CPU
    allocator_cls = PagedAllocator
    page_sizes = (2, 16)


class TestSortedAllocator(AllocatorSuite):
    device = CPU
    allocator_cls = SortedAllocator
    options: ClassVar = {"role": "decode"}
    page_sizes = (1, 16)


class TestSWAAllocator(SlidingAllocatorSuite):
    device = CPU
    allocator_cls = SWAAllocator
    page_sizes = (1, 16)


class TestPureSWAAllocator(SlidingAllocatorSuite):
    device = CPU
    allocator_cls = PureSWAAllocator
    model = make_model(mha(2, 8, 8, window_tokens=31))
    options: ClassVar = {}
    page_sizes = (3, 16)


class TestPureSWATokenAllocator(SlidingAllocatorSuite):
    device = CPU
    allocator_cls = PureSWATokenAllocator
    model = make_model(mha(2, 8, 8, window_tokens=31))
    options: ClassVar = {}
    page_sizes = (1,)


class TestPureSWASortedAllocator(SlidingAllocatorSuite):
    device = CPU
    allocator_cls = PureSWASortedAllocator
    model = make_model(mha(2, 8, 8, window_tokens=31))
    options: ClassVar = {"role": "prefill"}
    page_sizes = (1, 16)


def test_a_check_cannot_be_replaced_without_a_reason():
    with pytest.raises(TypeError, match=r"Lax replaces the check test_views_are_pages without a reason"):

        class Lax(PoolSuite):
            def test_views_are_pages(self):
                pass


@pytest.mark.parametrize("value", [None, 1])
def test_a_check_cannot_be_dropped(value):
    with pytest.raises(TypeError, match=r"test_all_of_it_can_be_handed_out_once = unsupported\('why it cannot hold'\)"):
        type("Lax", (AllocatorSuite,), {"test_all_of_it_can_be_handed_out_once": value})


def test_a_grandchild_is_held_to_it_as_well():
    class Half(PoolSuite):
        device = CPU

    with pytest.raises(TypeError, match="test_views_are_pages"):
        type("Lax", (Half,), {"test_views_are_pages": None})


def test_a_reason_replaces_a_check_by_a_skip():
    suite = type("Honest", (PoolSuite,), {"test_views_are_pages": unsupported("rows are not paged here")})
    with pytest.raises(pytest.skip.Exception, match="rows are not paged here"):
        suite().test_views_are_pages()


def test_a_reason_is_not_empty():
    with pytest.raises(TypeError, match="needs the reason"):
        unsupported(" ")
