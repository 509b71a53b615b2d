"""Any order of calls on tokens in two tiers, against a plain Python model: slots, device pages, buffers and host slots.

`make fuzz` runs the same machine for much longer.
"""

import functools

import kvdock
import pytest
from kvdock.errors import SlotError
from kvdock.model import DSAParams, LayerSpec, ModelSpec
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from hypothesis import settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvdock.allocators import HiSparseAllocator  # noqa: E402

PAGE_SIZES = (1, 4, 64)
NAMES = range(4)
ROWS = 3
LONGEST_PAGES = 6
MOST = {"full": 24, "device": 12, "host": 24}
DSA = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=8, qk_rope_head_dim=8, index_head_dim=128))


@functools.cache
def plan_of(page_size, buffer_pages, role):
    """A plan of 24 full pages, 12 device pages and 24 host pages; a buffer is `buffer_pages` pages and a newest one."""
    longest, tokens, read = (page_size * pages for pages in (LONGEST_PAGES, MOST["device"], buffer_pages))
    model = ModelSpec(name="m", architecture="M", layers=(DSA,), context_length=longest, dtype="bfloat16")
    options = {"page_size": page_size, "max_total_tokens": tokens, "max_running_requests": ROWS, "role": role}
    options |= {"hisparse": True, "hisparse_top_k": 1, "hisparse_device_buffer_size": read}
    return kvdock.plan(model, device="cpu", options=options, budget_bytes=2**30, registry=core_only())


def tensor(values):
    return torch.tensor(list(values), dtype=torch.int64)


class TierMachine(RuleBasedStateMachine):
    """Requests that come, grow in step or on the host alone, lose device rows, get buffers, are cut, and go."""

    tiers = None
    broken = None

    def __init__(self):
        super().__init__()
        self.states = []

    @initialize(
        page_size=st.sampled_from(PAGE_SIZES),
        buffer_pages=st.integers(1, 3),
        pages=st.tuples(st.integers(2, MOST["full"]), st.integers(2, MOST["device"]), st.integers(1, MOST["host"])),
        role=st.sampled_from(("none", "prefill")),
        debug=st.booleans(),
    )
    def begin(self, page_size, buffer_pages, pages, role, debug):
        """Caches of the role prefill hand pages out in order."""
        cache = kvdock.build(plan_of(page_size, buffer_pages, role), debug=debug)
        self.allocator, self.pool = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
        if self.broken is not None:
            self.allocator.__class__ = self.broken
        self.size, self.buffer_pages, self.longest = page_size, buffer_pages + 1, LONGEST_PAGES * page_size
        chosen = dict(zip(MOST, pages, strict=True))
        self.model = self.tiers.Model(page_size, chosen)
        self.resize_to(chosen)

    def resize_to(self, pages):
        self.allocator.resize({name: count * self.size for name, count in pages.items()})
        self.model.reset(pages)

    def one(self, data):
        """Return the name of a request, and what the model knows of it; one comes where there is none."""
        if not self.model.requests:
            self.admit(data)
        name = data.draw(st.sampled_from(sorted(self.model.requests)))
        return name, self.model.requests[name]

    def chosen(self, data, which, more):
        """Return ``{name: new length}`` of some requests for which `which` holds; now and then a request comes first."""
        requests = self.model.requests
        if not requests or data.draw(st.integers(0, 3)) == 0:
            self.admit(data)
        names = sorted(name for name, request in requests.items() if which(request))
        lists = st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=3) | st.just([])
        picked = data.draw(lists) if names else []
        return {name: min(self.longest, requests[name].length + data.draw(more)) for name in picked}

    def tokens(self):
        return st.integers(0, 2 * self.size + 1) | st.sampled_from((1, self.size, self.size + 1))

    def grows_in_step(self, request):
        return not request.has_buffer and self.model.is_open(request)

    def arguments(self, spans):
        """Return the arguments of an extend: lengths on the device and on the host, last slots, new tokens, names."""
        requests = [self.model.requests[name] for name in spans]
        prefix, seq = [request.length for request in requests], list(spans.values())
        last = tensor(self.model.last(request) for request in requests)
        return tensor(prefix), prefix, tensor(seq), seq, last, sum(seq) - sum(prefix), list(spans)

    def pages_of(self, slots):
        """Return the pages that slots fill, in order."""
        pages = [slot // self.size for slot in slots.tolist()[:: self.size]]
        assert slots.tolist() == self.model.slots_of(pages)
        return pages

    def grow(self, spans, found, in_step):
        """Verify and note the slots that a call returned; `in_step` names those whose new pages have device pages."""
        mapped, found, at = self.allocator.translate(found).tolist(), found.tolist(), 0
        for name, end in spans.items():
            request, before = self.model.requests[name], self.model.requests[name].length
            for position in range(before, end):
                if position % self.size == 0:
                    self.model.begin_page(request, found[at], mapped[at], name in in_step)
                assert found[at] == self.model.slots(request, position, position + 1)[0]
                at += 1
            request.length = end
            self.pool.write([request.row], [before], [end], tensor(found[at - (end - before) : at]))
        assert at == len(found)

    @rule(data=st.data())
    def admit(self, data):
        """A request begins with nothing, or with pages that another keeps."""
        name = data.draw(st.sampled_from([name for name in NAMES if name not in self.model.requests]))
        rows = self.pool.alloc([name])
        if len(self.model.requests) == ROWS:
            assert rows is None
            return
        request = self.model.requests[name] = self.tiers.Request(rows[0])
        if not self.model.loose and data.draw(st.booleans()):
            self.alloc(count=1, by_page=True)
        fitting = [loose for loose in self.model.loose if len(loose.full) < LONGEST_PAGES]
        if fitting and data.draw(st.booleans()):
            request.loan = data.draw(st.sampled_from(fitting))
            request.loan.borrowers += 1
            request.full, request.device = list(request.loan.full), list(request.loan.device)
            request.borrowed, request.length = len(request.full), len(request.full) * self.size
            slots = self.model.slots(request, 0, request.length)
            self.pool.write([request.row], [0], [request.length], tensor(slots))
            self.states = []  # owners changed, which no state takes back

    @rule(data=st.data())
    def extend(self, data):
        spans = self.chosen(data, self.grows_in_step, self.tokens())
        pages = sum(self.model.new_pages(spans).values())
        found = self.allocator.alloc_extend(*self.arguments(spans))
        if not self.model.fits(pages, pages):
            assert found is None
            return
        self.grow(spans, found, in_step=spans)

    @rule(data=st.data())
    def extend_on_the_host(self, data):
        """What has device pages is a request's newest tokens, so only a request without any goes on like this."""
        spans = self.chosen(data, lambda r: not r.has_buffer and not r.own_device(), self.tokens())
        found = self.allocator.alloc_logical_extend(*self.arguments(spans))
        if not self.model.fits(sum(self.model.new_pages(spans).values())):
            assert found is None
            return
        self.grow(spans, found, in_step=())
        for name in spans:
            self.model.requests[name].start = self.model.requests[name].length

    @rule(data=st.data(), times=st.integers(1, 3))
    def decode(self, data, times):
        for _ in range(times):
            self.decode_once(data)

    def decode_once(self, data):
        """A-15: what leaves a newest page needs host slots, reserved for as many tokens."""
        requests, model = self.model.requests, self.model
        may = lambda r: not model.is_lost(r) if r.has_buffer else model.is_open(r)  # noqa: E731
        names = [name for name in self.chosen(data, may, st.just(1)) if requests[name].length < self.longest]
        spans = {name: requests[name].length + 1 for name in names}
        _, _, seq, seq_cpu, last, _, _ = self.arguments(spans)
        new, held = model.new_pages(spans), [name for name in names if requests[name].has_buffer]
        if any(new[name] and requests[name].length > len(requests[name].host) * self.size for name in held):
            with pytest.raises(SlotError, match="has host slots for"):
                self.allocator.alloc_decode(seq, seq_cpu, last, names)
            return
        found = self.allocator.alloc_decode(seq, seq_cpu, last, names)
        if not model.fits(sum(new.values()), sum(new[name] for name in names if name not in held)):
            assert found is None
            return
        self.grow(spans, found, in_step=set(names) - set(held))

    @rule(count=st.integers(0, 4), by_page=st.booleans())
    def alloc(self, count, by_page):
        if by_page:
            found = self.allocator.alloc_pages(count)
        else:
            slots = self.allocator.alloc(count * self.size)
            found = None if slots is None else tensor(self.pages_of(slots))
        if not self.model.fits(count, count):
            assert found is None
            return
        full, device = found.tolist(), self.allocator.translate(found * self.size) // self.size
        self.model.tiers["full"].take(full)
        self.model.tiers["device"].take(device.tolist())
        self.model.taken += count
        self.model.loose += [self.tiers.Pages(full, device.tolist())] if count else []

    @rule(data=st.data())
    def give_a_buffer(self, data):
        """A-15: at most as many buffers as the device has room for whole ones."""
        name, request = self.one(data)
        slots = data.draw(st.none() | st.integers(1, self.buffer_pages * self.size))
        start = self.model.device_start(request)
        if request.has_buffer:
            with pytest.raises(SlotError, match="holds a device buffer already"):
                self.allocator.alloc_device_buffer(name, start, slots)
            return
        found = self.allocator.alloc_device_buffer(name, start, slots)
        pages = self.buffer_pages if slots is None else -(-slots // self.size)
        holders = sum(other.has_buffer for other in self.model.requests.values())
        has_room = holders < self.model.tiers["device"].capacity // self.buffer_pages
        if not has_room or not self.model.fits(0, self.model.lacking(request, pages)):
            assert found is None
            return
        assert len(self.pages_of(found)) == pages
        self.model.give_buffer(request, self.pages_of(found))
        if data.draw(st.booleans()):
            self.take_more(name, request, self.longest, in_host=True)

    @rule(data=st.data(), in_host=st.booleans())
    def hold_more(self, data, in_host):
        """A buffer grows, or host slots are reserved for more tokens; never fewer."""
        name, request = self.one(data)
        most = self.longest if in_host else self.buffer_pages * self.size
        slots = data.draw(st.integers(0 if in_host else 1, most))
        if not in_host and not request.has_buffer:
            with pytest.raises(SlotError, match="holds no device buffer"):
                self.allocator.grow_device_buffer(name, slots)
            return
        self.take_more(name, request, slots, in_host)

    def take_more(self, name, request, slots, in_host):
        tier, held = ("host", request.host) if in_host else ("device", request.read)
        more = max(0, -(-slots // self.size) - len(held) - (not in_host))
        call = self.allocator.reserve_host if in_host else self.allocator.grow_device_buffer
        found, has_room = call(name, slots), more <= len(self.model.tiers[tier].free)
        assert (found is not None) == has_room
        pages = self.pages_of(found) if has_room else []
        assert len(pages) == more * has_room
        self.model.tiers[tier].take(pages)
        held += pages
        self.model.taken += len(pages)

    @rule(data=st.data())
    def map_the_newest(self, data):
        name, request = self.one(data)
        used = request.length % self.size
        if not request.has_buffer or (used and request.length > len(request.host) * self.size):
            with pytest.raises(SlotError, match=r"holds no device buffer|has host slots for"):
                self.allocator.map_newest(name)
            return
        on_host, on_device = self.allocator.map_newest(name)
        assert on_host.tolist() == self.model.slots_of(request.host[request.length // self.size :][:1])[:used]
        assert on_device.tolist() == self.model.slots_of([request.newest])[:used]
        self.model.place_newest(request)

    @precondition(lambda self: self.model.names_in_step())
    @rule(data=st.data())
    def leave_the_device(self, data):
        """Whole pages of a request without a buffer lose their device pages."""
        request = self.model.requests[data.draw(st.sampled_from(self.model.names_in_step()))]
        first = self.model.device_start(request)
        end = data.draw(st.integers(first // self.size + 1, request.length // self.size)) * self.size
        self.allocator.free_device_rows(self.pool.req_to_token, [request.row], [first], [end])
        self.model.give("device", request.device[first // self.size : end // self.size])
        request.device[first // self.size : end // self.size] = [0] * ((end - first) // self.size)
        request.start = max(request.start, end)

    @rule(data=st.data())
    def cut(self, data):
        name, request = self.one(data)
        least = request.borrowed * self.size if request.has_buffer else self.model.device_start(request)
        tokens = data.draw(st.integers(least, request.length))
        kept = -(-tokens // self.size) * self.size
        self.allocator.free_rows(self.pool.req_to_token, [request.row], [min(kept, request.length)], [request.length])
        self.pool.truncate([name], [tokens])
        self.model.cut(request, tokens)

    @rule(data=st.data())
    def release(self, data):
        """A request goes, wherever it is; some of its first pages may stay with nobody in particular."""
        name, request = self.one(data)
        epoch, first, whole = self.model.epoch, request.borrowed, request.length // self.size
        kept = data.draw(st.integers(first, whole) | st.just(first))
        begin = max(request.start, kept * self.size)
        table, length = self.pool.req_to_token, request.length
        self.allocator.free_rows(table, [request.row], [kept * self.size], [length], device_starts=[begin])
        self.allocator.release(name)
        self.allocator.release(name)
        self.pool.free(name)
        self.model.release(name, kept)
        if self.model.epoch == epoch:
            self.states = []

    @precondition(lambda self: any(not loose.borrowers for loose in self.model.loose))
    @rule(data=st.data(), by_page=st.booleans())
    def free(self, data, by_page):
        loose = data.draw(st.sampled_from([loose for loose in self.model.loose if not loose.borrowers]))
        pairs = list(zip(loose.full, loose.device, strict=True))
        if by_page:
            for has_device in (True, False):
                pages = tensor(full for full, device in pairs if bool(device) == has_device)
                self.allocator.free_pages(pages, has_device=has_device)
        else:
            offsets = data.draw(st.lists(st.integers(0, self.size - 1), min_size=1, max_size=2, unique=True))
            self.allocator.free(tensor(page * self.size + offset for offset in offsets for page in loose.full))
        self.model.give("full", loose.full)
        self.model.give("device", [device for _, device in pairs if device])
        self.model.loose.remove(loose)

    @rule()
    def change_the_group(self):
        if self.model.is_grouping:
            self.allocator.free_group_end()
            self.model.end_group()
        else:
            self.allocator.free_group_begin()
            self.model.is_grouping = True

    @rule()
    def back_up(self):
        made = self.allocator.backup_state(), self.model.snapshot(), self.model.epoch
        self.states = [*self.states[-2:], made]

    @precondition(lambda self: self.states)
    @rule(place=st.integers(0, 2))
    def restore(self, place):
        """A state is good until something goes back, a buffer is given, or a state from before it is restored."""
        at = place % len(self.states)
        token, snapshot, epoch = self.states[at]
        if epoch != self.model.epoch:
            with pytest.raises(SlotError):
                self.allocator.restore_state(token)
            return
        self.allocator.restore_state(token)
        self.model.restore(snapshot)
        for name, request in self.model.requests.items():
            self.pool.truncate([name], [request.length])
        # What took no page may count as a step, so a later state that saw as many pages is left alone.
        later = [(state, then, -1) for state, then, _ in self.states[at + 1 :] if then[-1] != snapshot[-1]]
        self.states = [*self.states[: at + 1], *later]

    @rule(data=st.data(), when=st.integers(0, 9))
    def clear_or_resize(self, data, when):
        if when == 0:  # seldom, since what matters needs a long history
            self.allocator.clear()
            self.pool.clear()
            self.model.reset()
        elif when == 1 and not self.model.is_grouping and not any(self.model.held().values()):
            self.pool.clear()
            self.resize_to({name: data.draw(st.integers(1, most)) for name, most in MOST.items()})

    @rule(data=st.data(), side=st.sampled_from(("full", "device")))
    def abort(self, data, side):
        """A call that fails half-way takes nothing in any tier."""
        spans = self.chosen(data, self.grows_in_step, self.tokens())
        pages = sum(self.model.new_pages(spans).values())
        if not pages or not self.model.fits(pages, pages):
            return

        def fails(*arguments):
            raise RuntimeError("half-way")

        inner, name = getattr(self.allocator, side), "alloc_extend" if side == "full" else "alloc_pages"
        setattr(inner, name, fails)
        try:
            with pytest.raises(RuntimeError, match="half-way"):
                self.allocator.alloc_extend(*self.arguments(spans))
        finally:
            delattr(inner, name)

    @rule(data=st.data())
    def misuse(self, data):
        """Calls that contradict themselves or what is held are refused, and nothing changes."""
        refused = data.draw(st.sampled_from(sorted(calls := self.misuses())))
        with pytest.raises(SlotError):
            calls[refused]()
        if refused == "one side too large":
            self.states = []  # void where the sides before it were resized and resized back

    def misuses(self):
        allocator, table, one, size = self.allocator, self.pool.req_to_token, tensor([1]), self.size
        columns = table.shape[1]
        calls = {
            "an unknown request": lambda: allocator.reserve_host("nobody", 1),
            "a buffer for nobody": lambda: allocator.alloc_device_buffer("nobody", 0),
            "another's state": lambda: allocator.restore_state(object()),
            "a wrong total": lambda: allocator.alloc_extend(one - 1, [0], one, [1], one - 2, 2),
            "a column outside": lambda: allocator.free_rows(table, [1], [0], [columns + 1]),
            "starts outside": lambda: allocator.free_rows(table, [1], [0], [1], device_starts=[2]),
            "one side too large": lambda: allocator.resize({"full": size, "host": 99 * size}),
        }
        for name, request in self.model.requests.items():
            of_request = {
                "more host slots than columns": lambda name=name: allocator.reserve_host(name, columns + 1),
                "too large a buffer": lambda name=name: allocator.alloc_device_buffer(name, 0, 10**6),
                "host slots of others": lambda name=name: allocator.host_slots(name, 0, columns + 1),
            }
            calls.update(of_request | (self.misuses_of_buffers(name, request) if request.has_buffer else {}))
        return calls

    def misuses_of_buffers(self, name, request):
        extend, decode = self.allocator.alloc_extend, self.allocator.alloc_decode
        _, _, seq, seq_cpu, last, _, _ = grown = self.arguments({name: request.length + 1})
        calls = {
            "an extend in a buffer": lambda: extend(*grown),
            "a decode without names": lambda: decode(seq, seq_cpu, last),
        }
        if self.model.is_lost(request):
            calls["a lost page"] = lambda: decode(seq, seq_cpu, last, [name])
        return calls

    @invariant()
    def every_page_of_every_tier_has_one_owner(self):
        available, held = {}, self.model.held()
        for name, pages in held.items():
            tier, part = self.model.tiers[name], getattr(self.allocator, name)
            assert len(set(pages)) == len(pages) and not tier.free & {0, *pages}
            assert len(tier.free) + len(tier.queued) + len(pages) == tier.capacity == part.size // self.size
            part.check(held=tensor(page * self.size for page in (*pages, *tier.queued)))
            available[name] = part.available_size()
            assert available[name] == len(tier.free) * self.size
        assert self.allocator.available_size() == min(available["full"], available["device"])
        if not self.model.is_grouping:
            self.allocator.check(held=tensor(page * self.size for page in held["full"]))

    @invariant()
    def the_maps_of_all_tiers_are_in_step(self):
        allocator, slots_of = self.allocator, self.model.slots_of
        mapped = self.model.mapped()
        assert allocator.translate(tensor([0, -1, *slots_of(mapped)])).tolist() == [0, -1, *slots_of(mapped.values())]
        buffers, on_host = torch.zeros_like(allocator.req_to_device_buffer), torch.zeros_like(allocator.req_to_host)
        for name, request in self.model.requests.items():
            if request.has_buffer:
                read, newest = slots_of(request.read), slots_of([request.newest])
                buffers[request.row] = tensor([*read, *[0] * (buffers.shape[1] - len(read) - self.size), *newest])
            slots = slots_of(request.host)[: on_host.shape[1]]
            on_host[request.row, : len(slots)] = tensor(slots)
            end = min(request.length, len(slots))
            assert allocator.host_slots(name, 0, end).tolist() == slots[:end]
        assert allocator.req_to_device_buffer.equal(buffers) and allocator.req_to_host.equal(on_host)


def machine_of(tiers, broken=None):
    return type("Machine", (TierMachine,), {"tiers": tiers, "broken": broken})


def test_tokens_in_two_tiers(fuzz, tiers):
    run_state_machine_as_test(machine_of(tiers), settings=fuzz.effort())


class KeepsTheDevice(HiSparseAllocator):
    def free_device_rows(self, table, rows, starts, ends):
        pass


class ForgetsTheHost(HiSparseAllocator):
    def release(self, request):
        self._host_slots.clear()
        super().release(request)


class MapsWhatIsOnTheHost(HiSparseAllocator):
    alloc_logical_extend = HiSparseAllocator.alloc_extend


@pytest.mark.parametrize("cls", [KeepsTheDevice, ForgetsTheHost, MapsWhatIsOnTheHost])
def test_a_broken_allocator_of_two_tiers_is_found(fuzz, tiers, cls):
    with pytest.raises((AssertionError, SlotError, pytest.fail.Exception)):
        many = settings(fuzz.no_shrinking, stateful_step_count=150, max_examples=200, derandomize=True, database=None)
        run_state_machine_as_test(machine_of(tiers, cls), settings=many)
