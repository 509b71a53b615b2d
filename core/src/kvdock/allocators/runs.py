"""Free pages as runs: where each begins and ends, and the longest run under every stretch of pages.

A run is a stretch of free pages that no free page adjoins. Its length stands at its first page (`heads`) and
at its last (`tails`); both hold 0 everywhere else, so a page that comes back finds its neighbours by two
reads. Over the heads lies a tree of maxima, 16 children a node (64 bytes, one cache line): the lowest run
that is long enough is one descent away, and a change is carried up only while it changes a maximum. Nothing
is ever sorted or merged but the pages of the call itself. Everything is numpy on the host; no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvdock.errors import SlotError
from kvdock.layout import round_up

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Words = NDArray[np.int32]

FANOUT = 16
_SHIFT = 4
_NODE_WORDS = FANOUT // 2
"""64-bit words of a node; maxima are int32."""
LEVEL_GUARD_BYTES = 512
"""Beyond a byte a page, what the padding of at most 7 levels takes."""
_CLASSES = 33
"""Run lengths by their number of bits, 1 … 32."""
_FEW = 4
"""Up to so many runs are changed one by one: below it, a call of numpy costs more than it does."""


class MaxTree:
    """Maxima over `leaves`, 16 to a node, level upon level up to a single node.

    `memory` holds the levels above the leaves; `touched` counts the 64-bit words that were read or written.
    """

    def __init__(self, leaves: Words, memory: Words) -> None:
        self.touched = 0
        self.levels = [leaves]
        start = 0
        while len(self.levels[-1]) > FANOUT:
            nodes = len(self.levels[-1]) // FANOUT
            end = start + round_up(nodes, FANOUT)
            self.levels.append(memory[start:end])
            start = end
        # Python reads one number from a view in a third of the time that an array takes.
        self._views = [level.data for level in self.levels]

    def clear(self) -> None:
        """Set every leaf and maximum to 0."""
        for level in self.levels:
            level[:] = 0

    def first(self, least: int) -> int:
        """Return the lowest leaf that holds at least `least`, or −1."""
        node = 0
        for view in reversed(self._views):
            self.touched += _NODE_WORDS
            children = range(node << _SHIFT, (node << _SHIFT) + FANOUT)
            node = next((child for child in children if view[child] >= least), -1)
            if node < 0:
                return -1
        return node

    def several(self, least: int, below: int | None = None, needed: int | None = None) -> tuple[Ints, Ints]:
        """Return leaves that hold at least `least` (and less than `below`), ascending, and what they hold.

        With `needed` they are only the lowest whose values add up to it: a node whose maximum is below
        `below` promises a leaf of that value, so no more nodes are opened than are needed.
        """
        import numpy as np

        nodes = np.zeros(1, dtype=np.int64)
        values = nodes
        for level in reversed(self.levels):
            self.touched += len(nodes) * _NODE_WORDS
            children = level.reshape(-1, FANOUT).take(nodes, axis=0).ravel()
            found = (children >= least).nonzero()[0]
            values = children[found].astype(np.int64)
            nodes = (nodes[found >> _SHIFT] << _SHIFT) + (found & (FANOUT - 1))
            if needed is not None and len(nodes):
                promised = values if below is None else np.where(values < below, values, 0)
                end = int(np.searchsorted(promised.cumsum(), needed)) + 1
                nodes, values = nodes[:end], values[:end]
        if below is not None:
            nodes, values = nodes[values < below], values[values < below]
        return nodes, values

    def changed(self, leaf: int) -> None:
        """Carry the change of one leaf up."""
        node = leaf
        for below, level in zip(self._views, self._views[1:], strict=False):
            node >>= _SHIFT
            self.touched += _NODE_WORDS + 1
            most = max(below[node << _SHIFT : (node << _SHIFT) + FANOUT])
            if level[node] == most:
                return
            level[node] = most

    def many_changed(self, leaves: Ints) -> None:
        """Carry the changes of several leaves up, each node once."""
        nodes = _ascending(leaves)
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            nodes = _without_repeats(nodes >> _SHIFT)
            self.touched += len(nodes) * (_NODE_WORDS + 1)
            most = below.reshape(-1, FANOUT).take(nodes, axis=0).max(axis=1)
            differs = most != level.take(nodes)
            level[nodes] = most
            nodes = nodes[differs]
            if not len(nodes):
                return


class Picked(NamedTuple):
    """Free runs that serve a request, by ascending address.

    All of them are handed out whole but the one at `cut`, of which the last `left` pages stay free.
    """

    starts: Ints
    lengths: Ints
    cut: int
    left: int

    def pages(self) -> Ints:
        """Return the pages to hand out, ascending."""
        import numpy as np

        if len(self.starts) == 1:
            start = int(self.starts[0])
            return np.arange(start, start + int(self.lengths[0]) - self.left, dtype=np.int64)
        counts = self.lengths.copy()
        if self.left:
            counts[self.cut] -= self.left
        ends: Ints = counts.cumsum()
        pages: Ints = np.repeat(self.starts - (ends - counts), counts)
        pages += np.arange(len(pages), dtype=np.int64)
        return pages


class FreeRuns:
    """The free pages among ``1 … capacity``, handed out in ascending order and in as few runs as it can be.

    A request is served from the lowest run that holds it whole. Without one it gets runs by the number of
    bits of their length, longest first, and of the last such class the lowest: never more runs than the
    lowest free pages would make, and at most twice as many as possible. `take` and `give` cost
    O(pages + log(capacity)), `touched` says how many words the last call read or wrote.
    """

    def __init__(self, name: str, heads: Words, tails: Words, levels: Words) -> None:
        self.name = name
        self._heads, self._tails = heads, tails
        self._head, self._tail = heads.data, tails.data
        self._tree = MaxTree(heads, levels)
        self._by_class = [0] * _CLASSES
        self.capacity = 0
        self.free = 0

    @property
    def touched(self) -> int:
        """Words of 64 bits that the last `take` or `give` read or wrote, pages in and out included."""
        return self._tree.touched

    def reset(self, capacity: int) -> None:
        """Hold the pages ``1 … capacity``, all free; O(capacity)."""
        self._tree.clear()
        self._tails[:] = 0
        self._by_class = [0] * _CLASSES
        self.capacity = self.free = capacity
        self._add(1, capacity)

    def take(self, count: int) -> Ints:
        """Hand out `count` pages, ascending; there must be as many.

        Raises:
            SlotError: the runs do not hold what was counted: pages were freed twice; nothing changes.
        """
        picked = self._picked(count)
        pages = picked.pages()
        if len(picked.starts) <= _FEW:
            self._remove_few(picked)
        else:
            self._remove_many(picked)
        self.free -= count
        self._tree.touched += count
        return pages

    def peek(self, count: int) -> Ints:
        """Return the pages that `take` would hand out, and change nothing.

        Raises:
            SlotError: as for `take`.
        """
        return self._picked(count).pages()

    def give(self, pages: NDArray[np.integer]) -> None:
        """Take back `pages`, in any order.

        Raises:
            SlotError: a page that does not exist, or that is named twice; nothing changes.
        """
        import numpy as np

        count = len(pages)
        self._tree.touched = 2 * count
        if not count:
            return
        ordered = _ascending(np.asarray(pages, dtype=np.int64))
        gaps = ordered[1:] - ordered[:-1]
        self._check(ordered, gaps)
        breaks = np.flatnonzero(gaps != 1)
        if len(breaks) < _FEW:
            firsts = [0, *(breaks + 1).tolist()]
            lasts = [*breaks.tolist(), count - 1]
            for first, last in zip(firsts, lasts, strict=True):
                self._insert(int(ordered[first]), int(ordered[last]) + 1)
        else:
            starts = ordered[np.concatenate(([0], breaks + 1))]
            ends = ordered[np.concatenate((breaks, [count - 1]))] + 1
            self._insert_many(starts, ends)
        self.free += count

    def _check(self, ordered: Ints, gaps: Ints) -> None:
        if int(ordered[0]) < 1 or int(ordered[-1]) > self.capacity:
            outside = ordered[(ordered < 1) | (ordered > self.capacity)].tolist()[:8]
            raise SlotError(f"{self.name}: pages {outside} are freed, but there are only 1 … {self.capacity}")
        if len(gaps) and not int(gaps.min()):
            repeated = ordered[1:][gaps == 0].tolist()[:8]
            raise SlotError(f"{self.name}: pages {repeated} appear twice in one call; nothing was freed")

    def _picked(self, count: int) -> Picked:
        import numpy as np

        self._tree.touched = 0
        if not count:
            none = np.zeros(0, dtype=np.int64)
            return Picked(none, none, 0, 0)
        start = self._tree.first(count)
        if start < 0:
            return self._several(count)
        length = self._head[start]
        return Picked(np.array([start]), np.array([length]), 0, length - count)

    def _several(self, count: int) -> Picked:
        import numpy as np

        bits, longer = self._last_class(count)
        starts, lengths = self._tree.several(1 << bits >> 1, 1 << bits, count - longer)
        left = longer + int(lengths.sum()) - count
        last = len(starts) - 1
        if longer:
            whole = self._tree.several(1 << bits)
            starts, lengths = np.concatenate((starts, whole[0])), np.concatenate((lengths, whole[1]))
            left += int(whole[1].sum()) - longer
        if last < 0 or not 0 <= left < lengths[last]:
            raise self._damaged(count)
        order = np.argsort(starts, kind="stable")
        return Picked(starts[order], lengths[order], int(np.searchsorted(starts[order], starts[last])), left)

    def _last_class(self, count: int) -> tuple[int, int]:
        """Return the bits of the shortest runs that are needed, and the pages of all that are longer."""
        longer = 0
        for bits in range(_CLASSES - 1, 0, -1):
            if longer + self._by_class[bits] >= count:
                return bits, longer
            longer += self._by_class[bits]
        raise self._damaged(count)

    def _damaged(self, count: int) -> SlotError:
        return SlotError(
            f"{self.name}: the free runs do not hold {count} pages although {self.free} are counted as free: some were "
            "freed twice. Build with debug to learn which"
        )

    def _remove_few(self, picked: Picked) -> None:
        for i, (start, length) in enumerate(zip(picked.starts.tolist(), picked.lengths.tolist(), strict=True)):
            self._by_class[length.bit_length()] -= length
            self._head[start] = 0
            self._tail[start + length - 1] = 0
            self._tree.touched += 2
            self._tree.changed(start)
            if i == picked.cut and picked.left:
                self._add(start + length - picked.left, picked.left)

    def _remove_many(self, picked: Picked) -> None:
        starts, lengths, cut, left = picked
        self._heads[starts] = 0
        self._tails[starts + lengths - 1] = 0
        self._count(lengths, -1)
        self._tree.touched += 2 * len(starts)
        self._tree.many_changed(starts)
        if left:
            self._add(int(starts[cut]) + int(lengths[cut]) - left, left)

    def _add(self, start: int, length: int) -> None:
        """Note one run that adjoins no other."""
        self._head[start] = length
        self._tail[start + length - 1] = length
        self._by_class[length.bit_length()] += length
        self._tree.touched += 2
        self._tree.changed(start)

    def _insert(self, start: int, end: int) -> None:
        """Add the pages ``start … end`` (exclusive) to the runs on both sides."""
        left, right = self._tail[start - 1], self._head[end]
        self._tree.touched += 2
        if left:
            self._by_class[left.bit_length()] -= left
            self._tail[start - 1] = 0
        if right:
            self._by_class[right.bit_length()] -= right
            self._head[end] = 0
            self._tree.changed(end)
        self._add(start - left, left + end - start + right)

    def _insert_many(self, starts: Ints, ends: Ints) -> None:
        """Do the same for several stretches, ascending; one run may join two of them."""
        import numpy as np

        left, right = self._tails[starts - 1].astype(np.int64), self._heads[ends].astype(np.int64)
        low, high = starts - left, ends + right
        apart = low[1:] >= high[:-1]
        opens, closes = np.concatenate(([True], apart)), np.concatenate((apart, [True]))
        self._count(np.concatenate((left, right[closes])), -1)
        ended = ends[right > 0]
        self._tails[starts[left > 0] - 1] = 0
        self._heads[ended] = 0
        low, high = low[opens], high[closes]
        self._heads[low] = self._tails[high - 1] = high - low
        self._count(high - low, 1)
        self._tree.touched += 4 * len(starts) + 2 * len(low)
        self._tree.many_changed(np.concatenate((low, ended)))

    def _count(self, lengths: Ints, sign: int) -> None:
        """Count the pages of runs by the bits of their length; a length of 0 is no run."""
        import numpy as np

        bits = np.frexp(lengths)[1]
        for i, pages in enumerate(np.bincount(bits, weights=lengths).tolist()):
            self._by_class[i] += sign * int(pages)


def level_words(memory: NDArray[np.uint8]) -> Words:
    """Return the bytes of a declared level buffer as the int32 words that `MaxTree` divides."""
    import numpy as np

    return memory[: len(memory) // 4 * 4].view(np.int32)


def _ascending(numbers: Ints) -> Ints:
    """Return `numbers` sorted; what comes in order, as most requests do, is left as it is."""
    import numpy as np

    if len(numbers) < 2 or bool((numbers[1:] >= numbers[:-1]).all()):
        return numbers
    return np.sort(numbers)


def _without_repeats(ordered: Ints) -> Ints:
    import numpy as np

    if len(ordered) < 2:
        return ordered
    is_first = np.empty(len(ordered), dtype=np.bool_)
    is_first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]
