"""Free pages as runs: where each begins and ends, and the longest run under every stretch of pages.

A run is a stretch of free pages that no free page adjoins. Its length stands at its last page and, negative,
at its first one (`ends`); 0 stands everywhere else, so a page that comes back finds its neighbours by two
reads. Over the lengths at the last pages lies a tree of maxima, `MaxTree`: the lowest run that is
long enough is one descent away, a run that is cut from the front changes in place, and a change is carried
up only while it changes a maximum. Nothing is ever sorted or merged but the pages of the call itself.
Everything is numpy on the host; no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.errors import SlotError
from kvdock.layout import round_up

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Words = NDArray[np.int32]
    Maxima = NDArray[np.uint16]

FANOUT = 8
"""Children of a node at most; every level has a multiple."""
LEVEL_GUARD_BYTES = 256
"""Beyond a byte a page, what the padding of at most 10 levels takes."""
_TOP = 24
"""A level of so many maxima, 6 words, needs none above it."""
_MOST = 2**16 - 1
"""What a node says of longer runs; whoever wants one looks at every run of that length, of which there are few."""
_LONGEST = 2**31 - 1
_CLASSES = 33
"""Run lengths by their number of bits, 1 … 32."""
_FEW = 4
"""Up to so many runs are changed one by one: below it, a call of numpy costs more than it does."""
_NARROW = 16
"""Up to so many nodes of a level are carried up one by one, for the same reason."""


def _shifts(leaves: int) -> list[int]:
    """Return the bits of each level's children: 4 leaves, then 8 or 4 nodes, so that 13 to 24 are left on top."""
    if leaves <= _TOP:
        return []
    bits = next(bits for bits in range(32) if -(-leaves >> 2 + bits) <= _TOP)
    fours = min(-bits % 3, bits // 2)
    return [2, *[3] * ((bits - 2 * fours) // 3), *[2] * fours, *[1] * (bits == 1)]


class MaxTree:
    """Maxima over `leaves`, level upon level up to one that is read as a whole; `memory` holds those above the leaves.

    A node has 4 leaves or, further up, 8 nodes or 4: 2 words of 64 bits or one, so that a path up costs no more
    words than it tells halves of the pool apart. Maxima have 16 bits and stop at `_MOST`; leaves are exact,
    and those below 0 count as 0.
    """

    def __init__(self, leaves: Words, memory: Maxima) -> None:
        levels: list[NDArray[Any]] = [leaves]
        shifts, start, length = _shifts(len(leaves)), 0, len(leaves)
        for shift in shifts:
            length = -(-length >> shift)
            levels.append(memory[start : start + round_up(length, FANOUT)])
            start += round_up(length, FANOUT)
        self._levels = levels
        # Python reads one number from a view in a third of the time that an array takes.
        views = [level.data for level in levels]
        self._root, self._down = range(length), list(zip(views[::-1], [*shifts[::-1], 0], strict=True))
        self._rising = list(zip(shifts, views[1:], strict=False))
        self._carrying = list(zip(shifts, views, views[1:], strict=False))
        self._many = [
            (shift, below.reshape(-1, 1 << shift), level)
            for shift, below, level in zip(shifts, levels, levels[1:], strict=False)
        ]
        self._opened = [(_TOP.bit_length(), levels[-1][:length].reshape(1, -1))]
        self._opened += [(shift, rows) for shift, rows, _ in reversed(self._many)]

    def clear(self) -> None:
        """Set every leaf and maximum to 0."""
        for level in self._levels:
            level[:] = 0

    def first(self, least: int) -> int:
        """Return the lowest leaf that holds at least `least`, or −1."""
        if least > _MOST:
            found = self.several(least, 0, whole=least)[0]
            return int(found[0]) if len(found) else -1
        children, node = self._root, -1
        for view, shift in self._down:
            for node in children:
                if view[node] >= least:
                    break
            else:
                return -1
            children = range(node << shift, (node + 1) << shift)
        return node

    def several(self, least: int, needed: int, whole: int | None = None) -> tuple[Ints, Ints]:
        """Return the lowest leaves of at least `least` that add up to `needed`, and all of at least `whole`.

        Ascending, with what they hold; the latter add nothing to `needed`. A node's maximum promises a leaf of
        that value, so no more nodes are opened than are needed.
        """
        import numpy as np

        nodes = values = np.zeros(1, dtype=np.int64)
        for shift, rows in self._opened:
            most = _LONGEST if rows is self._opened[-1][1] else _MOST
            children = rows.take(nodes, axis=0).ravel()
            found = (children >= min(least, most)).nonzero()[0]
            values = children.take(found)
            nodes = (nodes.take(found >> shift) << shift) + (found & ((1 << shift) - 1))
            is_whole = None if whole is None else values >= min(whole, most)
            promised = (values if is_whole is None else np.where(is_whole, 0, values)).cumsum()
            if not len(nodes) or promised[-1] <= needed:
                continue
            end = int(promised.searchsorted(needed)) + 1
            if is_whole is None:
                nodes, values = nodes[:end], values[:end]
            else:
                is_whole[:end] = True
                nodes, values = nodes[is_whole], values[is_whole]
        return nodes, values.astype(np.int64)

    def raised(self, leaf: int, value: int) -> None:
        """Carry up that one leaf holds `value`, more than before; the other leaves are not looked at."""
        self._rise(0, leaf, min(value, _MOST))

    def _rise(self, depth: int, node: int, value: int) -> None:
        for shift, view in self._rising[depth:]:
            node >>= shift
            if view[node] >= value:
                return
            view[node] = value

    def lowered(self, leaf: int, before: int) -> None:
        """Carry up that one leaf holds less than `before`, while that was a maximum."""
        before = min(before, _MOST)
        for shift, below, view in self._carrying:
            leaf >>= shift
            if view[leaf] > before:
                return
            most = max(0, *below[leaf << shift : (leaf + 1) << shift])
            if most >= before:
                return
            view[leaf] = most

    def many_raised(self, leaves: Ints, values: Ints) -> None:
        """Carry up that several leaves, ascending, hold `values`, more than before."""
        import numpy as np

        nodes, values = leaves, np.minimum(values, _MOST)
        for depth, (shift, _, level) in enumerate(self._many):
            if len(nodes) <= _NARROW:
                for node, value in zip(nodes.tolist(), values.tolist(), strict=True):
                    self._rise(depth, node, value)
                return
            nodes = nodes >> shift
            firsts = _is_first(nodes).nonzero()[0]
            nodes, values = nodes.take(firsts), np.maximum.reduceat(values, firsts)
            rises = level.take(nodes) < values
            nodes, values = nodes[rises], values[rises]
            level[nodes] = values

    def many_lowered(self, leaves: Ints) -> None:
        """Carry up that several leaves, ascending, hold less than before."""
        import numpy as np

        nodes = leaves
        for depth, (shift, rows, level) in enumerate(self._many):
            if len(nodes) <= _NARROW:
                for node in nodes.tolist():
                    self._carry(depth, node)
                return
            nodes = nodes >> shift
            nodes = nodes[_is_first(nodes)]
            most = rows.take(nodes, axis=0).max(axis=1, initial=0)
            if not depth:
                most = np.minimum(most, _MOST)
            differs = most != level.take(nodes)
            level[nodes] = most
            nodes = nodes[differs]

    def _carry(self, depth: int, node: int) -> None:
        """Set the maxima above `node` of `depth` from what is below them, while they change."""
        for shift, below, view in self._carrying[depth:]:
            node >>= shift
            most = min(max(0, *below[node << shift : (node + 1) << shift]), _MOST)
            if view[node] == most:
                return
            view[node] = most


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
    lowest free pages would make, and at most twice as many as possible. A `take` or `give` of `k` pages in `r`
    runs reads or writes at most ``k + r · log2(capacity / r)`` words of `ends` and `levels`, rounded up, which is
    ``k + log2(capacity)`` for one run (capacities from 512 on; beside the pages themselves and 33 counts).
    """

    def __init__(self, name: str, ends: Words, levels: Maxima) -> None:
        self.name = name
        self._ends, self._end = ends, ends.data
        self._tree = MaxTree(ends, levels)
        self._by_class = [0] * _CLASSES
        self.capacity = 0
        self.free = 0

    def reset(self, capacity: int) -> None:
        """Hold the pages ``1 … capacity``, all free; O(capacity)."""
        self._tree.clear()
        self._by_class = [0] * _CLASSES
        self.capacity = self.free = capacity
        self._insert(1, capacity + 1)

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
        if not count:
            return
        ordered = np.asarray(pages, dtype=np.int64)
        gaps = ordered[1:] - ordered[:-1]
        if count > 1 and int(gaps.min()) < 0:
            ordered = np.sort(ordered)
            gaps = ordered[1:] - ordered[:-1]
        self._check(ordered, gaps)
        breaks = np.flatnonzero(gaps != 1)
        if len(breaks) < _FEW:
            firsts = [0, *(breaks + 1).tolist()]
            lasts = [*breaks.tolist(), count - 1]
            for first, last in zip(firsts, lasts, strict=True):
                self._insert(int(ordered[first]), int(ordered[last]) + 1)
        else:
            bounds = np.empty(len(breaks) + 2, dtype=np.int64)
            bounds[0], bounds[-1] = -1, count - 1
            bounds[1:-1] = breaks
            self._insert_many(ordered.take(bounds[:-1] + 1), ordered.take(bounds[1:]) + 1)
        self.free += count

    def withdraw(self, pages: NDArray[np.integer]) -> None:
        """Hold `pages` no more, which are free; O(capacity), for a call that failed after it gave them back."""
        import numpy as np

        left = np.setdiff1d(self.peek(self.free), pages)
        self._tree.clear()
        self._by_class = [0] * _CLASSES
        self.free = 0
        self.give(left)

    def _check(self, ordered: Ints, gaps: Ints) -> None:
        if int(ordered[0]) < 1 or int(ordered[-1]) > self.capacity:
            outside = ordered[(ordered < 1) | (ordered > self.capacity)].tolist()[:8]
            raise SlotError(f"{self.name}: pages {outside} are freed, but there are only 1 … {self.capacity}")
        if len(gaps) and not int(gaps.min()):
            repeated = ordered[1:][gaps == 0].tolist()[:8]
            raise SlotError(f"{self.name}: pages {repeated} appear twice in one call; nothing was freed")

    def _picked(self, count: int) -> Picked:
        import numpy as np

        if not count:
            none = np.zeros(0, dtype=np.int64)
            return Picked(none, none, 0, 0)
        last = self._tree.first(count)
        if last < 0:
            return self._several(count)
        length = self._end[last]
        return Picked(np.array([last - length + 1]), np.array([length]), 0, length - count)

    def _several(self, count: int) -> Picked:
        bits, longer = self._last_class(count)
        lasts, lengths = self._tree.several(1 << bits >> 1, count - longer, 1 << bits if longer else None)
        left = int(lengths.sum()) - count
        shorter = (lengths < 1 << bits).nonzero()[0]
        cut = int(shorter[-1]) if len(shorter) else -1
        if cut < 0 or not 0 <= left < lengths[cut]:
            raise self._damaged(count)
        return Picked(lasts - lengths + 1, lengths, cut, left)

    def _last_class(self, count: int) -> tuple[int, int]:
        """Return the bits of the shortest runs that are needed, and the pages of all that are longer, where none holds `count`."""
        longer = 0
        for bits in range(count.bit_length(), 0, -1):
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
            left = picked.left if i == picked.cut else 0
            last = start + length - 1
            self._by_class[length.bit_length()] -= length
            self._by_class[left.bit_length()] += left
            self._end[start] = 0
            if left:
                self._end[last - left + 1] = -left
            self._end[last] = left
            self._tree.lowered(last, length)

    def _remove_many(self, picked: Picked) -> None:
        starts, lengths, cut, left = picked
        lasts = starts + lengths - 1
        self._ends[starts] = 0
        self._ends[lasts] = 0
        self._count(-lengths)
        if left:
            last = int(lasts[cut])
            self._by_class[left.bit_length()] += left
            self._end[last - left + 1] = -left
            self._end[last] = left
        self._tree.many_lowered(lasts)

    def _insert(self, start: int, end: int) -> None:
        """Add the pages ``start … end`` (exclusive) to the runs on both sides."""
        left, right = self._end[start - 1], self._end[end]
        # What was freed twice may lie inside a run; its neighbours then are no last and no first page.
        left, right = max(left, 0), -right if right <= 0 else 1
        length, last = left + end - start + right, end + right - 1
        self._by_class[left.bit_length()] -= left
        self._by_class[right.bit_length()] -= right
        self._by_class[length.bit_length()] += length
        if left:
            self._end[start - 1] = 0
        if right:
            self._end[end] = 0
        self._end[start - left] = -length
        self._end[last] = length
        self._tree.raised(last, length)
        if left:
            self._tree.lowered(start - 1, left)

    def _insert_many(self, starts: Ints, ends: Ints) -> None:
        """Do the same for several stretches, ascending; one run may join two of them."""
        import numpy as np

        before = starts - 1
        left, right = np.maximum(self._ends.take(before), 0), self._ends.take(ends)
        right = np.maximum(-right, right > 0)
        has_left, has_right = left > 0, right > 0
        low, high = starts - left, ends + right
        bounds = np.ones(len(starts) + 1, dtype=np.bool_)
        np.greater_equal(low[1:], high[:-1], out=bounds[1:-1])
        closes = bounds[1:]
        joined = before[has_left]
        self._ends[joined] = 0
        self._ends[ends[has_right]] = 0
        low, high = low[bounds[:-1]], high[closes]
        lengths, lasts = high - low, high - 1
        self._ends[low] = -lengths
        self._ends[lasts] = lengths
        self._count(np.concatenate((lengths, -left[has_left], -right[closes & has_right])))
        self._tree.many_raised(lasts, lengths)
        if len(joined):
            self._tree.many_lowered(joined)

    def _count(self, lengths: Ints) -> None:
        """Count the pages of runs by the bits of their length; negative lengths are of runs that are no more."""
        import numpy as np

        bits = np.frexp(lengths)[1]
        for i, pages in enumerate(np.bincount(bits, weights=lengths).tolist()):
            self._by_class[i] += int(pages)


def level_words(memory: NDArray[np.uint8]) -> Maxima:
    """Return the bytes of a declared level buffer as the 16-bit words that `MaxTree` divides."""
    import numpy as np

    return memory[: len(memory) // 2 * 2].view(np.uint16)


def _is_first(ordered: Ints) -> NDArray[np.bool_]:
    """Return which of `ordered`, at least one, differ from the one before."""
    import numpy as np

    is_first = np.empty(len(ordered), dtype=np.bool_)
    is_first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return is_first
