"""What AMD's kernels do not read: each rule answers a reason or ``None``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvdock import dtypes
from kvdock.dtypes import DType
from kvdock.hardware import unknown_backend
from kvdock.layout import TARGET
from kvdock.queries import PlanQuery

from kvdock_rocm import device, settings
from kvdock_rocm.formats import is_fnuz

INDEXER_PAGE_STEP = 16
"""The kernels that read index keys in pages take multiples of this; those that do not take single tokens."""

BACKENDS = frozenset(
    {
        "aiter",
        "aiter_mla",
        "aiter_unified",
        "ck",
        "fa2",
        "flash_attn",
        "flex_attention",
        "rocm_aiter_fa",
        "rocm_aiter_mla",
        "rocm_aiter_mla_sparse",
        "rocm_aiter_triton_mla",
        "rocm_aiter_unified_attn",
        "rocm_attn",
        "tilelang",
        "torch",
        "torch_native",
        "torch_sdpa",
        "triton",
        "triton_attn",
        "triton_mla",
        "wave",
    }
)
"""Attention backends that engines have for AMD devices; `settings.Settings.backends` adds to them."""

Rule = Callable[[PlanQuery], str | None]


def objections(query: PlanQuery) -> tuple[str, ...]:
    """Return all that is said against a plan for an AMD device."""
    return tuple(reason for rule in RULES if (reason := rule(query)) is not None)


def _unknown_backend(query: PlanQuery) -> str | None:
    """Object to a backend that nobody has: the bytes of a row follow its name, so a slip would not be seen."""
    if query.worker != TARGET:
        return None
    return unknown_backend(query, settings.PLUGIN, BACKENDS.union(settings.of(query.options).backends))


def _indexer_page(query: PlanQuery) -> str | None:
    page_size = query.options.page_size or 1
    if not _is_sparse(query) or page_size == 1 or page_size % INDEXER_PAGE_STEP == 0:
        return None
    return (
        f"page_size={page_size}: ROCm kernels read the index keys of {query.model.name} token by token or in pages of "
        f"{INDEXER_PAGE_STEP}, 32, 48 … tokens; give page_size=1, {INDEXER_PAGE_STEP} or 64"
    )


def _blocks(query: PlanQuery) -> str | None:
    """Object to formats in blocks that the architecture does not know."""
    dtype = dtypes.find(query.kv_dtype)
    if not dtype.block or _reads_blocks(query, dtype):
        return None
    return (
        f"kv_cache_dtype={query.options.kv_cache_dtype} is no format that {_named(query)} reads: blocks with scales that "
        "are powers of two, of 4 or 8 bits, are read from gfx950 on, others nowhere; give kv_cache_dtype=bfloat16"
    )


def _index_blocks(query: PlanQuery) -> str | None:
    dtype = _index_dtype(query)
    if dtype is None or not dtype.block or _reads_blocks(query, dtype):
        return None
    return (
        f"index_dtype={query.options.index_dtype} keeps index keys in blocks with scales that are powers of two, which "
        f"are read from gfx950 on, not on {_named(query)}; give index_dtype=fp8"
    )


def _foreign_floats(query: PlanQuery) -> str | None:
    foreign = [] if is_fnuz(query.device) else [option for option, name in _floats(query) if name.endswith("fnuz")]
    if not foreign:
        return None
    listed = ", ".join(f"{option}={getattr(query.options, option)}" for option in foreign)
    return (
        f"{listed}: the encoding of gfx942, which {_named(query)} does not read; give fp8_e4m3 or fp8_e5m2, which mean "
        "the device's own"
    )


def _floats(query: PlanQuery) -> Iterator[tuple[str, str]]:
    """Yield the options that name a data type, each with the full name."""
    yield "kv_cache_dtype", query.kv_dtype
    index = _index_dtype(query)
    if index is not None:
        yield "index_dtype", index.name


def _index_dtype(query: PlanQuery) -> DType | None:
    chosen = query.options.index_dtype
    if chosen in (None, "auto") or not _is_sparse(query):
        return None
    return dtypes.find(str(chosen), option="index_dtype")


def _reads_blocks(query: PlanQuery, dtype: DType) -> bool:
    return dtype.scale == "float8_e8m0fnu" and device.architecture(query.device) in device.MICROSCALING


def _is_sparse(query: PlanQuery) -> bool:
    # All layers, not this rank's alone, so that every stage of a pipeline answers alike.
    return any(layer.kind == "dsa" for layer in query.model.layers)


def _named(query: PlanQuery) -> str:
    return f"{device.architecture(query.device)} ({query.device.name})"


RULES: tuple[Rule, ...] = (_unknown_backend, _indexer_page, _blocks, _index_blocks, _foreign_floats)
"""The rules, in the order in which they are reported."""
