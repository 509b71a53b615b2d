"""What a user may choose: cache options and parallel sizes, validated when they are made.

A field of `CacheOptions` that is ``None`` was not given. The plan resolves each option once, in the
order user > plugin > default, and keeps the source beside the value (`ResolvedOptions`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from kvdock import dtypes
from kvdock.checked import check_fields, show
from kvdock.errors import PlanError, nearest

MAX_COUNT = 2**63 - 1
MAX_NUMBERED = 2**31 - 1
"""Most rows or slots that a 32-bit table can number."""
MAX_RATIO = 2**20
MAX_DRAFT = 2**20
"""Most draft steps, branches or tokens that are believed."""

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "MTP", "STANDALONE", "DFLASH", "NGRAM")
"""Ways to speculate; a name is taken in any case and kept in capitals."""


class Draft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A draft model that runs with parallel sizes of its own, or as several workers.

    `model` is a config file, a model folder or a config as data; ``None``: the extra layers of the target's config.
    `tp_size` and `dp_attention` replace the target's. `workers` deals the layers out to so many workers in turn, each
    with pools of its own.
    """

    model: str | dict[str, Any] | None = None
    tp_size: int | None = None
    dp_attention: bool | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "draft:")
        _check_range("draft: tp_size", self.tp_size, 1, 2**20)
        _check_range("draft: workers", self.workers, 1, MAX_DRAFT)

    def parallel(self, target: Parallelism) -> Parallelism:
        """Return the parallel sizes of this draft beside those of the target."""
        attention = target.dp_attention if self.dp_attention is None else self.dp_attention
        return msgspec.structs.replace(target, tp_size=self.tp_size or target.tp_size, dp_attention=attention)


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every choice that shapes a KV cache; what is left out is decided by plugins, then by `DEFAULTS`.

    Each field's docstring gives its unit, its default and who reads it. Unknown names are refused with
    the nearest match (`make_options`); an option that nothing in a plan reads is an error of that plan.
    """

    page_size: int | None = None
    """Tokens a page, the scheduler's unit. Default 1. Read by every token space."""
    kv_cache_dtype: str | None = None
    """Data type of keys and values: ``auto`` (the model's), ``bfloat16``, ``fp8_e4m3`` … Read by KV pools."""
    index_dtype: str | None = None
    """Data type of sparse index keys. Default ``auto``. Read by pools with an indexer."""
    model_dtype: str | None = None
    """Overrides the config's data type. Default ``auto``. Read by every pool."""
    mem_fraction_static: float | None = None
    """Share of the memory free before loading that weights and cache may take. Default 0.9. Read by the budget."""
    max_total_tokens: int | None = None
    """Tokens to plan for, in the device slots of one rank; caps what the memory would hold. Read by the solver."""
    max_running_requests: int | None = None
    """Requests at the same time, over all workers of DP attention (plain replicas: each). Read by the space ``requests``."""
    context_length: int | None = None
    """Longest request in tokens. Default: the model's. Read by the request table and sliding spaces."""
    allow_longer_context: bool | None = None
    """Accept a context_length above the model's. Default false. Read by the planner."""
    request_table_share: float | None = None
    """Share of the budget that request tables may take under the automatic limit. Default 1/16."""
    request_state_share: float | None = None
    """Share of the budget that request-scoped states may take under the automatic limit. Default 1/4."""
    host_budget_bytes: int | None = None
    """Bytes of host memory for host tiers, over all pools. Read by pools with a host tier."""

    hybrid_swa: Literal["auto", "on", "off"] | None = None
    """Whether sliding layers get a pool of their own: ``auto`` and ``on`` yes, ``off`` full KV for every layer."""
    swa_full_tokens_ratio: float | None = None
    """Sliding slots per full slot. Default 0.8. Read by the sliding space of a hybrid."""
    swa_eviction_interval: int | None = None
    """Decode steps between window evictions, in tokens. Default 128. Read by the sliding space's cap."""
    chunked_prefill_size: int | None = None
    """Tokens of one prefill chunk. Read by the sliding space's floor and cap."""
    max_prefill_tokens: int | None = None
    """Tokens of one prefill batch. Read by the reserve."""

    prefix_cache: bool | None = None
    """Whether prefixes are kept for later requests. Default true. Read by caps and state slots."""
    overlap_schedule: bool | None = None
    """Whether scheduling overlaps the forward pass. Default true. Read by caps and state slots."""
    pd_multiplexing: bool | None = None
    """Whether prefill and decode share the device's streams. Default false. Read by pools with a side stream."""

    max_state_slots: int | None = None
    """State slots to plan for. Read by state spaces."""
    state_sizing: Literal["auto", "ratio"] | None = None
    """``ratio`` sizes states by `state_memory_ratio` whatever the request limit. Default ``auto``."""
    state_memory_ratio: float | None = None
    """r: states take r / (1 + r) of the budget. Default 0.9. Read by state spaces."""
    state_extra_buffer: Literal["off", "on", "lazy"] | None = None
    """Extra state slots for tracking. Default ``off``. Read by state spaces."""
    state_dtype: str | None = None
    """Data type of temporal states. Default ``auto``. Read by state pools."""
    replay_rings: bool | None = None
    """Keep replay rings for linear layers. Default false. Asks pools for the feature ``replay_rings``."""
    replay_ring_length: int | None = None
    """Steps of a replay ring. Default 16. Read by state pools with rings."""

    speculative_algorithm: str | None = None
    """Speculative decoding: one of `ALGORITHMS`. Asks for the feature ``speculation``."""
    speculative_num_steps: int | None = None
    """Draft steps of one decode step. Read by the request table."""
    speculative_topk: int | None = None
    """Branches of a draft tree. Default 1. Read by the request table."""
    speculative_num_draft_tokens: int | None = None
    """Draft tokens verified at once. Read by the request table and caps."""
    draft: str | dict[str, Any] | tuple[str | dict[str, Any], ...] | None = None
    """The draft model: a config file, a model folder, a config as data, or the fields of a `Draft`; several: a list of
    them. Read by the planner."""

    role: Literal["none", "prefill", "decode"] | None = None
    """Disaggregated role. Default ``none``. Asks allocators and request pools for ``disaggregation``."""
    decode_extra_slots: int | None = None
    """Request rows for requests whose KV is still arriving (role decode). Read by decode request pools."""

    attention_backend: str | None = None
    """Attention backend of prefill and decode. Read by validators and pools."""
    prefill_attention_backend: str | None = None
    """Attention backend of prefill, when it differs."""
    decode_attention_backend: str | None = None
    """Attention backend of decode, when it differs."""
    sparse_prefill_backend: str | None = None
    """Sparse attention backend of prefill. Read by sparse pools."""
    sparse_decode_backend: str | None = None
    """Sparse attention backend of decode. Read by sparse pools."""
    linear_backend: str | None = None
    """Backend of linear layers. Read by state pools."""

    page_major: bool | None = None
    """Lay all layers of a page side by side. Default false. Asks pools for the feature ``page_major``."""
    unified_memory: bool | None = None
    """Let the spaces share one byte buffer. Default false. Asks for the feature ``unified_memory``."""
    lazy_compaction: bool | None = None
    """Compact unified memory at quiescent points. Default true. Read by unified memory."""
    layer_split: bool | None = None
    """Split layers over context-parallel ranks. Default false. Asks pools for ``layer_split``."""
    late_backing: bool | None = None
    """Back states with memory late. Default false. Asks pools for ``late_backing``."""
    memory_saver: bool | None = None
    """Take what slots own from memory that can be released and restored. Default false. Asks the device for the
    capability ``memory_saver``."""

    hisparse: bool | None = None
    """Keep most KV on the host. Default false. Asks pools and allocators for the feature ``hisparse``."""
    hisparse_top_k: int | None = None
    """Tokens read per step. Default 2048. Read by HiSparse pools."""
    hisparse_device_buffer_size: int | None = None
    """Device slots per request. Default 2 · top_k. Read by HiSparse pools."""
    hisparse_host_to_device_ratio: int | None = None
    """Host slots per device slot. Default 2. Read by HiSparse spaces."""
    hisparse_swap_in_block_size: int | None = None
    """Threads of a swap-in block. Default 960. Kept by HiSparse pools for an engine's kernels; it shapes no buffer."""

    prefill_only_disable_kv_cache: bool | None = None
    """Keep no KV for prefill-only work. Default false. Asks pools for the feature ``no_kv``."""
    is_embedding: bool | None = None
    """Whether the model is used for embeddings. Default: the config's. Read by the prefill-only check."""

    plugins: tuple[str, ...] | None = None
    """Plugins to allow, by name; empty: core only. Default: all that are installed. Read by discovery."""
    no_plugins: tuple[str, ...] | None = None
    """Plugins to leave out, by name. Read by discovery."""
    prefer: tuple[str, ...] | None = None
    """``hook=plugin`` lines that settle ties. Read by every hook call."""
    strict: bool | None = None
    """Turn warnings of planning and plugin failures into errors. Default false."""
    plugin_options: dict[str, dict[str, Any]] | None = None
    """Options of plugins, by plugin name. Read by the plugin."""

    def __post_init__(self) -> None:
        check_fields(self, "option")
        for name in _POSITIVE:
            _check_range(name, getattr(self, name), 1, MAX_COUNT)
        for name in _SPECULATIVE:
            _check_range(name, getattr(self, name), 1, MAX_DRAFT)
        _check_range("decode_extra_slots", self.decode_extra_slots, 0, MAX_COUNT)
        for name in _NUMBERED:
            _check_range(name, getattr(self, name), 1, MAX_NUMBERED)
        for name in ("mem_fraction_static", "request_table_share", "request_state_share"):
            _check_fraction(name, getattr(self, name))
        for name in ("swa_full_tokens_ratio", "state_memory_ratio"):
            _check_ratio(name, getattr(self, name))
        for name in _DTYPES:
            value = getattr(self, name)
            if value is not None and value != "auto":
                dtypes.find(value, option=name)
        if self.speculative_algorithm is not None:
            msgspec.structs.force_setattr(self, "speculative_algorithm", _algorithm(self.speculative_algorithm))
        for name in _DATA:
            _check_data(name, getattr(self, name))


_DTYPES = ("kv_cache_dtype", "index_dtype", "model_dtype", "state_dtype")
_POSITIVE = (
    "max_total_tokens",
    "host_budget_bytes",
    "swa_eviction_interval",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "replay_ring_length",
    "hisparse_top_k",
    "hisparse_device_buffer_size",
    "hisparse_host_to_device_ratio",
    "hisparse_swap_in_block_size",
)
_NUMBERED = ("page_size", "context_length", "max_running_requests", "max_state_slots")
_DATA = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "sparse_prefill_backend",
    "sparse_decode_backend",
    "linear_backend",
    "draft",
    "plugins",
    "no_plugins",
    "prefer",
    "plugin_options",
)
_SPECULATIVE = ("speculative_num_steps", "speculative_topk", "speculative_num_draft_tokens")

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "page_size": 1,
        "kv_cache_dtype": "auto",
        "index_dtype": "auto",
        "model_dtype": "auto",
        "mem_fraction_static": 0.9,
        "allow_longer_context": False,
        "request_table_share": 0.0625,
        "request_state_share": 0.25,
        "hybrid_swa": "auto",
        "swa_full_tokens_ratio": 0.8,
        "swa_eviction_interval": 128,
        "prefix_cache": True,
        "overlap_schedule": True,
        "pd_multiplexing": False,
        "state_sizing": "auto",
        "state_memory_ratio": 0.9,
        "state_extra_buffer": "off",
        "state_dtype": "auto",
        "replay_rings": False,
        "replay_ring_length": 16,
        "speculative_topk": 1,
        "role": "none",
        "page_major": False,
        "unified_memory": False,
        "lazy_compaction": True,
        "layer_split": False,
        "late_backing": False,
        "memory_saver": False,
        "hisparse": False,
        "hisparse_top_k": 2048,
        "hisparse_host_to_device_ratio": 2,
        "hisparse_swap_in_block_size": 960,
        "prefill_only_disable_kv_cache": False,
        "strict": False,
    }
)
"""The value of each option that neither the user nor a plugin gives; absent names stay ``None``."""


class ResolvedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options after resolution: `values` has no plugin or default left open, `sources` says who set each."""

    values: CacheOptions
    sources: dict[str, str]
    """Option → ``user``, ``default``, or the plugin that gave it; options left ``None`` are absent."""


class Parallelism(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parallel sizes of a deployment and the rank that is planned.

    `pp_layers` lists the layers of each pipeline stage when the split is uneven. `dcp_size` attention ranks share
    the tokens of each request between them, and `dcp_rank` is the place among them.
    """

    tp_size: int = 1
    pp_size: int = 1
    pp_rank: int = 0
    dp_size: int = 1
    dp_attention: bool = False
    dcp_size: int = 1
    dcp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    pp_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "parallel size")
        for name in ("tp_size", "pp_size", "dp_size", "dcp_size", "cp_size"):
            _check_range(name, getattr(self, name), 1, 2**20)
        places = (("pp_rank", self.pp_size), ("cp_rank", self.cp_size), ("dcp_rank", self.dcp_size))
        for rank, size in places:
            if not 0 <= getattr(self, rank) < size:
                raise PlanError(f"{rank}={getattr(self, rank)} is no rank of {size}; give 0 … {size - 1}")
        shards = self.cp_size * self.attn_dp_size
        if self.tp_size % shards:
            raise PlanError(
                f"tp_size={self.tp_size} does not divide by dp_size · cp_size = {shards}; give a multiple of {shards}"
            )
        if self.attn_tp_size % self.dcp_size:
            raise PlanError(
                f"dcp_size={self.dcp_size} does not divide the {self.attn_tp_size} attention ranks (tp_size={self.tp_size}"
                f"); dcp_size={math.gcd(self.dcp_size, self.attn_tp_size)} does, and with {self.dcp_size} a tp_size that is "
                f"a multiple of {self.dcp_size * shards}"
            )
        if self.pp_layers is not None and len(self.pp_layers) != self.pp_size:
            raise PlanError(f"pp_layers={self.pp_layers} lists {len(self.pp_layers)} stages of pp_size={self.pp_size}")
        if self.pp_layers is not None and any(count < 0 for count in self.pp_layers):
            raise PlanError(f"pp_layers={self.pp_layers} has a stage with a negative number of layers")

    @property
    def attn_dp_size(self) -> int:
        """Workers that share the requests out between them: `dp_size` under DP attention, else one."""
        return self.dp_size if self.dp_attention else 1

    @property
    def attn_tp_size(self) -> int:
        """Ranks that share the attention heads: ``tp / (dp if dp_attention) / cp``."""
        return self.tp_size // self.attn_dp_size // self.cp_size

    def kv_heads_per_rank(self, num_kv_heads: int) -> int:
        """Return the KV heads of one rank; 1 when each head is replicated over several ranks.

        Raises:
            PlanError: neither of the two counts is a multiple of the other.
        """
        ranks = self.attn_tp_size
        if num_kv_heads % ranks == 0:
            return num_kv_heads // ranks
        if ranks % num_kv_heads == 0:
            return 1
        step = num_kv_heads * self.dcp_size  # ranks that share tokens hold copies of the same heads
        fits = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and self.dcp_size == 1]
        fits += [n for n in (ranks // step * step, (ranks // step + 1) * step) if n]
        nearest_ranks = min(fits, key=lambda n: (abs(n - ranks), n))
        raise PlanError(
            f"{num_kv_heads} KV heads do not split over {ranks} attention ranks (tp_size={self.tp_size}); "
            f"the nearest tp_size that works is {nearest_ranks * (self.tp_size // ranks)}"
        )

    def stage_layers(self, layers: int) -> range:
        """Return the global ids of the layers of this pipeline stage; the last stages take the remainder.

        Raises:
            PlanError: `pp_layers` does not add up to `layers`, or there are more stages than layers.
        """
        counts = self.pp_layers
        if counts is None:
            if self.pp_size > layers:
                raise PlanError(f"pp_size={self.pp_size} is more than the model's {layers} layers")
            short, longer = layers // self.pp_size, layers % self.pp_size
            counts = (short,) * (self.pp_size - longer) + (short + 1,) * longer
        if sum(counts) != layers:
            raise PlanError(f"pp_layers={counts} adds up to {sum(counts)}, but the model has {layers} layers")
        start = sum(counts[: self.pp_rank])
        return range(start, start + counts[self.pp_rank])


def make_options(values: Mapping[str, Any] | CacheOptions | None = None) -> CacheOptions:
    """Return `CacheOptions` from names and values; ``None`` means not given.

    Raises:
        PlanError: an unknown name (with the nearest match), a value of the wrong type or out of range.
    """
    if isinstance(values, CacheOptions):
        return values
    made: CacheOptions = _make(CacheOptions, {} if values is None else values, "option")
    return made


def make_parallelism(values: Mapping[str, Any] | Parallelism | None = None) -> Parallelism:
    """Return a `Parallelism` from names and values; the same rules as `make_options`."""
    if isinstance(values, Parallelism):
        return values
    made: Parallelism = _make(Parallelism, {} if values is None else values, "parallel size")
    return made


def drafts_of(options: CacheOptions) -> tuple[Draft, ...]:
    """Return the drafts that the options describe; none where `draft` is not given.

    Raises:
        PlanError: a description has a field that no draft has.
    """
    given = options.draft
    entries = () if given is None else given if isinstance(given, tuple) else (given,)
    return tuple(_draft(entry) for entry in entries)


def _draft(entry: str | dict[str, Any]) -> Draft:
    """Return what an entry of `draft` describes: a config names an architecture or layers, a `Draft` its own fields."""
    if isinstance(entry, str) or entry.keys() & {"architectures", "model_type"}:
        return Draft(model=entry)
    if not entry:
        raise PlanError("draft={} says nothing; give the draft's config (a path, or as data), or the fields of a Draft")
    if not entry.keys() & set(Draft.__struct_fields__):
        return Draft(model=entry)
    made: Draft = _make(Draft, entry, "draft field")
    return made


def draft_parallels(options: CacheOptions, parallel: Parallelism, models: int) -> tuple[Parallelism, ...]:
    """Return the parallel sizes of the target and of each draft worker, `models` in all.

    Raises:
        PlanError: the options describe another number of draft workers.
    """
    drafts = drafts_of(options) if options.speculative_algorithm else ()
    own = tuple(draft.parallel(parallel) for draft in drafts for _ in range(draft.workers))
    if drafts and len(own) != models - 1:
        raise PlanError(f"draft describes {len(own)} workers, but {models - 1} draft models are planned; give one each")
    return (parallel, *(own or (parallel,) * (models - 1)))


def exact_ratio(value: float | str) -> tuple[int, int]:
    """Return the decimal that the user wrote as an exact pair: 0.8 is (4, 5)."""
    return Decimal(str(value)).as_integer_ratio()


def _make(cls: type[Any], values: Any, what: str) -> Any:
    if not isinstance(values, Mapping):
        raise PlanError(f"{what}s={show(values)} do not fit: give a {cls.__name__}, or names and values")
    for name in values:
        if not isinstance(name, str) or name not in cls.__struct_fields__:
            near = nearest(name, cls.__struct_fields__) if isinstance(name, str) else ""
            raise PlanError(f"no {what} is called {show(name)}{near}")
    return cls(**{name: value for name, value in values.items() if value is not None})


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is None:
        return
    if not low <= value <= high:
        raise PlanError(f"{name}={value} is outside {low} … {high}")


def _algorithm(name: str) -> str:
    """Return the name as `ALGORITHMS` spells it."""
    if name.upper() not in ALGORITHMS:
        raise PlanError(
            f"speculative_algorithm={show(name)} is not known; give one of {', '.join(ALGORITHMS)}"
            f"{nearest(name.upper(), ALGORITHMS)}"
        )
    return name.upper()


def _check_fraction(name: str, value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise PlanError(f"{name}={value} is no share; give a number above 0 and at most 1")


def _check_ratio(name: str, value: float | None) -> None:
    if value is None:
        return
    try:
        fits = 0 < Decimal(str(value)) <= MAX_RATIO
    except InvalidOperation:
        fits = False
    if not fits:
        raise PlanError(f"{name}={value} is no ratio; give a number above 0 and at most {MAX_RATIO:,}")


def _check_data(name: str, value: Any) -> None:
    """Refuse what a plan file could not hold: objects, and texts that are no Unicode."""
    if value is None or (isinstance(value, str) and value.isascii()):
        return
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(
            f"option {name}={show(value)} is no data: give texts, numbers, lists, names and values"
        ) from error
