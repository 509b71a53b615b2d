"""How many bytes a cache may take: what is taken off a device, what stays free, and advice that works when used."""

import json
import re

import kvdock
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from kvdock.budget import GIB, MIB, activation_tokens, find_budget, late_slack_bytes, show_bytes
from kvdock.cli import main
from kvdock.device import DeviceInfo
from kvdock.errors import BudgetError, PlanError
from kvdock.layout import REQUESTS, STATE, SizeRule, Space
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import CacheOptions, Parallelism, make_options
from kvdock.pools import MHAPool
from kvdock.pools.state import StatePool
from kvdock.queries import RequestQuery
from kvdock.startup import core_only

LLAMA, QWEN = "tests/models/llama-3.1-8b.json", "tests/models/qwen3-next-80b-a3b.json"
LAYER = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128))
LAYER_BYTES = 2 * 8 * 128 * 2
"""Keys and values of a token in one layer: 4,096."""
SPACES = {name: Space(name=name, rule=SizeRule(fixed=4)) for name in (REQUESTS, STATE)}


def model(layers=8):
    return ModelSpec(
        name="invented", architecture="Invented", layers=(LAYER,) * layers, context_length=4096, dtype="bfloat16"
    )


def card(total, *, free=None, **fields):
    """Return a device of so many bytes, of which `free` are free now."""
    free_bytes = total if free is None else free
    values = {"device_type": "cpu", "name": "card", "total_bytes": total, "free_before_load_bytes": total, **fields}
    return DeviceInfo(free_bytes=free_bytes, **values)


def plan(source=None, *, device, registry=None, **fields):
    return kvdock.plan(source or model(), device=device, registry=registry or core_only(), **fields)


def advised(error):
    """Return the fraction that an error says works."""
    return float(re.search(r"the smallest that works is (\d\.\d{3}),", str(error))[1])


# What is taken off a device.


def test_the_budget_is_what_weights_reserve_and_slack_leave():
    made = plan(device=card(20 * GIB), options={"mem_fraction_static": 0.75}, weights_bytes=6 * GIB, reserve_bytes=GIB)
    budget = made.budget
    assert (budget.weights_bytes, budget.reserve_bytes, budget.slack_bytes) == (6 * GIB, GIB, 5 * GIB)
    assert budget.nbytes == made.budget_bytes == 8 * GIB
    assert budget.free_bytes == 13 * GIB


def test_every_part_is_in_the_note_with_its_bytes():
    made = plan(device=card(20 * GIB), options={"mem_fraction_static": 0.75}, weights_bytes=6 * GIB, reserve_bytes=GIB)
    parts = f"free {show_bytes(20 * GIB)} - weights {show_bytes(6 * GIB)} - reserve {show_bytes(GIB)} - slack"
    assert made.budget.note.startswith(parts)
    assert parts in made.explain()


def test_without_a_reserve_nothing_of_it_is_said():
    assert "reserve" not in plan(device=card(GIB)).explain()


@pytest.mark.parametrize("name", ["weights_bytes", "reserve_bytes"])
def test_a_budget_given_outright_leaves_nothing_to_take_off(name):
    with pytest.raises(PlanError, match=f"{name} has no effect; give one of them"):
        plan(device=card(GIB), budget_bytes=2**28, **{name: 2**20})


@pytest.mark.parametrize("name", ["weights_bytes", "reserve_bytes"])
@pytest.mark.parametrize("value", [-1, 2**63, 1.5, True, "1GiB"])
def test_a_number_of_bytes_is_whole_and_not_negative(name, value):
    with pytest.raises(PlanError, match=name):
        plan(device=card(GIB), **{name: value})


def test_a_plan_file_keeps_the_reserve():
    made = plan(device=card(4 * GIB), weights_bytes=GIB, reserve_bytes=GIB // 2)
    again = kvdock.CachePlan.from_json(made.to_json(), core_only())
    assert again.budget == made.budget
    edited = made.to_json().replace('"reserve_bytes": 536870912', '"reserve_bytes": 536870911', 1)
    with pytest.raises(PlanError, match="plan file"):
        kvdock.CachePlan.from_json(edited, core_only())


def test_a_plan_for_another_budget_takes_it_whole():
    made = plan(device=card(4 * GIB), weights_bytes=GIB, reserve_bytes=GIB // 2)
    assert made.replan(2**28).budget_bytes == 2**28


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_reserve_does_not_grow_with_the_drafts(steps):
    # T-05: activations of 14 GiB, whatever the draft length
    options = {"max_running_requests": 8, "mem_fraction_static": 1.0}
    if steps:
        options |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": steps}
    made = plan(device=card(40 * GIB), options=options, reserve_bytes=14 * GIB)
    assert (made.budget.reserve_bytes, made.budget_bytes) == (14 * GIB, 26 * GIB)


def test_the_same_device_gives_the_same_plan_on_every_rank():
    # S-22: nothing is read again, so what earlier ranks took is not taken off once more
    device = card(176 * GIB)
    plans = [plan(device=device, weights_bytes=GIB, reserve_bytes=GIB).to_json() for _ in range(8)]
    assert len(set(plans)) == 1
    assert device == card(176 * GIB)


def test_stated_tokens_take_slack_but_no_reserve():
    # S-18: a size given outright wins over a fraction, and is checked against what is really free
    options = {"mem_fraction_static": 0.5, "max_running_requests": 4, "max_total_tokens": 2**15}
    needed = plan(device=card(4 * GIB), options=options, budget_bytes=None).total_bytes
    device = card(needed + GIB)
    assert plan(device=device, options=options, reserve_bytes=GIB).spaces["full"] == 2**15
    short = plan(device=device, options={**options, "mem_fraction_static": 0.9}, reserve_bytes=GIB + 1)
    assert short.spaces["full"] < 2**15
    assert any("max_total_tokens=32768 takes" in warning for warning in short.warnings)


# What does not fit.


def test_weights_larger_than_the_device_are_said_to_be_that():
    with pytest.raises(BudgetError, match=r"weights take 12\.00 GiB.*more than the 10\.00 GiB.*free on card; use more"):
        plan(device=card(10 * GIB), weights_bytes=12 * GIB)


def test_weights_and_a_reserve_larger_than_the_device_are_both_named():
    match = r"weights take 8\.00 GiB.* and reserve_bytes \(--reserve\) keeps 3\.00 GiB.*10\.00 GiB.*smaller reserve"
    with pytest.raises(BudgetError, match=match) as caught:
        plan(device=card(10 * GIB), weights_bytes=8 * GIB, reserve_bytes=3 * GIB)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (11 * GIB, 10 * GIB)


def test_a_reserve_is_taken_off_the_number_that_an_error_prints():
    # U-03: 40 needed, 44.87 free, 10 reserved: 34.87 are there, in the unit of the need
    free = int(44.87 * GIB)
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2**10, head_dim=2**14, v_head_dim=2**14))
    wide = ModelSpec(name="wide", architecture="Wide", layers=(layer,) * 64, context_length=16, dtype="bfloat16")
    with pytest.raises(BudgetError) as caught:
        plan(wide, device=card(free), options={"mem_fraction_static": 1.0, "page_size": 5}, reserve_bytes=10 * GIB)
    error = caught.value
    assert 40 * GIB <= error.needed_bytes < 40 * GIB + MIB  # a page and the padding page, 5 tokens of 4 GiB each
    assert error.budget_bytes == free - 10 * GIB
    assert f"only {show_bytes(free - 10 * GIB)} of card are free" in str(error)
    assert "34.87 GiB" in str(error)
    assert "44.87 GiB" in str(error)
    assert "reserve 10.00 GiB" in str(error)
    assert "GB" not in str(error)


LOADED, FREE = int(138.1 * GIB), int(12.25 * GIB)


@pytest.mark.parametrize(
    ("free", "above", "works"),
    [(FREE, 0.9113, 0.912), (FREE - int(3.07 * GIB), 0.9335, 0.934)],
    ids=["target", "draft"],
)
def test_weights_beyond_the_static_share_are_told_from_a_small_share(free, above, works):
    # U-01: 138.1 GiB, 12.25 free after loading, then 3.07 more for the draft
    device = card(LOADED, free=free, index=0)
    options = {"mem_fraction_static": 0.88, "max_running_requests": 1}
    with pytest.raises(BudgetError, match="weights and what else is loaded exceed its share") as caught:
        plan(device=device, options=options)
    assert above < advised(caught.value) == works
    left = LOADED - int(LOADED * works)
    assert f"with {left / GIB:.2f} GiB" in str(caught.value)
    assert "left for activations" in str(caught.value)
    assert plan(device=device, options={**options, "mem_fraction_static": works}).spaces["full"] > 0
    with pytest.raises(BudgetError):
        plan(device=device, options={**options, "mem_fraction_static": round(works - 0.001, 3)})


def test_a_share_that_is_only_too_small_is_no_matter_of_weights():
    # U-01: the other situation under the same option
    with pytest.raises(BudgetError, match="leaves too little") as caught:
        plan(device=card(GIB), options={"mem_fraction_static": 0.001, "page_size": 1024})
    assert "exceed its share" not in str(caught.value)
    fits = {"mem_fraction_static": advised(caught.value), "page_size": 1024}
    assert plan(device=card(GIB), options=fits).spaces["full"] >= 1024


def test_where_no_fraction_works_none_is_advised():
    with pytest.raises(BudgetError, match=r"no mem_fraction_static helps.*reserve 1\.00 GiB.*use more ranks") as caught:
        plan(device=card(GIB), reserve_bytes=GIB)
    assert "that works" not in str(caught.value)


@pytest.mark.parametrize("source", [LLAMA, QWEN, "tests/models/gpt-oss-20b.json"])
@pytest.mark.parametrize("requests", [None, 1, 16])
@pytest.mark.parametrize("taken", [{}, {"reserve_bytes": 300 * MIB}, {"weights_bytes": 2 * GIB}])
def test_the_advised_fraction_works_and_a_thousandth_less_does_not(source, requests, taken):
    # U-01: using the printed value succeeds
    def at(fraction):
        options = {"mem_fraction_static": fraction, "max_running_requests": requests, "context_length": 1024}
        return plan(source, device=card(8 * GIB), options={**options, "page_size": 512}, **taken)

    with pytest.raises(BudgetError) as caught:
        at(0.001)
    fraction = advised(caught.value)
    assert at(fraction).max_running_requests >= 1
    if fraction > 0.001:
        with pytest.raises(BudgetError):
            at(round(fraction - 0.001, 3))


@given(
    st.integers(2**20, 2**40),
    st.integers(1, 1000),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.integers(0, 2**36),
)
def test_the_parts_of_a_budget_add_up(total, thousandths, weights, reserve, least):
    options = CacheOptions(mem_fraction_static=thousandths / 1000)
    try:
        budget = find_budget(card(total), options, None, weights, reserve_bytes=reserve, least_slack_bytes=least)
    except BudgetError:
        assert weights + reserve > total
        return
    assert budget.nbytes + weights + reserve + budget.slack_bytes == total
    assert budget.slack_bytes == max(-(-total * (1000 - thousandths) // 1000), least)
    assert budget.free_bytes == total - weights - reserve - least >= budget.nbytes


# Slack beside states that are backed late.


def late_query(options=None, *, total=24 * GIB, spaces=SPACES, **parallel):
    """Return the query of a request pool beside states, with late backing."""
    return RequestQuery(
        model=model(),
        options=make_options({"late_backing": True, **(options or {})}),
        parallel=Parallelism(**parallel),
        device=card(total),
        spaces=spaces,
        groups=(),
        columns=1,
    )


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 2048),
        ({"max_prefill_tokens": 16384}, 16384),
        ({"max_prefill_tokens": 16384, "chunked_prefill_size": 8192}, 8192),
        ({"chunked_prefill_size": 512}, 2048),
        ({"role": "decode", "chunked_prefill_size": 8192}, 2048),
        ({"role": "decode", "max_running_requests": 4000}, 4000),
        (
            {
                "role": "decode",
                "max_running_requests": 4000,
                "speculative_algorithm": "EAGLE",
                "speculative_num_draft_tokens": 4,
            },
            16000,
        ),
        (
            {"max_prefill_tokens": 4096, "speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4},
            4096,  # T-05: drafts are part of the token budget of a prefill already
        ),
    ],
)
def test_activation_tokens_are_those_of_the_largest_batch(options, tokens):
    assert activation_tokens(late_query(options)) == tokens


@pytest.mark.parametrize(
    ("parallel", "total", "slack"),
    [
        ({}, 24 * GIB, 512 * MIB + 8192 * 3 * MIB // 2 + GIB // 8),
        ({"tp_size": 8, "pp_size": 2}, 24 * GIB, 512 * MIB + 8192 * 3 * MIB // 2 + 2 * GIB),
        ({}, 60 * GIB, 512 * MIB + 8192 * 3 * MIB // 2 + GIB // 8),
        ({}, 60 * GIB + 1, 512 * MIB + 8192 * 3 * MIB // 2 + GIB // 8),
    ],
)
def test_late_slack_counts_tokens_and_ranks(parallel, total, slack):
    assert late_slack_bytes(late_query({"chunked_prefill_size": 8192}, total=total, **parallel)) == slack


@pytest.mark.parametrize(("total", "slack"), [(60 * GIB, 3712 * MIB), (60 * GIB + 1, 10 * GIB)])
def test_a_large_device_keeps_10_gib(total, slack):
    assert late_slack_bytes(late_query(total=total)) == slack  # 512 + 2048 · 1.5 + 128 MiB


def test_late_slack_is_for_states_that_are_backed_late():
    assert late_slack_bytes(late_query(spaces={REQUESTS: SPACES[REQUESTS]})) == 0
    assert late_slack_bytes(late_query({"late_backing": False})) == 0


def test_the_larger_slack_holds():
    by_fraction = find_budget(card(40 * GIB), CacheOptions(mem_fraction_static=0.9), None, None, least_slack_bytes=GIB)
    assert (by_fraction.slack_bytes, by_fraction.nbytes) == (4 * GIB, 36 * GIB)
    assert "late_backing" not in by_fraction.note
    least = find_budget(card(40 * GIB), CacheOptions(mem_fraction_static=0.9), None, None, least_slack_bytes=5 * GIB)
    assert (least.slack_bytes, least.nbytes) == (5 * GIB, 35 * GIB)
    assert "raised to what late_backing keeps free for activations" in least.note


class LatePool(MHAPool):
    """Keys and values on a device whose states are backed late."""

    features = MHAPool.features | {"late_backing"}


class LateStates(StatePool):
    """States that are backed late."""

    features = StatePool.features | {"late_backing"}


@pytest.fixture
def late(mock_plugin):
    """A registry with pools that back memory late."""
    pools = {"mha": LatePool, "state": LateStates}
    registry = core_only()
    registry.add(mock_plugin("late", "hardware", pool=lambda query: pools.get(query.kind)))
    return registry


def test_a_plan_with_late_states_keeps_the_least_slack(late):
    options = {"late_backing": True, "max_running_requests": 2, "context_length": 1024, "chunked_prefill_size": 4096}
    made = plan(QWEN, device=card(40 * GIB), options=options, registry=late, weights_bytes=GIB)
    least = 512 * MIB + 4096 * 3 * MIB // 2 + GIB // 8
    assert made.budget.least_slack_bytes == least == 6784 * MIB
    assert made.budget_bytes == 39 * GIB - least
    assert "raised to what late_backing keeps free" in made.explain()
    assert kvdock.CachePlan.from_json(made.to_json(), late).budget == made.budget


def test_late_backing_without_states_keeps_what_the_fraction_does(late):
    options = {"late_backing": True, "mem_fraction_static": 0.9}
    made = plan(device=card(40 * GIB), options=options, registry=late, weights_bytes=GIB)
    assert (made.budget.least_slack_bytes, made.budget_bytes) == (0, 35 * GIB)


def test_no_fraction_gets_below_the_least_slack(late):
    options = {"late_backing": True, "max_running_requests": 1, "context_length": 64}
    fraction = {**options, "mem_fraction_static": 0.001}
    needed = plan(QWEN, device=card(GIB), options={**options, "late_backing": False}, registry=late).total_bytes
    with pytest.raises(BudgetError, match="no mem_fraction_static helps"):
        plan(QWEN, device=card(3712 * MIB), options=fraction, registry=late)
    device = card(3712 * MIB + needed)
    with pytest.raises(BudgetError) as caught:
        plan(QWEN, device=device, options=fraction, registry=late)
    works = {**options, "mem_fraction_static": advised(caught.value)}
    assert plan(QWEN, device=device, options=works, registry=late).budget.slack_bytes >= 3712 * MIB


# The command line.


def call(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_reserve_comes_off_a_device():
    made = [call("plan", LLAMA, "--device", "cpu", *more, "--json") for more in ((), ("--reserve", "64MiB"))]
    assert [result.exit_code for result in made] == [0, 0], made[1].stderr
    reserves = [json.loads(result.stdout)["inputs"]["reserve_bytes"] for result in made]
    assert reserves == [0, 64 * MIB]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "cpu", "--reserve", "2 gigs"], "write it as 40GiB"),
        (["--device", "cpu", "--reserve=-1"], "is no size"),
        (["--device", "cpu", "--reserve", "1GiB", "--reserve", "1GiB"], "--reserve is given twice"),
        (["--memory", "1GiB", "--reserve", "1MiB"], "reserve_bytes has no effect"),
        (["--device", "h200", "--weights", "200GiB"], "the weights take 200.00 GiB"),
        (["--device", "h200", "--weights", "1GiB", "--reserve", "200GiB"], "reserve_bytes (--reserve) keeps 200.00"),
    ],
)
def test_a_reserve_that_cannot_be_is_refused_in_one_line(arguments, says):
    result = call("plan", LLAMA, *arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
