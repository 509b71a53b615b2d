"""Calls of unified memory cost what they touch: elements of the tables are counted, in buffers of many sizes."""

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.layout import SizeRule, Space  # noqa: E402
from kvdock.pools.storage import allocate  # noqa: E402
from kvdock.unified import UnifiedMemory  # noqa: E402
from kvdock.unified.geometry import Line, Stretch  # noqa: E402
from kvdock.unified.segment import Segment, table_buffers  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

TABLES = ("_page_of", "_owner_of", "_holes")
VIEWS = ("slice", "view", "as_strided", "select", "unsqueeze", "squeeze", "expand", "detach", "alias", "permute")
BYTES = 16
"""Bytes of a page; a state takes as many."""


class Counts:
    """What was touched: elements, in so many operations."""

    elements = operations = 0

    def note(self, elements):
        self.elements += int(elements)
        self.operations += 1


class Counted(np.ndarray):
    """A table, or what was computed from one, that notes how many elements each operation reads or writes."""

    counts = Counts()

    def __array_finalize__(self, base):
        self.counts = getattr(base, "counts", Counts())

    def __array_ufunc__(self, ufunc, method, *inputs, **named):
        plain = [np.asarray(value) if isinstance(value, Counted) else value for value in inputs]
        return self.noted(getattr(ufunc, method)(*plain, **named), max(np.size(value) for value in plain))

    def __getitem__(self, key):
        found = np.asarray(self)[key]
        return self.noted(found, 0 if isinstance(key, slice) else np.size(found))

    def __setitem__(self, key, value):
        np.asarray(self)[key] = value
        self.counts.note(np.size(value) if isinstance(key, slice) else np.size(key))

    def take(self, indices):
        return self.noted(np.asarray(self).take(indices), np.size(indices))

    def nonzero(self):
        return (self.noted(np.asarray(self).nonzero()[0], self.size),)

    def astype(self, dtype, copy=True):
        return self.noted(np.asarray(self).astype(dtype, copy=copy), self.size)

    def tolist(self):
        raise AssertionError("a table was read number by number")

    def noted(self, found, elements):
        self.counts.note(elements)
        found = np.asarray(found).view(Counted)
        found.counts = self.counts
        return found


class Dispatched(TorchDispatchMode):
    """The same of tensors: what is indexed counts by its indices, a view not at all, anything else by its largest part."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        name = function._schema.name.removeprefix("aten::")
        assert name != "_local_scalar_dense", "a table was read number by number"
        if name.startswith(("index", "scatter", "gather")):
            parts = flat(arguments[1:])
        else:
            parts = [] if name.strip("_") in VIEWS else flat((*arguments, result))
        self.counts.note(max((part.numel() for part in parts), default=0))
        return result


def flat(values):
    """The tensors among nested arguments."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from flat(value)


@pytest.fixture(params=["host", "device"])
def spend(request, monkeypatch):
    """A function that returns what a call on a memory touches, its tables read through numpy or as tensors."""
    if request.param == "device":
        monkeypatch.setattr(Segment, "is_host", staticmethod(lambda table: False))

    def spent(memory, call, *given):
        counts = Counts()
        if request.param == "device":
            with Dispatched(counts):
                call(*given)
        else:
            segments = [memory.segment(stretch.space) for stretch in memory.line.stretches]
            for segment in segments:
                for name in TABLES:
                    table = getattr(segment, name).view(Counted)
                    table.counts = counts
                    setattr(segment, name, table)
            call(*given)
            for segment in segments:
                for name in TABLES:
                    setattr(segment, name, np.asarray(getattr(segment, name)))
        memory.check()
        return counts.elements, counts.operations

    return spent


def full_buffer(pages, holes, at_edge=0):
    """`pages` pages, all handed out but `holes`: `at_edge` of them where states grow, the others at the far end.

    Places are counted from where states grow, so frees lie alike in a buffer of any size.
    """
    low, high = 2 * BYTES, (2 + pages) * BYTES
    line = Line((Stretch("state", 1, BYTES, low, 1, pages), Stretch("kv", 1, BYTES, low, 2, pages)), low, high)
    memory = UnifiedMemory(line, torch.zeros(high, dtype=torch.uint8), ReferenceKernels())
    for stretch in line.stretches:
        space = Space(name=stretch.space, rule=SizeRule(), page_size=1)
        memory.join(
            stretch.space,
            allocate(table_buffers(stretch.space), {stretch.space: pages}, {stretch.space: space}, torch.device("cpu")),
        )
    assert memory.secure({"kv": pages})
    kv = memory.segment("kv")
    kv.back(torch.arange(1, pages + 1))
    owner = {int(place) - kv.stretch.first: page for page, place in enumerate(kv.page_of.tolist())}
    places = [*range(0, 2 * at_edge, 2), *range(pages - 2 * (holes - at_edge), pages, 2)]
    memory.release("kv", torch.tensor([owner[place] for place in places], dtype=torch.int64))
    return memory


SIZES = (2**10, 2**12, 2**14)


def test_a_look_at_every_page_would_be_seen(spend):
    memory = full_buffer(SIZES[0], 64)
    kv = memory.segment("kv")
    elements, operations = spend(memory, lambda: (kv._page_of == 0).nonzero())
    assert (elements, operations) == (2 * (SIZES[0] + 1), 2)


def test_what_a_space_takes_and_gives_back_costs_its_pages(spend):
    found = set()
    for pages in SIZES:
        memory = full_buffer(pages, 64)
        kv = memory.segment("kv")
        some = (kv.page_of == 0).nonzero().view(-1)[1:33]  # numbers without a place; 0 is the padding
        taken, operations = spend(memory, kv.back, some)
        given, more = spend(memory, memory.release, "kv", some)
        found.add((taken, given, operations, more))
    ((taken, given, operations, more),) = found
    assert 32 <= taken <= 6 * 32 and 32 <= given <= 7 * 32
    assert operations <= 8 and more <= 8


@pytest.mark.parametrize("at_edge", [0, 16])
def test_a_compaction_costs_the_places_that_are_given_up(spend, at_edge):
    def closed(pages, count):
        memory = full_buffer(pages, 2 * count, at_edge * count // 32)
        spent = spend(memory, memory.secure, {"state": count})
        assert memory.segment("kv").pages_moved == count - at_edge * count // 32
        return spent

    (elements, operations), *others = {closed(pages, 32) for pages in SIZES}
    assert not others and 32 <= elements <= 24 * 32
    more, as_many = closed(SIZES[-1], 256)
    assert (as_many, more <= 8.01 * elements) == (operations, True)


def test_pages_that_only_grow_into_a_gap_cost_themselves(spend):
    found = set()
    for pages in SIZES:
        memory = full_buffer(pages, 0)
        kv = memory.segment("kv")
        memory.release("kv", torch.arange(1, pages + 1))  # the space owns nothing any more
        found.add(spend(memory, memory.secure, {"kv": 48}))
        assert kv.holes == 48
    ((elements, _),) = found
    assert elements <= 4 * 48


@pytest.mark.parametrize("kind", ["linear", "sliding"])
def test_slots_that_an_allocator_hands_out_and_takes_back_cost_their_number(small, monkeypatch, kind):
    monkeypatch.setattr(Segment, "is_host", staticmethod(lambda table: False))
    found, capacities = set(), []
    for budget in (2**17, 2**20, 2**23):
        allocator = small.build(kind, debug=False, budget_bytes=budget, prefix_cache=False).token_to_kv_pool_allocator
        capacities.append(allocator.available_size())
        allocator.free(allocator.alloc(64))  # what a first call sets up is not counted
        counts = Counts()
        with Dispatched(counts):
            allocator.free(allocator.alloc(64))
        found.add((counts.elements, counts.operations))
    ((elements, _),) = found
    assert capacities[-1] > 32 * capacities[0] and 2 * 64 <= elements <= 16 * 64
