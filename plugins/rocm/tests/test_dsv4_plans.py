"""DeepSeek V4 on AMD devices: sizes by hand, one layout for bytes and tensors, and what is refused."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import kvdock
import msgspec
import pytest
from kvdock.compat import compatible

pytest.importorskip("kvdock_dsv4.hooks")

MODELS = Path(__file__).parents[3] / "tests" / "models"
FLASH = MODELS / "deepseek-v4-flash.json"
"""43 layers of 512 columns: 2 without a ratio, 21 of ratio 4, 20 of 128."""
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
PAGE = 256


def buffers_of(plan):
    return {
        (group.name, buffer.name): (buffer.tensors, buffer.shape, buffer.dtype)
        for group in plan.groups
        for buffer in group.buffers
    }


def kv_bytes(plan):
    return sum(buffer.nbytes for buffer in plan.buffers if buffer.is_kv)


def test_a_layer_has_one_buffer_of_rings_and_compressed_rows(planned):
    """8 requests, 131,072 tokens: 9 rings of 128, then n/4 rows and 64, or n/128 rows and 2."""
    made = planned(FLASH, budget=2**34, max_total_tokens=131_072, max_running_requests=8)
    assert buffers_of(made) == {
        ("swa", "kv"): (2, (1152, 1, 512), "bfloat16"),
        ("c4", "kv"): (21, (1152 + 32_768 + 64, 1, 512), "bfloat16"),
        ("c4.index", "index_k"): (21, (513, 64 * 132), "uint8"),
        ("c4.state", "states"): (21, (84, 2 * 2 * 512), "float32"),
        ("c4.index_state", "states"): (21, (84, 2 * 2 * 128), "float32"),
        ("c128", "kv"): (20, (1152 + 1024 + 2, 1, 512), "bfloat16"),
        ("c128.state", "states"): (20, (1408, 2 * 512), "float32"),
    }
    assert {group.pool_cls.plugin for group in made.groups} == {"rocm.dsv4"}
    assert made.spaces["swa"] == 8 * 128
    assert (made.allocator_cls.name, made.request_pool_cls.name) == ("RocmPagedAllocator", "ReqToTokenPool")
    rows = 2 * 1152 + 21 * 33_984 + 20 * 2178
    states = 21 * 84 * (2048 + 512) * 4 + 20 * 1408 * 1024 * 4
    assert kv_bytes(made) == rows * 1024 + 21 * 513 * 64 * 132 + states


def test_a_token_costs_its_compressed_rows_alone(planned):
    # S-08: rings are a constant. 21 · (1,024 + 132) / 4 + 20 · 1,024 / 128 = 6,229 bytes a token
    small, large = (
        planned(FLASH, budget=2**34, max_total_tokens=tokens, max_running_requests=8) for tokens in (131_072, 262_144)
    )
    assert small.bytes_per_token.kv == 6229
    assert kv_bytes(large) - kv_bytes(small) == 131_072 * 6229


def test_a_request_costs_a_ring_in_every_layer(planned):
    # 43 rings of 128 rows, 21 of 8 states of both kinds, 20 of 128 states
    few, more = (
        planned(FLASH, budget=2**34, max_total_tokens=131_072, max_running_requests=count) for count in (8, 40)
    )
    each = 43 * 128 * 1024 + 21 * 8 * (8192 + 2048) + 20 * 128 * 4096
    assert kv_bytes(more) - kv_bytes(few) == 32 * each
    assert more.bytes_for(256, 40) - few.bytes_for(256, 8) == 32 * (each + 256 * 6229)


@pytest.mark.parametrize(
    ("options", "ring"), [({}, 128), (EAGLE, 131), ({**EAGLE, "speculative_num_draft_tokens": 1}, 128)]
)
def test_a_ring_holds_the_window_and_the_other_tokens_of_a_step(options, ring, planned):
    """window + draft − 1, the window counting the token itself; a step without speculation is of one token."""
    made = planned(max_total_tokens=4096, **options)
    assert made.spaces["swa"] == 4 * ring
    assert made.spaces["c4_rows"] == 4 * ring + 1024
    assert made.spaces["c128_rows"] == 4 * ring + 32
    drafts = [group for group in made.groups if group.worker != "target"]
    found = [(g.space, g.pool_cls.name, g.layers, g.buffers[0].shape) for g in drafts]
    assert found == ([("swa", "RocmRowsPool", (0,), (5 * ring, 1, 80))] if options else [])


@pytest.mark.parametrize(
    ("device", "dtype"), [("mi300x", "float8_e4m3fnuz"), ("mi325x", "float8_e4m3fnuz"), ("mi355x", "float8_e4m3fn")]
)
def test_every_device_of_the_catalogue_plans_it(device, dtype, planned):
    made = planned(FLASH, budget=2**36, device=device, max_running_requests=64)
    index = next(buffer for buffer in made.outline.buffers if buffer.name == "index_k")
    assert (made.device.name, index.element) == (device, dtype)
    assert made.max_request_tokens == 1_048_576
    assert made.total_bytes <= 2**36 < made.total_bytes + PAGE * 6229 + 64


CONVERTS = {"rocm": {"foreign_floats": True}}


def test_short_names_of_8_bits_mean_the_devices_own(planned):
    def encoding(device, name):
        found = planned(max_total_tokens=4096, device=device, index_dtype=name, plugin_options=CONVERTS).outline.buffers
        return next(buffer.element for buffer in found if buffer.name == "index_k")

    assert [encoding("mi300x", name) for name in ("fp8", "float8_e4m3fn")] == ["float8_e4m3fnuz", "float8_e4m3fn"]
    assert encoding("mi355x", "fp8") == "float8_e4m3fn"


@pytest.fixture
def both_forms(planned, dsv4_registry, small):
    """Return a function that plans the small model for a CUDA device and for an AMD device, with the same options."""
    cuda = pytest.importorskip("kvdock_cuda.hooks")

    def make(budget, cuda_only=None, **options):
        registry = dsv4_registry()
        registry.add(cuda, name="cuda", tier="hardware")
        card = msgspec.structs.replace(cuda.device_catalogue()["h200"], granularity_bytes=1)
        given = {"max_running_requests": 4, **options, **(cuda_only or {})}
        theirs = kvdock.plan(small, device=card, options=given, budget_bytes=budget, registry=registry)
        return theirs, planned(budget=budget, **options)

    return make


ONLINE = {"plugin_options": {"dsv4": {"online_compress": True}}}


def test_two_forms_of_one_model_have_each_their_own_state_rows(both_forms):
    # S-08
    theirs, ours = both_forms(2**25, {"swa_full_tokens_ratio": 0.5, **ONLINE}, max_total_tokens=4096)
    found = [{name: shape[0] for name, (_, shape, _) in buffers_of(made).items()} for made in (theirs, ours)]
    # 2,048 sliding slots are 8 pages with a ring of 8, and 9 rows more; 4 requests have a ring of 8, and 17 rows more.
    assert [rows["c4.state", "states"] for rows in found] == [76, 52]
    assert [rows["c4.index_state", "states"] for rows in found] == [76, 52]
    # One state a request row of 5, and 2 rows; a ring of 128 for each, one more, and the empty state, in whole 128s.
    assert [rows["c128.state", "states"] for rows in found] == [7, 896]
    # 16 + 1 pages of packed rows, or 5 rings with 1,024 + 64 and 32 + 2 rows behind them.
    assert [rows["c4", "kv"] for rows in found] == [17, 5 * 128 + 1088]
    assert [rows["c128", "kv"] for rows in found] == [17, 5 * 128 + 34]


@pytest.mark.parametrize("budget", [2**23, 2**24 + 12_345, 2**25])
def test_each_form_is_built_with_the_bytes_that_it_planned(budget, both_forms):
    # S-08, P-04, P-14: one description for bytes and tensors, whichever form it is
    pytest.importorskip("torch")
    for made in both_forms(budget, {"swa_full_tokens_ratio": 0.5}):
        cache = kvdock.build(made, device="cpu", debug=False)
        assert cache.allocated_bytes() == made.total_bytes <= budget
        assert made.total_bytes == sum(buffer.nbytes for buffer in made.buffers if buffer.memory == "device")


def test_a_row_is_as_wide_whatever_the_heads_are(planned, small):
    # P-14: one row for all heads, 160 bytes
    costs = {
        heads: planned({**small, "num_attention_heads": heads}, max_total_tokens=4096).bytes_per_token.kv
        for heads in (8, 64, 128)
    }
    # 2 · (160 + 132) / 4 + 160 / 128
    assert set(costs.values()) == {147.25}


def test_tensors_that_are_not_declared_stop_the_build(planned, monkeypatch):
    # P-14
    torch = pytest.importorskip("torch")
    from kvdock_rocm.dsv4.pools import RocmRowsPool

    monkeypatch.setattr(RocmRowsPool, "storages", lambda self: [*self.parts.tensors.storages(), torch.zeros(64)])
    with pytest.raises(kvdock.BuildError, match="holds 256 bytes that its buffers do not declare"):
        kvdock.build(planned(max_total_tokens=4096), device="cpu")


def test_the_users_tokens_are_weighed_against_the_real_layout(planned):
    # S-09
    rest = {"budget": 2**34, "max_running_requests": 8}
    capacity = planned(FLASH, **rest).max_total_num_tokens
    assert capacity > 1_048_576
    assert planned(FLASH, **rest, max_total_tokens=1_048_576).max_total_num_tokens == 1_048_576
    assert planned(FLASH, **rest, max_total_tokens=10 * capacity).max_total_num_tokens == capacity


def test_long_prompts_are_limited_by_the_full_side(planned):
    # A-14, G-05: rings of 128 rows say nothing about the length of a request
    for role in ("none", "prefill", "decode"):
        assert planned(max_total_tokens=2048, role=role).max_request_tokens == 2048


def test_a_value_is_decided_once_with_its_source(planned):
    # L-15
    options = planned(max_total_tokens=4096).options
    sources = {name: (getattr(options.values, name), options.sources[name]) for name in ("page_size", "kv_cache_dtype")}
    assert sources == {"page_size": (256, "dsv4"), "kv_cache_dtype": ("bfloat16", "rocm.dsv4")}
    assert (options.values.prefix_cache, options.sources["prefix_cache"]) == (False, "rocm.dsv4")
    given = planned(max_total_tokens=4096, index_dtype="float8_e4m3fn", plugin_options=CONVERTS).options
    assert (given.values.index_dtype, given.sources["index_dtype"]) == ("float8_e4m3fn", "user")


@pytest.mark.parametrize("device", ["mi300x", "mi355x"])
def test_one_request_is_one_request(device, planned):
    # U-06
    assert planned(device=device, max_running_requests=1).max_running_requests == 1


def test_the_automatic_limit_keeps_rings_within_their_share(planned):
    """A quarter of the budget: rings of rows and of states together, and what is padding in their buffers."""
    budget = 2**32
    made = planned(FLASH, budget=budget, max_running_requests=None)
    padding_rows = 43 * 128 + 21 * 64 + 20 * 2
    padding_states = 21 * (2 * 8 + 1) * (8192 + 2048) + 20 * 256 * 4096

    def held(requests):
        each = 43 * 128 * 1024 + 21 * 8 * (8192 + 2048) + 20 * 128 * 4096
        rounding = 21 * 3 * (8192 + 2048) + 20 * 128 * 4096  # state rows are whole groups
        return requests * each + padding_rows * 1024 + padding_states + rounding

    assert held(made.max_running_requests) <= budget // 4 < held(made.max_running_requests + 1)
    assert next(limit for limit in made.limits if limit.name == "requests").factor == "request_state_share"


def test_requests_that_arrive_have_rings_of_their_own(planned):
    # G-04: 4 requests, 8 more rows, padding
    made = planned(max_total_tokens=4096, role="decode")
    found = {name: shape[0] for name, (_, shape, _) in buffers_of(made).items()}
    assert found["swa", "kv"] == 13 * 128
    assert found["c4", "kv"] == 13 * 128 + 1024 + 64
    assert found["c4.state", "states"] == 116  # 13 · 8 + 8 + 1 in whole 4s
    assert made.allocator_cls.name == "RocmSortedAllocator"


def test_no_byte_is_spent_on_alignment(planned):
    # P-05: nothing asks for aligned bases here
    assert {buffer.base_align for buffer in planned(max_total_tokens=4096).outline.buffers} == {1}


def test_what_the_allocator_of_the_device_rounds_up_is_in_the_plan(dsv4_registry):
    """P-05: a tensor a layer, each in whole 2 MiB, and no more than 2 MiB beside its rows; of all of them 184 MB."""
    from kvdock_rocm import hooks

    mib, rows = 2**20, 1024
    layers = {  # count, bytes of each, and those in whole 2 MiB
        ("swa", "kv"): (2, 1152 * rows, 2 * mib),
        ("c4", "kv"): (21, (1152 + 32_768 + 64) * rows, 34 * mib),
        ("c4.index", "index_k"): (21, 513 * 64 * 132, 6 * mib),
        ("c4.state", "states"): (21, 84 * 8192, 2 * mib),
        ("c4.index_state", "states"): (21, 84 * 2048, 2 * mib),
        ("c128", "kv"): (20, (1152 + 1024 + 2) * rows, 4 * mib),
        ("c128.state", "states"): (20, 1408 * 4096, 6 * mib),
    }
    card = hooks.device_catalogue()["mi300x"]
    found = []
    for info in (msgspec.structs.replace(card, granularity_bytes=1), card):
        made = kvdock.plan(
            FLASH,
            device=info,
            options={"max_total_tokens": 131_072, "max_running_requests": 8},
            budget_bytes=2**34,
            registry=dsv4_registry(),
        )
        found.append({(g.name, b.name): (b.tensors, b.nbytes) for g in made.groups for b in g.buffers})
        assert made.total_bytes == sum(buffer.nbytes for buffer in made.buffers if buffer.memory == "device")
    plain, rounded = found
    assert plain == {key: (count, count * each) for key, (count, each, _) in layers.items()}
    assert rounded == {key: (count, count * whole) for key, (count, _, whole) in layers.items()}
    assert all(0 <= whole - each < 2 * mib for _, each, whole in layers.values())


def test_stages_of_a_pipeline_number_alike_and_keep_their_own_layers(dsv4_registry, small):
    from kvdock_rocm import hooks

    made = kvdock.plan_ranks(
        {**small, "num_hidden_layers": 6, "compress_ratios": [0, 4, 128, 4, 0, 0]},
        device=hooks.device_catalogue()["mi300x"],
        options={"max_running_requests": 4, "max_total_tokens": 4096},
        parallel={"pp_size": 2},
        budget_bytes=2**28,
        registry=dsv4_registry(),
    )
    first, second = made.plans
    assert first.spaces == second.spaces
    layers = [{group.name: group.layers for group in plan.groups if group.kind == "dsv4"} for plan in (first, second)]
    assert layers == [{"swa": (0,), "c4": (1,), "c128": (2,)}, {"swa": (4, 5), "c4": (3,)}]


def test_two_sides_that_keep_the_same_form_fit(planned):
    # G-02: 459 and 376 pages
    sides = [planned(max_total_tokens=pages * PAGE, role=role) for pages, role in ((459, "prefill"), (376, "decode"))]
    assert compatible(*sides) == ()


def test_two_sides_with_other_rings_or_forms_are_told_apart(planned, both_forms):
    # G-01, S-08
    plain, drafting = planned(max_total_tokens=4096), planned(max_total_tokens=4096, **EAGLE)
    pages = {(d.a, d.b, d.layers) for d in compatible(plain, drafting) if d.name == "page_size"}
    assert pages == {(128, 131, (0, 1, 2, 3)), (8, 16, (1, 3)), (128, 256, (2,))}
    names = {each.name for each in compatible(*both_forms(2**25, {"swa_full_tokens_ratio": 0.5}))}
    assert {"compressed_latent", "latent.dtype", "latent.shape", "page_size", "index.dtype"} <= names


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"kv_cache_dtype": "fp8_e4m3"},
            "kv_cache_dtype=fp8_e4m3 (float8_e4m3fn): kernels on mi300x read rows",
        ),
        ({"kv_cache_dtype": "float16"}, "DeepSeek V4 in bfloat16 alone; leave kv_cache_dtype out"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype=fp4 (float4_e2m1fn_x2): kernels on mi300x read rows"),
        ({"index_dtype": "fp4"}, "index keys of 4 bits (fp4_indexer, index_dtype=fp4) are no form"),
        (
            {"plugin_options": {"dsv4": {"fp4_indexer": True}}},
            "index keys of 4 bits (fp4_indexer, index_dtype=fp4) are no form",
        ),
        (ONLINE, "online_compress=true is no form of states that kernels on mi300x read"),
        ({"prefix_cache": True}, "prefix_cache=true lets requests begin with others' tokens"),
    ],
)
def test_what_the_form_does_not_have_is_refused(options, reason, dsv4_objections):
    (found,) = dsv4_objections(**options)
    assert reason in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # there is no host tier here, so no buffers that could run out.
        (
            {"hisparse": True},
            "hisparse=true keeps compressed rows on the host, and the kernels of DeepSeek V4 on mi300x",
        ),
        ({"swa_full_tokens_ratio": 0.5}, "swa_full_tokens_ratio"),
    ],
)
def test_options_without_use_here_are_errors(options, message, planned):
    with pytest.raises(kvdock.PlanError, match=message):
        planned(max_total_tokens=4096, **options)


def test_the_form_has_no_settings_of_its_own(planned):
    with pytest.raises(
        kvdock.PlanError, match=r"rocm\.dsv4 has no option 'x', nor any other; give .* 'rocm', .* 'dsv4'"
    ):
        planned(max_total_tokens=4096, plugin_options={"rocm.dsv4": {"x": 1}})


def test_pages_are_those_of_the_family(planned):
    with pytest.raises(kvdock.UnsupportedCombination, match="page_size=128 is not what kernels on mi300x read"):
        planned(max_total_tokens=4096, page_size=128)


def test_a_draft_that_slides_by_token_is_refused(planned):
    draft = json.loads((MODELS / "mistral-7b-v0.1.json").read_text(encoding="utf-8"))
    drafting = {**EAGLE, "draft": {**draft, "sliding_window": 128, "max_position_embeddings": 2048}}
    with pytest.raises(kvdock.PlanError, match=r"of draft slide, and on mi300x a target of DeepSeek V4 has no sliding"):
        planned(max_total_tokens=4096, **drafting)
    whole = {**EAGLE, "draft": {**draft, "sliding_window": None, "max_position_embeddings": 2048}}
    made = planned(max_total_tokens=512, budget=2**28, **whole)
    assert {group.space for group in made.groups if group.worker != "target"} == {"full"}


def test_without_the_variant_the_familys_form_is_served_where_its_floats_are_read(planned):
    made = planned(with_variant=False, device="mi355x", max_total_tokens=4096, swa_full_tokens_ratio=0.5)
    assert {group.pool_cls.plugin for group in made.groups} == {"dsv4"}


@pytest.mark.parametrize("device", ["mi210", "mi300x", "mi355x"])
@pytest.mark.parametrize("dtype", ["fp8", "mxfp8", "nvfp4", "fp4"])
@pytest.mark.parametrize("with_variant", [True, False])
def test_types_that_no_form_has_are_refused_without_advice_that_does_not_plan(device, dtype, with_variant, planned):
    """What is loaded is not to be installed; blocks meet the rule of the device; and leaving the type out plans."""
    given = {"device": device, "with_variant": with_variant, "max_total_tokens": 4096}
    if not with_variant:
        given["swa_full_tokens_ratio"] = 0.5
        if dtype == "fp8":
            pytest.skip("the family's own rows")
    with pytest.raises(kvdock.UnsupportedCombination) as caught:
        planned(**given, kv_cache_dtype=dtype)
    said = dict(pair for pair in caught.value.objections if pair[1] != "declined" and not pair[1].startswith("unfit"))
    text = str(caught.value)
    assert "install" not in text
    assert "give kv_cache_dtype" not in text
    reads_blocks = device == "mi355x" and dtype in ("mxfp8", "fp4")
    has_rule = dtype != "fp8" and not reads_blocks
    assert ("rocm" in said) == has_rule
    assert ("rocm.dsv4" in said) == with_variant
    assert all(reason.endswith("leave kv_cache_dtype out") for reason in said.values())
    if with_variant or device != "mi300x":
        assert planned(**given).total_bytes > 0


def test_index_keys_in_a_foreign_encoding_are_refused_beside_rows_that_the_form_has_not(planned):
    with pytest.raises(kvdock.UnsupportedCombination) as caught:
        planned(max_total_tokens=4096, kv_cache_dtype="fp8", index_dtype="float8_e4m3fn")
    said = dict(caught.value.objections)
    assert said["rocm"].startswith(
        "index_dtype=float8_e4m3fn: an encoding of 8 bits that gfx942 (mi300x) does not read"
    )
    assert "give float8_e4m3fnuz" in said["rocm"]


def test_a_device_that_converts_floats_is_warned_of_without_a_type_that_does_not_plan(planned):
    made = planned(with_variant=False, device="mi210", max_total_tokens=4096, swa_full_tokens_ratio=0.5)
    (warning,) = [text for text in map(str, made.warnings) if "floats of 8 bits" in text]
    assert warning == (
        "mi210 has no floats of 8 bits, so each read and write of float8_e4m3fn is converted in software: that saves "
        "memory and costs time"
    )


def test_without_the_variant_rows_in_the_other_encoding_are_refused(planned):
    with pytest.raises(
        kvdock.UnsupportedCombination, match=r"gfx942 \(mi300x\) does not read; pip install 'kvdock-rocm\[dsv4\]'"
    ):
        planned(with_variant=False, max_total_tokens=4096, swa_full_tokens_ratio=0.5)


def test_the_variant_is_found_by_its_name_and_waits_for_its_family(capsys):
    from kvdock import cli

    points = importlib.metadata.entry_points(group="kvdock.variants")
    assert {point.name: point.value for point in points}["rocm.dsv4"] == "kvdock_rocm.variants.dsv4"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["plugins", "--check", "--json", "--no-plugin", "dsv4"])
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["name"] == "rocm.dsv4"]
    assert row["status"] == "inactive"
    assert "dsv4" in row["reason"]


def test_without_the_variant_nothing_of_the_family_is_imported():
    code = "import sys, kvdock_rocm.hooks; print([name for name in sys.modules if 'dsv4' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plan_is_the_same_read_from_a_file(planned, dsv4_registry):
    made = planned(max_total_tokens=4096)
    again = kvdock.CachePlan.from_json(made.to_json(), registry=dsv4_registry())
    assert again.total_bytes == made.total_bytes
    assert again.spaces == made.spaces
