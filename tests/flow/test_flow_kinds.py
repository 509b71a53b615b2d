"""Every kind of cache that core builds, driven end to end; and every checker, which must be able to fail."""

from pathlib import Path

import kvdock
import pytest
from kvdock.errors import PlanError
from kvdock.model import (
    ConvBlock,
    ConvParams,
    DSAParams,
    HybridParams,
    LayerSpec,
    MHAParams,
    MLAParams,
    ModelSpec,
    RingParams,
    SparseParams,
    StateParams,
)
from kvdock.testing.trace import Arrival, seeded

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.values import RunError, WrongValue  # noqa: E402

MODELS = Path(__file__).parents[1] / "models"


def layer(kind, params, **more):
    return LayerSpec(kind=kind, params=params, **more)


def mha(heads=2, dim=16, v_dim=32, **more):
    return layer("mha", MHAParams(num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim), **more)


def mla():
    return layer("mla", MLAParams(kv_lora_rank=40, qk_rope_head_dim=8))


def dsa():
    return layer("dsa", DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))


def sparse(index_value=True):
    shape = {"num_kv_heads": 2, "head_dim": 16, "v_head_dim": 8, "index_head_dim": 12}
    return layer("sparse", SparseParams(**shape, index_value=index_value))


def conv(heads, dim, kernel=4, **more):
    return ConvParams(blocks=(ConvBlock(heads=heads, head_dim=dim),), kernel=kernel, **more)


RING = RingParams(k_heads=2, k_dim=6, v_heads=4, v_dim=5)
DELTA = StateParams(conv=(conv(4, 5),), temporal=(4, 6, 5), ring=RING)
THREE = StateParams(conv=(conv(2, 4), conv(2, 4), conv(2, 6, channels_last=True)), temporal=(2, 4, 6))
SHORT = StateParams(conv=(conv(2, 8, kernel=3),), temporal=(), dense_windows=True)


def state(params=DELTA):
    return layer("state", params)


def both():
    return layer("hybrid", HybridParams(num_kv_heads=1, head_dim=8, v_head_dim=8, state=DELTA))


def built(*layers, budget=2**22, context=512, debug=True, parallel=None, **options):
    """Plan and build a model of these layers on the CPU; little room, so that requests are swapped out."""
    model = ModelSpec(
        name="m", architecture="A", layers=layers, context_length=context, dtype="bfloat16", num_attention_heads=2
    )
    given = {"plugins": (), "max_total_tokens": 256, "max_running_requests": 6, "chunked_prefill_size": 40} | options
    given = {name: value for name, value in given.items() if value is not None}
    plan = kvdock.plan(model, device="cpu", options=given, parallel=parallel, budget_bytes=budget)
    return kvdock.build(plan, debug=debug)


def arrivals(*lengths):
    """Requests that are all there from the start: pairs of prompt and answer."""
    return [Arrival(timestamp_ms=0.0, input_length=prompt, output_length=answer) for prompt, answer in lengths]


CROWD = [(30, 40), (70, 20), (5, 60), (64, 33), (33, 33), (90, 9), (48, 16), (17, 50)]
"""More tokens than the cache holds at once."""
EAGLE = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}
CACHES = {
    "fp4": ([mha(), mha()], {"kv_cache_dtype": "fp4"}),
    "nvfp4": ([mha(), mha()], {"kv_cache_dtype": "nvfp4"}),
    "mxfp8": ([mha(dim=40, v_dim=24), mha(dim=40, v_dim=24)], {"kv_cache_dtype": "mxfp8"}),
    "fp4 sliding": ([mha(), mha(window_tokens=31)], {"kv_cache_dtype": "fp4"}),
    "latents fp4": ([mla(), mla()], {"kv_cache_dtype": "fp4"}),
    "sparse latents": ([dsa(), dsa()], {}),
    "sparse latents fp8": ([dsa(), dsa()], {"kv_cache_dtype": "fp8_e4m3"}),
    "sparse latents e5m2, index fp4": ([dsa()], {"kv_cache_dtype": "fp8_e5m2", "index_dtype": "fp4"}),
    "sparse latents page-major": ([dsa(), dsa()], {"page_major": True}),
    "indexers": ([mha(), sparse(), sparse()], {}),
    "indexers of keys": ([sparse(False)], {"kv_cache_dtype": "fp8_e4m3"}),
    "indexers page-major": ([sparse(), sparse(False)], {"page_major": True}),
    "states": ([state(), mha(), state()], {}),
    "states and latents": ([state(THREE), mla(), state(THREE)], {}),
    "states of two shapes": ([state(THREE), state(SHORT), mha()], {"max_state_slots": 20}),
    "states beside heads": ([both(), both(), mha()], {}),
    "states tracked": ([state(), mha()], {"state_extra_buffer": "on"}),
    "states tracked in one": ([state(), mha()], {"state_extra_buffer": "on", "overlap_schedule": False}),
    "states tracked lazily": ([state(), mha()], {"state_extra_buffer": "lazy"}),
    "states drafted": ([state(), state(THREE), mha()], EAGLE),
    "states drafted densely": ([state(SHORT), mha()], EAGLE | {"state_extra_buffer": "on"}),
    "states with rings": ([state(), mha(), state()], {"replay_rings": True, "replay_ring_length": 7}),
    "states with rings, drafted": ([state(), mha()], {"replay_rings": True} | EAGLE),
    "states page-major": ([state(), mha(), state()], {"page_major": True}),
    "states of a decode worker": ([state(), mha()], {"role": "decode"}),
    "states, windows": ([state(), mha(window_tokens=31), mha()], {}),
    "windows alone": ([mha(window_tokens=31), mha(window_tokens=31)], {}),
    "windows off": ([mha(), mha(window_tokens=31)], {"hybrid_swa": "off"}),
    "page-major": ([mha(), mha(heads=1), mha(window_tokens=31)], {"page_major": True}),
    "heads by layer": ([mha(heads=4), mha(heads=1), mha(heads=2, window_tokens=15)], {}),
    "prefill worker": ([mha(), mha()], {"role": "prefill"}),
    "prefill worker, windows": ([mha(), mha(window_tokens=31)], {"role": "prefill"}),
    "decode worker": ([mha(), mha()], {"role": "decode"}),
    "decode worker, windows": ([mha(), mha(window_tokens=31)], {"role": "decode"}),
    "decode worker, windows alone": ([mha(window_tokens=31)], {"role": "decode"}),
}


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("layers", "options"), CACHES.values(), ids=list(CACHES))
def test_every_value_and_state_comes_back(layers, options, page_size, debug):
    cache = built(*layers, debug=debug, page_size=page_size, **options)
    report = drive(cache, arrivals(*CROWD), seed=page_size)
    assert report.problems == ()
    assert (report.finished, report.rejected, report.unfinished) == (len(CROWD), 0, 0)
    assert report.planned_bytes == report.allocated_bytes
    slides = [spec.window_tokens is not None and options.get("hybrid_swa") != "off" for spec in layers]
    kept = sum(spec.kind != "state" and not sliding for spec, sliding in zip(layers, slides, strict=True))
    assert report.checks >= kept * sum(map(sum, CROWD))
    # Each request finds zeros first and its last state at the end, in each tensor of each layer.
    tensors = sum(len(pool.get_state(i)[0]) for pool in state_pools(cache) for i in pool.layer_ids)
    assert report.state_checks >= 2 * len(CROWD) * tensors
    assert report.received == (len(CROWD) if options.get("role") == "decode" else 0)


def state_pools(cache):
    return [pool for pool in cache.pools.values() if hasattr(pool, "get_state")]
