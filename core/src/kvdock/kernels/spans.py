"""Spans of request rows in plain torch: what a kernel set does that has no launch of its own for them.

A span is a row and the columns, or pages, from one to another; all are numbers on the host. Neither function waits for
the device.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from kvdock.allocators.lengths import pages_of_slots, spread, to_device

Ints = NDArray[np.int64]


def places(rows: Ints, starts: Ints, ends: Ints, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the column of each word of the spans, span after span, as int64 on `device`."""
    counts = ends - starts
    return to_device(np.repeat(rows, counts), device), to_device(spread(starts, counts), device)


def read_pages(table: torch.Tensor, rows: Ints, firsts: Ints, lasts: Ints, page_size: int) -> torch.Tensor:
    """Return the int64 numbers of the pages ``firsts[i] … lasts[i]`` of each row, from one word of `table` a page."""
    if len(rows) == 1:
        slots = table[int(rows[0]), int(firsts[0]) * page_size : int(lasts[0]) * page_size : page_size]
    else:
        first_words = rows * table.shape[1] + firsts * page_size
        slots = torch.take(table, to_device(spread(first_words, lasts - firsts, page_size), table.device))
    return pages_of_slots(slots, page_size).to(torch.int64)
