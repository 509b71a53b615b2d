"""DeepSeek V4 on NPUs: calls that cannot be served say why in an error of kvdock, and change nothing."""

import pytest
from kvdock.errors import SlotError

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)


@pytest.fixture
def held(cached):
    """A cache, and the slots of a request of 700 tokens."""
    cache = cached(max_total_tokens=4096)
    return cache, cache.admit("a", 700)


@pytest.mark.parametrize(
    ("prefix", "seq", "says"),
    [
        ([0], [600], "extend_num_tokens=700, but seq_lens_cpu - prefix_lens_cpu add up to 600"),
        ([0], [701], "extend_num_tokens=700, but seq_lens_cpu - prefix_lens_cpu add up to 701"),
        ([0, 0], [700], "2 prefix lengths but 1 sequence lengths"),
        ([700], [0], "request 0 of the batch grows from 700 to 0 tokens"),
        ([-1], [699], "request 0 of the batch grows from -1 to 699 tokens"),
        ([], [], "add up to 0"),
        (["x"], [700], "prefix_lens_cpu holds"),
        (None, [700], "prefix_lens_cpu holds"),
    ],
)
def test_a_bundle_is_for_as_many_slots_as_tokens(held, prefix, seq, says):
    cache, slots = held
    with pytest.raises(SlotError, match=says):
        cache.token_to_kv_pool_allocator.bundle(slots, prefix, seq)


@pytest.mark.parametrize("slots", [[1, 2], None, torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]]), torch.tensor(5)])
def test_a_bundle_is_of_a_row_of_slots(held, slots):
    cache, _ = held
    with pytest.raises(SlotError, match=r"^slots (is|has) "):
        cache.token_to_kv_pool_allocator.bundle(slots, [0], [2])


@pytest.mark.parametrize("name", ["nope", None, ["c4"], 4])
def test_parts_and_spaces_that_are_not_there_are_named_with_those_that_are(held, name):
    cache, slots = held
    pool = cache.token_to_kv_pool
    for call in (pool.places_for, pool.slots_for):
        with pytest.raises(SlotError, match=r"no part is called .*; there are swa, c4, c4\.index, c4\.state, "):
            call(name, slots)
    for call in (
        lambda: pool.translate_loc_from_full_to_state(slots, name),
        lambda: cache.token_to_kv_pool_allocator.translate_beside(name, slots),
    ):
        with pytest.raises(
            SlotError, match=r"no space .* lies beside full slots; there are c4, c128, c4_state, c128_st"
        ):
            call()


@pytest.mark.parametrize("wrong", [[200], None, 5, "x"])
def test_what_is_no_tensor_is_refused(held, wrong):
    cache, slots = held
    pool, allocator = cache.token_to_kv_pool, cache.token_to_kv_pool_allocator
    states, index, row = pool.state_pool(1), pool.index_pool(1), torch.randn(1, 160)
    place = pool.translate_loc_from_full_to_state(slots[-1:])
    before = [view.clone() for view in (*states.slot_views(), *index.slot_views())]
    for call in (
        lambda: states.set_states(1, place, wrong, wrong),
        lambda: states.set_states(1, wrong, row, row),
        lambda: index.set_index_k(1, wrong, torch.randn(1, 128)),
        lambda: index.set_index_k(1, slots[:1], wrong),
        lambda: index.set_index_k_scale_buffer(1, slots[:1], wrong, wrong),
        lambda: pool.set_kv_buffer(0, slots[:1], wrong, None),
        lambda: pool.set_extra_key_buffer(1, slots[3:4], wrong),
        lambda: pool.translate_loc_from_full_to_swa(wrong),
        lambda: pool.translate_loc_from_full_to_compressed(wrong, 4),
        lambda: allocator.translate_beside("c4", wrong),
    ):
        with pytest.raises(SlotError, match="give a tensor"):
            call()
    for view, was in zip((*states.slot_views(), *index.slot_views()), before, strict=True):
        assert torch.equal(view, was)


def test_counts_that_are_none_are_refused(held):
    cache, _ = held
    allocator = cache.token_to_kv_pool_allocator
    for call, says in (
        (lambda: allocator.shortfall("x"), "pages"),
        (lambda: allocator.alloc_pages(1, 5), "owners=5 is no list"),
        (lambda: allocator.alloc_pages("x"), "count"),
        (lambda: allocator.alloc(1.5), "need_size"),
    ):
        with pytest.raises(SlotError, match=says):
            call()
