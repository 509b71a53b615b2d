"""Spaces of a cache that keeps most rows on the host: tokens are numbered once, and rows lie in two tiers."""

from __future__ import annotations

import msgspec

from kvdock.demand import device_slots_per_request
from kvdock.layout import DEVICE, FULL, HOST, Ratio, Space
from kvdock.queries import StateQuery

KIND = "dsa"
"""Kind of the layers whose indexer says which rows a step reads."""
READS = ("page_size", "hisparse", "hisparse_host_to_device_ratio", "hisparse_top_k", "hisparse_device_buffer_size")


def has_host_tier(query: StateQuery) -> bool:
    """Return whether rows are kept in two tiers: it is asked for, and the model has an indexer, on whatever rank."""
    return bool(query.options.hisparse) and any(group.kind == KIND for group in query.all_groups)


def token_spaces(query: StateQuery, full: Space) -> dict[str, Space]:
    """Return `full` alone, or with a host tier ``full`` for all tokens, ``device`` and ``host`` for their rows.

    The device has as many slots as tokens are planned; ``full`` and ``host`` have `hisparse_host_to_device_ratio`
    times as many.

    Raises:
        PlanError: a request's device buffer does not hold what one step reads.
    """
    if not has_host_tier(query):
        return {FULL: full}
    ratio = (query.options.hisparse_host_to_device_ratio or 1, 1)
    replace = msgspec.structs.replace
    many = replace(full, rule=replace(full.rule, per_token=ratio), options=READS)
    needs = device_slots_per_request(query)
    device = replace(full, name=DEVICE, rule=replace(full.rule, needs=needs), options=READS)
    return {FULL: many, DEVICE: device, HOST: replace(many, name=HOST)}


def request_caps(query: StateQuery) -> tuple[tuple[str, Ratio], ...]:
    """Return what bounds the requests of an automatic limit: the device holds a buffer for each that runs."""
    return ((DEVICE, (1, device_slots_per_request(query))),) if has_host_tier(query) else ()
