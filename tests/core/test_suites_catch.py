"""The suites catch classes that break a promise, each by the check that is meant for it."""

import re
import subprocess
import sys

import pytest

BROKEN = """
import torch

from kvdock.allocators import PagedAllocator
from kvdock.device import DeviceInfo
from kvdock.hookspecs import hookimpl
from kvdock.pools import MHAPool
from kvdock.testing.suites import AllocatorSuite, PoolSuite

DEVICE = DeviceInfo(device_type="broken", name="b", total_bytes=2**24, free_before_load_bytes=2**24, free_bytes=2**24)


class Hooks:
    kvdock_contract = "0.1"

    def __init__(self, pool=None, allocator=None):
        self.pool, self.allocator = pool, allocator

    @hookimpl
    def get_pool_cls(self, query):
        return self.pool if query.group is not None else None

    @hookimpl
    def get_allocator_cls(self, query):
        return self.allocator


def pool_suite(cls):
    return type("Test" + cls.__name__, (PoolSuite,), dict(
        plugins=(("broken", Hooks(pool=cls)),), device=DEVICE, pool_cls=cls, page_sizes=(4,), seeds=(1,)))


def allocator_suite(cls):
    return type("Test" + cls.__name__, (AllocatorSuite,), dict(
        plugins=(("broken", Hooks(allocator=cls)),), device=DEVICE, allocator_cls=cls, page_sizes=(4,), seeds=(1,)))


class ForgetsValues(MHAPool):
    def slot_views(self):
        return list(self.stored("k").values())


class WritesNextDoor(MHAPool):
    def set_kv_buffer(self, layer_id, loc, k, v, k_scale=None, v_scale=None):
        super().set_kv_buffer(layer_id, torch.where(loc == 0, loc + 4, loc), k, v)


class DescribesHalf(MHAPool):
    def buffer_infos(self):
        return super().buffer_infos()[::2]


class NeedsTorch(MHAPool):
    @classmethod
    def buffers(cls, query):
        import torch

        return super().buffers(query)


class KeepsAfterClear(MHAPool):
    def clear(self):
        pass


class HandsOutHalf(PagedAllocator):
    def alloc(self, need_size, owner=None):
        slots = super().alloc(need_size, owner)
        return None if slots is None else slots.flip(0)


class LosesPages(PagedAllocator):
    def free(self, indices):
        super().free(indices[: max(0, indices.shape[0] - self.page_size)])


class RestoresAnything(PagedAllocator):
    def restore_state(self, state):
        pass


class TakesBeforeItLooks(PagedAllocator):
    def alloc(self, need_size, owner=None):
        if need_size > self.available_size():
            super().alloc(self.page_size)
            return None
        return super().alloc(need_size, owner)


for broken in (ForgetsValues, WritesNextDoor, DescribesHalf, NeedsTorch, KeepsAfterClear):
    globals()["Test" + broken.__name__] = pool_suite(broken)
for broken in (HandsOutHalf, LosesPages, RestoresAnything, TakesBeforeItLooks):
    globals()["Test" + broken.__name__] = allocator_suite(broken)
"""
CAUGHT_BY = {
    "ForgetsValues": {"test_moves_take_everything_along", "test_copies_come_back_bit_identical"},
    "WritesNextDoor": {"test_a_write_to_slot_0_is_harmless"},
    "DescribesHalf": {"test_copying_a_page_by_its_descriptors_copies_all_of_it"},
    "NeedsTorch": {"test_buffers_are_declared_without_torch"},
    "KeepsAfterClear": {"test_clear_zeroes_everything"},
    "HandsOutHalf": {"test_slots_of_a_page_are_consecutive"},
    "LosesPages": {"test_any_token_gives_back_its_page_once", "test_no_slot_has_two_owners"},
    "RestoresAnything": {"test_restore_takes_back_allocations", "test_restore_after_a_free_is_refused"},
    "TakesBeforeItLooks": {"test_a_call_that_cannot_be_served_changes_nothing"},
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Class → the checks that failed for it."""
    pytest.importorskip("torch")
    file = tmp_path_factory.mktemp("broken") / "test_broken.py"
    file.write_text(BROKEN, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-rfE", str(file)]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False, timeout=240)
    found = re.findall(r"^(?:FAILED|ERROR) \S*::Test(\w+)::(\w+)", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return {name: {check for owner, check in found if owner == name} for name in CAUGHT_BY}


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_broken_promise_is_caught_by_its_check(failures, name):
    assert failures[name] >= CAUGHT_BY[name]
