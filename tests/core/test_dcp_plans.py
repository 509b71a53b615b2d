"""Plans of ranks that share the tokens between them: sharded rows once, what every rank keeps whole as often as ranks."""

import kvdock
import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvdock.costs import slot_bytes, slots_held
from kvdock.deployment import place_of
from kvdock.device import DeviceInfo
from kvdock.errors import BudgetError, PlanError, UnsupportedCombination
from kvdock.layout import Buffer, SizeRule, Space, Unit
from kvdock.model import DSAParams, LayerSpec, MHAParams, MLAParams, ModelSpec
from kvdock.options import Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.startup import core_only
from kvdock.storages import bytes_of, fits_pages

DEVICE = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)
WIDE = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=1, head_dim=512, v_head_dim=512))  # 2048 B in bfloat16
HEADS = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=4))
WINDOW = msgspec.structs.replace(HEADS, window_tokens=7)
LATENT = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=16, qk_rope_head_dim=8))
SPARSE = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
KINDS = {"mha": HEADS, "mla": LATENT, "dsa": SPARSE}
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}


def model_of(*layers, role="target"):
    return ModelSpec(name=role, architecture="A", layers=layers, context_length=64, dtype="bfloat16", role=role)


def plan(*layers, draft=(), dcp=1, rank=0, tp=None, budget=2**22, **options):
    models = [model_of(*layers)] + ([model_of(*draft, role="draft")] if draft else [])
    given_options = {"page_size": 16, **(EAGLE if draft else {}), **options}
    if "max_running_requests" not in given_options:
        given_options["max_running_requests"] = 2
    parallel = Parallelism(tp_size=tp or 2 * dcp, dcp_size=dcp, dcp_rank=rank)
    return plan_from(tuple(models), DEVICE, make_options(given_options), parallel, core_only(), budget_bytes=budget)


def shapes(made):
    return {(buffer.worker, buffer.name): buffer.shape for buffer in made.buffers if buffer.is_kv}


# R-11
@pytest.mark.parametrize(("dcp", "expected"), [(4, 40_960), (2, 36_864), (1, 34_816)])
def test_a_drafts_rows_count_once_for_each_rank_that_shares_the_tokens(dcp, expected):
    made = plan(*[WIDE] * 16, draft=(WIDE,), dcp=dcp, tp=4, budget=2**26)
    assert made.bytes_per_token.kv == expected == 32_768 + dcp * 2_048


def test_draft_buffers_have_the_rows_of_all_ranks_and_the_targets_of_one():
    """96 slots a rank and a page of 16 for padding: 112 rows of the target, 448 of a draft on 4 ranks."""
    made = plan(HEADS, draft=(HEADS,), dcp=4, max_total_tokens=96)
    assert (made.spaces["full"], made.max_total_num_tokens) == (96, 4 * 96)
    assert shapes(made) == {
        ("target", "k"): (112, 1, 8),
        ("target", "v"): (112, 1, 4),
        ("draft", "k"): (448, 1, 8),
        ("draft", "v"): (448, 1, 4),
    }


def test_index_keys_count_once_for_each_rank_and_latent_rows_once():
    """A row of 136 bfloat16 columns is 272 bytes, an index key and its scale 132."""
    costs = {dcp: plan(SPARSE, SPARSE, dcp=dcp, index_dtype="fp8").bytes_per_token.kv for dcp in (1, 2, 4)}
    assert costs == {dcp: 2 * (272 + dcp * 132) for dcp in (1, 2, 4)}
    made = plan(SPARSE, dcp=4, max_total_tokens=96)
    assert shapes(made) == {("target", "kv"): (112, 1, 136), ("target", "index_k"): (7 * 4, 16 * 132)}


def test_latents_are_shared_by_any_ranks_that_divide_those_of_attention():
    for dcp in (1, 2, 3, 6):
        assert plan(LATENT, dcp=dcp, tp=6, max_total_tokens=64).bytes_per_token.kv == 48


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dcp", [2, 4])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("kind", KINDS)
def test_planned_bytes_are_allocated_bytes(kind, dtype, drafts, dcp, page_size):
    pytest.importorskip("torch")
    layer = KINDS[kind]
    draft = (layer,) if drafts else ()
    given_options = {"page_size": page_size, "kv_cache_dtype": dtype, "max_total_tokens": 160}
    made = plan(layer, layer, draft=draft, dcp=dcp, rank=dcp - 1, **given_options)
    cache = kvdock.build(made)
    assert cache.allocated_bytes() == made.total_bytes
    assert cache.token_to_kv_pool_allocator.size == made.max_total_num_tokens == dcp * made.spaces["full"] == dcp * 160
    for pool in cache.pools.values():
        assert all(
            info.nbytes == 160 // page_size * info.item_nbytes + info.item_nbytes for info in pool.buffer_infos()
        )


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    layers=st.integers(1, 4),
    drafts=st.integers(0, 2),
    dcp=st.sampled_from([1, 2, 4]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    budget=st.integers(2**14, 2**22),
)
def test_a_plan_is_never_over_its_budget_and_never_a_page_short(kind, layers, drafts, dcp, page_size, budget):
    layer = KINDS[kind]
    fields = {"draft": (layer,) * drafts, "dcp": dcp, "page_size": page_size, "max_running_requests": 1}
    try:
        made = plan(*(layer,) * layers, budget=budget, **fields)
    except BudgetError:
        assume(False)
    assert made.total_bytes <= budget
    assert made.bound == "budget"
    more = {**made.spaces, "full": made.spaces["full"] + page_size}
    assert sum(bytes_of(made.outline.buffers, made.outline.spaces, more)) > budget
    exact = plan(*(layer,) * layers, budget=made.total_bytes, **fields)
    assert exact.spaces == made.spaces


def test_a_plan_of_a_rank_survives_its_file():
    made = plan(HEADS, draft=(HEADS,), dcp=2, rank=1)
    loaded = kvdock.CachePlan.from_json(made.to_json(), core_only())
    assert loaded.parallel == made.parallel == Parallelism(tp_size=4, dcp_size=2, dcp_rank=1)
    assert loaded.buffers == made.buffers


def test_the_report_names_the_rank_and_what_it_keeps_of_all():
    text = plan(SPARSE, dcp=4, rank=3, max_total_tokens=96).explain()
    assert "attention over 8 ranks (tp 8), rank 3 of 4 that share the tokens" in text
    lines = text.splitlines()
    assert next(line for line in lines if "index_k" in line).endswith("the tokens of 4 ranks")
    assert not next(line for line in lines if "kv (latent)" in line).endswith("ranks")


@pytest.mark.parametrize(
    ("given_sizes", "message"),
    [
        ({"tp_size": 4, "dcp_size": 2, "dcp_rank": 2}, r"dcp_rank=2 is no rank of 2; give 0 … 1"),
        ({"dcp_rank": 1}, r"dcp_rank=1 is no rank of 1"),
        (
            {"tp_size": 6, "dcp_size": 4},
            r"dcp_size=4 does not divide the 6 attention ranks \(tp_size=6\); dcp_size=2 does",
        ),
        (
            {"tp_size": 8, "dp_size": 4, "dp_attention": True, "dcp_size": 4},
            r"does not divide the 2 attention ranks \(tp_size=8\); dcp_size=2 does, and with 4 a tp_size that is a multiple of 16",
        ),
    ],
)
def test_ranks_that_cannot_share_tokens_are_refused(given_sizes, message):
    with pytest.raises(PlanError, match=message):
        Parallelism(**given_sizes)


def test_ranks_with_other_heads_do_not_share_tokens():
    """2 heads on 4 ranks are held by 2 each: 1 or 2 ranks may share tokens; on 8 ranks 4 may."""
    message = (
        r"dcp_size=4 shares tokens between ranks that hold the same KV heads, but 2 heads over 4 attention ranks are held "
        r"by 2 each; give dcp_size=1 or 2, or tp_size=8"
    )
    with pytest.raises(UnsupportedCombination, match=message):
        plan(HEADS, dcp=4, tp=4)
    with pytest.raises(UnsupportedCombination, match="held by 3 each; give dcp_size=1 or 3, or tp_size=4"):
        plan(HEADS, dcp=2, tp=6)  # ranks 2 and 3 would share tokens and hold different heads
    assert plan(HEADS, dcp=2, tp=4).parallel.dcp_size == 2
    assert plan(HEADS, dcp=4, tp=8).parallel.dcp_size == 4


def test_heads_of_several_counts_need_ranks_that_fit_all():
    """On 4 ranks 1 head is held by 4 and 4 heads by 1 each, which 2 ranks cannot share."""
    one, four = (
        LayerSpec(kind="mha", params=MHAParams(num_kv_heads=heads, head_dim=8, v_head_dim=8)) for heads in (1, 4)
    )
    with pytest.raises(
        UnsupportedCombination, match="4 heads over 4 attention ranks are held by 1 each; give dcp_size=1"
    ):
        plan(one, four, dcp=2, tp=4)
    assert plan(one, four, dcp=2, tp=8).parallel.dcp_size == 2


@pytest.mark.parametrize("layers", [(HEADS, WINDOW), (WINDOW,)])
def test_sliding_slots_are_not_shared_out(layers):
    with pytest.raises(UnsupportedCombination, match=r"tokens of sliding layers.*give dcp_size=1, or hybrid_swa=off"):
        plan(*layers, dcp=2)
    assert set(plan(*layers, dcp=2, hybrid_swa="off").spaces) == {"full", "requests"}


def test_block_formats_do_not_share_tokens():
    with pytest.raises(UnsupportedCombination, match="BlockMLAPool lacks dcp"):
        plan(LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=32, qk_rope_head_dim=16)), dcp=2, kv_cache_dtype="fp4")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 4, "dcp_size": 2}, [0, 1, 0, 1]),
        ({"tp_size": 4, "dcp_size": 4}, [0, 1, 2, 3]),
        ({"tp_size": 4, "pp_size": 2, "dcp_size": 2}, [0, 1] * 4),
        ({"tp_size": 8, "dp_size": 2, "dp_attention": True, "dcp_size": 4}, [0, 1, 2, 3] * 2),
        ({"tp_size": 12, "cp_size": 2, "dcp_size": 3}, [0, 1, 2] * 4),
        ({"tp_size": 3}, [0, 0, 0]),
    ],
)
def test_neighbours_among_the_attention_ranks_share_tokens(sizes, expected):
    parallel = Parallelism(**sizes)
    found = [place_of(parallel, rank).dcp_rank for rank in range(parallel.tp_size * parallel.pp_size)]
    assert found == expected


def test_all_ranks_of_a_deployment_number_the_same_tokens():
    made = kvdock.plan_ranks(
        model_of(HEADS, HEADS, HEADS, HEADS),
        options={"page_size": 16, "max_running_requests": 2},
        parallel={"tp_size": 4, "pp_size": 2, "pp_layers": (1, 3), "dcp_size": 2},
        budget_bytes=2**18,
        registry=core_only(),
    )
    assert [found.parallel.dcp_rank for found in made.plans] == [0, 1] * 4
    assert len({found.max_total_num_tokens for found in made.plans}) == 1
    assert made.max_total_num_tokens == 2 * made.plans[0].spaces["full"]
    assert made.plans[4].parallel.pp_rank == 1 and made.agreement.binding_rank >= 4
    alone = plan(HEADS, HEADS, HEADS, dcp=2, budget=2**18)
    assert alone.spaces == made.plans[0].spaces


def test_a_deployment_names_no_rank_of_those_that_share_tokens():
    with pytest.raises(PlanError, match="dcp_rank=1: all ranks are planned, so none is named"):
        kvdock.plan_ranks(model_of(LATENT), parallel={"tp_size": 2, "dcp_size": 2, "dcp_rank": 1}, budget_bytes=2**20)


def test_a_wide_buffer_has_as_many_rows_for_each_unit():
    space = Space(name="full", rule=SizeRule(), page_size=4)
    slots = Buffer(name="k", role="key", space="full", shape=(3,), dtype="uint8", guard=4, layers=(0, 1), widen=2)
    pages = Buffer(name="i", role="index", space="full", unit=Unit.PAGE, shape=(12,), dtype="uint8", widen=2)
    assert (slots.rows(8), pages.rows(2)) == (24, 6)
    assert msgspec.structs.replace(slots, round_rows_to=7).rows(8) == 28
    assert slot_bytes(slots, {"full": space}) == 2 * 3 * 2
    assert slot_bytes(pages, {"full": space}) == 2 * 12 / 4
    assert not fits_pages(slots, space)
    assert fits_pages(msgspec.structs.replace(slots, widen=1), space)
    with pytest.raises(PlanError, match="widen=0 is not positive"):
        msgspec.structs.replace(slots, widen=0)


@pytest.mark.parametrize(("length", "expected"), [(1, 4), (8, 4), (9, 8), (16, 8), (17, 12)])
def test_a_request_holds_its_share_of_pages_on_each_rank(length, expected):
    """Two ranks in pages of 4: a page of the numbering holds 8 tokens."""
    spaces = {"full": Space(name="full", rule=SizeRule(per_token=(1, 1)), page_size=4)}
    assert slots_held(spaces, length, 3, ranks=2) == {"full": 3 * expected}
