"""The plugin and its form of DeepSeek V4 as a whole, and its devices, keep the promises of kvdock's conformance kit."""

import kvdock
import msgspec
from kvdock.model import ConvBlock, ConvParams, DSAParams, MLAParams, StateParams
from kvdock.testing.suites import CPU, SLIDING_MODEL, SMALL_MODEL, Case, DeviceSuite, PluginSuite
from kvdock_ascend import hooks
from others import cuda_device

CARD = hooks.device_catalogue()["910b-64gb"]
STATES = StateParams(conv=(ConvParams(blocks=(ConvBlock(heads=2, head_dim=16),), kernel=4),), temporal=(2, 16, 16))
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}


def of_layers(*kinds):
    layers = tuple(kvdock.LayerSpec(kind=kind, params=params) for kind, params in kinds)
    return msgspec.structs.replace(SMALL_MODEL, layers=layers)


MLA = of_layers(("mla", MLAParams(kv_lora_rank=128, qk_rope_head_dim=16)))
DSA = of_layers(("dsa", DSAParams(kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128)))
LINEAR = of_layers(("mha", SMALL_MODEL.layers[0].params), ("state", STATES), ("state", STATES))
PURE = msgspec.structs.replace(SLIDING_MODEL, layers=SLIDING_MODEL.layers[:1] * 2)


class TestAscend(PluginSuite):
    plugin = "ascend"
    cases = (
        *(Case(device=CARD, model=model, budget_bytes=2**28) for model in (SMALL_MODEL, MLA, DSA, SLIDING_MODEL, PURE)),
        Case(device=CARD, model=LINEAR, options={"max_running_requests": 4}, budget_bytes=2**28),
        Case(device=CARD, model=LINEAR, options={"max_running_requests": 4, **EAGLE}, budget_bytes=2**28),
        Case(device=CARD, options={"role": "prefill"}, budget_bytes=2**28),
    )
    foreign = (CPU, cuda_device())


class TestAscendDevices(DeviceSuite):
    plugin = "ascend"
    plugins = (("ascend", hooks),)
