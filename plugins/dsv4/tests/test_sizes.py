"""Spaces, bytes of each by hand, planned bytes against allocated ones, limits."""

import kvdock
import pytest
from kvdock.errors import BudgetError, PlanError, UnsupportedCombination

GIB40 = 40 * 2**30
ONLINE = {"dsv4": {"online_compress": True}}
SPECULATIVE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_topk": 1}


def per_slot(plan):
    """Bytes of KV per slot of each space, over all layers."""
    return {name: cost.kv for name, cost in plan.costs.per_slot.items() if cost.kv}


def test_slots_follow_the_rules(plan, flash):
    found = plan(flash, GIB40, max_running_requests=256)
    n = found.spaces["full"]
    assert found.max_total_num_tokens == n and n % 256 == 0
    assert found.spaces == {
        "requests": 256,
        "full": n,
        "swa": n // 10 // 256 * 256,
        "c4": n // 4,
        "c128": n // 128,
        "c4_state": n // 10 // 256 * 8,
        "c128_state": 256 * 128,
    }
    assert [found.outline.spaces[name].page_size for name in ("c4", "c128", "c4_state")] == [64, 2, 8]


def test_bytes_of_a_slot_are_those_of_the_sheet(plan, flash):
    """Pages are padded to whole rows of 576 bytes: 149,760 of 149,504, 37,440 of 37,376, and 1,728 of 1,168."""
    assert per_slot(plan(flash, GIB40, max_running_requests=256)) == {
        "swa": 43 * 149760 / 256,
        "c4": 21 * (37440 / 64 + 132),
        "c128": 20 * 1728 / 2,
        "c4_state": 21 * (2 * 2 * 512 * 4 + 2 * 2 * 128 * 4),
        "c128_state": 20 * 2 * 512 * 4,
    }


@pytest.mark.parametrize(
    ("options", "space", "nbytes"),
    [
        ({"plugin_options": {"dsv4": {"fp4_indexer": True}}}, "c4", 21 * (37440 / 64 + 64 + 4)),
        ({"index_dtype": "fp4"}, "c4", 21 * (37440 / 64 + 64 + 4)),
        ({"plugin_options": {"dsv4": {"state_dtype": "bf16"}}}, "c4_state", 21 * 2 * (2 * 2 * 512 + 2 * 2 * 128)),
        ({"state_dtype": "bfloat16"}, "c128_state", 20 * 2 * 512 * 2),
        ({"plugin_options": ONLINE}, "c128_state", 20 * 3 * 512 * 4),
    ],
)
def test_settings_change_what_they_name(plan, flash, options, space, nbytes):
    assert per_slot(plan(flash, GIB40, max_running_requests=256, **options))[space] == nbytes


def test_speculation_doubles_the_rings_and_adds_one_sliding_layer(plan, flash):
    found = plan(flash, GIB40, max_running_requests=64, **SPECULATIVE)
    pages = found.spaces["swa"] // 256
    assert (found.spaces["c4_state"], found.spaces["c128_state"]) == (pages * 16, 64 * 256)
    (draft,) = (group for group in found.groups if group.worker == "draft")
    assert (draft.name, draft.space, draft.layers) == ("draft.swa", "swa", (0,))
    assert [(b.shape, b.nbytes) for b in draft.buffers] == [((pages + 1, 256 * 584), (pages + 1) * 149760)]


def test_online_states_have_a_bank_after_each_draft_token(plan, flash):
    found = plan(flash, GIB40, max_running_requests=64, plugin_options=ONLINE, **SPECULATIVE)
    (states,) = (group.buffers[0] for group in found.groups if group.space == "c128_state")
    assert found.spaces["c128_state"] == 64
    assert states.shape == ((64 + 1 + 2) * (1 + 4), 3 * 512)  # 3 steps of one branch verify 4 tokens


def test_decode_workers_keep_states_of_requests_that_arrive(plan, flash):
    # G-04: twice the requests up to 32 of them, none beyond, and what is given outright
    def extra(requests, **options):
        found = plan(flash, GIB40, max_running_requests=requests, role="decode", **options)
        return found.spaces["c128_state"] // 128 - requests

    assert [extra(32), extra(33), extra(32, decode_extra_slots=10)] == [64, 0, 10]


def test_stages_number_their_slots_alike_and_own_their_layers(plan, flash):
    ranks = [plan(flash, GIB40, parallel={"pp_size": 2, "pp_rank": r}, max_running_requests=8) for r in (0, 1)]
    assert [set(rank.spaces) for rank in ranks] == [set(ranks[0].spaces)] * 2
    # G-06: layers go by their global ids
    layers = [[layer for g in rank.groups if g.name == "swa" for layer in g.layers] for rank in ranks]
    assert layers == [list(range(21)), list(range(21, 43))]


@pytest.mark.parametrize(
    "options",
    [
        {"index_dtype": "fp4", "state_dtype": "bfloat16"},
        {"plugin_options": {"dsv4": {"fp4_indexer": True, "state_dtype": "bfloat16"}}},
        {"role": "decode", "hisparse": True, "hisparse_top_k": 512, "host_budget_bytes": 2**40},
    ],
    ids=str,
)
def test_a_stage_without_compressed_layers_is_given_what_the_others_are(plan, flash, registry, options):
    # The first two layers have a window alone.
    stages = {"pp_size": 2, "pp_layers": (2, 41)}
    each = [plan(flash, GIB40, parallel={**stages, "pp_rank": r}, max_running_requests=8, **options) for r in (0, 1)]
    assert [{group.name.split(".")[0] for group in rank.groups} for rank in each] == [{"swa"}, {"swa", "c4", "c128"}]
    device = each[0].device
    given = {"max_running_requests": 8, **options}
    made = kvdock.plan_ranks(
        flash, device=device, parallel=stages, options=given, budget_bytes=GIB40, registry=registry
    )
    assert [dict(rank.spaces) for rank in made.plans] == [dict(made.plans[0].spaces)] * 2
    kept = {b.role: b for g in made.plans[1].groups for b in g.buffers}
    is_small = "hisparse" not in options
    assert kept["state"].dtype == ("bfloat16" if is_small else "float32")
    # A page of 64 keys: 64 bytes and 4 scales each, or 128 bytes and a float32 scale.
    assert kept["index"].shape[-1] == 64 * (64 + 4 if is_small else 128 + 4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"plugin_options": ONLINE},
        {"plugin_options": {"dsv4": {"fp4_indexer": True, "state_dtype": "bfloat16"}}},
        SPECULATIVE,
        SPECULATIVE | {"plugin_options": ONLINE},
        {"role": "decode"},
        {"role": "prefill"},
        {"role": "decode", "hisparse": True, "hisparse_top_k": 64},
        {"role": "decode", "hisparse": True, "hisparse_top_k": 64, "decode_extra_slots": 9},
        {"page_size": 128},
        {"page_size": 512},
    ],
    ids=str,
)
def test_planned_bytes_are_allocated_bytes(cache, options):
    pytest.importorskip("torch")
    found = cache(**options)
    assert found.allocated_bytes() == found.plan.total_bytes <= 2**23
    assert found.token_to_kv_pool.mem_usage == sum(
        buffer.nbytes for group in found.plan.groups for buffer in group.buffers if group.worker == "target"
    )  # P-04: every storage once


def test_one_more_page_would_not_fit(plan, flash):
    found = plan(flash, GIB40, max_running_requests=256)
    assert found.unused_bytes >= 0
    more = plan(flash, 2**42, max_running_requests=256, max_total_tokens=found.max_total_num_tokens + 256)
    assert more.total_bytes > GIB40


def test_a_cap_below_what_fits_holds_and_one_above_changes_nothing(plan, flash):
    # S-09
    most = plan(flash, GIB40, max_running_requests=64).max_total_num_tokens
    assert most > 1_048_576
    assert plan(flash, GIB40, max_running_requests=64, max_total_tokens=1_048_576).max_total_num_tokens == 1_048_576
    assert plan(flash, GIB40, max_running_requests=64, max_total_tokens=10 * most).max_total_num_tokens == most


def test_an_automatic_limit_keeps_states_of_requests_within_their_share(plan, flash):
    found = plan(flash, GIB40, request_table_share=1.0)
    states = sum(b.nbytes for g in found.groups if g.space == "c128_state" for b in g.buffers)
    assert GIB40 / 4 - 20 * 128 * 4096 < states <= GIB40 / 4
    # U-06: a limit holds
    assert plan(flash, GIB40, max_running_requests=1).max_running_requests == 1


def test_the_longest_request_comes_from_the_full_side(plan, flash):
    # G-05
    found = plan(flash, GIB40, role="prefill", max_running_requests=8, chunked_prefill_size=8192)
    assert found.max_request_tokens == found.max_length() == 1_048_576
    assert found.spaces["swa"] < 1_048_576


def test_the_page_of_the_user_wins_over_the_familys(plan, small):
    # L-15
    assert plan(small, max_running_requests=2).options.sources["page_size"] == "dsv4"
    found = plan(small, page_size=512, max_running_requests=2)
    assert (found.options.values.page_size, found.options.sources["page_size"]) == (512, "user")
    assert found.spaces["full"] % 512 == 0 and found.outline.spaces["c4"].page_size == 128


def test_a_small_budget_is_refused_with_one_that_works(plan, small):
    with pytest.raises(BudgetError) as error:
        plan(small, 2**16, max_running_requests=1)
    assert plan(small, error.value.needed_bytes, max_running_requests=1).max_total_num_tokens > 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"page_size": 192}, UnsupportedCombination, "page_size=192 does not divide into groups of 128 tokens"),
        ({"kv_cache_dtype": "bfloat16"}, PlanError, "cannot hold packed rows"),
        ({"hybrid_swa": "off"}, UnsupportedCombination, "hybrid_swa=off keeps every token in full"),
        ({"unified_memory": True}, UnsupportedCombination, "unified_memory"),
        (
            {"plugin_options": {"dsv4": {"online_compress": True, "state_dtype": "bf16"}}},
            UnsupportedCombination,
            "running sum in float32, not in bfloat16",
        ),
        (
            {"plugin_options": ONLINE, **SPECULATIVE, "speculative_topk": 2},
            UnsupportedCombination,
            "one chain of drafts, not speculative_algorithm=EAGLE with speculative_topk=2",
        ),
        (
            {"plugin_options": {"dsv4": {"online": True}}},
            PlanError,
            "no setting 'online'; did you mean 'online_compress'",
        ),
        ({"plugin_options": {"dsv4": {"state_dtype": "fp8"}}}, PlanError, "cannot hold compression states"),
        ({"plugin_options": {"dsv4": {"fp4_indexer": 3}}}, PlanError, "fp4_indexer"),
        (
            {"plugin_options": {"dsv4": {"fp4_indexer": True}}, "index_dtype": "fp8"},
            PlanError,
            "index_dtype=fp8 and plugin_options",
        ),
        ({"parallel": {"tp_size": 2, "dcp_size": 2}}, UnsupportedCombination, "dcp"),
        ({"page_major": True}, UnsupportedCombination, "page_major"),
    ],
)
def test_what_is_not_served_is_refused_with_advice(plan, small, options, error, message):
    with pytest.raises(error, match=message):
        plan(small, max_running_requests=2, **options)


def test_prefill_without_a_cache_is_refused(plan, small):
    with pytest.raises(UnsupportedCombination, match="compresses what its cache holds"):
        plan(small, prefill_only_disable_kv_cache=True, is_embedding=True, prefix_cache=False)


def test_settings_without_a_model_of_this_family_are_refused(plan):
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "torch_dtype": "bfloat16",
    }
    with pytest.raises(UnsupportedCombination, match=r"is for DeepSeek V4, and .* is none"):
        plan(llama, plugin_options=ONLINE)
    assert plan(llama).allocator_cls.plugin == "core"


def test_a_draft_of_this_family_needs_a_target_of_it(plan, small):
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "torch_dtype": "bfloat16",
    }
    with pytest.raises(PlanError, match="shares the sliding slots of its target"):
        plan(llama, draft=small, **SPECULATIVE)
    found = plan(small, draft=llama, max_running_requests=2, **SPECULATIVE)  # numbered in full slots
    assert [g.space for g in found.groups if g.worker == "draft"] == ["full"]


def test_plans_are_saved_and_read_again(plan, small, registry):
    found = plan(small, max_running_requests=2, plugin_options=ONLINE)
    again = kvdock.CachePlan.from_json(found.to_json(), registry=registry)
    assert (again.spaces, again.total_bytes) == (found.spaces, found.total_bytes)


def test_layouts_are_compared_without_their_sizes(plan, small):
    # G-01, G-02
    one, other = (plan(small, budget, max_running_requests=2) for budget in (2**23, 2**24))
    assert one.spaces != other.spaces
    assert kvdock.compatible(one, other) == ()
    narrow = plan(small, max_running_requests=2, plugin_options={"dsv4": {"fp4_indexer": True}})
    assert {d.layers for d in kvdock.compatible(one, narrow) if d.severity == "incompatible"} == {(1, 3)}


def test_online_states_of_other_drafts_are_no_layout_to_exchange(plan, small):
    """A request's running state has a row of its own and one for each draft token, which are sent together."""
    options = SPECULATIVE | {"max_running_requests": 2, "plugin_options": ONLINE}
    drafts = [plan(small, **options | {"speculative_num_draft_tokens": count}) for count in (3, 4)]
    assert kvdock.compatible(drafts[0], drafts[0]) == ()
    differing = {(d.a, d.b, d.layers) for d in kvdock.compatible(*drafts) if d.severity == "incompatible"}
    assert differing == {(4, 5, (2,))}
    assert len({kvdock.layout_fingerprint(side).digest for side in drafts}) == 2
