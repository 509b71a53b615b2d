"""Plans for this plugin's profiles, and caches of them whose pools write through a strict stand-in for torch_npu."""

import importlib
import importlib.util
from pathlib import Path

import hypothesis
import kvdock
import msgspec
import pytest
from kvdock.model import ConvBlock, ConvParams, DSAParams, MLAParams, StateParams
from kvdock.startup import core_only
from kvdock_ascend import hooks

hypothesis.settings.register_profile("ascend", max_examples=20, deadline=None)
hypothesis.settings.load_profile("ascend")

MHA = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=2, head_dim=128, v_head_dim=128))
MLA = kvdock.LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=512, qk_rope_head_dim=64))
DSA = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128))
SLIDING = msgspec.structs.replace(MHA, window_tokens=127)
STATE = kvdock.LayerSpec(
    kind="state",
    params=StateParams(conv=(ConvParams(blocks=(ConvBlock(heads=4, head_dim=16),), kernel=4),), temporal=(4, 8, 16)),
)
"""64 channels of 3 inputs, and 4 heads of 8 × 16."""
MODELS = {
    "mha": (MHA, MHA, MHA),
    "mla": (MLA, MLA),
    "dsa": (DSA, DSA),
    "sliding": (MHA, SLIDING, SLIDING),
    "pure": (SLIDING, SLIDING),
    "linear": (MHA, STATE, STATE),
}


def model(kind, **more):
    return kvdock.ModelSpec(
        **{
            "name": "m",
            "architecture": "A",
            "layers": MODELS[kind],
            "context_length": 4096,
            "dtype": "bfloat16",
            **more,
        }
    )


def _fake():
    spec = importlib.util.spec_from_file_location("fake_npu", Path(__file__).with_name("fake_npu.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model_of():
    """Return the function that makes a model of a kind of `MODELS`."""
    return model


@pytest.fixture
def fake_npu():
    """The stand-in for torch_npu: a module of its own, so that tests can ask for its class and its error."""
    pytest.importorskip("torch")
    return _fake()


@pytest.fixture
def registry():
    """The core and this plugin alone, whatever is installed."""
    found = core_only()
    found.add(hooks, name="ascend", tier="hardware", distribution="kvdock-ascend", version="0.1.0")
    return found


@pytest.fixture
def plan(registry):
    """Return a function that plans a kind of `MODELS`, a config, or a model for a profile of this plugin."""

    def make(what="mha", device="910b-64gb", budget=2**28, parallel=None, **options):
        chosen = model(what) if what in MODELS else what
        info = device if isinstance(device, kvdock.DeviceInfo) else hooks.device_catalogue()[device]
        return kvdock.plan(
            chosen, device=info, options=options, budget_bytes=budget, registry=registry, parallel=parallel
        )

    return make


@pytest.fixture
def objections(plan):
    """Return a function that plans in vain, and gives what this plugin said against it."""

    def make(*args, **kwargs):
        with pytest.raises(kvdock.UnsupportedCombination) as caught:
            plan(*args, **kwargs)
        return [reason for plugin, reason in caught.value.objections if plugin == "ascend" and reason != "declined"]

    return make


@pytest.fixture
def npu_pool(fake_npu):
    """Return a function that gives a group's pool again, with the kernels of an NPU over the stand-in."""
    from kvdock_ascend.kernels.npu_set import NpuKernels
    from kvdock_ascend.ops import Ops

    def make(cache, name=None):
        choice = next(c for c in cache.plan.outline.pools if name in (None, c.name))
        fake = fake_npu.TorchNpu()
        parts = msgspec.structs.replace(cache.pools[choice.name].parts, kernels=NpuKernels(Ops(fake)))
        return choice.cls(choice.query, parts), fake

    return make


@pytest.fixture
def dsv4_registry(registries):
    """Return a function that gives the core, this plugin, DeepSeek V4 and, unless told otherwise, their variant."""
    return registries("ascend")


@pytest.fixture
def planned(dsv4_registry, small):
    """Return a function that plans a small DeepSeek V4, or another config; storages are not rounded up."""
    card = msgspec.structs.replace(hooks.device_catalogue()["910c"], granularity_bytes=1)

    def make(config=None, budget=2**27, with_variant=True, **options):
        options = {"max_running_requests": 4, "swa_full_tokens_ratio": 0.5, **options}
        found = dsv4_registry(with_variant)
        return kvdock.plan(config or small, device=card, options=options, budget_bytes=budget, registry=found)

    return make


@pytest.fixture
def cached(planned):
    """Return a function that builds the same on the host, with debug."""

    def make(**options):
        return kvdock.build(planned(**{"max_total_tokens": 4096, **options}), device="cpu", debug=True)

    return make


@pytest.fixture
def dsv4_objections(planned):
    """Return a function that plans in vain, and gives what each plugin said against it."""

    def make(**options):
        with pytest.raises(kvdock.UnsupportedCombination) as caught:
            planned(**options)
        return dict(caught.value.objections)

    return make
