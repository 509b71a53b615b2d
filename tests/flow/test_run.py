"""`kvdock run` on traces of its user."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvdock.cli import main

pytest.importorskip("torch")

MODEL = Path(__file__).parents[1] / "models" / "llama-3.1-8b.json"


def run(tmp_path, *lengths):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": prompt, "output_length": answer} for prompt, answer in lengths]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CliRunner().invoke(main, ["run", str(MODEL), "--memory", "64MiB", "--trace", str(trace)])


def test_a_trace_of_which_nothing_can_be_served_fails_with_one_line(tmp_path):
    done = run(tmp_path, (10**6, 1), (10**6, 2))
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "none of the 2 requests can be served: this plan holds requests of at most" in line
    assert "--scale" in line and "--memory" in line


def test_a_trace_of_which_something_can_be_served_succeeds(tmp_path):
    done = run(tmp_path, (10**6, 1), (20, 4))
    assert done.exit_code == 0, done.stderr
    assert "1 of 2 served" in done.stdout


def test_a_run_with_states_says_what_became_of_them(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 40 * i, "input_length": 12 + i, "output_length": 3} for i in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = MODEL.with_name("kimi-linear-48b-a3b.json")
    arguments = [str(model), "--tp", "8", "--context", "256", "--memory", "256MiB", "--trace", str(trace)]
    done = CliRunner().invoke(main, ["run", *arguments, "--option", "role=decode", "--max-requests", "2"])
    assert done.exit_code == 0, done.stderr
    report = " ".join(done.stdout.split())
    assert "requests 4 of 4 served" in report
    assert "states checked" in report
    assert "0 begun with the state of a prefix, 0 tracked, 0 from snapshots of drafts" in report
    assert "4 requests that arrived with their KV" in report
    assert "check passed" in report
