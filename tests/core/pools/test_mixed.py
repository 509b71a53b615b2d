"""Models whose layers are of several kinds: every part is reached, whatever routes."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.builder import build  # noqa: E402
from kvdock.device import DeviceInfo  # noqa: E402
from kvdock.errors import SlotError  # noqa: E402
from kvdock.model import (  # noqa: E402
    ConvBlock,
    ConvParams,
    DSAParams,
    LayerSpec,
    MHAParams,
    MLAParams,
    ModelSpec,
    SparseParams,
    StateParams,
)
from kvdock.options import Parallelism, make_options  # noqa: E402
from kvdock.planner import plan_from  # noqa: E402
from kvdock.startup import core_only  # noqa: E402

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**26, free_before_load_bytes=2**26, free_bytes=2**26)
HEADS = {"num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8}
MHA = LayerSpec(kind="mha", params=MHAParams(**HEADS))
SLIDING = LayerSpec(kind="mha", params=MHAParams(**HEADS), window_tokens=15)
MLA = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=128, qk_rope_head_dim=8))
DSA = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
SPARSE = LayerSpec(kind="sparse", params=SparseParams(**HEADS, index_head_dim=8))
CONV = ConvParams(blocks=(ConvBlock(heads=2, head_dim=4),), kernel=4)
STATE = LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(2, 4, 4)))


def pool_of(*layers, **options):
    registry = core_only()
    model = ModelSpec(name="m", architecture="A", layers=layers, context_length=64, dtype="bfloat16")
    given = {"page_size": 4, "max_total_tokens": 64, "max_running_requests": 2, **options}
    plan = plan_from((model,), CPU, make_options(given), Parallelism(), registry, budget_bytes=2**24)
    cache = build(plan)
    assert cache.allocated_bytes() == plan.total_bytes
    return cache.token_to_kv_pool


@pytest.mark.parametrize("other", [MLA, MHA, STATE])
def test_index_keys_are_reached_beside_layers_of_another_kind(other):
    pool = pool_of(other, DSA)
    keys, loc = torch.full((2, 128), 3.0, dtype=torch.bfloat16), torch.tensor([5, 9])
    pool.set_index_k(1, loc, keys)
    assert torch.equal(pool.read_index_k(1, loc).to(torch.bfloat16).reshape(2, 128), keys)
    assert pool.get_index_k_with_scale_buffer(1).any()
    if other is not STATE:
        with pytest.raises(SlotError, match="layer 0 keeps no index keys"):
            pool.set_index_k(0, loc, keys)


@pytest.mark.parametrize("layers", [(MHA, SLIDING, STATE), (SLIDING, STATE), (SPARSE, STATE), (MHA, STATE)])
def test_states_are_reached_whatever_routes(layers):
    pool = pool_of(*layers)
    place = layers.index(STATE)
    assert pool.get_state(place).temporal.shape[1:] == (2, 4, 4)
    with pytest.raises(SlotError, match="layer 0 keeps no state"):
        pool.get_state(0)


def test_sparse_layers_build_beside_sliding_ones():
    pool = pool_of(SPARSE, SLIDING)
    assert pool.layer_ids == (0, 1)
    assert {info.role for info in pool.buffer_infos()} == {"key", "value", "index"}
