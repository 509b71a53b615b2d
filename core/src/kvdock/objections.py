"""What the core objects to in any plan, whatever the device: each rule answers a reason or ``None``."""

from __future__ import annotations

from collections.abc import Callable

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


RULES: tuple[Callable[[PlanQuery], str | None], ...] = (_page_major_backend,)
"""The core's rules, in the order in which they are reported."""
