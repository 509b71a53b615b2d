"""Keys and values per head: layers, shapes, refusals."""

import pytest
from kvdock.errors import PlanError, SlotError

torch = pytest.importorskip("torch")

from kvdock.pools import MHAPool, MLAPool  # noqa: E402

FULL_OF_27 = (3, 7, 11, 15, 19, 23, 26)


def test_buffers_belong_to_the_layers_that_own_kv(make):
    """P-12: 27 layers of which seven are full; id 26 is the seventh tensor and id 0 has none."""
    query = make.query({i: make.mha() for i in FULL_OF_27})
    pool = make.pool(MHAPool, query)
    assert pool.layer_ids == FULL_OF_27
    assert [len(buffer.layers) for buffer in MHAPool.buffers(query)] == [7, 7]
    keys = pool.parts.tensors.storages_of("k")
    assert len(keys) == 7
    assert pool.get_key_buffer(26).data_ptr() == keys[6].data_ptr()
    for read in (pool.get_key_buffer, pool.get_value_buffer):
        with pytest.raises(SlotError, match=r"layer 0 has no KV in this pool; it holds the layers \[3, 7, 11"):
            read(0)


def test_a_write_lands_in_its_slot_and_nowhere_else(make, slots):
    pool = make.pool(MHAPool, make.query({0: make.mha(), 4: make.mha()}, page_size=4), tokens=12)
    k, v = torch.full((2, 2, 8), 3.0, dtype=torch.bfloat16), torch.full((2, 2, 8), 5.0, dtype=torch.bfloat16)
    pool.set_kv_buffer(4, slots(5, 15), k, v)
    keys, values = pool.get_kv_buffer(4)
    assert keys.shape == values.shape == (4, 4, 2, 8)
    assert keys[1, 1].eq(3).all()
    assert values[3, 3].eq(5).all()
    assert keys.sum() == 2 * 16 * 3
    assert not pool.get_key_buffer(0).any()


def test_shared_layers_read_the_tensors_of_their_owner(make, slots):
    pool = make.pool(MHAPool, make.query({0: make.mha(), 1: make.mha()}, shared=((2, 0), (3, 1))))
    assert pool.layer_ids == (0, 1, 2, 3)
    assert pool.get_key_buffer(2).data_ptr() == pool.get_key_buffer(0).data_ptr()
    assert pool.get_value_buffer(3).data_ptr() == pool.get_value_buffer(1).data_ptr()
    assert len(pool.storages()) == 4


def test_a_shared_layer_cannot_be_written(make, slots):
    pool = make.pool(MHAPool, make.query({0: make.mha()}, shared=((2, 0),)))
    with pytest.raises(SlotError, match="layer 2 reads the KV of layer 0 and owns none; write to layer 0"):
        pool.set_kv_buffer(2, slots(4), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    assert not pool.get_key_buffer(0).any()


def test_an_unknown_layer_cannot_be_written(make, slots):
    pool = make.pool(MHAPool, make.query({0: make.mha()}))
    with pytest.raises(SlotError, match="layer 9 has no KV"):
        pool.set_kv_buffer(9, slots(4), torch.ones(1, 2, 8), torch.ones(1, 2, 8))


def test_layers_of_two_shapes_are_no_group(make):
    with pytest.raises(PlanError, match="layers 1 and 5 of group 'g' have different shapes"):
        MHAPool.buffers(make.query({1: make.mha(), 3: make.mha(), 5: make.mha(dim=16)}))


def test_layers_of_another_kind_are_refused(make):
    with pytest.raises(PlanError, match="layer 2 of group 'g' is of kind 'mla', not mha"):
        MHAPool.buffers(make.query({2: make.mla()}))


def test_heads_that_do_not_split_are_refused(make):
    """R-06: 6 heads on 4 ranks."""
    with pytest.raises(PlanError, match="6 KV heads do not split over 4 attention ranks"):
        MHAPool.buffers(make.query({0: make.mha(heads=6)}, tp=4))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "fp4", "float8_e8m0fnu"])
@pytest.mark.parametrize("cls", [MHAPool, MLAPool])
def test_types_that_cannot_hold_values_are_refused(make, cls, dtype):
    layer = make.mha() if cls is MHAPool else make.mla()
    with pytest.raises(PlanError, match=r"kv_cache_dtype=.* cannot hold keys and values in this pool; give auto"):
        cls.buffers(make.query({0: layer}, dtype=dtype))


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "shown"),
    [
        ((2, 1, 8), (2, 2, 8), r"\[2, 1, 8\]"),
        ((2, 2, 8), (2, 2, 4), r"\[2, 2, 4\]"),
        ((1, 2, 8), (2, 2, 8), r"\[1, 2, 8\]"),
        ((2, 16), (2, 2, 8), r"\[2, 16\]"),
    ],
)
def test_values_that_do_not_fit_are_refused_and_nothing_is_written(make, slots, k_shape, v_shape, shown):
    pool = make.pool(MHAPool, make.query({0: make.mha()}))
    with pytest.raises(
        SlotError, match=rf"layer 0: values of shape {shown} .* give slots \[n\] and values \[n, 2, 8\]"
    ):
        pool.set_kv_buffer(0, slots(4, 5), torch.ones(k_shape), torch.ones(v_shape))
    assert not pool.get_key_buffer(0).any()
    assert not pool.get_value_buffer(0).any()


def test_values_of_another_float_type_are_converted(make, slots):
    pool = make.pool(MHAPool, make.query({0: make.mha()}))
    pool.set_kv_buffer(0, slots(4), torch.full((1, 2, 8), 1 / 3), torch.full((1, 2, 8), 2.5, dtype=torch.float64))
    assert pool.get_key_buffer(0)[1, 0].eq(torch.tensor(1 / 3, dtype=torch.bfloat16)).all()
    assert pool.get_value_buffer(0)[1, 0].eq(2.5).all()


def test_a_scale_is_for_8_bit_pools_alone(make, slots):
    pool = make.pool(MHAPool, make.query({0: make.mha()}))
    ones = torch.ones(1, 2, 8)
    pool.set_kv_buffer(0, slots(4), ones, ones, k_scale=4.0, v_scale=4.0)
    assert pool.get_key_buffer(0)[1, 0].eq(1).all()


def test_pools_of_heads_keep_no_latents(make, slots):
    pool = make.pool(MHAPool, make.query({0: make.mha()}))
    with pytest.raises(SlotError, match="layer 0 keeps no latent rows: MHAPool takes set_kv_buffer"):
        pool.set_mla_kv_buffer(0, slots(4), torch.ones(1, 1, 8), torch.ones(1, 1, 8))
    with pytest.raises(SlotError, match="layer 0 keeps no latent rows: MHAPool has get_kv_buffer"):
        pool.get_mla_kv_buffer(0, slots(4))


def test_pools_without_states_have_no_state_descriptors(make):
    assert make.pool(MHAPool, make.query({0: make.mha()})).get_state_buf_infos() == ([], [], [])


def test_the_hot_path_never_waits_for_the_device(make):
    """Meta tensors hold no values: whatever would read one back raises."""
    loc = torch.zeros(3, dtype=torch.int32, device="meta")
    values = torch.zeros(3, 2, 8, dtype=torch.float16, device="meta")
    for dtype in ("bfloat16", "fp8_e4m3"):
        pool = make.pool(MHAPool, make.query({0: make.mha()}, dtype=dtype), tokens=2**20, device="meta")
        pool.set_kv_buffer(0, loc, values, values, k_scale=0.5, v_scale=torch.tensor(0.5, device="meta"))
        pool.move_kv_cache(loc, loc)
        assert pool.get_key_buffer(0).shape == (2**18 + 1, 4, 2, 8)
        assert pool.mem_usage == 2 * (2**20 + 4) * 16 * (1 if dtype == "fp8_e4m3" else 2)
