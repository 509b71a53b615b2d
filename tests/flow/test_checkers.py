"""Each checker of a run can fail: one byte of each kind of buffer, and each step of a state's life, gone wrong."""

import kvdock
import pytest
from kvdock.model import (
    ConvBlock,
    ConvParams,
    DSAParams,
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

from kvdock.testing import values  # noqa: E402
from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.patterns import in_blocks, scaled_to_limit  # noqa: E402
from kvdock.testing.values import RunError, WrongValue  # noqa: E402

HEADS = {"num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32}
MHA = LayerSpec(kind="mha", params=MHAParams(**HEADS))
SLIDING = LayerSpec(kind="mha", params=MHAParams(**HEADS), window_tokens=15)
MLA = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=48, qk_rope_head_dim=16))
DSA = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
SPARSE = LayerSpec(kind="sparse", params=SparseParams(**HEADS, index_head_dim=12))
CONV = ConvParams(blocks=(ConvBlock(heads=2, head_dim=4),), kernel=4)
RING = RingParams(k_heads=1, k_dim=4, v_heads=2, v_dim=4)
STATE = LayerSpec(kind="state", params=StateParams(conv=(CONV, CONV), temporal=(2, 4, 4), ring=RING))
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}


def built(*layers, debug=False, **options):
    model = ModelSpec(name="m", architecture="A", layers=layers, context_length=256, dtype="bfloat16")
    given = {"plugins": (), "max_total_tokens": 256, "max_running_requests": 4, "page_size": 4} | options
    plan = kvdock.plan(model, device="cpu", options=given, budget_bytes=2**22)
    return kvdock.build(plan, debug=debug)


def arrivals(*lengths):
    return [Arrival(timestamp_ms=0.0, input_length=prompt, output_length=answer) for prompt, answer in lengths]


def spoil(row, byte):
    """Change one byte of what a slot owns: bits of every magnitude and exponent, no sign alone."""
    flat = row.view(torch.uint8) if row.dim() else row.view(1).view(torch.uint8)
    place = flat.reshape(-1)
    assert place.data_ptr() == flat.data_ptr()
    place[byte] ^= 0x55


def spoil_token(cache, group, buffer, layer_id, byte, position):
    """Spoil a token of request 0, after its row, in one buffer of a layer."""
    pool, page_size = cache.pools[group], 4
    row = cache.req_to_token_pool.row_of(0)
    slot = cache.req_to_token_pool.req_to_token[row, position : position + 1].to(torch.int64)
    if group == "swa":
        slot = cache.token_to_kv_pool_allocator.translate(slot)
    page, offset = int(slot) // page_size, int(slot) % page_size
    if buffer == "index_k" and hasattr(pool, "index"):
        keys, scales = pool.index.split(pool.get_index_k_with_scale_buffer(layer_id))
        spoil((scales if byte < 0 else keys)[page, offset], byte)
    else:
        spoil(pool.parts.tensors.paged(buffer, layer_id)[page, offset], byte)


FP8, FP4 = {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp4"}
NVFP4, MXFP8 = {"kv_cache_dtype": "nvfp4"}, {"kv_cache_dtype": "mxfp8"}
# A scaled row: 128 bytes of latent, a scale of 4, 16 bytes of rope. A negative byte of index keys is one of their scale.
BYTES = [
    ((MHA, MHA), {}, "full", "k", 3, "key"),
    ((MHA, MHA), FP8, "full", "v", 60, "value"),
    ((MHA, MHA), FP4, "full", "k", 0, "key"),
    ((MHA, MHA), FP4, "full", "k_scale", 3, "key"),
    ((MHA, MHA), NVFP4, "full", "v", 31, "value"),
    ((MHA, MHA), NVFP4, "full", "v_scale", 0, "value"),
    ((MHA, MHA), MXFP8, "full", "v", 63, "value"),
    ((MHA, MHA), MXFP8, "full", "k_scale", 1, "key"),
    ((MLA, MLA), FP4, "full", "kv", 5, "key"),
    ((MLA, MLA), FP4, "full", "kv_scale", 3, "key"),
    ((DSA, DSA), {}, "full", "kv", 270, "key"),
    ((DSA, DSA), {}, "full", "index_k", 127, "index key"),
    ((DSA, DSA), {}, "full", "index_k", -1, "index key"),
    ((DSA, DSA), FP8, "full", "kv", 64, "key"),
    ((DSA, DSA), FP8, "full", "kv", 131, "key"),
    ((DSA, DSA), FP8, "full", "kv", 147, "key"),
    ((DSA, DSA), {"index_dtype": "fp4"}, "full", "index_k", 0, "index key"),
    ((DSA, DSA), {"index_dtype": "fp4"}, "full", "index_k", -4, "index key"),
    ((MHA, SPARSE), {}, "full.index", "index_k", 2, "index key"),
    ((MHA, SPARSE), {}, "full.index", "index_v", 22, "index value"),
    ((MHA, SPARSE), {}, "full", "v", 2, "value"),
    ((MHA, SLIDING), {}, "swa", "k", 7, "key"),
    ((MHA, SLIDING), FP4, "swa", "v_scale", 2, "value"),
    ((MHA, MHA), {"page_major": True}, "full", "v", 8, "value"),
    ((STATE, MHA), {}, "full", "k", 8, "key"),
]


@pytest.mark.parametrize(("layers", "options", "group", "buffer", "byte", "part"), BYTES)
def test_a_wrong_byte_of_a_token_is_found_with_request_position_and_layer(layers, options, group, buffer, byte, part):
    cache = built(*layers, **options)

    def at_step_4(progress):
        if progress.steps == 4:
            spoil_token(cache, group, buffer, 1, byte, position=20)

    with pytest.raises(WrongValue, match=rf"request 0, position 20, layer 1 \(target\): the {part} in slot \d+") as e:
        drive(cache, arrivals((20, 10)), seed=0, sharing=0, speculating=0, on_progress=at_step_4)
    assert (e.value.request, e.value.position, e.value.layer_id) == (0, 20, 1)


@pytest.mark.parametrize("numbers", [1, 1 << 9, 1 << 18])
@pytest.mark.parametrize("layer_id", [0, 2, 4])
def test_whichever_layer_is_wrong_is_named_however_many_are_compared_at_once(layer_id, numbers, monkeypatch):
    monkeypatch.setattr(values, "BATCH_NUMBERS", numbers)  # one layer, some, or all five
    cache = built(*[MHA] * 5)

    def at_step_4(progress):
        if progress.steps == 4:
            spoil_token(cache, "full", "v", layer_id, 2, position=20)

    with pytest.raises(WrongValue, match="the value in slot") as e:
        drive(cache, arrivals((20, 10)), seed=0, sharing=0, speculating=0, on_progress=at_step_4)
    assert (e.value.request, e.value.position, e.value.layer_id) == (0, 20, layer_id)


def test_values_of_layers_that_are_exchanged_are_found():
    cache = built(*[MHA] * 5)
    rows = cache.pools["full"].parts.tensors.rows

    def exchange(progress):
        if progress.steps == 1:
            first = rows("k", 1).clone()
            rows("k", 1).copy_(rows("k", 3))
            rows("k", 3).copy_(first)

    with pytest.raises(WrongValue) as e:
        drive(cache, arrivals((20, 10)), seed=0, on_progress=exchange)
    assert e.value.layer_id == 1


def test_a_wrong_factor_of_a_layer_is_found():
    cache = built(MHA, MHA, **NVFP4)
    factors = cache.pools["full"].parts.tensors.rows("global_scale", 1)
    with pytest.raises(WrongValue, match="request 0, position 0, layer 1") as e:
        drive(cache, arrivals((20, 10)), seed=0, on_progress=lambda progress: factors.fill_(2))
    assert e.value.layer_id == 1


@pytest.mark.parametrize(
    ("buffer", "byte", "part"),
    [
        ("conv", 5, "conv state"),
        ("conv.1", 47, "conv state"),
        ("temporal", 0, "temporal state"),
        ("replay_d", 9, "replay delta state"),
        ("replay_k", 1, "replay key state"),
        ("replay_g", 3, "replay decay state"),
        ("replay_write", 0, "replay cursor"),
    ],
)
def test_a_wrong_byte_of_a_state_is_found_with_request_position_and_layer(buffer, byte, part):
    cache = built(MHA, STATE, STATE, replay_rings=True)
    layer_id = 1 if buffer == "replay_write" else 2

    def at_step_4(progress):
        if progress.steps == 4:
            rows = cache.pools["state"].parts.tensors.rows(buffer, layer_id if buffer != "replay_write" else None)
            spoil(rows[cache.req_to_token_pool.state_of(0)], byte)

    # A prompt of 20 in the first step, then a token a step.
    found = rf"request 0, position 22, layer {layer_id} \(target\): the {part} in slot 1 is not"
    with pytest.raises(WrongValue, match=found) as e:
        drive(cache, arrivals((20, 10)), seed=0, sharing=0, speculating=0, on_progress=at_step_4)
    assert (e.value.request, e.value.position, e.value.layer_id) == (0, 22, layer_id)


# What must happen to a state between two steps.

CROWD = arrivals(*[(30, 40), (60, 20), (12, 60), (64, 33)] * 3)
LONG = arrivals(*[(30, 10), (120, 4), (90, 8), (101, 9)] * 4)
SKIPPED = {
    "copies": ("copy_slots", {}),
    "clearing": ("clear_slots", {}),
    "loading": ("load_cpu_copy", {}),
    "committing": ("commit", DRAFTS),
}


@pytest.mark.parametrize(("method", "options"), SKIPPED.values(), ids=list(SKIPPED))
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_not_done_to_a_state_is_found(method, options, page_size, monkeypatch):
    cache = built(STATE, MHA, page_size=page_size, max_total_tokens=320, **options)
    monkeypatch.setattr(cache.pools["state"], method, lambda *given: None)
    with pytest.raises(WrongValue, match=r"layer 0 \(target\): the \w+ state in slot"):
        drive(cache, CROWD, seed=1, speculating=0.3)


@pytest.mark.parametrize("extra", ["on", "lazy"])
def test_a_track_that_holds_another_state_is_found(extra, monkeypatch):
    """A request that begins with a prefix's state finds what the track slot held, and no other state."""
    cache = built(STATE, MHA, state_extra_buffer=extra, max_total_tokens=800)
    pool = cache.pools["state"]
    copy = pool.copy_slots
    monkeypatch.setattr(pool, "copy_slots", lambda source, target: copy(target, target))
    with pytest.raises(WrongValue, match=r"layer 0 \(target\): the conv state in slot"):
        drive(cache, LONG, seed=1)


def test_a_state_that_is_shared_in_place_is_found(monkeypatch):
    """Two requests that were given the same slot overwrite each other."""
    cache = built(STATE, MHA)
    monkeypatch.setattr(cache.req_to_token_pool, "state_of", lambda request: 1)
    with pytest.raises(WrongValue, match=r"request \d, position \d+, layer 0"):
        drive(cache, arrivals((20, 9), (20, 9)), seed=0, sharing=0, speculating=0)


def test_states_that_leak_are_a_problem_of_the_report(monkeypatch):
    cache = built(STATE, MHA)
    monkeypatch.setattr(cache.req_to_token_pool, "free_states", lambda slots: None)
    report = drive(cache, CROWD, seed=1)
    assert any("left by request" in problem and "leaked" in problem for problem in report.problems)
    assert any("slots leaked" in problem for problem in report.problems)


def test_a_refused_request_that_keeps_a_state_is_found(monkeypatch):
    cache = built(MHA, role="decode", max_total_tokens=64)
    admit, allocator = cache.admit, cache.token_to_kv_pool_allocator

    def leaky(*given, **more):
        slots = admit(*given, **more)
        if slots is None:
            allocator.alloc(4)
        return slots

    monkeypatch.setattr(cache, "admit", leaky)
    with pytest.raises(RunError, match="that was refused changed the free slots"):
        drive(cache, arrivals((40, 4), (40, 4)), seed=0)


# The numbers that block formats hold exactly.


@pytest.mark.parametrize("pattern", [in_blocks(64, 16), in_blocks(40, 32), scaled_to_limit(256, 128, "float8_e4m3fn")])
def test_numbers_in_blocks_use_many_codes_and_powers(pattern):
    numbers = pattern.numbers(torch.arange(4096 * pattern.columns).remainder(251).to(torch.uint8).view(4096, -1))
    tops = numbers[:, :: pattern.block]
    assert len(tops.unique()) == 8
    assert (tops / pattern.top).log2().unique().tolist() == [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    assert len((numbers[:, 1] / tops[:, 0]).unique()) >= 15
    assert bool((numbers.abs() <= tops.repeat_interleave(pattern.block, -1)[:, : pattern.columns]).all())
