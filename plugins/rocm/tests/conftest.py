"""A registry of the core and this plugin, and plans for its profiles."""

import kvdock
import pytest
from kvdock.model import DSAParams, MLAParams
from kvdock.startup import core_only
from kvdock_rocm import hooks

MHA = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=2, head_dim=128, v_head_dim=128))
MLA = kvdock.LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=512, qk_rope_head_dim=64))
DSA = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128))
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
