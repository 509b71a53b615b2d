"""Configs, plans and caches of DeepSeek V4 that the tests share."""

import kvdock
import pytest
from kvdock.builder import build
from kvdock.device import DeviceInfo
from kvdock.options import make_options, make_parallelism
from kvdock.startup import core_only
from kvdock_dsv4 import hooks

FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_head_dim": 128,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
}


@pytest.fixture
def flash():
    return dict(FLASH)


@pytest.fixture
def registry():
    """The core and this plugin alone, whatever is installed."""
    found = core_only()
    found.add(hooks, name="dsv4", tier="family")
    return found


@pytest.fixture
def plan(registry):
    """Plan a config for so many bytes; options by name, parallel sizes by `pp_size` and the like."""

    def planned(config, budget_bytes=2**24, device_type="cpu", parallel=None, **options):
        device = DeviceInfo(
            device_type=device_type, name="test", total_bytes=2**44, free_before_load_bytes=2**44, free_bytes=2**44
        )
        return kvdock.plan(
            config,
            device=device,
            options=make_options(options),
            parallel=make_parallelism(parallel or {}),
            budget_bytes=budget_bytes,
            registry=registry,
        )

    return planned


@pytest.fixture
def cache(plan, small):
    """Build a cache of the small model with debug; at most 4 requests unless it is told."""

    def built(config=None, budget_bytes=2**23, **options):
        options = {"max_running_requests": 4, "swa_full_tokens_ratio": 0.5, **options}
        return build(plan(config or small, budget_bytes, **options), device="cpu", debug=True)

    return built
