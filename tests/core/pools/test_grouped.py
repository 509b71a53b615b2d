"""What every pool of one group does with its list of buffers: descriptors, copies, clearing, debug checks."""

import pytest
from kvdock.errors import PluginError, SlotError
from kvdock.layout import Buffer, Unit

torch = pytest.importorskip("torch")

from kvdock.pools import MHAPool, MLAPool  # noqa: E402
from kvdock.pools.mha import kv_buffer  # noqa: E402


class PoolWithIndex(MHAPool):
    """A page of bytes beside K and V: first a byte a token, then two more a token."""

    @classmethod
    def buffers(cls, query):
        page = query.space.page_size
        index = Buffer(
            name="index", role="index", space="full", unit=Unit.PAGE, guard=1, shape=(3 * page,), dtype="uint8",
            layers=query.group.layer_ids[:1], is_kv=True,
        )  # fmt: skip
        table = Buffer(name="table", role="scratch", guard=7, shape=(), dtype="int32")
        return (*super().buffers(query), index, table)

    def slot_views(self):
        page = self.query.space.page_size
        pages = self.parts.tensors.rows("index")
        parts = pages[:, :page].view(-1, page, 1), pages[:, page:].view(-1, page, 2)
        return [*super().slot_views(), *parts]


def pools(make, page_size=16):
    return {
        "mha": make.pool(MHAPool, make.query({0: make.mha(v_dim=4), 3: make.mha(v_dim=4)}, page_size), 3 * page_size),
        "mla": make.pool(MLAPool, make.query({0: make.mla(), 3: make.mla()}, page_size), 3 * page_size),
        "index": make.pool(PoolWithIndex, make.query({0: make.mha(), 3: make.mha()}, page_size), 3 * page_size),
    }


PAGE_BYTES = {
    "mha": [16 * 2 * 8 * 2] * 2 + [16 * 2 * 4 * 2] * 2,
    "mla": [16 * 24 * 2] * 2,
    "index": [16 * 2 * 8 * 2] * 4 + [3 * 16],
}


@pytest.mark.parametrize("kind", PAGE_BYTES)
def test_descriptors_count_in_pages(make, kind):
    """P-06: page 16; as many pointers as lengths, items are the bytes of a page, lengths whole pages."""
    pool = pools(make)[kind]
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert items == PAGE_BYTES[kind]
    assert lengths == [4 * item for item in items]
    assert len(set(pointers)) == len(pointers) == len(items)


def test_descriptors_name_layers_roles_and_space_in_a_fixed_order(make):
    found = [(i.name, i.role, i.layer_id, i.space) for i in pools(make)["mha"].buffer_infos()]
    assert found == [
        ("k", "key", 0, "full"),
        ("k", "key", 3, "full"),
        ("v", "value", 0, "full"),
        ("v", "value", 3, "full"),
    ]


def test_descriptors_leave_out_what_no_token_owns(make):
    assert "table" not in {info.name for info in pools(make)["index"].buffer_infos()}


def test_descriptors_point_at_the_views(make):
    pool = pools(make)["mha"]
    infos = {(info.name, info.layer_id): info.pointer for info in pool.buffer_infos()}
    assert infos["k", 3] == pool.get_key_buffer(3).data_ptr()
    assert infos["v", 0] == pool.get_value_buffer(0).data_ptr()


@pytest.mark.parametrize("kind", PAGE_BYTES)
def test_memory_is_measured_and_its_parts_add_up(make, kind):
    """P-13: used memory is that of the storages, and the breakdown sums to it."""
    pool = pools(make)[kind]
    assert pool.mem_usage == sum(raw.untyped_storage().nbytes() for raw in pool.storages()) > 0
    assert sum(pool.breakdown().values()) == pool.mem_usage
    assert tuple(pool.breakdown()) == pool.parts.tensors.names


def test_all_that_a_slot_owns_moves_inside_its_pages(make, slots):
    pool = pools(make, page_size=4)["index"]
    keys, pairs = pool.slot_views()[-2:]
    keys[1, 2], pairs[1, 2] = 5, 6
    pool.move_kv_cache(slots(9), slots(6))
    assert keys[2, 1].tolist() == [5]
    assert pairs[2, 1].tolist() == [6, 6]
    page = pool.parts.tensors.rows("index")[2].tolist()
    assert page == [0, 5, 0, 0, 0, 0, 6, 6, 0, 0, 0, 0]


def test_all_that_a_slot_owns_is_copied_out_and_in(make, slots):
    pool = pools(make, page_size=4)["index"]
    pool.slot_views()[-1][1, 2] = 6
    copies = pool.get_cpu_copy(slots(6))
    assert len(copies) == 2 * 2 + 2
    pool.clear()
    pool.load_cpu_copy(copies, slots(13))
    assert pool.slot_views()[-1][3, 1].tolist() == [6, 6]


def test_clear_zeroes_every_buffer(make):
    pool = pools(make)["index"]
    for raw in pool.storages():
        raw.fill_(1)
    pool.clear()
    assert not any(raw.any() for raw in pool.storages())


def test_a_move_of_unequal_lengths_is_refused(make, slots):
    with pytest.raises(SlotError, match="2 target slots for 1 source slots; nothing was moved"):
        pools(make)["mha"].move_kv_cache(slots(1, 2), slots(3))


def test_copies_of_another_pool_are_refused_and_nothing_is_written(make, slots):
    some = pools(make)
    copies = some["mla"].get_cpu_copy(slots(1))
    with pytest.raises(SlotError, match="these 2 copies do not fit the 4 tensors of this pool for 1 slots"):
        some["mha"].load_cpu_copy(copies, slots(1))


def test_copies_for_another_number_of_slots_are_refused(make, slots):
    pool = pools(make)["mha"]
    with pytest.raises(SlotError, match="for 2 slots; load what get_cpu_copy of the same pool returned"):
        pool.load_cpu_copy(pool.get_cpu_copy(slots(1)), slots(1, 2))


@pytest.mark.parametrize("slot", [-1, 16])
def test_debug_refuses_a_slot_that_does_not_exist_and_names_it(make, slots, slot):
    pool = make.pool(MHAPool, make.query({7: make.mha()}, page_size=4), tokens=12, debug=True)
    with pytest.raises(SlotError, match=rf"layer 7: slot {slot} is outside 0 … 15; nothing was written"):
        pool.set_kv_buffer(7, slots(4, slot), torch.ones(2, 2, 8), torch.ones(2, 2, 8))
    assert not pool.get_key_buffer(7).any()
    for call in (pool.move_kv_cache, lambda a, b: pool.get_cpu_copy(a)):
        with pytest.raises(SlotError, match=rf"group 'g': slot {slot} is outside"):
            call(slots(slot), slots(4))


def test_debug_names_the_request_that_holds_a_wrong_slot(make, slots):
    requests = make.request_pool()
    (row,) = requests.alloc(["chat-7"])
    requests.write([row], [0], [2], slots(4, 99))
    pool = make.pool(MHAPool, make.query({7: make.mha()}, page_size=4), tokens=12, debug=True, request_pool=requests)
    with pytest.raises(SlotError, match=r"layer 7: slot 99 \(of request 'chat-7'\) is outside 0 … 15"):
        pool.set_kv_buffer(7, slots(99), torch.ones(1, 2, 8), torch.ones(1, 2, 8))


def test_debug_refuses_a_write_through_a_freed_slot(make, slots):
    pool = make.sliding(debug=True)
    allocator = pool.parts.allocator
    held = allocator.alloc(4, owner="chat-7")
    freed = held.clone()
    allocator.free(held)
    with pytest.raises(SlotError, match=r"(?s)layer 0, group 'full': .*owner 'chat-7'.*were freed but are written"):
        pool.set_kv_buffer(0, freed, torch.ones(4, 2, 8), torch.ones(4, 2, 8))
    assert not pool.get_key_buffer(0).any()


def test_a_pool_of_one_group_needs_a_group(make):
    query = make.query({0: make.mha()})
    router = type(query)(**{name: getattr(query, name) for name in query.__struct_fields__} | {"group": None})
    with pytest.raises(PluginError, match="asked for no group; claim a RoutedPool"):
        MHAPool.buffers(router)


def test_a_vendor_names_its_buffer_in_one_line(make):
    buffer = kv_buffer(make.query({2: make.mha()}, page_size=16), "k", "key", (1, 4))
    assert (buffer.guard, buffer.layers, buffer.space, buffer.is_kv) == (16, (2,), "full", True)
