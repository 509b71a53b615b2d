"""Requests through a whole cache: planned, built, driven, and every value read back."""

import itertools

import kvdock
import msgspec
import pytest
from kvdock.errors import PlanError, SlotError
from kvdock.testing.kinds import Tokens
from kvdock.testing.trace import Arrival, seeded

torch = pytest.importorskip("torch")

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.values import RunError, Values, WrongValue  # noqa: E402

MIB = 2**20


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mha(window=None, shares=None, heads=2, dim=16):
    params = kvdock.MHAParams(num_kv_heads=heads, head_dim=dim, v_head_dim=dim + 8)
    return kvdock.LayerSpec(kind="mha", params=params, window_tokens=window, shares_kv_with=shares)


def mla():
    return kvdock.LayerSpec(kind="mla", params=kvdock.MLAParams(kv_lora_rank=32, qk_rope_head_dim=8))


def built(*layers, budget=MIB, context=512, debug=True, **options):
    """Plan and build a model of these layers on the CPU."""
    model = kvdock.ModelSpec(
        name="m", architecture="A", layers=layers, context_length=context, dtype="bfloat16", num_attention_heads=2
    )
    options = {"plugins": ()} | options
    return kvdock.build(kvdock.plan(model, device="cpu", options=options, budget_bytes=budget), debug=debug)


def arrivals(*lengths):
    """Requests that are all there from the start: pairs of prompt and answer."""
    return [Arrival(timestamp_ms=0.0, input_length=prompt, output_length=answer) for prompt, answer in lengths]


CACHES = {
    "MHA, page 1": ([mha(), mha()], {}),
    "MHA, page 16": ([mha(), mha()], {"page_size": 16}),
    "MHA, float32": ([mha(), mha()], {"model_dtype": "float32", "page_size": 8}),
    "MHA, float16": ([mha(), mha()], {"model_dtype": "float16"}),
    "MHA, fp8_e4m3": ([mha(), mha()], {"kv_cache_dtype": "fp8_e4m3", "page_size": 4}),
    "MHA, fp8_e5m2": ([mha(), mha()], {"kv_cache_dtype": "fp8_e5m2"}),
    "shared layers": ([mha(), mha(shares=0), mha(), mha(shares=2)], {"page_size": 4}),
    "two shapes": ([mha(), mha(heads=1, dim=64)], {"page_size": 4}),
    "MLA, page 1": ([mla(), mla()], {}),
    "MLA, page 64, fp8": ([mla(), mla()], {"page_size": 64, "kv_cache_dtype": "fp8_e4m3"}),
    "hybrid sliding, page 1": ([mha(), mha(window=31)], {"swa_full_tokens_ratio": 0.5}),
    "hybrid sliding, page 16": ([mha(), mha(window=31), mha(window=31)], {"page_size": 16}),
    "hybrid sliding, full KV": ([mha(), mha(window=31)], {"hybrid_swa": "off"}),
    "sliding alone, page 1": ([mha(window=31), mha(window=31)], {}),
    "sliding alone, page 16": ([mha(window=31), mha(window=31)], {"page_size": 16}),
    "window of nothing but the token": ([mha(), mha(window=0)], {"page_size": 4}),
}


@pytest.mark.parametrize(("layers", "options"), CACHES.values(), ids=list(CACHES))
@pytest.mark.parametrize("seed", [0, 1])
def test_every_value_of_every_layer_comes_back(layers, options, seed):
    cache = built(*layers, chunked_prefill_size=48, **options)
    requests = list(seeded(seed, 12, min(cache.plan.max_request_tokens, 256)))
    report = drive(cache, requests, seed=seed)
    assert report.problems == ()
    assert (report.arrived, report.finished, report.rejected, report.unfinished) == (12, 12, 0, 0)
    assert report.tokens_written + report.shared_tokens >= sum(request.tokens for request in requests)
    assert report.planned_bytes == report.allocated_bytes == cache.plan.total_bytes
    # Each token is compared at least once in each layer that keeps it to the end.
    kept = sum(1 for layer in layers if layer.window_tokens is None or options.get("hybrid_swa") == "off")
    assert report.checks >= kept * sum(request.tokens for request in requests)


def test_without_preemption_the_tokens_are_those_of_the_requests():
    report = drive(built(mha()), arrivals((10, 5), (1, 0), (100, 1)), seed=0, sharing=0)
    assert (report.preemptions, report.failed_admissions) == (0, 0)
    assert report.tokens_written == 15 + 1 + 101
    assert report.peak_slots["requests"] == 3


def test_a_full_cache_preempts_the_youngest_and_serves_everybody_in_the_end():
    cache = built(mha(), page_size=4, max_total_tokens=128, max_running_requests=8)
    report = drive(cache, arrivals(*[(20, 60)] * 8), seed=0)
    assert report.preemptions > 0
    assert report.failed_admissions > 0
    assert report.peak_slots["full"] == 128
    assert (report.finished, report.problems) == (8, ())
    assert report.tokens_written > 8 * 80


def test_rows_that_run_out_make_requests_wait():
    cache = built(mha(), max_running_requests=2)
    report = drive(cache, arrivals(*[(8, 8)] * 5), seed=0)
    assert report.peak_slots["requests"] == 2
    assert report.failed_admissions > 0
    assert (report.finished, report.problems) == (5, ())


def test_what_left_the_window_makes_room_for_others():
    cache = built(mha(), mha(window=15), max_total_tokens=2048, swa_full_tokens_ratio=0.25, swa_eviction_interval=1)
    report = drive(cache, arrivals(*[(200, 50)] * 8), seed=0, chunk=64, sharing=0)
    assert (report.finished, report.preemptions, report.problems) == (8, 0, ())
    # All prompts are there at once, but no more sliding slots than a window and a token each, and a chunk.
    assert report.peak_slots["full"] >= 8 * 200 > cache.plan.spaces["swa"]
    assert report.peak_slots["swa"] <= 8 * 16 + 64


def test_a_cache_that_slides_throughout_holds_windows_alone():
    cache = built(mha(window=15), page_size=4, swa_eviction_interval=1)
    report = drive(cache, arrivals(*[(300, 100)] * 4), seed=0, chunk=32, sharing=0, speculating=0)
    assert (report.finished, report.problems) == (4, ())
    # A window of 15 earlier tokens lies on at most 5 pages of 4; 4 requests and one chunk.
    assert report.peak_slots["swa"] <= 4 * 5 * 4 + 32 + 4


def test_a_request_that_the_plan_cannot_hold_is_rejected_with_the_limit():
    cache = built(mha(), max_total_tokens=64)
    report = drive(cache, arrivals((60, 4), (60, 5), (1000, 0)), seed=0)
    assert (report.longest_tokens, report.finished, report.rejected) == (64, 1, 2)


def test_a_chunk_that_finds_no_room_is_halved():
    cache = built(mha(), mha(window=7), max_total_tokens=512, swa_full_tokens_ratio=0.1, context=400)
    assert cache.plan.spaces["swa"] < 300
    report = drive(cache, arrivals((300, 10)), seed=0, chunk=300)
    assert (report.finished, report.problems) == (1, ())


def test_requests_arrive_when_their_time_has_come():
    requests = [Arrival(timestamp_ms=ms, input_length=4, output_length=2) for ms in (0.0, 10.0, 10_000.0)]
    report = drive(built(mha()), requests, seed=0, step_ms=20.0)
    # The first and the second share steps, the third comes when the cache is empty again.
    assert report.peak_slots["requests"] == 2
    assert report.finished == 3


def test_arrivals_are_read_as_they_are_needed_and_max_steps_ends_a_run():
    endless = (Arrival(timestamp_ms=0.0, input_length=8, output_length=8) for _ in itertools.count())
    seen = []
    report = drive(built(mha()), endless, seed=0, max_steps=30, on_progress=seen.append)
    assert report.steps == 30
    assert report.unfinished > 0
    assert report.arrived == report.finished + report.unfinished
    assert report.problems == ()
    assert [progress.steps for progress in seen] == list(range(1, 31))


def test_the_same_seed_gives_the_same_run():
    runs = [drive(built(mha(), page_size=4), seeded(5, 10, 128), seed=5) for _ in range(2)]
    first, second = (msgspec.structs.replace(run, seconds=0.0) for run in runs)
    assert first == second


def test_a_run_leaves_the_cache_as_it_found_it():
    cache = built(mha(), mha(window=15), page_size=4)
    for seed in range(3):
        assert drive(cache, seeded(seed, 6, 128), seed=seed).problems == ()


def test_no_chunk_is_refused():
    with pytest.raises(PlanError, match="chunk=-1 prefills nothing"):
        drive(built(mha()), arrivals((1, 1)), seed=0, chunk=-1)


# What a faulty cache is told.


def swap_sides(pool, write):
    return lambda layer, loc, k, v, *scales: write(layer, loc, v, k, *scales)


def write_one_layer_twice(pool, write):
    return lambda layer, loc, k, v, *scales: write(0, loc, k, v, *scales)


def forget_a_layer(pool, write):
    return lambda layer, loc, k, v, *scales: None if layer == 1 else write(layer, loc, k, v, *scales)


def shift_slots(pool, write):
    return lambda layer, loc, k, v, *scales: write(layer, loc.roll(1), k, v, *scales)


def round_values(pool, write):
    return lambda layer, loc, k, v, *scales: write(layer, loc, k // 2 * 2, v, *scales)


@pytest.mark.parametrize(
    "fault", [swap_sides, write_one_layer_twice, forget_a_layer, shift_slots, round_values], ids=lambda f: f.__name__
)
def test_a_pool_that_writes_wrongly_is_found_out(fault, monkeypatch):
    params = kvdock.MHAParams(num_kv_heads=2, head_dim=16, v_head_dim=16)
    cache = built(*[kvdock.LayerSpec(kind="mha", params=params)] * 2, debug=False)
    pool = cache.token_to_kv_pool
    monkeypatch.setattr(pool, "set_kv_buffer", fault(pool, pool.set_kv_buffer))
    with pytest.raises(
        WrongValue, match=r"request 0, position \d+, layer [01] \(target\): the (key|value) in slot"
    ) as e:
        drive(cache, arrivals((20, 5)), seed=0)
    assert e.value.request == 0
    assert 0 <= e.value.position < 25
    assert e.value.layer_id in (0, 1)


def test_an_allocator_that_hands_a_slot_out_twice_is_found_out(monkeypatch):
    cache = built(mha(), debug=False)
    allocator, extend = cache.token_to_kv_pool_allocator, cache.token_to_kv_pool_allocator.alloc_extend
    monkeypatch.setattr(allocator, "alloc_extend", lambda *arguments: extend(*arguments) // 2 + 1)
    with pytest.raises(RunError, match="request 0 was handed slot 2 of space 'full', twice at once"):
        drive(cache, arrivals((20, 5), (20, 5)), seed=0)


def test_a_sliding_slot_that_is_given_back_too_early_is_found_out(monkeypatch):
    cache = built(mha(), mha(window=31), debug=False)
    evict = cache.evict
    monkeypatch.setattr(cache, "evict", lambda names, ends: evict(names, [end + 16 for end in ends]))
    with pytest.raises(RunError, match="evict was due to give back"):
        drive(cache, arrivals((100, 60)), seed=0, chunk=40)


def test_a_release_that_leaks_is_a_problem_of_the_report(monkeypatch):
    cache = built(mha())
    monkeypatch.setattr(cache, "release", lambda name, kept=0: cache.req_to_token_pool.free(name))
    report = drive(cache, arrivals((20, 5)), seed=0)
    assert not report.ok
    assert any("slots leaked" in problem for problem in report.problems)


def test_a_refused_call_that_keeps_slots_is_found_out(monkeypatch):
    cache = built(mha(), max_total_tokens=64)
    allocator, extend = cache.token_to_kv_pool_allocator, cache.token_to_kv_pool_allocator.alloc_extend

    def leaky(*arguments):
        slots = extend(*arguments)
        if slots is None:
            allocator.alloc(1)
        return slots

    monkeypatch.setattr(allocator, "alloc_extend", leaky)
    with pytest.raises(RunError, match="that was refused changed the free slots"):
        drive(cache, arrivals((40, 4), (40, 4)), seed=0)


def test_a_cache_that_cannot_serve_what_its_plan_promises_is_found_out(monkeypatch):
    cache = built(mha())
    monkeypatch.setattr(cache.token_to_kv_pool_allocator, "alloc_extend", lambda *arguments: None)
    with pytest.raises(RunError, match="request 0 of 25 tokens, 0 of them cached, finds no room"):
        drive(cache, arrivals((20, 5)), seed=0)
    cache = built(mha())
    monkeypatch.setattr(cache.token_to_kv_pool_allocator, "alloc_decode", lambda *arguments: None)
    with pytest.raises(RunError, match="request 0 of 25 tokens, 20 of them cached, finds no slot"):
        drive(cache, arrivals((20, 5)), seed=0)


@pytest.mark.parametrize("layers", [[mha()], [mha(), mha(window=15)], [mha(window=15)]], ids=["full", "mixed", "alone"])
def test_prefixes_are_shared_steps_rolled_back_and_requests_swapped(layers):
    reports = []
    for seed in range(3):
        # Little room, so that requests are swapped out; chunks, so that they come back in parts.
        cache = built(*layers, page_size=4, max_total_tokens=160, max_running_requests=8, chunked_prefill_size=24)
        reports.append(drive(cache, arrivals(*[(30, 60)] * 10), seed=seed))
    assert [(report.finished, report.problems) for report in reports] == [(10, ())] * 3
    for what in ("shared_tokens", "rollbacks", "preemptions"):
        assert sum(getattr(report, what) for report in reports) > 0


def test_nothing_is_shared_or_rolled_back_unless_it_is_asked_for():
    report = drive(built(mha()), seeded(0, 10, 128), seed=0, sharing=0, speculating=0)
    assert (report.shared_tokens, report.rollbacks, report.finished) == (0, 0, 10)


SWAPPING = {"page_size": 4, "max_total_tokens": 128, "max_running_requests": 8}


def test_copies_that_come_back_wrong_are_found_out(monkeypatch):
    cache = built(mha(), debug=False, **SWAPPING)
    pool = cache.token_to_kv_pool
    copy = pool.get_cpu_copy
    monkeypatch.setattr(pool, "get_cpu_copy", lambda slots: [found.roll(1, 0) for found in copy(slots)])
    with pytest.raises(WrongValue):
        drive(cache, arrivals(*[(20, 60)] * 8), seed=0, sharing=0)


def test_copies_that_are_not_loaded_are_found_out(monkeypatch):
    cache = built(mha(), debug=False, **SWAPPING)
    monkeypatch.setattr(cache.token_to_kv_pool, "load_cpu_copy", lambda copies, slots: None)
    with pytest.raises(WrongValue):
        drive(cache, arrivals(*[(20, 60)] * 8), seed=0, sharing=0)


def test_a_state_that_is_not_restored_is_found_out(monkeypatch):
    cache = built(mha(), debug=False, page_size=4)
    monkeypatch.setattr(cache.token_to_kv_pool_allocator, "restore_state", lambda state: None)
    with pytest.raises(RunError, match="an allocation that was taken back changed the free slots"):
        drive(cache, arrivals((20, 30)), seed=0, speculating=1)


def test_a_cache_that_forgets_a_borrowed_prefix_is_found_out(monkeypatch):
    cache = built(mha(), debug=False, page_size=4)
    monkeypatch.setattr(cache, "hold_prefix", lambda request, borrowed=0, evicted=0: None)
    with pytest.raises((RunError, SlotError)):
        drive(cache, arrivals(*[(30, 20)] * 12), seed=0, sharing=1)


@pytest.mark.parametrize("layers", [[mha(), mha(window=15)], [mha(window=15)]], ids=["mixed", "alone"])
def test_a_cache_that_evicts_nothing_is_found_out(layers, monkeypatch):
    cache = built(*layers, debug=False, swa_eviction_interval=1)
    monkeypatch.setattr(cache, "evict", lambda names, ends: None)
    with pytest.raises(RunError, match="evict was due to give back"):
        drive(cache, arrivals((60, 5)), seed=0)


@pytest.mark.parametrize(
    ("shift", "message"),
    [(-4, "handed slot 0 of space 'full', which is padding"), (10**6, "but the last one is")],
)
def test_slots_that_nobody_may_have_are_found_out(shift, message, monkeypatch):
    cache = built(mha(), debug=False, page_size=4)
    extend = cache.token_to_kv_pool_allocator.alloc_extend
    monkeypatch.setattr(cache.token_to_kv_pool_allocator, "alloc_extend", lambda *given: extend(*given) + shift)
    with pytest.raises(RunError, match=message):
        drive(cache, arrivals((20, 5)), seed=0)


def test_a_slot_of_another_request_is_found_out(monkeypatch):
    cache = built(mha(), debug=False, page_size=4)
    allocator = cache.token_to_kv_pool_allocator
    extend, handed = allocator.alloc_extend, []

    def again(*given):
        handed.append(extend(*given))
        return handed[0].clone()

    monkeypatch.setattr(allocator, "alloc_extend", again)
    with pytest.raises(RunError, match="request 1 was handed slot 4 of space 'full', that request 0 holds"):
        drive(cache, arrivals((4, 8), (4, 8)), seed=0, chunk=4, sharing=0, speculating=0)


# The values themselves.


def tokens_at(slots, positions):
    return Tokens(slots, positions, *(torch.zeros_like(slots) for _ in range(3)))


def test_values_of_two_tokens_layers_sides_or_attempts_differ_in_most_columns():
    cache = built(mha(), mha(), debug=False)
    values = Values(cache, seed=0)
    pool = cache.token_to_kv_pool
    salts = torch.tensor([values.salt(0, 0), values.salt(0, 0), values.salt(1, 0), values.salt(0, 1)])
    values.write(salts, tokens_at(torch.tensor([1, 2, 3, 4]), torch.tensor([7, 8, 7, 7])))
    rows = [pool.get_key_buffer(layer)[slot, 0].flatten() for layer in (0, 1) for slot in (1, 2, 3, 4)]
    rows += [pool.get_value_buffer(0)[slot, 0].flatten()[:32] for slot in (1, 2, 3, 4)]
    for one, other in itertools.combinations(rows, 2):
        assert (one != other).float().mean() > 0.75


@pytest.mark.parametrize(
    ("dtype", "integers"),
    [("bfloat16", 256), ("float16", 256), ("float32", 256), ("fp8_e4m3", 16), ("fp8_e5m2", 8)],
)
def test_values_use_all_integers_that_a_type_holds_exactly_and_no_others(dtype, integers):
    cache = built(mha(), kv_cache_dtype=dtype, debug=False)
    slots = torch.arange(1, 200)
    Values(cache, seed=0).write(torch.zeros_like(slots), tokens_at(slots, slots))
    written = cache.token_to_kv_pool.get_key_buffer(0)[1:200].to(torch.float32).flatten()
    assert sorted(set(written.tolist())) == list(range(integers))
