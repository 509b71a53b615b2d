"""What a person is told where a plan is refused or lowered: advice that can be followed, and nothing that cannot."""

import kvdock
import msgspec
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import BudgetError, PlanError
from kvdock.model import LayerSpec, MHAParams, ModelSpec, StateParams
from kvdock.startup import core_only

LAYER = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=64, v_head_dim=64))
STATE = LayerSpec(kind="state", params=StateParams(conv=(), temporal=(4, 32, 32)))
PLAIN = ModelSpec(name="m", architecture="M", layers=(LAYER, LAYER), context_length=4096, dtype="bfloat16")
MIXED = msgspec.structs.replace(PLAIN, layers=(LAYER, STATE))
SMALL = DeviceInfo(device_type="cpu", name="small", total_bytes=2**24, free_before_load_bytes=2**24, free_bytes=2**24)


def plan(model=PLAIN, budget=2**26, device=None, parallel=None, **options):
    return kvdock.plan(
        model, device=device, budget_bytes=budget, options=options, parallel=parallel, registry=core_only()
    )


def test_a_plan_of_a_budget_alone_takes_any_other_budget():
    larger = plan(budget=2**26).replan(budget_bytes=2**28)
    assert larger.spaces == plan(budget=2**28).spaces
    assert kvdock.CachePlan.from_json(larger.to_json(), core_only()).to_json() == larger.to_json()
    with pytest.raises(PlanError, match="budget_bytes=None is no number of bytes"):
        larger.replan(budget_bytes=None)


def test_states_sized_by_a_ratio_ask_for_no_more_memory_than_a_plan_takes():
    options = {"max_running_requests": 64, "state_sizing": "ratio"}
    with pytest.raises(BudgetError, match="not one request fits") as told:
        plan(MIXED, budget=2**12, **options)
    needed = told.value.needed_bytes
    assert plan(MIXED, budget=needed, **options).max_running_requests >= 1
    with pytest.raises(BudgetError):
        plan(MIXED, budget=needed - 1, **options)


@pytest.mark.parametrize("budget", [2**20, 2**21, 2**22, 2**23])
def test_the_state_slots_that_a_warning_names_can_be_had(budget):
    options = {"max_running_requests": 300, "state_sizing": "ratio"}
    made = plan(MIXED, budget=budget, **options)
    (warning,) = (text for text in made.warnings if "state slots" in text)
    assert "max_running_requests" not in {limit.name: limit.raised_by for limit in made.limits}["requests"]
    _, found, rest = warning.partition("max_state_slots=")
    if not found:
        assert warning.endswith("a larger budget raises it")
        return
    slots, _, served = rest.partition(" serves ")
    count = 300 if served.startswith("all") else int(served.split()[0])
    stated = plan(MIXED, budget=budget, max_running_requests=300, max_state_slots=int(slots))
    assert stated.max_running_requests == count > made.max_running_requests


def test_no_more_memory_is_asked_for_than_the_device_has():
    with pytest.raises(
        BudgetError, match=r"small has 16\.00 MiB .* free, so use more ranks or a larger device"
    ) as told:
        plan(MIXED, budget=2**22, device=SMALL, max_state_slots=4096)
    assert "give at least" not in str(told.value)
    assert "plan for less: max_state_slots=" in str(told.value)


@pytest.mark.parametrize(
    ("options", "named", "left_out"),
    [
        (
            {"page_size": 100_000},
            "page_size=6250",
            ("context_length", "max_running_requests", "kv_cache_dtype"),
        ),
        (
            {"page_size": 40_000},
            "page_size=10000 or kv_cache_dtype=float4_e2m1fn_x2",
            ("context_length", "max_running_requests"),
        ),
    ],
)
def test_only_what_can_help_is_named(options, named, left_out):
    with pytest.raises(BudgetError) as told:
        plan(budget=2**25 - 2**23, **options)
    less = str(told.value).partition("plan for less: ")[2]
    assert named in less
    assert not [name for name in left_out if name in less]


def test_requests_that_no_worker_gets_are_named():
    parallel = {"tp_size": 2, "dp_size": 2, "dp_attention": True}
    made = plan(max_running_requests=33, parallel=parallel)
    assert made.max_running_requests == 16
    assert any(text.startswith("max_running_requests=33 over 2 workers: 16 each, and 1 of") for text in made.warnings)
    with pytest.raises(PlanError, match="give a multiple of 2"):
        plan(max_running_requests=33, parallel=parallel, strict=True)
    assert not plan(max_running_requests=32, parallel=parallel).warnings


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("attention_backend", "\udcff", "attention_backend='.*' is no data"),
        ("plugin_options", {"x": {"a": object()}}, "plugin_options=.* is no data"),
        ("plugin_options", {"core": {"a": 1}}, "'core', whose options are those of CacheOptions"),
        ("page_size", "\udcff", "page_size=.* does not fit: give a whole number"),
        ("draft", {}, "draft={} says nothing"),
        ("draft", 7, "give text or names and values or a list of texts or names and values"),
        ("max_running_requests", 2**63 - 1, "outside 1 … 2147483647"),
        ("swa_full_tokens_ratio", 1e308, "above 0 and at most 1,048,576"),
    ],
)
def test_values_that_nothing_can_take_are_refused_in_words(name, value, told):
    given = {"speculative_algorithm": "EAGLE"} if name == "draft" else {}
    with pytest.raises(PlanError, match=told):
        plan(**{name: value}, **given)


def test_a_cap_below_a_page_names_the_page_and_what_would_do():
    with pytest.raises(
        PlanError, match="max_total_tokens=100 is less than one page of page_size=256; give at least 256"
    ):
        plan(max_total_tokens=100, page_size=256)


@pytest.mark.parametrize("ranks", [(0, -1), (0, 0), (3, 2), (-1, 1)])
def test_a_plan_file_names_a_rank_that_exists(ranks):
    data = msgspec.json.decode(plan().to_json())
    data["agreement"]["rank"], data["agreement"]["ranks"] = ranks
    with pytest.raises(PlanError, match="agreement: rank"):
        kvdock.CachePlan.from_json(msgspec.json.encode(data), core_only())


def test_a_plan_file_names_every_plugin_that_decided():
    data = msgspec.json.decode(plan().to_json())
    del data["plugins"]["core"]
    with pytest.raises(PlanError, match=r"plan file: plugins\.core"):
        kvdock.CachePlan.from_json(msgspec.json.encode(data), core_only())


def test_states_of_requests_are_not_raised_by_a_shorter_context():
    from kvdock.limits import TABLE_SHARE

    made = plan(budget=2**22, request_table_share=0.001)
    limit = next(limit for limit in made.limits if limit.name == "requests")
    assert limit.factor == TABLE_SHARE
    assert "context_length (a shorter one)" in limit.raised_by
    shorter = plan(budget=2**22, request_table_share=0.001, context_length=64)
    assert shorter.max_running_requests > made.max_running_requests


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_no_terminal_breaks_a_number_or_a_word(columns, monkeypatch, capsys):
    from kvdock.cli.render import draw_table

    monkeypatch.setenv("COLUMNS", str(columns))
    heads = ["space", *(f"tp_size {2**i}" for i in range(8))]
    rows = [["bookkeeping", *(f"1,886,20{i}" for i in range(8))], ["memory", *("140.40 GiB" for _ in range(8))]]
    draw_table("spaces", heads, rows, heads[1:])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    assert all(text in shown for text in ["bookkeeping", *(f"1,886,20{i}" for i in range(8)), "140.40 GiB"])


def test_nothing_of_a_length_beyond_the_context_runs_at_once():
    made = plan(context_length=128)
    assert made.concurrency(128) > 0
    assert made.concurrency(129) == 0
