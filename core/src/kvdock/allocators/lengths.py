"""Counts that the host already has: lengths of a batch, pages they need, columns of request rows.

Everything here is numpy over host integers, vectorised over the batch; nothing reads the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvdock.errors import SlotError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvdock.kernels.interface import Kernels

    Ints = NDArray[np.int64]

MOST_TOKENS = 2**40
"""No request is longer: counts of a batch of such lengths still fit 64 bits."""


def require_integers(name: str, values: torch.Tensor) -> None:
    """Verify that `values` is a tensor of whole numbers, by its type alone.

    Raises:
        SlotError: it is a list, an array or a tensor of another type.
    """
    dtype = getattr(values, "dtype", None)
    if dtype in _integers() or (hasattr(values, "is_cpu") and not values.numel()):
        return
    found = f"a {type(values).__name__}" if not hasattr(values, "is_cpu") else f"of type {dtype}"
    raise SlotError(f"{name} is {found}; give a tensor of int64 or int32, nothing was changed")


def require_row(name: str, values: torch.Tensor) -> None:
    """Verify that `values` is a tensor of whole numbers of one dimension, by its type and shape alone.

    Raises:
        SlotError: it is not.
    """
    require_integers(name, values)
    if values.dim() != 1:
        raise SlotError(f"{name} has the shape {list(values.shape)}; give them in one dimension, nothing was changed")


@lru_cache(maxsize=1)
def _integers() -> frozenset[torch.dtype]:
    import torch

    return frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def on_host(lens: Sequence[int] | torch.Tensor, name: str) -> Ints:
    """Return host integers (a list, an array or a CPU tensor) as an int64 array.

    Raises:
        SlotError: something else than whole numbers, or a tensor on another device, whose values the host
            would have to wait for.
    """
    import numpy as np

    is_cpu = getattr(lens, "is_cpu", None)  # of a tensor
    if is_cpu is False:
        device = getattr(lens, "device", None)
        raise SlotError(f"{name} is on {device}; give the lengths that the host has: a list or a CPU tensor")
    try:
        found = lens.numpy() if is_cpu else np.asarray(lens)  # type: ignore[union-attr]
    except (ValueError, TypeError, RuntimeError) as error:
        raise SlotError(f"{name} is ragged, or no list of numbers ({error}); give whole numbers on the host") from error
    if found.dtype == np.int64 and found.ndim == 1:
        return found
    found = found.reshape(-1)
    is_wide = found.dtype == np.uint64 and bool((found > np.iinfo(np.int64).max).any())
    if found.size and (found.dtype.kind not in "iu" or is_wide):
        of_bits = " of 64 bits" if is_wide else ""
        raise SlotError(f"{name} holds {found.tolist()[:8]}, which are no whole numbers{of_bits}; nothing was changed")
    return found.astype(np.int64, copy=False)


def whole_count(value: int, name: str) -> int:
    """Return a number of slots or pages as an int.

    Raises:
        SlotError: it is no whole number, or lies on a device whose values the host would have to wait for.
    """
    if type(value) is int:
        return value
    is_tensor = hasattr(value, "is_cpu")
    found = on_host(cast(Any, value if is_tensor else [value]), name)
    if getattr(value, "shape", ()) != () or isinstance(value, (list, tuple)):
        raise SlotError(f"{name} is {value!r}; give one whole number, nothing was changed")
    return int(found[0])


def natural(value: int, name: str) -> int:
    """Return a number that is whole and not negative.

    Raises:
        SlotError: it is another.
    """
    count = whole_count(value, name)
    if count < 0:
        raise SlotError(f"{name}={count} is negative; give 0 or more, nothing was changed")
    return count


def new_sizes(sizes: Mapping[str, int], spaces: Collection[str], name: str) -> dict[str, int]:
    """Return the sizes that a resize names; `name` says whose in errors.

    Raises:
        SlotError: it names a space that is none of `spaces`, or a size that is no whole number; or it is no mapping.
    """
    if not isinstance(sizes, Mapping):
        raise SlotError(f"{name}: resize({sizes!r}) is no mapping from spaces to slots; nothing was changed")
    if unknown := sorted(set(sizes) - set(spaces), key=str):
        raise SlotError(f"{name}: resize names {unknown}; this allocator holds {', '.join(map(repr, spaces))}")
    return {space: whole_count(size, f"{name}: the size of {space!r}") for space, size in sizes.items()}


def whole_pages(need_size: int, page_size: int, name: str) -> int:
    """Return the pages of `need_size` slots; `name` says whose in errors.

    Raises:
        SlotError: `need_size` is negative or no multiple of the page size; nothing was taken.
    """
    count = whole_count(need_size, "need_size")
    if count < 0 or count % page_size:
        raise SlotError(
            f"{name}: alloc({need_size}) is no whole number of pages of {page_size} slots; "
            f"ask for {max(0, -(-count // page_size)) * page_size}"
        )
    return count // page_size


def to_host(values: torch.Tensor) -> Ints:
    """Return the integers of a tensor as an int64 array; waits for the device once."""
    import numpy as np

    found: Ints = values.detach().cpu().numpy().astype(np.int64).reshape(-1)
    return found


def to_device(values: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return host integers as a tensor on `device`, without waiting for it."""
    import torch

    return torch.from_numpy(values).to(device, non_blocking=True)


def pages_of_slots(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the page of each slot; pages of one slot are the slots themselves, not a copy.

    A shift takes a seventh of the time of a 64-bit division, and rounds negative slots down as well.
    """
    if page_size == 1:
        return slots
    shift = page_size.bit_length() - 1
    pages: torch.Tensor = slots >> shift if page_size == 1 << shift else slots // page_size
    return pages


def distinct_pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return each page of `slots` once; waits for the device once.

    Slots come mostly page by page and pages mostly in order, so on the host repeats of neighbours are dropped
    first, and what ascends then is not sorted. On a device that would be one more wait.
    """
    import torch

    if not slots.is_cpu:
        found: torch.Tensor = torch.unique(pages_of_slots(slots, page_size))
        return found
    return torch.from_numpy(_distinct(_pages_on_host(slots.numpy(), page_size), page_size))


def _distinct(pages: Ints, page_size: int) -> Ints:
    import numpy as np

    heads = _one_of_each_page(pages, page_size)
    if heads is not None:
        if _ascends(heads):
            return heads
        heads = np.sort(heads)
        if _ascends(heads):
            return heads
    numbers = np.sort(pages[_run_starts(pages)])
    found: Ints = numbers[_run_starts(numbers)]
    return found


def whole_and_partial(slots: Ints, page_size: int) -> tuple[Ints, Ints | None]:
    """Return the pages of which every slot is here, and those of which some are, if any, in arrays of their own.

    A page is seen as whole where its slots follow each other; one that comes in pieces appears once a piece.
    """
    import numpy as np

    pages = _pages_on_host(slots, page_size)
    numbers = _one_of_each_page(pages, page_size)
    if numbers is not None:
        return numbers.copy(), None
    starts = _run_starts(pages)
    numbers = pages[starts]
    whole = np.diff(starts, append=len(pages)) == page_size
    return numbers[whole], numbers[~whole]


def _pages_on_host(slots: Ints, page_size: int) -> Ints:
    if page_size & (page_size - 1):
        return slots // page_size
    return slots >> (page_size.bit_length() - 1)


def _one_of_each_page(pages: Ints, page_size: int) -> Ints | None:
    """Return every `page_size`-th of the pages of slots if there are as few runs of one page as that, else ``None``.

    Where no slot is named twice, a run is at most a page long, so all runs are whole pages and these their numbers.
    Where these differ from each other, they are all the pages in any case: there are no more runs than them.
    """
    import numpy as np

    if (np.count_nonzero(pages[1:] != pages[:-1]) + 1) * page_size != len(pages):
        return None
    return pages[::page_size]


def _ascends(numbers: Ints) -> bool:
    import numpy as np

    return int(np.count_nonzero(numbers[1:] > numbers[:-1])) + 1 >= len(numbers)


def _run_starts(numbers: Ints) -> Ints:
    """Return where runs of one number start."""
    import numpy as np

    is_start = np.empty(len(numbers), dtype=np.bool_)
    is_start[:1] = True
    np.not_equal(numbers[1:], numbers[:-1], out=is_start[1:])
    found: Ints = is_start.nonzero()[0]
    return found


def first_of_each(pages: Ints) -> Ints:
    """Return where each page stands first; repeats of neighbours are dropped before anything is sorted."""
    import numpy as np

    if not len(pages):
        return pages
    heads = np.flatnonzero(np.concatenate(([True], pages[1:] != pages[:-1])))
    found: Ints = heads[np.unique(pages[heads], return_index=True)[1]]
    return found


def pages_of(tokens: Ints, page_size: int) -> Ints:
    """Return the pages that so many tokens take."""
    return -(-tokens // page_size)


def grown_pages(prefix_lens: Ints, seq_lens: Ints, page_size: int) -> Ints:
    """Return the new pages of each request that grows from `prefix_lens` to `seq_lens` tokens.

    Raises:
        SlotError: the lists differ in length, a prefix is negative or longer than its sequence, or a sequence is
            longer than any can be.
    """
    import numpy as np

    if prefix_lens.shape != seq_lens.shape:
        raise SlotError(f"{len(prefix_lens)} prefix lengths but {len(seq_lens)} sequence lengths; give one of each")
    # As numbers without a sign negative ones are huge, so two comparisons find all that is wrong.
    prefix, seq = prefix_lens.view(np.uint64), seq_lens.view(np.uint64)
    wrong = (prefix > seq) | (seq > MOST_TOKENS)
    if wrong.any():
        i = int(wrong.argmax())
        if seq_lens[i] > MOST_TOKENS:
            raise SlotError(f"request {i} of the batch has {seq_lens[i]} tokens; none has more than {MOST_TOKENS}")
        raise SlotError(
            f"request {i} of the batch grows from {prefix_lens[i]} to {seq_lens[i]} tokens; "
            "a prefix is at least 0 and at most the sequence"
        )
    return pages_of(seq_lens, page_size) - pages_of(prefix_lens, page_size)


class Growth(NamedTuple):
    """A batch that grows, as the host knows it, validated: no page is taken for one that contradicts itself."""

    prefix: Ints
    seq: Ints
    page_size: int

    @property
    def new_pages(self) -> Ints:
        """New pages of each request."""
        return pages_of(self.seq, self.page_size) - pages_of(self.prefix, self.page_size)

    @property
    def page_count(self) -> int:
        """New pages of the batch."""
        return int(self.new_pages.sum())

    def page_heads(self) -> Ints:
        """Return where the first token of each new page stands among the new tokens of the batch."""
        grown, bound = self.seq - self.prefix, pages_of(self.prefix, self.page_size) * self.page_size
        return spread(grown.cumsum() - grown + bound - self.prefix, self.new_pages, self.page_size)


class Step(Growth):
    """A batch of which every request grows by one token."""

    __slots__ = ()

    @property
    def new_pages(self) -> Ints:
        """New pages of each request: one where its tokens fill their pages."""
        found: Ints = (self._in_page() == 0).astype(self.seq.dtype)
        return found

    @property
    def page_count(self) -> int:
        """New pages of the batch."""
        import numpy as np

        return len(self.seq) - int(np.count_nonzero(self._in_page()))

    def page_heads(self) -> Ints:
        """Return where the first token of each new page stands: the requests whose token starts one."""
        found: Ints = (self._in_page() == 0).nonzero()[0]
        return found

    def _in_page(self) -> Ints:
        """Return the place of each new token in its page."""
        size = self.page_size
        found: Ints = self.prefix % size if size & (size - 1) else self.prefix & (size - 1)
        return found


def owners_of_pages(owners: Sequence[object], counts: Ints) -> list[object]:
    """Return the owner of each page of requests that have so many."""
    return [owner for owner, count in zip(owners, counts.tolist(), strict=True) for _ in range(int(count))]


def extend_growth(
    lens: tuple[Sequence[int] | torch.Tensor, Sequence[int] | torch.Tensor], extend_num_tokens: int, page_size: int
) -> Growth:
    """Return what an extend from prefix to sequence lengths asks for.

    Raises:
        SlotError: the lengths contradict each other, or do not add up to `extend_num_tokens`.
    """
    prefix, seq = on_host(lens[0], "prefix_lens_cpu"), on_host(lens[1], "seq_lens_cpu")
    grown_pages(prefix, seq, page_size)
    total, extend_num_tokens = int(seq.sum() - prefix.sum()), whole_count(extend_num_tokens, "extend_num_tokens")
    if total != extend_num_tokens:
        raise SlotError(f"extend_num_tokens={extend_num_tokens}, but seq_lens_cpu - prefix_lens_cpu add up to {total}")
    return Growth(prefix, seq, page_size)


def decode_growth(seq_lens: Sequence[int] | torch.Tensor, page_size: int) -> Growth:
    """Return what a decode asks for: one token a request.

    Raises:
        SlotError: a length below 1, or longer than any can be.
    """
    import numpy as np

    seq = on_host(seq_lens, "seq_lens_cpu")
    prefix = seq - 1
    # As numbers without a sign negative ones are huge, also where the difference wrapped around.
    if np.count_nonzero(prefix.view(np.uint64) >= MOST_TOKENS):
        if seq.min() < 1:
            raise SlotError(f"alloc_decode: seq_lens count the new token, so they are at least 1, not {seq.min()}")
        raise SlotError(f"alloc_decode: a request has {seq.max()} tokens; none has more than {MOST_TOKENS}")
    return Step(prefix, seq, page_size)


def check_batch(batch: int, owners: Sequence[object] | None = None, **tensors: torch.Tensor) -> None:
    """Verify that every tensor, and `owners` if given, has one entry for each of `batch` requests.

    Raises:
        SlotError: names the one that has not, or that is no tensor of whole numbers, or what `check_owners` refuses;
            nothing was taken.
    """
    check_owners(owners)
    integers = _integers()
    for name, tensor in tensors.items():
        if getattr(tensor, "dtype", None) not in integers:
            require_integers(name, tensor)
        if tensor.shape != (batch,):
            raise SlotError(
                f"{name} has shape {list(tensor.shape)}, but seq_lens_cpu holds {batch} requests; give one of each"
            )
    if owners is not None and len(owners) != batch:
        raise SlotError(f"owners names {len(owners)} requests, but seq_lens_cpu holds {batch}; give one of each")


def check_owners(owners: Sequence[object] | None) -> None:
    """Verify that owners are names that a dict takes, before anything is handed out to them.

    Raises:
        SlotError: one cannot be hashed, or they are no list; nothing was taken.
    """
    if owners is None:
        return
    try:
        hash(tuple(owners))
    except TypeError as error:
        raise SlotError(f"owners={owners!r} is no list of hashable names ({error}); nothing was taken") from error


class Ranges(NamedTuple):
    """Column ranges of request rows, validated against a table of ``[rows, columns]``."""

    rows: Ints
    starts: Ints
    ends: Ints
    columns: int

    def page_bounds(self, page_size: int) -> PageBounds:
        """Return the pages of which any token is in a range."""
        import numpy as np

        first = self.starts // page_size
        last = np.where(self.ends > self.starts, pages_of(self.ends, page_size), first)
        return PageBounds(self, first, last, page_size)

    def finished_page_bounds(self, page_size: int) -> PageBounds:
        """Return the pages whose *last* token is in a range: a page that goes on after it is left out."""
        return PageBounds(self, self.starts // page_size, self.ends // page_size, page_size)


class PageBounds(NamedTuple):
    """Pages ``first … last`` (exclusive) of each of some ranges."""

    ranges: Ranges
    first: Ints
    last: Ints
    page_size: int

    def from_tokens(self, starts: Ints) -> PageBounds:
        """Return these pages without those that lie wholly before the tokens `starts`."""
        first = (starts // self.page_size).clip(self.first, self.last)
        return PageBounds(self.ranges, first, self.last, self.page_size)

    def pages(self, table: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Return the page numbers, ``[pages]`` int64, from one word of `table` a page.

        Raises:
            SlotError: the table holds no whole numbers.
        """
        require_integers("table", table)
        return kernels.read_pages(table, self.ranges.rows, self.first, self.last, self.page_size)

    def positions_in(self, whole: PageBounds) -> Ints:
        """Return where these pages stand in the list of `whole`, whose bounds contain them."""
        offset = (whole.last - whole.first).cumsum() - (whole.last - whole.first)
        return spread(offset + self.first - whole.first, self.last - self.first)


def spread(starts: Ints, counts: Ints, step: int = 1) -> Ints:
    """Return ``starts[i], starts[i] + step, …`` (counts[i] of them) of each i, one after the other."""
    import numpy as np

    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - counts) * step, counts) + np.arange(total, dtype=np.int64) * step


def checked_ranges(shape: Sequence[int], rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Ranges:
    """Return validated column ranges of a table of `shape` ``[rows, columns]``.

    Raises:
        SlotError: lists of different lengths, a row or column outside the table, or a range that runs backwards.
    """
    if len(shape) != 2:
        raise SlotError(f"the table has the shape {list(shape)}; it is [rows, columns]")
    row, start, end = on_host(rows, "rows"), on_host(starts, "starts"), on_host(ends, "ends")
    if not len(row) == len(start) == len(end):
        raise SlotError(f"{len(row)} rows, {len(start)} starts and {len(end)} ends; give one of each a request")
    wrong = (row < 0) | (row >= shape[0]) | (start < 0) | (start > end) | (end > shape[1])
    if wrong.any():
        i = int(wrong.argmax())
        raise SlotError(
            f"row {row[i]}, columns {start[i]} … {end[i]} is no range of a table of {shape[0]} rows and "
            f"{shape[1]} columns; nothing was changed"
        )
    return Ranges(row, start, end, int(shape[1]))
