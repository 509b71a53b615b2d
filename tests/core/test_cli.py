"""The command line: what it prints, what it refuses in one line, and that nothing of others reaches its output."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvdock.cli import main
from kvdock.cli.inputs import parse_size
from kvdock.cli.text import one_line, printable, ranges, size
from kvdock.errors import PlanError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
"""Keys and values of 32 layers, 8 heads of 128, 2 bytes each: 131,072."""


@pytest.fixture
def config(tmp_path):
    """Write a config.json: the Llama above with changes, or the given text or bytes."""

    def write(content=None, **changes):
        path = tmp_path / "config.json"
        if content is None:
            content = json.dumps({**LLAMA, **changes})
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def call(*arguments):
    """Run the command in this process; `exit_code`, `stdout` and `stderr` are as a shell would see them."""
    return CliRunner().invoke(main, [str(a) for a in arguments])


def refusal(*arguments):
    """Return the one line that a refused command leaves on standard error."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("kvdock: ")
    return result.stderr


def process(*arguments, **environment):
    """Run the command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from kvdock.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


# Sizes and texts.


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("40GiB", 40 * 2**30),
        ("80GB", 80 * 10**9),
        ("512MiB", 2**29),
        ("1.5 TiB", 3 * 2**39),
        ("64kb", 64_000),
        ("1073741824", 2**30),
        ("7B", 7),
        ("0.1GiB", 107_374_182),
        ("40gib", 40 * 2**30),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_a_size_is_read_to_the_byte(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-40GiB", "40 gigs", "4e10", "nan", "inf", "1_000", "40GiBs", "0x10", "1,5GiB", ".5GiB", "٤GiB", "40G"],
)
def test_a_size_that_is_none_is_refused_with_sizes_that_work(text):
    with pytest.raises(PlanError, match="is no size; write it as 40GiB, 80GB, 512MiB or plain bytes"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9223372036854775808", "9000000TiB", "1" + "0" * 29])
def test_an_absurd_size_is_refused(text):
    with pytest.raises(PlanError, match="more than any device has"):
        parse_size(text)


def test_several_lines_become_one():
    assert one_line("refused:\n  a: too old\n  b: no\n") == "refused: a: too old; b: no"


def test_text_of_others_cannot_steer_the_terminal():
    assert printable("a\x1b[31mb\u202ec\nd") == "a�[31mb�c�d"
    assert printable("Qwen 3 · müde") == "Qwen 3 · müde"


def test_numbers_are_shown_as_ranges_and_bytes_with_a_unit():
    assert ranges([0, 1, 2, 5, 9, 8]) == "0-2, 5, 8-9"
    assert ranges([]) == ""
    assert size(3 * 2**29) == "1.50 GiB"
    assert size(512) == "512 B"
    assert size(0.5) == "0.50 B"


# Plans.


def test_plan_draws_what_fits(config):
    result = call("plan", config(), "--memory", "1GiB", "--page-size", 16)
    assert result.exit_code == 0, result.stderr
    for text in ("LlamaForCausalLM", "page_size", "user", "MHAPool", "core", "131,072", "of the budget", "0-31"):
        assert text in result.stdout


def test_plan_json_is_the_plan_file(config):
    import kvdock

    result = call("plan", config(), "--memory", "1GiB", "--page-size", 16, "--json")
    assert result.exit_code == 0, result.stderr
    plan = kvdock.CachePlan.from_json(result.stdout)
    assert plan.budget_bytes == 2**30
    assert plan.bytes_per_token.kv == BYTES_PER_TOKEN
    assert plan.options.values.page_size == 16


def test_plan_explain_says_who_decided(config):
    result = call("plan", config(), "--memory", "1GiB", "--explain")
    assert result.exit_code == 0, result.stderr
    assert "get_pool_cls" in result.stdout
    assert "total on the device" in result.stdout


def test_flags_and_the_general_option_say_the_same(config):
    flags = ["--page-size", 16, "--context", 1024, "--max-requests", 4, "--no-prefix-cache"]
    pairs = ["page_size=16", "context-length=1024", "max_running_requests=4", "prefix_cache=false"]
    one = call("plan", config(), "--memory", "1GiB", "--json", *flags)
    two = call("plan", config(), "--memory", "1GiB", "--json", *(x for pair in pairs for x in ("--option", pair)))
    assert one.exit_code == 0, one.stderr
    assert one.stdout == two.stdout
    assert json.loads(one.stdout)["inputs"]["options"]["prefix_cache"] is False


def test_parallel_sizes_reach_the_plan(config):
    arguments = ["--memory", "1GiB", "--json", "--tp", 8, "--dp", 2, "--dp-attention", "--pp", 2, "--pp-rank", 1]
    result = call("plan", config(), *arguments)
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    # Half of the layers, and 8 heads over 8 / 2 ranks.
    assert plan["bytes_per_token"]["kv"] == BYTES_PER_TOKEN // 2 // 4
    assert plan["groups"][0]["layers"] == list(range(16, 32))


def test_layers_of_the_stages_reach_the_plan(config):
    arguments = ["--memory", "1GiB", "--json", "--pp", 2, "--pp-rank", 1, "--pp-layers", "30, 2"]
    result = call("plan", config(), *arguments)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["groups"][0]["layers"] == [30, 31]


def test_a_folder_is_a_model(config, tmp_path):
    config()
    assert call("plan", tmp_path, "--memory", "1GiB", "--json").exit_code == 0


def test_a_whole_number_may_be_written_with_a_point(config):
    assert call("plan", config(num_hidden_layers=32.0), "--memory", "1GiB", "--page-size", "16.0").exit_code == 0


def test_weights_come_off_a_device(config):
    plain = call("plan", config(), "--device", "cpu", "--json")
    less = call("plan", config(), "--device", "cpu", "--weights", "1GiB", "--json")
    assert plain.exit_code == less.exit_code == 0, plain.stderr + less.stderr
    weights = [json.loads(result.stdout)["inputs"]["weights_bytes"] for result in (plain, less)]
    assert weights == [0, 2**30]


def test_a_model_name_with_control_characters_and_markup_is_drawn_harmlessly(config, tmp_path):
    folder = tmp_path / "[bold]evil\x1b[31m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for form in ([], ["--explain"]):
        result = call("plan", folder, "--memory", "1GiB", *form)
        assert result.exit_code == 0, result.stderr
        assert "\x1b" not in result.stdout
        assert "[bold]evil�[31m" in result.stdout


# What is refused.

BAD_CONFIGS = {
    "truncated": json.dumps(LLAMA)[:-20],
    "empty": "",
    "huge": '{"a": "' + "x" * (16 * 2**20) + '"}',
    "deep": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "not JSON": "model: llama",
    "not text": b"\xff\xfe\x00",
    "a list": "[1, 2]",
    "duplicate keys": json.dumps(LLAMA)[:-1] + ', "num_hidden_layers": 1}',
    "NaN": json.dumps({**LLAMA, "rope_theta": float("nan")}),
    "no layers named": json.dumps({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}),
}


@pytest.mark.parametrize("content", BAD_CONFIGS.values(), ids=list(BAD_CONFIGS))
def test_a_config_that_cannot_be_read_is_refused_in_one_line(config, content):
    assert len(refusal("plan", config(content), "--memory", "1GiB")) < 1000


BAD_FIELDS = [
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", True),
    ("num_hidden_layers", 8.5),
    ("num_hidden_layers", "32"),
    ("num_key_value_heads", 0),
    ("num_key_value_heads", True),
    ("num_key_value_heads", 8.5),
    ("num_key_value_heads", 33),
    ("head_dim", -128),
    ("head_dim", 2**40),
    ("max_position_embeddings", 0),
    ("max_position_embeddings", 2**80),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=[f"{n}={v}" for n, v in BAD_FIELDS])
def test_a_field_that_cannot_be_is_refused_by_name(config, name, value):
    assert name in refusal("plan", config(**{name: value}), "--memory", "1GiB")


def test_a_missing_file_is_named(tmp_path):
    assert "absent.json" in refusal("plan", tmp_path / "absent.json", "--memory", "1GiB")


BAD_ARGUMENTS = {
    "no memory": (["--memory", "0"], "is no memory at all"),
    "negative memory": (["--memory", "-1"], "is no size"),
    "absurd memory": (["--memory", "99999999TiB"], "more than any device has"),
    "memory without a unit that exists": (["--memory", "40 gigs"], "write it as 40GiB"),
    "negative weights": (["--device", "cpu", "--weights=-1GiB"], "is no size"),
    "device and memory": (["--device", "cpu", "--memory", "1GiB"], "give one of them"),
    "json and explain": (["--memory", "1GiB", "--json", "--explain"], "give one of them"),
    "unknown device": (["--device", "h2000"], "h2000"),
    "zero page": (["--memory", "1GiB", "--page-size", "0"], "page_size=0"),
    "half a page": (["--memory", "1GiB", "--page-size", "8.5"], "no whole number"),
    "a page larger than the tokens asked for": (
        ["--memory", "1GiB", "--page-size", "64", "--max-tokens", "63"],
        "page_size=64",
    ),
    "tp that does not fit the heads": (["--memory", "1GiB", "--tp", "3"], "the nearest tp_size that works is 2"),
    "zero tp": (["--memory", "1GiB", "--tp", "0"], "tp_size=0"),
    "pp beyond the layers": (["--memory", "1GiB", "--pp", "64"], "pp_size=64"),
    "a rank that is none": (["--memory", "1GiB", "--pp", "2", "--pp-rank", "2"], "pp_rank=2"),
    "a budget too small": (["--memory", "100KiB"], "at least"),
    "an unknown option": (["--memory", "1GiB", "--option", "page_sise=16"], "did you mean 'page_size'"),
    "an option without a value": (["--memory", "1GiB", "--option", "page_size"], "write it as"),
    "an option that states nothing": (["--memory", "1GiB", "--option", "page_size=null"], "states nothing"),
    "an option twice": (["--memory", "1GiB", "--page-size", "16", "--option", "page_size=32"], "given twice"),
    "a flag twice": (["--memory", "1GiB", "--page-size", "16", "--page-size", "32"], "--page-size is given twice"),
    "a flag twice with one value": (["--memory", "1GiB", "--tp", "1", "--tp", "1"], "--tp is given twice"),
    "memory twice": (["--memory", "1GiB", "--memory", "2GiB"], "--memory is given twice"),
    "layers that are no list": (["--memory", "1GiB", "--pp", "2", "--pp-layers", "16,,16"], "as 30,31"),
    "layers of another model": (["--memory", "1GiB", "--pp", "2", "--pp-layers", "16,17"], "adds up to 33"),
    "an option of another type": (["--memory", "1GiB", "--option", "page_size=many"], "page_size"),
    "an option that is a flag": (["--memory", "1GiB", "--option", "page_size=true"], "page_size"),
    "an unknown flag": (["--memory", "1GiB", "--page-sise", "16"], "--page-sise"),
    "an unknown dtype": (["--memory", "1GiB", "--kv-cache-dtype", "fp9"], "did you mean"),
    "a fraction that is none": (["--device", "cpu", "--mem-fraction", "1.5"], "mem_fraction_static=1.5"),
    "a fraction that is no number": (["--device", "cpu", "--mem-fraction", "nan"], "mem_fraction_static=nan"),
    "a ratio that is none": (["--memory", "1GiB", "--swa-ratio", "0"], "swa_full_tokens_ratio=0"),
    "a choice that is none": (["--memory", "1GiB", "--hybrid-swa", "maybe"], "maybe"),
    "a context longer than the model's": (["--memory", "1GiB", "--context", "8193"], "context_length=8193"),
    "an unknown plugin": (["--memory", "1GiB", "--plugin", "nobody"], "nobody"),
    "an unknown plugin left out": (["--memory", "1GiB", "--no-plugin", "nobody"], "nobody"),
}


@pytest.mark.parametrize(("arguments", "reason"), BAD_ARGUMENTS.values(), ids=list(BAD_ARGUMENTS))
def test_arguments_that_cannot_be_served_are_refused_in_one_line(config, arguments, reason):
    assert reason in refusal("plan", config(), *arguments)


def test_without_a_device_the_two_ways_to_name_one_are_said(config):
    line = refusal("plan", config(), "--plugin", "core")
    assert "--device" in line
    assert "--memory" in line


def test_the_budget_that_a_refusal_suggests_works(config):
    line = refusal("plan", config(), "--memory", "100KiB")
    suggested = int(line.rpartition("give at least")[2].partition("(")[2].partition(" bytes")[0].replace(",", ""))
    assert call("plan", config(), "--memory", suggested).exit_code == 0
    refusal("plan", config(), "--memory", suggested - 1)


def test_strict_turns_a_warning_into_a_refusal(config):
    loose = call("plan", config(), "--memory", "256MiB")
    assert loose.exit_code == 0
    assert "warning:" in loose.stdout
    assert "8192" in refusal("plan", config(), "--memory", "256MiB", "--strict")


def test_a_plan_file_that_was_edited_is_refused_with_the_field(config):
    import kvdock

    data = json.loads(call("plan", config(), "--memory", "1GiB", "--json").stdout)
    data["total_bytes"] += 1
    with pytest.raises(PlanError, match="total_bytes"):
        kvdock.CachePlan.from_json(json.dumps(data))


@pytest.mark.parametrize("arguments", [[], ["plam"], ["plan"], ["plan", "a", "b"], ["--nothing"]])
def test_a_command_line_that_says_nothing_useful_is_refused_in_one_line(arguments):
    assert "--help" in refusal(*arguments)


def test_a_folder_whose_name_is_no_text_is_planned_under_a_name_that_is(config, tmp_path):
    folder = os.fsencode(tmp_path / "model") + b"\xff"
    Path(os.fsdecode(folder)).mkdir()
    (tmp_path / os.fsdecode(folder) / "config.json").write_text(json.dumps(LLAMA))
    result = call("plan", os.fsdecode(folder), "--memory", "1GiB", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["inputs"]["models"][0]["name"] == "model?"


def test_an_interrupt_ends_with_130_and_no_words(config, monkeypatch):
    from kvdock import edge

    def interrupt(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(edge, "plan", interrupt)
    result = call("plan", config(), "--memory", "1GiB")
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "")


def test_a_full_disk_is_refused_in_one_line(config):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", "from kvdock.cli import main; main()", "plan", config(), "--memory", "1GiB"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("kvdock: the system refused: ")
    assert result.stderr.count("\n") == 1


def closed(config, redirections):
    """Run a plan from a shell that closes descriptors."""
    command = f"'{sys.executable}' -c 'from kvdock.cli import main; main()' plan '{config()}' --memory 1GiB --json"
    shell = ["bash", "-c", f"{command} {redirections}"]
    return subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False)


def test_a_closed_standard_output_is_refused_in_one_line(config):
    result = closed(config, ">&-")
    assert result.returncode == 2
    assert result.stderr == "kvdock: standard output is closed; leave it open, or send it to a file with > FILE\n"
    silent = closed(config, ">&- 2>&-")
    assert (silent.returncode, silent.stdout, silent.stderr) == (2, "", "")


def test_a_closed_standard_error_leaves_the_result_pure(config):
    result = closed(config, "2>&-")
    assert result.returncode == 0
    assert json.loads(result.stdout)["warnings"]


# Lists.


def test_plugins_lists_the_installed_ones_without_importing_them():
    result = call("plugins", "--json")
    assert result.exit_code == 0, result.stderr
    assert all(row["status"] in ("found", "conflict", "failed") for row in json.loads(result.stdout))


def test_plugins_check_adds_hooks_and_status():
    result = call("plugins", "--check", "--json")
    assert result.exit_code == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert rows["core"]["status"] == "loaded"
    assert "get_pool_cls" in rows["core"]["hooks"]
    drawn = call("plugins", "--check")
    assert drawn.exit_code == 0, drawn.stderr
    assert "core" in drawn.stdout


def test_devices_lists_profiles_that_plans_take(config):
    result = call("devices", "--json")
    assert result.exit_code == 0, result.stderr
    devices = json.loads(result.stdout)
    for device in devices[:2]:
        name = f"{device['plugin']}:{device['name']}"
        assert call("plan", config(), "--device", name, "--json").exit_code == 0
        assert name in call("devices").stdout
    assert call("devices", "--plugin", "core", "--json").stdout.split() == ["[]"]


def test_models_lists_architectures():
    result = call("models", "--json")
    assert result.exit_code == 0, result.stderr
    assert "LlamaForCausalLM" in json.loads(result.stdout)
    assert "LlamaForCausalLM" in call("models").stdout


# Processes.


def test_a_process_prints_pure_json_and_exits_with_0(config):
    result = process("plan", config(), "--memory", "2GiB", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["schema"].startswith("kvdock.plan/")
    assert result.stderr == ""


def test_warnings_of_a_plan_reach_standard_error_beside_json(config):
    result = process("plan", config(), "--memory", "256MiB", "--json")
    assert result.returncode == 0
    warnings = json.loads(result.stdout)["warnings"]
    assert warnings
    assert result.stderr.splitlines() == [f"kvdock: warning: {warning}" for warning in warnings]


def test_a_process_refuses_in_one_line_and_exits_with_2(config):
    result = process("plan", config(), "--memory", "40 gigs")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "Traceback" not in result.stderr


@pytest.fixture
def talkative(tmp_path):
    """Install a plugin that prints when it is imported and when it is asked; native code prints as well."""
    site = tmp_path / "site"
    info = site / "kvdock_talk-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvdock-talk\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvdock.families]\ntalk = kvdock_talk\n")
    (site / "kvdock_talk.py").write_text(
        "import atexit, os, sys\n"
        "from kvdock import CONTRACT, hookimpl\n"
        "kvdock_contract = CONTRACT\n"
        'print("imported")\n'
        'sys.__stdout__.write("behind\\n")\n'
        'atexit.register(lambda: print("leaving"))\n'
        'atexit.register(lambda: os.write(1, b"gone\\n"))\n'
        "@hookimpl\n"
        "def validate_plan(query):\n"
        '    print("asked")\n'
        '    os.write(1, b"native\\n")\n'
        '    os.system("echo child")\n'
    )
    return site


@pytest.mark.parametrize("form", ["--json", "--explain"])
def test_what_plugins_print_goes_to_standard_error_until_the_end(config, talkative, form):
    result = process(
        "plan",
        config(),
        "--memory",
        "2GiB",
        form,
        PYTHONPATH=os.pathsep.join([str(talkative), os.environ.get("PYTHONPATH", "")]),
    )
    assert result.returncode == 0, result.stderr
    said = ["asked", "behind", "child", "gone", "imported", "leaving", "native"]
    assert sorted(set(result.stderr.split())) == said  # a hook is asked anew for what a limit suggests
    if form == "--json":
        json.loads(result.stdout)
    assert not set(said) & set(result.stdout.splitlines())


def test_a_plugin_that_fails_is_one_line_of_warning_with_its_reason(config, talkative):
    (talkative / "kvdock_talk.py").write_text('raise RuntimeError("no driver")\n')
    result = process(
        "plan",
        config(),
        "--memory",
        "1GiB",
        "--json",
        PYTHONPATH=os.pathsep.join([str(talkative), os.environ.get("PYTHONPATH", "")]),
    )
    assert result.returncode == 0, result.stderr
    json.loads(result.stdout)
    warning = [line for line in result.stderr.splitlines() if "no driver" in line]
    assert len(warning) == 1
    assert warning[0].startswith("kvdock: warning: ")
    assert "kvdock-talk 1.0" in warning[0]


def test_a_reader_that_goes_away_is_no_error(config):
    command = f"'{sys.executable}' -c 'from kvdock.cli import main; main()' plan '{config()}' --memory 2GiB --json | head -c 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (result.stdout, result.stderr) == ("{", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_still_gets_its_drawing(config, encoding):
    for form in ([], ["--json"], ["--explain"]):
        result = process("plan", config(), "--memory", "1GiB", *form, PYTHONIOENCODING=encoding)
        assert result.returncode == 0, result.stderr


LIGHT = """
import sys
from pathlib import Path
from kvdock.cli import main
try:
    main(sys.argv[1:])
except SystemExit as leave:
    code = leave.code
heavy = sorted({"rich", "torch", "numpy", "json.tool", "asyncio", "hypothesis"} & set(sys.modules))
print(code, heavy, file=sys.stderr)
"""


@pytest.mark.parametrize("form", [["plugins", "--json"], ["devices", "--json"], ["models", "--json"], ["plan"]])
def test_json_needs_neither_torch_nor_a_drawing_library(config, form):
    if form == ["plan"]:
        form = ["plan", config(), "--memory", "2GiB", "--json"]
    result = subprocess.run(
        [sys.executable, "-c", LIGHT, *form], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stderr.strip() == "0 []"


def test_run_without_torch_says_how_to_get_it(config):
    code = "import sys; sys.modules['torch'] = None; from kvdock.cli import main; main(sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-c", code, "run", config()], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 2
    assert "pip install 'kvdock[torch]'" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--requests", "0"], "--requests 0 drives nothing"),
        (["--requests", "-3"], "--requests -3 drives nothing"),
        (["--scale", "0"], "is no factor"),
        (["--scale", "nan"], "is no factor"),
        (["--scale", "inf"], "is no factor"),
        (["--seed", "x"], "--seed"),
        (["--memory", "1KiB"], "at least"),
        (["--trace", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_runs_that_cannot_be_are_refused_in_one_line(config, arguments, reason):
    pytest.importorskip("torch")
    assert reason in refusal("run", config(), *arguments)


def test_run_drives_a_trace_and_says_what_happened(config, tmp_path):
    pytest.importorskip("torch")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp": {t}, "input_length": 20, "output_length": 4}}\n' for t in range(5)))
    result = call("run", config(num_hidden_layers=2), "--memory", "8MiB", "--trace", trace, "--requests", 4)
    assert result.exit_code == 0, result.stderr
    assert "4 of 4 served" in result.stdout
    assert "96 in" in result.stdout
    assert "passed" in result.stdout


def test_run_drives_seeded_requests_on_the_cpu_unless_told_otherwise(config):
    pytest.importorskip("torch")
    result = call("run", config(num_hidden_layers=2), "--memory", "8MiB", "--requests", 3, "--scale", "0.05")
    assert result.exit_code == 0, result.stderr
    assert "3 of 3 served" in result.stdout
