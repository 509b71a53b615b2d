"""Pools that route by layer, and sliding layers with slots of their own."""

import pytest
from kvdock.errors import PluginError, SlotError
from kvdock.options import CacheOptions

torch = pytest.importorskip("torch")

from kvdock.pools import MHAPool, RoutedPool, SlidingPool  # noqa: E402


@pytest.fixture
def mixed(make):
    """Layers 0 and 2 with heads, layer 1 with latents."""
    heads = make.query({0: make.mha(), 2: make.mha()}, 4, "full", "heads")
    latents = make.query({1: make.mla()}, 4, "full", "latents")
    return make.routed(RoutedPool, [heads, latents], {"full": 12, "swa": 12})


def test_each_layer_finds_its_group(mixed, slots):
    assert mixed.layer_ids == (0, 1, 2)
    mixed.set_kv_buffer(2, slots(5), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    mixed.set_mla_kv_buffer(1, slots(5), torch.ones(1, 1, 16), torch.ones(1, 1, 8))
    assert mixed.get_key_buffer(2)[1, 1].eq(1).all()
    assert mixed.get_value_buffer(1)[1, 1].eq(1).all()
    assert mixed.get_mla_kv_buffer(1, slots(5))[1].eq(1).all()
    assert not mixed.get_key_buffer(0).any()


def test_a_layer_of_no_group_is_refused_by_name(mixed, slots):
    with pytest.raises(SlotError, match=r"layer 7 has no KV in this pool; it holds the layers \[0, 1, 2\]"):
        mixed.get_key_buffer(7)
    with pytest.raises(SlotError, match="layer 7"):
        mixed.set_kv_buffer(7, slots(5), torch.ones(1, 2, 8), torch.ones(1, 2, 8))


def test_latents_of_a_layer_with_heads_are_refused(mixed, slots):
    with pytest.raises(SlotError, match="layer 0 keeps no latent rows"):
        mixed.get_mla_kv_buffer(0, slots(5))


def test_a_layer_in_two_groups_needs_a_pool_that_knows_both(make):
    one = make.query({0: make.mha()}, 4, "full", "a")
    two = make.query({0: make.mha()}, 4, "full", "b")
    with pytest.raises(PluginError, match="layer 0 is in the groups 'a' and 'b', and RoutedPool routes a layer to one"):
        make.routed(RoutedPool, [one, two], {"full": 12, "swa": 12})


def test_moves_copies_and_clearing_reach_every_part(mixed, slots):
    mixed.set_kv_buffer(0, slots(5), torch.full((1, 2, 8), 2.0), torch.full((1, 2, 8), 3.0))
    mixed.set_mla_kv_buffer(1, slots(5), torch.full((1, 1, 16), 4.0), torch.full((1, 1, 8), 5.0))
    mixed.move_kv_cache(slots(6), slots(5))
    copies = mixed.get_cpu_copy(slots(6))
    mixed.clear()
    assert not any(raw.any() for raw in mixed.storages())
    mixed.load_cpu_copy(copies, slots(9))
    assert mixed.get_key_buffer(0)[2, 1].eq(2).all()
    assert mixed.get_value_buffer(0)[2, 1].eq(3).all()
    assert mixed.get_mla_kv_buffer(1, slots(9))[1].eq(5).all()


def test_another_number_of_copies_is_refused_and_nothing_is_written(mixed, slots):
    copies = mixed.get_cpu_copy(slots(5))
    with pytest.raises(SlotError, match="4 copies for 5 tensors of the parts heads, latents"):
        mixed.load_cpu_copy([torch.ones_like(copy) for copy in copies[:-1]], slots(5))
    assert not mixed.get_key_buffer(0).any()


def test_a_copy_that_does_not_fit_the_last_part_is_refused_before_any_part_is_written(mixed, slots):
    copies = [torch.ones_like(copy) for copy in mixed.get_cpu_copy(slots(5, 6))]
    for wrong in (copies[-1][:1], copies[-1].to(torch.float64), copies[-1][..., :3]):
        with pytest.raises(SlotError, match="do not fit the 1 tensors of this pool for 2 slots"):
            mixed.load_cpu_copy([*copies[:-1], wrong], slots(5, 6))
    assert not any(raw.any() for raw in mixed.storages())


def test_descriptors_of_the_parts_follow_each_other(make):
    """P-06: a routed pool lists the descriptors of its parts, in pages, each with its space."""
    pool = make.sliding(full=16, swa=8, page_size=2)
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert len(pointers) == len(lengths) == len(items) == 8
    assert items == [2 * 2 * 8 * 2] * 4 + [2 * 4 * 4 * 2] * 2 + [2 * 4 * 2 * 2] * 2
    assert [length // item for length, item in zip(lengths, items, strict=True)] == [9] * 4 + [5] * 4
    assert [info.space for info in pool.buffer_infos()] == ["full"] * 4 + ["swa"] * 4
    assert [info.layer_id for info in pool.buffer_infos()] == [0, 2, 0, 2, 1, 3, 1, 3]
    assert pool.get_state_buf_infos() == ([], [], [])


def test_memory_of_a_composite_is_that_of_its_parts(make, mixed):
    """P-13: used memory of composites is measured, and the breakdown sums to it."""
    for pool in (make.sliding(full=16, swa=8, page_size=2), mixed):
        assert pool.mem_usage == sum(part.mem_usage for part in pool.parts.pools.values()) > 0
        assert sum(pool.breakdown().values()) == pool.mem_usage
    assert make.sliding().breakdown() == {"full": 2 * 18 * 2 * 16 * 2, "swa": 2 * 10 * 4 * 6 * 2}


def test_a_storage_that_parts_share_counts_once(mixed):
    class Shared(RoutedPool):
        def storages(self):
            return super().storages() * 2

    pool = Shared(mixed.query, mixed.parts)
    assert pool.mem_usage == mixed.mem_usage == sum(pool.breakdown().values())


def test_parts_know_the_same_options_whole(make):
    """P-10: one options object, every option away from its default, is what each part has."""
    options = CacheOptions(
        page_size=4,
        kv_cache_dtype="fp8_e5m2",
        memory_saver=True,
        lazy_compaction=False,
        pd_multiplexing=True,
        attention_backend="torch",
        swa_full_tokens_ratio=0.3,
    )
    queries = [
        make.query({0: make.mha()}, 4, "full", "a", options=options),
        make.query({1: make.mha(dim=16)}, 4, "full", "b", options=options),
    ]
    pool = make.routed(RoutedPool, queries, {"full": 12, "swa": 12})
    assert [part.query.options is options for part in pool.parts.pools.values()] == [True, True]
    assert pool.query.options is options
    assert all(part.get_key_buffer(i).dtype == torch.float8_e5m2 for i, part in enumerate(pool.parts.pools.values()))


@pytest.fixture
def shifted(make):
    """A sliding pool whose next full slots are 10, 11 … and whose next sliding slots are 2, 3 …"""
    pool = make.sliding(full=16, swa=8, page_size=2)
    pool.parts.allocator.free_swa(pool.parts.allocator.alloc(8))
    return pool


def numbered(numbers, *shape):
    return torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1).expand(-1, *shape).clone()


def test_full_slots_are_taken_for_every_layer(shifted):
    pool = shifted
    full = pool.parts.allocator.alloc(4)
    swa = pool.translate_loc_from_full_to_swa(full)
    assert (full.tolist(), swa.tolist()) == ([10, 11, 12, 13], [2, 3, 4, 5])
    for layer, shapes in ((0, ((2, 8), (2, 8))), (1, ((4, 4), (4, 2)))):
        pool.set_kv_buffer(layer, full, *(numbered([1, 2, 3, 4], *shape) for shape in shapes))
    assert pool.get_key_buffer(0).flatten(0, 1)[full, 0, 0].tolist() == [1, 2, 3, 4]
    assert pool.get_key_buffer(1).flatten(0, 1)[swa, 0, 0].tolist() == [1, 2, 3, 4]
    assert pool.get_value_buffer(1).flatten(0, 1)[swa, 3, 1].tolist() == [1, 2, 3, 4]


def test_slots_translate_to_padding_where_the_window_has_passed(shifted, slots):
    pool = shifted
    full = pool.parts.allocator.alloc(4)
    pool.parts.allocator.free_swa(full[:2])
    assert pool.translate_loc_from_full_to_swa(full)[:2].tolist() == [0, 0]
    assert pool.translate_loc_from_full_to_swa(slots(-1, 0)).tolist() == [-1, 0]
    pool.set_kv_buffer(1, full[:2], numbered([8, 9], 4, 4), numbered([8, 9], 4, 2))
    assert not pool.get_key_buffer(1)[1:].any()
    assert pool.get_key_buffer(1)[0].any()


def test_a_move_takes_both_slots_of_a_token_along(shifted):
    pool = shifted
    full = pool.parts.allocator.alloc(4)
    swa = pool.translate_loc_from_full_to_swa(full)
    pool.set_kv_buffer(0, full, numbered([1, 2, 3, 4], 2, 8), numbered([1, 2, 3, 4], 2, 8))
    pool.set_kv_buffer(1, full, numbered([1, 2, 3, 4], 4, 4), numbered([1, 2, 3, 4], 4, 2))
    pool.move_kv_cache(full[:2], full[2:])
    assert pool.get_key_buffer(0).flatten(0, 1)[full, 0, 0].tolist() == [3, 4, 3, 4]
    assert pool.get_key_buffer(1).flatten(0, 1)[swa, 0, 0].tolist() == [3, 4, 3, 4]


def test_tokens_beyond_the_window_are_copied_without_their_sliding_part(shifted):
    pool = shifted
    allocator = pool.parts.allocator
    full = allocator.alloc(4)
    pool.set_kv_buffer(0, full, numbered([1, 2, 3, 4], 2, 8), numbered([1, 2, 3, 4], 2, 8))
    pool.set_kv_buffer(1, full, numbered([1, 2, 3, 4], 4, 4), numbered([1, 2, 3, 4], 4, 2))
    allocator.free_swa(full[:2])
    copies = pool.get_cpu_copy(full)
    other = allocator.alloc(4)
    allocator.free_swa(other[:2])
    pool.load_cpu_copy(copies, other)
    swa = pool.translate_loc_from_full_to_swa(other)
    assert pool.get_key_buffer(0).flatten(0, 1)[other, 0, 0].tolist() == [1, 2, 3, 4]
    assert pool.get_key_buffer(1).flatten(0, 1)[swa[2:], 0, 0].tolist() == [3, 4]
    kept = pool.translate_loc_from_full_to_swa(full)
    assert pool.get_key_buffer(1).flatten(0, 1)[kept[2:], 0, 0].tolist() == [3, 4]


def test_a_sliding_pool_needs_the_map(make):
    query = make.query({0: make.mha()}, 4, "full", "a")
    with pytest.raises(PluginError, match="SlidingPool needs an allocator that translates full slots, not NoneType"):
        make.routed(SlidingPool, [query], {"full": 12, "swa": 12})


def test_the_hot_path_never_waits_for_the_device(make):
    pool = make.sliding(device="meta")
    loc = torch.zeros(3, dtype=torch.int64, device="meta")
    pool.set_kv_buffer(1, loc, torch.zeros(3, 4, 4, device="meta"), torch.zeros(3, 4, 2, device="meta"))
    pool.move_kv_cache(loc, loc)
    assert pool.mem_usage == 2 * 18 * 2 * 16 * 2 + 2 * 10 * 4 * 6 * 2
    assert isinstance(pool.parts.pools["swa"], MHAPool)


def test_debug_finds_a_write_through_a_freed_slot_in_sliding_layers_too(make, slots):
    """A slot that was taken back still maps to a sliding slot that is another's by now."""
    pool = make.sliding(debug=True)
    allocator = pool.parts.allocator
    first = allocator.alloc(4)
    state = allocator.backup_state()
    lost = allocator.alloc(4)
    mapped = allocator.translate(lost)
    allocator.restore_state(state)
    allocator.free_swa(first[:2])
    others = allocator.alloc(2)
    assert (lost.tolist(), mapped.tolist()) == ([6, 7, 8, 9], [6, 7, 8, 9])
    assert others.tolist() == [6, 7]
    for layer, shape, v_shape in ((0, (2, 8), (2, 8)), (1, (4, 4), (4, 2))):
        with pytest.raises(SlotError, match=f"layer {layer}, .*from 8 were freed but are written"):
            pool.set_kv_buffer(layer, lost[2:], numbered([1, 2], *shape), numbered([1, 2], *v_shape))
        pool.set_kv_buffer(layer, others, numbered([1, 2], *shape), numbered([1, 2], *v_shape))
    with pytest.raises(SlotError, match="from 8 were freed"):
        pool.get_cpu_copy(lost[2:])
    with pytest.raises(SlotError, match="from 8 were freed"):
        pool.move_kv_cache(others, lost[2:])
