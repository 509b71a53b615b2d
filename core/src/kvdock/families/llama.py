"""Models whose layers keep keys and values per head and see everything: the common fields say all."""

from __future__ import annotations

from kvdock.families.common import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Family, Fields
from kvdock.model import MHAParams

FAMILIES = (
    Family(
        name="llama",
        architectures=(
            "LlamaForCausalLM",
            "LLaMAForCausalLM",
            "LlamaForCausalLMEagle",
            "LlamaForCausalLMEagle3",
            "EagleLlamaForCausalLM",
            "Eagle3LlamaForCausalLM",
            "YiForCausalLM",
            "InternLMForCausalLM",
            "InternLM2ForCausalLM",
            "InternLM3ForCausalLM",
            "InternVLChatModel",
            "LlavaForConditionalGeneration",
            "LlavaLlamaForCausalLM",
            "BaichuanForCausalLM",
            "BaiChuanForCausalLM",
            "StableLmForCausalLM",
            "ExaoneForCausalLM",
            "OrionForCausalLM",
            "MiniCPMForCausalLM",
            "ArceeForCausalLM",
            "AquilaForCausalLM",
            "SolarForCausalLM",
            "SeedOssForCausalLM",
            "Ernie4_5ForCausalLM",
            "Ernie4_5_MoeForCausalLM",
        ),
        embedding=("LlamaModel", "LlamaEmbeddingModel", "LlamaForSequenceClassification"),
    ),
    Family(
        name="qwen",
        architectures=(
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3OmniMoeForConditionalGeneration",
            "Qwen2ForCausalLMEagle",
            "Eagle3Qwen2_5vlForCausalLM",
            "Eagle3Qwen3vlForCausalLM",
            "MiMoForCausalLM",
        ),
        embedding=(
            "Qwen2Model",
            "Qwen3Model",
            "Qwen2ForRewardModel",
            "Qwen2ForSequenceClassification",
            "Qwen3ForSequenceClassification",
        ),
    ),
    Family(name="granite", architectures=("GraniteForCausalLM", "GraniteMoeForCausalLM")),
    Family(name="olmo", architectures=("OlmoForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM")),
    Family(
        name="glm",
        architectures=(
            "GlmForCausalLM",
            "Glm4ForCausalLM",
            "Glm4MoeForCausalLM",
            "Glm4vForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration",
            "ChatGLMModel",
            "ChatGLMForConditionalGeneration",
        ),
    ),
    Family(name="phi", architectures=("PhiForCausalLM",)),
    Family(name="minimax", architectures=("MiniMaxM2ForCausalLM",)),
    Family(name="gemma", architectures=("GemmaForCausalLM",)),
    Family(name="cohere", architectures=("CohereForCausalLM",)),
    Family(name="nemotron", architectures=("NemotronForCausalLM",)),
    Family(
        name="gpt",
        architectures=(
            "GPT2LMHeadModel",
            "GPTBigCodeForCausalLM",
            "GPTNeoXForCausalLM",
            "GPTJForCausalLM",
            "OPTForCausalLM",
            "BloomForCausalLM",
        ),
    ),
    # Its first configs leave the context to the model's class.
    Family(name="falcon", architectures=("FalconForCausalLM",), defaults={"max_position_embeddings": 2048}),
)


def read_heads(fields: Fields) -> MHAParams:
    """Return the KV heads and their sizes.

    The head size of the config wins over ``hidden_size / num_attention_heads``; without a field for them
    there are as many KV heads as query heads.

    Raises:
        PlanError: a field is no count, or the hidden size does not divide into heads.
    """
    heads = fields.needed(*HEADS)
    head_dim = fields.count(*HEAD_DIM) or _split(fields, heads)
    return MHAParams(
        num_kv_heads=_kv_heads(fields) or heads,
        head_dim=head_dim,
        v_head_dim=fields.count("v_head_dim") or head_dim,
    )


def _kv_heads(fields: Fields) -> int | None:
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1  # Falcon's first configs list their query heads as num_kv_heads
    if fields.flag("multi_query_attention"):
        return fields.needed("multi_query_group_num")
    return fields.count(*KV_HEADS)


def _split(fields: Fields, heads: int) -> int:
    hidden = fields.needed(*HIDDEN)
    if hidden % heads:
        raise fields.error(
            f"{fields.first(*HIDDEN)}={hidden} does not divide by {fields.first(*HEADS)}={heads}; add head_dim"
        )
    return hidden // heads
