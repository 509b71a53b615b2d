"""Planned bytes are allocated bytes, against formulas written here by hand."""

import pytest

torch = pytest.importorskip("torch")

from kvdock.pools import MHAPool, MLAPool  # noqa: E402
from kvdock.storages import bytes_of  # noqa: E402

PAGES = [1, 3, 16, 64, 256]
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def declared(cls, query, tokens):
    sizes = {"full": tokens, "swa": tokens}
    return sum(bytes_of(cls.buffers(query), query.spaces, sizes))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_mha_takes_the_planned_bytes(make, page, dtype, tp):
    layers = {i: make.mha(heads=4, dim=24, v_dim=16) for i in (0, 2, 5)}
    query = make.query(layers, page, dtype=dtype, tp=tp)
    tokens = 7 * page
    heads = max(1, 4 // tp)
    expected = 3 * (tokens + page) * heads * (24 + 16) * WIDTHS[dtype]
    assert declared(MHAPool, query, tokens) == expected
    assert make.pool(MHAPool, query, tokens).mem_usage == expected


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_mla_takes_the_planned_bytes_on_every_rank(make, page, dtype, tp):
    query = make.query({i: make.mla(lora=512, rope=64) for i in range(2)}, page, dtype=dtype, tp=tp)
    tokens = 7 * page
    expected = 2 * (tokens + page) * 576 * WIDTHS[dtype]
    assert declared(MLAPool, query, tokens) == expected
    assert make.pool(MLAPool, query, tokens).mem_usage == expected


def test_bytes_follow_the_layers_of_a_group_not_the_groups(make):
    """S-24: 28 layers in one group; the bytes of the tensors are 28 times those of a layer."""
    one = make.pool(MHAPool, make.query({0: make.mha()}, 16), tokens=160)
    many = make.pool(MHAPool, make.query({i: make.mha() for i in range(28)}, 16), tokens=160)
    assert many.mem_usage == 28 * one.mem_usage == 28 * 2 * 176 * 2 * 8 * 2


@pytest.mark.parametrize(("heads", "tp", "per_rank"), [(2, 4, 1), (8, 16, 1), (8, 4, 2)])
def test_replicated_heads_are_one_a_rank_and_the_total_stays(make, heads, tp, per_rank):
    """R-06: 2 heads on 4 ranks and 8 on 16 are one a rank; the model's count is not rebuilt from it."""
    query = make.query({0: make.mha(heads=heads)}, tp=tp)
    pool = make.pool(MHAPool, query)
    assert pool.get_key_buffer(0).shape[2] == per_rank
    assert pool.query.group.layers[0][1].params.num_kv_heads == heads
