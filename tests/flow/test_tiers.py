"""Rows in two tiers, driven: written to both, read through swap-ins into device buffers, and nothing leaks."""

import json
from pathlib import Path

import kvdock
import pytest
from click.testing import CliRunner
from kvdock.cli import main
from kvdock.model import DSAParams, LayerSpec, ModelSpec
from kvdock.testing.trace import Arrival

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.tiers import Residents  # noqa: E402
from kvdock.testing.values import RunError, WrongValue  # noqa: E402

DSA = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
KINDS = {
    "raw": {},
    "scaled": {"kv_cache_dtype": "fp8_e4m3"},
    "raw, 8 bits": {"kv_cache_dtype": "fp8_e5m2", "index_dtype": "fp4"},
    "decode": {"role": "decode"},
    "prefill": {"role": "prefill"},
}
SMALL = {"max_total_tokens": 52, "hisparse_host_to_device_ratio": 16, "hisparse_device_buffer_size": 16}
"""52 device slots of pages of 4: two buffers of 20 and 12 more, or prompts."""


def built(page_size=4, debug=True, **options):
    """256 device slots unless told otherwise, twice as many full and host slots; a step reads 16 tokens."""
    model = ModelSpec(name="m", architecture="A", layers=(DSA, DSA), context_length=256, dtype="bfloat16")
    given = {
        "plugins": (),
        "page_size": page_size,
        "hisparse": True,
        "hisparse_top_k": 16,
        "max_total_tokens": 256,
        "max_running_requests": 6,
        **options,
    }
    return kvdock.build(kvdock.plan(model, device="cpu", options=given, budget_bytes=2**26), debug=debug)


def arrivals(count=8):
    return [Arrival(timestamp_ms=20.0 * i, input_length=20 + 17 * i % 90, output_length=6 + i) for i in range(count)]


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_comes_back_through_swap_ins(kind, page_size, debug):
    cache = built(page_size, debug, **KINDS[kind])
    report = drive(cache, arrivals(), seed=3, chunk=48)
    assert report.ok, report.problems
    assert (report.finished, report.unfinished, report.device_buffers) == (8, 0, 8)
    assert report.swapped_in > report.found_on_device > 0
    assert report.received == (8 if kind == "decode" else 0)
    # Of a token the host's row is compared in each layer as well as what a step reads.
    assert report.checks >= 2 * 2 * sum(arrival.tokens for arrival in arrivals())
    assert set(report.peak_slots) == {"full", "device", "host", "requests"}
    assert cache.host_bytes() == cache.plan.host_bytes
    cache.close()


def test_requests_that_wait_for_a_buffer_swap_others_out():
    found = [drive(built(**SMALL), arrivals(12), seed=seed, speculating=0.3) for seed in range(3)]
    for report in found:
        assert report.ok, report.problems
        assert report.finished == 12
        assert report.peak_slots["device"] <= 52
    assert sum(report.preemptions for report in found) > 0
    assert sum(report.grown_buffers for report in found) > 0
    assert sum(report.shared_tokens for report in found) > 0
    assert sum(report.rollbacks for report in found) > 0


@pytest.mark.parametrize("role", ["none", "decode"])
@pytest.mark.parametrize("steps", range(1, 12, 2))
def test_requests_that_are_cut_off_leave_nothing(steps, role):
    cache = built(**{**SMALL, "max_total_tokens": 80}, role=role)
    report = drive(cache, arrivals(6), seed=steps, chunk=24, max_steps=steps)
    assert report.ok, report.problems
    assert report.unfinished > 0
    cache.close()


def test_the_same_seed_reads_the_same_tokens():
    first, again, other = (drive(built(), arrivals(), seed=seed) for seed in (1, 1, 2))
    assert (first.swapped_in, first.found_on_device) == (again.swapped_in, again.found_on_device)
    assert (first.swapped_in, first.found_on_device) != (other.swapped_in, other.found_on_device)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("method", ["offload", "swap_in", "set_host_kv_buffer", "set_index_k"])
def test_what_is_not_copied_is_found(method, page_size, monkeypatch):
    options = {"role": "decode"} if method == "set_host_kv_buffer" else {}
    cache = built(page_size, **options)
    monkeypatch.setattr(cache.token_to_kv_pool, method, lambda *given: None)
    with pytest.raises(WrongValue, match=r"request \d, position \d+, layer [01] \(target\)"):
        drive(cache, arrivals(), seed=0)


def test_a_row_of_another_layer_in_the_buffer_is_found(monkeypatch):
    cache = built()
    pool, swap_in = cache.token_to_kv_pool, cache.token_to_kv_pool.swap_in
    monkeypatch.setattr(pool, "swap_in", lambda host, device, layer_id=None: swap_in(host, device, 0))
    with pytest.raises(WrongValue, match=r"layer 1 \(target\): the key in slot"):
        drive(cache, arrivals(), seed=0)


def test_copies_that_forget_the_host_are_found(monkeypatch):
    cache = built(**SMALL)
    pool, load = cache.token_to_kv_pool, cache.token_to_kv_pool.load_cpu_copy
    monkeypatch.setattr(pool, "load_cpu_copy", lambda copies, indices, host: load(copies, indices))
    with pytest.raises(WrongValue, match="the key in slot"):
        for seed in range(8):
            drive(cache, arrivals(12), seed=seed)


def test_a_buffer_that_is_also_anothers_is_found(monkeypatch):
    cache = built(debug=False)
    allocator = cache.token_to_kv_pool_allocator
    give = allocator.alloc_device_buffer
    found = []

    def same(request, start, wanted=None):
        found.append(give(request, start, wanted))
        return found[0]

    monkeypatch.setattr(allocator, "alloc_device_buffer", same)
    with pytest.raises(RunError, match=r"was handed slot \d+ of space 'device', that request \d holds"):
        drive(cache, arrivals(), seed=0)


def test_host_slots_that_leak_are_a_problem_of_the_report(monkeypatch):
    cache = built()
    allocator = cache.token_to_kv_pool_allocator
    give = allocator.host.free_pages
    monkeypatch.setattr(allocator.host, "free_pages", lambda pages: give(pages[1:]))
    with pytest.raises(RunError, match=r"space 'host'|slots leaked") as e:
        report = drive(cache, arrivals(4), seed=1)
        raise RunError("; ".join(report.problems))
    assert "host" in str(e.value)


def test_a_refused_buffer_that_takes_something_is_found(monkeypatch):
    cache = built(**SMALL)
    allocator = cache.token_to_kv_pool_allocator
    give = allocator.alloc_device_buffer

    def leaky(request, start, wanted=None):
        found = give(request, start, wanted)
        if found is None:
            allocator.device.alloc_pages(1, [request])
        return found

    monkeypatch.setattr(allocator, "alloc_device_buffer", leaky)
    with pytest.raises(RunError, match="a device buffer that was refused changed the free device slots from"):
        for seed in range(8):
            drive(cache, arrivals(12), seed=seed)


def test_what_was_read_longest_ago_leaves_a_buffer_first():
    residents = Residents([8, 9])
    assert residents.bring([8, 3], room=3) == ([0, 2], {3})
    # Full: 9 is the oldest, then 8; what is chosen now stays.
    assert residents.bring([3, 4], room=3) == ([2, 1], {4})
    assert residents.bring([8, 9, 4], room=3) == ([0, 2, 1], {9})
    assert residents.bring([5], room=4) == ([3], {5})


def test_a_borrowed_prefix_keeps_its_device_rows_when_a_buffer_begins_behind_it():
    cache = built()
    allocator, pool = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    prefix = cache.admit("a", 8)
    on_device = allocator.translate(prefix)
    assert cache.admit("b", 12, prefix=prefix) is not None
    allocator.reserve_host("b", 20)
    cache.trim(["b"], [8])
    allocator.alloc_device_buffer("b", device_start=8)
    row = pool.row_of("b")
    found = allocator.alloc_decode(slots(9), [9], pool.req_to_token[row, 7:8].long(), owners=["b"])
    pool.write([row], [8], [9], found)
    assert allocator.translate(prefix).equal(on_device)
    cache.check(held=torch.cat((prefix, found)))
    cache.release("b")
    cache.release("a")
    cache.close()


def test_a_run_of_two_tiers_says_what_was_swapped_in(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 40 * i, "input_length": 30 + i, "output_length": 3} for i in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = Path(__file__).parents[1] / "models" / "deepseek-v3.2.json"
    arguments = ["run", str(model), "--tp", "8", "--pp", "16", "--context", "128", "--page-size", "64"]
    options = ["hisparse=true", "hisparse_top_k=8", "hisparse_device_buffer_size=64", "hisparse_swap_in_block_size=512"]
    given = [part for option in options for part in ("--option", option)]
    done = CliRunner().invoke(main, [*arguments, "--memory", "32MiB", "--trace", str(trace), *given])
    assert done.exit_code == 0, done.stderr
    report = " ".join(done.stdout.split())
    assert "requests 4 of 4 served" in report
    assert "rows from the host" in report
    assert "device buffers 4 given, 0 grown later" in report
    assert "check passed" in report
