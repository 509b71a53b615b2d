"""What AMD's kernels do not read: each rule answers a reason or ``None``."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
from kvdock import dtypes
from kvdock.hardware import (
    dtype_option,
    floats_of_8_bits,
    foreign_floats,
    has_form,
    has_own_rows,
    torn_rows,
    unknown_backend,
    variant_advice,
)
from kvdock.layout import TARGET
from kvdock.pools.base import Pool
from kvdock.queries import PlanQuery

from kvdock_rocm import device, pools, settings

INDEXER_PAGE_STEP = 16
"""The kernels that read index keys in pages take multiples of this; those that do not take single tokens."""

OURS = ("kvdock.", "kvdock_rocm.")
"""Modules whose pools keep rows in the encoding that an option names."""

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


def _torn_rows(query: PlanQuery) -> str | None:
    return torn_rows(query, pools.RAW_ROWS, BACKENDS)


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
    option, value = dtype_option(query, "kv_cache_dtype")
    if not value or _reads(query, value):
        return None
    advice = "leave kv_cache_dtype out" if has_own_rows(query) else "give kv_cache_dtype=bfloat16"
    return (
        f"{option}={value} is no format that {_named(query)} reads: blocks with scales that "
        f"are powers of two, of 4 or 8 bits, are read from gfx950 on, others nowhere; {advice}"
    )


def _index_blocks(query: PlanQuery) -> str | None:
    _, value = dtype_option(query, "index_dtype")
    if not value or _reads(query, value):
        return None
    return (
        f"index_dtype={value} keeps index keys in blocks with scales that are powers of two, which "
        f"are read from gfx950 on, not on {_named(query)}; give index_dtype=fp8"
    )


def _foreign_floats(query: PlanQuery) -> str | None:
    """Object to encodings of 8 bits that the architecture does not read, in whatever buffer; blocks have a rule of their own."""
    if _blocks(query) is not None or settings.of(query.options).foreign_floats:
        return None
    native = device.native_floats(query.device)
    packed = _packed(query, native)
    if has_form(query, settings.PLUGIN, packed):  # it lacks what is asked, and says so itself
        others = tuple(buffer for buffer in query.buffers if query.pools[buffer.owner] not in packed)
        query, packed = msgspec.structs.replace(query, buffers=others), set()
    foreign = foreign_floats(query, native)
    if not foreign:
        return None
    advice = f"give {native[0]}"
    if packed:
        advice = f"{variant_advice(settings.PLUGIN, packed)} for the form that it does, and leave kv_cache_dtype out"
    return (
        f"{foreign}: an encoding of 8 bits that {_named(query)} does not read; {advice}, or, if your kernels "
        "convert what they read, plugin_options={'rocm': {'foreign_floats': True}}"
    )


def _packed(query: PlanQuery, native: Collection[str]) -> set[type[Pool]]:
    """Return the pools whose rows have a foreign encoding from a family's layout, so that no name of a type changes it."""
    return {
        pool
        for buffer, encoding in floats_of_8_bits(query.buffers)
        if encoding not in native
        and buffer.role != "index"
        and not (pool := query.pools[buffer.owner]).__module__.startswith(OURS)
    }


def _reads(query: PlanQuery, value: str) -> bool:
    dtype = dtypes.find(value)
    is_known = dtype.scale == "float8_e8m0fnu" and device.architecture(query.device) in device.MICROSCALING
    return not dtype.block or is_known


def _is_sparse(query: PlanQuery) -> bool:
    # All layers, not this rank's alone, so that every stage of a pipeline answers alike.
    return any(layer.kind == "dsa" for layer in query.model.layers)


def _named(query: PlanQuery) -> str:
    return f"{device.architecture(query.device)} ({query.device.name})"


RULES: tuple[Rule, ...] = (_unknown_backend, _torn_rows, _indexer_page, _blocks, _index_blocks, _foreign_floats)
"""The rules, in the order in which they are reported."""
