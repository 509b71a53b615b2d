"""Full and sliding slots in step: their pages, where the tail of a sequence starts, and which new pages it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.allocators import lengths
from kvdock.allocators.mapped import Share
from kvdock.errors import PlanError, SlotError
from kvdock.layout import FULL, SWA
from kvdock.queries import AllocatorQuery

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.lengths import Growth, Ints, Ranges


def common_page_size(query: AllocatorQuery) -> int:
    """Return the page size of full and sliding slots in step.

    Raises:
        PlanError: the spaces are not ``full`` and ``swa``, or have different page sizes.
    """
    sizes = {space.name: space.page_size for space in query.spaces}
    if set(sizes) != {FULL, SWA}:
        raise PlanError(f"SWAAllocator keeps the spaces 'full' and 'swa' in step, not {sorted(sizes)}")
    if sizes[FULL] != sizes[SWA]:
        raise PlanError(
            f"the spaces 'full' and 'swa' have pages of {sizes[FULL]} and {sizes[SWA]} slots; "
            "SWAAllocator needs one page_size for both"
        )
    return sizes[FULL]


def swa_tail_start(seq_len: int, tail_tokens: int, page_size: int) -> int:
    """Return the first token with a sliding slot where the newest `tail_tokens` of `seq_len` need one: a page bound.

    A tail as long as the window (the *earlier* tokens that a layer sees) is what the next token looks at.
    """
    return max(0, seq_len - tail_tokens) // page_size * page_size


def swa_tail_tokens(seq_len: int, tail_tokens: int, page_size: int) -> int:
    """Return how many tokens of `seq_len` have a sliding slot then: `tail_tokens`, and what its first page holds more."""
    return seq_len - swa_tail_start(seq_len, tail_tokens, page_size)


class TailGrowth(NamedTuple):
    """A batch that grows, of which only the new pages from `starts` on (page bounds) get a sliding page."""

    growth: Growth
    starts: Ints

    @property
    def new_pages(self) -> Ints:
        """New sliding pages of each request."""
        grown = self.growth
        first: Ints = (self.starts // grown.page_size).clip(lengths.pages_of(grown.prefix, grown.page_size))
        return lengths.pages_of(grown.seq, grown.page_size) - first

    @property
    def page_count(self) -> int:
        """New sliding pages of the batch."""
        return int(self.new_pages.sum())

    def positions(self) -> Ints:
        """Return where the pages of the tails stand among all new pages of the batch."""
        ends = self.growth.new_pages.cumsum()
        return lengths.spread(ends - self.new_pages, self.new_pages)


def tail_growth(growth: Growth, swa_tail_lens: Sequence[int] | torch.Tensor) -> TailGrowth:
    """Return what an extend with so many newest tokens in sliding layers asks for.

    Raises:
        SlotError: not one tail of at least 0 tokens a request, or one that starts behind the page in which its
            request goes on, which would leave that page's sliding page behind.
    """
    tails = lengths.on_host(swa_tail_lens, "swa_tail_lens")
    if tails.shape != growth.seq.shape:
        raise SlotError(f"{len(tails)} swa_tail_lens for {len(growth.seq)} requests; give one of each")
    if len(tails) and int(tails.min()) < 0:
        raise SlotError(f"swa_tail_lens holds {tails.min()}; a tail has at least 0 tokens, so nothing was taken")
    size = growth.page_size
    starts = (growth.seq - tails).clip(0) // size * size
    left = (growth.prefix % size != 0) & (starts > growth.prefix)
    if left.any():
        raise _left_behind(growth, int(left.argmax()), int(tails[left.argmax()]))
    return TailGrowth(growth, starts)


def tail_pages_needed(
    prefix_lens: Sequence[int], seq_lens: Sequence[int], swa_tail_lens: Sequence[int], page_size: int
) -> int:
    """Return the new sliding pages of requests that grow, each with a tail.

    Raises:
        SlotError: lengths that contradict each other, and what `tail_growth` refuses.
    """
    prefix, seq = lengths.on_host(prefix_lens, "prefix_lens"), lengths.on_host(seq_lens, "seq_lens")
    lengths.grown_pages(prefix, seq, page_size)
    return int(tail_growth(lengths.Growth(prefix, seq, page_size), swa_tail_lens).new_pages.sum())


def among_new_pages(tails: TailGrowth, pages: torch.Tensor) -> torch.Tensor:
    """Return `pages`, those of the tails, in the list of all new pages of the batch; 0 for the others."""
    count = int(tails.growth.new_pages.sum())
    if pages.shape[0] == count:
        return pages
    spread = pages.new_zeros(count)
    return spread.scatter_(0, lengths.to_device(tails.positions(), pages.device), pages)


def sliding_share(growth: Growth, tails: TailGrowth | None, owners: Sequence[Any] | None, debug: bool) -> Share:
    """Return the pages that lie beside the new ones of a batch: of its tails alone, or without any of all."""
    sliding = tails or growth
    named = lengths.owners_of_pages(owners, sliding.new_pages) if owners is not None and debug else None
    words = None if tails is None else lambda pages: among_new_pages(tails, pages)
    return Share(sliding.page_count, named, words)


def checked_swa_starts(ranges: Ranges, swa_starts: Sequence[int]) -> Ints:
    """Return where the sliding slots of each range of a request's row begin, validated.

    Raises:
        SlotError: not one a range, or outside the row.
    """
    starts = lengths.on_host(swa_starts, "swa_starts")
    if len(starts) != len(ranges.ends):
        raise SlotError(f"{len(starts)} swa_starts for {len(ranges.ends)} rows; give one of each a request")
    if (starts > ranges.ends).any() or (starts < 0).any():
        raise SlotError(f"swa_starts {starts.tolist()} lie outside the rows that end at {ranges.ends.tolist()}")
    return starts


def _left_behind(growth: Growth, i: int, tail: int) -> SlotError:
    prefix, seq, size = int(growth.prefix[i]), int(growth.seq[i]), growth.page_size
    bound = prefix // size * size
    return SlotError(
        f"request {i} of the batch goes on inside a page (prefix {prefix}, pages of {size}), and a tail of {tail} of "
        f"its {seq} tokens would leave that page's sliding slots behind; give it a tail of at least "
        f"{seq - bound - size + 1} tokens, or extend it to {bound + size} tokens and evict those first"
    )
