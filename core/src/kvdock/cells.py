"""Whether a plugin's pool costs what its kind costs: a row of another shape is seen in the plan, not on the machine."""

from __future__ import annotations

from fractions import Fraction

from kvdock.costs import slot_bytes
from kvdock.errors import KVDockError
from kvdock.layout import Buffer
from kvdock.outline import Outline, PoolChoice
from kvdock.plugins.answers import ask
from kvdock.pools.base import Pool

MOST = 2
"""Times the bytes of the core's own pool that a plugin's may take a slot before the plan warns."""


def cell_warnings(outline: Outline) -> tuple[str, ...]:
    """Return a warning for each pool of a plugin that takes far more bytes a slot than the core's pool of the same kind."""
    return tuple(text for choice in outline.pools if (text := _warning(outline, choice)) is not None)


def _warning(outline: Outline, choice: PoolChoice) -> str | None:
    reference = _reference(outline, choice)
    if reference is None or reference is choice.cls:
        return None
    own, usual = _cell(outline, choice.buffers), _cell(outline, _declared(reference, choice))
    if not usual or own <= MOST * usual:
        return None
    return (
        f"group {choice.name!r} (kind {choice.query.kind}): {choice.cls.__name__} of plugin {choice.plugin!r} takes "
        f"{float(own):,.0f} bytes a slot, {float(own / usual):.1f} times the {float(usual):,.0f} of {reference.__name__}; "
        f"its rows look like those of another kind, so ask its authors, or plan with no_plugins={choice.plugin}"
    )


def _reference(outline: Outline, choice: PoolChoice) -> type[Pool] | None:
    """Return the core's class for a group; ``None`` for kinds that it does not know."""
    answers = [value for _, value in ask(outline.registry, "get_pool_cls", "core", query=choice.query)]
    found: type[Pool] | None = next((value for value in answers if value is not None), None)
    return found


def _declared(reference: type[Pool], choice: PoolChoice) -> tuple[Buffer, ...]:
    try:
        return reference.buffers(choice.query)
    except KVDockError:
        return ()  # what the plugin keeps, the core cannot: there is nothing to compare with


def _cell(outline: Outline, buffers: tuple[Buffer, ...]) -> Fraction:
    """Return the bytes of one slot of a group, over all its layers."""
    return sum((slot_bytes(buffer, outline.spaces) for buffer in buffers if buffer.space), Fraction(0))
