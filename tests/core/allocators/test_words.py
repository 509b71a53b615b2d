"""How many words of its bookkeeping the sorted allocator reads or writes in a call, counted where they are read."""

import math

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from kvdock.allocators.runs import FANOUT, LEVEL_GUARD_BYTES, FreeRuns, level_words  # noqa: E402
from kvdock.allocators.sorted import PageRuns  # noqa: E402
from kvdock.layout import round_up  # noqa: E402

POOLS = [2**12, 2**16, 2**20]


class Counted(np.ndarray):
    """Memory that notes the 64-bit words that are read or written, as ``(where it lies) // 8``, in `seen`.

    Slices are views that note what is done with them. Whatever would go round the count raises.
    """

    seen: set[int]

    def __array_finalize__(self, parent):
        self.seen = getattr(parent, "seen", None)

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if isinstance(key, slice):
            return found
        self.note(key)
        return np.asarray(found)

    def __setitem__(self, key, value):
        self.note(key)
        np.asarray(self)[key] = value

    def __array_ufunc__(self, *args, **kwargs):
        raise AssertionError("memory is read without being counted")

    def take(self, indices, axis=None):
        self.note(indices)
        return np.asarray(self).take(indices, axis=axis)

    @property
    def data(self):
        return CountedView(self)

    def note(self, key):
        """Note the words of the entries, or rows, that `key` names."""
        rows = np.arange(len(self))[key].ravel()[:, None]
        within = np.arange(0, self.strides[0], min(self.strides[0], 8))
        self.seen.update(((self.ctypes.data + rows * self.strides[0] + within) // 8).ravel().tolist())


class CountedView:
    """The same for the memory of one level, read number by number."""

    def __init__(self, memory):
        self.memory, self.plain = memory, np.asarray(memory).data
        self.start, self.size, self.seen = memory.ctypes.data, memory.itemsize, memory.seen

    def __getitem__(self, key):
        touched = range(*key.indices(len(self.plain))) if isinstance(key, slice) else (key,)
        self.seen.update((self.start + at * self.size) // 8 for at in touched)
        return self.plain[key]

    def __setitem__(self, at, value):
        self.seen.add((self.start + at * self.size) // 8)
        self.plain[at] = value


def counted(memory):
    found = memory.view(Counted)
    found.seen = set()
    return found


class Pages:
    """Pages of a pool, handed out and taken back; each call returns how many words it touched."""

    def __init__(self, pool):
        self.pool = pool
        ends = counted(np.zeros(round_up(pool + 2, FANOUT), dtype=np.int32))
        levels = level_words(np.zeros(round_up(pool + LEVEL_GUARD_BYTES, FANOUT), dtype=np.uint8)).view(Counted)
        self.seen = levels.seen = ends.seen
        runs = FreeRuns("counted", ends, levels)
        self.pages = PageRuns("counted", runs, np.zeros(pool, dtype=np.int32), None, torch.device("cpu"), pool)
        self.last = []

    def spent(self, call, *args):
        self.seen.clear()
        result = call(*args)
        return result, len(self.seen)

    def take(self, count):
        pages, words = self.spent(self.pages.take, count)
        self.last = pages.numpy()
        return words

    def give(self, pages):
        self.last = np.asarray(pages, dtype=np.int64)
        return self.spent(self.pages.give, torch.from_numpy(self.last))[1]

    def bound(self):
        """Return k + r · log2(pool / r) for the k pages in r runs of the last call: k + log2(pool) for one run."""
        ordered = np.sort(self.last)
        runs = 1 + int((ordered[1:] != ordered[:-1] + 1).sum())
        return len(ordered) + runs * math.log2(self.pool / runs)


def test_words_are_counted_once_each():
    memory = counted(np.zeros(64, dtype=np.int32))
    memory[np.array([0, 1, 2])] = 5
    assert len(memory.seen) == 2
    assert memory.data[3] == 0
    assert memory.take(np.array([0, 3])).tolist() == [5, 0]
    assert len(memory.seen) == 2
    memory[16:].reshape(-1, 4).take(np.array([1, 2]), axis=0)
    assert len(memory.seen) == 6
    assert list(memory.data[40:44]) == [0] * 4
    assert len(memory.seen) == 8
    with pytest.raises(AssertionError, match="without being counted"):
        memory + 1


def requests(pages, rng, steps, longest):
    """Allocate and free whole requests of 1 … `longest` pages; yield the words of each call."""
    held = []
    for _ in range(steps):
        count = int(longest ** rng.random())
        if count <= pages.pages.free and rng.random() < 0.55:
            words = pages.take(count)
            held.append(pages.last)
        elif held:
            words = pages.give(held.pop(int(rng.integers(len(held)))))
        else:
            continue
        yield words


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("longest", [4, 64, 2048])
def test_a_call_for_one_run_touches_at_most_its_pages_and_the_halvings_of_the_pool(pool, longest):
    pages, found = Pages(pool), []
    for words in requests(pages, np.random.default_rng(longest), 1500, longest):
        assert words <= pages.bound()
        if pages.last[-1] - pages.last[0] == len(pages.last) - 1:
            assert words <= len(pages.last) + math.log2(pool)
            found.append(words)
    assert len(found) > 500
    assert np.quantile(found, 0.999) <= 20 * np.median(found)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("free", ["half", "few"])
def test_scattered_pages_cost_a_path_for_each_run(pool, free):
    """A pool of which single pages are free; requests are of many runs and come back in pieces."""
    rng, pages = np.random.default_rng(pool), Pages(pool)
    pages.take(pool)
    shuffled = rng.permutation(pages.last)
    pages.give(shuffled[: pool // 2 if free == "half" else pool // 50])
    held = []
    for _ in range(300):
        count = int((pool / 256) ** rng.random())
        if count <= pages.pages.free and rng.random() < 0.6:
            assert pages.take(count) <= pages.bound()
            held.append(pages.last)
        elif held:
            part = rng.permutation(held.pop(int(rng.integers(len(held)))))
            cut = len(part) // 3 if rng.random() < 0.3 else 0
            assert pages.give(part[cut:]) <= pages.bound()
            held += [part[:cut]] * bool(cut)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("stride", [2, 5, 8, 64, 512, 4096])
@pytest.mark.parametrize("count", [1, 16, 256, 4096])
def test_isolated_pages_at_any_distance(pool, stride, count):
    pages = Pages(pool)
    pages.take(pool)
    isolated = np.arange(1, min(1 + stride * count, pool), stride)
    assert pages.give(isolated) <= pages.bound()
    for part in (1, len(isolated) // 2, len(isolated) - 1 - len(isolated) // 2):
        if part > 0:
            assert pages.take(part) <= pages.bound()
            assert np.array_equal(pages.last, isolated[:part])
            isolated = isolated[part:]


@pytest.mark.parametrize("pool", [*POOLS, 512, 3000, 50_000, 98_500])
def test_a_page_that_joins_runs_which_end_far_apart(pool):
    """The dearest single page: a maximum goes on one path to the top and comes on another."""
    rng, pages = np.random.default_rng(5), Pages(pool)
    for _ in range(40):
        pages.take(pages.pages.free)
        first, page, last = np.sort(rng.choice(np.arange(1, pool + 1), 3, replace=False)).tolist()
        pages.give(np.r_[first:page, page + 1 : last + 1])
        assert pages.give([page]) <= 1 + math.ceil(math.log2(pool))
        assert pages.take(1) <= 1 + math.ceil(math.log2(pool))
        assert pages.last.tolist() == [first]


@pytest.mark.parametrize("pool", POOLS)
def test_a_restore_and_a_free_group_are_one_free_each(pool):
    rng, pages = np.random.default_rng(11), Pages(pool)
    for _ in requests(pages, rng, 200, 64):
        pass
    free = pages.pages.free
    for _ in range(40):
        mark = pages.pages.journal.mark()
        taken = []
        for _ in range(3):
            pages.take(int(rng.integers(1, 40)))
            taken.append(pages.last)
        pages.last = np.concatenate(taken)
        assert pages.spent(pages.pages.rewind, mark)[1] <= pages.bound()
        assert pages.pages.free == pages.pages.runs.free == free
        for part in taken:
            pages.take(len(part))
            part[:] = pages.last
            words = pages.spent(pages.pages.stage, torch.from_numpy(part.copy()))[1]
            assert words == 0
        pages.last = np.concatenate(taken)
        assert pages.spent(pages.pages.commit)[1] <= pages.bound()
        assert pages.pages.free == pages.pages.runs.free == free
