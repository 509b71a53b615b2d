"""The fewest ranks, variants in columns, ranks in rows: every number computed by hand or asked of a plan of its own."""

import json

import kvdock
import msgspec
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.startup import core_only

GIB, MIB = 2**30, 2**20
IDLE = DeviceInfo(device_type="cpu", name="idle", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)
SMALL = DeviceInfo(device_type="cpu", name="small", total_bytes=GIB, free_before_load_bytes=GIB, free_bytes=GIB)
BYTES_PER_TOKEN = 4 * 8 * 128 * 2 * 2
"""Keys and values of 4 layers, 8 heads of 128, 2 bytes each: 16,384."""


def model(context=16_384, layers=4, **fields):
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128), **fields)
    return ModelSpec(
        name="invented", architecture="Invented", layers=(layer,) * layers, context_length=context, dtype="bfloat16"
    )


def smallest(source=None, **asked):
    fields = {"device": SMALL, "options": {"mem_fraction_static": 1.0}, "registry": core_only(), **asked}
    return kvdock.smallest_tp(model() if source is None else source, **fields)


def test_the_fewest_ranks_for_a_number_of_tokens():
    # 1 GiB a rank: 256 MiB, 640 MiB and 832 MiB beside weights of 768, 384 and 192 MiB hold less than 16,384, less
    # than 81,920 and, with a sixteenth for tables, at least 199,000 tokens of 16, 8 and 4 KiB.
    answer = smallest(tokens=100_000, weights_bytes=768 * MIB)
    assert answer.tp_size == 4
    assert [trial.tp_size for trial in answer.trials] == [1, 2, 4]
    assert [trial.serves for trial in answer.trials] == [False, False, True]
    assert [trial.weights_bytes for trial in answer.trials] == [768 * MIB, 384 * MIB, 192 * MIB]
    assert [trial.budget_bytes for trial in answer.trials] == [256 * MIB, 640 * MIB, 832 * MIB]
    assert [trial.kv_bytes_per_token for trial in answer.trials] == [16_384, 8_192, 4_096]
    tokens = [trial.max_total_num_tokens for trial in answer.trials]
    assert tokens[0] < 16_384
    assert 70_000 < tokens[1] < 81_920
    assert 199_000 < tokens[2] < 212_992
    assert answer.trials[1].reason == f"100,000 tokens are asked for, {tokens[1]:,} fit"
    assert answer.note == (
        "weights_bytes=805306368 are those of a rank at tp_size=1, pp_size=1; at other sizes they are scaled by the "
        "ratio of the ranks"
    )


def test_the_boundary_is_exact():
    held = smallest(tokens=1, weights_bytes=768 * MIB).trials[0].max_total_num_tokens
    assert smallest(tokens=held, weights_bytes=768 * MIB).tp_size == 1
    assert smallest(tokens=held + 1, weights_bytes=768 * MIB).tp_size == 2


def test_the_fewest_ranks_for_requests_of_a_length():
    answer = smallest(requests=8, length=12_500, weights_bytes=768 * MIB)
    assert answer.tp_size == 4
    there = answer.trials[1].max_total_num_tokens
    assert answer.trials[1].reason == (
        f"space full: 100,000 slots are needed, {there:,} are there, {100_000 - there:,} are lacking"
    )


def test_sizes_that_cannot_be_planned_have_their_reason():
    answer = smallest(tokens=1000, weights_bytes=3 * GIB)
    assert answer.tp_size == 4
    for trial in answer.trials[:2]:
        assert "more than the 1.00 GiB" in trial.reason
        assert (trial.max_total_num_tokens, trial.budget_bytes) == (None, None)


def test_sizes_that_do_not_go_with_the_workers_have_their_reason():
    answer = smallest(tokens=1000, parallel={"dp_size": 4, "dp_attention": True, "tp_size": 4})
    assert [trial.serves for trial in answer.trials] == [False, False, True]
    assert "does not divide by dp_size" in answer.trials[0].reason
    assert answer.workers == 4


def test_workers_hold_tokens_and_requests_together():
    parallel = {"dp_size": 2, "dp_attention": True, "tp_size": 2}
    one = smallest(tokens=1, weights_bytes=512 * MIB, parallel=parallel).trials[-1]
    # Each of two workers of one rank holds all heads; both hold as much again as one.
    alone = kvdock.plan(
        model(),
        device=SMALL,
        options={"mem_fraction_static": 1.0},
        parallel=parallel,
        weights_bytes=512 * MIB,
        registry=core_only(),
    )
    assert one.max_total_num_tokens == 2 * alone.max_total_num_tokens
    half = one.max_total_num_tokens // 2 // 10_000
    assert smallest(requests=2 * half, length=10_000, weights_bytes=512 * MIB, parallel=parallel).tp_size == 2
    assert smallest(requests=2 * half + 1, length=10_000, weights_bytes=512 * MIB, parallel=parallel).tp_size == 4


def test_a_length_above_the_context_is_served_by_no_size():
    answer = smallest(requests=1, length=20_000)
    assert answer.tp_size is None
    assert [trial.tp_size for trial in answer.trials] == [1, 2, 4, 8, 16, 32, 64]
    assert {trial.reason for trial in answer.trials} == {"length=20,000 is more than context_length=16,384"}


def test_a_reason_that_no_size_changes_is_an_error(tmp_path):
    with pytest.raises(PlanError, match=r"absent\.json"):
        smallest(str(tmp_path / "absent.json"), tokens=1)
    with pytest.raises(PlanError, match=r"absent\.json"):
        kvdock.compare(str(tmp_path / "absent.json"), {"page_size": [1, 16]}, budget_bytes=GIB)
    with pytest.raises(PlanError, match="page_sizes"):
        smallest(tokens=1, options={"page_sizes": 1})


@pytest.fixture
def folder(tmp_path):
    """Write a model folder with one matrix of 2 MiB and a norm of 2 KiB."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = {
        "model.layers.0.mlp.up_proj.weight": {"dtype": "BF16", "shape": [1024, 1024], "data_offsets": [0, 2 * MIB]},
        "model.norm.weight": {"dtype": "BF16", "shape": [1024], "data_offsets": [2 * MIB, 2 * MIB + 2048]},
    }
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(2 * MIB + 2048))
    return tmp_path


def test_more_ranks_that_serve_count_the_weights_of_a_folder_anew(folder):
    # 8 heads of 128 in 4 layers: 16,384 bytes a token. Of 4 MiB weights take 2 MiB and 2 KiB; on two ranks half of the
    # matrix and the whole norm.
    device = msgspec.structs.replace(SMALL, free_before_load_bytes=4 * MIB, free_bytes=4 * MIB)
    options = {"mem_fraction_static": 1.0, "max_running_requests": 1}
    made = kvdock.plan(str(folder), device=device, options=options, registry=core_only())
    assert made.budget.weights_bytes == 2 * MIB + 2048
    answer = kvdock.serves(made, 1, 200, model=str(folder))
    (remedy,) = (remedy for remedy in answer.remedies if "tp_size" in remedy.change)
    assert (remedy.change, remedy.note) == ({"tp_size": 2}, "the weights of a rank counted anew from the headers")
    more = kvdock.plan(str(folder), device=device, options=options, parallel={"tp_size": 2}, registry=core_only())
    assert more.budget.weights_bytes == MIB + 2048
    assert kvdock.serves(more, 1, 200).fits
    (scaled,) = (remedy for remedy in kvdock.serves(made, 1, 200).remedies if "tp_size" in remedy.change)
    assert scaled.change == {"tp_size": 2, "weights_bytes": MIB + 1024}


def test_weights_of_a_folder_are_counted_anew_for_every_size(folder):
    answer = smallest(str(folder), tokens=10**9)
    weights = [trial.weights_bytes for trial in answer.trials]
    assert weights == [2 * MIB // ranks + 2048 for ranks in (1, 2, 4, 8, 16, 32, 64)]
    assert answer.note == ""


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, r"nothing is asked for; give requests= and length=, or tokens= alone"),
        ({"requests": 1}, r"requests=1 is asked for; give requests= and length="),
        ({"length": 1}, r"length=1 is asked for; give requests= and length="),
        ({"requests": 1, "length": 1, "tokens": 1}, "requests=1, length=1, tokens=1 is asked for"),
        ({"tokens": 1, "length": 1}, "length=1, tokens=1 is asked for"),
        ({"tokens": 0}, "tokens=0 is no count"),
    ],
)
def test_half_a_question_is_refused(asked, reason):
    with pytest.raises(PlanError, match=reason):
        smallest(**asked)


def compared(axes, **fields):
    given = {"device": IDLE, "budget_bytes": GIB, "registry": core_only(), **fields}
    return kvdock.compare(fields.pop("model", model()), axes, **given)


def test_variants_change_one_input_each():
    # T-01: 4 layers, 8 KV heads of 128 in 16 and in 8 bits, and over 4 ranks.
    answer = compared({"kv_cache_dtype": ["bfloat16", "fp8_e4m3"], "page_size": [64], "tp_size": [4]})
    assert [(v.name, v.value) for v in answer.variants] == [
        ("kv_cache_dtype", "bfloat16"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("page_size", 64),
        ("tp_size", 4),
    ]
    per_token = [variant.kv_bytes_per_token for variant in answer.variants]
    assert per_token == [BYTES_PER_TOKEN, BYTES_PER_TOKEN // 2, BYTES_PER_TOKEN, BYTES_PER_TOKEN // 4]
    for variant, options in zip(answer.variants[:3], ({}, {"kv_cache_dtype": "fp8"}, {"page_size": 64}), strict=True):
        alone = kvdock.plan(model(), device=IDLE, budget_bytes=GIB, options=options, registry=core_only())
        assert variant.max_total_num_tokens == alone.max_total_num_tokens
        assert variant.max_running_requests == alone.max_running_requests
        assert variant.kv_bytes + variant.bookkeeping_bytes + variant.unused_bytes == GIB


def test_a_variant_that_cannot_be_planned_has_its_reason_in_its_column():
    answer = compared({"tp_size": [2, 3], "kv_cache_dtype": ["fp9"], "page_size": ["many", None]})
    two, three, fp9, many, none = answer.variants
    assert two.reason == none.reason == ""
    assert "8 KV heads do not split over 3 attention ranks" in three.reason
    assert "did you mean 'fp8'" in fp9.reason
    assert "page_size='many'" in many.reason
    assert (three.max_total_num_tokens, three.warnings) == (None, ())


def test_devices_and_budgets_are_compared():
    answer = compared({"device": [SMALL, IDLE]}, budget_bytes=None)
    assert [variant.value for variant in answer.variants] == ["small", "idle"]
    assert [variant.budget_bytes for variant in answer.variants] == [GIB * 9 // 10, 2**40 * 9 // 10]
    answer = compared({"budget_bytes": [2**12, 2**30]})
    assert "smallest cache" in answer.variants[0].reason
    assert answer.variants[1].budget_bytes == 2**30


def test_stated_weights_are_scaled_with_the_ranks():
    answer = compared({"tp_size": [2, 4]}, device=SMALL, budget_bytes=None, weights_bytes=101, parallel={"tp_size": 2})
    assert [variant.weights_bytes for variant in answer.variants] == [101, 51]
    assert "scaled by the ratio" in answer.note
    assert compared({"page_size": [1, 2]}, device=SMALL, budget_bytes=None, weights_bytes=101).note == ""


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({}, "there is nothing to compare"),
        ({"page_sise": [1]}, "no input of a plan is called 'page_sise'; did you mean 'page_size'"),
        ({"page_size": []}, r"page_size=\[\] lists no values"),
        ({"device": "h200"}, "device='h200' lists no values; give at least one, in a list"),
        (
            {"page_size": 3},
            r"axes: page_size=3 lists no values; give at least one, in a list, as \{'page_size': \[a, b\]\}",
        ),
        (
            [("page_size", [3])],
            r"axes=\[.*\] does not fit; give inputs with their values, as \{'page_size': \[1, 16\]\}",
        ),
        (None, "axes=None does not fit"),
    ],
)
def test_axes_that_say_nothing_are_refused(axes, reason):
    with pytest.raises(PlanError, match=reason):
        compared(axes)


def ranks(**fields):
    given = {"device": IDLE, "registry": core_only(), "options": {"page_size": 16}, **fields}
    return kvdock.survey(kvdock.plan_ranks(model(), **given))


def test_the_rank_that_limits_all_is_named():
    # 70, 70, 41 and 70 GiB
    budgets = [70 * GIB, 70 * GIB, 41 * GIB, 70 * GIB]
    table = ranks(budget_bytes=budgets, parallel={"tp_size": 4})
    assert table.binding_rank == 2
    assert [row.binds for row in table.ranks] == [False, False, True, False]
    assert [row.budget_bytes for row in table.ranks] == budgets
    alone = kvdock.plan(
        model(),
        device=IDLE,
        budget_bytes=41 * GIB,
        options={"page_size": 16},
        parallel={"tp_size": 4},
        registry=core_only(),
    )
    assert {row.tokens for row in table.ranks} == {alone.max_total_num_tokens}
    assert table.max_total_num_tokens == alone.max_total_num_tokens
    assert [row.unused_bytes for row in table.ranks] == [
        budget - row.planned_bytes for budget, row in zip(budgets, table.ranks, strict=True)
    ]
    (warning,) = table.warnings
    assert "rank 2 has 41.00 GiB" in warning
    assert "another has 70.00 GiB" in warning
    assert f"limits every rank to {alone.max_total_num_tokens:,} tokens" in warning


def test_stages_show_their_layers_and_totals_cover_all_workers():
    table = ranks(budget_bytes=GIB, parallel={"pp_size": 2, "tp_size": 2, "dp_size": 2, "dp_attention": True})
    assert [(row.rank, row.stage, row.layers["full"]) for row in table.ranks] == [
        (0, 0, (0, 1)),
        (1, 0, (0, 1)),
        (2, 1, (2, 3)),
        (3, 1, (2, 3)),
    ]
    assert (table.workers, table.replicas) == (2, 1)
    assert ranks(budget_bytes=GIB, parallel={"dp_size": 3}).replicas == 3
    assert table.max_total_num_tokens == 2 * table.ranks[0].tokens
    assert table.total_bytes == sum(row.planned_bytes for row in table.ranks)
    assert table.unused_bytes == sum(row.unused_bytes for row in table.ranks)


def test_what_is_no_deployment_is_refused():
    with pytest.raises(PlanError, match=r"is no deployment; give what kvdock\.plan_ranks returned"):
        kvdock.survey([])


def test_choices_are_data():
    for answer in (smallest(tokens=1000), compared({"page_size": [1, 16]}), ranks(budget_bytes=GIB)):
        assert msgspec.json.decode(msgspec.json.encode(answer), type=type(answer)) == answer
