"""Calls of the family's pools that cannot be served say why in an error of kvdock, and change nothing."""

import pytest
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["nope", None, ["c4"], 4])
def test_parts_that_are_not_there_are_named_with_those_that_are(cache, name):
    built = cache()
    pool, slots = built.token_to_kv_pool, built.admit("a", 300)
    for call in (pool.places_for, pool.slots_for):
        with pytest.raises(SlotError, match=r"no part is called .*; there are swa, c4, c4\.index, c4\.state, "):
            call(name, slots)


@pytest.mark.parametrize("wrong", [[200], None, 5, "x"])
def test_what_is_no_tensor_is_refused(cache, wrong):
    built = cache()
    pool, slots = built.token_to_kv_pool, built.admit("a", 300)
    states, index = pool.state_pool(1), pool.index_pool(1)
    place, compressed = pool.translate_loc_from_full_to_state(slots[-1:]), pool.translate_loc_from_full_to_compressed
    row = compressed(slots[3:4], 4)
    parts = (*states.slot_views(), *index.slot_views())
    before = [view.clone() for view in parts]
    for call in (
        lambda: states.set_states(1, place, wrong, wrong),
        lambda: index.set_index_k(1, row, wrong),
        lambda: index.set_index_k_scale_buffer(1, row, wrong, wrong),
        lambda: pool.set_kv_buffer(0, slots[:1], wrong, None),
        lambda: pool.set_extra_key_buffer(1, slots[3:4], wrong),
        lambda: pool.translate_loc_from_full_to_swa(wrong),
        lambda: compressed(wrong, 4),
    ):
        with pytest.raises(SlotError, match="give a tensor"):
            call()
    for view, was in zip(parts, before, strict=True):
        assert torch.equal(view.view(torch.uint8), was.view(torch.uint8))
