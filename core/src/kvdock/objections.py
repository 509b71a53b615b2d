"""What the core objects to, whatever the device: each rule answers a reason or ``None``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from kvdock import dtypes
from kvdock.layout import FULL, HOST, STATE, SWA, TARGET
from kvdock.model import HybridParams, MHAParams, MLAParams, SparseParams
from kvdock.queries import PlanQuery

STRIDED_BACKENDS = frozenset({"triton", "torch", "torch_native"})
"""Attention backends that read pages which do not follow each other."""

STRIDED = "strided_pages:"
"""A device's capability of this prefix names one more backend that reads such pages."""

SKIPS_KV = "skip_kv_cache:"
"""A device's capability of this prefix names a prefill backend that works without the cache."""

SAVES_MEMORY = "memory_saver"
"""A device's capability of this name takes memory that can be released and restored."""

Rule = Callable[[PlanQuery], str | None]


def objections(query: PlanQuery) -> tuple[str, ...]:
    """Return every objection of the core to a plan."""
    return _reasons(RULES, query)


def prefill_only_objections(query: PlanQuery) -> tuple[str, ...]:
    """Return every objection of the core to prefill-only work without a KV cache; drafts follow their target."""
    return _reasons(PREFILL_ONLY_RULES, query) if query.worker == TARGET else ()


def _reasons(rules: Iterable[Rule], query: PlanQuery) -> tuple[str, ...]:
    return tuple(reason for rule in rules if (reason := rule(query)) is not None)


def _named(query: PlanQuery, prefix: str) -> frozenset[str]:
    """Return the backends that the device's capabilities of a prefix name."""
    return frozenset(name.removeprefix(prefix) for name in query.device.capabilities if name.startswith(prefix))


def _kinds(query: PlanQuery) -> frozenset[str]:
    """Return the kinds of all layers, on whatever rank, so that all ranks answer alike."""
    return frozenset(layer.kind for layer in query.model.layers)


# Pages that do not follow each other.


def _page_major_backend(query: PlanQuery) -> str | None:
    if not query.options.page_major:
        return None
    return _unread_strides(query, "page_major=true lays pages apart", "page_major=false")


def _page_major_dtype(query: PlanQuery) -> str | None:
    if not query.options.page_major or dtypes.find(query.kv_dtype).bits > 4:
        return None
    return (
        f"page_major=true does not lay out data of 4 bits (kv_cache_dtype={query.options.kv_cache_dtype}), whose scales "
        "would be pages apart; give a kv_cache_dtype of 8 or 16 bits, or page_major=false"
    )


def _unread_strides(query: PlanQuery, what: str, instead: str) -> str | None:
    """Return the reason if an attention backend that is asked for reads no pages apart."""
    options, able = query.options, STRIDED_BACKENDS | _named(query, STRIDED)
    asked = {
        options.prefill_attention_backend or options.attention_backend,
        options.decode_attention_backend or options.attention_backend,
    }
    wrong = sorted(name for name in asked if name is not None and name not in able)
    if not wrong:
        return None
    return (
        f"{what}, which the attention backend {', '.join(wrong)} does not read; give one of "
        f"{', '.join(sorted(able))}, or {instead}"
    )


# Memory that comes and goes.


def _memory_saver(query: PlanQuery) -> str | None:
    if not query.options.memory_saver or SAVES_MEMORY in query.device.capabilities:
        return None
    return (
        f"memory_saver=true needs memory that can be released and restored, which {query.device.name} does not offer; "
        "give memory_saver=false"
    )


# Layers split over ranks.


def _splits_layers(query: PlanQuery) -> bool:
    """Return whether this is the plan of a layer split; drafts, which are asked about too, follow their target."""
    return bool(query.options.layer_split) and query.worker == TARGET


def _split_ranks(query: PlanQuery) -> str | None:
    if not _splits_layers(query) or query.parallel.cp_size > 1:
        return None
    return "layer_split=true has no ranks to split layers over; give cp_size of 2 or more, or layer_split=false"


def _split_role(query: PlanQuery) -> str | None:
    options = query.options
    if not _splits_layers(query) or options.role == "prefill":
        return None
    role = "" if options.unified_memory else "role=prefill, or "  # which moves pages that other workers would read
    return f"layer_split=true is for prefill workers, not for role={options.role}; give {role}layer_split=false"


def _split_drafts(query: PlanQuery) -> str | None:
    options = query.options
    if not _splits_layers(query) or options.speculative_algorithm is None:
        return None
    return (
        f"layer_split=true leaves no rank a draft model with all its layers (speculative_algorithm="
        f"{options.speculative_algorithm}); give one of the two"
    )


# Drafts.


def _draft_without_kv(query: PlanQuery) -> str | None:
    on_last_stage = query.parallel.pp_rank == query.parallel.pp_size - 1
    if query.worker == TARGET or query.groups or not on_last_stage:
        return None
    return (
        f"the draft model {query.model.name!r} (worker {query.worker}) has no layer that keeps KV, so it has no pool; "
        "give another draft, or speculative_algorithm=NGRAM, which drafts without a model"
    )


# Tokens shared out over ranks.


def _dcp_heads(query: PlanQuery) -> str | None:
    """Object to ranks that would share tokens and hold different heads of them."""
    parallel = query.parallel
    if parallel.dcp_size == 1 or query.worker != TARGET:
        return None
    kinds = MHAParams | SparseParams | HybridParams
    heads = sorted({layer.params.num_kv_heads for layer in query.model.layers if isinstance(layer.params, kinds)})
    holders = {count: max(1, parallel.attn_tp_size // count) for count in heads}
    wrong = [count for count, ranks in holders.items() if ranks % parallel.dcp_size]
    if not wrong:
        return None
    most = math.gcd(*holders.values())
    most = 1 if SWA in query.spaces else most  # sliding slots are not shared out at all
    sizes = [str(size) for size in range(1, min(most, 64) + 1) if most % size == 0]
    ranks = parallel.tp_size // parallel.attn_tp_size * math.lcm(*heads) * parallel.dcp_size
    return (
        f"dcp_size={parallel.dcp_size} shares tokens between ranks that hold the same KV heads, but {wrong[0]} heads over "
        f"{parallel.attn_tp_size} attention ranks are held by {holders[wrong[0]]} each; give dcp_size={' or '.join(sizes)}"
        + (f", or tp_size={ranks}" if SWA not in query.spaces else "")
    )


def _dcp_windows(query: PlanQuery) -> str | None:
    if query.parallel.dcp_size == 1 or query.worker != TARGET or SWA not in query.spaces:
        return None
    instead = ", or hybrid_swa=off" if _can_keep_all(query) else ""
    return (
        f"dcp_size={query.parallel.dcp_size} does not share out the tokens of sliding layers, which have slots of their "
        f"own; give dcp_size=1{instead}"
    )


def _can_keep_all(query: PlanQuery) -> bool:
    """Return whether sliding layers can keep every token: those of a family's own kind are its own affair."""
    sliding = [layer for layer in query.model.layers if layer.window_tokens is not None]
    ours = all(isinstance(layer.params, MHAParams | MLAParams | HybridParams) for layer in sliding)
    return ours and query.options.hybrid_swa != "off" and not query.options.unified_memory


# One byte buffer for several spaces.


def _is_unified(query: PlanQuery) -> bool:
    """Return whether this is the plan of unified memory; drafts, which are asked about too, follow their target."""
    return bool(query.options.unified_memory) and query.worker == TARGET


def _unified_spaces(query: PlanQuery) -> str | None:
    tokens, slides = {FULL, SWA} & query.spaces.keys(), _slides(query)
    # A draft may be all that keeps every token beside layers that slide.
    is_hybrid = (STATE in query.spaces and bool(tokens)) or (len(tokens) > 1 and not all(slides))
    if not _is_unified(query) or is_hybrid:
        return None
    what = f"unified_memory=true has nothing to share out: {query.model.name}"
    if query.options.hybrid_swa == "off" and any(slides) and not all(slides):
        return f"{what} has sliding layers, and hybrid_swa=off keeps them as full ones; give hybrid_swa=auto, or unified_memory=false"
    return f"{what} has neither states nor sliding layers beside full ones; leave unified_memory out"


def _slides(query: PlanQuery) -> list[bool]:
    """Return for each layer of the target that keeps something whether it forgets tokens within the context."""
    windows = [layer.window_tokens for layer in query.model.layers if layer.kind != "none"]
    return [window is not None and window + 1 < query.context_length for window in windows]


def _unified_latents(query: PlanQuery) -> str | None:
    kinds = _kinds(query) & {"mla", "dsa"}
    if not _is_unified(query) or not kinds:
        return None
    return (
        f"unified_memory=true does not hold layers of kind {', '.join(sorted(kinds))}, only keys and values per head; "
        "leave unified_memory out"
    )


def _unified_role(query: PlanQuery) -> str | None:
    if not _is_unified(query) or query.options.role in (None, "none"):
        return None
    return (
        f"unified_memory=true moves pages that another worker would read or write (role={query.options.role}); "
        f"give {'' if query.options.layer_split else 'role=none, or '}unified_memory=false"
    )


def _unified_speculation(query: PlanQuery) -> str | None:
    algorithm = query.options.speculative_algorithm
    if not _is_unified(query) or algorithm is None:
        return None
    return f"unified_memory=true serves no speculation (speculative_algorithm={algorithm}); give one of the two"


def _unified_stages(query: PlanQuery) -> str | None:
    if not _is_unified(query) or query.parallel.pp_size == 1:
        return None
    return (
        f"unified_memory=true shares out what the layers of one stage keep, so stages (pp_size={query.parallel.pp_size}) "
        "would hold different numbers of pages; give pp_size=1, or unified_memory=false"
    )


def _unified_dcp(query: PlanQuery) -> str | None:
    if not _is_unified(query) or query.parallel.dcp_size == 1:
        return None
    return (
        f"unified_memory=true does not shard a request over ranks (dcp_size={query.parallel.dcp_size}); "
        "give dcp_size=1, or unified_memory=false"
    )


def _unified_host(query: PlanQuery) -> str | None:
    if not _is_unified(query) or not (query.options.hisparse or HOST in query.spaces):
        return None
    return "unified_memory=true keeps no KV on the host (hisparse=true); give one of the two"


def _unified_backend(query: PlanQuery) -> str | None:
    if not _is_unified(query):
        return None
    return _unread_strides(query, "unified_memory=true lays pages apart", "unified_memory=false")


# Prefill-only work without a cache.

_LEAVE_OUT = "leave prefill_only_disable_kv_cache out"


def _kind_with_cache(kind: str, keeps: str) -> Rule:
    def rule(query: PlanQuery) -> str | None:
        if kind not in _kinds(query):
            return None
        return f"{query.model.name} keeps {keeps} (kind {kind}), and only plain keys and values can be left out; {_LEAVE_OUT}"

    return rule


def _prefill_sliding(query: PlanQuery) -> str | None:
    if SWA not in query.spaces:
        return None
    advice = f"give hybrid_swa=off, or {_LEAVE_OUT}" if _can_keep_all(query) else _LEAVE_OUT
    return f"{query.model.name} has sliding layers with a pool of their own; {advice}"


def _prefill_states(query: PlanQuery) -> str | None:
    if STATE not in query.spaces:
        return None
    return f"{query.model.name} has states beside keys and values, which prefill reads; {_LEAVE_OUT}"


def _prefill_dtype(query: PlanQuery) -> str | None:
    if dtypes.find(query.kv_dtype).bits > 4:
        return None
    return (
        f"kv_cache_dtype={query.options.kv_cache_dtype} is read through scales that only a cache holds; "
        f"give a kv_cache_dtype of 8 or 16 bits, or {_LEAVE_OUT}"
    )


def _prefill_backend(query: PlanQuery) -> str | None:
    backend = query.options.prefill_attention_backend or query.options.attention_backend
    able = _named(query, SKIPS_KV)
    if backend in able:
        return None
    if not able:
        return f"no attention backend of {query.device.name} is known to work without a KV cache; {_LEAVE_OUT}"
    given = f"attention backend {backend} of" if backend else "the attention backend, which is not given, of"
    return (
        f"{given} {query.device.name} is not known to work without a KV cache; "
        f"give prefill_attention_backend={' or '.join(sorted(able))}"
    )


def _prefill_embedding(query: PlanQuery) -> str | None:
    asked = query.options.is_embedding
    if query.model.is_embedding if asked is None else asked:
        return None
    return (
        f"{query.model.name} is run to generate, which reads the KV of earlier tokens; "
        f"give is_embedding=true if it embeds, or {_LEAVE_OUT}"
    )


def _prefill_chunks(query: PlanQuery) -> str | None:
    size = query.options.chunked_prefill_size
    if size is None:
        return None
    return (
        f"chunked_prefill_size={size} cuts a prompt, and a later chunk reads the KV of an earlier one; "
        "leave chunked_prefill_size out"
    )


def _prefill_prefixes(query: PlanQuery) -> str | None:
    if query.options.prefix_cache is False:
        return None
    return "prefix_cache=true reads the KV of earlier requests; give prefix_cache=false"


def _prefill_ranks(query: PlanQuery) -> str | None:
    if query.parallel.cp_size == 1:
        return None
    return f"cp_size={query.parallel.cp_size} has ranks read each other's KV; give cp_size=1"


def _prefill_host(query: PlanQuery) -> str | None:
    if not (query.options.hisparse or HOST in query.spaces):
        return None
    return f"hisparse=true keeps on the host what is not to be kept at all; give hisparse=false, or {_LEAVE_OUT}"


RULES: tuple[Rule, ...] = (
    _page_major_backend,
    _page_major_dtype,
    _memory_saver,
    _split_ranks,
    _split_role,
    _split_drafts,
    _draft_without_kv,
    _dcp_heads,
    _dcp_windows,
    _unified_spaces,
    _unified_latents,
    _unified_role,
    _unified_speculation,
    _unified_stages,
    _unified_dcp,
    _unified_host,
    _unified_backend,
)
"""The core's rules, in the order in which they are reported."""

PREFILL_ONLY_RULES: tuple[Rule, ...] = (
    _kind_with_cache("dsa", "latents with index keys"),
    _kind_with_cache("mla", "latents"),
    _kind_with_cache("sparse", "index keys beside keys and values"),
    _prefill_sliding,
    _prefill_states,
    _prefill_dtype,
    _prefill_backend,
    _prefill_embedding,
    _prefill_chunks,
    _prefill_prefixes,
    _prefill_ranks,
    _prefill_host,
)
"""The core's rules for `prefill_only_disable_kv_cache`: first what the model keeps, then what the options ask."""
