"""`kvdock run` from end to end: every value is read back, nothing leaks, and a fault is found."""

import json
import random
import re

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.cli import main  # noqa: E402
from kvdock.errors import SlotError  # noqa: E402
from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.trace import Arrival  # noqa: E402
from kvdock.testing.values import RunError, WrongValue  # noqa: E402
from kvdock_dsv4 import trace  # noqa: E402
from kvdock_dsv4.pools import router  # noqa: E402

ONLINE = {"plugin_options": {"dsv4": {"online_compress": True}}}
SPECULATIVE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_topk": 1}
TIERS = {"hisparse": True, "hisparse_top_k": 48}
TIGHT = {"page_size": 128, "swa_full_tokens_ratio": 0.6}


@pytest.fixture
def tiny(small):
    """Two layers: one of each ratio."""
    return small | {"num_hidden_layers": 2, "compress_ratios": [4, 128]}


def arrivals(count, seed, prompt=400, output=80):
    rng = random.Random(seed)
    lengths = [(rng.randint(1, prompt), rng.randint(1, output)) for _ in range(count)]
    return [Arrival(timestamp_ms=40.0 * i, input_length=p, output_length=o) for i, (p, o) in enumerate(lengths)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        SPECULATIVE,
        ONLINE,
        {"plugin_options": {"dsv4": {"fp4_indexer": True, "state_dtype": "bfloat16"}}},
        TIERS,
        {"role": "decode", "decode_extra_slots": 2, "max_running_requests": 2},
        {"role": "decode", "decode_extra_slots": 2, "max_running_requests": 2, **ONLINE},
        {"role": "decode", "decode_extra_slots": 2, "max_running_requests": 2, **TIERS},
        {"role": "decode", "decode_extra_slots": 2, "max_running_requests": 2, **TIERS, **SPECULATIVE},
        {"role": "prefill", **TIERS},
    ],
    ids=[
        "plain",
        "speculation",
        "online",
        "narrow",
        "tiers",
        "decode",
        "decode-online",
        "decode-tiers",
        "decode-tiers-speculation",
        "prefill-tiers",
    ],
)
def test_what_is_read_back_is_what_was_written(cache, tiny, options):
    found = cache(tiny, 5 * 2**20, **TIGHT, **options)
    report = drive(found, arrivals(14, seed=1), seed=2)
    assert report.problems == ()
    assert (report.finished, report.unfinished) == (14, 0)
    assert report.checks > 5_000
    assert (report.rollbacks > 0) == ("speculative_algorithm" in options)
    assert report.received == (14 if options.get("role") == "decode" else 0)


def test_requests_are_swapped_out_and_come_back_whole(cache, tiny):
    found = cache(tiny, 1_000_000, **TIGHT, max_running_requests=3)
    report = drive(found, arrivals(4, seed=3, prompt=300, output=400), seed=4)
    assert report.problems == ()
    assert report.preemptions > 0 and report.finished == 4


def test_online_states_of_requests_that_are_swapped_out_come_back(cache, tiny):
    found = cache(tiny, 400_000, **TIGHT, max_running_requests=3, **ONLINE)
    report = drive(found, arrivals(4, seed=3, prompt=300, output=200), seed=4)
    assert report.problems == ()
    assert report.preemptions > 0 and report.finished == 4


@pytest.mark.parametrize("options", [{}, {"role": "decode", **TIERS}], ids=["plain", "decode-tiers"])
def test_a_run_that_is_cut_short_leaves_nothing(cache, tiny, options):
    found = cache(tiny, 5 * 2**20, **TIGHT, **options)
    report = drive(found, arrivals(20, seed=5), seed=6, max_steps=30)
    assert report.problems == () and report.unfinished > 0


@pytest.mark.parametrize("method", ["offload", "set_host_kv_buffer"])
def test_a_run_finds_rows_that_did_not_come_to_the_host(cache, tiny, monkeypatch, method):
    found = cache(tiny, 5 * 2**20, **TIGHT, **TIERS, role="decode")
    monkeypatch.setattr(found.pools["c4"], method, lambda *given: None)
    with pytest.raises(WrongValue, match="the compressed row in slot"):
        drive(found, arrivals(14, seed=1), seed=2)


def test_a_run_finds_rows_of_the_window_that_are_not_on_the_device(cache, tiny, monkeypatch):
    found = cache(tiny, 5 * 2**20, **TIGHT, **TIERS, role="decode")
    monkeypatch.setattr(found.token_to_kv_pool_allocator, "translate_to_device", torch.zeros_like)
    with pytest.raises(RunError, match=r"slot \d+ did not leave the window, but its rows are not on the device"):
        drive(found, arrivals(14, seed=1), seed=2)


def test_requests_that_arrived_are_swapped_out_and_come_back_whole(cache, tiny):
    found = cache(tiny, 1_200_000, **TIGHT, **TIERS, max_running_requests=3, role="decode", decode_extra_slots=1)
    report = drive(found, arrivals(6, seed=3, prompt=300, output=400), seed=4)
    assert report.problems == ()
    assert report.preemptions > 0 and report.finished == 6


@pytest.mark.parametrize("wrong", ["ring", "group", "row"])
def test_a_run_finds_rows_that_lie_where_others_do(cache, tiny, monkeypatch, wrong):
    """A ring of half its length, a compressed slot of half its pages, a request row that is not in it."""
    if wrong == "ring":
        monkeypatch.setattr(router, "state_slot", lambda swa, page, ring: swa // page * ring + swa % (ring // 2))
    elif wrong == "group":
        monkeypatch.setattr(router, "compressed_slot", lambda slot, ratio: slot // ratio // 2)
    else:
        monkeypatch.setattr(router, "request_state_slot", lambda row, position, ring: ring + position % ring)
    with pytest.raises((WrongValue, SlotError)):  # read back, or written twice in one call
        drive(cache(tiny, 5 * 2**20, **TIGHT), arrivals(14, seed=1), seed=2)


def test_a_run_finds_a_ring_that_is_too_short_for_drafts(cache, tiny, monkeypatch):
    found = cache(tiny, 5 * 2**20, **TIGHT)  # rings without room for drafts
    kind = trace.states_kind
    monkeypatch.setattr(trace, "states_kind", lambda pool: kind(pool)._replace(ahead=None))
    with pytest.raises(WrongValue):
        drive(found, arrivals(14, seed=1), seed=2, speculating=0.5)


@pytest.mark.parametrize(
    ("plugin", "device", "spaces"),
    [
        ("cuda", "h200", {"full", "swa", "requests"}),
        ("rocm", "mi300x", {"full", "requests"}),
        ("ascend", "910c", {"full", "swa", "c4", "c128", "c4_state", "c128_state", "requests"}),
    ],
)
def test_the_command_line_runs_each_form_in_host_memory(tiny, tmp_path, plugin, device, spaces):
    """Which spaces are handed out tells the forms apart."""
    pytest.importorskip(f"kvdock_{plugin}")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny))
    command = ["run", str(config), "--device", device, "--memory", "64MiB", "--requests", "4", "--scale", "0.2"]
    result = CliRunner().invoke(main, [*command, "--on-cpu"])
    assert result.exit_code == 0, result.output
    assert "4 of 4 served" in result.stdout
    assert set(re.findall(r"peak of (\S+)", result.stdout)) == spaces
