"""Two sides that hand KV to each other: what they must agree on, what they need not, and every difference of two plans."""

import subprocess
import sys

import kvdock
import msgspec
import pytest
from kvdock import compatible, diff, layout_fingerprint
from kvdock.allocators.window import swa_tail_tokens
from kvdock.builtin import BUILTINS
from kvdock.compat import Fingerprint
from kvdock.differences import Difference, render_lines
from kvdock.errors import PlanError
from kvdock.model import ConvBlock, ConvParams, LayerSpec, MHAParams, MLAParams, ModelSpec, NoParams, StateParams
from kvdock.plugins.loading import Registry
from kvdock.pools import MHAPool
from kvdock.testing.mocks import mock_plugin

HEADS = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=64, v_head_dim=32))
WINDOW = LayerSpec(kind="mha", params=HEADS.params, window_tokens=128)
LATENT = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=512, qk_rope_head_dim=64))
SPARSE = "tests/models/deepseek-v3.2.json"
CONV = ConvParams(blocks=(ConvBlock(heads=4, head_dim=8),), kernel=4)
STATE = LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(4, 8, 8)))
NONE = LayerSpec(kind="none", params=NoParams())


def plan(*layers, context=4096, budget=2**28, registry=None, parallel=None, **options):
    model = ModelSpec(name="m", architecture="A", layers=layers, context_length=context, dtype="bfloat16")
    if STATE in layers:
        options = {"max_running_requests": 2, **options}
    given = {"page_size": 16, **options}
    return kvdock.plan(model, budget_bytes=budget, options=given, parallel=parallel, registry=registry)


def found(a, b):
    """Name, values, layers and severity of each difference, in order."""
    return [(d.name, d.a, d.b, d.layers, d.severity) for d in compatible(a, b)]


BAD = "incompatible"
BOTH = (0, 1)


def test_two_plans_of_the_same_layout_fit():
    a, b = plan(HEADS, WINDOW), plan(HEADS, WINDOW)
    assert compatible(a, b) == ()
    assert layout_fingerprint(a) == layout_fingerprint(b)


# G-01
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"page_size": 64}, [("page_size", 16, 64, BOTH, BAD)]),
        (
            {"kv_cache_dtype": "fp8_e4m3"},
            [(f"{role}.dtype", "bfloat16", "float8_e4m3fn", BOTH, BAD) for role in ("key", "value")],
        ),
        ({"page_major": True}, [("arrangement", "layer-major", "page-major", BOTH, BAD)]),
        ({"hybrid_swa": "off"}, [("carries", "tail", "whole", (1,), BAD)]),
        ({"parallel": {"tp_size": 2}}, [("heads_per_rank", 8, 4, BOTH, "resplit")]),
    ],
    ids=["page size", "KV dtype", "layout", "window support", "heads per rank"],
)
def test_a_mismatch_is_listed_from_both_sides(options, expected):
    a, b = plan(HEADS, WINDOW), plan(HEADS, WINDOW, **options)
    assert found(a, b) == expected
    assert found(b, a) == [(name, right, left, *rest) for name, left, right, *rest in expected]
    assert layout_fingerprint(a).digest != layout_fingerprint(b).digest


def test_every_mismatch_is_listed_at_once():
    # G-01
    a = plan(HEADS, WINDOW)
    b = plan(HEADS, WINDOW, page_size=64, kv_cache_dtype="fp8_e4m3", hybrid_swa="off", parallel={"tp_size": 2})
    names = ["page_size", "carries", "heads_per_rank", "key.dtype", "value.dtype"]
    assert [d.name for d in compatible(a, b)] == names


def test_states_are_not_split_anew():
    # G-01: 4 heads of 8 channels, 3 inputs kept; a temporal state of 4 heads of 8 times 8
    a, b = plan(STATE, HEADS), plan(STATE, HEADS, parallel={"tp_size": 2})
    assert found(a, b) == [
        ("attn_tp_size", 1, 2, (0,), BAD),
        ("heads_per_rank", 8, 4, (1,), "resplit"),
        ("conv.shape", (32, 3), (16, 3), (0,), BAD),
        ("temporal.shape", (4, 8, 8), (2, 8, 8), (0,), BAD),
    ]


def test_states_that_one_side_lacks_are_listed():
    # G-01
    assert found(plan(STATE, HEADS), plan(NONE, HEADS)) == [
        ("conv", "bfloat16 [32, 3] a slot", None, (0,), BAD),
        ("temporal", "float32 [4, 8, 8] a slot", None, (0,), BAD),
    ]


def test_a_state_of_another_type_is_listed():
    # G-01
    a, b = plan(STATE, HEADS), plan(STATE, HEADS, state_dtype="bfloat16")
    assert found(a, b) == [("temporal.dtype", "float32", "bfloat16", (0,), BAD)]
    assert "state_dtype" in compatible(a, b)[0].change


@pytest.mark.parametrize("layers", [(HEADS, WINDOW), (STATE, HEADS), (LATENT,)], ids=["sliding", "states", "latent"])
def test_context_and_limits_and_roles_are_each_sides_own(layers):
    # G-01: a context length that differs is no difference
    a = plan(*layers, role="prefill", chunked_prefill_size=512, max_running_requests=4)
    b = plan(*layers, role="decode", context_length=1024, max_running_requests=2, decode_extra_slots=3)
    assert compatible(a, b) == ()
    assert layout_fingerprint(a).digest == layout_fingerprint(b).digest


def test_pool_sizes_are_each_sides_own():
    # G-02: 459 and 376 pages
    a, b = (plan(HEADS, WINDOW, max_total_tokens=pages * 16) for pages in (459, 376))
    assert [p.spaces["full"] // 16 for p in (a, b)] == [459, 376]
    assert compatible(a, b) == ()
    assert layout_fingerprint(a).digest == layout_fingerprint(b).digest


@pytest.mark.parametrize(
    ("length", "window", "page", "expected"),
    [(1000, 128, 64, 168), (100, 128, 64, 100), (128, 128, 64, 128), (129, 128, 64, 129), (1024, 128, 256, 256)],
)
def test_a_fingerprint_holds_what_the_tail_of_a_window_follows_from(length, window, page, expected):
    # G-03
    layer = msgspec.structs.replace(WINDOW, window_tokens=window)
    full, sliding = (
        entry for entry in layout_fingerprint(plan(HEADS, layer, page_size=page)).buffers if entry.role == "key"
    )
    assert (full.carries, full.window_tokens) == ("whole", None)
    assert (sliding.carries, sliding.window_tokens, sliding.page_size) == ("tail", window, page)
    assert swa_tail_tokens(length, sliding.window_tokens, sliding.page_size) == expected


def test_windows_of_other_lengths_are_listed():
    # G-01
    other = msgspec.structs.replace(WINDOW, window_tokens=256)
    assert found(plan(HEADS, WINDOW), plan(HEADS, other)) == [("window_tokens", 128, 256, (1,), BAD)]


@pytest.mark.parametrize(("limit", "given", "extra"), [(32, None, 64), (33, None, 0), (32, 10, 10)])
def test_extra_rows_are_in_the_plan_and_in_its_bytes(limit, given, extra):
    # G-04: a row has 1024 + 4 columns of four bytes; one row is padding
    made = plan(
        HEADS, context=1024, role="decode", max_running_requests=limit, decode_extra_slots=given, max_total_tokens=4096
    )
    (table,) = (buffer for buffer in made.buffers if buffer.name == "req_to_token")
    assert table.shape == (1 + limit + extra, 1028)
    assert table.nbytes == (1 + limit + extra) * 1028 * 4
    assert made.max_running_requests == limit


def test_the_full_side_bounds_a_request_of_a_prefill_worker():
    # G-05: full 1,000,000 and sliding 100,000; a prompt goes through the sliding side chunk by chunk
    made = plan(
        HEADS,
        WINDOW,
        context=1_500_000,
        budget=2**33,
        page_size=1,
        role="prefill",
        max_total_tokens=1_000_000,
        swa_full_tokens_ratio=0.1,
        chunked_prefill_size=8192,
    )
    assert (made.spaces["full"], made.spaces["swa"]) == (1_000_000, 100_000)
    assert made.max_request_tokens == 1_000_000
    assert made.max_length() == 1_000_000
    # the window, the token itself and a chunk are what one request needs
    assert made.outline.spaces["swa"].rule.needs == 128 + 1 + 8192


def stages(layers, count, **options):
    return [plan(*layers, parallel={"pp_size": count, "pp_rank": rank}, **options) for rank in range(count)]


@pytest.mark.parametrize("skipped", [NONE, STATE], ids=["skipped", "states"])
def test_stages_pair_with_a_whole_model_by_global_layer(skipped):
    # G-06: stages hold layers 0-15 and 16-31, the other side 0-31; a hybrid with skipped layers
    layers = [(HEADS, skipped, WINDOW, skipped)[layer % 4] for layer in range(32)]
    two, whole = stages(layers, 2), plan(*layers)
    assert compatible(two, whole) == compatible(whole, two[::-1]) == ()
    assert layout_fingerprint(two).digest == layout_fingerprint(whole).digest
    assert compatible(two, stages(layers, 4)) == ()
    keys = {entry.layer for entry in layout_fingerprint(two[1:]).buffers if entry.role == "key"}
    assert keys == {layer for layer in range(16, 32) if layer % 2 == 0}


def test_a_stage_alone_lacks_the_layers_of_the_others():
    # G-06
    layers = [HEADS] * 32
    first = stages(layers, 2)[:1]
    assert found(first, plan(*layers)) == [
        ("key", None, "bfloat16 [8, 64] a slot", tuple(range(16, 32)), BAD),
        ("value", None, "bfloat16 [8, 32] a slot", tuple(range(16, 32)), BAD),
    ]
    assert "the plans of all pipeline stages" in compatible(first, plan(*layers))[0].change


def test_a_difference_of_one_stage_names_its_layers():
    first, second = stages([HEADS] * 4, 2)
    coarse = stages([HEADS] * 4, 2, page_size=64)[1]
    assert found([first, coarse], [first, second]) == [("page_size", 64, 16, (2, 3), BAD)]


def test_two_plans_of_one_layer_are_no_side():
    with pytest.raises(PlanError, match=r"layer 0 has its key in two of the 2 plans of one side; give one plan for"):
        layout_fingerprint([plan(HEADS), plan(HEADS)])


def test_stages_split_tokens_over_ranks_alike():
    one, two = stages([HEADS] * 2, 2)
    other = plan(HEADS, HEADS, parallel={"pp_size": 2, "pp_rank": 1, "tp_size": 16, "dcp_size": 2})
    with pytest.raises(PlanError, match="the plans of one side have dcp_size 1 and 2"):
        layout_fingerprint([one, other])
    assert compatible([one, two], [one, two]) == ()


@pytest.mark.parametrize("side", [(), [], None, "plan.json", [1]], ids=str)
def test_what_is_no_side_is_refused(side):
    with pytest.raises(PlanError, match="is no side of a transfer; give a plan, a list of the plans of all pipeline"):
        compatible(plan(HEADS), side)


class SharesTokens(MHAPool):
    """Keeps every other token, as its kind does with decode-context parallelism."""

    features = MHAPool.features | {"dcp"}


def dcp_plan(*layers, parallel):
    registry = Registry()
    for name, builtin in BUILTINS:
        registry.add(builtin, name=name)
    registry.add(mock_plugin("sharing", "hardware", pool=lambda query: SharesTokens if query.group else None))
    return plan(*layers, parallel=parallel, registry=registry)


def test_ranks_that_share_tokens_are_part_of_the_layout():
    a, b = (plan(HEADS, parallel={"tp_size": 16, "dcp_size": dcp}) for dcp in (1, 2))
    assert found(a, b) == [("dcp_size", 1, 2, (), BAD)]


def test_latents_are_whole_on_every_rank():
    assert compatible(plan(LATENT), plan(LATENT, parallel={"tp_size": 8})) == ()


def test_heads_that_ranks_have_copies_of_are_told_by_the_ranks():
    a, b = (plan(HEADS, parallel={"tp_size": size}) for size in (8, 16))
    assert found(a, b) == [("attn_tp_size", 8, 16, (0,), "resplit")]


def test_heads_of_another_model_are_no_matter_of_splitting():
    other = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=4, head_dim=64, v_head_dim=32))
    assert found(plan(HEADS), plan(other)) == [("kv_heads", 8, 4, (0,), BAD)]


def test_scales_are_part_of_the_layout():
    names = [name for name, *_ in found(plan(HEADS), plan(HEADS, kv_cache_dtype="fp4"))]
    assert names == ["key.dtype", "value.dtype", "key.shape", "value.shape", "k_scale", "v_scale"]


def test_index_keys_are_part_of_the_layout():
    # 64 tokens a page: 128 bytes and a scale of 4 each, or 64 bytes and 4 scales of 1
    a, b = (
        kvdock.plan(SPARSE, budget_bytes=2**32, options={"page_size": 64, "index_dtype": dtype})
        for dtype in ("fp8", "fp4")
    )
    layers = tuple(range(61))
    assert found(a, b) == [
        ("index.dtype", "float8_e4m3fn", "uint8", layers, BAD),
        ("index.shape", (64 * 132,), (64 * 68,), layers, BAD),
    ]


def test_a_host_tier_is_a_sides_own():
    a = kvdock.plan(SPARSE, budget_bytes=2**34, options={"page_size": 64})
    tiered = {"page_size": 64, "hisparse": True, "role": "decode", "max_running_requests": 2}
    b = kvdock.plan(SPARSE, budget_bytes=2**34, options={**tiered, "host_budget_bytes": 2**40})
    assert "kv_host" in {buffer.name for buffer in b.buffers}
    assert compatible(a, b) == ()


def test_the_kv_of_drafts_is_exchanged_as_well():
    drafting = {"page_size": 64, "speculative_algorithm": "NEXTN", "speculative_num_steps": 1}
    a, b = (kvdock.plan(SPARSE, budget_bytes=2**34, options=options) for options in (drafting, {"page_size": 64}))
    differences = compatible(a, b)
    assert {d.worker for d in differences} == {"draft"}
    assert {d.b for d in differences} == {None}
    assert all("speculative_algorithm" in d.change for d in differences)
    assert render_lines(differences)[0].startswith("draft: ")


def test_fingerprints_travel_as_json_and_compare_like_their_plans():
    a, b = plan(HEADS, STATE, WINDOW), plan(HEADS, STATE, WINDOW, page_size=64)
    sent = msgspec.json.decode(msgspec.json.encode(layout_fingerprint(a)), type=Fingerprint)
    assert sent.digest == layout_fingerprint(a).digest
    assert len(sent.digest) == 64
    assert compatible(sent, a) == ()
    assert compatible(sent, b) == compatible(a, b)


def test_a_fingerprint_of_another_version_does_not_fit():
    own = layout_fingerprint(plan(HEADS))
    other = msgspec.structs.replace(own, schema="kvdock.layout/0")
    assert found(own, other) == [("schema", "kvdock.layout/1", "kvdock.layout/0", (), BAD)]


def named(a, b):
    return {d.name: (d.a, d.b) for d in diff(a, b)}


def test_the_same_plan_twice_has_no_difference():
    assert diff(plan(HEADS, STATE, WINDOW), plan(HEADS, STATE, WINDOW)) == ()


def test_a_difference_of_options_says_who_set_them():
    # 64 tokens of 8 heads of 64 and 32 columns in 16 bits: 98,304 bytes of KV
    a, b = plan(HEADS, max_total_tokens=64), plan(HEADS, max_total_tokens=128)
    (option,) = (d for d in diff(a, b) if d.name.startswith("options."))
    assert option == Difference(name="options.max_total_tokens", a=64, b=128, sources=("user", "user"))
    differing = named(a, b)
    assert differing["spaces.full.slots"] == differing["max_total_num_tokens"] == (64, 128)
    assert differing["buffers.full.k.shape"] == ((80, 8, 64), (144, 8, 64))
    assert differing["buffers.full.k.nbytes"] == (80 * 8 * 64 * 2, 144 * 8 * 64 * 2)
    assert differing["total_bytes"] == (a.total_bytes, b.total_bytes)
    assert differing["limits.tokens.requested"] == (64, 128)


def test_an_option_from_another_source_is_listed_with_its_value():
    a, b = plan(HEADS, mem_fraction_static=None), plan(HEADS, hybrid_swa="auto")
    (found,) = diff(a, b)
    assert found == Difference(name="options.hybrid_swa", a="auto", b="auto", sources=("default", "user"))
    assert render_lines([found]) == ["options.hybrid_swa: auto (default) | auto (user)"]


def test_classes_and_buffers_that_one_side_lacks_are_listed():
    a, b = plan(HEADS), plan(HEADS, kv_cache_dtype="fp4", role="decode", max_running_requests=2)
    differing = named(a, b)
    assert differing["groups.full.pool_cls"] == ("MHAPool of core", "BlockMHAPool of core")
    assert differing["request_pool_cls"] == ("ReqToTokenPool of core", "DecodeReqToTokenPool of core")
    missing, added = differing["buffers.full.k_scale"]
    assert missing is None
    assert (added["dtype"], added["shape"][1:], added["layers"]) == ("float8_e8m0fnu", (8, 4), (0,))
    lines = render_lines(diff(a, b))
    assert "options.max_running_requests: not given | 2 (user)" in lines
    (line,) = (line for line in lines if line.startswith("buffers.full.k_scale"))
    assert line.startswith("buffers.full.k_scale (layers 0): absent | role scale, worker target, space full, shape [")


def test_device_model_and_ranks_are_listed(cpu_device):
    model = ModelSpec(name="x", architecture="A", layers=(HEADS,), context_length=4096, dtype="bfloat16")
    a = kvdock.plan(model, device=cpu_device, parallel={"tp_size": 2})
    b = kvdock.plan(
        msgspec.structs.replace(model, name="y", layers=(HEADS, HEADS)),
        device=msgspec.structs.replace(cpu_device, name="other", granularity_bytes=512),
    )
    differing = named(a, b)
    assert differing["device.name"] == ("small", "other")
    assert differing["device.granularity_bytes"] == (1, 512)
    assert differing["model.name"] == ("x", "y")
    assert differing["model.layer_count"] == (1, 2)
    assert differing["parallel.tp_size"] == (2, 1)
    assert differing["groups.full.layers"] == ((0,), (0, 1))
    assert "total_bytes" in differing


def test_plugins_are_listed_with_their_versions():
    a, b = plan(HEADS), dcp_plan(HEADS, parallel={"dcp_size": 1})
    plugins = {name: values for name, values in named(a, b).items() if name.startswith("plugins.")}
    assert plugins["plugins.sharing"] == (None, b.outline.registry.members[-1].version)


def test_diff_takes_two_plans():
    with pytest.raises(PlanError, match="diff compares two plans, and list is none; give what"):
        diff(plan(HEADS), [plan(HEADS)])


def test_differences_are_data():
    both = (*compatible(plan(HEADS), plan(HEADS, page_size=64)), *diff(plan(HEADS), plan(HEADS, page_size=64)))
    data = msgspec.json.decode(msgspec.json.encode(both))
    assert data[0] == {
        "name": "page_size",
        "a": 16,
        "b": 64,
        "layers": [0],
        "worker": "target",
        "severity": "incompatible",
        "change": "give both sides the same page_size",
        "sources": None,
    }
    assert len(data) == len(both) == len(render_lines(both))


def test_a_line_tells_layers_values_severity_and_what_to_change():
    assert render_lines(compatible(plan(*[HEADS] * 5), plan(*[HEADS] * 5, page_size=64))) == [
        "page_size (layers 0-4): 16 | 64 [incompatible]; give both sides the same page_size"
    ]


def test_a_name_cannot_add_lines():
    forged = Difference(name="model.name", a="x\nmodel.name: y\x1b[31m", b=None)
    assert render_lines([forged]) == ["model.name: x; model.name: y\ufffd[31m | absent"]


def test_plans_are_compared_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kvdock\n"
        "plan = kvdock.plan('tests/models/gpt-oss-20b.json', budget_bytes=2**30, options={'page_size': 16})\n"
        "assert kvdock.compatible(plan, plan) == kvdock.diff(plan, plan) == ()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
