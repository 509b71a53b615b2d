"""What the engine refuses: kvdock refuses it too and says what works, or plans it."""

import re

import pytest
from kvdock.deployment import plan_ranks
from kvdock.errors import BudgetError, PlanError
from kvdock.layout import SWA
from kvdock.startup import core_only

from .engine import CASES, CONFIGS, budget_of, config_of, engine_sizes, fraction_plan_of, options_of, plan_of
from .terms import NEEDS_PLUGIN, REFUSED

FRACTION = "fail-llama-negative-budget"
TOO_SMALL = sorted(name for name, (error, _) in REFUSED.items() if error is BudgetError and name != FRACTION)


def planned(name):
    return fraction_plan_of(CASES[name]) if name == FRACTION else plan_of(CASES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_refuses_is_refused_by_name(name):
    error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        planned(name)


@pytest.mark.parametrize("name", TOO_SMALL)
def test_the_bytes_that_a_refusal_names_are_the_fewest_that_work(name):
    with pytest.raises(BudgetError) as refused:
        plan_of(CASES[name])
    needed = refused.value.needed_bytes
    assert f"{needed:,} bytes" in str(refused.value)
    assert plan_of(CASES[name], budget_bytes=needed).total_bytes <= needed
    with pytest.raises(BudgetError):
        plan_of(CASES[name], budget_bytes=needed - 1)


def test_the_fraction_that_a_refusal_names_is_the_smallest_that_works():
    # Of 80 GiB weights leave 5: 0.9375 leaves nothing, and the engine says so; the first thousandth above has room.
    with pytest.raises(BudgetError, match=r"the smallest that works is 0\.938,"):
        planned(FRACTION)
    assert fraction_plan_of(CASES[FRACTION], 0.938).max_running_requests >= 1
    with pytest.raises(BudgetError):
        fraction_plan_of(CASES[FRACTION], 0.937)


def test_the_requests_that_a_refusal_names_fit():
    case = CASES["fail-gpt-oss-chunk-cap-no-room"]
    with pytest.raises(BudgetError) as refused:
        plan_of(case)
    (fits,) = re.findall(r"max_running_requests=(\d+) fits", str(refused.value))
    assert plan_of(case, {"max_running_requests": int(fits)}).max_running_requests == int(fits)
    with pytest.raises(BudgetError):
        plan_of(case, {"max_running_requests": int(fits) + 1})


@pytest.mark.parametrize("name", sorted(NEEDS_PLUGIN))
def test_a_model_of_another_plugin_is_refused_by_what_its_config_tells(name):
    with pytest.raises(PlanError, match=r"compress_ratios .* install the plugin of its family"):
        plan_of(CASES[name])


# Planned although the engine refuses.


def test_layers_that_all_slide_have_pages():
    case = CASES["fail-generic-all-swa-page16"]
    plan = plan_of(case)
    assert set(plan.sizes) == {"requests", SWA}
    (group,) = plan.groups
    assert (group.space, len(group.layers)) == (SWA, 12)
    # 4 GiB // (12 layers · 2 · 4 heads · 128 · 2 bytes) = 174,762 slots, in pages of 16.
    assert engine_sizes(case)[SWA] == 174_752
    assert plan.sizes[SWA] % 16 == 0 and 0 < 174_752 - plan.sizes[SWA] < 256  # padding and tables


def test_the_last_stage_keeps_the_draft():
    case = CASES["fail-deepseek-v3-pp2-with-mtp"]
    deployment = plan_ranks(
        config_of(case),
        options=options_of(case),
        parallel={"tp_size": 8, "pp_size": 2},
        budget_bytes=budget_of(case),
        registry=core_only(),
    )
    first, last = deployment.plans[0], deployment.plans[15]
    assert [(group.worker, len(group.layers)) for group in first.groups] == [("target", 30)]
    assert [(group.worker, len(group.layers)) for group in last.groups] == [("target", 31), ("draft", 1)]
    assert first.sizes == last.sizes
    # 30 GiB // (32 layers · 576 · 2 bytes) = 873,813 tokens, less padding and tables.
    assert 870_000 < last.max_total_num_tokens < 873_813


def test_index_keys_lie_in_pages_of_one_token():
    plan = plan_of(CASES["fail-dsa-page-size-1"])
    (index,) = [buffer for buffer in plan.buffers if buffer.role == "index"]
    assert index.shape == (plan.max_total_num_tokens + 1, 132)  # 128 bytes of keys and a scale of 4


def test_an_older_name_of_a_format_is_read():
    case = CASES["fail-fp4-e2m1-deprecated"]
    old, new = plan_of(case), plan_of(case, {"kv_cache_dtype": "fp4_mx_block16"})
    assert old.sizes == new.sizes
    assert old.groups == new.groups


def test_every_config_is_used():
    used = {case[key] for case in CASES.values() for key in ("config", "draft") if key in case}
    assert used == set(CONFIGS)
