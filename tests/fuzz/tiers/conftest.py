"""A plain Python model of tokens in two tiers: what allocators of full, device and host pages must have done."""

import copy
from types import SimpleNamespace

import pytest


class Tier:
    """The pages of one space: free, waiting in a free group, or handed out."""

    def __init__(self, pages):
        self.capacity = pages
        self.free = set(range(1, pages + 1))
        self.queued = set()

    def take(self, pages):
        for page in pages:
            assert page in self.free, f"page {page} is padding, does not exist or is somebody's"
            self.free.remove(page)


class Pages:
    """Whole pages that no request owns: their full pages, and the device page of each (0: none)."""

    def __init__(self, full, device):
        self.full, self.device = list(full), list(device)
        self.borrowers = 0


class TierRequest:
    """Full pages of a request and the device page that each maps to (0: none), its host pages, its buffer.

    The first `borrowed` pages are another's. The pages before the token `start` have no device page of their own.
    `newest` is the page of a buffer's newest tokens, which maps to the request's page `at`.
    """

    def __init__(self, row):
        self.row = row
        self.length = self.start = self.borrowed = 0
        self.full, self.device, self.host, self.read = [], [], [], []
        self.loan = self.newest = self.at = None

    @property
    def has_buffer(self):
        return self.newest is not None

    def own_device(self):
        """Return the device pages that are its tokens' own."""
        return [] if self.has_buffer else [page for page in self.device[self.borrowed :] if page]

    def held_device(self):
        return [*self.read, self.newest] if self.has_buffer else self.own_device()

    def copy(self):
        other = copy.copy(self)
        for name in ("full", "device", "host", "read"):
            setattr(other, name, list(getattr(self, name)))
        return other


class TierModel:
    """What is free in each tier, and whose the rest is, from what an allocator returned, token by token."""

    def __init__(self, page_size, pages):
        self.size = page_size
        self.epoch = self.taken = 0
        self.reset(pages)

    def reset(self, pages=None):
        """Forget everything; every page is free, and any state void."""
        sizes = pages or {name: tier.capacity for name, tier in self.tiers.items()}
        self.tiers = {name: Tier(count) for name, count in sizes.items()}
        self.requests, self.loose, self.is_grouping = {}, [], False
        self.epoch += 1

    def give(self, name, pages):
        """Take back pages, which makes every earlier state void."""
        tier = self.tiers[name]
        for page in pages:
            assert page and page not in tier.free | tier.queued
            (tier.queued if self.is_grouping else tier.free).add(page)
            self.epoch += 1

    def end_group(self):
        self.is_grouping = False
        for tier in self.tiers.values():
            self.epoch += bool(tier.queued)
            tier.free |= tier.queued
            tier.queued = set()

    def slots(self, request, start, end):
        return [request.full[at // self.size] * self.size + at % self.size for at in range(start, end)]

    def last(self, request):
        return self.slots(request, request.length - 1, request.length)[0] if request.length else -1

    def device_start(self, request):
        return max(request.start, request.borrowed * self.size)

    def names_in_step(self):
        """Return the requests that have whole pages with device pages of their own."""
        size, named = self.size, sorted(self.requests.items())
        starts = {name: self.device_start(request) for name, request in named if not request.has_buffer}
        return [
            n for n, start in starts.items() if not start % size and self.requests[n].length // size > start // size
        ]

    def is_open(self, request):
        """Whether the page that goes on has its device page; a new page needs none."""
        return request.length % self.size == 0 or bool(request.device[-1])

    def is_lost(self, request):
        """Whether a request with a buffer goes on in a page that its newest page does not hold."""
        return request.length % self.size != 0 and request.at != request.length // self.size

    def new_pages(self, spans):
        return {name: -(-end // self.size) - len(self.requests[name].full) for name, end in spans.items()}

    def fits(self, full, device=0):
        return full <= len(self.tiers["full"].free) and device <= len(self.tiers["device"].free)

    def begin_page(self, request, slot, mapped, is_in_step):
        """Note the full page of a new slot, and the device page beside it: its own, the buffer's newest, or none."""
        assert slot % self.size == mapped % self.size == 0
        self.tiers["full"].take([slot // self.size])
        self.taken += 1
        page, device = len(request.full), mapped // self.size
        if request.has_buffer:
            assert device == request.newest
            if request.at is not None and request.at == page - 1:
                request.device[request.at] = 0
            request.at = page
            self.epoch += 1
        else:
            assert bool(device) == is_in_step
            self.tiers["device"].take([device] if is_in_step else [])
        request.full.append(slot // self.size)
        request.device.append(device)

    def give_buffer(self, request, pages):
        """Verify and note the pages of a buffer, the newest one last, against the device pages that it took over."""
        own = request.own_device()
        has_partial = bool(own) and request.length % self.size != 0
        others = own[:-1] if has_partial else own
        assert pages[:-1][: len(others)] == others[: len(pages) - 1]
        assert not has_partial or pages[-1] == own[-1]
        assert has_partial or len(others) < len(pages) or pages[-1] in own
        self.tiers["device"].take(set(pages) - set(own))
        request.read, request.newest = pages[:-1], pages[-1]
        self.give("device", set(own) - set(pages))
        request.device[request.borrowed :] = [0] * (len(request.full) - request.borrowed)
        self.place_newest(request)

    def lacking(self, request, pages):
        """Return the device pages that a buffer of `pages` pages takes beside those of the request's tokens."""
        own = request.own_device()
        has_partial = bool(own) and request.length % self.size != 0
        # One page is for the newest tokens: the partly filled one if it is there, else any.
        return pages - has_partial - min(len(own) - has_partial, pages - has_partial)

    def place_newest(self, request):
        """Map the page in which the tokens end to the newest page, and the one before to nothing."""
        if request.at is not None and request.at < len(request.device):
            request.device[request.at] = 0
        request.at = request.length // self.size if request.length % self.size else None
        if request.at is not None:
            request.device[request.at] = request.newest
        self.epoch += 1

    def cut(self, request, tokens):
        kept = -(-tokens // self.size)
        if not request.has_buffer:
            self.give("device", [page for page in request.device[kept:] if page])
        self.give("full", request.full[kept:])
        del request.full[kept:], request.device[kept:]
        request.length, request.start = tokens, min(request.start, tokens)

    def release(self, name, kept):
        """Let a request go; its own pages up to `kept` stay with nobody in particular."""
        request = self.requests.pop(name)
        if request.has_buffer:
            self.give("device", request.held_device())
            request.device[request.borrowed :] = [0] * (len(request.full) - request.borrowed)
            request.newest = None
        first = request.borrowed
        if kept > first:
            self.loose.append(Pages(request.full[first:kept], request.device[first:kept]))
        self.give("device", [page for page in request.device[kept:] if page])
        self.give("full", request.full[kept:])
        self.give("host", request.host)
        if request.loan is not None:
            request.loan.borrowers -= 1

    def snapshot(self):
        free = {name: set(tier.free) for name, tier in self.tiers.items()}
        return free, {name: r.copy() for name, r in self.requests.items()}, list(self.loose), self.taken

    def restore(self, snapshot):
        """Take back what was handed out; rows that requests got since stay theirs."""
        free, requests, loose, self.taken = snapshot
        for name, tier in self.tiers.items():
            tier.free = set(free[name])
        self.loose = list(loose)
        for name, request in self.requests.items():
            before = requests.get(name)
            is_same = before is not None and before.row == request.row
            self.requests[name] = before.copy() if is_same else TierRequest(request.row)
            # What was cut off inside a page since is gone from the row, and freed nothing.
            self.requests[name].length = min(self.requests[name].length, request.length)
            self.requests[name].start = min(self.requests[name].start, request.length)

    def held(self):
        """Return the pages that somebody has, by tier."""
        requests = self.requests.values()
        full = [page for request in requests for page in request.full[request.borrowed :]]
        device = [page for request in requests for page in request.held_device()]
        return {
            "full": full + [page for loose in self.loose for page in loose.full],
            "device": device + [page for loose in self.loose for page in loose.device if page],
            "host": [page for request in requests for page in request.host],
        }

    def mapped(self):
        """Return the device page of each full page that somebody has; 0: none."""
        holders = (*self.loose, *self.requests.values())
        return {full: device for holder in holders for full, device in zip(holder.full, holder.device, strict=True)}

    def slots_of(self, pages):
        return [page * self.size + offset if page else 0 for page in pages for offset in range(self.size)]


@pytest.fixture(scope="session")
def tiers():
    """`tiers.Model`, the model, and what it is made of: `tiers.Request`, `tiers.Pages`."""
    return SimpleNamespace(Model=TierModel, Request=TierRequest, Pages=Pages)
