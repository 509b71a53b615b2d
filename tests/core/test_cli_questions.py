"""Questions on the command line: answers for people, as JSON and as Markdown, and what is refused by name."""

import importlib.util
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from kvdock.cli import main
from kvdock.cli.page import BAR_CELLS, Bar, Facts, Line, Part, Table, bar_runs, cells, markdown

MODEL = Path(__file__).parents[1] / "models" / "llama-3.1-8b.json"
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
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def call(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments], env={"COLUMNS": "140"})


def shown(*arguments):
    """Return what a command that must work prints."""
    result = call(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def answered(*arguments):
    return json.loads(shown(*arguments, "--json"))


def refusal(*arguments):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    return result.stderr


def line_of(text, name):
    """Return the line of a drawing that begins with `name`, its spaces made one."""
    (line,) = (" ".join(line.split()) for line in text.splitlines() if line.startswith(name))
    return line


# Do they fit?


def test_requests_that_fit_are_told_so(config):
    text = shown("plan", config, "--memory", "8GiB", "--page-size", 16, "--requests", 4, "--length", 1000)
    assert line_of(text, "fits") == "fits yes"
    # 1,000 tokens lie on 63 pages of 16; 4 · 1,008 · 131,072 bytes.
    assert line_of(text, "KV that") == "KV that they hold 504.00 MiB (528,482,304 bytes) a rank"
    assert "what serves" not in text


def test_a_no_is_an_answer_and_ends_with_0(config):
    text = shown("plan", config, "--memory", "1GiB", "--requests", 4, "--length", 8000)
    assert line_of(text, "fits") == "fits no"
    assert "in the way: space full: 32,000 slots are needed" in text
    assert "what serves" in text


def test_a_length_alone_asks_for_one_request(config):
    answer = answered("plan", config, "--memory", "2GiB", "--length", 1000)
    assert (answer["question"], answer["requests"], answer["fits"]) == ("serves", 1, True)
    assert answer["kv_bytes"] == 1000 * BYTES_PER_TOKEN


QUESTIONS = {
    "memory": (["--memory", "1GiB"], ["--requests", "4", "--length", "8000"]),
    "a limit": (["--memory", "8GiB", "--max-requests", "2"], ["--requests", "6", "--length", "1000"]),
    "a limit and memory": (["--memory", "1GiB", "--max-requests", "2"], ["--requests", "6", "--length", "8000"]),
    "tokens": (["--memory", "8GiB", "--max-tokens", "4096"], ["--requests", "4", "--length", "4000"]),
    "a context": (["--memory", "8GiB", "--context", "2048"], ["--requests", "1", "--length", "4000"]),
    "a share": (
        ["--device", "rtx4090", "--weights", "15GiB", "--mem-fraction", "0.7"],
        ["--requests", "2", "--length", "8000"],
    ),
    "a device": (["--device", "rtx4090", "--weights", "15GiB"], ["--requests", "16", "--length", "8000"]),
}


def without(arguments, flags):
    """Return arguments without some flags and their values."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return [part for flag, value in pairs if flag not in flags for part in (flag, value)]


@pytest.mark.parametrize(("place", "question"), QUESTIONS.values(), ids=list(QUESTIONS))
def test_every_suggested_change_serves_when_it_is_typed(config, place, question):
    text = shown("plan", config, *place, *question, "--markdown")
    rows = text.partition("**what serves**")[2].splitlines()[4:]
    suggestions = [row.split("|")[1].strip().replace("\\", "") for row in rows if row.startswith("| --")]
    assert suggestions
    for suggestion in suggestions:
        change = shlex.split(suggestion)
        replaced = set(change[::2]) | ({"--device", "--weights", "--mem-fraction"} if "--memory" in change else set())
        answer = answered("plan", config, *without([*place, *question], replaced), *change)
        assert answer["fits"], suggestion


def test_the_longest_request_is_a_question_of_its_own(config):
    # T-06
    answer = answered("plan", config, "--memory", "1GiB", "--max-length", "--requests", 3)
    assert answer["question"] == "longest"
    for more, fits in ((0, True), (1, False)):
        again = answered("plan", config, "--memory", "1GiB", "--requests", 3, "--length", answer["length"] + more)
        assert again["fits"] is fits
    assert answered("plan", config, "--memory", "1GiB", "--max-length")["requests"] == 1
    assert (
        line_of(shown("plan", config, "--memory", "1GiB", "--max-length"), "bound by")
        == "bound by tokens: no slot more in full"
    )


# How many ranks?


def test_the_fewest_ranks_are_found_with_a_reason_for_each_that_is_too_few(config):
    arguments = ["plan", config, "--device", "rtx4090", "--weights", "15GiB", "--fit", "32", "--length", "8000"]
    answer = answered(*arguments)
    smallest = answer["tp_size"]
    assert [trial["serves"] for trial in answer["trials"]] == [False] * (len(answer["trials"]) - 1) + [True]
    assert answer["trials"][-1]["tp_size"] == smallest
    text = shown(*arguments)
    assert line_of(text, "smallest") == f"smallest --tp {smallest}"
    assert "slots are needed" in text
    assert "scaled by the ratio" in text
    served = ["--requests", 32, "--length", 8000, "--device", "rtx4090"]
    weights = -(-15 * 2**30 // smallest)
    assert answered("plan", config, *served, "--tp", smallest, "--weights", weights)["fits"]
    assert not answered("plan", config, *served, "--tp", smallest // 2, "--weights", 2 * weights)["fits"]


def test_the_fewest_ranks_for_tokens(config):
    answer = answered("plan", config, "--memory", "1GiB", "--fit", 20_000)
    # 128 KiB a token on one rank, less than 8,192 tokens; twice and four times as many on more.
    assert answer["tp_size"] == 4
    assert [trial["kv_bytes_per_token"] for trial in answer["trials"]] == [131_072, 65_536, 32_768]


def test_no_number_of_ranks_is_an_answer_too(config):
    text = shown("plan", config, "--memory", "1GiB", "--fit", 1, "--length", 9000)
    assert line_of(text, "smallest") == "smallest none of these sizes serves that"


# Side by side.


def test_variants_stand_side_by_side(config):
    # T-01
    arguments = ["--memory", "1GiB", "--compare", "kv-cache-dtype=bfloat16,fp8_e4m3", "--compare", "tp=2,3"]
    answer = answered("plan", config, *arguments)
    assert [(v["name"], v["value"]) for v in answer["variants"]] == [
        ("kv_cache_dtype", "bfloat16"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("tp_size", 2),
        ("tp_size", 3),
    ]
    assert [v["kv_bytes_per_token"] for v in answer["variants"]] == [131_072, 65_536, 65_536, None]
    text = shown("plan", config, *arguments, "--markdown")
    assert "| KV a token | 128.00 KiB | 64.00 KiB | 64.00 KiB |  |" in text
    assert "8 KV heads do not split over 3 attention ranks" in text


def test_devices_and_memory_are_compared(config):
    answer = answered("plan", config, "--weights", "15GiB", "--compare", "device=rtx4090,h100,absent")
    budgets = [variant["budget_bytes"] for variant in answer["variants"]]
    assert 0 < budgets[0] < budgets[1]
    assert "absent" in answer["variants"][2]["reason"]
    answer = answered("plan", config, "--compare", "memory=1GiB,2GiB")
    assert [variant["budget_bytes"] for variant in answer["variants"]] == [2**30, 2**31]


# Every rank.


def test_every_rank_is_a_row(config):
    #
    memory = "70GiB,70GiB,41GiB,70GiB"
    table = answered("plan", config, "--memory", memory, "--tp", 4, "--ranks")
    assert [row["budget_bytes"] >> 30 for row in table["ranks"]] == [70, 70, 41, 70]
    assert [row["binds"] for row in table["ranks"]] == [False, False, True, False]
    text = shown("plan", config, "--memory", memory, "--tp", 4, "--ranks")
    assert line_of(text, "bound by").startswith("bound by rank 2: tokens by budget; raised by a larger budget, ")
    assert "warning: memory is uneven: rank 2 has 41.00 GiB" in text
    refused = refusal("plan", config, "--memory", memory, "--tp", 4, "--ranks", "--strict")
    assert "rank 2 has 41.00 GiB" in refused
    assert "another has 70.00 GiB" in refused


def test_ranks_have_weights_of_their_own(config):
    arguments = ["--device", "rtx4090", "--weights", "9GiB,8GiB", "--pp", 2, "--pp-layers", "20,12", "--ranks"]
    table = answered("plan", config, *arguments)
    assert [len(row["layers"]["full"]) for row in table["ranks"]] == [20, 12]
    first, second = (row["budget_bytes"] for row in table["ranks"])
    assert second - first == 2**30
    assert "20 (0-19)" in shown("plan", config, *arguments)


def test_memory_of_replicas_is_told_of_one_and_of_all(config):
    text = shown("plan", config, "--memory", "1GiB", "--dp", 2, "--ranks")
    table = answered("plan", config, "--memory", "1GiB", "--dp", 2, "--ranks")
    nbytes = table["total_bytes"]
    assert line_of(text, "tokens").endswith("over 2 workers")
    assert line_of(text, "planned") == (
        f"planned 1,023.93 MiB ({nbytes:,} bytes) on 1 rank of each of 2 replicas; 2.00 GiB ({2 * nbytes:,} bytes) on all of them"
    )
    assert line_of(text, "unused").endswith(f"({2 * table['unused_bytes']:,} bytes) on all of them")
    alone = shown("plan", config, "--memory", "1GiB", "--ranks")
    assert line_of(alone, "planned") == f"planned 1,023.93 MiB ({nbytes:,} bytes) on 1 rank"
    shared = shown("plan", config, "--memory", "1GiB", "--tp", 2, "--dp", 2, "--dp-attention", "--ranks")
    assert line_of(shared, "planned").endswith("bytes) on 2 ranks")


# Forms.

ANSWERS = [
    [],
    ["--requests", "4", "--length", "8000"],
    ["--max-length"],
    ["--fit", "20000"],
    ["--compare", "page_size=1,16"],
    ["--ranks"],
]


@pytest.mark.parametrize("question", ANSWERS, ids=[" ".join(q) or "plan" for q in ANSWERS])
def test_every_answer_is_one_json_document_a_drawing_and_markdown(config, question):
    result = call("plan", config, "--memory", "1GiB", *question, "--json")
    assert result.exit_code == 0, result.stderr
    assert isinstance(json.loads(result.stdout), dict)
    assert all(line.startswith("kvdock: warning: ") for line in result.stderr.splitlines())
    assert shown("plan", config, "--memory", "1GiB", *question)
    text = shown("plan", config, "--memory", "1GiB", *question, "--markdown")
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert tables
    for table in tables:
        assert len({row.replace(r"\|", "").count("|") for row in table}) == 1
        assert set(table[1]) <= set("|-:")


REFUSED = {
    "two questions": (["--fit", "8", "--ranks"], "--fit prints the smallest --tp, --ranks prints every rank"),
    "compare and explain": (
        ["--compare", "tp=1", "--explain"],
        "--explain prints every decision and every byte of one plan; choose one of them",
    ),
    "requests alone": (["--requests", "8"], "--requests asks nothing alone; give --length L"),
    "requests beside fit": (["--fit", "8", "--requests", "8"], "--requests has no effect beside --fit"),
    "length beside max-length": (["--max-length", "--length", "8"], "--length has no effect beside --max-length"),
    "length beside ranks": (["--ranks", "--length", "8"], "--length has no effect beside --ranks"),
    "requests beside explain": (["--explain", "--requests", "8"], "--requests has no effect beside --explain"),
    "json and markdown": (["--json", "--markdown"], "--json and --markdown are two ways"),
    "explain and markdown": (["--explain", "--markdown"], "--markdown and --explain are two ways"),
    "no requests": (["--requests", "0", "--length", "8"], "requests=0 is no count"),
    "no length": (["--length", "0"], "length=0 is no count"),
    "half a length": (["--length", "8.5"], "is no whole number"),
    "no tokens": (["--fit", "0"], "tokens=0 is no count"),
    "a rank among all": (["--ranks", "--pp", "2", "--pp-rank", "1"], "--pp-rank names one rank, and --ranks plans all"),
    "a rank for any size": (["--fit", "8", "--cp-rank", "0"], "--cp-rank names one rank, and --fit plans all"),
    "a size that is looked for": (["--fit", "8", "--tp", "2"], "--tp only says whose --weights are given"),
    "no values": (["--compare", "tp"], "lists no values; write it as --compare kv_cache_dtype=bfloat16,fp8_e4m3"),
    "an empty value": (["--compare", "tp=1,,2"], "lists no values"),
    "one axis twice": (["--compare", "tp=1", "--compare", "tp_size=2"], "--compare tp_size is given twice"),
    "an axis that is no input": (["--compare", "page-sise=1"], "did you mean 'page_size'"),
    "an axis that is given": (["--page-size", "16", "--compare", "page-size=1"], "page_size is compared and given"),
    "a device beside memory": (["--compare", "device=h100"], "--memory and --compare device="),
    "nothing to share": (["--dp-attention"], "give --dp 2 or more, or leave --dp-attention out"),
    "one worker": (["--dp-attention", "--dp", "1"], "--dp-attention shares requests out over the workers of --dp"),
    "a size twice": (["--length", "8", "--length", "9"], "--length is given twice"),
}


@pytest.mark.parametrize(("arguments", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_questions_that_make_no_sense_are_refused_by_name(config, arguments, reason):
    assert reason in refusal("plan", config, "--memory", "1GiB", *arguments)


def test_a_size_for_each_rank_is_refused_where_one_is_planned(config):
    for question in ([], ["--length", "8"], ["--max-length"], ["--fit", "8"], ["--compare", "tp=1"]):
        line = refusal("plan", config, "--memory", "1GiB,2GiB", *question)
        assert "--memory lists 2 sizes, one for each rank, but one rank is planned" in line
        assert "kvdock plan --ranks" in line
    assert "lists 2 values, but the deployment has 4 ranks" in refusal(
        "plan", config, "--memory", "1GiB,2GiB", "--tp", 4, "--ranks"
    )
    assert "is no memory at all" in refusal("plan", config, "--memory", "1GiB,0", "--tp", 2, "--ranks")
    assert "is no size" in refusal("plan", config, "--memory", "1GiB,", "--tp", 2, "--ranks")
    if importlib.util.find_spec("torch"):
        assert "one rank is planned" in refusal("run", config, "--memory", "1GiB,2GiB")


def test_memory_that_is_compared_beside_a_device_is_refused(config):
    line = refusal("plan", config, "--device", "h100", "--compare", "memory=1GiB")
    assert "--device and --compare memory=" in line


def test_a_value_with_control_characters_is_drawn_harmlessly(config):
    text = shown("plan", config, "--memory", "1GiB", "--compare", "kv_cache_dtype=\x1b[31mred,bfloat16")
    assert "\x1b" not in text


def test_a_model_that_cannot_be_read_is_refused_whatever_is_asked(tmp_path):
    for question in ANSWERS:
        assert "absent.json" in refusal("plan", tmp_path / "absent.json", "--memory", "1GiB", *question)
    for question in (["--fit", "8"], ["--compare", "tp=1,2"], ["--ranks"], ["--length", "8"]):
        assert "--device NAME" in refusal("plan", MODEL, "--plugin", "core", *question)


def test_names_that_are_no_text_are_told_in_json_that_is(config, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/model\xff"))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    odd = os.fsdecode(b"fp\xff")
    answer = answered("plan", folder, "--memory", "1GiB", "--compare", f"kv_cache_dtype=bfloat16,{odd}")
    assert [variant["value"] for variant in answer["variants"]] == ["bfloat16", "fp�"]
    assert "model" in answer["model"]
    assert "kv_cache_dtype='fp" in refusal("plan", folder, "--memory", "1GiB", "--option", f"kv_cache_dtype={odd}")


def test_a_plan_as_json_loads_nothing_that_only_questions_need(config):
    code = (
        "import sys; from kvdock.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "names = ('kvdock.questions', 'kvdock.remedies', 'kvdock.choices', 'kvdock.deployment', 'kvdock.cli.page', 'kvdock.cli.ask', 'rich')\n"
        "print([name for name in names if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "plan", config, "--memory", "2GiB", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stderr == "[]\n"
    json.loads(result.stdout)


# The bar.


@given(st.lists(st.integers(0, 2**45), max_size=12), st.integers(1, 200))
def test_a_bar_is_full_to_scale_and_forgets_no_part(sizes, width):
    found = cells(sizes, width)
    parts = sum(size > 0 for size in sizes)
    assert sum(found) == (max(width, parts) if parts else 0)
    assert all((count > 0) == (size > 0) for count, size in zip(found, sizes, strict=True))
    by_size = sorted(zip(sizes, found, strict=True))
    assert all(less[1] <= more[1] + 1 for less, more in itertools.pairwise(by_size))


def test_cells_of_a_bar_by_hand():
    assert cells([50, 25, 25], 64) == [32, 16, 16]
    assert cells([1, 999], 10) == [1, 9]
    assert cells([1, 1, 998], 10) == [1, 1, 8]
    assert cells([0, 10], 10) == [0, 10]
    assert cells([1, 1, 1], 64) == [22, 21, 21]
    assert cells([1] * 5, 3) == [1] * 5
    assert cells([0, 0], 10) == [0, 0]


def test_the_memory_of_a_device_is_drawn_with_all_that_takes_it(config):
    text = shown("plan", config, "--device", "h100", "--weights", "16GiB", "--reserve", "2GiB", "--page-size", 16)
    assert line_of(text, "▓  weights").startswith("▓ weights 16.00 GiB 20.4%")  # of 78.40 GiB
    assert line_of(text, "▧  reserve").startswith("▧ reserve 2.00 GiB 2.6%")
    assert line_of(text, "░  slack").startswith("░ slack 7.84 GiB 10.0%")
    (bar,) = (line for line in text.splitlines() if line.startswith("▓▓"))
    assert len(bar.strip()) == BAR_CELLS
    assert bar.count("▓") == 13  # 20.4 % of 64
    assert bar.count("░") == 6
    for name in ("KV of full", "bookkeeping", "unused"):
        assert sum(name in line for line in text.splitlines() if line[1:3] == "  ") == 1


def test_a_bar_in_ascii_has_a_letter_for_each_part():
    parts = [Part("a", 3, "█", "#", "cyan"), Part("none", 0, "▓", "W", "red"), Part("b", 1, "·", ".", "dim")]
    runs = bar_runs(Bar("memory", parts), ascii_only=True)
    assert [(part.name, text) for part, text in runs] == [("a", "#" * 48), ("b", "." * 16)]


# Markdown.


def test_markdown_shows_texts_of_others_as_they_are():
    page = [
        Table("a|b", ("x", "n"), [("1|2 *_y_*", "3"), ("<b>`c`</b>", "page_size")], numeric=("n",)),
        Facts([("k", "[v](w)")]),
        Line("two\nlines", label="warning:"),
    ]
    assert markdown(page) == (
        "**a\\|b**\n\n| x | n |\n|---|---:|\n| 1\\|2 \\*\\_y\\_\\* | 3 |\n| \\<b\\>\\`c\\`\\</b\\> | page_size |\n\n"
        "|  |   |\n|---|---|\n| k | \\[v\\](w) |\n\n**warning:** two�lines"
    )


# Differences.


@pytest.fixture
def files(config, tmp_path):
    """Write two plan files that differ in their pages."""

    def write(name, *arguments):
        path = tmp_path / name
        path.write_text(shown("plan", config, "--memory", "2GiB", "--json", *arguments))
        return str(path)

    return write("a.json", "--page-size", 16), write("b.json", "--page-size", 64)


def test_equal_plans_end_with_0(files):
    for form, text in (([], "the plans are equal\n"), (["--json"], "[]\n"), (["--markdown"], "the plans are equal\n")):
        result = call("diff", files[0], files[0], *form)
        assert (result.exit_code, result.stdout) == (0, text)


def test_differences_are_told_and_end_with_1(files):
    result = call("diff", *files)
    assert (result.exit_code, result.stderr) == (1, "")
    assert "options.page_size: 16 (user) | 64 (user)" in result.stdout.splitlines()
    data = call("diff", *files, "--json")
    assert data.exit_code == 1
    (page,) = (row for row in json.loads(data.stdout) if row["name"] == "options.page_size")
    assert (page["a"], page["b"], page["sources"]) == (16, 64, ["user", "user"])
    table = call("diff", *files, "--markdown")
    assert table.exit_code == 1
    assert "| options.page_size |  | 16 (user) | 64 (user) |" in table.stdout.splitlines()


def test_a_transfer_compares_only_what_both_sides_must_share(files, config, tmp_path):
    result = call("diff", *files, "--transfer")
    assert result.exit_code == 1
    assert result.stdout == ("page_size (layers 0-31): 16 | 64 [incompatible]; give both sides the same page_size\n")
    larger = tmp_path / "larger.json"
    larger.write_text(shown("plan", config, "--memory", "3GiB", "--json", "--page-size", 16))
    result = call("diff", files[0], larger, "--transfer")
    assert (result.exit_code, result.stdout) == (0, "each side reads the KV of the other\n")
    assert call("diff", files[0], larger).exit_code == 1


def test_files_that_are_no_plans_are_refused_by_name(files, config, tmp_path):
    assert "config.json: plan file: schema is None" in refusal("diff", files[0], config)
    assert "absent.json" in refusal("diff", tmp_path / "absent.json", files[0])
    assert "is a directory" in refusal("diff", files[0], tmp_path)
    edited = tmp_path / "edited.json"
    data = json.loads((tmp_path / "a.json").read_text())
    edited.write_text(json.dumps({**data, "total_bytes": data["total_bytes"] + 1}))
    assert "edited.json: plan file: total_bytes is" in refusal("diff", edited, files[1])
    assert "give one of them" in refusal("diff", *files, "--json", "--markdown")
