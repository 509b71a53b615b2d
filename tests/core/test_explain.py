"""The report of a plan: one fact a line, whatever the names and reasons of others hold."""

import itertools

import kvdock
import pytest
from kvdock.builtin import BUILTINS
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.plugins.loading import Problem

LAYER = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=8))
SECTIONS = ["Model", "Device and budget", "Options", "Plugins", "Decisions", "Spaces", "Buffers", "Costs", "Limits"]
FORGED = "x\nBuffers\n  total on the device: 0 bytes\x1b[31m\u2028Costs\r\x0bLimits"


def report(**names):
    fields = {"name": "m", "architecture": "A", "layers": (LAYER,), "context_length": 64, "dtype": "bfloat16"}
    return kvdock.plan(ModelSpec(**(fields | names)), budget_bytes=2**20).explain()


def titles(text):
    return [line for line in text.splitlines() if line and not line.startswith(" ")]


def test_a_report_has_its_sections_once():
    assert titles(report()) == SECTIONS


@pytest.mark.parametrize("field", ["name", "architecture"])
def test_a_name_cannot_add_lines_or_steer_the_terminal(field):
    text = report(**{field: FORGED})
    assert titles(text) == SECTIONS
    assert text.count("\n") == report().count("\n")
    assert all(line.isprintable() for line in text.split("\n"))
    assert "x; Buffers; total on the device: 0 bytes\ufffd[31m; Costs; Limits" in text


def test_a_warning_of_a_family_stays_on_its_line():
    lines = report(warnings=(f"odd {FORGED}",)).splitlines()
    place = lines.index("Warnings")
    assert lines[place + 1].startswith("  ")
    assert "odd x; Buffers; total" in lines[place + 1]
    assert lines[place + 2 :] == []


def test_answers_of_plugins_stay_indented_under_their_decision():
    lines = report().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("  get_pool_cls: "))
    answers = list(itertools.takewhile(lambda line: line.startswith("    "), lines[place + 1 :]))
    assert any(line.startswith("    core (") for line in answers)


def test_plugins_that_could_not_answer_are_listed_with_the_reason(registry, mock_plugin):
    for name, plugin in BUILTINS:
        registry.add(plugin, name=name)
    registry.add(
        mock_plugin("acme", tier="hardware", defaults={"page_size": 16}), distribution="kvdock-acme", version="1.2"
    )
    registry.set_aside(
        Problem(
            name="sad", tier="hardware", distribution="kvdock-sad", version="0.3", reason="no driver", status="failed"
        )
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
    }
    lines = kvdock.plan(config, budget_bytes=2**24, registry=registry).explain().splitlines()
    assert "  acme (hardware): loaded, kvdock-acme 1.2" in lines
    assert "  sad (hardware): failed, kvdock-sad 0.3: no driver" in lines


def test_a_space_in_the_shared_buffer_shows_what_a_page_of_it_takes():
    """2 heads x (8 + 8) x 2 bytes are 64 a token; a page of 4 tokens and 2 sliding layers takes 512."""
    window = LayerSpec(kind="mha", params=LAYER.params, window_tokens=7)
    model = ModelSpec(name="m", architecture="A", layers=(LAYER, window, window), context_length=64, dtype="bfloat16")
    options = kvdock.CacheOptions(unified_memory=True, page_size=4)
    text = kvdock.plan(model, device="cpu", options=options, budget_bytes=2**20).explain()
    assert text.count("inside the shared buffer, of which a page of swa takes 512 bytes") == 2
    assert "per slot of swa: 128 bytes of KV, of the shared buffer + " in text
    assert "per slot of full: 64 bytes of KV + " in text
