"""The form of DeepSeek V4 for AMD devices keeps what a plugin promises as a whole, in every combination of ratios."""

import kvdock
import pytest
from kvdock.testing.suites import CPU, Case, PluginSuite
from kvdock_rocm import hooks

pytest.importorskip("kvdock_dsv4")

CARD = hooks.device_catalogue()["mi300x"]
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
OPTIONS = {"max_running_requests": 2, "max_total_tokens": 2048}
OTHERS_CUDA = kvdock.DeviceInfo(
    device_type="cuda",
    name="another vendor's",
    total_bytes=2**30,
    free_before_load_bytes=2**30,
    free_bytes=2**30,
    capabilities=("sm_90",),
)


def config(*ratios):
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(ratios),
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 80,
        "qk_rope_head_dim": 16,
        "sliding_window": 128,
        "index_head_dim": 128,
        "max_position_embeddings": 2048,
        "num_nextn_predict_layers": 1,
        "torch_dtype": "bfloat16",
        "compress_ratios": list(ratios),
    }


def case(*ratios, **options):
    return Case(device=CARD, config=config(*ratios), options=OPTIONS | options, budget_bytes=2**28)


class TestRocmDSV4(PluginSuite):
    plugin = "rocm.dsv4"
    group = "kvdock.variants"
    cases = (
        case(0, 4, 128, 4),
        case(0),
        case(4),
        case(128),
        case(0, 4, 128, role="prefill"),
        case(0, 4, 128, role="decode"),
        case(0, 4, 128, page_size=256, **EAGLE),
    )
    foreign = (CPU, OTHERS_CUDA)
