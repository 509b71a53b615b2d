"""Whole runs in unified memory: every value is read back, wherever its page was moved meanwhile."""

import pytest

torch = pytest.importorskip("torch")

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.trace import seeded  # noqa: E402

RUNS = [
    ("linear", {}),
    ("linear", {"page_size": 1, "lazy_compaction": False}),
    ("linear", {"max_state_slots": 12, "state_extra_buffer": "on"}),
    ("sliding", {}),
    ("sliding", {"page_size": 1, "prefix_cache": False, "max_running_requests": 6, "chunked_prefill_size": 8}),
    ("sliding", {"lazy_compaction": False, "page_size": 3}),
    ("three", {}),
    ("three", {"max_running_requests": 5, "prefix_cache": False, "lazy_compaction": False}),
    ("pure", {}),
]


@pytest.mark.parametrize(("kind", "options"), RUNS, ids=str)
def test_a_run_reads_every_value_back(small, kind, options):
    cache = small.build(kind, budget_bytes=40_000, **options)
    arrivals = seeded(3, 30, cache.plan.max_request_tokens, median_input=30, median_output=20)
    report = drive(cache, arrivals, seed=5)
    assert report.problems == ()
    assert report.finished == report.arrived == 30
    assert report.checks > 500
    assert report.bytes_moved > 0
    cache.memory.check()


def test_the_flag_drives_unified_memory(capsys):
    from pathlib import Path

    from kvdock.cli import main

    model = Path(__file__).parents[2] / "models" / "gpt-oss-20b.json"
    size = ["--memory", "32MiB", "--page-size", "16", "--context", "512", "--requests", "4"]
    with pytest.raises(SystemExit) as ended:
        main(["run", str(model), "--unified", *size])
    assert not ended.value.code
    assert "all right" in capsys.readouterr().out
