"""Pools and allocators that break one promise each."""

import importlib

import msgspec
import torch
from kvdock.allocators import PagedAllocator, SWAAllocator
from kvdock.device import DeviceInfo
from kvdock.errors import SlotError
from kvdock.hookspecs import hookimpl
from kvdock.pools import MHAPool
from kvdock.testing.suites import AllocatorSuite, PoolSuite, SlidingAllocatorSuite

DEVICE = DeviceInfo(device_type="broken", name="b", total_bytes=2**24, free_before_load_bytes=2**24, free_bytes=2**24)

FEW = {"page_sizes": (4,), "seeds": (1,)}


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
    return type(
        "Test" + cls.__name__,
        (PoolSuite,),
        {"plugins": (("broken", Hooks(pool=cls)),), "device": DEVICE, "pool_cls": cls, **FEW},
    )


def allocator_suite(cls):
    suite = SlidingAllocatorSuite if issubclass(cls, SWAAllocator) else AllocatorSuite
    return type(
        "Test" + cls.__name__,
        (suite,),
        {"plugins": (("broken", Hooks(allocator=cls)),), "device": DEVICE, "allocator_cls": cls, **FEW},
    )


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
        importlib.import_module("torch")
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


class CallsAllTheSame(MHAPool):
    def buffer_infos(self):
        return [msgspec.structs.replace(info, name="kv", role="kv") for info in super().buffer_infos()]


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


class MovesItsMemory(MHAPool):
    moved = 0

    def clear(self):
        super().clear()
        self.moved = 64

    def buffer_infos(self):
        return [msgspec.structs.replace(info, pointer=info.pointer + self.moved) for info in super().buffer_infos()]


class WritesAnywhere(MHAPool):
    def check_rows(self, layer_id, shape, loc, values):
        pass


class ReturnsCopies(MHAPool):
    def get_value_buffer(self, layer_id):
        return super().get_value_buffer(layer_id).clone()


class LooksLayersUpBarely(MHAPool):
    def set_kv_buffer(self, layer_id, loc, k, v, k_scale=None, v_scale=None):
        self._k[layer_id]
        super().set_kv_buffer(layer_id, loc, k, v, k_scale, v_scale)


class IgnoresRanks(MHAPool):
    @classmethod
    def buffers(cls, query):
        alone = msgspec.structs.replace(query.parallel, tp_size=1, dp_size=1, dp_attention=False)
        return super().buffers(msgspec.structs.replace(query, parallel=alone))


class CountsLayersFromZero(MHAPool):
    def get_key_buffer(self, layer_id):
        self.owner_for_read(layer_id if layer_id in self._keys else self.group.layer_ids[-1])
        return self._keys.get(layer_id, self._keys[self.group.layer_ids[-1]])


class SwapsHeads(MHAPool):
    @classmethod
    def buffers(cls, query):
        return tuple(
            msgspec.structs.replace(buffer, shape=buffer.shape[::-1]) if buffer.name == "v" else buffer
            for buffer in super().buffers(query)
        )


class KeepsOneType(MHAPool):
    def set_kv_buffer(self, layer_id, loc, k, v, k_scale=None, v_scale=None):
        view, index = self._k[layer_id], (loc // self.query.space.page_size, loc % self.query.space.page_size)
        super().set_kv_buffer(layer_id, loc, k, v, k_scale, v_scale)
        if self.query.kv_dtype == "float32":
            view[index] = k.view(torch.int16).to(view.dtype)


class LaysPagesBySize(MHAPool):
    def get_key_buffer(self, layer_id):
        found = super().get_key_buffer(layer_id)
        return found.as_strided(found.shape, torch.empty(found.shape, device="meta").stride(), found.storage_offset())


class LooksAtSlots(MHAPool):
    def set_kv_buffer(self, layer_id, loc, k, v, k_scale=None, v_scale=None):
        if loc.shape[0] and loc.max().item() < 0:
            return
        super().set_kv_buffer(layer_id, loc, k, v, k_scale, v_scale)


class KeepsABuffer(MHAPool):
    def read_kv(self, *args, **more):
        self.scratch = torch.zeros(1024)
        return super().read_kv(*args, **more)


class LendsItsMemory(MHAPool):
    def get_cpu_copy(self, indices):
        if indices.shape[0] != 1:
            return super().get_cpu_copy(indices)
        page, place = divmod(int(indices), self.query.space.page_size)
        return [view[page, place : place + 1] for view in self.slot_views()]


class TakesAnyCopies(MHAPool):
    def load_cpu_copy(self, copies, indices):
        for view, copy in zip(self.slot_views(), copies, strict=False):
            self.parts.kernels.store(view, indices, copy[: indices.shape[0]])


class WritesHalf(MHAPool):
    def set_kv_buffer(self, layer_id, loc, k, v, k_scale=None, v_scale=None):
        if layer_id in self._k:
            self.check_write(layer_id, self._k[layer_id], loc, k)
            self.parts.kernels.store(self._k[layer_id], loc, self.codec.encode(k, k_scale))
        super().set_kv_buffer(layer_id, loc, k, v, k_scale, v_scale)


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


class UndoesCountsAlone(PagedAllocator):
    def checkpoint(self):
        free = self._ring.free
        return lambda: setattr(self._ring, "free", free)


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


class TakesAPageAndFails(PagedAllocator):
    def alloc_decode(self, *args):
        found = super().alloc_decode(*args)
        if found is None and self.available_size():
            self.alloc(self.page_size)
        return found


class TakesNoneForMissing(PagedAllocator):
    def alloc(self, need_size, owner=None):
        return super().alloc(need_size, owner) if need_size else None


class WaitsToDecode(PagedAllocator):
    def alloc_decode(self, seq_lens, *args):
        if seq_lens.shape[0]:
            seq_lens.max().item()
        return super().alloc_decode(seq_lens, *args)


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


class CopiesItsSlots(PagedAllocator):
    def free_pages(self, pages):
        torch.arange(self.size // self.page_size).clone()
        super().free_pages(pages)


class KeepsWhatItReturns(PagedAllocator):
    last = None

    def alloc_extend(self, *args):
        self.last = super().alloc_extend(*args)
        return self.last

    def free(self, indices):
        if self.last is not None and not self.last.any():
            indices = indices[:0]
        super().free(indices)


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
        super().free_swa_rows(
            table, rows, [-(-at // page) * page for at in starts], [-(-at // page) * page for at in ends]
        )


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
