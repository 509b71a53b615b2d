"""Plans of invented models with round numbers, and the cases that people reported about sizes."""

import itertools

import kvdock
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdock.device import DeviceInfo
from kvdock.errors import BudgetError, PlanError, PluginError, UnsupportedCombination
from kvdock.model import LayerSpec, MHAParams, MLAParams, ModelSpec
from kvdock.pools import MHAPool
from kvdock.sizing import Problem, Solver
from kvdock.startup import core_only

GIB = 2**30
IDLE = DeviceInfo(device_type="cpu", name="idle", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)


def mha(heads=8, dim=128, **fields):
    return LayerSpec(kind="mha", params=MHAParams(num_kv_heads=heads, head_dim=dim, v_head_dim=dim), **fields)


def model(layers, *, context=131_072, dtype="bfloat16"):
    return ModelSpec(
        name="invented", architecture="Invented", layers=tuple(layers), context_length=context, dtype=dtype
    )


def plan(layers, *, budget=GIB, options=None, context=131_072, parallel=None, device=IDLE, **fields):
    return kvdock.plan(
        model(layers, context=context),
        device=device,
        options=options,
        parallel=parallel,
        budget_bytes=budget,
        registry=core_only(),
        **fields,
    )


def test_every_byte_of_a_plan_is_in_its_buffers():
    made = plan([mha()] * 2, options={"page_size": 16})
    assert sum(buffer.nbytes for buffer in made.buffers if buffer.memory == "device") == made.total_bytes
    assert made.total_bytes <= made.budget_bytes
    assert made.bytes_per_token.kv == 2 * 8 * 128 * 2 * 2


def test_keys_and_values_have_a_padding_page():
    made = plan([mha()], options={"page_size": 16})
    keys, values = made.groups[0].buffers
    assert keys.shape == values.shape == (made.spaces["full"] + 16, 8, 128)


def test_one_more_page_would_not_fit():
    made = plan([mha()] * 2, options={"page_size": 16, "max_running_requests": 8})
    with_room = made.replan(made.total_bytes)
    assert with_room.spaces == made.spaces
    assert made.replan(made.total_bytes - 1).spaces["full"] == made.spaces["full"] - 16


def test_replan_can_cap_the_tokens():
    made = plan([mha()] * 2, options={"page_size": 16})
    assert made.replan(GIB, cap_tokens=1000).spaces["full"] == 992


def test_window_layers_are_priced_by_their_own_heads_and_size():
    # S-13: 40 sliding layers of 8 heads x 256 and 8 full ones of 1 head x 512
    layers = [mha(1, 512) if i % 6 == 5 else mha(8, 256, window_tokens=1023) for i in range(48)]
    made = plan(layers, budget=40 * GIB)
    assert made.costs.per_slot["full"].kv == 16_384
    assert made.costs.per_slot["swa"].kv == 327_680
    assert made.bytes_for(65_536) == int(1.3125 * GIB)


def test_cost_is_not_linear_and_its_inverse_is_exact():
    # T-04: the same model at 1, 1024, 1025 and 65,536 tokens
    layers = [mha(1, 512) if i % 6 == 5 else mha(8, 256, window_tokens=1023) for i in range(48)]
    made = plan(layers, budget=40 * GIB)
    assert made.bytes_for(1) == 16_384 + 327_680
    assert made.bytes_for(1024) == 1024 * (16_384 + 327_680)
    assert made.bytes_for(1025) == 1025 * 16_384 + 1024 * 327_680
    assert made.bytes_for(65_536) == 65_536 * 16_384 + 1024 * 327_680
    longest = made.max_length(requests=4)
    assert 4 * longest <= made.spaces["full"] < 4 * (longest + 1) or longest == 131_072


def test_the_report_says_which_window_policy_it_assumed_and_can_do_both():
    # T-02: 12 full layers and 12 with a window of 128, 32 requests of 8192 tokens, 8 heads x 64
    layers = [mha(8, 64, window_tokens=127 if i % 2 else None) for i in range(24)]
    capped = plan(layers, budget=40 * GIB)
    whole = plan(layers, budget=40 * GIB, options={"hybrid_swa": "off"})
    assert whole.bytes_for(8192, 32) == 12 * GIB
    assert capped.bytes_for(8192, 32) == 12 * 2048 * 32 * (8192 + 128)
    assert round(capped.bytes_for(8192, 32) / GIB, 2) == 6.09
    assert "layers with a window keep 127 earlier tokens" in capped.explain()
    assert "every layer with KV keeps the whole request (hybrid_swa=off)" in whole.explain()


def test_a_window_that_reaches_the_context_is_full_attention():
    # S-15 (a): window 512, longest request 511
    layers = [mha(window_tokens=511 if i % 2 else None) for i in range(4)]
    made = plan(layers, context=511)
    assert set(made.spaces) == {"full", "requests"}


@pytest.mark.parametrize("page", [1, 16])
def test_a_short_context_never_reserves_windows_that_nobody_fills(page):
    # S-15 (b): window 1024, longest request 128, 32 requests
    layers = [mha(window_tokens=1023 if i % 2 else None) for i in range(4)]
    made = plan(layers, context=128, options={"page_size": page, "max_running_requests": 32})
    assert made.spaces.get("swa", 0) <= min(32 * -(-128 // page) * page, made.spaces["full"])


def test_ranks_pay_for_their_own_heads():
    # 64 layers, 8 KV heads x 128 over 4 ranks
    one = plan([mha()] * 64, budget=8 * GIB, options={"max_running_requests": 4})
    four = plan([mha()] * 64, budget=8 * GIB, options={"max_running_requests": 4}, parallel={"tp_size": 4})
    assert (one.bytes_per_token.kv, four.bytes_per_token.kv) == (262_144, 65_536)
    assert four.spaces["full"] == pytest.approx(4 * one.spaces["full"], rel=1e-3)


def test_replicated_heads_keep_their_total():
    # 8 heads over 16 ranks: one head here, still 8 in the model
    made = plan([mha()], parallel={"tp_size": 16})
    assert made.groups[0].buffers[0].shape[1:] == (1, 128)
    assert made.outline.groups[0].layers[0][1].params.num_kv_heads == 8


def test_request_tables_lower_the_automatic_limit():
    # S-17: context 2,800,000; 4,096 rows of int32 would take 45.9 GB
    made = plan([mha()], budget=40 * GIB, context=2_800_000)
    (table,) = [buffer for buffer in made.buffers if buffer.name == "req_to_token"]
    assert table.nbytes <= 40 * GIB // 16
    assert made.limits[1].factor == "request_table_share"
    # 2.5 GiB over rows of 4 · (2,800,000 + 4) bytes are 239 rows, one of them padding
    assert made.max_running_requests == 238


def test_request_tables_of_a_fixed_limit_are_refused_with_the_number():
    # S-17
    with pytest.raises(
        BudgetError, match=r"45,88\d,\d{3},\d{3} of them what each request keeps.*max_running_requests=(\d+) fits"
    ) as caught:
        plan([mha()], budget=40 * GIB, context=2_800_000, options={"max_running_requests": 4096})
    fits = int(str(caught.value).split("max_running_requests=")[2].split(" ")[0])
    assert (
        plan([mha()], budget=40 * GIB, context=2_800_000, options={"max_running_requests": fits}).max_running_requests
        == fits
    )


def loaded_device():
    return DeviceInfo(
        device_type="cpu", name="card", total_bytes=24 * GIB, free_before_load_bytes=20 * GIB, free_bytes=20 * GIB
    )


def test_stated_tokens_win_over_a_fraction_that_leaves_nothing():
    # S-18: 24 GiB, 20 free before loading, 16 of weights, fraction 0.65; 1,024 tokens of 32 KiB really fit
    layers = [mha(8, 128)] * 8
    options = {"mem_fraction_static": 0.65, "max_total_tokens": 1024, "max_running_requests": 8}
    made = plan(layers, budget=None, device=loaded_device(), options=options, weights_bytes=16 * GIB)
    assert made.spaces["full"] == 1024
    assert any("max_total_tokens=1024" in w and "mem_fraction_static=0.65" in w for w in made.warnings)


def test_without_stated_tokens_the_same_fraction_is_refused_with_one_that_works():
    # S-18, U-01: the advice is used and works
    layers = [mha(8, 128)] * 8
    with pytest.raises(
        BudgetError, match=r"mem_fraction_static=0\.65 leaves too little.*smallest that works is (\d\.\d+)"
    ) as caught:
        plan(layers, budget=None, device=loaded_device(), options={"mem_fraction_static": 0.65}, weights_bytes=16 * GIB)
    advised = float(str(caught.value).split("works is ")[1].split(",")[0])
    options = {"mem_fraction_static": advised}
    assert plan(layers, budget=None, device=loaded_device(), options=options, weights_bytes=16 * GIB).spaces["full"] > 0


def test_stated_tokens_that_no_memory_holds_name_both_inputs():
    # S-18
    options = {"mem_fraction_static": 0.9, "max_total_tokens": 10**9, "max_running_requests": 8}
    made = plan([mha()] * 8, budget=None, device=loaded_device(), options=options, weights_bytes=16 * GIB)
    assert any("max_total_tokens=1000000000 is more than" in warning for warning in made.warnings)


def test_two_stated_sizes_give_the_smaller_with_a_warning():
    # S-25: an explicit count is never resized silently
    made = plan([mha()] * 8, options={"max_total_tokens": 10**6, "max_running_requests": 8})
    assert made.spaces["full"] < 10**6
    assert any("max_total_tokens=1000000" in warning for warning in made.warnings)


def test_the_base_of_the_fraction_is_printed():
    # S-25
    made = plan([mha()], budget=None, device=loaded_device(), options={"mem_fraction_static": 0.6})
    assert "20.00 GiB (21,474,836,480 bytes) free before loading" in made.explain()
    assert made.budget_bytes == 20 * GIB - (8 * GIB + 0)


@pytest.mark.parametrize("page", [1, 16])
def test_a_pool_of_padding_alone_is_refused_and_one_page_more_serves(page):
    # S-25
    with pytest.raises(BudgetError) as caught:
        plan([mha()], budget=5000, context=64, options={"page_size": page})
    needed = caught.value.needed_bytes
    assert plan([mha()], budget=needed, context=64, options={"page_size": page}).spaces["full"] == max(2, page)
    with pytest.raises(BudgetError):
        plan([mha()], budget=needed - 1, context=64, options={"page_size": page})


def test_a_request_longer_than_the_pool_is_reported_and_strict_refuses_it():
    # U-05: context 163,840 and room for fewer tokens
    made = plan([mha()] * 32, budget=8 * GIB, context=163_840, options={"max_running_requests": 4})
    assert made.max_request_tokens == made.max_total_num_tokens < 163_840
    assert any("context_length=163840" in warning for warning in made.warnings)
    with pytest.raises(PlanError, match=r"strict planning refuses warnings.*context_length=163840"):
        plan([mha()] * 32, budget=8 * GIB, context=163_840, options={"max_running_requests": 4, "strict": True})


def test_a_context_above_the_models_is_refused_unless_allowed():
    with pytest.raises(PlanError, match=r"context_length=8192 is above the model's 4096"):
        plan([mha()], context=4096, options={"context_length": 8192})
    assert plan([mha()], context=4096, options={"context_length": 8192, "allow_longer_context": True})


def test_options_that_nothing_reads_are_refused():
    with pytest.raises(PlanError, match=r"nothing in this plan reads max_state_slots=8, hisparse_top_k=64"):
        plan([mha()], options={"max_state_slots": 8, "hisparse_top_k": 64})
    with pytest.raises(PlanError, match=r"swa_full_tokens_ratio=0\.5"):
        plan([mha()], options={"swa_full_tokens_ratio": 0.5})


def test_facts_about_the_engine_are_never_refused():
    assert plan([mha()], options={"chunked_prefill_size": 8192, "prefix_cache": False, "attention_backend": "fa3"})


def test_a_feature_that_no_class_honours_is_refused_with_what_each_lacks():
    with pytest.raises(UnsupportedCombination, match=r"(?s)late_backing.*MHAPool|MHAPool.*late_backing"):
        plan([mha()], options={"late_backing": True})


def test_a_budget_and_a_fraction_exclude_each_other():
    with pytest.raises(PlanError, match=r"mem_fraction_static=0\.5 has no effect beside budget_bytes"):
        plan([mha()], options={"mem_fraction_static": 0.5})


@pytest.mark.parametrize("value", [-1, 1.5, True, 2**63])
def test_a_budget_is_a_number_of_bytes(value):
    with pytest.raises(PlanError, match="budget_bytes"):
        plan([mha()], budget=value)


def test_a_request_limit_above_half_the_tokens_is_lowered_with_a_warning():
    made = plan([mha()] * 32, budget=64 * 2**20, context=64, options={"max_running_requests": 400})
    assert made.max_running_requests == made.spaces["full"] // 2 or made.max_running_requests < 400
    assert any("max_running_requests: 400 asked for" in warning for warning in made.warnings)
    assert made.limits[1].requested == 400


def test_a_plan_is_the_same_each_time_and_changes_no_argument():
    options = kvdock.CacheOptions(page_size=16)
    first = plan([mha()] * 2, options=options)
    assert plan([mha()] * 2, options=options).to_json() == first.to_json()
    assert options == kvdock.CacheOptions(page_size=16)


def test_a_plan_is_read_back_from_json():
    made = plan([mha(window_tokens=127 if i % 2 else None) for i in range(4)], options={"page_size": 16})
    again = kvdock.CachePlan.from_json(made.to_json(), registry=core_only())
    assert again.to_json() == made.to_json()
    assert again.spaces == made.spaces


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('\n  "total_bytes": ', '\n  "total_bytes": 1', "total_bytes is 1"),
        ('"kvdock.plan/1"', '"kvdock.plan/9"', "schema is 'kvdock.plan/9'"),
        ('"contract": "0.1"', '"contract": "9.9"', "contract is '9.9'"),
        ('"name": "MHAPool"', '"name": "EvilPool"', "pool_cls.name is 'EvilPool'"),
        ('"page_size": 16', '"page_size": 32', "is .* but planning again gives"),
        ('"schema"', '"schemas"', "schema is None"),
        ('"inputs"', '"input"', "no field is called 'input'; did you mean 'inputs'"),
        ('"cap_tokens": null', '"cap_tokens": "x"', "inputs.cap_tokens: Expected `int | null`"),
        ('"cap_tokens": null', '"cap": null', "no field is called 'inputs.cap'; did you mean 'cap_tokens'"),
        (
            '"budget_bytes": 1073741824',
            '"budget_bytes": 1073741825',
            r"budget\.\w+ is 1073741824, but planning again gives 1073741825",
        ),
        ('"page_size": 16', '"page_size": 16, "page_size": 16', "the key 'page_size' is there twice"),
        ('\n  "host_bytes": ', '\n  "host_bytes": 1, "x": ', "no field is called 'x'"),
        ("{", "", "plan file ends too early|plan file is not JSON"),
    ],
)
def test_an_edited_plan_file_is_refused_naming_the_field(old, new, message):
    text = plan([mha()] * 2, options={"page_size": 16}).to_json()
    assert old in text
    with pytest.raises(PlanError, match=message):
        kvdock.CachePlan.from_json(text.replace(old, new, 1), registry=core_only())


class Claims:
    kvdock_contract = kvdock.CONTRACT

    @kvdock.hookimpl
    def get_option_defaults(self, query):
        return {"page_size": 16}


class Silent:
    kvdock_contract = kvdock.CONTRACT

    @kvdock.hookimpl
    def get_pool_cls(self, query):
        return None


def test_a_plan_file_of_another_plugin_version_is_refused():
    def registry_with(version):
        registry = core_only()
        registry.add(Claims(), name="acme", tier="hardware", version=version)
        return registry

    made = kvdock.plan(model([mha()]), device=IDLE, budget_bytes=GIB, registry=registry_with("1.2"))
    assert kvdock.CachePlan.from_json(made.to_json(), registry=registry_with("1.2")).spaces == made.spaces
    with pytest.raises(PlanError, match=r"plugins\.acme was '1\.2' when the plan was made and is '1\.3' now"):
        kvdock.CachePlan.from_json(made.to_json(), registry=registry_with("1.3"))
    with pytest.raises(PlanError, match=r"plugins\.acme was '1\.2' .* is 'absent' now"):
        kvdock.CachePlan.from_json(made.to_json(), registry=core_only())


def test_a_plugin_that_decides_nothing_does_not_spoil_a_plan_file():
    text = plan([mha()]).to_json()
    registry = core_only()
    registry.add(Silent(), name="other", tier="hardware", version="1.2")
    assert kvdock.CachePlan.from_json(text, registry=registry).to_json() == text


@pytest.mark.parametrize("text", ["[]", "null", "[" * 5000, b"\xff\xfe", "{}", '{"schema": 3}', "\ud800", None, 3])
def test_what_is_no_plan_file_is_refused(text):
    with pytest.raises(PlanError, match="plan file"):
        kvdock.CachePlan.from_json(text, registry=core_only())


def test_the_source_of_each_option_is_kept():
    made = plan([mha()], options={"page_size": 16})
    assert made.options.sources["page_size"] == "user"
    assert made.options.sources["kv_cache_dtype"] == "default"


LAYERS = st.sampled_from(
    [
        mha(),
        mha(2, 64),
        mha(8, 64, window_tokens=127),
        mha(4, 96, window_tokens=1023),
        LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=512, qk_rope_head_dim=64)),
    ]
)


@given(
    layers=st.lists(LAYERS, min_size=1, max_size=8),
    page=st.sampled_from([1, 3, 16, 64, 256]),
    dtype=st.sampled_from(["auto", "float32", "fp8_e4m3"]),
    tp=st.sampled_from([1, 2, 8]),
    requests=st.none() | st.integers(1, 64),
    granularity=st.sampled_from([1, 512]),
    budget=st.integers(2**20, 2**36),
)
def test_never_over_the_budget_and_never_a_page_short(layers, page, dtype, tp, requests, granularity, budget):
    device = DeviceInfo(
        device_type="cpu",
        name="d",
        total_bytes=2**40,
        free_before_load_bytes=2**40,
        free_bytes=2**40,
        granularity_bytes=granularity,
    )
    options = {"page_size": page, "kv_cache_dtype": dtype, "max_running_requests": requests}
    try:
        made = plan(layers, budget=budget, options=options, context=4096, parallel={"tp_size": tp}, device=device)
    except BudgetError:
        return
    assert sum(buffer.nbytes for buffer in made.buffers if buffer.memory == "device") == made.total_bytes <= budget
    if made.bound == "budget":
        tokens = made.spaces.get("full", made.spaces.get("swa"))
        more = made.replan(2**40, cap_tokens=tokens + page)
        assert more.total_bytes > budget


def test_a_stage_of_sliding_layers_alone_still_translates_full_slots():
    layers = [mha(window_tokens=127), mha(window_tokens=127), mha(), mha()]
    stage = plan(layers, parallel={"pp_size": 2, "pp_rank": 0}, options={"page_size": 16})
    assert [group.space for group in stage.groups] == ["swa"]
    assert stage.outline.routers["target"].cls.__name__ == "SlidingPool"
    assert stage.max_total_num_tokens == stage.spaces["full"]


def test_a_draft_of_sliding_layers_alone_translates_full_slots():
    from kvdock.planner import plan_from

    target = model([mha(window_tokens=127), mha()])
    draft = model([mha(window_tokens=127)])
    options = kvdock.CacheOptions(speculative_algorithm="EAGLE", speculative_num_steps=2)
    made = plan_from((target, draft), IDLE, options, kvdock.Parallelism(), core_only(), budget_bytes=GIB)
    assert made.outline.routers["draft"].cls.__name__ == "SlidingPool"
    assert [(group.name, group.space) for group in made.groups] == [
        ("swa", "swa"),
        ("full", "full"),
        ("draft.swa", "swa"),
    ]


def test_an_edited_device_or_budget_of_a_fraction_is_recomputed():
    made = plan([mha()], budget=None, device=loaded_device(), options={"mem_fraction_static": 0.6})
    text = made.to_json()
    assert kvdock.CachePlan.from_json(text, registry=core_only()).budget == made.budget
    edited = text.replace('"free_bytes": 21474836480', '"free_bytes": 21474836479', 1)
    assert edited != text
    with pytest.raises(PlanError, match=r"plan file: .* but planning again gives"):
        kvdock.CachePlan.from_json(edited, registry=core_only())


def test_explain_keeps_who_read_the_model():
    made = kvdock.plan("tests/models/llama-3.1-8b.json", device=IDLE, budget_bytes=GIB, registry=core_only())
    for same in (made, made.replan(GIB), kvdock.CachePlan.from_json(made.to_json(), registry=core_only())):
        assert "read_model: " in same.explain()


@pytest.mark.parametrize(("page", "asked"), [(1, 40_000), (16, 10_000), (64, 4000), (256, 1000)])
def test_the_number_of_requests_that_an_error_suggests_works(page, asked):
    options = {"page_size": page, "max_running_requests": asked}
    with pytest.raises(
        BudgetError, match=rf"max_running_requests={asked} needs .*max_running_requests=\d+ fits"
    ) as caught:
        plan([mha()] * 32, budget=2**34, options=options)
    fits = int(str(caught.value).split("max_running_requests=")[2].split(" ")[0])
    made = plan([mha()] * 32, budget=2**34, options=options | {"max_running_requests": fits})
    assert made.max_running_requests == fits < asked
    generous = plan([mha()] * 32, budget=caught.value.needed_bytes, options=options)
    assert generous.max_running_requests == asked or page == 1


def test_suggestions_count_the_floor_of_sliding_layers():
    layers = [mha(window_tokens=4095)] * 4
    options = {"max_running_requests": 7, "chunked_prefill_size": 2048}
    with pytest.raises(BudgetError) as caught:
        plan(layers, budget=4 * 2**20, context=8192, options=options)
    made = plan(layers, budget=caught.value.needed_bytes, context=8192, options=options)
    assert made.max_running_requests == 7


def test_requests_never_exceed_half_the_tokens_of_a_capped_plan():
    made = plan([mha()], options={"page_size": 16, "max_running_requests": 64, "max_total_tokens": 100})
    assert (made.spaces["full"], made.spaces["requests"]) == (96, 48)


def test_more_budget_never_serves_fewer_tokens_where_tables_take_a_large_share():
    layers = [mha(window_tokens=127 if i % 2 else None) for i in range(4)]
    served = [
        plan(layers, budget=budget, options={"request_table_share": 0.9}).spaces["full"]
        for budget in range(5 * 2**20, 20 * 2**20, 2**19)
    ]
    rows = 131_076 * 4 // (4 * 8 * 128 * 2 * 2) + 2  # tokens that one more request row may cost
    assert all(later >= earlier - rows for earlier, later in itertools.pairwise(served))


def test_a_page_is_never_short_while_the_automatic_request_limit_stays():
    made = plan([mha()] * 2, budget=5 * 2**20, context=4096, options={"page_size": 16, "request_table_share": 1.0})
    pinned = {"requests": made.spaces["requests"]}
    problem = Problem(spaces=made.outline.spaces, buffers=made.outline.buffers, page_size=16)
    assert Solver(problem, made.budget_bytes, pinned).nbytes(made.spaces["full"] + 16) > made.budget_bytes


def test_stated_tokens_beyond_the_memory_are_named_with_both_inputs():
    # S-18: the fraction leaves nothing and the stated tokens do not fit the free memory either
    options = {"mem_fraction_static": 0.65, "max_total_tokens": 1_000_000}
    with pytest.raises(BudgetError, match=r"mem_fraction_static=0\.65.*max_total_tokens=122864$"):
        plan([mha(8, 128)] * 8, budget=None, device=loaded_device(), options=options, weights_bytes=16 * GIB)


def test_a_page_as_large_as_the_numbering_is_refused_by_name():
    with pytest.raises(PlanError, match="page_size=2147483647 leaves no room"):
        plan([mha()], options={"page_size": 2**31 - 1})


class Explodes(MHAPool):
    @classmethod
    def buffers(cls, query):
        raise KeyError("boom")


class AnswersAList(MHAPool):
    @classmethod
    def buffers(cls, query):
        return list(super().buffers(query))


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (Explodes, r"plugin 'acme': .*Explodes\.buffers raised KeyError: 'boom' for 'full'"),
        (AnswersAList, r"plugin 'acme': .*AnswersAList\.buffers must return a tuple of Buffer, not list"),
    ],
)
def test_a_class_that_declares_nonsense_is_an_error_of_its_plugin(mock_plugin, pool, message):
    registry = core_only()
    registry.add(mock_plugin("acme", tier="hardware", pool=lambda query: pool if query.kind == "mha" else None))
    with pytest.raises(PluginError, match=message):
        kvdock.plan(model([mha()]), device=IDLE, budget_bytes=GIB, registry=registry)


def test_a_device_whose_own_pool_lacks_a_feature_is_warned_about(mock_plugin):
    class Plain(MHAPool):
        device_types = frozenset({"acme"})
        features = frozenset()

    device = DeviceInfo(
        device_type="acme", name="acme-1", total_bytes=2**34, free_before_load_bytes=2**34, free_bytes=2**34
    )
    registry = core_only()
    pool = lambda query: Plain if query.kind == "mha" else None  # noqa: E731
    registry.add(mock_plugin("acme", tier="hardware", pool=pool, devices={"acme-1": device}))
    fields = {"device": device, "budget_bytes": GIB, "registry": registry}
    assert not any("Plain" in w for w in kvdock.plan(model([mha()]), **fields).warnings)
    made = kvdock.plan(model([mha()]), options={"kv_cache_dtype": "fp8_e4m3"}, **fields)
    assert any("Plain lacks fp8, so MHAPool of core serves acme-1" in w for w in made.warnings)
