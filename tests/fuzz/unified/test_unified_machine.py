"""Any order of calls in unified memory: what a page holds is compared byte by byte after every call.

Inner calls fail at times: copies of pages, events, and writes to tables. Then nothing has changed, and the call is made
again. Queries come after every call, and change nothing.

The promise: with no gate closed and no forward pass in flight, an allocation fails only if the whole pages of all
spaces, paddings and grids counted, plus those asked for exceed the buffer, or the space's numbering is full.
"""

import itertools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")
torch.set_num_threads(1)

from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvdock import edge  # noqa: E402
from kvdock.builder import build  # noqa: E402
from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.model import ConvBlock, ConvParams, LayerSpec, MHAParams, ModelSpec, StateParams  # noqa: E402
from kvdock.options import CacheOptions  # noqa: E402
from kvdock.unified.segment import Segment  # noqa: E402

HEADS = MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8)
FULL, SLIDING = LayerSpec(kind="mha", params=HEADS), LayerSpec(kind="mha", params=HEADS, window_tokens=9)
CONV = ConvParams(blocks=(ConvBlock(heads=1, head_dim=12),), kernel=3)
STATE = LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(2, 4, 4), temporal_dtype="float32"))
KINDS = {"linear": (FULL, STATE), "sliding": (FULL, SLIDING, SLIDING), "three": (FULL, SLIDING, STATE, SLIDING)}
NAMES = range(5)
live = precondition(lambda self: self.lengths)


class Broken(Exception):
    """What an inner call raises."""


class Fuse:
    """Lets the n-th inner call fail; 0: none."""

    left = 0

    def burn(self):
        self.left -= 1
        if self.left == 0:
            raise Broken


FUSE = Fuse()


class Written(np.ndarray):
    """A table that burns the fuse after it was written."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        FUSE.burn()


class Failing(ReferenceKernels):
    """Copies half of the pages before it fails."""

    def move(self, views, tgt_loc, src_loc):
        half = tgt_loc.shape[0] // 2
        super().move(views, tgt_loc[:half], src_loc[:half])
        FUSE.burn()
        super().move(views, tgt_loc, src_loc)


class Finished:
    """An event that is over when it is waited for, as that of a forward pass that was launched."""

    def __init__(self):
        self.waited = False

    def query(self):
        FUSE.burn()
        return self.waited

    def wait(self):
        FUSE.burn()
        self.waited = True


def fitting(line, pages):
    """Whether pages fit beside each other: laid out by trying every place of a space between the ends."""
    sizes = [(s, pages[s.space]) for s in line.stretches]
    if any(count > s.places for s, count in sizes):
        return False
    low = line.low + sizes[0][0].page_nbytes * sizes[0][1]
    high = line.high - sizes[-1][0].page_nbytes * sizes[-1][1]
    if len(sizes) == 2 or not sizes[1][1]:
        return low <= high
    middle, count = sizes[1]
    begins = (middle.start + place * middle.page_nbytes for place in range(middle.places))
    return any(low <= begin and begin + count * middle.page_nbytes <= high for begin in begins)


class UnifiedMachine(RuleBasedStateMachine):
    """Requests that come, grow, slide and go, while pages move between calls, or may not."""

    kind = "linear"

    @initialize(lazy=st.booleans(), page_size=st.sampled_from((1, 3, 4)), seed=st.integers(0, 99))
    def begin(self, lazy, page_size, seed):
        model = ModelSpec(name="m", architecture="M", layers=KINDS[self.kind], context_length=64, dtype="float32")
        options = CacheOptions(unified_memory=True, page_size=page_size, lazy_compaction=lazy)
        self.cache = build(edge.plan(model, device="cpu", options=options, budget_bytes=9_000), debug=True)
        self.memory, self.allocator = self.cache.memory, self.cache.token_to_kv_pool_allocator
        (self.raw,) = {t.data_ptr(): t for pool in self.cache.pools.values() for t in self.shared(pool)}.values()
        self.lengths, self.written, self.holds, self.events = {}, {}, [], []
        self.random = torch.Generator().manual_seed(seed)
        self.places = {}
        self.chance = random.Random(seed)
        FUSE.left = 0
        for stretch in self.memory.line.stretches:
            self.memory.segment(stretch.space)._kernels = Failing()

    def attempt(self, call, writes=True, is_whole=True):
        """What a call returns, the second time where an inner call fails: then nothing has changed (`is_whole`)."""
        segments = [self.memory.segment(stretch.space) for stretch in self.memory.line.stretches]
        tables = {
            name: [getattr(segment, name) for segment in segments] for name in ("_page_of", "_owner_of", "_holes")
        }
        before, counts = self.pages().keys(), self.counts()
        for name in tables if writes and segments[0]._is_host else ():
            for segment, table in zip(segments, tables[name], strict=True):
                setattr(segment, name, table.view(Written))
        FUSE.left = self.chance.choice((0, 0, *range(1, 13)))
        try:
            return call()
        except Broken:
            FUSE.left = 0
            self.memory.check()
            if is_whole:
                assert (self.pages().keys(), self.counts()) == (before, counts)
                self.every_byte_is_where_its_page_is()
            return call()
        finally:
            FUSE.left = 0
            for name, found in tables.items():
                for segment, table in zip(segments, found, strict=True):
                    setattr(segment, name, table)

    def counts(self):
        """What callers are told of free pages: with a gate closed less may be free, for pages that moved stay there."""
        free = [share.free_after for share in self.memory.shares()]
        return free, self.cache.req_to_token_pool.live_rows(), self.allocator.live_pages()

    def shared(self, pool):
        return [t for t in pool.storages() if t.numel() >= self.memory.line.high]

    def pages(self):
        """Each live virtual page and the byte at which it lies."""
        found = {}
        for stretch in self.memory.line.stretches:
            page_of = self.memory.segment(stretch.space).page_of.tolist()
            for page, place in enumerate(page_of):
                if place:
                    found[stretch.space, page] = stretch.start + (place - stretch.first) * stretch.page_nbytes
        return found

    def nbytes(self, space):
        return next(s.page_nbytes for s in self.memory.line.stretches if s.space == space)

    def wanted(self, more):
        """Pages of every space if the tokens and states of `more` requests were there: name → new length."""
        size, grown = self.allocator.page_size, 0
        counts = {s.space: self.memory.segment(s.space).live for s in self.memory.line.stretches}
        for name, length in more.items():
            grown += -(-length // size) - -(-self.lengths.get(name, 0) // size)
            if "state" in counts:
                counts["state"] += name not in self.lengths
        for space in counts.keys() & {"full", "swa"}:
            counts[space] += grown
        return counts

    def verdict(self, more, is_there):
        """Verify the promise for an allocation that was served, or was not."""
        wanted = self.wanted(more)
        if is_there:
            return
        if not self.holds:
            rows_left = self.cache.req_to_token_pool.size - len(self.lengths)
            assert not fitting(self.memory.line, wanted) or len(more.keys() - self.lengths.keys()) > rows_left

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(1, 40))
    def admit(self, name, tokens):
        if name in self.lengths:
            return
        before, asked = self.pages(), {name: tokens}
        fits = fitting(self.memory.line, self.wanted(asked))
        # A write that fails while an admission is taken back leaves it half there, so here only pages and events fail.
        found = self.attempt(lambda: self.cache.admit(name, tokens), writes=False)
        if found is None:
            assert self.pages().keys() == before.keys()
            self.verdict(asked, False)
            return
        assert fits
        self.lengths[name] = tokens
        self.cache.prepare_states()

    @live
    @rule(data=st.data())
    def decode(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), unique=True, min_size=1))
        names = [name for name in names if self.lengths[name] < 60]
        grown = {name: self.lengths[name] + 1 for name in names}
        rows = [self.cache.req_to_token_pool.row_of(name) for name in names]
        table, seq = self.cache.req_to_token_pool.req_to_token, list(grown.values())
        last = torch.tensor([int(table[row, length - 2]) for row, length in zip(rows, seq, strict=True)])
        before, fits = self.pages(), fitting(self.memory.line, self.wanted(grown))
        found = self.attempt(lambda: self.allocator.alloc_decode(torch.tensor(seq), seq, last.long(), names))
        if found is None:
            assert self.pages().keys() == before.keys()
            self.verdict(grown, False)
            return
        assert fits
        self.cache.req_to_token_pool.write(rows, [length - 1 for length in seq], seq, found)
        self.lengths.update(grown)

    @live
    @rule(data=st.data(), ahead=st.integers(1, 9))
    def speculate_and_take_back(self, data, ahead):
        name = data.draw(st.sampled_from(sorted(self.lengths)))
        length, row = self.lengths[name], self.cache.req_to_token_pool.row_of(name)
        last = self.cache.req_to_token_pool.req_to_token[row, length - 1].view(1).long()
        before, mark, shares = self.pages(), self.allocator.backup_state(), self.memory.shares()
        moved = self.memory.bytes_moved
        lens = torch.tensor([length]), [length], torch.tensor([length + ahead]), [length + ahead]
        self.attempt(lambda: self.allocator.alloc_extend(*lens, last, ahead, [name]))
        self.allocator.restore_state(mark)
        assert self.pages().keys() == before.keys()
        assert [s._replace(free_now=0) for s in self.memory.shares()] == [s._replace(free_now=0) for s in shares]
        if self.memory.bytes_moved == moved and self.holds:
            assert self.memory.shares() == shares

    @live
    @rule(data=st.data())
    def slide(self, data):
        if self.kind == "linear":
            return
        name = data.draw(st.sampled_from(sorted(self.lengths)))
        self.attempt(lambda: self.cache.evict([name], [max(0, self.lengths[name] - 9)]))

    @live
    @rule(data=st.data())
    def release(self, data):
        name = data.draw(st.sampled_from(sorted(self.lengths)))
        self.attempt(lambda: self.cache.release(name), is_whole=self.kind == "sliding")  # tokens go back before states
        del self.lengths[name]

    @live
    @rule(data=st.data())
    def release_in_a_group(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), unique=True))
        self.allocator.free_group_begin()
        for name in names:
            self.cache.release(name)
            del self.lengths[name]
        self.attempt(self.allocator.free_group_end)

    @rule(max_bytes=st.integers(0, 4_000), headroom=st.sampled_from((0, 1_000, 10_000)))
    def compact(self, max_bytes, headroom):
        moved = self.attempt(lambda: self.memory.compact(max_bytes, headroom))
        assert not (moved and (self.holds or not max_bytes))
        assert moved <= max_bytes or moved in [stretch.page_nbytes for stretch in self.memory.line.stretches]

    @rule(what=st.sampled_from(("a transfer", "a forward pass in flight")))
    def hold(self, what):
        if len(self.holds) < 3:
            self.holds.append(self.memory.close_gate(what))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data):
        self.memory.open_gate(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @rule()
    def launch(self):
        event = Finished()
        with self.memory.forward(event):
            assert not self.memory.can_move
        assert len(self.memory._pending) <= len(self.events) + 1
        self.events.append((event, self.memory.bytes_moved))

    @invariant()
    def nothing_moved_before_a_launched_pass_was_waited_for(self):
        for event, moved in self.events:
            assert event.waited or self.memory.bytes_moved == moved

    @invariant()
    def queries_change_nothing(self):
        segments = [self.memory.segment(stretch.space) for stretch in self.memory.line.stretches]
        before = [self.frozen(segment) for segment in segments]
        size = self.allocator.page_size
        for pages in (0, 1, 5, 40):
            assert (self.allocator.shortfall(pages) == ()) == (self.allocator.available_size() >= pages * size)
            for lacks in self.allocator.shortfall(pages, pages // 2):
                assert lacks.missing > 0 and lacks.advice
        self.cache.check()
        assert [self.frozen(segment) for segment in segments] == before

    def frozen(self, segment):
        tables = [
            bytes(memoryview(segment._tensor(t).numpy())) for t in (segment._page_of, segment._owner_of, segment._holes)
        ]
        return tables, segment.window, segment.holes, segment.bytes_moved, self.memory.passes

    @invariant()
    def every_byte_is_where_its_page_is(self):
        found = self.pages()
        for key in self.written.keys() - found.keys():
            del self.written[key]
        if self.holds:
            stay = self.places.keys() & found.keys()
            assert {key: found[key] for key in stay} == {key: self.places[key] for key in stay}
        self.places = found
        for key, start in found.items():
            here = self.raw[start : start + self.nbytes(key[0])]
            if key not in self.written:
                here.copy_(torch.randint(0, 255, here.shape, dtype=torch.uint8, generator=self.random))
                self.written[key] = here.clone()
            assert torch.equal(here, self.written[key]), key

    @invariant()
    def bytes_are_conserved(self):
        self.memory.check()
        line, shares = self.memory.line, self.memory.shares()
        owned = self.memory.gap_bytes()
        for share in shares:
            segment = self.memory.segment(share.space)
            owned += (segment.live + segment.holes) * segment.stretch.page_nbytes
            assert share.free_now <= share.free_after
        assert owned == line.high - line.low
        taken = sorted((start, start + self.nbytes(key[0])) for key, start in self.places.items())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
        counts = {share.space: share.live for share in shares}
        for share in shares:  # what is free once holes are closed is what fits, and not a page more
            more = {**counts, share.space: share.live + share.free_after}
            assert fitting(line, more) and not fitting(line, {**more, share.space: more[share.space] + 1})


@pytest.mark.parametrize("kind", KINDS)
def test_the_promise_holds_in_any_order_of_calls(fuzz, kind):
    machine = type(f"{kind}Machine", (UnifiedMachine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=fuzz.effort())


def test_the_promise_holds_for_tables_that_are_not_read_through_numpy(fuzz, monkeypatch):
    monkeypatch.setattr(Segment, "is_host", staticmethod(lambda table: False))
    machine = type("deviceMachine", (UnifiedMachine,), {"kind": "three"})
    run_state_machine_as_test(machine, settings=fuzz.effort())
