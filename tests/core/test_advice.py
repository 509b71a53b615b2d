"""Errors name what was asked for and what would work."""

import kvdock
import pytest
from kvdock.errors import BudgetError, UnsupportedCombination

LLAMA, QWEN = "tests/models/llama-3.1-8b.json", "tests/models/qwen3-next-80b-a3b.json"


@pytest.mark.parametrize(
    ("options", "lacks", "asked"),
    [
        (
            {"kv_cache_dtype": "fp4", "page_major": True},
            "BlockMHAPool lacks page_major",
            "page_major=true, kv_cache_dtype=fp4",
        ),
        ({"hisparse": True}, "MHAPool lacks hisparse", "hisparse=true"),
    ],
)
def test_a_feature_that_no_class_has_is_traced_to_its_option(options, lacks, asked):
    with pytest.raises(UnsupportedCombination, match=f"{lacks}\nAsked for by {asked}: leave out one"):
        kvdock.plan(LLAMA, device="cpu", budget_bytes=2**28, options=options)


def test_too_many_state_slots_are_named():
    with pytest.raises(BudgetError, match="plan for less: fewer than max_state_slots=2000"):
        kvdock.plan(QWEN, device="cpu", budget_bytes=2**31, options={"max_state_slots": 2000, "context_length": 512})


def test_layers_that_keep_states_are_not_counted_as_kv():
    plan = kvdock.plan(QWEN, device="cpu", budget_bytes=2**31, options={"max_state_slots": 4, "context_length": 512})
    assert "48 layers, 12 own KV, 36 keep a state" in plan.explain()


@pytest.mark.parametrize("field", [{"layer_group_size": 5}, {"linear_silu": True}])
def test_linear_layers_that_nobody_reads_are_refused_by_name(field):
    config = {
        "architectures": ["SomeLinearForCausalLM"],
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        **field,
    }
    with pytest.raises(kvdock.PlanError, match=next(iter(field))):
        kvdock.plan(config, device="cpu", budget_bytes=2**31)
