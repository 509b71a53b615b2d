"""What is refused on an NPU, with the reason, and what its defaults are."""

import kvdock
import msgspec
import pytest
from kvdock_ascend import device, hooks, settings

CARD = device.catalogue()["910b-64gb"]


def test_pages_have_128_tokens_unless_the_user_says_otherwise(plan):
    """L-15: resolved once, the user before the plugin, and the plan says whose it was."""
    ours = plan()
    assert ours.outline.options.values.page_size == 128
    assert ours.outline.options.sources["page_size"] == "ascend"
    theirs = plan(page_size=64)
    assert theirs.outline.options.values.page_size == 64
    assert theirs.outline.options.sources["page_size"] == "user"


def test_sparse_latents_get_pages_of_128_as_well(plan):
    assert plan("dsa").outline.options.values.page_size == 128


@pytest.mark.parametrize("page_size", [1, 8, 100])
def test_pages_are_multiples_of_16(objections, page_size):
    assert objections(page_size=page_size) == [
        f"page_size={page_size} is no multiple of the 16 tokens by which kernels page; give 128"
    ]


@pytest.mark.parametrize("page_size", [16, 64, 192, 1024])
def test_other_pages_will_do(plan, page_size):
    assert plan(page_size=page_size).max_total_num_tokens % page_size == 0


@pytest.mark.parametrize("page_size", [64, 192, 640])
def test_fused_inference_attention_takes_four_sizes(objections, page_size):
    assert objections(page_size=page_size, attention_backend="ascend_fia") == [
        f"page_size={page_size} is not what fused inference attention reads; give one of 128, 256, 384, 512"
    ]


def test_indexers_read_pages_of_up_to_1024(plan, objections):
    assert plan("dsa", page_size=1024).max_total_num_tokens % 1024 == 0
    assert objections("dsa", page_size=1040) == [
        "page_size=1040: the indexer of m reads pages of at most 1024 tokens; give 128"
    ]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "mxfp8", "fp4", "nvfp4"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_narrow_formats_are_not_read(objections, kind, name):
    options = {"kv_cache_dtype": name}
    if kind == "mla" and name in ("mxfp8", "nvfp4"):
        pytest.skip("no pool of the core holds latents in this format")
    (reason,) = objections(kind, **options)
    assert reason.startswith(f"kv_cache_dtype={name}, ")
    assert reason.endswith(
        "is no type of keys and values that kernels of 910b-64gb read; give kv_cache_dtype=bfloat16 or float16"
    )


def test_a_model_in_float32_needs_another_type(plan, objections):
    model = kvdock.ModelSpec(
        name="m",
        architecture="A",
        layers=(kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8)),),
        context_length=128,
        dtype="float32",
    )
    assert objections(model) == [
        "float32 is no type of keys and values that kernels of 910b-64gb read; give kv_cache_dtype=bfloat16 or float16"
    ]
    assert plan(model, kv_cache_dtype="float16").bytes_per_token.kv == 2 * 8 * 2


@pytest.mark.parametrize("chip", ["Ascend310P3", "Ascend910A", "Ascend910ProB", "Ascend910PremiumA"])
def test_old_chips_read_no_bfloat16(plan, objections, chip):
    old = msgspec.structs.replace(CARD, name=chip, capabilities=(chip,))
    assert objections(device=old) == [f"{chip} reads no bfloat16; give kv_cache_dtype=float16"]
    assert plan(device=old, kv_cache_dtype="float16").max_total_num_tokens


@pytest.mark.parametrize(
    ("kind", "options", "what"),
    [
        ("mha", {"page_major": True}, "lays the layers of a page side by side"),
        ("linear", {"unified_memory": True}, "lays the pages of several spaces in one buffer"),
        ("dsa", {"hisparse": True}, "keeps rows on the host"),
    ],
)
def test_arrangements_that_kernels_do_not_read_are_refused(objections, kind, options, what):
    """P-04, A-14: neither views over a shared buffer nor a host tier are served here, and nothing else is instead."""
    ((name, _),) = options.items()
    assert f"{name}=true {what}, which no kernel of 910b-64gb reads; leave {name} out" in objections(kind, **options)


def test_a_layer_split_is_refused(objections):
    found = objections("dsa", layer_split=True, role="prefill", parallel={"tp_size": 2, "cp_size": 2})
    assert found == [
        "layer_split=true reads other ranks' layers through a scratch layer, which no kernel of 910b-64gb reads; leave "
        "layer_split out"
    ]


def test_a_cache_cannot_be_left_out(objections):
    found = objections(prefill_only_disable_kv_cache=True, is_embedding=True, prefix_cache=False)
    assert found == [
        "attention on 910b-64gb reads keys and values through the cache's pages; leave prefill_only_disable_kv_cache out"
    ]


def test_a_backend_that_nobody_has_is_named_with_the_nearest(plan, objections):
    assert objections(attention_backend="ascend_fai") == [
        "no attention backend of 910b-64gb is called so: attention_backend=ascend_fai; did you mean 'ascend_fia'?; give "
        "one of ascend, ascend_fia, torch, torch_native, triton, or name your own with "
        "plugin_options={'ascend': {'backends': ['ascend_fai']}}"
    ]
    mine = {"ascend": {"backends": ["ours"]}}
    assert plan(attention_backend="ours", plugin_options=mine).max_total_num_tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fai": True}, "ascend has no option 'fai'"),
        ({"fia": 1}, "ascend takes fia and align_transfers, true or false, and backends, a list of names"),
    ],
)
def test_options_of_the_plugin_are_checked(plan, given, message):
    with pytest.raises(kvdock.PlanError, match=message):
        plan(plugin_options={"ascend": given})


def test_rows_of_a_family_for_other_devices_are_refused(registry):
    """A family's own rows land here only where a form of it for these devices is installed."""
    from kvdock.pools import MHAPool
    from kvdock.testing.mocks import mock_plugin

    class FamilyPool(MHAPool):
        pass

    registry.add(
        mock_plugin("fam", "family", pool=lambda query: FamilyPool if query.group is not None else None),
        name="fam",
        tier="family",
    )
    layer = kvdock.LayerSpec(kind="fam_kind", params=kvdock.MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8))
    model = kvdock.ModelSpec(
        name="m", architecture="A", family="fam", layers=(layer,), context_length=128, dtype="bfloat16"
    )
    with pytest.raises(kvdock.UnsupportedCombination) as caught:
        kvdock.plan(model, device=CARD, budget_bytes=2**26, registry=registry)
    assert (
        "ascend",
        "the layout of FamilyPool (kind fam_kind) is for other devices, and no form for this one is loaded; "
        "give another device",
    ) in caught.value.objections


def test_other_devices_are_left_alone(registry):
    """Neither pages, pools nor rules of this plugin reach a device that is no NPU."""
    other = msgspec.structs.replace(CARD, device_type="cpu", name="other", capabilities=())
    layer = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8))
    model = kvdock.ModelSpec(name="m", architecture="A", layers=(layer,), context_length=128, dtype="float32")
    made = kvdock.plan(model, device=other, budget_bytes=2**24, registry=registry)
    assert {made.groups[0].pool_cls.plugin, made.allocator_cls.plugin} == {"core"}
    assert made.outline.options.values.page_size == 1
    assert hooks.get_kernels(other) is None


def test_settings_have_defaults():
    assert settings.of(kvdock.CacheOptions()) == settings.Settings(fia=False, align_transfers=False, backends=())
