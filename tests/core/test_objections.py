"""What is said against a plan: each rule alone, all at once, and never passed over in silence."""

import re

import msgspec
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, UnsupportedCombination
from kvdock.layout import LayerGroup, SizeRule, Space
from kvdock.model import DSAParams, LayerSpec, MHAParams, MLAParams, ModelSpec, NoParams
from kvdock.objections import objections, prefill_only_objections
from kvdock.options import Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.pools import MHAPool
from kvdock.queries import PlanQuery
from kvdock.startup import core_only

DEVICE = DeviceInfo(
    device_type="cpu",
    name="small",
    total_bytes=2**24,
    free_before_load_bytes=2**24,
    free_bytes=2**24,
    capabilities=("skip_kv_cache:fa3", "skip_kv_cache:fa4", "strided_pages:paged"),
)
ACME = msgspec.structs.replace(DEVICE, device_type="acme", name="acme-1")
HEADS = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=8))
WINDOW = msgspec.structs.replace(HEADS, window_tokens=7)
LATENTS = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=16, qk_rope_head_dim=8))
SPARSE = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
NOTHING = LayerSpec(kind="none", params=NoParams())


def model_of(*layers, **fields):
    given = {"name": "m", "architecture": "A", "context_length": 64, "dtype": "bfloat16"} | fields
    return ModelSpec(layers=layers, **given)


def query_of(*layers, spaces=("full", "requests"), worker="target", device=DEVICE, parallel=None, **options):
    group = LayerGroup(name="full", kind="mha", space="full", layers=((0, HEADS),), worker=worker)
    return PlanQuery(
        model=model_of(*(layers or (HEADS,))),
        options=make_options(options),
        parallel=Parallelism(**(parallel or {})),
        device=device,
        worker=worker,
        groups=(group,),
        spaces={name: Space(name=name, rule=SizeRule(per_token=(1, 1))) for name in spaces},
    )


def plan_of(*layers, registry=None, device=DEVICE, parallel=None, drafts=(), **options):
    models = (model_of(*layers), *drafts)
    registry = registry if registry is not None else core_only()
    parallel = Parallelism(**(parallel or {}))
    return plan_from(models, device, make_options(options), parallel, registry, budget_bytes=2**20)


# Prefill-only work without a cache.

EMBEDS = {
    "prefill_only_disable_kv_cache": True,
    "prefill_attention_backend": "fa3",
    "is_embedding": True,
    "prefix_cache": False,
}
CP = {"tp_size": 2, "cp_size": 2}


def test_plain_attention_of_an_embedding_model_is_served_without_a_cache():
    assert prefill_only_objections(query_of(**EMBEDS)) == ()
    assert [group.pool_cls.name for group in plan_of(HEADS, **EMBEDS).groups] == ["NoOpPool"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": [SPARSE]}, r"keeps latents with index keys \(kind dsa\)"),
        ({"layers": [LATENTS]}, r"keeps latents \(kind mla\)"),
        ({"spaces": ["full", "swa"]}, "has sliding layers with a pool of their own; give hybrid_swa=off"),
        ({"spaces": ["swa"]}, "has sliding layers with a pool of their own"),
        ({"spaces": ["full", "state"]}, "has states beside keys and values"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype=fp4 is read through scales"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype=nvfp4 is read through scales"),
        (
            {"prefill_attention_backend": "triton"},
            "backend triton of small .* give prefill_attention_backend=fa3 or fa4",
        ),
        ({"prefill_attention_backend": None}, "backend, which is not given, of small"),
        ({"is_embedding": None}, "give is_embedding=true if it embeds"),
        ({"chunked_prefill_size": 512}, "chunked_prefill_size=512 cuts a prompt"),
        ({"prefix_cache": None}, "give prefix_cache=false"),
        ({"parallel": CP}, "give cp_size=1"),
        ({"hisparse": True}, "give hisparse=false"),
    ],
)
def test_each_condition_is_an_objection_of_its_own(changes, reason):
    given = EMBEDS | changes
    found = prefill_only_objections(query_of(*given.pop("layers", ()), **given))
    assert len(found) == 1
    assert re.search(reason, found[0])


def test_all_conditions_are_reported_in_one_order():
    """What the model keeps comes first, then what the options ask; a plugin's own objections follow the core's."""
    given = {
        "prefill_only_disable_kv_cache": True,
        "kv_cache_dtype": "fp4",
        "chunked_prefill_size": 8,
        "hisparse": True,
        "parallel": CP,
        "spaces": ("full", "swa", "state"),
    }
    found = prefill_only_objections(query_of(SPARSE, LATENTS, **given))
    words = (
        "kind dsa",
        "kind mla",
        "sliding",
        "states",
        "scales",
        "backend",
        "embeds",
        "chunk",
        "prefix",
        "cp",
        "host",
    )
    assert len(found) == len(words)
    assert all(word in reason for word, reason in zip(words, found, strict=True))


def test_a_config_may_say_that_it_embeds_and_an_option_that_it_does_not():
    query = query_of(**(EMBEDS | {"is_embedding": None}))
    embedding = msgspec.structs.replace(query, model=model_of(HEADS, is_embedding=True))
    assert prefill_only_objections(embedding) == ()
    generates = msgspec.structs.replace(embedding, options=make_options(EMBEDS | {"is_embedding": False}))
    assert len(prefill_only_objections(generates)) == 1


def test_the_capability_of_the_backend_withdraws_one_objection_and_no_other():
    unable = msgspec.structs.replace(DEVICE, capabilities=("sm_90",))
    given = EMBEDS | {"prefix_cache": True}
    backend, prefixes = prefill_only_objections(query_of(device=unable, **given))
    assert "no attention backend of small is known to work without a KV cache" in backend
    assert prefill_only_objections(query_of(**given)) == (prefixes,)


def test_a_draft_follows_its_target():
    assert prefill_only_objections(query_of(LATENTS, worker="draft")) == ()


def test_objections_and_what_no_class_serves_are_one_error():
    with pytest.raises(
        UnsupportedCombination, match=r"(?s)kind mla.*no plugin offers the pool for group 'full'"
    ) as caught:
        plan_of(LATENTS, **(EMBEDS | {"prefix_cache": True}))
    latents = "m keeps latents (kind mla), and only plain keys and values can be left out"
    assert caught.value.objections == (
        ("core", f"{latents}; leave prefill_only_disable_kv_cache out"),
        ("core", "prefix_cache=true reads the KV of earlier requests; give prefix_cache=false"),
        ("core", "unfit: MLAPool lacks no_kv"),
    )


def test_a_pool_of_the_hardware_that_is_passed_over_is_an_objection(mock_plugin):
    """The device's plugin named a pool that keeps KV: its attention reads one."""
    registry = core_only()
    registry.add(
        mock_plugin(
            "acme", tier="hardware", pool=lambda query: MHAPool if query.group else None, devices={"acme-1": ACME}
        )
    )
    with pytest.raises(UnsupportedCombination) as caught:
        plan_of(HEADS, registry=registry, device=ACME, **EMBEDS)
    ((plugin, reason),) = caught.value.objections
    assert plugin == "core"
    assert "MHAPool lacks no_kv, so NoOpPool of core serves acme-1 instead of what plugin 'acme' named" in reason


def test_every_plugin_may_object_and_all_are_listed(mock_plugin):
    registry = core_only()
    registry.add(mock_plugin("hw", tier="hardware", objection=lambda query: ("hw objects", "twice")))
    registry.add(mock_plugin("hw.fam", tier="variant", objection="variant objects"))
    with pytest.raises(UnsupportedCombination) as caught:
        plan_of(HEADS, registry=registry, **(EMBEDS | {"prefix_cache": None}))
    plan_says = (("hw", "hw objects"), ("hw", "twice"), ("hw.fam", "variant objects"))
    core_says = ("core", "prefix_cache=true reads the KV of earlier requests; give prefix_cache=false")
    assert caught.value.objections == (*plan_says, core_says, *plan_says)


# Unified memory.

DCP = {"tp_size": 4, "dcp_size": 2}
HYBRID = ("full", "swa", "requests")


def test_hybrids_of_heads_may_share_memory():
    assert objections(query_of(HEADS, WINDOW, spaces=HYBRID, unified_memory=True, attention_backend="triton")) == ()
    assert objections(query_of(spaces=("full", "state"), unified_memory=True, attention_backend="torch")) == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spaces": ["full"]}, "neither states nor sliding layers beside full ones; leave unified_memory out"),
        ({"layers": [WINDOW], "spaces": ["swa"]}, "neither states nor sliding layers"),
        ({"layers": [WINDOW]}, "neither states nor sliding layers"),  # the full space is a draft's alone
        ({"layers": [LATENTS], "spaces": ["full", "state"]}, "does not hold layers of kind mla"),
        ({"layers": [SPARSE], "spaces": ["full", "state"]}, "does not hold layers of kind dsa"),
        ({"role": "prefill"}, r"another worker would read or write \(role=prefill\); give role=none"),
        ({"role": "decode"}, r"another worker would read or write \(role=decode\)"),
        ({"speculative_algorithm": "NGRAM"}, r"serves no speculation \(speculative_algorithm=NGRAM\)"),
        ({"parallel": DCP, "spaces": ["full", "state"]}, "give dcp_size=1"),
        ({"parallel": {"pp_size": 2}}, "hold different numbers of pages; give pp_size=1"),
        ({"hisparse": True}, "keeps no KV on the host"),
        ({"spaces": [*HYBRID, "host"]}, "keeps no KV on the host"),
        (
            {"decode_attention_backend": "fa3"},
            "backend fa3 does not read; give one of paged, torch, torch_native, triton",
        ),
    ],
)
def test_each_condition_of_unified_memory_is_an_objection_of_its_own(changes, reason):
    given = {"layers": (HEADS, WINDOW), "spaces": HYBRID, "unified_memory": True} | changes
    found = objections(query_of(*given.pop("layers"), **given))
    assert len(found) == 1
    assert re.search(reason, found[0])


def test_unified_memory_without_a_pool_of_sliding_layers_names_the_option_and_what_works():
    (found,) = objections(query_of(HEADS, WINDOW, spaces=["full"], unified_memory=True, hybrid_swa="off"))
    assert "has sliding layers, and hybrid_swa=off keeps them as full ones" in found
    assert found.endswith("give hybrid_swa=auto, or unified_memory=false")


def test_all_objections_to_unified_memory_are_listed():
    given = {"attention_backend": "fa3", "role": "decode", "speculative_algorithm": "EAGLE", "hisparse": True}
    found = objections(query_of(LATENTS, parallel=DCP, unified_memory=True, **given))
    words = ("nothing to share", "kind mla", "role=decode", "EAGLE", "dcp_size=2", "on the host", "fa3")
    assert all(word in reason for word, reason in zip(words, found, strict=True))


def test_unified_memory_never_falls_through_to_ordinary_pools():
    """A plan has one byte buffer for all that layers read, or is refused."""
    plan = plan_of(HEADS, WINDOW, unified_memory=True, attention_backend="triton")
    assert {buffer.storage for group in plan.groups for buffer in group.buffers} == {"unified memory"}
    with pytest.raises(UnsupportedCombination, match=r"MLAPool lacks unified_memory"):
        plan_of(LATENTS, unified_memory=True)
    with pytest.raises(UnsupportedCombination, match="nothing to share out"):
        plan_of(HEADS, unified_memory=True)


# Pages apart, page sizes, data types, drafts.


@pytest.mark.parametrize("dtype", ["fp4", "nvfp4"])
def test_data_of_4_bits_is_not_laid_out_by_page(dtype):
    (reason,) = objections(query_of(page_major=True, kv_cache_dtype=dtype))
    assert f"4 bits (kv_cache_dtype={dtype})" in reason
    assert "give a kv_cache_dtype of 8 or 16 bits, or page_major=false" in reason
    with pytest.raises(UnsupportedCombination, match=r"(?s)4 bits.*BlockMHAPool lacks page_major"):
        plan_of(HEADS, page_major=True, kv_cache_dtype=dtype)
    assert objections(query_of(kv_cache_dtype=dtype)) == ()
    assert objections(query_of(page_major=True, kv_cache_dtype="fp8")) == ()


@pytest.mark.parametrize("backend", ["triton", "torch", "torch_native", "paged"])
def test_backends_that_read_pages_apart_are_known_or_told_by_the_device(backend):
    assert objections(query_of(page_major=True, attention_backend=backend)) == ()


def test_a_backend_of_one_phase_is_enough_to_object():
    (reason,) = objections(query_of(page_major=True, attention_backend="triton", prefill_attention_backend="fa3"))
    assert "which the attention backend fa3 does not read; give one of paged, torch, torch_native, triton" in reason


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_the_page_of_index_keys_is_the_hardwares_to_object_to(page_size, mock_plugin):
    """The CPU serves any page; a device whose kernel reads 64 tokens says so."""
    assert plan_of(SPARSE, page_size=page_size).outline.options.values.page_size == page_size

    def needs_64(query):
        has_index = any(layer.kind == "dsa" for layer in query.model.layers)
        return f"page_size={query.options.page_size}; give 64" if has_index and query.options.page_size != 64 else None

    registry = core_only()
    registry.add(mock_plugin("hw", tier="hardware", objection=needs_64))
    if page_size == 64:
        plan_of(SPARSE, page_size=page_size, registry=registry)
    else:
        with pytest.raises(UnsupportedCombination, match=f"hw: page_size={page_size}; give 64"):
            plan_of(SPARSE, page_size=page_size, registry=registry)
    plan_of(HEADS, page_size=page_size, registry=registry)


@pytest.mark.parametrize("layer", [HEADS, LATENTS, SPARSE], ids=["mha", "mla", "dsa"])
@pytest.mark.parametrize("dtype", ["int8", "bool", "float8_e8m0fnu"])
def test_a_data_type_that_holds_no_keys_and_values_is_refused(layer, dtype):
    with pytest.raises(PlanError, match=dtype):
        plan_of(layer, kv_cache_dtype=dtype)


def test_a_draft_without_kv_has_no_pool_and_is_refused():
    draft = model_of(NOTHING, NOTHING, name="d", role="draft")
    with pytest.raises(
        UnsupportedCombination, match=r"draft model 'd' \(worker draft\) has no layer that keeps KV"
    ) as caught:
        plan_of(HEADS, drafts=(draft,), speculative_algorithm="EAGLE", speculative_num_steps=2)
    assert "speculative_algorithm=NGRAM" in str(caught.value)


def test_a_draft_lives_on_the_last_stage_alone():
    draft = model_of(HEADS, name="d", role="draft")
    first = {"pp_size": 2, "pp_rank": 0}
    plan = plan_of(
        HEADS, HEADS, drafts=(draft,), parallel=first, speculative_algorithm="EAGLE", speculative_num_steps=2
    )
    assert {group.worker for group in plan.outline.groups} == {"target"}
