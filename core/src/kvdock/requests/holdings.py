"""What each request owns of its row: where a shared prefix ends, and how far its sliding slots went back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvdock.allocators.lengths import on_host, to_host, whole_count
from kvdock.errors import SlotError

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.lengths import Ints
    from kvdock.requests.base import RequestPool


class Holding(NamedTuple):
    """Of one request: its row and the row's generation, the tokens that are another's, the tokens evicted."""

    row: int
    generation: int
    borrowed: int = 0
    evicted: int = 0


class Span(NamedTuple):
    """Tokens ``start … end`` of a request, in its row."""

    request: Hashable
    row: int
    start: int
    end: int


def columns(spans: Sequence[Span]) -> tuple[list[int], list[int], list[int]]:
    """Return the rows, starts and ends of spans."""
    return [span.row for span in spans], [span.start for span in spans], [span.end for span in spans]


class Holdings:
    """Bookkeeping beside a request pool, on the host; a row that was handed out anew starts with nothing.

    `goes_whole` tells that an evicted token's slot itself went back (every layer slides), not only a sliding
    slot beside it. `unshared` says why nothing can be borrowed or kept, if it cannot.
    """

    def __init__(self, table: RequestPool, page_size: int, goes_whole: bool, unshared: str = "") -> None:
        self._table = table
        self._unshared = unshared
        self._page_size = page_size
        self._goes_whole = goes_whole
        self._known: dict[Hashable, Holding] = {}

    def of(self, request: Hashable) -> Holding:
        """Return what is known of a request.

        Raises:
            SlotError: it has no row.
        """
        row = self._table.row_of(request)
        if row is None:
            raise SlotError(f"request {request!r} has no row in the request table; was it released before?")
        fresh = Holding(row, int(self._table.generation[row]))
        known = self._known.get(request, fresh)
        return known if known[:2] == fresh[:2] else fresh

    def length(self, request: Hashable) -> int:
        """Return the tokens that a request wrote."""
        return int(self._table.lengths[self.of(request).row])

    def hold(self, request: Hashable, borrowed: int, evicted: int) -> None:
        """Note a prefix; what is known already stays, so both numbers only grow.

        Raises:
            SlotError: no row, more tokens than were written, or `borrowed` is no whole number of pages.
        """
        holding = self.of(request)
        for name, tokens in (("borrowed", borrowed), ("evicted", evicted)):
            self.check_tokens(request, name, tokens)
        borrowed, evicted = int(borrowed), int(evicted)
        self.check_pages(request, "borrowed", borrowed)
        self._known[request] = holding._replace(
            borrowed=max(holding.borrowed, borrowed), evicted=max(holding.evicted, evicted)
        )

    def evict(self, spans: Sequence[Span]) -> None:
        """Note that the sliding slots of these tokens went back."""
        for span in spans:
            holding = self.of(span.request)
            self._known[span.request] = holding._replace(evicted=max(holding.evicted, span.end))

    def leave(self, requests: Sequence[Hashable], ends: Sequence[int]) -> None:
        """Note for debug mode which borrowed tokens left the window of those who borrow them; nothing goes back."""
        for request, end in self._pairs(requests, ends, "ends"):
            holding = self.of(request)
            left = max(holding.evicted, min(end, holding.borrowed))
            self._known[request] = holding._replace(evicted=left)

    def forget(self, request: Hashable) -> None:
        """Forget a request."""
        self._known.pop(request, None)

    def clear(self) -> None:
        """Forget every request."""
        self._known.clear()

    def owned_from(self, holding: Holding) -> int:
        """Return the first token whose slot is the request's own and was not given back."""
        gone = holding.evicted // self._page_size * self._page_size if self._goes_whole else 0
        return max(holding.borrowed, gone)

    def due(self, requests: Sequence[Hashable], ends: Sequence[int]) -> list[Span]:
        """Return the tokens before each end whose sliding slots are still the request's own, if there are any.

        Raises:
            SlotError: a request has no row or is named twice, or an end is no number of tokens that it wrote.
        """
        spans = []
        for request, end in self._pairs(requests, ends, "ends"):
            holding = self.of(request)
            written = int(self._table.lengths[holding.row])
            if not 0 <= end <= written:
                raise SlotError(
                    f"request {request!r} wrote {written} tokens; its tokens before {end} cannot all have left the "
                    "window"
                )
            start = max(holding.borrowed, holding.evicted)
            if end > start:
                spans.append(Span(request, holding.row, start, end))
        return spans

    def tails(self, requests: Sequence[Hashable], lengths: Sequence[int]) -> list[Span]:
        """Return the whole pages that each request wrote beyond the one in which its ``lengths[i]`` tokens end.

        Raises:
            SlotError: a request has no row or is named twice, or a length is no number of tokens that it wrote.
        """
        spans = []
        for request, length in self._pairs(requests, lengths, "lengths"):
            self.check_tokens(request, "lengths", length)
            row = self.of(request).row
            start, written = -(-length // self._page_size) * self._page_size, int(self._table.lengths[row])
            if start < written:
                spans.append(Span(request, row, start, written))
        return spans

    def slots_in(self, span: Span) -> int:
        """Return the slots of the pages of a span that begins with a page."""
        return -(-(span.end - span.start) // self._page_size) * self._page_size

    def check_truncate(self, requests: Sequence[Hashable], lengths: Sequence[int]) -> None:
        """Verify that requests can be cut to `lengths` tokens.

        Raises:
            SlotError: what would be forgotten was evicted or is another's.
        """
        for request, length in self._pairs(requests, lengths, "lengths"):
            holding = self.of(request)
            least = max(holding.borrowed, holding.evicted)
            if length < least:
                raise SlotError(
                    f"request {request!r} cannot go back to {length} tokens: {holding.borrowed} are another's and "
                    f"{holding.evicted} were evicted; keep at least {least}, or release it"
                )

    def check_tokens(self, request: Hashable, name: str, tokens: int) -> None:
        """Verify that `tokens` is a number of tokens that a request wrote.

        Raises:
            SlotError: it is not.
        """
        number = whole_count(tokens, name)
        written = self.length(request)
        if not 0 <= number <= written:
            raise SlotError(
                f"request {request!r} wrote {written} tokens; {name}={number} of them cannot be meant: give 0 … {written}"
            )

    def check_pages(self, request: Hashable, name: str, tokens: int) -> None:
        """Verify that the first `tokens` of a request can be another's: they end a page, which has one owner.

        Raises:
            SlotError: they do not, or requests share nothing here.
        """
        if tokens and self._unshared:
            raise SlotError(
                f"request {request!r}: {name}={tokens} says that its first tokens are another's as well, and here requests "
                f"share none: {self._unshared}; leave {name} out. Nothing was changed"
            )
        if tokens % self._page_size:
            raise SlotError(
                f"request {request!r}: {name}={tokens} is no whole number of pages of {self._page_size} tokens, and a "
                f"page has one owner; give {tokens // self._page_size * self._page_size}"
            )

    def check_sole(self, spans: Sequence[Span]) -> None:
        """Verify that no other live request owns a page of these tokens; reads the table back, for debug mode.

        Raises:
            SlotError: names both requests and what to tell kvdock.
        """
        owned = {row: self._owned_pages(request) for row, request in self._table.live_rows().items()}
        for span in spans:
            pages = self._pages(span.row, span.start, span.end)
            for row, other in self._table.live_rows().items():
                if row != span.row:
                    self._refuse_shared(span.request, pages, other, owned[row])

    def check_lent(self, spans: Sequence[Span], left: Mapping[Hashable, int] | None = None) -> None:
        """Verify that no other live request borrows a page of these tokens; reads the table back, for debug mode.

        `left` is for what leaves the window: the tokens of each request that leave together with these.

        Raises:
            SlotError: names both requests and what to do first.
        """
        import numpy as np

        owned = {row: self._owned_pages(request) for row, request in self._table.live_rows().items()}
        lent = {row: self._borrowed_pages(request, left) for row, request in self._table.live_rows().items()}
        for span in spans:
            end = span.end if left is None else span.end // self._page_size * self._page_size
            # What was rolled back is another's by now, who may have lent it.
            others = [pages for row, pages in owned.items() if row != span.row]
            pages = np.setdiff1d(self._pages(span.row, span.start, end), np.concatenate([*others, [0]]))
            for row, other in self._table.live_rows().items():
                if row != span.row:
                    self._refuse_lent(span.request, pages, other, lent[row], left is not None)

    def gone_slots(self, request: Hashable, borrowed: int, evicted: int) -> torch.Tensor:
        """Return the slots whose pages a request says to have given back by now; reads the table back, for debug mode.

        Without those that its later tokens have: what went back may have come back to it.
        """
        import numpy as np

        holding, size = self.of(request), self._page_size
        start = max(holding.borrowed, holding.evicted, borrowed) // size * size
        end, length = evicted // size * size, int(self._table.lengths[holding.row])
        slots = self._table.req_to_token[holding.row, start : max(start, end)]
        later = self._pages(holding.row, max(start, end), length)
        return slots[np.flatnonzero(np.isin(to_host(slots) // size, later, invert=True)).tolist()]

    def _refuse_shared(self, request: Hashable, pages: Ints, other: Hashable, owned: Ints) -> None:
        import numpy as np

        shared = np.intersect1d(pages, owned)
        if len(shared):
            raise SlotError(
                f"request {request!r} gives back slots that request {other!r} owns as well (pages from slots "
                f"{self._heads(shared)}): say whose a shared prefix is with hold_prefix(request, borrowed=…), and what "
                "was rolled back with truncate; nothing was changed"
            )

    def _refuse_lent(self, request: Hashable, pages: Ints, other: Hashable, lent: Ints, leaves: bool) -> None:
        import numpy as np

        shared = np.intersect1d(pages, lent)
        if len(shared):
            advice = (
                f"evict {other!r} as far, before or in the same call"
                if leaves
                else f"release {other!r} first, or leave them to another holder with release({request!r}, kept=…)"
            )
            raise SlotError(
                f"request {request!r} gives back slots that request {other!r} borrows (pages from slots "
                f"{self._heads(shared)}): {advice}; nothing was changed"
            )

    def _heads(self, pages: Ints) -> list[int]:
        return [int(page) * self._page_size for page in pages[:8]]

    def _owned_pages(self, request: Hashable) -> Ints:
        holding = self.of(request)
        return self._pages(holding.row, self.owned_from(holding), int(self._table.lengths[holding.row]))

    def _borrowed_pages(self, request: Hashable, left: Mapping[Hashable, int] | None) -> Ints:
        """Return the pages of another that a request needs: of all its tokens, or of those that did not leave yet."""
        holding = self.of(request)
        gone = holding.evicted if left is not None or self._goes_whole else 0
        start = max(gone, (left or {}).get(request, 0)) // self._page_size * self._page_size
        return self._pages(holding.row, min(start, holding.borrowed), holding.borrowed)

    def _pages(self, row: int, start: int, end: int) -> Ints:
        return to_host(self._table.req_to_token[row, start:end]) // self._page_size

    def _pairs(self, requests: Sequence[Hashable], tokens: Sequence[int], name: str) -> list[tuple[Hashable, int]]:
        return list(zip(requests, one_each(requests, tokens, name).tolist(), strict=True))


def one_each(requests: Sequence[Hashable], tokens: Sequence[int], name: str) -> Ints:
    """Return `tokens` as host integers, one a request.

    Raises:
        SlotError: another number of them than of requests, no whole numbers, a request twice, or what
            `distinct` refuses.
    """
    distinct(requests)
    numbers = on_host(tokens, name)
    if len(numbers) != len(requests):
        raise SlotError(f"{len(requests)} requests but {len(numbers)} {name}; give one of each")
    once_each(requests)
    return numbers


def once_each(requests: Sequence[Hashable]) -> dict[Hashable, None]:
    """Return the requests of a call in order.

    Raises:
        SlotError: a request twice, or what `distinct` refuses.
    """
    names = distinct(requests)
    if len(names) != len(requests):
        twice = Counter(requests).most_common(1)[0][0]
        raise SlotError(f"request {twice!r} is named twice in one call; nothing was changed")
    return names


def distinct(requests: Iterable[Hashable]) -> dict[Hashable, None]:
    """Return the requests of a call, each once and in order.

    Raises:
        SlotError: a text or what can be read once alone instead of a list of names, a name that cannot be hashed,
            or ``None``.
    """
    if isinstance(requests, (str, bytes)):
        raise SlotError(
            f"requests is the text {requests!r}, whose characters are no requests; give a list: [{requests!r}]"
        )
    if isinstance(requests, Iterator):
        raise SlotError(
            f"requests is a {type(requests).__name__}, which can be read once alone; give a list of names. Nothing was "
            "changed"
        )
    try:
        names = dict.fromkeys(requests)
    except TypeError as error:
        raise SlotError(f"requests={requests!r} is no list of hashable names ({error}); nothing was changed") from error
    if None in names:
        raise nameless()
    return names


def nameless() -> SlotError:
    """Return the error for ``None`` in the place of a request."""
    return SlotError("a request is named None, which stands for no request; give it another id. Nothing was changed")
