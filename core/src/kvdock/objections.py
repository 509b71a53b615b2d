"""What the core objects to in any plan, whatever the device: each rule answers a reason or ``None``."""

from __future__ import annotations

from collections.abc import Callable

from kvdock.layout import TARGET
from kvdock.queries import PlanQuery

STRIDED_BACKENDS = frozenset({"triton", "torch", "torch_native"})
"""Attention backends that read pages which do not follow each other."""


def objections(query: PlanQuery) -> tuple[str, ...]:
    """Return every objection of the core to a plan."""
    return tuple(reason for rule in RULES if (reason := rule(query)) is not None)


def _page_major_backend(query: PlanQuery) -> str | None:
    options = query.options
    if not options.page_major:
        return None
    named = {
        options.prefill_attention_backend or options.attention_backend,
        options.decode_attention_backend or options.attention_backend,
    }
    wrong = sorted(name for name in named if name is not None and name not in STRIDED_BACKENDS)
    if not wrong:
        return None
    return (
        f"page_major=true lays pages apart, which the attention backend {', '.join(wrong)} does not read; give one of "
        f"{', '.join(sorted(STRIDED_BACKENDS))}, or page_major=false"
    )


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
    return (
        f"layer_split=true is for prefill workers, not for role={options.role}; give role=prefill, or layer_split=false"
    )


def _split_drafts(query: PlanQuery) -> str | None:
    options = query.options
    if not _splits_layers(query) or options.speculative_algorithm is None:
        return None
    return (
        f"layer_split=true leaves no rank a draft model with all its layers (speculative_algorithm="
        f"{options.speculative_algorithm}); give one of the two"
    )


RULES: tuple[Callable[[PlanQuery], str | None], ...] = (_page_major_backend, _split_ranks, _split_role, _split_drafts)
"""The core's rules, in the order in which they are reported."""
