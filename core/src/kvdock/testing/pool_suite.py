"""What every KV pool promises, as tests."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import TYPE_CHECKING

import pytest

from kvdock import dtypes
from kvdock.builder import build
from kvdock.errors import SlotError
from kvdock.layout import Buffer, Unit
from kvdock.pools.grouped import group_of
from kvdock.testing.pairing import described_alike, seen_pools, without_fingerprint
from kvdock.testing.pool_data import SIDES, Arrival, Data
from kvdock.testing.pool_plans import PlanChecks
from kvdock.testing.pool_rows import kept_beside, wrong_rows
from kvdock.testing.refusing import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from kvdock.cache import KVCache
    from kvdock.planner import CachePlan
    from kvdock.pools.base import BufferInfo, Pool, Region
    from kvdock.queries import PoolQuery


class PoolSuite(PlanChecks):
    """The promises of a KV pool, checked on every pool of `pool_cls` that the plan holds."""

    @pytest.fixture
    def pool(self, cache: KVCache) -> Pool:
        """Give the first pool of the class under test."""
        return self._pool_of(cache)

    @pytest.fixture
    def data(self, pool: Pool, seed: int) -> Data:
        """Give a model of the pool: random values of random slots, written to both."""
        return self._written(pool, seed)

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
        """A pool names its layers by their global ids."""
        group = pool.query.group
        assert group is not None
        assert set(pool.layer_ids) == {*group.layer_ids, *(reader for reader, _ in group.shared)}

    def test_other_layers_are_refused(self, data: Data) -> None:
        """A read or a write of a layer that has no buffer here raises `SlotError` with its id, and changes nothing."""
        pool, before, loc = data.pool, data.snapshot(), data.tensor(data.some_slots())
        rows = data.random(data.layers[0], len(loc))
        calls = _layer_calls(pool, loc) | {"set_kv_buffer": lambda layer: pool.set_kv_buffer(layer, loc, *rows)}
        for layer in (max(pool.layer_ids) + 1, 9999, -1):
            for name, call in calls.items():
                why = f"the pool holds the layers {list(pool.layer_ids)}; look the layer up, and give refuse_layer"
                with refused(f"{name} of layer {layer}", why, f"layer {layer}"):
                    call(layer)
        for layer, owner in dict(group_of(pool.query).shared).items():
            why = f"it reads the KV of layer {owner} and owns none; look the layer up, and give refuse_write"
            with refused(f"set_kv_buffer of layer {layer}", why, f"layer {layer}"):
                pool.set_kv_buffer(layer, loc, *rows)
        data.check_equal(data.slots, before)

    def test_rows_are_of_the_models_shape(self, pool: Pool) -> None:
        """Keys and values of a slot have the heads and widths that the layer's spec says."""
        wrong = wrong_rows(pool)
        assert not wrong, "\n".join(wrong)

    def test_buffers_are_views_of_the_storage(self, data: Data) -> None:
        """A buffer that was fetched shows what is written later: attention reads through it, without a copy."""
        pool = data.pool
        if dtypes.find(pool.query.kv_dtype).block:
            pytest.skip("a block format is dequantised into a copy where it is read")
        addresses = {tensor.untyped_storage().data_ptr() for tensor in pool.storages()}
        fetched = {layer: pool.get_kv_buffer(layer) for layer in pool.layer_ids}
        data.write(data.some_slots())
        for layer, views in fetched.items():
            for side, view, now in zip(SIDES, views, pool.get_kv_buffer(layer), strict=True):
                name = f"get_{side}_buffer({layer})"
                assert view.untyped_storage().data_ptr() in addresses, (
                    f"{name} of {type(pool).__name__} returns a copy: its memory is none of the pool's storages, so kernels "
                    "would read what was there before; return a view (no clone, contiguous, cat or to)"
                )
                is_shown = bool((view.to(data.float) == now.to(data.float)).all())
                assert is_shown, f"{name} does not show what was written after it was fetched"

    def test_views_are_pages(self, pool: Pool, page_size: int) -> None:
        """Keys and values are views of pages, one more than the usable ones for padding."""
        pages = pool.parts.sizes[pool.query.space.name] // page_size + 1
        for layer in pool.layer_ids:
            keys, values = pool.get_kv_buffer(layer)
            for side, view in zip(SIDES, (keys, values), strict=True):
                assert tuple(view.shape[:2]) == (pages, page_size), (
                    f"layer {layer}: the {side} buffer is {list(view.shape)}, but {pages - 1} pages of {page_size} slots and "
                    f"one of padding are [{pages}, {page_size}, …]; declare it with a page of guard (guard={page_size} where "
                    "unit is SLOT, guard=1 where it is PAGE)"
                )

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

    def test_copies_are_the_callers(self, data: Data) -> None:
        """A host copy, even of one slot, shares no memory with the pool."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in data.pool.storages()}
        for count in (1, 2):
            copies = data.pool.get_cpu_copy(data.tensor(data.rng.sample(data.slots, count)))
            shared = [place for place, copy in enumerate(copies) if copy.untyped_storage().data_ptr() in addresses]
            assert shared == [], f"the copies {shared} of {count} slots are views of the pool; copy what they show"

    def test_other_copies_are_refused(self, data: Data) -> None:
        """Too few copies, or copies of another number of slots, are refused before anything is written."""
        pool, slots = data.pool, data.rng.sample(data.slots, 2)
        copies = pool.get_cpu_copy(data.tensor(slots))
        data.write(slots)
        before = data.snapshot()
        one, why = data.tensor(slots[:1]), "what would be missing stays as it is, unnoticed; call verify_copies first"
        with refused(f"load_cpu_copy of {len(copies) - 1} of {len(copies)} copies", why):
            pool.load_cpu_copy(copies[:-1], data.tensor(slots))
        with refused("load_cpu_copy of 2 slots into 1", why):
            pool.load_cpu_copy(copies, one)
        data.check_equal(data.slots, before)

    def test_what_does_not_fit_is_refused(self, data: Data) -> None:
        """Rows of other widths or numbers than the slots raise `SlotError` with the layer, and nothing is written."""
        pool, slots, before = data.pool, data.rng.sample(data.slots, 2), data.snapshot()
        loc, why = data.tensor(slots), "verify keys, values and slots (check_write) before the first of them is written"
        for layer in data.layers:
            for what, call in _misfits(data, layer, loc).items():
                with refused(f"set_kv_buffer of {what}", why, f"layer {layer}"):
                    call()
        with refused("move_kv_cache of 2 slots to 1", "each source needs a target; compare their shapes first"):
            pool.move_kv_cache(loc[:1], loc)
        data.check_equal(data.slots, before)

    def test_no_memory_is_kept_beside_the_plan(self, data: Data) -> None:
        """What a pool keeps, also after its first calls, is what `buffers` declares, so that the plan counts it."""
        pool, loc = data.pool, data.tensor(data.some_slots())
        for layer in pool.layer_ids:
            pool.get_kv_buffer(layer)
            pool.read_kv(layer, loc)
        pool.move_kv_cache(loc, loc)
        pool.load_cpu_copy(pool.get_cpu_copy(loc), loc)
        found = kept_beside(pool)
        assert found == {}, (
            f"{type(pool).__name__} keeps tensors that no buffer declares, as attribute → bytes: {found}; declare a Buffer "
            "(role scratch, space None for a fixed size) and take it from parts.tensors"
        )

    def test_descriptors_lie_inside_the_tensors(self, pool: Pool) -> None:
        """Each described range is inside one storage, and its length is a whole number of items."""
        storages = [t.untyped_storage() for t in pool.storages()]
        ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        infos = pool.buffer_infos()
        assert infos
        for info in infos:
            last = info.pointer + (info.nbytes // info.item_nbytes - 1) * info.stride_nbytes
            assert any(low <= info.pointer and last + info.item_nbytes <= high for low, high in ranges)
            assert info.nbytes % info.item_nbytes == 0
            assert info.layer_id is None or info.layer_id in pool.layer_ids

    def test_descriptors_tell_every_tensor_apart(self, plan: CachePlan, cache: KVCache, pool: Pool) -> None:
        """Name, role and layer are of one tensor each, also in what routes to the pool, and the plan has a fingerprint."""
        assert (alike := described_alike((pool, *seen_pools(cache)))) == "", alike
        assert (why := without_fingerprint(plan)) == "", why

    def test_descriptors_are_stable(self, data: Data) -> None:
        """A transfer engine registers memory once: writes, moves and `clear` leave every address and length alone."""
        pool = data.pool

        def described() -> tuple[object, ...]:
            return pool.buffer_infos(), pool.get_contiguous_buf_infos(), pool.get_state_buf_infos()

        before, slots = described(), data.some_slots()
        data.write(slots)
        pool.move_kv_cache(data.tensor(slots[1:]), data.tensor(slots[:-1]))
        pool.clear()
        assert described() == before

    def test_with_debug_a_write_to_a_free_slot_raises(self, plan: CachePlan, seed: int) -> None:
        """What was given back may not be written any more: the write is refused, and nothing changes."""
        pytest.importorskip("torch")
        pool = self._pool_of(build(plan, device=self.torch_device, debug=True))
        allocator = pool.parts.allocators.get(pool.query.space.name)
        if allocator is None:
            pytest.skip(f"no allocator of its own hands out the slots of {pool.query.space.name}")
        data = Data(pool, random.Random(seed), self.values_are_in_keys)
        slots = allocator.alloc(2 * allocator.page_size)
        assert slots is not None
        data.write(slots.tolist())
        allocator.free(slots[: allocator.page_size])
        with refused(
            f"with debug, a write to slot {int(slots[0])}, which was given back",
            "another request may own it; call check_write (or the allocator's verify_live) before writing",
        ):
            data.write(slots[:1].tolist())
        data.check()

    def test_regions_are_whole_items(self, pool: Pool, page_size: int) -> None:
        """What a transfer engine is given: as many pointers as lengths and item sizes, and a whole number of pages each."""
        storages = [t.untyped_storage() for t in pool.storages()]
        ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        pages = pool.parts.sizes[pool.query.space.name] // page_size + 1
        found = pool.get_contiguous_buf_infos()
        assert found == _columns(pool.regions())
        assert len(found[0]) == len(found[1]) == len(found[2]) > 0
        for pointer, nbytes, item in zip(*found, strict=True):
            assert nbytes == pages * item
            assert any(low <= pointer and pointer + nbytes <= high for low, high in ranges)

    def test_regions_are_cut_as_the_pool_says(self, pool: Pool) -> None:
        """`transfer_kind`: keys of each layer and then values of each, or as described one by one, or pages of all layers."""
        infos, found = pool.buffer_infos(), pool.get_contiguous_buf_infos()
        if pool.transfer_kind == "pages":
            assert len(found[0]) == 1
            assert {info.stride_nbytes for info in infos} == {found[2][0]}
            return
        assert found == _columns(infos)
        half = len(infos) // 2
        if pool.transfer_kind == "kv_pairs":
            assert {info.role for info in infos[:half]} == {"key"}
            assert {info.role for info in infos[half:]} == {"value"}
            assert [info.layer_id for info in infos[:half]] == [info.layer_id for info in infos[half:]]

    def test_states_are_described_alike(self, pool: Pool) -> None:
        """State buffers come as three lists of one length, in whole items; all empty for pools without states."""
        found = pool.get_state_buf_infos()
        assert found == _columns(pool.state_infos())
        assert len(found[0]) == len(found[1]) == len(found[2])
        assert all(nbytes % item == 0 for _, nbytes, item in zip(*found, strict=True))

    def test_a_transfer_takes_every_buffer_of_a_page(self, pool: Pool, seed: int) -> None:
        """All that a page owns comes along, whatever reads it: scales and index keys as well as keys and values."""
        import torch

        if self.torch_device != "cpu":
            pytest.skip("the host cannot write to the memory of this device")
        generator = torch.Generator().manual_seed(seed)
        views = dict(_page_views(pool))
        for view in views.values():
            view.copy_(torch.randint(1, 100, view.shape, generator=generator))
        for pointer, _, item in zip(*pool.get_contiguous_buf_infos(), strict=True):
            ctypes.memmove(pointer + 2 * item, pointer + item, item)
        left = [name for name, view in views.items() if not torch.equal(view[1], view[2])]
        assert not left, f"a page was transferred without {', '.join(left)}"

    def test_copying_a_page_by_its_descriptors_copies_all_of_it(self, data: Data, page_size: int) -> None:
        """What a transfer engine does: the bytes of a page, range by range, are the whole page."""
        if self.torch_device != "cpu":
            pytest.skip("the host cannot write to the memory of this device")
        source = [slot for slot in data.slots if slot // page_size == 1]
        data.write(source)
        for info in data.pool.buffer_infos():
            start, step = info.pointer, info.stride_nbytes
            ctypes.memmove(start + 2 * step, start + step, info.item_nbytes)
        data.expected.update({slot + page_size: data.expected[slot] for slot in source})
        data.check()

    def test_clear_zeroes_everything(self, data: Data) -> None:
        """After `clear` every slot reads zero."""
        data.pool.clear()
        for layer in data.pool.layer_ids:
            for view in data.pool.get_kv_buffer(layer):
                assert not view.to(data.float).any()

    def test_reads_wait_for_their_layer(self, data: Data) -> None:
        """While layers arrive, each read waits for the layer that owns what it reads, and for no other."""
        pool, loc = data.pool, data.tensor(data.some_slots())
        group = pool.query.group
        assert group is not None
        for layer in pool.layer_ids:
            owner = dict(group.shared).get(layer, layer)
            for read in _reads(pool, layer, loc):
                transfer = Arrival()
                pool.register_layer_transfer(transfer)
                read()
                waited = tuple(transfer.waited)
                assert set(waited) == {owner}, f"a read of layer {layer} waited for {waited}, not for {owner}"
                pool.register_layer_transfer(None)
                read()
                assert tuple(transfer.waited) == waited, "a read waits for a transfer that is over"

    def test_reads_wait_before_they_read(self, data: Data) -> None:
        """`read_kv` returns what a transfer brings while it waits."""
        import torch

        slots = data.some_slots()
        loc = data.tensor(slots)
        for layer in data.layers:
            k, v = data.random(layer, len(slots))
            data.pool.register_layer_transfer(Arrival(lambda: data.pool.set_kv_buffer(layer, loc, k, v)))  # noqa: B023
            found = data.pool.read_kv(layer, loc, dtype=torch.float32)
            data.pool.register_layer_transfer(None)
            assert torch.equal(found[0], k.to(torch.float32))
            assert torch.equal(found[1], v.to(torch.float32))

    def test_used_memory_is_measured(self, pool: Pool) -> None:
        """`mem_usage` counts each storage once."""
        assert pool.mem_usage == sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in pool.storages()}.values()
        )
        assert pool.mem_usage > 0


def _columns(items: Sequence[BufferInfo] | Sequence[Region]) -> tuple[list[int], list[int], list[int]]:
    return [i.pointer for i in items], [i.nbytes for i in items], [i.item_nbytes for i in items]


def _page_views(pool: Pool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a name and the pages of every tensor that a page of the pool's space owns: neither scratch nor overlays."""
    tensors = pool.parts.tensors
    for buffer in tensors.buffers:
        if buffer.space != pool.query.space.name or buffer.overlay or buffer.role == "scratch":
            continue
        pages = tensors.paged if buffer.unit is Unit.SLOT else tensors.rows
        for layer in buffer.layers or (None,):
            yield f"{buffer.name} of layer {layer}", pages(buffer.name, layer)


def _reads(pool: Pool, layer: int, loc: torch.Tensor) -> list[Callable[[], object]]:
    """Return the calls that read a layer; the last two for pools that answer them."""
    reads: list[Callable[[], object]] = [
        lambda: pool.get_key_buffer(layer),
        lambda: pool.get_value_buffer(layer),
        lambda: pool.get_kv_buffer(layer),
        lambda: pool.read_kv(layer, loc),
    ]
    for more in (lambda: pool.get_raw_kv_buffer(layer), lambda: pool.get_mla_kv_buffer(layer, loc)):
        try:
            more()
        except SlotError:
            continue
        reads.append(more)
    return reads


def _layer_calls(pool: Pool, loc: torch.Tensor) -> dict[str, Callable[[int], object]]:
    """Return by name what reads a layer."""
    return {
        "get_key_buffer": pool.get_key_buffer,
        "get_value_buffer": pool.get_value_buffer,
        "get_kv_buffer": pool.get_kv_buffer,
        "get_raw_kv_buffer": pool.get_raw_kv_buffer,
        "read_kv": lambda layer: pool.read_kv(layer, loc),
        "get_mla_kv_buffer": lambda layer: pool.get_mla_kv_buffer(layer, loc),
    }


def _misfits(data: Data, layer: int, loc: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return writes of two slots `loc` whose rows do not fit, by what is wrong with them."""
    write, (k, v) = data.pool.set_kv_buffer, data.random(layer, 2)
    found: dict[str, Callable[[], object]] = {
        "1 row for 2 slots": lambda: write(layer, loc, k[:1], v[:1]),
        "2 rows for 1 slot": lambda: write(layer, loc[:1], k, v),
        "a key that is too narrow": lambda: write(layer, loc, k[..., :-1], v),
    }
    if data.values_are_in_keys:
        return found
    values: dict[str, Callable[[], object]] = {
        "a value that is too narrow": lambda: write(layer, loc, k, v[..., :-1]),
        "1 value for 2 slots": lambda: write(layer, loc, k, v[:1]),
    }
    return found | values


def _queries(plan: CachePlan, pool_cls: type[Pool]) -> list[PoolQuery]:
    return [choice.query for choice in plan.outline.pools if choice.cls is pool_cls]
