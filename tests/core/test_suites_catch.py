"""The suites catch classes that break a promise, each by the check that is meant for it."""

import re
import subprocess
import sys

import pytest

BROKEN = """
import msgspec
import torch

from kvdock.allocators import PagedAllocator, SWAAllocator
from kvdock.device import DeviceInfo
from kvdock.errors import SlotError
from kvdock.hookspecs import hookimpl
from kvdock.pools import MHAPool
from kvdock.testing.suites import AllocatorSuite, PoolSuite, SlidingAllocatorSuite

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
        is_composite = self.allocator is not None and issubclass(self.allocator, SWAAllocator)
        return self.allocator if (len(query.spaces) > 1) == is_composite else None


def pool_suite(cls):
    return type("Test" + cls.__name__, (PoolSuite,), dict(
        plugins=(("broken", Hooks(pool=cls)),), device=DEVICE, pool_cls=cls, page_sizes=(4,), seeds=(1,)))


def allocator_suite(cls):
    suite = SlidingAllocatorSuite if issubclass(cls, SWAAllocator) else AllocatorSuite
    return type("Test" + cls.__name__, (suite,), dict(
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


class DropsScales(MHAPool):
    def set_kv_buffer(self, layer_id, loc, k, v, k_scale=None, v_scale=None):
        super().set_kv_buffer(layer_id, loc, k, v)


class SwapsScales(MHAPool):
    def read_kv(self, layer_id, loc, k_scale=None, v_scale=None, dtype=None):
        return super().read_kv(layer_id, loc, v_scale, k_scale, dtype)


class RoundsDown(MHAPool):
    def set_kv_buffer(self, layer_id, loc, k, v, k_scale=None, v_scale=None):
        step = 1 + 2**-4 if self.query.kv_dtype.startswith("float8") else 1
        super().set_kv_buffer(layer_id, loc, k / step, v / step, k_scale, v_scale)


class KeepsAnIndexBehind(MHAPool):
    @classmethod
    def buffers(cls, query):
        keys, values = super().buffers(query)
        return keys, values, msgspec.structs.replace(keys, name="index", role="index")

    def buffer_infos(self):
        return [info for info in super().buffer_infos() if info.name != "index"]


class CutsRegionsShort(MHAPool):
    def regions(self):
        return [msgspec.structs.replace(region, nbytes=region.nbytes - 1) for region in super().regions()]


class ListsLayersInPairs(MHAPool):
    def buffer_infos(self):
        return sorted(super().buffer_infos(), key=lambda info: info.layer_id)


class InventsStates(MHAPool):
    def get_state_buf_infos(self):
        return [self.storages()[0].data_ptr()], [], []


class ReadsAtOnce(MHAPool):
    def get_key_buffer(self, layer_id):
        return self._keys[layer_id] if layer_id in self._keys else super().get_key_buffer(layer_id)


class WaitsTooLate(MHAPool):
    def read_kv(self, layer_id, loc, k_scale=None, v_scale=None, dtype=None):
        transfer, self._transfer = self._transfer, None
        found = super().read_kv(layer_id, loc, k_scale, v_scale, dtype)
        self._transfer = transfer
        self.wait_for_layer(layer_id)
        return found


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


class TakesBeforeItChecks(PagedAllocator):
    def alloc_extend(self, prefix_lens, prefix_cpu, seq_lens, seq_cpu, last_loc, extend_num_tokens, owners=None):
        if extend_num_tokens != sum(seq_cpu) - sum(prefix_cpu):
            self.alloc(self.page_size)
        return super().alloc_extend(prefix_lens, prefix_cpu, seq_lens, seq_cpu, last_loc, extend_num_tokens, owners)


class ForgetsTheLastPage(PagedAllocator):
    def alloc_extend(self, prefix_lens, prefix_cpu, seq_lens, seq_cpu, last_loc, extend_num_tokens, owners=None):
        args = prefix_lens, prefix_cpu, seq_lens, seq_cpu, last_loc // self.page_size * self.page_size
        return super().alloc_extend(*args, extend_num_tokens, owners)


class KeepsNewerStates(PagedAllocator):
    def restore_state(self, state):
        if state[3] <= self._ring.journal.position:
            super().restore_state(state)


class GivesBackAtOnce(PagedAllocator):
    def free_group_begin(self):
        self.is_grouping = True

    def free_group_end(self):
        if not getattr(self, "is_grouping", False):
            super().free_group_end()
        self.is_grouping = False


class WaitsForTheDevice(PagedAllocator):
    def free_pages(self, pages):
        super().free_pages(torch.tensor(sorted(pages.tolist()), dtype=torch.int64))


class IgnoresDebug(PagedAllocator):
    def __init__(self, query, parts):
        super().__init__(query, msgspec.structs.replace(parts, debug=False))


class CountsTwice(PagedAllocator):
    given = 0

    def free(self, indices):
        self.given += indices.shape[0]

    def available_size(self):
        return super().available_size() + self.given


class LetsTheWindowGoEarly(SWAAllocator):
    def free_swa_rows(self, table, rows, starts, ends):
        page = self.page_size
        super().free_swa_rows(table, rows, [-(-at // page) * page for at in starts], [-(-at // page) * page for at in ends])


class IgnoresTheWindow(SWAAllocator):
    def free_swa(self, indices):
        pass


class TakesTheWholeTail(SWAAllocator):
    def alloc_extend_swa_tail(self, *args):
        return self.alloc_extend(*args[:6])


class ForgetsWhatLeft(SWAAllocator):
    def free_rows(self, table, rows, starts, ends, swa_starts=None):
        super().free_rows(table, rows, starts, ends, swa_starts and ends)


class TakesOneSideFirst(SWAAllocator):
    def alloc(self, need_size, owner=None):
        found = super().alloc(need_size, owner)
        if found is None:
            self.full.alloc(need_size)
        return found


class LosesItsMap(SWAAllocator):
    def translate(self, loc):
        return loc


class RestoresHalf(SWAAllocator):
    def restore_state(self, state):
        if not isinstance(state, tuple):
            super().restore_state(state)
        self.full.restore_state(state.full)
        raise SlotError("the other side would not")


class ForgetsPlaces(SWAAllocator):
    def translate(self, loc):
        found = super().translate(loc)
        return torch.where(found > 0, found // self.page_size * self.page_size, found)


class AsksTheDevice(SWAAllocator):
    def free_swa_pages(self, pages):
        super().free_swa_pages(torch.unique(pages))


class RestoresAfterAGroup(SWAAllocator):
    def restore_state(self, state):
        pass


SUITES = {MHAPool: pool_suite, PagedAllocator: allocator_suite, SWAAllocator: allocator_suite}
for broken in [found for base in SUITES for found in base.__subclasses__() if found.__module__ == __name__]:
    globals()["Test" + broken.__name__] = SUITES[broken.__base__](broken)
"""
CAUGHT_BY = {
    "ForgetsValues": {"test_moves_take_everything_along", "test_copies_come_back_bit_identical"},
    "WritesNextDoor": {"test_a_write_to_slot_0_is_harmless"},
    "DescribesHalf": {"test_copying_a_page_by_its_descriptors_copies_all_of_it"},
    "NeedsTorch": {"test_buffers_are_declared_without_torch"},
    "KeepsAfterClear": {"test_clear_zeroes_everything"},
    "DropsScales": {"test_scaled_reads_are_near_what_was_written"},
    "SwapsScales": {"test_scaled_reads_are_near_what_was_written"},
    "RoundsDown": {"test_scaled_reads_are_near_what_was_written"},
    "KeepsAnIndexBehind": {"test_a_transfer_takes_every_buffer_of_a_page"},
    "CutsRegionsShort": {"test_regions_are_whole_items"},
    "ListsLayersInPairs": {"test_regions_are_cut_as_the_pool_says"},
    "InventsStates": {"test_states_are_described_alike"},
    "ReadsAtOnce": {"test_reads_wait_for_their_layer"},
    "WaitsTooLate": {"test_reads_wait_before_they_read"},
    "HandsOutHalf": {"test_slots_of_a_page_are_consecutive"},
    "LosesPages": {"test_any_token_gives_back_its_page_once", "test_no_slot_has_two_owners"},
    "RestoresAnything": {"test_restore_takes_back_allocations", "test_restore_after_a_free_is_refused"},
    "TakesBeforeItLooks": {"test_a_call_that_cannot_be_served_changes_nothing"},
    "TakesBeforeItChecks": {"test_a_refused_call_changes_nothing"},
    "ForgetsTheLastPage": {"test_extends_equal_a_loop_over_the_tokens", "test_no_slot_has_two_owners"},
    "KeepsNewerStates": {"test_restoring_an_older_state_voids_newer_ones"},
    "GivesBackAtOnce": {"test_a_free_group_waits_for_its_end"},
    "WaitsForTheDevice": {"test_nothing_waits_for_the_device"},
    "IgnoresDebug": {"test_with_debug_a_wrong_free_raises_at_once"},
    "CountsTwice": {"test_a_double_free_makes_no_room"},
    "LetsTheWindowGoEarly": {"test_a_page_goes_back_with_its_last_token", "test_both_sides_stay_in_step"},
    "IgnoresTheWindow": {"test_windows_can_be_freed_by_tokens_and_by_pages"},
    "TakesTheWholeTail": {"test_only_the_tail_gets_sliding_slots"},
    "ForgetsWhatLeft": {"test_rows_are_freed_from_where_their_window_begins"},
    "TakesOneSideFirst": {"test_a_short_sliding_side_takes_nothing_of_the_full_one"},
    "LosesItsMap": {"test_only_the_tail_gets_sliding_slots"},
    "RestoresHalf": {"test_a_restore_is_for_both_sides_or_neither"},
    "ForgetsPlaces": {"test_every_slot_translates_to_one_of_its_own"},
    "AsksTheDevice": {"test_window_frees_never_wait_for_the_device"},
    "RestoresAfterAGroup": {"test_a_group_gives_back_the_pages_that_were_mapped_when_they_were_queued"},
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
