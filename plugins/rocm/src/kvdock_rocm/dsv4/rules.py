"""What the form of DeepSeek V4 for AMD devices does not have: each rule answers a reason or ``None``."""

from __future__ import annotations

from collections.abc import Callable

from kvdock import dtypes
from kvdock.queries import PlanQuery
from kvdock_dsv4 import settings

from kvdock_rocm.formats import INDEX_NATIVE, is_fnuz

KV_DTYPE = "bfloat16"
"""The only type of rows."""
INDEX_BITS = 8

Rule = Callable[[PlanQuery], str | None]


def objections(query: PlanQuery) -> tuple[str, ...]:
    """Return every objection to a plan of a DeepSeek V4 target for an AMD device."""
    return tuple(reason for rule in RULES if (reason := rule(query)) is not None)


def _rows_dtype(query: PlanQuery) -> str | None:
    if query.kv_dtype == KV_DTYPE:
        return None
    return (
        f"kv_cache_dtype={query.options.kv_cache_dtype} ({query.kv_dtype}): kernels on {query.device.name} read rows of "
        f"DeepSeek V4 in {KV_DTYPE} alone; leave kv_cache_dtype out"
    )


def _index_dtype(query: PlanQuery) -> str | None:
    """Object to index keys of other than 8 bits."""
    asked = str(query.options.index_dtype or "auto").removeprefix("torch.")
    chosen = INDEX_NATIVE.get(asked, asked) if is_fnuz(query.device) else asked
    dtype = None if chosen == "auto" else dtypes.find(chosen, option="index_dtype")
    if settings.settings_of(query).fp4_indexer or (dtype is not None and dtype.bits < INDEX_BITS):
        return (
            f"index keys of 4 bits (fp4_indexer, index_dtype=fp4) are no form that kernels on {query.device.name} read for "
            "DeepSeek V4; leave both out"
        )
    return None


def _online(query: PlanQuery) -> str | None:
    if not settings.is_online(query):
        return None
    return (
        f"online_compress=true is no form of states that kernels on {query.device.name} read, which keep a ring of them; "
        "leave online_compress out"
    )


def _shared_prefixes(query: PlanQuery) -> str | None:
    if not query.options.prefix_cache:
        return None
    return (
        "prefix_cache=true lets requests begin with others' tokens, and here sliding rows and states of those lie in the "
        "rings of other rows; give prefix_cache=false"
    )


RULES: tuple[Rule, ...] = (_rows_dtype, _index_dtype, _online, _shared_prefixes)
"""In the order in which they are reported."""
