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
from kvdock.testing.trace import Arrival

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.values import WrongValue  # noqa: E402

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


def built(*layers, budget=2**22, context=512, debug=True, parallel=None, device="cpu", **options):
    """Plan and build a model of these layers on the CPU; little room, so that requests are swapped out."""
    model = ModelSpec(
        name="m", architecture="A", layers=layers, context_length=context, dtype="bfloat16", num_attention_heads=2
    )
    given = {"plugins": (), "max_total_tokens": 256, "max_running_requests": 6, "chunked_prefill_size": 40} | options
    plan = kvdock.plan(model, device=device, options=given, parallel=parallel, budget_bytes=budget)
    return kvdock.build(plan, debug=debug)


def arrivals(*lengths):
    """Requests that are all there from the start: pairs of prompt and answer."""
    return [Arrival(timestamp_ms=0.0, input_length=prompt, output_length=answer) for prompt, answer in lengths]


CROWD = [(30, 40), (70, 20), (5, 60), (64, 33), (33, 33), (90, 9), (48, 16), (17, 50)]
"""More tokens than the cache holds at once."""
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}
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
    "states drafted": ([state(), state(THREE), mha()], DRAFTS),
    "states drafted densely": ([state(SHORT), mha()], DRAFTS | {"state_extra_buffer": "on"}),
    "states with rings": ([state(), mha(), state()], {"replay_rings": True, "replay_ring_length": 7}),
    "states with rings, drafted": ([state(), mha()], {"replay_rings": True} | DRAFTS),
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


def in_pairs(caches):
    """Each kind with both page sizes and in both modes; which go together changes from kind to kind."""
    for place, (name, (layers, options)) in enumerate(caches.items()):
        for page_size, debug in ((1, place % 2 == 0), (16, place % 2 == 1)):
            mode = "debug" if debug else "plain"
            yield pytest.param(layers, options, page_size, debug, id=f"{name}-{page_size}-{mode}")


@pytest.mark.parametrize(("layers", "options", "page_size", "debug"), list(in_pairs(CACHES)))
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


STATEFUL = {name: CACHES[name] for name in CACHES if name.startswith("states")}


@pytest.mark.parametrize(("layers", "options"), STATEFUL.values(), ids=list(STATEFUL))
def test_states_are_forked_swapped_and_rolled_back(layers, options):
    # Too little room for all, or enough to keep prefixes for a second crowd.
    caches = [built(*layers, page_size=4, max_total_tokens=tokens, **options) for tokens in (200, 800)]
    crowds = arrivals(*CROWD), arrivals(*CROWD, *CROWD)
    found = [drive(cache, crowd, seed=0) for cache, crowd in zip(caches, crowds, strict=True)]
    assert [report.problems for report in found] == [()] * 2
    expected = {"preemptions", "rollbacks"}
    expected |= {"forks"} if options.get("role") != "decode" else {"received"}
    expected |= {"tracked"} if "state_extra_buffer" in options else set()
    expected |= {"committed"} if "speculative_algorithm" in options else set()
    assert {name for name in expected if not sum(getattr(report, name) for report in found)} == set()


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"index_dtype": "fp4"}])
def test_sparse_latents_on_long_pages(page_size, options):
    cache = built(dsa(), dsa(), page_size=page_size, max_total_tokens=640, **options)
    report = drive(cache, arrivals(*CROWD, (300, 40), (200, 150)), seed=3)
    assert (report.problems, report.finished) == ((), 10)


def test_a_rank_of_a_layer_split_drives_the_layers_that_it_stores():
    parallel = {"tp_size": 2, "cp_size": 2, "cp_rank": 1}
    cache = built(*[dsa()] * 3, parallel=parallel, role="prefill", layer_split=True, page_size=16)
    assert cache.token_to_kv_pool.stored_layers == (2,)
    report = drive(cache, arrivals(*CROWD), seed=0, sharing=0, speculating=0)
    assert (report.problems, report.finished) == ((), len(CROWD))
    assert report.checks >= sum(map(sum, CROWD))


def test_a_draft_is_driven_beside_its_target():
    cache = real("deepseek-v3", speculative_algorithm="NEXTN", speculative_num_steps=2, debug=True)
    report = drive(cache, arrivals((40, 8), (20, 9)), seed=0)
    assert list(cache.drafts) == ["draft"]
    assert (report.problems, report.finished) == ((), 2)
    # 61 layers and the extra one.
    assert report.checks >= 62 * 77


def real(name, page_size=16, debug=False, **options):
    given = {"plugins": (), "page_size": page_size, "max_running_requests": 2, "context_length": 192}
    path, parallel = str(MODELS / f"{name}.json"), {"tp_size": 8}
    given = given | {"max_total_tokens": 384} | options
    plan = kvdock.plan(path, device="cpu", options=given, parallel=parallel, budget_bytes=2**29)
    return kvdock.build(plan, debug=debug)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-next-80b-a3b", {"max_state_slots": 6}),
        ("deepseek-v3.2", {"page_size": 64}),
        ("minimax-m3-synthetic", {}),
        ("kimi-linear-48b-a3b", {"page_size": 1}),
        ("nemotron-h-8b", {"state_extra_buffer": "on"}),
        ("llama-4-scout", {}),
        ("mimo-v2-flash", {}),
        ("gemma-4-style-hybrid", {"role": "decode"}),
    ],
)
def test_published_models_are_driven(name, options):
    report = drive(real(name, **options), arrivals((60, 4), (100, 3), (33, 2)), seed=0)
    assert (report.problems, report.finished) == ((), 3)
    assert report.checks > 202
    assert (report.state_checks > 0) == ("state" in report.peak_slots)


def test_chunks_of_local_attention_go_back_when_they_are_past():
    sizes = {
        "context_length": 9216,
        "max_total_tokens": 10496,
        "swa_full_tokens_ratio": 1,
        "chunked_prefill_size": 1024,
    }
    cache = real("llama-4-scout", page_size=64, **sizes)
    assert cache.plan.outline.spaces["swa"].window_tokens == 8192
    report = drive(cache, arrivals((8900, 4), (50, 2)), seed=0, sharing=0)
    assert (report.problems, report.finished) == ((), 2)
    assert report.peak_slots["swa"] <= 8192 + 1024 + 2 * 64 + 128


def test_a_slot_of_a_state_that_is_used_again_reads_zero_first(monkeypatch):
    """H-09: what the last owner of a slot left is not the state of a new request."""
    crowd = arrivals(*[(8, 4)] * 6)
    assert drive(built(state(), mha(), max_running_requests=2), crowd, seed=0, sharing=0).problems == ()
    cache = built(state(), mha(), max_running_requests=2, prefix_cache=False)
    monkeypatch.setattr(state_pools(cache)[0], "clear_slots", lambda slots: None)
    with pytest.raises(
        WrongValue, match=r"position 0, layer 0 \(target\): the conv state in slot \d is not zero before"
    ):
        drive(cache, crowd, seed=0, sharing=0)


# What cannot be driven.


def test_no_kv_means_no_values_to_check():
    room = {"total_bytes": 2**24, "free_before_load_bytes": 2**24, "free_bytes": 2**24}
    able = kvdock.DeviceInfo(device_type="cpu", name="d", capabilities=frozenset({"skip_kv_cache:torch"}), **room)
    options = {"prefill_only_disable_kv_cache": True, "attention_backend": "torch", "is_embedding": True}
    cache = built(mha(), mha(), device=able, prefix_cache=False, chunked_prefill_size=None, **options)
    report = drive(cache, arrivals(*CROWD), seed=0, chunk=40)
    assert (report.problems, report.finished, report.checks) == ((), len(CROWD), 0)


def test_a_rank_without_a_layer_is_told_apart_from_a_model_without_kv():
    with pytest.raises(PlanError, match="no layer of this model keeps KV token by token, so there is nothing to drive"):
        drive(built(state()), arrivals((4, 4)), seed=0)
    rank = built(mha(), mha(), parallel={"pp_size": 2, "pp_rank": 1, "pp_layers": (2, 0)})
    with pytest.raises(PlanError, match="no layer of this rank keeps KV or states, so there is nothing to drive"):
        drive(rank, arrivals((4, 4)), seed=0)
