"""Deployments of several ranks, planned in one process: by hand, and the cases that people reported."""

import json

import kvdock
import msgspec
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import BudgetError, PlanError, UnsupportedCombination
from kvdock.model import ConvBlock, ConvParams, DSAParams, LayerSpec, MHAParams, ModelSpec, StateParams
from kvdock.startup import core_only

GIB, MIB = 2**30, 2**20
IDLE = DeviceInfo(device_type="cpu", name="idle", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)
CELL = 2048
"""Bytes of a token in a layer of 8 KV heads x 64 in 16 bits, keys and values."""
DRAFT = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 512,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}


def mha(heads=8, window=None):
    return LayerSpec(kind="mha", params=MHAParams(num_kv_heads=heads, head_dim=64, v_head_dim=64), window_tokens=window)


CONV = ConvParams(blocks=(ConvBlock(heads=4, head_dim=8),), kernel=4)
STATE = LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(4, 8, 8)))
STATE_BYTES = 3 * 32 * 2 + 4 * 8 * 8 * 4


def model(layers, context=1024):
    return ModelSpec(name="m", architecture="M", layers=tuple(layers), context_length=context, dtype="bfloat16")


def ranks(layers, context=1024, *, device=IDLE, registry=None, **fields):
    return kvdock.plan_ranks(model(layers, context), device=device, registry=registry or core_only(), **fields)


def speculative(draft, **options):
    return {"speculative_algorithm": "EAGLE", "draft": draft, **options}


def heads_of(plan, worker):
    return {buffer.shape[1] for buffer in plan.buffers if buffer.is_kv and buffer.worker == worker}


def layers_of(plan):
    return {group.name: len(group.layers) for group in plan.groups}


def test_all_ranks_get_the_smallest_capacity_in_whole_pages():
    # memory for 100,032 tokens and for 99,970, pages of 64
    def nbytes(tokens):
        table, ring, offsets = 2 * (256 + 4) * 4, (tokens // 64) * 8, 64 * 8
        return CELL * (tokens + 64) + table + ring + offsets

    made = ranks(
        [mha()] * 2,
        256,
        budget_bytes=[nbytes(100_032), nbytes(99_970)],
        parallel={"pp_size": 2},
        options={"page_size": 64, "max_running_requests": 1},
    )
    assert [plan.spaces["full"] for plan in made.plans] == [99_968, 99_968]
    agreed = made.agreement
    assert (agreed.binding_rank, agreed.tokens, agreed.own_tokens, agreed.next_tokens) == (1, 99_968, 100_032, 100_032)
    # The first rank leaves a page, which the second has no room for, and the page's place in the ring of free pages.
    assert made.unused_bytes == (nbytes(100_032) - nbytes(99_968), 2 * CELL)
    assert made.binding is made.plans[1]
    assert [plan.bound for plan in made.plans] == ["rank 1", "budget"]


@pytest.mark.parametrize(
    ("pp_layers", "expected"),
    [(None, [7, 7, 7, 8, 8, 8, 8, 8]), ((8, 8, 8, 8, 8, 8, 8, 5), [8, 8, 8, 8, 8, 8, 8, 5])],
)
def test_stages_differ_by_a_layer_and_a_list_wins(pp_layers, expected):
    # 61 layers over 8 stages
    made = ranks([mha()] * 61, budget_bytes=GIB, parallel={"pp_size": 8, "pp_layers": pp_layers})
    assert [layers_of(plan)["full"] for plan in made.plans] == expected
    ids = [layer for plan in made.plans for layer in plan.groups[0].layers]
    assert ids == list(range(61))
    assert made.agreement.binding_rank == expected.index(8)


def test_uneven_stages_are_bound_by_the_one_with_the_most_layers():
    made = ranks(
        [mha()] * 12, budget_bytes=GIB, parallel={"pp_size": 3, "pp_layers": (6, 1, 5)}, options={"page_size": 16}
    )
    one, *others = (plan.agreement.own_tokens for plan in made.plans)
    assert made.agreement.binding_rank == 0
    assert one == made.plans[1].max_total_num_tokens == made.plans[2].max_total_num_tokens
    assert others[0] == pytest.approx(6 * one, rel=0.02)
    assert made.agreement.next_tokens == others[1] == pytest.approx(6 / 5 * one, rel=0.02)
    assert made.total_bytes == sum(plan.total_bytes for plan in made.plans)
    # Layers are uneven, memory is not.
    assert all(plan.warnings == () for plan in made.plans)


def test_a_draft_has_the_heads_of_its_own_parallel_size():
    # the target's attention runs on one rank (DP attention), its draft's 4 KV heads on both of tp 2
    made = ranks(
        [mha()] * 2,
        budget_bytes=GIB,
        parallel={"tp_size": 2, "dp_size": 2, "dp_attention": True},
        options=speculative({"model": {**DRAFT, "num_key_value_heads": 4}, "dp_attention": False}),
    )
    for plan in made.plans:
        assert (heads_of(plan, "target"), heads_of(plan, "draft")) == ({8}, {2})
        assert plan.bytes_per_token.kv == 2 * CELL + 2 * 64 * 2 * 2


def test_a_draft_may_run_with_a_tp_size_of_its_own():
    draft = {"model": DRAFT, "tp_size": 1}
    made = ranks([mha()] * 2, budget_bytes=GIB, parallel={"tp_size": 4}, options=speculative(draft))
    assert [(heads_of(plan, "target"), heads_of(plan, "draft")) for plan in made.plans] == [({2}, {8})] * 4
    beside = ranks([mha()] * 2, budget_bytes=GIB, parallel={"tp_size": 4}, options=speculative({"model": DRAFT}))
    assert heads_of(beside.plans[0], "draft") == {2}


def test_stages_of_another_mix_of_layers_agree():
    # 21 layers in turn full and sliding, two stages
    made = ranks([mha(window=127 if i % 2 else None) for i in range(21)], budget_bytes=GIB, parallel={"pp_size": 2})
    first, second = made.plans
    assert (layers_of(first), layers_of(second)) == ({"full": 5, "swa": 5}, {"full": 6, "swa": 5})
    assert first.spaces == second.spaces
    assert second.spaces["swa"] == second.spaces["full"] * 4 // 5


@pytest.mark.parametrize(("windows", "full"), [((127, None), [10, 11]), ((None, 127), [11, 10])])
def test_stages_of_ten_and_eleven_layers_of_a_kind(windows, full):
    # two stages of 21 layers in turn, 10 full + 11 sliding and 11 + 10
    made = ranks([mha(window=windows[i % 2]) for i in range(42)], budget_bytes=GIB, parallel={"pp_size": 2})
    assert [layers_of(plan) for plan in made.plans] == [{"full": count, "swa": 21 - count} for count in full]
    assert made.plans[0].spaces == made.plans[1].spaces
    # A sliding layer has four slots for five of a full one, so the stage with 11 full layers binds.
    assert made.agreement.binding_rank == full.index(11)


def test_a_stage_without_full_layers_builds_no_full_pool():
    #
    layers = [mha(window=127)] * 2 + [mha()] * 2
    made = ranks(layers, budget_bytes=GIB, parallel={"pp_size": 2})
    assert [layers_of(plan) for plan in made.plans] == [{"swa": 2}, {"full": 2}]
    assert made.plans[0].spaces == made.plans[1].spaces
    assert not [buffer for buffer in made.plans[0].buffers if buffer.is_kv and buffer.space == "full"]
    # Half the cells a token, four fifths of them: the stage of sliding layers has room to spare.
    assert made.agreement.binding_rank == 1


def test_a_stage_without_layers_numbers_the_same_slots():
    #
    made = ranks([mha()] * 4, budget_bytes=GIB, parallel={"pp_size": 2, "pp_layers": (4, 0)})
    full, empty = made.plans
    assert layers_of(empty) == {}
    assert empty.spaces == full.spaces
    assert empty.bytes_per_token.kv == 0
    assert empty.total_bytes == full.total_bytes - 4 * CELL * (full.spaces["full"] + 1)


MEMORY = [70 * GIB, 70 * GIB, 41 * GIB, 70 * GIB]


def test_uneven_memory_names_the_rank_and_what_it_costs():
    #
    made = ranks([mha()] * 4, budget_bytes=MEMORY, parallel={"pp_size": 4})
    alone = ranks([mha()], budget_bytes=41 * GIB).max_total_num_tokens
    others = ranks([mha()], budget_bytes=70 * GIB).max_total_num_tokens
    for plan in made.plans:
        assert plan.warnings == (
            "memory is uneven: rank 2 has 41.00 GiB (44,023,414,784 bytes) for the cache, another has 70.00 GiB "
            f"(75,161,927,680 bytes); rank 2 limits every rank to {alone:,} tokens, the others would hold {others:,}",
        )


def test_strict_planning_refuses_uneven_memory():
    #
    with pytest.raises(PlanError, match=r"strict.*rank 2 has 41\.00 GiB .* another has 70\.00 GiB"):
        ranks([mha()] * 4, budget_bytes=MEMORY, parallel={"pp_size": 4}, options={"strict": True})


def test_memory_that_follows_the_layers_is_not_called_uneven():
    # the rank with the most memory binds, since it has the most layers
    fields = {"parallel": {"pp_size": 2, "pp_layers": (1, 3)}, "options": {"strict": True, "max_running_requests": 4}}
    made = ranks([mha()] * 4, budget_bytes=[10 * GIB, 29 * GIB], **fields)
    assert made.agreement.binding_rank == 1
    assert made.plans[0].warnings == ()


def test_each_draft_worker_has_a_pool_that_is_paid_for():
    # D-02: 16 layers of 2048 B, and 8 workers of a layer of 2048 B
    draft = {"model": {**DRAFT, "num_hidden_layers": 8}, "workers": 8}
    made = ranks([mha()] * 16, budget_bytes=GIB, options=speculative(draft)).plans[0]
    assert made.bytes_per_token.kv == 24 * 2048 == 49_152
    assert layers_of(made) == {"full": 16, **{f"draft{i}.full": 1 for i in range(8)}}
    assert {buffer.shape[0] for buffer in made.buffers if buffer.is_kv} == {made.spaces["full"] + 1}
    drafts = [buffer.nbytes for buffer in made.buffers if buffer.worker != "target"]
    target = [buffer.nbytes for buffer in made.buffers if buffer.is_kv and buffer.worker == "target"]
    assert sum(drafts) * 16 == sum(target) * 8


def test_a_draft_is_paid_for_on_the_last_rank_alone():
    # D-03: 32 + 32 layers, a draft of one layer, 10 GiB a rank
    made = ranks(
        [mha()] * 64,
        budget_bytes=10 * GIB,
        parallel={"pp_size": 2},
        options=speculative(DRAFT, max_running_requests=1),
    )
    first, last = made.plans
    assert (layers_of(first), layers_of(last)) == ({"full": 32}, {"full": 32, "draft.full": 1})
    # 33 layers and 8 bytes of the free ring a token; a spare slot in each; two rows of the request table.
    table = 2 * (1024 + 4 + 1) * 4
    tokens = (10 * GIB - 33 * CELL - table) // (33 * CELL + 8)
    assert [plan.spaces["full"] for plan in made.plans] == [tokens, tokens]
    assert first.agreement.own_tokens == (10 * GIB - 32 * CELL - table) // (32 * CELL + 8)
    assert made.unused_bytes[0] == (10 * GIB - 32 * CELL - table) - tokens * (32 * CELL + 8)


@pytest.mark.parametrize(
    ("draft", "full", "sliding", "layers"),
    [
        # 8,589,934,592 B less tables of 1.1 MB hold 8,587,182,080 B of KV: the padding page of 64 is in both counts.
        (DRAFT, 185_536, 148_416, 13),
        (None, 194_112, 155_264, 12),
    ],
)
def test_a_draft_beside_a_hybrid_counts_for_every_token(draft, full, sliding, layers):
    # S-02
    options = {"page_size": 64, "max_running_requests": 1}
    made = ranks(
        [mha(window=127 if i % 2 else None) for i in range(24)],
        131_072,
        budget_bytes=8 * GIB,
        options=options if draft is None else speculative(draft, **options),
    ).plans[0]
    assert (made.spaces["full"] + 64, made.spaces["swa"] + 64) == (full, sliding)
    kv = sum(buffer.nbytes for buffer in made.buffers if buffer.is_kv)
    assert kv == CELL * (layers * full + 12 * sliding) <= made.total_bytes <= 8 * GIB
    assert draft is None or kv == 8_587_182_080


def test_workers_of_dp_attention_share_the_requests_and_add_up():
    # R-07 on a deployment
    attention = {"tp_size": 4, "dp_size": 2, "dp_attention": True}
    made = ranks([mha()] * 2, budget_bytes=GIB, parallel=attention, options={"max_running_requests": 64})
    assert (made.workers, len(made.plans)) == (2, 4)
    assert [plan.spaces["requests"] for plan in made.plans] == [32] * 4
    assert heads_of(made.plans[0], "target") == {4}
    assert made.max_running_requests == 64
    assert made.max_total_num_tokens == 2 * made.plans[0].max_total_num_tokens
    replicas = ranks([mha()] * 2, budget_bytes=GIB, parallel={"dp_size": 2}, options={"max_running_requests": 64})
    assert (len(replicas.plans), replicas.max_running_requests) == (1, 128)


def test_a_split_context_is_bound_by_the_ranks_with_the_most_layers():
    # 5 layers over 3 ranks are 2, 2 and 1, and a scratch layer on each
    dsa = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
    options = {"page_size": 4, "layer_split": True, "role": "prefill", "max_running_requests": 4}
    made = ranks([dsa] * 5, 256, budget_bytes=4 * MIB, options=options, parallel={"tp_size": 3, "cp_size": 3})
    cell = (128 + 8) * 2 + 128 + 4
    assert [plan.bytes_per_token.kv for plan in made.plans] == [2 * cell, 2 * cell, cell]
    assert [plan.parallel.cp_rank for plan in made.plans] == [0, 1, 2]
    assert len({plan.spaces["full"] for plan in made.plans}) == 1
    assert made.plans[2].agreement.own_tokens == pytest.approx(1.5 * made.agreement.tokens, rel=0.01)
    assert made.plans[2].unused_bytes > made.agreement.tokens * cell > 4000 > made.plans[0].unused_bytes


def test_the_rank_with_the_smallest_share_for_tables_limits_the_requests_of_all():
    # Rows of 4 · (131,072 + 4) bytes: 1/16 of 64 MiB holds 7, of 1 GiB 127; one of them is padding.
    made = ranks([mha()] * 2, 131_072, budget_bytes=[GIB, 64 * MIB], parallel={"pp_size": 2})
    assert [plan.spaces["requests"] for plan in made.plans] == [6, 6]
    alone = ranks([mha()], 131_072, budget_bytes=GIB)
    assert alone.max_running_requests == 126


def test_states_are_limited_by_the_ranks_that_keep_them():
    made = ranks(
        [STATE, STATE, mha(), mha()],
        budget_bytes=[MIB, 16 * MIB],
        parallel={"pp_size": 2},
        options={"request_table_share": 1.0},
    )
    slots = MIB * 9 // 19 // (2 * STATE_BYTES) - 1
    assert [plan.spaces["state"] for plan in made.plans] == [slots, slots]
    assert made.max_running_requests <= slots // 3
    assert made.plans[0].spaces == made.plans[1].spaces
    assert not [buffer for buffer in made.plans[1].buffers if buffer.space == "state" and buffer.is_kv]


def test_ranks_of_states_alone_number_the_requests_tokens():
    made = ranks([STATE] * 4, budget_bytes=MIB, parallel={"pp_size": 2}, options={"max_running_requests": 4})
    assert [plan.spaces for plan in made.plans] == [{"requests": 4, "state": 12}] * 2


def test_memory_is_told_by_weights_and_reserve_of_each_rank():
    device = msgspec.structs.replace(IDLE, total_bytes=GIB, free_before_load_bytes=GIB, free_bytes=GIB)
    made = ranks(
        [mha()] * 2,
        device=device,
        parallel={"pp_size": 2},
        weights_bytes=[100 * MIB, 300 * MIB],
        reserve_bytes=[MIB, 2 * MIB],
    )
    slack = GIB - GIB * 9 // 10
    assert [plan.budget_bytes for plan in made.plans] == [GIB - slack - 101 * MIB, GIB - slack - 302 * MIB]
    assert made.agreement.binding_rank == 1


@pytest.mark.parametrize("name", ["budget_bytes", "weights_bytes", "reserve_bytes", "device"])
def test_a_list_of_another_length_is_refused(name):
    values = [IDLE] * 3 if name == "device" else [GIB] * 3
    with pytest.raises(
        PlanError, match=rf"{name} lists 3 values, but the deployment has 4 ranks \(pp_size · tp_size\)"
    ):
        ranks([mha()] * 4, parallel={"pp_size": 2, "tp_size": 2}, **{"budget_bytes": None, name: values})


@pytest.mark.parametrize("place", ["pp_rank", "cp_rank"])
def test_a_place_is_not_for_all_ranks(place):
    with pytest.raises(PlanError, match="all ranks are planned, so none is named; leave them out"):
        ranks([mha()] * 4, budget_bytes=GIB, parallel={"pp_size": 2, "cp_size": 2, "tp_size": 2, place: 1})


def test_an_error_names_the_rank_and_keeps_its_numbers():
    with pytest.raises(BudgetError, match=r"^rank 2: the smallest cache that serves one request") as raised:
        ranks([mha()] * 4, budget_bytes=[GIB, GIB, 1000, GIB], parallel={"pp_size": 4})
    assert raised.value.budget_bytes == 1000
    made = ranks([mha()] * 4, budget_bytes=[GIB, GIB, raised.value.needed_bytes, GIB], parallel={"pp_size": 4})
    assert made.max_total_num_tokens == 2


def test_an_objection_names_the_rank_and_stays_an_objection():
    with pytest.raises(UnsupportedCombination, match=r"^rank 0: ") as raised:
        ranks([mha()], budget_bytes=GIB, options={"hisparse": True})
    assert raised.value.objections


def test_a_rank_that_fails_late_is_named():
    # The tokens agreed on are too few for the longest request; strict planning refuses them on the first rank.
    with pytest.raises(PlanError, match=r"^rank 0: strict planning refuses warnings: .*a request can have"):
        ranks(
            [mha()] * 2,
            131_072,
            budget_bytes=64 * MIB,
            parallel={"pp_size": 2},
            options={"strict": True},
        )


def test_ranks_whose_devices_page_differently_are_refused(mock_plugin):
    registry = core_only()
    pages = {"one": {"page_size": 16}, "two": {"page_size": 64}}
    registry.add(mock_plugin("both", tier="hardware", defaults=lambda query: pages[query.device.device_type]))
    devices = [msgspec.structs.replace(IDLE, device_type=name) for name in ("one", "two")]
    alike = ranks([mha()] * 2, device=devices[:1] * 2, registry=registry, budget_bytes=GIB, parallel={"pp_size": 2})
    assert alike.plans[0].options.values.page_size == 16
    with pytest.raises(PlanError, match="the ranks plan different models, options or parallel sizes"):
        ranks([mha()] * 2, device=devices, registry=registry, budget_bytes=GIB, parallel={"pp_size": 2})


def test_a_request_limit_that_one_rank_lowers_is_lowered_on_all_with_a_warning():
    made = ranks(
        [mha()] * 2,
        64,
        budget_bytes=[2 * MIB, 256 * MIB],
        parallel={"pp_size": 2},
        options={"max_running_requests": 600},
    )
    lowered = made.plans[0].max_running_requests
    assert 1 < lowered == made.plans[0].max_total_num_tokens // 2 < 600
    assert made.plans[1].max_running_requests == lowered
    expected = f"max_running_requests: 600 asked for, {lowered} fit on every rank"
    assert any(warning.startswith(expected) for warning in made.plans[1].warnings)


def agreed():
    return ranks(
        [mha(window=127 if i % 2 else None) for i in range(5)],
        budget_bytes=[8 * MIB, 24 * MIB],
        parallel={"pp_size": 2},
        options={"page_size": 16},
    ).plans


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plan_file_of_one_rank_is_read_without_the_others(rank):
    plan = agreed()[rank]
    read = kvdock.CachePlan.from_json(plan.to_json(), core_only())
    assert read.agreement == plan.agreement
    assert read.to_json() == plan.to_json()


def edited(plan, change):
    data = json.loads(plan.to_json())
    change(data["agreement"])
    return json.dumps(data)


EDITS = {
    "more tokens": lambda agreement: agreement["vectors"][2].__setitem__(0, agreement["tokens"] + 10**6),
    "fewer tokens": lambda agreement: agreement["vectors"][2].__setitem__(0, agreement["tokens"] - 16),
    "more requests": lambda agreement: agreement["vectors"][1].__setitem__(0, 10**6),
    "fewer requests": lambda agreement: agreement["vectors"][1].__setitem__(0, 1),
    "another digest": lambda agreement: agreement["vectors"][0].__setitem__(1, 1),
    "a vector less": lambda agreement: agreement["vectors"].pop(),
    "none": lambda agreement: agreement["vectors"].clear(),
    "a short vector": lambda agreement: agreement["vectors"][2].pop(),
    "a word": lambda agreement: agreement["vectors"][2].__setitem__(0, "many"),
    "tokens beside the vectors": lambda agreement: agreement.__setitem__("tokens", 16),
    "one rank": lambda agreement: agreement.__setitem__("ranks", 1),
    "another field": lambda agreement: agreement.__setitem__("rang", 1),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_edited_agreement_is_refused(rank, edit):
    text = edited(agreed()[rank], edit)
    with pytest.raises(PlanError):
        kvdock.CachePlan.from_json(text, core_only())


def test_a_plan_that_ranks_agreed_on_is_not_sized_again_alone():
    for plan in agreed():
        with pytest.raises(
            PlanError, match="2 ranks agreed on this plan, so one alone cannot size it again; give grou"
        ):
            plan.replan(4 * MIB)


def test_ranks_with_one_reading_of_the_memory_have_one_plan():
    # S-22: 8 ranks, one snapshot; nothing is subtracted or divided a second time
    made = ranks([mha()] * 4, budget_bytes=176 * GIB, parallel={"tp_size": 8})
    assert [plan.agreement.rank for plan in made.plans] == list(range(8))
    assert {plan.budget_bytes for plan in made.plans} == {176 * GIB}
    alone = ranks([mha(1)] * 4, budget_bytes=176 * GIB).plans[0]
    assert {plan.max_total_num_tokens for plan in made.plans} == {alone.max_total_num_tokens}


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"model": DRAFT, "wokers": 2}, "no draft field is called 'wokers'; did you mean 'workers'"),
        ({"model": DRAFT, "workers": 2}, "workers=2 cannot share the 1 layers of 'config' out evenly"),
        ({"model": DRAFT, "workers": 0}, "draft: workers=0 is outside 1"),
        ({"model": DRAFT, "tp_size": 3}, "8 KV heads do not split over 3 attention ranks"),
        ({"tp_size": 1}, "needs a draft model; give draft=path"),
    ],
)
def test_a_draft_that_cannot_be_planned_says_what_would_work(draft, message):
    with pytest.raises(PlanError, match=message):
        ranks([mha()] * 2, budget_bytes=GIB, options=speculative(draft))


def test_several_drafts_have_parallel_sizes_of_their_own():
    drafts = ({"model": DRAFT, "tp_size": 2}, DRAFT)
    plan = ranks([mha()] * 2, budget_bytes=GIB, parallel={"tp_size": 4}, options=speculative(drafts)).plans[0]
    assert (heads_of(plan, "draft0"), heads_of(plan, "draft1")) == ({4}, {2})


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_layer_of_another_stage_reads_is_given_to_every_stage(rank):
    whole, stage = model([mha(), STATE]), {"pp_size": 2, "pp_rank": rank}

    def planned(**options):
        return kvdock.plan(whole, device=IDLE, registry=core_only(), budget_bytes=GIB, parallel=stage, options=options)

    found = planned(state_dtype="bfloat16")
    types = {buffer.dtype for group in found.groups for buffer in group.buffers if buffer.name.startswith("temporal")}
    assert types == ({"bfloat16"} if rank else set())
    with pytest.raises(PlanError, match="nothing in this plan reads hisparse_top_k=8"):
        planned(state_dtype="bfloat16", hisparse_top_k=8)


def test_a_deployment_has_options_that_some_stages_have_no_layer_for():
    made = ranks([mha(), STATE], budget_bytes=GIB, parallel={"pp_size": 2}, options={"state_dtype": "bfloat16"})
    assert [plan.options.values.state_dtype for plan in made.plans] == ["bfloat16"] * 2
