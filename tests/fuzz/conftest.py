"""Allocators on tensors of their own, and a plain Python model of what they must have done."""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from kvdock.device import DeviceInfo
from kvdock.layout import SizeRule, Space
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import CacheOptions, Parallelism
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.pools.storage import allocate  # noqa: E402

CPU = torch.device("cpu")
COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
SHORT = settings(max_examples=40, stateful_step_count=30, **COMMON)
"""40 histories of up to 30 calls each, in every run of the tests."""
NO_SHRINKING = settings(max_examples=100, stateful_step_count=30, derandomize=True, phases=[Phase.generate], **COMMON)
settings.register_profile("fuzz", settings(max_examples=300, stateful_step_count=100, **COMMON))


def effort():
    """Return how long machines run: short, unless ``--hypothesis-profile fuzz`` asks for more."""
    long = settings.get_profile("fuzz")
    return long if settings.default == long else SHORT


def query_of(names, page_size, ranks, inner):
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8))
    return AllocatorQuery(
        model=ModelSpec(name="m", architecture="M", layers=(layer,), context_length=4096, dtype="bfloat16"),
        options=CacheOptions(),
        parallel=Parallelism(tp_size=ranks, dcp_size=ranks),
        device=DeviceInfo(device_type="cpu", name="cpu", total_bytes=1, free_before_load_bytes=1, free_bytes=1),
        spaces=tuple(Space(name=name, rule=SizeRule(), page_size=page_size) for name in names),
        inner=inner,
    )


def build(cls, pages, page_size, ranks=1, debug=False, allocators=None):
    """An allocator of `pages` (by space) of `page_size` slots a rank."""
    inner = allocators or {}
    query = query_of(tuple(pages), page_size, ranks, {name: type(part) for name, part in inner.items()})
    sizes = {name: count * page_size for name, count in pages.items()}
    tensors = allocate(cls.buffers(query), sizes, {space.name: space for space in query.spaces}, CPU)
    parts = Parts(tensors=tensors, kernels=ReferenceKernels(), device=CPU, sizes=sizes, debug=debug, allocators=inner)
    return cls(query, parts)


def build_sliding(cls, classes, pages, page_size, debug=False):
    """Full and sliding pages in step, each side of the class that `classes` names."""
    sides = {name: build(classes[name], {name: count}, page_size, 1, debug) for name, count in pages.items()}
    return build(cls, pages, page_size, 1, debug, sides)


def runs_of(pages):
    """Return how many stretches of consecutive numbers there are."""
    ordered = sorted(pages)
    return sum(not i or ordered[i] - ordered[i - 1] != 1 for i in range(len(ordered)))


def stretches(pages):
    """Return the stretches of consecutive numbers, ascending."""
    found = []
    for page in sorted(pages):
        if not found or page - found[-1][-1] != 1:
            found.append([])
        found[-1].append(page)
    return found


class Side:
    """The pages of one space: free, waiting in a free group, or handed out."""

    def __init__(self, pages, is_sorted):
        self.is_sorted = is_sorted
        self.reset(pages)

    def reset(self, pages):
        self.capacity = pages
        self.free = set(range(1, pages + 1))
        self.queued = set()
        self.is_fresh = True

    def take(self, page):
        assert page in self.free, f"page {page} is padding, does not exist or is somebody's; free are {self.free}"
        self.free.remove(page)

    def give(self, page, waits):
        (self.queued if waits else self.free).add(page)

    def check_order(self, taken):
        """Verify the order of pages that one call took: promised until the first one comes back, or always."""
        before = self.free | set(taken)
        if not self.is_sorted:
            assert not self.is_fresh or taken == sorted(before)[: len(taken)]
            return
        long_enough = [stretch for stretch in stretches(before) if len(stretch) >= len(taken)]
        if long_enough:
            assert taken == long_enough[0][: len(taken)]
            return
        assert taken == sorted(taken)
        assert runs_of(taken) <= runs_of(sorted(before)[: len(taken)])
        longest, fewest, covered = sorted((len(stretch) for stretch in stretches(before)), reverse=True), 0, 0
        while covered < len(taken):
            covered, fewest = covered + longest[fewest], fewest + 1
        assert runs_of(taken) <= 2 * fewest


class Request:
    """Slots of a request, its pages, and the pages that sliding layers have of it (0: none).

    Without a second space both lists of pages are one. `seen` is where its window frees ended.
    """

    def __init__(self, is_composite, slots=(), pages=(), windows=(), seen=0):
        self.is_composite = is_composite
        self.slots, self.pages, self.seen = list(slots), list(pages), seen
        self.windows = list(windows) if is_composite else self.pages

    def copy(self):
        return Request(self.is_composite, self.slots, self.pages, self.windows, self.seen)

    def cut(self, tokens, page_size):
        kept = -(-tokens // page_size)
        del self.slots[tokens:]
        del self.pages[kept:]
        if self.is_composite:
            del self.windows[kept:]


class Model:
    """What is free and whose the rest is, from what an allocator returned, token by token."""

    def __init__(self, page_size, sides):
        self.page_size = page_size
        self.sides = sides
        self.numbering, self.sliding = next(iter(sides.values())), list(sides.values())[-1]
        self.is_composite = len(sides) > 1
        self.requests = {}
        self.is_grouping = False
        self.taken = 0
        self.epoch = 0
        """Counts what makes every earlier state void: something was freed."""

    def length(self, name):
        return len(self.requests[name].slots) if name in self.requests else 0

    def last(self, name):
        return self.requests[name].slots[-1] if self.length(name) else -1

    def needs(self, spans, starts):
        """Return the new pages of each side for ``{name: new length}``; sliding ones only from `starts` on."""
        size, numbered, sliding = self.page_size, 0, 0
        for name, length in spans.items():
            new = range(-(-self.length(name) // size), -(-length // size))
            numbered += len(new)
            sliding += sum(page * size >= starts.get(name, 0) for page in new)
        return (numbered if self.is_composite else sliding), sliding

    def fits(self, numbered, sliding):
        return numbered <= len(self.numbering.free) and sliding <= len(self.sliding.free)

    def grow(self, spans, slots, translated, starts):
        """Verify and note what a call returned, against a loop over the tokens of its requests."""
        taken = {id(side): [] for side in self.sides.values()}
        found = iter(zip(slots, translated, strict=True))
        size = self.page_size
        for name, length in spans.items():
            request = self.requests.get(name) or Request(self.is_composite)
            for position in range(len(request.slots), length):
                slot, sliding = next(found)
                page, offset = divmod(position, size)
                if offset == 0:
                    self._begin_page(request, slot, sliding, position >= starts.get(name, 0), taken)
                assert slot == (request.pages[page] * size + offset if request.pages[page] else 0)
                assert sliding == (request.windows[page] * size + offset if request.windows[page] else 0)
                request.slots.append(slot)
            if request.slots:
                self.requests[name] = request
        assert next(found, None) is None
        for side in self.sides.values():
            side.check_order(taken[id(side)])
        self.taken += len(taken[id(self.numbering)])

    def _begin_page(self, request, slot, sliding, is_visible, taken):
        places = [(self.sliding, sliding, request.windows, is_visible)]
        if self.is_composite:
            places.append((self.numbering, slot, request.pages, True))
        for side, at, pages, is_there in places:
            if is_there:
                assert at % self.page_size == 0
                side.take(at // self.page_size)
                taken[id(side)].append(at // self.page_size)
            pages.append(at // self.page_size if is_there else 0)

    def freed(self):
        """Note that something went back, if only into a group."""
        self.epoch += 1
        for side in self.sides.values():
            side.is_fresh = False

    def drop(self, name, first_page=0):
        """Give back the pages of a request from one on, both sides."""
        request = self.requests[name]
        if any(request.pages[first_page:]):
            self.freed()
        for page in range(first_page, len(request.pages)):
            if request.pages[page] and self.is_composite:
                self.numbering.give(request.pages[page], self.is_grouping)
            if request.windows[page]:
                self.sliding.give(request.windows[page], self.is_grouping)

    def release(self, name):
        self.drop(name)
        del self.requests[name]

    def truncate(self, name, tokens):
        self.drop(name, -(-tokens // self.page_size))
        self.requests[name].cut(tokens, self.page_size)
        if not tokens:
            del self.requests[name]

    def finished(self, name, end):
        """Return the pages that sliding layers have of a request and whose last token is before `end`."""
        request = self.requests[name]
        pages = range(request.seen // self.page_size, end // self.page_size)
        return [page for page in pages if request.windows[page]]

    def evict(self, name, end):
        request = self.requests[name]
        for page in self.finished(name, end):
            self.sliding.give(request.windows[page], self.is_grouping)
            request.windows[page] = 0
            self.freed()
        request.seen = end

    def ranges(self, name, first_page=0):
        """Return ``(start, end, swa_start)`` of the parts of a request, each of pages without and then with a window."""
        size, windows, length = self.page_size, self.requests[name].windows, self.length(name)
        found, start = [], first_page
        while start < len(windows):
            visible = next((page for page in range(start, len(windows)) if windows[page]), len(windows))
            end = next((page for page in range(visible, len(windows)) if not windows[page]), len(windows))
            found.append((start * size, min(end * size, length), min(visible * size, length)))
            start = end
        return found

    def end_group(self, snapshots):
        """Take back what was queued, in states as well: one that was made after it was queued can still be good."""
        self.is_grouping = False
        for name, side in self.sides.items():
            for free, _, _ in snapshots:
                free[name][0].update(side.queued)
            side.free |= side.queued
        has_queued = any(side.queued for side in self.sides.values())
        for side in self.sides.values():
            side.queued = set()
        return has_queued

    def reset(self, pages=None):
        """Forget everything; every page is free, and any state void."""
        for name, side in self.sides.items():
            side.reset((pages or {}).get(name, side.capacity))
        self.requests = {}
        self.is_grouping = False
        self.epoch += 1

    def snapshot(self):
        free = {name: [set(side.free), side.is_fresh] for name, side in self.sides.items()}
        return free, {name: request.copy() for name, request in self.requests.items()}, self.taken

    def restore(self, snapshot):
        free, requests, self.taken = snapshot
        for name, side in self.sides.items():
            side.free, side.is_fresh = set(free[name][0]), free[name][1]
        self.requests = {name: request.copy() for name, request in requests.items()}

    def live_slots(self):
        """Return the slots that requests hold."""
        size = self.page_size
        return [
            slot
            for request in self.requests.values()
            for page, number in enumerate(request.pages)
            if number
            for slot in request.slots[page * size : (page + 1) * size]
        ]

    def heads(self, side, pages_of):
        """Return the first slots of the pages of a side that are not free."""
        held = [page for request in self.requests.values() for page in pages_of(request) if page]
        return [page * self.page_size for page in (*held, *side.queued)]


@pytest.fixture(scope="session")
def fuzz():
    """`fuzz.build`, `fuzz.build_sliding`, `fuzz.Model`, `fuzz.Side`, and settings: `fuzz.effort()`, `fuzz.no_shrinking`."""
    return SimpleNamespace(
        build=build, build_sliding=build_sliding, Model=Model, Side=Side, effort=effort, no_shrinking=NO_SHRINKING
    )
