"""Which slots a batch that grows gets: page arithmetic in torch for any device, and in numpy for the host.

The torch forms define the results. On the host an operation on a batch is so short that starting it counts:
numpy starts one in a third of the time. Neither form reads a value back from a device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvdock.errors import SlotError

Ints = NDArray[np.int64]


def extend_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    new_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
) -> torch.Tensor:
    """Return the slots of an extend, page by page.

    Each request has one segment for the rest of its last page (often empty), then one a new page; the
    slots of a segment are consecutive, so only two operations are as long as the tokens.
    """
    prefix, seq = prefix_lens.to(torch.int64), seq_lens.to(torch.int64)
    pages_before, pages_after = _ceil_div(prefix, page_size), _ceil_div(seq, page_size)
    pages = pages_after - pages_before
    batch, count = prefix.shape[0], new_pages.shape[0]
    request = torch.arange(batch, device=prefix.device)
    head = pages.cumsum(0) - pages + request
    of_page = torch.repeat_interleave(request, pages, output_size=count)

    base = new_pages.new_empty(batch + count, dtype=torch.int64)
    base[head] = last_loc.to(torch.int64) + 1
    base[torch.arange(1, count + 1, device=prefix.device) + of_page] = new_pages.to(torch.int64) * page_size

    lengths = torch.full_like(base, page_size)
    lengths[head + pages] = seq - (pages_after - 1) * page_size
    lengths[head] = torch.minimum(seq, pages_before * page_size) - prefix

    shift = base - (lengths.cumsum(0) - lengths)
    slots = torch.repeat_interleave(shift, lengths, output_size=extend_num_tokens)
    return slots.add_(torch.arange(extend_num_tokens, device=prefix.device))


def decode_slots(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, new_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Return each request's next slot: the one after its last, or the first of the next new page."""
    following = last_loc.to(torch.int64) + 1
    if new_pages.shape[0] == 0:
        return following
    starts_page = (seq_lens.to(torch.int64) - 1) % page_size == 0
    turn = (starts_page.cumsum(0) - 1).clamp_(min=0)
    return torch.where(starts_page, new_pages.to(torch.int64)[turn] * page_size, following)


def extend_slots_on_host(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    new_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
) -> torch.Tensor:
    """Return what `extend_slots` does for tensors on the host.

    Raises:
        SlotError: the lengths ask for another number of pages or tokens than was taken for them.
    """
    prefix, seq, last, new = (_ints(tensor) for tensor in (prefix_lens, seq_lens, last_loc, new_pages))
    before, after = -(-prefix // page_size), -(-seq // page_size)
    pages = after - before
    ends = pages.cumsum()
    batch, count = len(prefix), int(ends[-1]) if len(ends) else 0
    _verify("pages", count, len(new))

    tail = ends + np.arange(batch)
    head = tail - pages
    is_page = np.ones(batch + count, dtype=np.bool_)
    is_page[head] = False
    base = np.empty(batch + count, dtype=np.int64)
    base[is_page] = new * page_size
    base[head] = last + 1

    lengths = np.full(batch + count, page_size, dtype=np.int64)
    lengths[tail] = seq - (after - 1) * page_size
    lengths[head] = np.minimum(seq, before * page_size) - prefix

    starts = lengths.cumsum()
    _verify("tokens", int(starts[-1]) if len(starts) else 0, extend_num_tokens)
    starts -= lengths
    slots = np.repeat(base - starts, lengths)
    slots += np.arange(extend_num_tokens)
    return torch.from_numpy(slots)


def decode_slots_on_host(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, new_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Return what `decode_slots` does for tensors on the host.

    Raises:
        SlotError: the lengths ask for another number of pages than was taken for them.
    """
    following, new = _ints(last_loc) + 1, _ints(new_pages)
    if len(new):
        turn = (_in_page(seq_lens.numpy(), page_size) == 1 % page_size).nonzero()[0]
        _verify("pages", len(turn), len(new))
        following[turn] = new * page_size
    return torch.from_numpy(following)


def _in_page(tokens: Ints, page_size: int) -> Ints:
    found: Ints = tokens % page_size if page_size & (page_size - 1) else tokens & (page_size - 1)
    return found


def _ints(tensor: torch.Tensor) -> Ints:
    found: Ints = tensor.numpy()
    return found if found.dtype == np.int64 else found.astype(np.int64)


def _verify(what: str, asked: int, taken: int) -> None:
    if asked != taken:
        raise SlotError(
            f"the lengths on the device ask for {asked} {what}, but those of the host for {taken}; "
            "give the same lengths in both forms"
        )


def _ceil_div(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (lens + (page_size - 1)) // page_size
