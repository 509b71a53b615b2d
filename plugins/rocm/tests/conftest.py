"""A registry of the core and this plugin, and plans for its profiles."""

import hypothesis
import kvdock
import msgspec
import pytest
from kvdock.model import DSAParams, MLAParams
from kvdock.startup import core_only
from kvdock_rocm import hooks

MHA = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=2, head_dim=128, v_head_dim=128))
MLA = kvdock.LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=512, qk_rope_head_dim=64))
DSA = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128))
hypothesis.settings.register_profile("rocm", max_examples=20, deadline=None)
hypothesis.settings.load_profile("rocm")

LAYERS = {"mha": MHA, "mla": MLA, "dsa": DSA}


@pytest.fixture
def plan():
    """Return a function that plans a model, or one layer of a kind, for a profile of this plugin."""

    def make(model, device="mi300x", budget=2**30, parallel=None, **options):
        registry = core_only()
        registry.add(hooks, name="rocm", tier="hardware", distribution="kvdock-rocm", version="0.1.0")
        if model in LAYERS:
            model = kvdock.ModelSpec(
                name="m", architecture="A", layers=(LAYERS[model],), context_length=4096, dtype="bfloat16"
            )
        info = device if isinstance(device, kvdock.DeviceInfo) else hooks.device_catalogue()[device]
        return kvdock.plan(
            model, device=info, options=options, budget_bytes=budget, registry=registry, parallel=parallel
        )

    return make


@pytest.fixture
def objections(plan):
    """Return a function that plans in vain, and gives what this plugin said against it."""

    def make(*args, **kwargs):
        with pytest.raises(kvdock.UnsupportedCombination) as caught:
            plan(*args, **kwargs)
        return [reason for plugin, reason in caught.value.objections if plugin == "rocm" and reason != "declined"]

    return make


@pytest.fixture
def dsv4_registry(registries):
    """Return a function that gives the core, this plugin, DeepSeek V4 and, unless told otherwise, their variant."""
    return registries("rocm")


@pytest.fixture
def planned(dsv4_registry, small):
    """Return a function that plans a small DeepSeek V4, or another config; storages are not rounded up."""

    def make(config=None, budget=2**26, device="mi300x", with_variant=True, parallel=None, **options):
        card = msgspec.structs.replace(hooks.device_catalogue()[device], granularity_bytes=1)
        return kvdock.plan(
            config or small,
            device=card,
            options={"max_running_requests": 4, **options},
            parallel=parallel,
            budget_bytes=budget,
            registry=dsv4_registry(with_variant),
        )

    return make


@pytest.fixture
def cached(planned):
    """Return a function that builds the same on the host, with debug."""

    def make(config=None, **options):
        return kvdock.build(planned(config, **{"max_total_tokens": 4096, **options}), device="cpu", debug=True)

    return make


@pytest.fixture
def dsv4_objections(planned):
    """Return a function that plans in vain, and gives what the variant said against it."""

    def make(**options):
        with pytest.raises(kvdock.UnsupportedCombination) as caught:
            planned(**options)
        said = [reason for plugin, reason in caught.value.objections if plugin == "rocm.dsv4"]
        return [reason for reason in said if reason != "declined" and not reason.startswith("unfit: ")]

    return make
