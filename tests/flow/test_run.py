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
