"""One latent row per token."""

import pytest
from kvdock.errors import PlanError, SlotError
from kvdock.model import DSAParams, LayerSpec

torch = pytest.importorskip("torch")

from kvdock.pools import MLAPool  # noqa: E402


@pytest.fixture
def pool(make):
    return make.pool(MLAPool, make.query({0: make.mla(), 3: make.mla()}, shared=((4, 3),)))


def test_the_value_is_the_latent_columns_of_the_same_buffer(pool):
    key, value = pool.get_kv_buffer(3)
    assert key.shape == (4, 4, 1, 24)
    assert value.shape == (4, 4, 1, 16)
    assert value.data_ptr() == key.data_ptr() == pool.get_value_buffer(4).data_ptr()


def test_latent_and_rope_lie_side_by_side(pool, slots):
    pool.set_mla_kv_buffer(3, slots(6, 9), torch.full((2, 1, 16), 2.0), torch.full((2, 1, 8), 7.0))
    row = pool.get_key_buffer(3)[2, 1, 0]
    assert row[:16].eq(2).all()
    assert row[16:].eq(7).all()
    assert pool.get_key_buffer(3).sum() == 2 * (16 * 2 + 8 * 7)


def test_latent_and_rope_are_read_back_in_any_type(pool, slots):
    pool.set_mla_kv_buffer(3, slots(6), torch.full((1, 1, 16), 2.0), torch.full((1, 1, 8), 7.0))
    nope, rope = pool.get_mla_kv_buffer(4, slots(5, 6), dst_dtype=torch.float32)
    assert nope.dtype == rope.dtype == torch.float32
    assert nope.shape == (2, 1, 16)
    assert not nope[0].any()
    assert nope[1].eq(2).all()
    assert rope[1].eq(7).all()


def test_a_whole_row_is_written_at_once(pool, slots):
    rows = torch.arange(24.0).view(1, 1, 24)
    pool.set_kv_buffer(0, slots(5), rows, rows[..., :16])
    assert pool.get_key_buffer(0)[1, 1].eq(rows[0]).all()
    assert pool.get_value_buffer(0)[1, 1].eq(rows[0, :, :16]).all()


@pytest.mark.parametrize("widths", [(16, 7), (15, 8), (8, 16)])
def test_parts_of_other_widths_are_refused_and_nothing_is_written(pool, slots, widths):
    with pytest.raises(SlotError, match="layer 0: values of shape"):
        pool.set_mla_kv_buffer(0, slots(5), *(torch.ones(1, 1, width) for width in widths))
    assert not pool.get_key_buffer(0).any()


def test_unknown_and_shared_layers_are_refused(pool, slots):
    with pytest.raises(SlotError, match="layer 1 has no KV"):
        pool.get_mla_kv_buffer(1, slots(5))
    with pytest.raises(SlotError, match="layer 1 has no KV"):
        pool.get_key_buffer(1)
    with pytest.raises(SlotError, match="layer 4 reads the KV of layer 3"):
        pool.set_kv_buffer(4, slots(5), torch.ones(1, 1, 24))


def test_layers_of_two_widths_are_no_group(make):
    with pytest.raises(PlanError, match="layers 0 and 2 of group 'g' have latents of different widths"):
        MLAPool.buffers(make.query({0: make.mla(), 1: make.mla(), 2: make.mla(rope=4)}))


def test_layers_without_a_latent_are_refused(make):
    with pytest.raises(PlanError, match="layer 1 of group 'g' is of kind 'mha', which has no latent"):
        MLAPool.buffers(make.query({1: make.mha()}))


def test_layers_with_an_indexer_have_a_latent_too(make):
    params = DSAParams(kv_lora_rank=16, qk_rope_head_dim=8, index_head_dim=128)
    (latent,) = MLAPool.buffers(make.query({0: LayerSpec(kind="dsa", params=params)}))
    assert latent.shape == (1, 24)
    assert latent.role == "latent"


def test_the_hot_path_never_waits_for_the_device(make):
    loc = torch.zeros(3, dtype=torch.int64, device="meta")
    for dtype in ("bfloat16", "fp8_e5m2"):
        pool = make.pool(MLAPool, make.query({0: make.mla()}, dtype=dtype), device="meta")
        nope, rope = (torch.zeros(3, 1, width, device="meta") for width in (16, 8))
        pool.set_mla_kv_buffer(0, loc, nope, rope)
        assert pool.get_mla_kv_buffer(0, loc, torch.float32)[0].shape == (3, 1, 16)
