"""What options and parallel sizes ask of the classes that a plan chooses.

A class lists the features that it honours; one that lacks what is asked is not chosen, so an old
plugin is never trusted with an option that it does not know.
"""

from __future__ import annotations

from typing import Literal

from kvdock import dtypes
from kvdock.queries import PoolQuery, Query

Part = Literal["pool", "allocator", "request_pool"]

_SWITCHES: dict[str, tuple[str, tuple[Part, ...]]] = {
    "page_major": ("page_major", ("pool",)),
    "unified_memory": ("unified_memory", ("pool", "allocator", "request_pool")),
    "layer_split": ("layer_split", ("pool",)),
    "late_backing": ("late_backing", ("pool",)),
    "memory_saver": ("memory_saver", ("pool",)),
    "hisparse": ("hisparse", ("pool", "allocator")),
    "prefill_only_disable_kv_cache": ("no_kv", ("pool",)),
}
"""Boolean option → the feature that it asks for, and of which parts."""

NO_KV_DTYPE = frozenset({"state", "sparse_index"})
"""Kinds of pools that keep nothing in the data type of keys and values."""

FEATURE_OPTIONS = frozenset({*_SWITCHES, "kv_cache_dtype", "role", "speculative_algorithm"})
"""Options that are honoured by choosing a class with the feature."""


def features_asked(query: Query, part: Part) -> frozenset[str]:
    """Return what a class for `part` must honour under the query's options and parallel sizes."""
    options, parallel = query.options, query.parallel
    asked = {feature for option, (feature, parts) in _SWITCHES.items() if part in parts and getattr(options, option)}
    if isinstance(query, PoolQuery):
        dtype_feature = dtypes.find(query.kv_dtype).feature
        if dtype_feature is not None and query.kind not in NO_KV_DTYPE:
            asked.add(dtype_feature)
        if query.kind == "state" and options.replay_rings:
            asked.add("replay_rings")
        if parallel.cp_size > 1:
            asked.add("context_parallel")
    if part in ("allocator", "pool") and parallel.dcp_size > 1:
        asked.add("dcp")
    if part != "pool" and options.role not in (None, "none"):
        asked.add("disaggregation")
    if part == "request_pool" and options.speculative_algorithm is not None:
        asked.add("speculation")
    return frozenset(asked)


def asked_by(query: Query) -> tuple[str, ...]:
    """Return the options and parallel sizes that ask for features, as ``name=value``."""
    options, parallel = query.options, query.parallel
    found = [f"{option}=true" for option in (*_SWITCHES, "replay_rings") if getattr(options, option)]
    if dtypes.find(query.kv_dtype).feature is not None:
        found.append(f"kv_cache_dtype={options.kv_cache_dtype}")
    if options.role not in (None, "none"):
        found.append(f"role={options.role}")
    found += [f"{name}={size}" for name in ("cp_size", "dcp_size") if (size := getattr(parallel, name)) > 1]
    return tuple(found)
