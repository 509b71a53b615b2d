"""Which layers share a space, and how many slots a space has."""

import msgspec
import pytest
from kvdock import demand
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.families import groups
from kvdock.layout import LayerGroup, Share, SizeRule
from kvdock.model import LayerSpec, MHAParams, MLAParams, ModelSpec
from kvdock.options import DEFAULTS, CacheOptions, Parallelism
from kvdock.queries import GroupQuery, StateQuery

DEVICE = DeviceInfo(device_type="cpu", name="test", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)
SHAPE = MHAParams(num_kv_heads=8, head_dim=64, v_head_dim=64)
FULL = LayerSpec(kind="mha", params=SHAPE)
SLIDING = LayerSpec(kind="mha", params=SHAPE, window_tokens=127)
NONE = LayerSpec(kind="none", params=SHAPE)


def spec(*layers, context_length=8192, **fields):
    values = {"name": "m", "architecture": "A", "dtype": "bfloat16"} | fields
    return ModelSpec(layers=layers, context_length=context_length, **values)


def resolved(**options):
    return CacheOptions(**(dict(DEFAULTS) | options))


def grouped(model, *, layers=None, parallel=None, target=None, worker="target", **options):
    own = range(len(model.layers)) if layers is None else layers
    query = GroupQuery(
        model=model,
        options=resolved(**options),
        parallel=parallel or Parallelism(),
        device=DEVICE,
        worker=worker,
        layers=tuple((index, model.layers[index]) for index in own),
        target=target or model,
    )
    return groups.group_layers(query)


def state_query(model, *, parallel=None, of=None, everywhere=None, **options):
    found = grouped(model, **options) if of is None else of
    return StateQuery(
        model=model,
        options=resolved(**options),
        parallel=parallel or Parallelism(),
        device=DEVICE,
        groups=found,
        all_groups=grouped(model, **options) if everywhere is None else everywhere,
    )


def declared(model, **fields):
    return groups.spaces(state_query(model, **fields))


def rank_bytes(found, parallel):
    """Bytes that a token takes on one rank in 16 bits, by group name."""
    return {
        group.name: sum(
            parallel.kv_heads_per_rank(layer.params.num_kv_heads)
            * (layer.params.head_dim + layer.params.v_head_dim)
            * 2
            for _, layer in group.layers
        )
        for group in found
    }


def ids(found):
    return {group.name: group.layer_ids for group in found}


@pytest.mark.parametrize(("tp", "nbytes"), [(1, 131_072), (8, 16_384), (16, 16_384)])
def test_a_rank_pays_for_its_own_heads_and_for_one_at_least(published, tp, nbytes):
    parallel = Parallelism(tp_size=tp)
    assert rank_bytes(grouped(published("llama-3.1-8b"), parallel=parallel), parallel) == {"full": nbytes}


def test_the_cell_of_a_rank_counts_sharded_heads():
    # 64 layers, 8 KV heads x 128, tp 4.
    parallel = Parallelism(tp_size=4)
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128))
    assert rank_bytes(grouped(spec(*[layer] * 64), parallel=parallel), parallel) == {"full": 65_536}


@pytest.mark.parametrize(("heads", "tp"), [(2, 4), (8, 16)])
def test_replicated_heads_keep_their_total(heads, tp):
    # one head a rank, and the model still has as many as it has.
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=heads, head_dim=64, v_head_dim=64))
    parallel = Parallelism(tp_size=tp)
    group = grouped(spec(layer), parallel=parallel)[0]
    assert parallel.kv_heads_per_rank(heads) == 1
    assert group.layers[0][1].params.num_kv_heads == heads


def test_heads_that_do_not_split_are_refused():
    with pytest.raises(PlanError, match="6 KV heads do not split over 4 attention ranks"):
        Parallelism(tp_size=4).kv_heads_per_rank(6)


def test_all_layers_of_one_kind_are_one_group():
    # S-24: 28 layers cost 28 times one layer, whatever the number of groups.
    found = grouped(spec(*[FULL] * 28))
    assert ids(found) == {"full": tuple(range(28))}
    assert rank_bytes(found, Parallelism()) == {"full": 28 * 8 * 128 * 2}


def test_layers_without_a_cache_are_left_out_and_the_others_keep_their_ids():
    # P-12: 27 layers, of which 7 have a cache.
    cached = [3, 7, 11, 15, 19, 23, 26]
    model = spec(*[FULL if index in cached else NONE for index in range(27)])
    assert ids(grouped(model)) == {"full": tuple(cached)}
    assert grouped(model)[0].layer_ids.index(26) == 6


def test_full_and_sliding_layers_have_spaces_of_their_own(published):
    found = grouped(published("gemma-4-style-hybrid"))
    assert [(group.name, group.space, len(group.layers)) for group in found] == [
        ("swa", "swa", 50),
        ("full", "full", 10),
    ]
    assert rank_bytes(found, Parallelism()) == {"swa": 50 * 16 * 512 * 2, "full": 10 * 4 * 1024 * 2}


def test_sliding_layers_can_be_kept_whole(published):
    assert [group.space for group in grouped(published("mistral-7b-v0.1"), hybrid_swa="off")] == ["full"]
    assert [group.space for group in grouped(published("mistral-7b-v0.1"), hybrid_swa="on")] == ["swa"]


def test_shapes_and_kinds_within_a_space_are_groups_of_their_own():
    wide = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=64, v_head_dim=64))
    latent = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=512, qk_rope_head_dim=64))
    found = grouped(spec(FULL, wide, latent, FULL))
    assert ids(found) == {"full": (0, 3), "full.1": (1,), "full.2": (2,)}
    assert {group.space for group in found} == {"full"}
    assert [group.kind for group in found] == ["mha", "mha", "mla"]


@pytest.mark.parametrize(
    ("context", "space"),
    [(511, "full"), (512, "full"), (513, "swa")],
)
def test_a_window_at_or_above_the_context_is_full_attention(llama, context, space):
    # S-15 (a): a window of 512 tokens, the token itself among them.
    model = llama(architectures=["MistralForCausalLM"], sliding_window=512)
    assert [group.space for group in grouped(model, context_length=context)] == [space]
    assert groups.FULL in declared(model, context_length=511)
    assert groups.SWA not in declared(model, context_length=511)


def test_shared_layers_are_listed_with_their_owners(llama):
    # S-14: 20 layers own KV, 15 read it.
    model = llama(
        architectures=["Gemma3nForCausalLM"], num_hidden_layers=35, sliding_window=512, num_kv_shared_layers=15
    )
    swa, full = grouped(model)
    assert (len(swa.layers), len(full.layers)) == (16, 4)
    assert full.shared == ((24, 19), (29, 19), (34, 19))
    assert swa.shared == tuple((index, 18) for index in range(20, 35) if (index + 1) % 5)


def test_sharing_across_pipeline_stages_is_refused():
    shares = msgspec.structs.replace(FULL, shares_kv_with=0)
    model = spec(FULL, FULL, shares)
    assert grouped(model, layers=[0, 1, 2])[0].shared == ((2, 0),)
    with pytest.raises(PlanError, match=r"layer 2 reads the KV of layer 0, .* another pipeline stage; give pp_layers"):
        grouped(model, layers=[1, 2])


def test_a_draft_slides_only_beside_a_target_that_slides():
    draft = spec(SLIDING, role="draft")
    plain, hybrid = spec(FULL), spec(FULL, SLIDING)
    assert [g.space for g in grouped(draft, target=plain, worker="draft")] == ["full"]
    assert [g.space for g in grouped(draft, target=hybrid, worker="draft")] == ["swa"]


def test_a_draft_with_a_short_context_follows_the_targets():
    draft = spec(SLIDING, role="draft", context_length=64)
    assert [g.space for g in grouped(draft, target=spec(FULL, SLIDING), worker="draft")] == ["swa"]


def test_plain_models_have_a_full_space_and_requests(published):
    found = declared(published("llama-3.1-8b"), page_size=16)
    assert sorted(found) == ["full", "requests"]
    full = found["full"]
    assert (full.page_size, full.window_tokens, full.issued_by) == (16, None, "allocator")
    assert full.rule == SizeRule(per_token=(1, 1), round_to=16, needs=16)


def test_a_request_needs_two_tokens(published):
    assert declared(published("llama-3.1-8b"))["full"].rule.needs == 2


def test_a_hybrids_sliding_space_follows_the_full_one_by_the_ratio(published):
    swa = declared(published("gpt-oss-20b"))["swa"]
    assert (swa.rule.of, swa.rule.per_token, swa.rule.round) == ("full", (4, 5), "down")
    assert swa.rule.at_most_of == (("full", (1, 1)),)
    assert swa.window_tokens == 127
    assert swa.rule.needs == 129  # more than window + page
    assert "swa_full_tokens_ratio" in swa.options


def test_the_ratio_is_the_decimal_that_was_written(published):
    assert declared(published("gpt-oss-20b"), swa_full_tokens_ratio=0.1)["swa"].rule.per_token == (1, 10)


def test_a_model_whose_layers_all_slide_has_no_full_space_and_no_ratio(published):
    found = declared(published("mistral-7b-v0.1"), page_size=16)
    assert sorted(found) == ["requests", "swa"]
    swa = found["swa"]
    assert (swa.rule.of, swa.rule.per_token, swa.rule.round_to) == ("tokens", (1, 1), 16)
    assert swa.rule.needs == 4112  # 4095 + 16 + 1; also the 257 pages under a window
    assert "swa_full_tokens_ratio" not in swa.options


def test_the_largest_window_in_use_is_the_spaces():
    short = msgspec.structs.replace(SLIDING, window_tokens=63)
    assert declared(spec(FULL, short, SLIDING))["swa"].window_tokens == 127


def test_windows_that_no_layer_uses_make_no_space(llama):
    # D-04: pattern [128, 32768] on one layer.
    found = declared(llama(num_hidden_layers=1, sliding_window=[128, 32768]))
    assert {name: space.window_tokens for name, space in found.items()} == {"requests": None, "swa": 127}


def test_ranks_that_own_one_kind_of_layer_number_slots_like_the_others():
    model = spec(FULL, SLIDING)
    first = grouped(model, layers=[0])
    assert [group.space for group in first] == ["full"]
    assert declared(model, of=first) == declared(model)
    assert declared(model, of=()) == declared(model)


def test_spaces_of_other_families_are_left_to_them():
    ring = LayerSpec(kind="ring", params=SHAPE)
    group = LayerGroup(name="ring", kind="ring", space="ring", layers=((0, ring),))
    assert sorted(declared(spec(ring), of=(group,), everywhere=(group,))) == ["requests"]


@pytest.mark.parametrize(
    ("window", "page", "pages"),
    [(11, 128, 2), (128, 256, 2), (128, 64, 3), (128, 1, 128), (1, 64, 1), (65, 64, 2), (66, 64, 3)],
)
def test_a_window_straddles_one_page_more_than_it_fills(window, page, pages):
    # the case's windows count the token itself.
    assert groups.window_pages(window - 1, page) == pages


def most_pages(window, page):
    """Count the pages under a window at every alignment."""
    return max(len({slot // page for slot in range(start, start + window)}) for start in range(page))


@pytest.mark.parametrize("page", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 65, 66, 130])
def test_the_pages_of_a_window_are_those_of_the_worst_alignment(window, page):
    assert groups.window_pages(window - 1, page) == most_pages(window, page)


@pytest.mark.parametrize(
    ("page", "chunk", "context", "needs"),
    [
        (1, None, 8192, 129),  # window + page + 1
        (64, None, 8192, 192),  # 127 + 64 + 1 = 192 = the three pages under a window
        (128, None, 8192, 256),  # exactly 256: window + page + 1 = 256, two pages
        (64, 1000, 8192, 192 + 1024),  # the window's pages and a chunk in whole pages
        (64, 100_000, 8192, 8192),  # a request is never longer than its context
    ],
)
def test_the_sliding_floor_serves_one_request(page, chunk, context, needs):
    model = spec(FULL, SLIDING, context_length=context)
    assert declared(model, page_size=page, chunked_prefill_size=chunk)["swa"].rule.needs == needs


CAPPED = {"page_size": 64, "max_running_requests": 64, "prefix_cache": False, "chunked_prefill_size": 8192}


def test_known_requests_without_a_prefix_cache_cap_the_sliding_slots(published):
    swa = declared(published("gpt-oss-20b"), **CAPPED)["swa"]
    # 127 + 128 until the next eviction + a page + the page of a step; two chunks in flight and a page.
    assert swa.rule.per_request == (127 + 128 + 64 + 64, 1)
    assert swa.rule.fixed == 2 * 8192 + 64
    assert swa.rule.per_request[0] * 64 + swa.rule.fixed == 40_960
    assert (swa.rule.per_token, swa.rule.round, swa.rule.round_to) == ((0, 1), "up", 64)
    assert swa.rule.at_most_of == (("full", (1, 1)),)
    assert "swa_full_tokens_ratio" not in swa.options


def test_speculation_widens_the_cap_by_its_tokens(published):
    speculation = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    swa = declared(published("gpt-oss-20b"), **CAPPED, **speculation)["swa"]
    assert swa.rule.per_request == (127 + 128 * 4 + 64 + 2 * 4, 1)
    assert swa.rule.per_request[0] * 64 + swa.rule.fixed == 61_952


def test_without_overlap_one_chunk_is_in_flight_and_steps_take_whole_pages(published):
    speculation = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    chain = declared(published("gpt-oss-20b"), **CAPPED, **speculation, overlap_schedule=False)["swa"].rule
    assert chain.fixed == 8192 + 64
    assert chain.per_request == (127 + 128 * 4 + 64 + 64, 1)
    tree = declared(published("gpt-oss-20b"), **CAPPED, **speculation, overlap_schedule=False, speculative_topk=2)[
        "swa"
    ].rule
    assert tree.per_request == (127 + 128 * 4 + 64 + 2 * (64 + 64), 1)  # each branch with a page more


@pytest.mark.parametrize(("extra", "rows"), [(None, 40), (128, 128), (0, 0)])
def test_a_decode_worker_caps_by_requests_that_arrive_and_not_by_chunks(published, extra, rows):
    options = {"page_size": 64, "max_running_requests": 20, "prefix_cache": False, "role": "decode"}
    swa = declared(published("gpt-oss-20b"), **options, decode_extra_slots=extra)["swa"]
    assert swa.rule.fixed == (127 + 64) * rows


@pytest.mark.parametrize(
    "change", [{"prefix_cache": True}, {"max_running_requests": None}, {"chunked_prefill_size": None}]
)
def test_the_cap_needs_requests_no_prefix_cache_and_chunks(published, change):
    assert declared(published("gpt-oss-20b"), **(CAPPED | change))["swa"].rule.per_token == (4, 5)


def test_a_model_without_full_layers_has_no_cap(published):
    assert declared(published("mistral-7b-v0.1"), **CAPPED)["swa"].rule.per_token == (1, 1)


def test_the_automatic_request_limit_follows_the_tokens(published):
    requests = declared(published("llama-3.1-8b"))["requests"]
    assert requests.rule == SizeRule(
        per_token=(512, 131072),
        at_least=2048,
        at_most=4096,
        at_most_of=(("tokens", (1, 2)),),
        shares=(
            Share(of_budget=(1, 16), counts="bookkeeping"),
            Share(of_budget=(1, 4), counts="kv"),
        ),
        needs=1,
    )
    assert (requests.issued_by, requests.page_size) == ("request_pool", 1)
    assert requests.options == ("context_length", "request_table_share", "request_state_share")


def test_a_given_request_limit_is_taken_outright(published):
    rule = declared(published("llama-3.1-8b"), max_running_requests=100)["requests"].rule
    assert rule == SizeRule(fixed=100, at_most_of=(("tokens", (1, 2)),), needs=1)


@pytest.mark.parametrize(("dp_attention", "limit"), [(True, 16), (False, 128)])
def test_the_request_limit_is_divided_under_dp_attention_alone(published, dp_attention, limit):
    # 128 requests, dp 8.
    parallel = Parallelism(tp_size=8, dp_size=8, dp_attention=dp_attention)
    found = declared(published("deepseek-v3"), parallel=parallel, max_running_requests=128)
    assert found["requests"].rule.fixed == limit


def test_a_request_limit_that_divides_to_nothing_names_both(published):
    parallel = Parallelism(tp_size=8, dp_size=8, dp_attention=True)
    with pytest.raises(
        PlanError, match=r"max_running_requests=6 over dp_size=8 .* give max_running_requests=8 or more"
    ):
        declared(published("deepseek-v3"), parallel=parallel, max_running_requests=6)


EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, 131_072 + 4),
        ({"context_length": 4096}, 4096 + 4),
        ({"page_size": 64}, 131_072 + 4),
        (EAGLE, 131_072 + 4 + 4),
        (EAGLE | {"page_size": 64}, 131_072 + 2 * 4 + 63),  # max(3 · 1, 4) = 4 slots a step
        (EAGLE | {"page_size": 64, "speculative_topk": 4}, 131_072 + 2 * 512 + 63),  # ceil(66/64)·64·4 = 512
        (EAGLE | {"page_size": 1, "speculative_topk": 4}, 131_072 + 4 + 4),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}, 131_072 + 4 + 8),
        ({"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}, 131_072 + 4 + 4),  # a chain: 3 steps + 1
        ({"speculative_num_draft_tokens": 8}, 131_072 + 4),  # no speculation
    ],
)
def test_a_request_row_has_room_for_its_context_and_its_drafts(published, options, columns):
    assert demand.request_columns(state_query(published("llama-3.1-8b"), **options)) == columns
