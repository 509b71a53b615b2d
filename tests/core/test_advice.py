"""Errors name what was asked for and what would work."""

import re

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import BudgetError, KVDockError, PlanError, UnsupportedCombination
from kvdock.model import ConvBlock, ConvParams, DSAParams, LayerSpec, MHAParams, ModelSpec, StateParams
from kvdock.startup import core_only

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
    options = {"max_state_slots": 2000, "context_length": 512}
    with pytest.raises(BudgetError, match=r"plan for less: max_state_slots=\d+$") as told:
        kvdock.plan(QWEN, device="cpu", budget_bytes=2**31, options=options)
    slots = int(str(told.value).rpartition("=")[2])
    made = kvdock.plan(QWEN, device="cpu", budget_bytes=2**31, options={**options, "max_state_slots": slots})
    assert made.spaces["state"] == slots
    with pytest.raises(BudgetError):
        kvdock.plan(QWEN, device="cpu", budget_bytes=2**31, options={**options, "max_state_slots": slots + 1})


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


GIB = 2**30
IDLE = DeviceInfo(device_type="cpu", name="idle", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)
SMALL = DeviceInfo(device_type="cpu", name="small", total_bytes=GIB, free_before_load_bytes=GIB, free_bytes=GIB)
CONV = ConvParams(blocks=(ConvBlock(heads=4, head_dim=8),), kernel=4)
LAYERS = {
    "heads": LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=64, v_head_dim=64)),
    "six": LayerSpec(kind="mha", params=MHAParams(num_kv_heads=6, head_dim=64, v_head_dim=64)),
    "window": LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=64, v_head_dim=64), window_tokens=100),
    "indexed": LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128)),
    "state": LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(4, 8, 8))),
}
TWO_WORKERS = {"tp_size": 2, "dp_size": 2, "dp_attention": True}
HISPARSE = {"page_size": 64, "hisparse": True}


def plan_of(layers, *, budget=GIB, device=IDLE, options=None, parallel=None, **fields):
    """Return the plan of layers by name; `options` and `parallel` may name the same fields as the advice."""
    model = ModelSpec(
        name="m",
        architecture="M",
        layers=tuple(LAYERS[name] for name in layers.split()),
        context_length=1024,
        dtype="bfloat16",
    )
    return kvdock.plan(
        model,
        device=device,
        budget_bytes=budget,
        options=options,
        parallel=parallel,
        registry=core_only(),
        **fields,
    )


SUGGESTED = {
    "requests that fit": (
        "heads",
        {"budget": 2**17, "options": {"max_running_requests": 200}},
        r"max_running_requests=(\d+) fits",
        "max_running_requests",
    ),
    "requests that fit, over two workers": (
        "heads",
        {"budget": 2**17, "options": {"max_running_requests": 200}, "parallel": TWO_WORKERS},
        r"max_running_requests=200 needs .* max_running_requests=(\d+) fits",
        "max_running_requests",
    ),
    "requests that fit beside states": (
        "state heads",
        {"budget": 2**17, "options": {"max_running_requests": 40}, "parallel": TWO_WORKERS},
        r"max_running_requests=(\d+) fits",
        "max_running_requests",
    ),
    "requests for every worker": (
        "heads",
        {"options": {"max_running_requests": 1}, "parallel": TWO_WORKERS},
        r"give max_running_requests=(\d+) or more",
        "max_running_requests",
    ),
    "bytes for one request": ("heads", {"budget": 5000}, r"give at least .*?\(([\d,]+) bytes\)", "budget"),
    "bytes for stated requests": (
        "heads",
        {"budget": 2**17, "options": {"max_running_requests": 200}},
        r"give at least .*?\(([\d,]+) bytes\)",
        "budget",
    ),
    "bytes beside a share for states": (
        "state heads",
        {"budget": 2**14, "options": {"max_running_requests": 4, "state_sizing": "ratio", "state_memory_ratio": 4}},
        r"give at least .*?\(([\d,]+) bytes\)",
        "budget",
    ),
    "bytes that are free": ("heads", {"budget": 2 * GIB, "device": SMALL}, r"give at most (\d+)", "budget"),
    "a fraction": (
        "heads",
        {"budget": None, "device": SMALL, "weights_bytes": GIB * 19 // 20},
        r"the smallest that works is (0\.\d+)",
        "mem_fraction_static",
    ),
    "tokens": ("heads", {"options": {"max_total_tokens": 1}}, r"give at least (\d+)", "max_total_tokens"),
    "tokens beside a window": (
        "window heads",
        {"options": {"max_total_tokens": 90}},
        r"give at least (\d+)",
        "max_total_tokens",
    ),
    "tokens of a page": (
        "heads",
        {"options": {"max_total_tokens": 9, "page_size": 16}},
        r"give at least (\d+)",
        "max_total_tokens",
    ),
    "state slots": (
        "state heads",
        {"options": {"max_state_slots": 4}, "parallel": TWO_WORKERS},
        r"give at least (\d+)",
        "max_state_slots",
    ),
    "bytes of the host": (
        "indexed",
        {"options": {**HISPARSE, "host_budget_bytes": 1000}},
        r"give at least (\d+)",
        "host_budget_bytes",
    ),
    "bytes of the host for tables of several requests": (
        "indexed",
        {"options": {**HISPARSE, "host_budget_bytes": 1000, "max_running_requests": 4}},
        r"give at least (\d+)",
        "host_budget_bytes",
    ),
    "a device buffer": (
        "indexed",
        {"options": {**HISPARSE, "hisparse_top_k": 512, "hisparse_device_buffer_size": 100}},
        r"give at least (\d+)",
        "hisparse_device_buffer_size",
    ),
    "a context": ("heads", {"options": {"context_length": 2000}}, r"give at most (\d+)", "context_length"),
    "fewer stages": ("heads heads", {"parallel": {"pp_size": 3}}, r"the model's (\d+) layers", "pp_size"),
    "ranks for heads": ("heads", {"parallel": {"tp_size": 3}}, r"nearest tp_size that works is (\d+)", "tp_size"),
    "more ranks for heads": ("six", {"parallel": {"tp_size": 5}}, r"nearest tp_size that works is (6)", "tp_size"),
    "ranks of two workers": (
        "heads",
        {"parallel": {**TWO_WORKERS, "tp_size": 6}},
        r"nearest tp_size that works is (4)",
        "tp_size",
    ),
    "ranks that share tokens": (
        "six",
        {"parallel": {"tp_size": 4, "dcp_size": 2}},
        r"nearest tp_size that works is (\d+)",
        "tp_size",
    ),
    "ranks for states": ("state", {"parallel": {"tp_size": 3}}, r"nearest tp_size that works is (\d+)", "tp_size"),
    "shares of the tokens": (
        "indexed",
        {"parallel": {"tp_size": 6, "dcp_size": 4}},
        r"; dcp_size=(\d+) does",
        "dcp_size",
    ),
    "ranks of workers": (
        "heads",
        {"parallel": {"tp_size": 6, "dp_size": 4, "dp_attention": True}},
        r"give a multiple of (\d+)",
        "tp_size",
    ),
}


def followed(given, name, value):
    """Return what is given with the number that was suggested."""
    if name == "budget":
        return {**given, "budget": int(value)}
    if name == "mem_fraction_static":
        return {**given, "options": {name: float(value)}}
    where = "parallel" if name in (given.get("parallel") or {}) else "options"
    return {**given, where: {**given[where], name: int(value)}}


@pytest.mark.parametrize(("layers", "given", "pattern", "name"), SUGGESTED.values(), ids=SUGGESTED)
def test_the_number_that_an_error_suggests_works(layers, given, pattern, name):
    with pytest.raises(KVDockError) as raised:
        plan_of(layers, **given)
    found = re.search(pattern, str(raised.value))
    assert found is not None, raised.value
    (value,) = (group for group in found.groups() if group)
    made = plan_of(layers, **followed(given, name, value.replace(",", "")))
    assert made.total_bytes <= made.budget_bytes
    assert made.max_running_requests >= 1


def test_the_bytes_that_are_asked_for_count_the_states_that_come_with_them():
    given = {"max_running_requests": 4, "page_size": 4, "state_sizing": "ratio", "state_memory_ratio": 4}
    with pytest.raises(BudgetError) as raised:
        plan_of("state heads", budget=2**14, options=given)
    enough = raised.value.needed_bytes
    made = plan_of("state heads", budget=enough, options=given)
    assert made.max_running_requests == 4
    # Four fifths of the budget are states, so a tenth less leaves too little for the tables of the others.
    assert made.unused_bytes < made.costs.per_slot["state"].kv
    with pytest.raises(BudgetError, match="max_running_requests=4 needs"):
        plan_of("state heads", budget=enough * 9 // 10, options=given)


def test_the_requests_that_fit_are_the_most():
    given = {"budget": 2**17, "parallel": TWO_WORKERS}
    with pytest.raises(BudgetError) as raised:
        plan_of("heads", options={"max_running_requests": 200}, **given)
    fits = int(re.search(r"max_running_requests=(\d+) fits", str(raised.value))[1])
    assert plan_of("heads", options={"max_running_requests": fits}, **given).max_running_requests == fits // 2
    more = plan_of("heads", options={"max_running_requests": fits + 2}, **given)
    assert more.max_running_requests == fits // 2
    assert f"max_running_requests: {fits // 2 + 1} asked for of each of 2 workers, {fits // 2} fit" in more.warnings[0]


@pytest.mark.parametrize("parallel", [None, TWO_WORKERS])
def test_the_state_slots_that_a_warning_suggests_serve_all_requests(parallel):
    options = {"max_running_requests": 40, "max_state_slots": 30}
    made = plan_of("state heads", options=options, parallel=parallel)
    assert made.max_running_requests < 40 // (2 if parallel else 1)
    slots = int(re.search(r"max_state_slots=(\d+) serves all of them", " ".join(made.warnings))[1])
    again = plan_of("state heads", options={**options, "max_state_slots": slots}, parallel=parallel)
    assert (again.max_running_requests, again.warnings) == (40 // (2 if parallel else 1), ())
    short = plan_of("state heads", options={**options, "max_state_slots": slots - 2}, parallel=parallel)
    assert short.max_running_requests < again.max_running_requests


def test_a_rank_of_a_deployment_suggests_what_works_for_it():
    layers = ModelSpec(name="m", architecture="M", layers=(LAYERS["heads"],) * 2, context_length=1024, dtype="bfloat16")

    def planned(second):
        return kvdock.plan_ranks(
            layers, device=IDLE, budget_bytes=[GIB, second], parallel={"pp_size": 2}, registry=core_only()
        )

    with pytest.raises(BudgetError, match=r"^rank 1: ") as raised:
        planned(1000)
    assert planned(raised.value.needed_bytes).max_total_num_tokens == 2
    with pytest.raises(BudgetError, match=r"^rank 1: "):
        planned(raised.value.needed_bytes - 1)


def test_what_the_host_lacks_is_named_before_the_device():
    """No budget would make it good, so none is asked for."""
    options = {**HISPARSE, "host_budget_bytes": 1000, "max_running_requests": 4}
    for budget in (2**10, GIB):
        with pytest.raises(PlanError, match=r"^host_budget_bytes=1000 does not hold") as raised:
            plan_of("indexed", budget=budget, options=options)
        assert not isinstance(raised.value, BudgetError)
