"""What Ascend's kernels do not read: each rule answers a reason or ``None``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvdock.demand import page_size_of
from kvdock.hardware import has_form, has_own_rows, unknown_backend, variant_advice
from kvdock.layout import TARGET
from kvdock.queries import PlanQuery, Query

from kvdock_ascend import device, settings

PAGE_SIZE = 128
"""Tokens of a page where the user names none: what paged attention is fastest with."""

PAGE_STEP = 16
"""Kernels take pages of multiples of this."""

FIA_PAGES = (128, 256, 384, 512)
"""Pages that fused inference attention takes."""

MAX_INDEXER_PAGE = 1024
"""Tokens of the largest page that the indexer's kernel reads: its documentation gives multiples of 16 up to 1,024.

gitcode.com/cann/ops-transformer, attention/lightning_indexer.
"""

KV_DTYPES = ("bfloat16", "float16")
"""Types of keys and values that kernels read here."""

CORE_KINDS = frozenset({"mha", "mla", "dsa", "sparse_index", "state"})
"""Kinds of layer groups that are the core's: its pools are read here where this plugin has none of its own."""

UNREAD: Mapping[str, str] = MappingProxyType(
    {
        "page_major": "lays the layers of a page side by side",
        "unified_memory": "lays the pages of several spaces in one buffer",
        "replay_rings": "keeps the last steps of a layer in rings",
        "hisparse": "keeps rows on the host",
        "layer_split": "reads other ranks' layers through a scratch layer",
    }
)
"""Option → what it would do to the cache that kernels of these devices do not read."""

Rule = Callable[[PlanQuery], str | None]


def objections(query: PlanQuery) -> tuple[str, ...]:
    """Return all that is said against a plan for an Ascend device."""
    found = [reason for rule in WORKER_RULES if (reason := rule(query)) is not None]
    if query.worker == TARGET:
        found += _unread(query)
        found += [reason for rule in RULES if (reason := rule(query)) is not None]
    return tuple(found)


def prefill_only_objections(query: PlanQuery) -> tuple[str, ...]:
    """Return the objection to prefill without a cache: attention reads keys and values through one."""
    if query.worker != TARGET:
        return ()
    return (
        f"attention on {query.device.name} reads keys and values through the cache's pages; "
        "leave prefill_only_disable_kv_cache out",
    )


def unread(query: Query, option: str) -> str:
    """Return why an option of `UNREAD` is refused."""
    return f"{option}=true {UNREAD[option]}, which no kernel of {query.device.name} reads; leave {option} out"


def _unread(query: PlanQuery) -> list[str]:
    return [unread(query, option) for option in UNREAD if getattr(query.options, option)]


def _unknown_backend(query: PlanQuery) -> str | None:
    """Object to a backend that nobody has: views follow its name, so a slip would not be seen."""
    known = settings.BACKENDS.union(settings.of(query.options).backends)
    return unknown_backend(query, settings.PLUGIN, known, settings.BACKEND_OPTIONS)


def _page(query: PlanQuery) -> str | None:
    page_size = page_size_of(query)
    if settings.uses_fia(query):
        if page_size in FIA_PAGES:
            return None
        listed = ", ".join(str(size) for size in FIA_PAGES)
        return f"page_size={page_size} is not what fused inference attention reads; give one of {listed}"
    if page_size % PAGE_STEP == 0:
        return None
    return f"page_size={page_size} is no multiple of the {PAGE_STEP} tokens by which kernels page; give {PAGE_SIZE}"


def _indexer_page(query: PlanQuery) -> str | None:
    # All layers, not this rank's alone, so that every stage of a pipeline answers alike.
    return large_indexer_page(query) if any(layer.kind == "dsa" for layer in query.model.layers) else None


def large_indexer_page(query: PlanQuery) -> str | None:
    """Return why pages are too large for the indexer of a model that has one; ``None``: they are not."""
    page_size = page_size_of(query)
    if page_size <= MAX_INDEXER_PAGE:
        return None
    return (
        f"page_size={page_size}: the indexer of {query.model.name} reads pages of at most {MAX_INDEXER_PAGE} tokens; "
        f"give {PAGE_SIZE}"
    )


def _dtype(query: PlanQuery) -> str | None:
    if query.kv_dtype in KV_DTYPES or _foreign_layout(query) is not None:
        return None  # of rows in a layout for other devices the type is the least
    chosen = query.options.kv_cache_dtype
    given = "" if chosen in (None, "auto") else f"kv_cache_dtype={chosen}, "
    advice = "leave kv_cache_dtype out" if has_own_rows(query) else f"give kv_cache_dtype={' or '.join(KV_DTYPES)}"
    return f"{given}{query.kv_dtype} is no type of keys and values that kernels of {query.device.name} read; {advice}"


def _bfloat16(query: PlanQuery) -> str | None:
    if query.kv_dtype != "bfloat16" or device.reads_bfloat16(query.device):
        return None
    return f"{query.device.name} reads no bfloat16; give kv_cache_dtype=float16"


def _foreign_layout(query: PlanQuery) -> str | None:
    """Object to rows that a family lays out for other devices."""
    kinds = {group.name: group.kind for group in query.groups}
    wrong = {
        kinds[name]: pool
        for name, pool in query.pools.items()
        if kinds.get(name) not in (None, *CORE_KINDS) and device.DEVICE_TYPE not in (pool.device_types or ())
    }
    if not wrong or has_form(query, settings.PLUGIN, wrong.values()):
        return None
    listed = ", ".join(
        f"{pool.__name__} (kind {kind})" for kind, pool in sorted(wrong.items(), key=lambda item: item[0])
    )
    advice = variant_advice(settings.PLUGIN, wrong.values())
    return f"the layout of {listed} is for other devices, and no form for this one is loaded; {advice}"


WORKER_RULES: tuple[Rule, ...] = (_dtype, _bfloat16, _foreign_layout)
"""Rules that are asked of each model, drafts included."""

RULES: tuple[Rule, ...] = (_unknown_backend, _page, _indexer_page)
"""Rules about options, which drafts share with their target."""
