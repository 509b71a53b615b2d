"""What speaks against a plan of DeepSeek V4: each rule answers a reason or ``None``."""

from __future__ import annotations

from collections.abc import Callable

from kvdock.demand import draft_tokens, page_size_of
from kvdock.layout import TARGET
from kvdock.queries import PlanQuery

from kvdock_dsv4.geometry import C128, C128_STATE, RATIO_OF, STATE_RATIO, most_drafts
from kvdock_dsv4.model import FAMILY
from kvdock_dsv4.settings import PAGE_SIZE, PLUGIN, STATE_DTYPES, is_online, state_dtype

Rule = Callable[[PlanQuery], str | None]

FIXED_PAGE_DEVICES = frozenset({"cuda"})
"""Device types whose kernels of this family read pages of 256 tokens alone."""
CHAIN_ALGORITHMS = frozenset({"EAGLE"})
"""Algorithms whose drafts an online state follows, with one branch."""


def objections(query: PlanQuery) -> tuple[str, ...]:
    """Return every objection to a plan; to one of another family only that it has no use for this plugin's settings."""
    if query.worker != TARGET:
        return ()
    rules = RULES if query.model.family == FAMILY else (_unused_settings,)
    return tuple(reason for rule in rules if (reason := rule(query)) is not None)


def prefill_only_objections(query: PlanQuery) -> tuple[str, ...]:
    """Return the objection to working without a cache: compression reads its own states."""
    if query.worker != TARGET or query.model.family != FAMILY:
        return ()
    return (
        f"{query.model.name} compresses what its cache holds, and only plain keys and values can be left out; "
        "leave prefill_only_disable_kv_cache out",
    )


def _unused_settings(query: PlanQuery) -> str | None:
    if not (query.options.plugin_options or {}).get(PLUGIN):
        return None
    return f"plugin_options[{PLUGIN!r}] is for DeepSeek V4, and {query.model.name} is none; leave it out"


def _page_of_groups(query: PlanQuery) -> str | None:
    page, ratio = page_size_of(query), RATIO_OF[C128]
    if page % ratio == 0:
        return None
    return f"page_size={page} does not divide into groups of {ratio} tokens, which share a row; give {PAGE_SIZE}"


def _page_of_kernels(query: PlanQuery) -> str | None:
    page, device = page_size_of(query), query.device.device_type
    if device not in FIXED_PAGE_DEVICES or page == PAGE_SIZE or page % RATIO_OF[C128]:
        return None
    return (
        f"page_size={page} is not what kernels on {query.device.name} read for DeepSeek V4; give page_size={PAGE_SIZE}"
    )


def _online_dtype(query: PlanQuery) -> str | None:
    if not is_online(query) or state_dtype(query) == STATE_DTYPES[0]:
        return None
    return (
        f"online_compress keeps a running sum in float32, not in {state_dtype(query)}; give state_dtype=float32, or "
        "online_compress=false"
    )


def _online_drafts(query: PlanQuery) -> str | None:
    algorithm, topk = query.options.speculative_algorithm, query.options.speculative_topk or 1
    if not is_online(query) or algorithm is None or (algorithm in CHAIN_ALGORITHMS and topk == 1):
        return None
    return (
        f"online_compress follows one chain of drafts, not speculative_algorithm={algorithm} with "
        f"speculative_topk={topk}; give EAGLE with speculative_topk=1, or online_compress=false"
    )


def _drafts_beyond_states(query: PlanQuery) -> str | None:
    """Object to a step that overwrites states which it still needs, in whatever form states lie."""
    drafts = draft_tokens(query)
    rings = [(ratio, rows) for name, ratio in STATE_RATIO.items() if (rows := _rows_in_turn(query, name))]
    if not drafts or not rings:
        return None
    most, ratio, rows = min((most_drafts(rows, ratio), ratio, rows) for ratio, rows in rings)
    if drafts <= most:
        return None
    return (
        f"{_drafts_option(query)}: a step of {drafts} tokens overwrites states of which rows of {ratio} tokens are still made, "
        f"for a request has {rows} in turn; give speculative_num_draft_tokens={most} or less"
    )


def _rows_in_turn(query: PlanQuery, name: str) -> int:
    """Return the states that the tokens of one request use in turn, as its space declares them; 0: it keeps no such ring."""
    space = query.spaces.get(name)
    if space is None or (name == C128_STATE and is_online(query)):
        return 0
    return space.rule.per_request[0] or space.page_size


def _drafts_option(query: PlanQuery) -> str:
    options = query.options
    if options.speculative_num_draft_tokens:
        return f"speculative_num_draft_tokens={options.speculative_num_draft_tokens}"
    return (
        f"speculative_num_steps={options.speculative_num_steps} with speculative_topk={options.speculative_topk or 1}"
    )


def _all_layers_slide(query: PlanQuery) -> str | None:
    if query.options.hybrid_swa != "off":
        return None
    return f"hybrid_swa=off keeps every token in full, and {query.model.name} has no such layers; leave hybrid_swa out"


def _no_unified_memory(query: PlanQuery) -> str | None:
    if not query.options.unified_memory:
        return None
    return (
        "unified_memory=true moves pages, and with one of DeepSeek V4 goes a ring of states; leave unified_memory out"
    )


RULES: tuple[Rule, ...] = (
    _page_of_groups,
    _page_of_kernels,
    _online_dtype,
    _online_drafts,
    _drafts_beyond_states,
    _all_layers_slide,
    _no_unified_memory,
)
"""In the order in which they are reported."""
