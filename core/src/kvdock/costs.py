"""What a cache costs per token, per slot and per request, and what given requests occupy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

import msgspec

from kvdock.families.groups import window_pages
from kvdock.layout import DEVICE, FULL, REQUESTS, Buffer, Space, Unit, round_up
from kvdock.sizing import Problem, token_factors, total_nbytes
from kvdock.storages import WITHIN, block_nbytes
from kvdock.unified.geometry import page_bytes


class SlotCost(msgspec.Struct, frozen=True, kw_only=True):
    """Device bytes of KV and of bookkeeping; a fraction of a byte stays a fraction."""

    kv: int | float
    bookkeeping: int | float


class Costs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the cache costs: `fixed_bytes` whatever the sizes (padding included), then bytes per slot of each space.

    In unified memory `shared_pages` are the bytes that a page of each space takes of the shared buffer, which the last
    one's slots pay for: those of the others cost no KV `per_slot`.
    """

    fixed_bytes: int
    per_slot: dict[str, SlotCost]
    shared_pages: dict[str, int] = {}


def slot_bytes(buffer: Buffer, spaces: Mapping[str, Space]) -> Fraction:
    """Return the bytes that one slot takes in a buffer, over all its layers."""
    if buffer.storage and buffer.space:
        page_size = spaces[buffer.space].page_size
        return Fraction(block_nbytes(buffer, page_size) * max(1, len(buffer.layers)), page_size)
    nbytes = buffer.row_nbytes * buffer.widen * max(1, len(buffer.layers))
    paged = buffer.unit is Unit.PAGE and buffer.space is not None
    return Fraction(nbytes, spaces[buffer.space].page_size if paged and buffer.space else 1)


def find_costs(problem: Problem) -> Costs:
    """Return the fixed bytes and the bytes per slot of each space."""
    sums = {name: [Fraction(0), Fraction(0)] for name in problem.spaces}
    charged = _charged(problem)
    for buffer in charged:
        if buffer.space is not None:
            sums[buffer.space][not buffer.is_kv] += slot_bytes(buffer, problem.spaces)
    return Costs(
        fixed_bytes=total_nbytes(msgspec.structs.replace(problem, buffers=charged), dict.fromkeys(problem.spaces, 0)),
        per_slot={name: _cost(kv, rest) for name, (kv, rest) in sums.items()},
        shared_pages=page_bytes(problem.buffers, problem.spaces),
    )


def bytes_per_token(problem: Problem) -> SlotCost:
    """Return the device bytes that one more token takes on this rank, caps and rounding left aside.

    With a host tier a token is a slot of ``full``, of several of which one has its rows on the device.
    """
    factors = token_factors(problem.spaces)
    numbered = factors[FULL] if DEVICE in problem.spaces else Fraction(1)
    sums = [Fraction(0), Fraction(0)]
    for buffer in _charged(problem):
        if buffer.space is not None and buffer.space != REQUESTS:
            sums[not buffer.is_kv] += slot_bytes(buffer, problem.spaces) * factors[buffer.space] / numbered
    return _cost(*sums)


def slots_held(spaces: Mapping[str, Space], length: int, requests: int, ranks: int = 1) -> dict[str, int]:
    """Return the slots of each space that `requests` requests of `length` tokens hold, in whole pages.

    A sliding space holds the pages on which a window lies and no more, and the device side of a host tier a device
    buffer: longer requests are on the host, and arrive there or are written chunk by chunk. `ranks` share the tokens
    between them, in pages that are as much larger; the slots are those of one.
    """
    slots: dict[str, int] = {}
    for name, space in spaces.items():
        rule = space.rule
        if name == REQUESTS:
            slots[name] = requests
        elif space.issued_by == "allocator":
            own = round_up(-(-length // ranks), space.page_size)
            slots[name] = requests * min(own, _most_slots(space, own))
        else:
            of = 0 if space.issued_by == "request_pool" else slots.get(rule.of, length * requests)
            tokens = Fraction(*rule.per_token) * of
            slots[name] = -int(-(tokens + Fraction(*rule.per_request) * requests) // 1)
            if space.issued_by == "request_pool":  # a fixed number of slots still gives each request its own
                slots[name] = max(slots[name], requests * rule.needs)
    return slots


def kv_bytes_held(
    buffers: Iterable[Buffer],
    spaces: Mapping[str, Space],
    slots: Mapping[str, int],
    memory: Iterable[str] = ("device",),
) -> int:
    """Return the bytes of KV in `memory` behind these slots; bookkeeping and padding are not counted."""
    kinds = frozenset(memory)
    held = [buffer for buffer in buffers if buffer.is_kv and buffer.memory in kinds]
    exact = sum(slot_bytes(buffer, spaces) * slots[buffer.space] for buffer in held if buffer.space is not None)
    return -int(-exact // 1)


def _most_slots(space: Space, own: int) -> int:
    """Return the slots that a request holds at most, if it has `own` slots of tokens."""
    if space.name == DEVICE:
        # One buffer, and the page of the newest tokens; what is fixed is for requests that arrive.
        return space.rule.needs - space.rule.fixed
    if space.window_tokens is None:
        return own
    return window_pages(space.window_tokens, space.page_size) * space.page_size


def _charged(problem: Problem) -> tuple[Buffer, ...]:
    """Return the buffers on the device that bytes grow with.

    Of those that lie over each other it is the one that grows fastest with the tokens, the first of several;
    the others lie inside it, as does in unified memory what other spaces than the last one keep.
    """
    device = [buffer for buffer in problem.buffers if buffer.memory == "device" and buffer.storage != WITHIN]
    factors = token_factors(problem.spaces)

    def growth(buffer: Buffer) -> Fraction:
        return slot_bytes(buffer, problem.spaces) * factors[buffer.space] if buffer.space else Fraction(0)

    chosen: dict[str, Buffer] = {}
    for buffer in device:
        if buffer.overlay:
            chosen[buffer.overlay] = max(chosen.get(buffer.overlay, buffer), buffer, key=growth)
    return tuple(buffer for buffer in device if not buffer.overlay or chosen[buffer.overlay] is buffer)


def _cost(kv: Fraction, bookkeeping: Fraction) -> SlotCost:
    return SlotCost(kv=_plain(kv), bookkeeping=_plain(bookkeeping))


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
