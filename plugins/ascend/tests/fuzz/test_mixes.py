"""DeepSeek V4 on an NPU, random budgets and request mixes: whoever is admitted ends, and nothing is left behind."""

import random

import kvdock
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.trace import Arrival  # noqa: E402

CONTEXT = 1024
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
FORMS = [{}, {"state_dtype": "bfloat16"}, {"role": "prefill"}, {"role": "decode"}, EAGLE]
edges = st.sampled_from([1, 3, 127, 128, 129, 255, 256, 257, 511, 512, 513])


def arrivals_of(lengths, apart=10.0):
    return [Arrival(timestamp_ms=apart * i, input_length=p, output_length=o) for i, (p, o) in enumerate(lengths)]


def few_layers(config, ratios):
    return config | {
        "num_hidden_layers": len(ratios),
        "compress_ratios": list(ratios),
        "max_position_embeddings": CONTEXT,
    }


def least_bytes(planned, config, **options):
    with pytest.raises(kvdock.BudgetError) as least:
        planned(config, budget=1, **options)
    return least.value.needed_bytes


def counts(cache):
    sides = cache.token_to_kv_pool_allocator.parts.allocators
    return {name: side.available_size() for name, side in sides.items()}


def sizes(cache):
    return {name: cache.plan.spaces[name] for name in counts(cache)}


def test_no_admitted_request_hangs(planned, small, effort):
    """From the smallest budget on: every request that the plan can hold ends, alone or beside others."""

    @effort
    @given(
        ratios=st.sampled_from([(0,), (4,), (128,), (4, 128)]),
        form=st.sampled_from(FORMS),
        page=st.sampled_from([128, 256, 512]),
        more=st.sampled_from([0, 1]) | st.integers(0, 3_000_000),
        requests=st.integers(1, 6),
        swa_ratio=st.sampled_from([0.1, 0.5, 1.0]),
        lengths=st.lists(st.tuples(edges | st.integers(1, 700), st.integers(1, 60)), min_size=1, max_size=6),
        chunk=st.sampled_from([64, 300, 512]),
        seed=st.integers(0, 2**16),
    )
    @example((4, 128), {}, 128, 0, 1, 0.1, [(CONTEXT - 1, 1)], 64, 0)  # a context alone in the least that plans
    @example((4, 128), {}, 128, 0, 6, 0.1, [(128, 2)] * 6, 512, 0)  # every one wastes a page of compressed rows
    def property_holds(ratios, form, page, more, requests, swa_ratio, lengths, chunk, seed):
        config = few_layers(small, ratios)
        form = {} if ratios == (0,) and "state_dtype" in form else form  # without states there is no such option
        options = {"page_size": page, "max_running_requests": requests, "swa_full_tokens_ratio": swa_ratio, **form}
        least = least_bytes(planned, config, **options)
        cache = kvdock.build(planned(config, budget=least + more, **options), device="cpu", debug=True)
        report = drive(cache, arrivals_of(lengths), seed=seed, chunk=chunk)
        assert report.problems == ()
        longest = cache.plan.max_request_tokens
        assert report.rejected == sum(p + o > longest for p, o in lengths)
        assert report.finished == len(lengths) - report.rejected
        assert counts(cache) == sizes(cache)

    property_holds()


def test_nothing_is_left_of_many_requests(planned, small, effort):
    """3,000 requests with `make fuzz`, several of them in each step."""
    rng = random.Random(7)
    count = 3000 if effort.max_examples > 100 else 100
    made = planned(few_layers(small, (4, 128)), max_total_tokens=2048, max_running_requests=16)
    cache = kvdock.build(made, device="cpu", debug=True)
    lengths = [(rng.randint(1, 150), rng.randint(1, 4)) for _ in range(count)]
    report = drive(cache, arrivals_of(lengths, apart=2.0), seed=8)
    assert report.problems == ()
    assert (report.finished, report.unfinished, report.rejected) == (count, 0, 0)
    assert report.peak_slots["requests"] > 2
    assert counts(cache) == sizes(cache)


def test_nothing_is_left_of_requests_that_were_swapped_out(planned, small):
    """Every eighth of 24 requests outgrows the cache that it shares with others."""
    rng = random.Random(7)
    made = planned(few_layers(small, (4, 128)), max_total_tokens=1536, max_running_requests=16)
    cache = kvdock.build(made, device="cpu", debug=True)
    lengths = [(rng.randint(1, 200), rng.randint(1, 12) if i % 8 else 400) for i in range(24)]
    report = drive(cache, arrivals_of(lengths, apart=2.0), seed=8)
    assert (report.problems, report.finished) == ((), 24)
    assert report.preemptions > 0
    assert counts(cache) == sizes(cache)


def test_nothing_is_left_of_runs_that_are_cut_short(planned, small, effort):
    """Runs end anywhere: amid prompts and decodes, with requests on the host; the cache goes on with the next run."""
    rng = random.Random(9)
    made = planned(few_layers(small, (4, 128)), max_total_tokens=1024, max_running_requests=8, **EAGLE)
    cache = kvdock.build(made, device="cpu", debug=True)
    unfinished = 0
    for turn in range(200 if effort.max_examples > 100 else 10):
        lengths = [(rng.randint(1, 500), rng.randint(1, 300)) for _ in range(15)]
        report = drive(cache, arrivals_of(lengths, apart=1.0), seed=turn, chunk=200, max_steps=rng.randint(1, 60))
        assert report.problems == ()
        unfinished += report.unfinished
        assert counts(cache) == sizes(cache)
        assert cache.req_to_token_pool.available_size() == 8
    assert unfinished > 0


def test_nothing_is_left_of_requests_that_are_aborted(planned, small, effort):
    """Aborted anywhere: before the first token, within a prompt, behind a window, after a trim, in a free group."""
    rng = random.Random(10)
    made = planned(few_layers(small, (4, 128)), max_total_tokens=2048, swa_full_tokens_ratio=1.0)
    cache = kvdock.build(made, device="cpu", debug=True)
    table = cache.req_to_token_pool
    live, begun = {}, 0
    while begun < (3000 if effort.max_examples > 100 else 150):
        length = rng.choice([1, 127, 128, 129, rng.randint(1, 600)])
        if cache.admit(begun, length) is None:
            abort(cache, rng, live.popitem()[0])
            continue
        live[begun] = length
        begun += 1
        name = rng.choice(sorted(live))
        if live[name] > 256 and rng.random() < 0.5:
            cache.evict([name], [rng.randint(0, live[name] - 128)])
            abort(cache, rng, name)
            del live[name]
        elif rng.random() < 0.5:
            live[name] = rng.randint(1, live[name])
            cache.trim([name], [live[name]])
        if begun % 10 == 0:
            cache.check()
    while live:
        abort(cache, rng, live.popitem()[0])
    cache.check()
    assert counts(cache) == sizes(cache)
    assert table.available_size() == 4


def abort(cache, rng, name):
    allocator = cache.token_to_kv_pool_allocator
    is_grouped = rng.random() < 0.3
    if is_grouped:
        allocator.free_group_begin()
    cache.release(name)
    if is_grouped:
        allocator.free_group_end()
