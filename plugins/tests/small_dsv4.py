"""A small DeepSeek V4 for the tests of all its forms: its config, its drafts, and what the conformance kit asks of each."""

from kvdock.testing.suites import Case


def of_ratios(*ratios):
    """Return the config of a model with a layer of each compress ratio.

    A row is 80 columns: 160 bytes in bfloat16, or packed 64 + 2 · 16 bytes and 8 of scales.
    """
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


def narrow(ratios):
    """Return the same with rows of 24 columns, for runs in which many tokens are written."""
    return of_ratios(*ratios) | {"head_dim": 24, "qk_rope_head_dim": 8}


def drafting(tokens):
    """Return the options with which a step verifies so many tokens in one branch."""
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": tokens - 1,
        "speculative_topk": 1,
        "speculative_num_draft_tokens": tokens,
    }


def kit_cases(device, **options):
    """Return the cases of a form's `PluginSuite`: every combination of ratios, both roles, and drafts."""
    eagle = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}

    def case(*ratios, **more):
        given = {"max_running_requests": 2, **options, **more}
        return Case(device=device, config=of_ratios(*ratios), options=given, budget_bytes=2**28)

    return (
        case(0, 4, 128, 4),
        case(0),
        case(4),
        case(128),
        case(0, 4, 128, role="prefill"),
        case(0, 4, 128, role="decode"),
        case(0, 4, 128, page_size=256, **eagle),
    )
