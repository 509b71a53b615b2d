"""The mock family, the mock hardware and their variant: what is refused without the variant, what it changes."""

import pytest
from kvdock.errors import PlanError, SlotError, UnsupportedCombination
from kvdock.hookspecs import hookimpl
from kvdock.layout import SizeRule, Space, Unit
from kvdock.options import CacheOptions, Parallelism
from kvdock.plugins import resolve
from kvdock.plugins.loading import hook_names
from kvdock.queries import AllocatorQuery, GroupQuery, ModelQuery, PoolQuery, StateQuery
from kvdock.testing.mocks import (
    MOCK_DEVICE,
    RING_CONFIG,
    MockAllocator,
    MockStateParams,
    RingParams,
    add_mocks,
    ring_model,
)

PAGE = 4
SPACES = {
    "full": Space(name="full", rule=SizeRule(per_token=(1, 1)), page_size=PAGE),
    "ring": Space(name="ring", rule=SizeRule(per_request=(4, 1)), issued_by="derived"),
    "states": Space(name="states", rule=SizeRule(per_request=(1, 1)), issued_by="request_pool"),
}
SIZES = {"full": 16, "ring": 12, "states": 3, "requests": 3}


def fields(device=MOCK_DEVICE):
    return {"model": ring_model(), "options": CacheOptions(), "parallel": Parallelism(), "device": device}


def ring_groups(registry):
    model = ring_model()
    query = GroupQuery(**fields(), layers=tuple(enumerate(model.layers)), target=model)
    return resolve.layer_groups(registry, query)[0]


def query_for(registry, name, device=MOCK_DEVICE):
    groups = ring_groups(registry)
    (group,) = [group for group in groups if group.name == name]
    return PoolQuery(**fields(device), kind=group.kind, group=group, spaces=SPACES, groups=groups)


def test_the_family_reads_its_config(registry):
    add_mocks(registry)
    query = ModelQuery(config=RING_CONFIG, name="r")
    model, decision = resolve.read_model(registry, query)
    assert (decision.plugin, model.name, model.family, model.context_length) == ("ring", "r", "ring", 256)
    assert [layer.kind for layer in model.layers] == ["ring", "ring", "mha", "mock_state", "ring", "mha"]
    assert model.layers[0].params == RingParams(num_kv_heads=2, head_dim=8, v_head_dim=8, ring_tokens=4)
    assert model.layers[3].params == MockStateParams(rows=3, columns=16)


def test_a_config_with_a_layer_type_that_the_family_does_not_know_is_an_error(registry):
    add_mocks(registry)
    query = ModelQuery(config={**RING_CONFIG, "layer_types": ["moon"]})
    with pytest.raises(PlanError, match=r"layer_types lists 'moon'; the family ring knows mha, ring, mock_state .says"):
        resolve.read_model(registry, query)


def test_the_family_gives_each_kind_a_group_in_a_space_of_its_own(registry):
    add_mocks(registry)
    groups = ring_groups(registry)
    assert [(g.name, g.kind, g.space, g.layer_ids) for g in groups] == [
        ("full", "mha", "full", (2, 5)),
        ("ring", "ring", "ring", (0, 1, 4)),
        ("states", "mock_state", "states", (3,)),
    ]
    spaces, _ = resolve.spaces(registry, StateQuery(**fields(), groups=groups, all_groups=groups))
    assert spaces == {name: SPACES[name] for name in ("ring", "states")}


def test_without_the_variant_the_ring_is_refused_with_the_distribution_that_helps(registry):
    add_mocks(registry, variant=False)
    with pytest.raises(UnsupportedCombination) as caught:
        resolve.pool_cls(registry, query_for(registry, "ring"))
    assert str(caught.value) == (
        "no plugin offers the pool for group 'ring' (kind ring, device mock), hook get_pool_cls:\n"
        "  ring   kvdock-ring 1.0   unfit: RingPool runs on cpu, cuda, not on mock\n"
        "  mock   kvdock-mock 1.0   declined\n"
        "The variant mock.ring would add it: install kvdock-mock[ring]."
    )


def test_with_the_variant_only_the_ring_changes(registry):
    def chosen(name):
        return resolve.pool_cls(registry, query_for(registry, name))[0].__name__

    add_mocks(registry, variant=False)
    before = {name: chosen(name) for name in ("full", "states")}
    assert before == {"full": "MockPagedPool", "states": "MockStatePool"}
    add_mocks(registry, family=False, hardware=False)
    assert {name: chosen(name) for name in ("full", "states")} == before
    assert chosen("ring") == "MockRingPool"


def test_on_another_device_the_variant_and_the_hardware_decline(registry, cpu_device):
    from kvdock.pools import MHAPool

    class Core:
        @hookimpl
        def get_pool_cls(self, query):
            return MHAPool if query.kind == "mha" else None

    add_mocks(registry)
    registry.add(Core(), name="core", tier="core")
    names = {
        name: resolve.pool_cls(registry, query_for(registry, name, cpu_device))[0].__name__
        for name in ("full", "ring", "states")
    }
    assert names == {"full": "MHAPool", "ring": "RingPool", "states": "MockStatePool"}


def test_the_hardware_brings_its_allocator(registry):
    add_mocks(registry)
    found, decision = resolve.allocator_cls(registry, AllocatorQuery(**fields(), spaces=(SPACES["full"],)))
    assert (found, decision.plugin) == (MockAllocator, "mock")


def test_the_hardware_lists_its_device(registry):
    add_mocks(registry)
    assert resolve.find_device(registry, "mock:mock-1") is MOCK_DEVICE
    assert MOCK_DEVICE.free_bytes == 1_006_632_960


def test_the_ring_declares_a_padding_row_and_a_sentinel_row(registry, cpu_device):
    add_mocks(registry)
    query = query_for(registry, "ring", cpu_device)
    keys, values = resolve.pool_cls(registry, query)[0].buffers(query)
    assert (keys.space, keys.guard, keys.layers, keys.shape) == ("ring", 2, (0, 1, 4), (2, 8))
    assert keys.rows(SIZES["ring"]) == 14
    assert keys.row_nbytes == values.row_nbytes == 32
    assert keys.tensors * keys.tensor_nbytes(12) == 3 * 14 * 32


def test_the_hardware_lays_out_pages_and_one_padding_page(registry):
    add_mocks(registry)
    query = query_for(registry, "full")
    keys, _ = resolve.pool_cls(registry, query)[0].buffers(query)
    assert (keys.unit, keys.guard, keys.shape, keys.stacked) == (Unit.PAGE, 1, (PAGE, 2, 8), True)
    assert keys.tensor_nbytes(SIZES["full"] // PAGE) == 2 * 5 * 4 * 32


def test_a_state_takes_its_fixed_bytes_per_request(registry):
    add_mocks(registry)
    query = query_for(registry, "states")
    (state,) = resolve.pool_cls(registry, query)[0].buffers(query)
    assert (state.row_nbytes, state.tensor_nbytes(3)) == (48, 4 * 48)


@pytest.fixture
def built(registry):
    """A function that gives the live pool of a group on the CPU, from the class that the hooks name."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from kvdock.kernels.reference import ReferenceKernels
    from kvdock.planned import Parts
    from kvdock.pools.storage import allocate

    add_mocks(registry)

    def build(name):
        query = query_for(registry, name)
        cls, _ = resolve.pool_cls(registry, query)
        cpu = torch.device("cpu")
        tensors = allocate(cls.buffers(query), SIZES, SPACES, cpu)
        return cls(query, Parts(tensors=tensors, kernels=ReferenceKernels(), device=cpu, sizes=SIZES))

    return build


def written(pool, layer_id, slots):
    """Write distinct keys and values to slots and return them."""
    import torch

    loc = torch.tensor(slots)
    k = torch.arange(len(slots) * 16, dtype=torch.float32).view(-1, 2, 8).to(torch.bfloat16)
    pool.set_kv_buffer(layer_id, loc, k, -k)
    return k


@pytest.mark.parametrize(("name", "layer_id", "page"), [("full", 5, PAGE), ("ring", 4, 1)])
def test_what_is_written_is_read_and_neighbours_stay_zero(built, name, layer_id, page):
    pool = built(name)
    slots = [5, 9, 12]
    k = written(pool, layer_id, slots)
    keys, values = pool.get_kv_buffer(layer_id)
    for row, slot in enumerate(slots):
        assert (keys[slot // page, slot % page] == k[row]).all()
        assert (values[slot // page, slot % page] == -k[row]).all()
    assert int((keys != 0).any(dim=-1).any(dim=-1).sum()) == len(slots)
    others = [other for other in pool.layer_ids if other != layer_id]
    assert all(not pool.get_key_buffer(other).any() for other in others)


@pytest.mark.parametrize(("name", "layer_id"), [("full", 2), ("ring", 0)])
def test_copies_and_moves_carry_all_that_a_slot_owns(built, name, layer_id):
    import torch

    pool = built(name)
    written(pool, layer_id, [5, 9])
    before = pool.get_cpu_copy(torch.tensor([5, 9]))
    pool.move_kv_cache(torch.tensor([1, 2]), torch.tensor([5, 9]))
    assert all((a == b).all() for a, b in zip(before, pool.get_cpu_copy(torch.tensor([1, 2])), strict=True))
    pool.clear()
    assert not any(copy.any() for copy in pool.get_cpu_copy(torch.tensor([5, 9])))
    pool.load_cpu_copy(before, torch.tensor([7, 8]))
    assert all((a == b).all() for a, b in zip(before, pool.get_cpu_copy(torch.tensor([7, 8])), strict=True))


def test_a_position_of_a_row_has_its_slot_and_the_sentinel_is_behind_the_last(built):
    pool = built("ring")
    assert pool.ring_slots([1, 1, 2, 3], [0, 5, 3, 11]).tolist() == [1, 2, 8, 12]
    assert pool.sentinel_slot == 13
    assert pool.get_key_buffer(0).shape == (14, 1, 2, 8)


def test_a_state_is_written_and_read_and_is_no_kv(built):
    import torch

    pool = built("states")
    state = torch.arange(48, dtype=torch.uint8).view(1, 3, 16)
    pool.set_state(3, torch.tensor([2]), state)
    assert (pool.get_state(3)[2, 0] == state[0]).all()
    assert not pool.get_state(3)[1].any()
    with pytest.raises(SlotError, match="layer 3 keeps a state per request, no keys and values; call get_state"):
        pool.get_key_buffer(3)
    with pytest.raises(SlotError, match="keeps a state per request"):
        pool.get_value_buffer(3)
    with pytest.raises(SlotError, match="keeps a state per request"):
        pool.set_kv_buffer(3, torch.tensor([1]), state, state)
    with pytest.raises(SlotError, match="layer 0 has no KV in this pool"):
        pool.get_state(0)


@pytest.mark.parametrize("name", ["full", "ring", "states"])
def test_planned_bytes_are_allocated_bytes(built, name):
    pool = built(name)
    planned = {"full": 2 * 2 * 5 * 4 * 32, "ring": 3 * 2 * 14 * 32, "states": 4 * 48}
    assert pool.mem_usage == planned[name]


def test_a_mock_plugin_has_just_the_hooks_for_which_an_answer_is_given(registry, mock_plugin):
    registry.add(mock_plugin("a", tier="hardware", pool=int, objection="no"))
    registry.add(mock_plugin("b", tier="hardware"))
    assert [registry.hooks_of(member) for member in registry.members] == [
        ("get_pool_cls", "validate_plan", "validate_prefill_only"),
        ("validate_plan",),
    ]


def test_a_mock_plugin_can_answer_every_hook(registry, mock_plugin):
    names = "pool allocator request_pool reads groups spaces defaults objection devices live kernels"
    registry.add(mock_plugin("all", tier="hardware", **dict.fromkeys(names.split(), "x")))
    assert registry.hooks_of(registry.members[0]) == hook_names()
