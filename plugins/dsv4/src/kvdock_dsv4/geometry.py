"""Where a token's rows lie: the rings of compression states, and how slots of one space follow from another's.

A full page has one page in every space of compressed rows and, while its sliding page is live, one ring in every
space of states that follow that. So nothing but full and sliding pages is ever handed out, and whatever a page
brings is taken and given back with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvdock.demand import draft_tokens
from kvdock.queries import Query

from kvdock_dsv4.settings import is_online

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

C4, C128 = "c4", "c128"
C4_STATE, C128_STATE = "c4_state", "c128_state"
RATIO_OF = {C4: 4, C128: 128}
"""Space of compressed rows → tokens that one of them stands for."""
STATE_RATIO = {C4_STATE: RATIO_OF[C4], C128_STATE: RATIO_OF[C128]}
"""Space of states → tokens that the rows made of them stand for."""

Slots = TypeVar("Slots", int, "torch.Tensor", "NDArray[np.int64]")


def window_of(ratio: int) -> int:
    """Return the tokens whose states a compressed row is made of: windows of ratio 4 overlap, so twice as many."""
    return 2 * ratio if ratio == RATIO_OF[C4] else ratio


def ring_of(query: Query, ratio: int) -> int:
    """Return the rows of a ring: what one compressed row is made of; with speculation twice, for drafts beyond it."""
    if ratio == RATIO_OF[C128] and is_online(query):
        return 1
    drafts = query.options.speculative_algorithm is not None
    return window_of(ratio) * (2 if drafts else 1)


def first_needed(tokens: Slots, ratio: int) -> Slots:
    """Return the first of a request's `tokens` whose state the next compressed row is made of; below 0: all are."""
    return tokens // ratio * ratio - (window_of(ratio) - ratio)


def most_drafts(rows: int, ratio: int) -> int:
    """Return the most tokens that a step may write to `rows` states that are used in turn.

    A compressed row that ends with the first of them is made of ``window_of(ratio) - 1`` states before it, and all of
    these are still needed if no draft is accepted.
    """
    return rows - (window_of(ratio) - 1)


def banks_of(query: Query) -> int:
    """Return the rows of a request's online state: its own, and one after each draft token."""
    return 1 + draft_tokens(query)


def compressed_slot(slot: Slots, ratio: int) -> Slots:
    """Return the compressed slot to which a full slot belongs; pages are whole numbers of groups of `ratio` tokens."""
    return slot // ratio


def state_slot(swa_slot: Slots, page_size: int, ring: int) -> Slots:
    """Return where the state of a token lies whose sliding slot is given: in the ring of its page."""
    return swa_slot // page_size * ring + swa_slot % ring


def request_state_slot(row: Slots, position: Slots, ring: int) -> Slots:
    """Return where the state of a token lies in the ring of its request's row."""
    return row * ring + position % ring


def online_slot(row: Slots, bank: Slots | int, banks: int) -> Slots:
    """Return where the online state of a request lies: in bank 0 its own, in bank ``i`` that after draft token i."""
    return row * banks + bank
