"""What options and parallel sizes ask of the classes that a plan chooses.

A class lists the features that it honours; one that lacks what is asked is not chosen, so an old
plugin is never trusted with an option that it does not know.
"""

from __future__ import annotations

from typing import Literal

from kvdock import dtypes
from kvdock.layout import STATE
from kvdock.queries import PoolQuery, Query, RequestQuery

Part = Literal["pool", "allocator", "request_pool"]

_SWITCHES: dict[str, tuple[str, tuple[Part, ...]]] = {
    "page_major": ("page_major", ("pool",)),
    "unified_memory": ("unified_memory", ("pool", "allocator", "request_pool")),
    "layer_split": ("layer_split", ("pool",)),
    "late_backing": ("late_backing", ("pool",)),
    "hisparse": ("hisparse", ("pool", "allocator")),
    "prefill_only_disable_kv_cache": ("no_kv", ("pool",)),
}
"""Boolean option → the feature that it asks for, and of which parts."""

NO_KV_DTYPE = frozenset({"state", "sparse_index"})
"""Kinds of pools that keep nothing in the data type of keys and values."""

FEATURE_OPTIONS = frozenset({*_SWITCHES, "kv_cache_dtype", "role", "speculative_algorithm"})
"""Options that are honoured by choosing a class with the feature."""


def asking(query: Query, part: Part) -> dict[str, str]:
    """Return each feature that a class for `part` must honour, with the option or parallel size that asks, ``name=value``."""
    options, parallel = query.options, query.parallel
    asked = {
        feature: f"{option}=true"
        for option, (feature, parts) in _SWITCHES.items()
        if part in parts and getattr(options, option)
    }
    if isinstance(query, RequestQuery) and STATE not in query.spaces:
        asked.pop("unified_memory", None)  # rows alone lie where they always do
    if isinstance(query, PoolQuery):
        dtype_feature = dtypes.find(query.kv_dtype).feature
        if dtype_feature is not None and query.kind not in NO_KV_DTYPE:
            asked[dtype_feature] = f"kv_cache_dtype={options.kv_cache_dtype}"
        if query.kind == "state" and options.replay_rings:
            asked["replay_rings"] = "replay_rings=true"
        if parallel.cp_size > 1:
            asked["context_parallel"] = f"cp_size={parallel.cp_size}"
    if part in ("allocator", "pool") and parallel.dcp_size > 1:
        asked["dcp"] = f"dcp_size={parallel.dcp_size}"
    if part != "pool" and options.role not in (None, "none"):
        asked["disaggregation"] = f"role={options.role}"
    if part == "request_pool" and options.speculative_algorithm is not None:
        asked["speculation"] = f"speculative_algorithm={options.speculative_algorithm}"
    return asked


def features_asked(query: Query, part: Part) -> frozenset[str]:
    """Return what a class for `part` must honour under the query's options and parallel sizes."""
    return frozenset(asking(query, part))
