"""What every KV pool promises, as tests."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import TYPE_CHECKING, ClassVar

import pytest

from kvdock.errors import SlotError
from kvdock.layout import Buffer
from kvdock.testing.suite_base import Suite

if TYPE_CHECKING:
    import torch

    from kvdock.builder import KVCache
    from kvdock.planner import CachePlan
    from kvdock.pools.base import Pool
    from kvdock.queries import PoolQuery


class PoolSuite(Suite):
    """The promises of a KV pool, checked on every pool of `pool_cls` that the plan holds."""

    pool_cls: ClassVar[type[Pool]]
    values_are_in_keys: ClassVar[bool] = False
    """True for pools (MLA) whose value of a slot is a part of its key."""

    @pytest.fixture
    def pool(self, cache: KVCache) -> Pool:
        """Give the first pool of the class under test."""
        found = [pool for pool in cache.pools.values() if type(pool) is self.pool_cls]
        assert found, f"no group got {self.pool_cls.__name__}; the plan says why: {cache.plan.explain()}"
        return found[0]

    @pytest.fixture
    def data(self, pool: Pool, seed: int) -> Data:
        """Give a model of the pool: random values of random slots, written to both."""
        data = Data(pool, random.Random(seed), self.values_are_in_keys)
        data.write(data.some_slots())
        return data

    def test_what_attention_reads_counts_as_kv(self, plan: CachePlan) -> None:
        """Each group has buffers marked `is_kv`, so that reports and costs count them as KV."""
        for group in plan.groups:
            assert any(buffer.is_kv and buffer.nbytes for buffer in group.buffers), (
                f"no buffer of group {group.name!r} is marked is_kv=True"
            )

    def test_buffers_are_declared_without_torch(self, plan: CachePlan, monkeypatch: pytest.MonkeyPatch) -> None:
        """`buffers` answers for each group while torch cannot be imported, and no two names are the same."""
        monkeypatch.setitem(sys.modules, "torch", None)
        queries = _queries(plan, self.pool_cls)
        assert queries, f"no group got {self.pool_cls.__name__}: {plan.explain()}"
        for query in queries:
            declared = self.pool_cls.buffers(query)
            assert isinstance(declared, tuple)
            assert all(isinstance(buffer, Buffer) for buffer in declared)
            assert len({buffer.name for buffer in declared}) == len(declared)

    def test_planned_bytes_are_allocated_bytes(self, plan: CachePlan, cache: KVCache) -> None:
        """The tensors take what the plan says, to the byte."""
        assert cache.allocated_bytes() == plan.total_bytes <= self.budget_bytes

    def test_layers_are_those_of_the_group(self, pool: Pool) -> None:
        """A pool names its layers by their global ids, and refuses others."""
        group = pool.query.group
        assert group is not None
        assert set(pool.layer_ids) == {*group.layer_ids, *(reader for reader, _ in group.shared)}
        for read in (pool.get_key_buffer, pool.get_value_buffer):
            with pytest.raises(SlotError, match="layer 9999"):
                read(9999)

    def test_views_are_pages(self, pool: Pool, page_size: int) -> None:
        """Keys and values are views of pages, one more than the usable ones for padding."""
        pages = pool.parts.sizes[pool.query.space.name] // page_size + 1
        for layer in pool.layer_ids:
            keys, values = pool.get_kv_buffer(layer)
            assert keys.shape[:2] == values.shape[:2] == (pages, page_size)

    def test_reads_return_what_was_written(self, data: Data) -> None:
        """Later writes win, layers are apart, and slots that were not written stay."""
        before = data.snapshot()
        data.write(data.some_slots())
        data.check()
        untouched = [slot for slot in data.slots if slot not in data.expected]
        data.check_equal(untouched, before)

    def test_the_last_slot_is_usable(self, data: Data) -> None:
        """The slot with the largest number that an allocator hands out can be written and read."""
        data.write([data.slots[-1], data.slots[0]])
        data.check()

    def test_a_write_to_slot_0_is_harmless(self, data: Data) -> None:
        """Slot 0 takes the writes of padded batches and no other slot notices."""
        before = data.snapshot()
        data.write([0, 0])
        data.check_equal(data.slots, before)

    def test_slots_may_be_int32(self, data: Data) -> None:
        """Request tables hold int32, and their slots address the same rows."""
        import torch

        data.write(data.some_slots(), dtype=torch.int32)
        data.check()

    def test_an_empty_batch_changes_nothing(self, data: Data) -> None:
        """Writing, moving and copying no slot is allowed."""
        before = data.snapshot()
        none = data.tensor([])
        data.write([])
        data.pool.move_kv_cache(none, none)
        data.pool.load_cpu_copy(data.pool.get_cpu_copy(none), none)
        data.check_equal(data.slots, before)

    def test_moves_take_everything_along(self, data: Data) -> None:
        """A move reads every source first, so that targets may be sources too."""
        sources = data.some_slots()
        data.write(sources)
        targets = [*sources[1:], sources[0]]
        data.pool.move_kv_cache(data.tensor(targets), data.tensor(sources))
        moved = {target: data.expected[source] for target, source in zip(targets, sources, strict=True)}
        data.expected.update(moved)
        data.check()

    def test_copies_come_back_bit_identical(self, data: Data) -> None:
        """A host copy outlives the overwriting of its slots and can be loaded into others."""
        sources, rest = data.some_slots(), dict(data.expected)
        data.write(sources)
        saved = {slot: data.expected[slot] for slot in sources}
        copies = data.pool.get_cpu_copy(data.tensor(sources))
        assert all(copy.device.type == "cpu" for copy in copies)
        data.write(sources)
        targets = sources[::-1]
        data.pool.load_cpu_copy(copies, data.tensor(targets))
        data.expected.update({target: saved[source] for target, source in zip(targets, sources, strict=True)})
        data.check()
        assert rest.keys() <= data.expected.keys()

    def test_descriptors_lie_inside_the_tensors(self, pool: Pool) -> None:
        """Each described range is inside one storage, and its length is a whole number of items."""
        storages = [t.untyped_storage() for t in pool.storages()]
        ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        infos = pool.buffer_infos()
        assert infos
        for info in infos:
            assert any(low <= info.pointer and info.pointer + info.nbytes <= high for low, high in ranges)
            assert info.nbytes % info.item_nbytes == 0
            assert info.layer_id is None or info.layer_id in pool.layer_ids
        assert pool.get_contiguous_buf_infos() == (
            [info.pointer for info in infos],
            [info.nbytes for info in infos],
            [info.item_nbytes for info in infos],
        )

    def test_copying_a_page_by_its_descriptors_copies_all_of_it(self, data: Data, page_size: int) -> None:
        """What a transfer engine does: the bytes of a page, range by range, are the whole page."""
        if self.torch_device != "cpu":
            pytest.skip("the host cannot write to the memory of this device")
        source = [slot for slot in data.slots if slot // page_size == 1]
        data.write(source)
        for info in data.pool.buffer_infos():
            size = info.item_nbytes
            ctypes.memmove(info.pointer + 2 * size, info.pointer + size, size)
        data.expected.update({slot + page_size: data.expected[slot] for slot in source})
        data.check()

    def test_clear_zeroes_everything(self, data: Data) -> None:
        """After `clear` every slot reads zero."""
        data.pool.clear()
        for layer in data.pool.layer_ids:
            for view in data.pool.get_kv_buffer(layer):
                assert not view.to(data.float).any()

    def test_used_memory_is_measured(self, pool: Pool) -> None:
        """`mem_usage` counts each storage once."""
        assert pool.mem_usage == sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in pool.storages()}.values()
        )
        assert pool.mem_usage > 0


class Data:
    """A pool beside a dictionary of what each slot must hold, layer by layer."""

    def __init__(self, pool: Pool, rng: random.Random, values_are_in_keys: bool) -> None:
        import torch

        self.pool = pool
        self.rng = rng
        self.values_are_in_keys = values_are_in_keys
        self.float = torch.float32
        self.model_dtype: torch.dtype = getattr(torch, pool.query.model_dtype)
        self.page_size = pool.query.space.page_size
        self.slots = range(self.page_size, self.page_size + pool.parts.sizes[pool.query.space.name])
        assert pool.query.group is not None
        self.layers = pool.query.group.layer_ids
        self.expected: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def some_slots(self) -> list[int]:
        """Return random usable slots, each once, over several pages."""
        return self.rng.sample(self.slots, k=min(len(self.slots), 3 * self.page_size // 2))

    def tensor(self, slots: list[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return slots as a tensor on the pool's device."""
        import torch

        return torch.tensor(slots, dtype=dtype or torch.int64, device=self.pool.parts.device)

    def write(self, slots: list[int], dtype: torch.dtype | None = None) -> None:
        """Write random small whole numbers, which every format holds exactly, to `slots` of every layer."""
        written: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {slot: [] for slot in slots}
        for layer in self.layers:
            k, v = self._random(layer, len(slots))
            self.pool.set_kv_buffer(layer, self.tensor(slots, dtype), k, v)
            for row, slot in enumerate(slots):
                written[slot].append((k[row].to(self.float), v[row].to(self.float)))
        self.expected.update(written)

    def _random(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        keys, values = self.pool.get_kv_buffer(layer)
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))

        def numbers(shape: tuple[int, ...]) -> torch.Tensor:
            drawn = torch.randint(-8, 9, (count, *shape), generator=generator)
            return drawn.to(self.model_dtype).to(self.pool.parts.device)

        k = numbers(tuple(keys.shape[2:]))
        v = k[..., : values.shape[-1]] if self.values_are_in_keys else numbers(tuple(values.shape[2:]))
        return k, v

    def read(self, slots: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the pool holds for `slots` of one layer."""
        index = self.tensor(slots)
        keys, values = self.pool.get_kv_buffer(layer)
        page, offset = index // self.page_size, index % self.page_size
        return keys[page, offset].to(self.float), values[page, offset].to(self.float)

    def snapshot(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what every usable slot holds now, layer by layer."""
        return [self.read(list(self.slots), layer) for layer in self.layers]

    def check(self) -> None:
        """Compare every slot that was written with what it must hold."""
        import torch

        slots = list(self.expected)
        for place, layer in enumerate(self.layers):
            found = self.read(slots, layer)
            for part in (0, 1):
                expected = torch.stack([self.expected[slot][place][part] for slot in slots])
                assert torch.equal(found[part], expected.to(found[part].device)), f"layer {layer} differs"

    def check_equal(self, slots: list[int] | range, before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Compare `slots` with a snapshot."""
        import torch

        rows = [slot - self.page_size for slot in slots]
        for layer, parts in zip(self.layers, before, strict=True):
            for now, then in zip(self.read(list(slots), layer), parts, strict=True):
                assert torch.equal(now, then[rows]), f"layer {layer} changed"


def _queries(plan: CachePlan, pool_cls: type[Pool]) -> list[PoolQuery]:
    return [choice.query for choice in plan.outline.pools if choice.cls is pool_cls]
