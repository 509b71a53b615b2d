"""The table: what holds between kvdock and the engine, case by case."""

from kvdock.errors import BudgetError, PlanError, UnsupportedCombination

EQUAL = frozenset(
    {
        "llama-3.1-8b-page1",
        "llama-3.1-8b-page16",
        "llama-3.1-8b-page64",
        "llama-3.1-8b-fp8-e4m3",
        "llama-3.1-8b-fp8-e5m2",
        "llama-3.1-8b-nvfp4",
        "llama-3.1-8b-fp4-mx-block16",
        "llama-3.1-8b-mxfp8-page128",
        "llama-3.1-8b-page-major",
        "llama-3.1-8b-max-total-tokens-cap",
        "llama-3.1-8b-max-total-tokens-above-profile",
        "llama-3.1-8b-mem-fraction",
        "llama-3.1-8b-max-running-capped-by-tokens",
        "llama-3.1-8b-context-4096",
        "llama-3.1-8b-context-32768",
        "llama-3.1-8b-decode-disagg",
        "llama-3.1-70b-tp1",
        "llama-3.1-70b-tp4",
        "llama-3.1-70b-tp8",
        "llama-3.1-70b-tp4-pp3-rank0",
        "llama-3.1-70b-tp4-pp3-rank2",
        "qwen3-8b",
        "qwen3-235b-a22b-tp8",
        "mistral-7b-v0.3",
        "mistral-7b-v0.1-sliding-window",
        "gemma-2-9b",
        "minimax-m2-tp8",
        "gpt-oss-20b",
        "gpt-oss-20b-fp8",
        "gpt-oss-20b-disable-hybrid-swa-memory",
        "gpt-oss-120b-tp4",
        "gpt-oss-120b-max-total-tokens",
        "gpt-oss-20b-chunk-cap",
        "gpt-oss-20b-page-major",
        "mimo-v2-flash-tp4",
        "mimo-v2-like-different-swa-head-dims",
        "llama-4-scout-tp8",
        "deepseek-v3-bf16",
        "deepseek-v3-page64",
        "deepseek-v3-fp4-mx-block16",
        "deepseek-v3-tp8-dp8",
        "deepseek-v3-pp2-rank0",
        "deepseek-v3.2-dsa-bf16",
        "deepseek-v3.2-dsa-fp8",
        "minimax-m3-sparse-synthetic",
        "minimax-m3-sparse-synthetic-pp2-rank0",
        "qwen3-next-80b-a3b-tp4",
        "qwen3-next-80b-a3b-default-reqs",
        "qwen3-next-extra-buffer",
        "qwen3-next-no-radix-max-running",
        "qwen3-next-explicit-max-mamba-cache",
        "qwen3-next-pp2-rank0",
        "nemotron-h-8b",
        "kimi-linear-48b-a3b",
        "llama-3.1-8b-eagle3",
        "llama-3.1-70b-standalone-draft-1b",
        "deepseek-v3-mtp",
        "deepseek-v3.2-mtp",
        "gpt-oss-20b-eagle3-chunk-cap",
        "qwen3-next-mtp-tp4",
        "qwen3-next-mtp-no-radix",
        "llama-3.1-8b-ngram",
        "gemma-4-style-hybrid",
        "generic-opt-in-hybrid-swa",
        "llama-v-head-dim-64",
        "qwen3-next-linear-replayssm",
        "qwen3-next-nvfp4",
        "qwen3-next-mxfp8",
        "gpt-oss-20b-mxfp8",
        "qwen3-next-decode-disagg-no-radix",
    }
)
"""Counts with the engine's approximations; every tensor, request table and byte without them."""

COUNTS_DIFFER = {
    "gpt-oss-120b-pp2-rank0": "the engine's first stage owns one layer too many, which lowers the shared minimum",
    "gpt-oss-20b-chunk-cap-max-total-tokens": "the engine's sliding pool has 20,001 slots, which is no whole page of 64",
    "generic-hybrid-swa-v-head-dim-64": "the engine charges sliding values, and builds all values, with head_dim",
    "gpt-oss-20b-nvfp4": "the engine builds no quantizer: an element takes a whole byte and has no scale",
}
"""Sizes, and so tensors, that are not the engine's, and why."""

TENSORS_DIFFER = {
    "llama-prefill-only-noop-pool": "the engine keeps a row of each layer; kvdock one element in all",
    "qwen3-next-mtp-gdn-replayssm": "the engine's rings of unverified drafts, in place of snapshots, are out of scope",
    "qwen3-next-int8-mamba-checkpoint": "the engine's pool of 8-bit state checkpoints is out of scope",
}
"""Counts are equal, tensors are not, and why."""

REFUSED = {
    "fail-llama-budget-below-one-token": (BudgetError, r"one request \(2 tokens\) needs"),
    "fail-llama-budget-below-one-page": (BudgetError, r"one request \(64 tokens\) needs"),
    "fail-llama-negative-budget": (BudgetError, r"mem_fraction_static=0\.9 leaves too little"),
    "fail-gpt-oss-swa-pool-below-window": (BudgetError, r"one request \(162 tokens\) needs"),
    "fail-gpt-oss-budget-zero-tokens": (BudgetError, r"one request \(162 tokens\) needs"),
    "fail-gpt-oss-chunk-cap-no-room": (BudgetError, r"max_running_requests=256 needs"),
    "fail-qwen3-next-no-mamba-slot": (BudgetError, r"max_running_requests=8 needs"),
    "fail-qwen3-next-explicit-mamba-too-large": (BudgetError, r"plan for less: max_state_slots=26"),
    "fail-unified-memory-plain-model": (UnsupportedCombination, r"core: unified_memory=true has nothing to share out"),
    "fail-context-longer-than-model": (PlanError, r"context_length=262144 is above the model's 131072"),
    "fail-kv-dtype-unknown": (PlanError, r"kv_cache_dtype='int3'"),
    "fail-prefill-only-mla": (UnsupportedCombination, r"core: .* latents .*leave prefill_only_disable_kv_cache out"),
}
"""Refused by both, and how kvdock says so."""

PLANNED = {
    "fail-generic-all-swa-page16": "a model whose layers all slide has pages of any size",
    "fail-deepseek-v3-pp2-with-mtp": "drafts live on the last pipeline stage",
    "fail-dsa-page-size-1": "a page size is for the hardware to refuse; the CPU serves any",
    "qwen3-next-unified-memory": "states and tokens share one byte buffer",
    "fail-fp4-e2m1-deprecated": "an older name of the same format is read as the newer one",
}
"""Refused by the engine, planned by kvdock, and why."""

NEEDS_PLUGIN = frozenset(
    {
        "deepseek-v4-flash",
        "deepseek-v4-flash-no-max-running",
        "deepseek-v4-flash-max-total-tokens",
        "deepseek-v4-flash-state-bf16",
        "deepseek-v4-flash-pp2-rank0",
        "fail-deepseek-v4-page-size-64",
        "fail-deepseek-v4-page-size-128",
        "fail-deepseek-v4-bf16",
        "fail-deepseek-v4-budget-below-c128-state",
        "deepseek-v4-flash-online-c128",
    }
)
"""Models that core does not read; the plugin of their family has tests of its own."""
