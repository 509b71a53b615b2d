"""Ranks that plan in processes of their own: the same plans as in one process, and no rank waits for another's error."""

import json
import subprocess
import sys

import kvdock
import pytest
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

MIB = 2**20
COMMON = """
import kvdock

MIB = 2**20
DRAFT = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 16, "hidden_size": 64, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}
OPTIONS = {"plugins": (), "page_size": 16, "speculative_algorithm": "EAGLE", "draft": DRAFT}

def model_of(layers):
    def layer(i):
        shape = kvdock.MHAParams(num_kv_heads=4, head_dim=16, v_head_dim=16)
        return kvdock.LayerSpec(kind="mha", params=shape, window_tokens=31 if i % 2 else None)
    layers = tuple(layer(i) for i in range(layers))
    return kvdock.ModelSpec(name="m", architecture="M", layers=layers, context_length=512, dtype="bfloat16")

def budgets_of(ranks):
    return [(4 + 3 * rank) * MIB for rank in range(ranks)]

def shrunk_budgets_of(ranks):
    return [*(budget - MIB for budget in budgets_of(ranks)[:-1]), 2 * MIB]
"""
RANK = (
    COMMON
    + """
import datetime, json, sys
import torch
from torch import distributed

meet, me = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
distributed.init_process_group(
    "gloo", init_method=f"file://{meet}", rank=me, world_size=4, timeout=datetime.timedelta(seconds=60)
)
found = {}

def keep(name, work):
    try:
        found[name] = work()
    except kvdock.KVDockError as error:
        found[name] = f"{type(error).__name__}: {error}"

for ranks in (2, 3, 4):
    group = distributed.new_group(list(range(ranks)))
    if me >= ranks:
        keep(f"outside {ranks}", lambda: kvdock.plan(model_of(7), budget_bytes=MIB, options=OPTIONS, group=group))
        continue

    def plan(layers=7, budget=budgets_of(ranks)[me], options=OPTIONS, parallel=None):
        sizes = parallel or {"pp_size": ranks, "pp_rank": me}
        return kvdock.plan(model_of(layers), budget_bytes=budget, options=options, parallel=sizes, group=group)

    last = me == ranks - 1
    made = plan()
    found[f"plan {ranks}"] = made.to_json()
    built = kvdock.build(made, device="cpu", group=group)
    found[f"built {ranks}"] = built.allocated_bytes() == made.total_bytes
    keep(f"small {ranks}", lambda: plan(budget=1000 if last else 4 * MIB))
    keep(f"negative {ranks}", lambda: plan(budget=-1 if last else 4 * MIB))
    keep(f"misspelt {ranks}", lambda: plan(options={"page_syze": 1} if last else OPTIONS))
    keep(f"misplaced {ranks}", lambda: plan(parallel={"pp_size": ranks, "pp_rank": 99 if last else me}))
    keep(f"options {ranks}", lambda: plan(options={**OPTIONS, "page_size": 32} if last else OPTIONS))
    keep(f"sizes {ranks}", lambda: plan(parallel={"pp_size": ranks + last, "pp_rank": me}))
    keep(f"models {ranks}", lambda: plan(layers=8 if last else 7))
    keep(f"strict {ranks}", lambda: plan(options={**OPTIONS, "strict": True}))
    keep(f"replan {ranks}", lambda: made.replan(shrunk_budgets_of(ranks)[me], group=group).to_json())
    keep(f"capped {ranks}", lambda: made.replan(made.budget_bytes, cap_tokens=100 + me, group=group).spaces)
    keep(f"replan fails {ranks}", lambda: made.replan(-5 if last else 4 * MIB, group=group))
    keep(f"replan cap {ranks}", lambda: made.replan(4 * MIB, cap_tokens="9" if last else 99, group=group))
    keep(f"alone {ranks}", lambda: made.replan(4 * MIB))
    keep(f"again {ranks}", lambda: plan().to_json())
distributed.barrier()
distributed.destroy_process_group()
with open(f"{meet}.{me}.json", "w") as file:
    json.dump(found, file)
"""
)
names = {}
exec(COMMON, names)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what each of four processes found in groups of the first two, three and four of them."""
    meet = tmp_path_factory.mktemp("ranks") / "meet"
    commands = [[sys.executable, "-c", RANK, str(meet), str(rank)] for rank in range(4)]
    processes = [subprocess.Popen(command) for command in commands]
    try:
        ended = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert ended == [0] * 4
    return [json.loads(meet.with_name(f"meet.{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(params=[2, 3, 4])
def ranks(request):
    return request.param


def planned_here(ranks, budgets, options=None):
    return kvdock.plan_ranks(
        names["model_of"](7),
        budget_bytes=budgets,
        options=options or names["OPTIONS"],
        parallel={"pp_size": ranks},
        registry=core_only(),
    )


def test_each_process_plans_what_one_process_plans_for_its_rank(found, ranks):
    plans = planned_here(ranks, names["budgets_of"](ranks)).plans
    assert [found[rank][f"plan {ranks}"] for rank in range(ranks)] == [plan.to_json() for plan in plans]
    assert len({json.dumps(json.loads(plan.to_json())["spaces"]) for plan in plans}) == 1


def test_each_rank_builds_what_was_planned(found, ranks):
    assert [found[rank][f"built {ranks}"] for rank in range(ranks)] == [True] * ranks


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("small", "BudgetError: the smallest cache that serves one request"),
        ("negative", "PlanError: budget_bytes=-1 is no number of bytes"),
        ("misspelt", "PlanError: no option is called 'page_syze'"),
        ("misplaced", "PlanError: pp_rank=99 is no rank of"),
        ("replan fails", "PlanError: budget_bytes=-5 is no number of bytes"),
        ("replan cap", "PlanError: cap_tokens='9' is no count"),
    ],
)
def test_a_rank_that_fails_is_named_on_all_others(found, ranks, failure, message):
    told = [found[rank][f"{failure} {ranks}"] for rank in range(ranks)]
    assert told[-1].startswith(message)
    others = f"PlanError: rank {ranks - 1} cannot be planned, so no rank is; its own message says why"
    assert told[:-1] == [others] * (ranks - 1)


@pytest.mark.parametrize("differs", ["options", "sizes", "models"])
def test_ranks_that_plan_different_things_are_refused_on_all(found, ranks, differs):
    refusal = "PlanError: the ranks plan different models, options or parallel sizes; give all of them the same"
    assert [found[rank][f"{differs} {ranks}"] for rank in range(ranks)] == [refusal] * ranks


def test_strict_planning_refuses_uneven_memory_on_all(found, ranks):
    #
    for rank in range(ranks):
        told = found[rank][f"strict {ranks}"]
        assert told.startswith("PlanError: strict planning refuses warnings: memory is uneven: rank 0 has 4.00 MiB")


def test_ranks_size_again_together(found, ranks):
    expected = planned_here(ranks, names["shrunk_budgets_of"](ranks))
    again = [json.loads(found[rank][f"replan {ranks}"]) for rank in range(ranks)]
    assert expected.agreement.binding_rank == ranks - 1
    assert [plan["spaces"] for plan in again] == [expected.plans[0].spaces] * ranks
    assert [plan["agreement"]["rank"] for plan in again] == list(range(ranks))
    assert [plan["total_bytes"] for plan in again] == [plan.total_bytes for plan in expected.plans]


def test_the_smallest_cap_of_all_ranks_holds(found, ranks):
    # 100 tokens on rank 0 are six pages of 16
    sizes = [found[rank][f"capped {ranks}"] for rank in range(ranks)]
    assert [each["full"] for each in sizes] == [96] * ranks
    assert all(each == sizes[0] for each in sizes)


def test_one_rank_alone_cannot_size_again(found, ranks):
    for rank in range(ranks):
        assert found[rank][f"alone {ranks}"] == (
            f"PlanError: {ranks} ranks agreed on this plan, so one alone cannot size it again; "
            "give group=, the process group of them all"
        )


def test_after_every_failure_the_ranks_still_agree(found, ranks):
    for rank in range(ranks):
        assert found[rank][f"again {ranks}"] == found[rank][f"plan {ranks}"]


def test_a_process_outside_the_group_is_told(found):
    told = [found[3]["outside 2"], found[2]["outside 2"], found[3]["outside 3"]]
    assert told == [told[0]] * 3
    assert "this process is no member of group" in told[0]


def test_plan_files_of_processes_are_read_without_the_others(found, ranks):
    for rank in range(ranks):
        text = found[rank][f"plan {ranks}"]
        assert kvdock.CachePlan.from_json(text, core_only()).to_json() == text
