"""The family keeps what a plugin promises as a whole, in every combination of ratios."""

from kvdock.testing.suites import CPU, Case, PluginSuite

EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
OPTIONS = {"max_running_requests": 2, "max_total_tokens": 8192}


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
    return Case(device=CPU, config=config(*ratios), options=OPTIONS | options, budget_bytes=2**28)


class TestDSV4(PluginSuite):
    plugin = "dsv4"
    group = "kvdock.families"
    cases = (
        case(0, 4, 128, 4),
        case(0),
        case(4),
        case(128),
        case(0, 4, 128, role="prefill"),
        case(0, 4, 128, role="decode"),
        case(0, 4, 128, page_size=256, **EAGLE),
    )
