"""Models with latent attention (MLA): one row per token for all heads, with an indexer where attention is sparse."""

from __future__ import annotations

from kvdock.families.common import Family, Fields
from kvdock.model import DSAParams, MLAParams

FAMILIES = (
    Family(
        name="deepseek",
        architectures=(
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV3ForCausalLMNextN",
            "DeepseekV32ForCausalLM",
            "DeepseekVLV2ForCausalLM",
            "EagleDeepSeekMTPModel",
            "Eagle3DeepseekV2ForCausalLM",
        ),
    ),
    Family(name="kimi", architectures=("KimiK2ForCausalLM", "KimiVLForConditionalGeneration")),
    Family(name="minicpm3", architectures=("MiniCPM3ForCausalLM",)),
    Family(name="glm-latent", architectures=("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM")),
)

LATENT = "kv_lora_rank"


def is_latent(fields: Fields) -> bool:
    """Return whether the config describes latent attention."""
    return fields.has(LATENT) and fields.flag("use_mla") is not False


def read_latent(fields: Fields) -> tuple[str, MLAParams | DSAParams]:
    """Return the kind (``mla`` or ``dsa``) and the widths of the latent row.

    Raises:
        PlanError: a width is missing or no count.
    """
    lora = fields.needed(LATENT)
    rope = fields.needed("qk_rope_head_dim")
    index = fields.count("index_head_dim")
    if index is None:
        return "mla", MLAParams(kv_lora_rank=lora, qk_rope_head_dim=rope)
    return "dsa", DSAParams(kv_lora_rank=lora, qk_rope_head_dim=rope, index_head_dim=index)
