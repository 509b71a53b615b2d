"""What a kernel set may do once, when a cache is built and before a request comes."""

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.startup import core_only
from kvdock.testing.mocks import mock_plugin
from kvdock.testing.suite_base import SMALL_MODEL

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402

HERE = DeviceInfo(device_type="cpu", name="here", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30)


class Warming(ReferenceKernels):
    """Notes the caches that it is given."""

    def __init__(self, error=None):
        self.given, self.error = [], error

    def warm_up(self, cache):
        self.given.append(cache)
        if self.error:
            raise self.error


def build(kernels, device=None):
    registry = core_only()
    registry.add(mock_plugin("warm", tier="hardware", kernels=kernels))
    return kvdock.build(kvdock.plan(SMALL_MODEL, device=HERE, budget_bytes=2**20, registry=registry), device=device)


def test_the_finished_cache_is_given_once():
    kernels = Warming()
    cache = build(kernels)
    assert kernels.given == [cache]
    assert cache.token_to_kv_pool.parts.kernels is kernels


def test_another_device_than_the_planned_one_has_nothing_to_warm():
    kernels = Warming()
    build(kernels, device="meta")
    assert kernels.given == []


def test_what_fails_while_warming_fails_the_build():
    with pytest.raises(RuntimeError, match="no such code object"):
        build(Warming(RuntimeError("no such code object")))


def test_a_kernel_set_has_nothing_to_do_by_default():
    cache = build(ReferenceKernels())
    before = [raw.clone() for raw in cache.token_to_kv_pool.storages()]
    assert ReferenceKernels().warm_up(cache) is None
    for raw, old in zip(cache.token_to_kv_pool.storages(), before, strict=True):
        assert torch.equal(raw, old)
