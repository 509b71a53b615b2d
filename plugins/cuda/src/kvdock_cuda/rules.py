"""What NVIDIA's kernels do not read: each rule answers a reason or ``None``."""

from __future__ import annotations

from collections.abc import Callable

from kvdock import dtypes
from kvdock.hardware import dtype_option, foreign_floats, torn_rows, unknown_backend
from kvdock.layout import TARGET
from kvdock.queries import PlanQuery

from kvdock_cuda import device, pools, settings

INDEXER_PAGE = 64
"""Tokens of a page of the kernels that read the index keys of sparse latent attention."""

BACKENDS = frozenset(
    {
        "cudnn",
        "cutlass_mla",
        "dual_chunk_flash_attn",
        "fa2",
        "fa3",
        "fa4",
        "flash_attn",
        "flash_attn_mla",
        "flashinfer",
        "flashinfer_mla",
        "flashmla",
        "flashmla_auto",
        "flashmla_decode",
        "flashmla_kv",
        "flashmla_prefill",
        "flashmla_sparse",
        "flex_attention",
        "tilelang",
        "torch",
        "torch_native",
        "torch_sdpa",
        "triton",
        "triton_mla",
        "trtllm",
        "trtllm_mha",
        "trtllm_mla",
        "xformers",
    }
)
"""Attention backends that engines have for NVIDIA devices; `settings.Settings.backends` adds to them."""

Rule = Callable[[PlanQuery], str | None]


def objections(query: PlanQuery) -> tuple[str, ...]:
    """Return all that is said against a plan for an NVIDIA device."""
    return tuple(reason for rule in RULES if (reason := rule(query)) is not None)


def _too_old(query: PlanQuery) -> str | None:
    if query.worker != TARGET or not device.is_too_old(query.device):
        return None
    major, minor = device.LEAST
    return (
        f"{query.device.name} is {device.compute_capability(query.device)}, and kernels are written for sm_{major}{minor} "
        "and later, which have bfloat16 and Triton; give another device, or budget_bytes in place of a device"
    )


def _unknown_backend(query: PlanQuery) -> str | None:
    """Object to a backend that nobody has: the bytes of a row follow its name, so a slip would not be seen."""
    if query.worker != TARGET:
        return None
    return unknown_backend(query, settings.PLUGIN, BACKENDS.union(settings.of(query.options).backends))


def _indexer_page(query: PlanQuery) -> str | None:
    # All layers, not this rank's alone, so that every stage of a pipeline answers alike.
    is_sparse = any(layer.kind == "dsa" for layer in query.model.layers)
    page_size = query.options.page_size or 1
    if not is_sparse or page_size == INDEXER_PAGE:
        return None
    return (
        f"page_size={page_size}: CUDA kernels read the index keys of {query.model.name} in pages of {INDEXER_PAGE} "
        f"tokens; give page_size={INDEXER_PAGE}"
    )


def _torn_rows(query: PlanQuery) -> str | None:
    return torn_rows(query, pools.TRTLLM, BACKENDS)


def _four_bits(query: PlanQuery) -> str | None:
    """Object to keys and values, and to index keys, of 4 bits."""
    asked = [(name, *dtype_option(query, name)) for name in ("kv_cache_dtype", "index_dtype")]
    wrong = [(name, option, value) for name, option, value in asked if value and dtypes.find(value).bits <= 4]
    if not wrong or device.FP4 in query.device.capabilities:
        return None
    listed = ", ".join(f"{option}={value}" for _, option, value in wrong)
    return (
        f"{listed} needs 4-bit floats, which devices have from sm_100 on, and {query.device.name} is "
        f"{device.compute_capability(query.device)}; give {', '.join(f'{name}=fp8_e4m3' for name, _, _ in wrong)}"
    )


def _foreign_floats(query: PlanQuery) -> str | None:
    foreign = foreign_floats(query, device.NATIVE_FLOATS)
    if not foreign:
        return None
    return f"{foreign} is an encoding of other vendors' devices, which no kernel of {query.device.name} reads; give fp8_e4m3"


RULES: tuple[Rule, ...] = (_too_old, _unknown_backend, _torn_rows, _indexer_page, _four_bits, _foreign_floats)
"""The rules, in the order in which they are reported."""
