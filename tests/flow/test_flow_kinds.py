"""Small caches of every kind, driven through whole lives of requests, every value checked."""

import pytest
from kvdock.device import DeviceInfo
from kvdock.model import (
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
from kvdock.options import Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.startup import core_only
from kvdock.testing.driver import drive
from kvdock.testing.trace import Arrival

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.builder import build  # noqa: E402

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30)
HEADS = {"num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32}
MHA = LayerSpec(kind="mha", params=MHAParams(**HEADS))
NARROW = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=1, head_dim=32, v_head_dim=16))
SLIDING = LayerSpec(kind="mha", params=MHAParams(**HEADS), window_tokens=47)
MLA = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=128, qk_rope_head_dim=32))
DSA = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=32, index_head_dim=128))
SPARSE = LayerSpec(kind="sparse", params=SparseParams(**HEADS, index_head_dim=16))
CONV = ConvParams(blocks=(ConvBlock(heads=2, head_dim=8),), kernel=4)
STATE = LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(2, 4, 4)))
KINDS = {
    "plain": ((MHA, MHA), {}),
    "page-major": ((MHA, NARROW), {"page_major": True}),
    "fp4": ((MHA, MHA), {"kv_cache_dtype": "fp4"}),
    "nvfp4": ((MHA, MHA), {"kv_cache_dtype": "nvfp4"}),
    "mxfp8": ((MHA, MHA), {"kv_cache_dtype": "mxfp8"}),
    "latent fp4": ((MLA, MLA), {"kv_cache_dtype": "fp4"}),
    "sparse latent": ((DSA, DSA), {}),
    "sparse latent, scaled": ((DSA, DSA), {"kv_cache_dtype": "fp8_e4m3"}),
    "sparse latent, raw": ((DSA, DSA), {"kv_cache_dtype": "fp8_e5m2", "index_dtype": "fp4"}),
    "sparse latent, two tiers": ((DSA, DSA), {"hisparse": True, "hisparse_top_k": 16}),
    "sparse heads": ((MHA, SPARSE), {}),
    "sliding beside full": ((MHA, SLIDING), {}),
    "sliding only": ((SLIDING, SLIDING), {}),
    "hybrid": ((STATE, MHA), {"max_state_slots": 24}),
    "hybrid, tracks": ((STATE, MHA), {"max_state_slots": 40, "state_extra_buffer": "on"}),
    "hybrid latent": ((STATE, STATE, MLA), {"max_state_slots": 24}),
    "decode": ((MHA, MHA), {"role": "decode"}),
    "prefill": ((MHA, SLIDING), {"role": "prefill"}),
}


def cache_of(layers, page_size, debug, **options):
    registry = core_only()
    model = ModelSpec(name="m", architecture="A", layers=layers, context_length=256, dtype="bfloat16")
    given = {"page_size": page_size, "max_total_tokens": 512, "max_running_requests": 6, **options}
    return build(
        plan_from((model,), CPU, make_options(given), Parallelism(), registry, budget_bytes=2**26), debug=debug
    )


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_of_every_kind_comes_back(kind, page_size, debug):
    layers, options = KINDS[kind]
    cache = cache_of(layers, page_size, debug, **options)
    arrivals = [Arrival(timestamp_ms=20.0 * i, input_length=20 + 17 * i % 90, output_length=6 + i) for i in range(8)]
    report = drive(cache, arrivals, seed=3, chunk=48)
    assert report.ok, report.problems
    assert (report.finished, report.unfinished) == (8, 0)
    assert report.checks > 0
