"""What a composite owes to those inside it and to those who wrap it: their interface, and no more than that."""

import inspect

import pytest
from kvdock.errors import SlotError
from kvdock.layout import Buffer

torch = pytest.importorskip("torch")

from kvdock.allocators import (  # noqa: E402
    Allocator,
    PagedAllocator,
    PureSWAAllocator,
    Shortfall,
    SortedAllocator,
    SWAAllocator,
    TokenAllocator,
    lengths,
)

INNER = (Allocator, PagedAllocator, TokenAllocator, SortedAllocator)


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


def interface(cls):
    return {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))}


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("composite", [SWAAllocator, PureSWAAllocator])
def test_a_composite_offers_whatever_those_inside_offer(composite, inner):
    """A-14: a wrapper forwards every capability."""
    offered = interface(composite)
    for name, method in interface(inner).items():
        assert name in offered, name
        assert arguments(offered[name])[: len(arguments(method))] == arguments(method), name


def test_where_every_layer_slides_the_interface_is_that_of_the_composite():
    pure, composite = interface(PureSWAAllocator), interface(SWAAllocator)
    assert composite.keys() <= pure.keys()
    assert {n: arguments(pure[n]) for n in composite} == {n: arguments(composite[n]) for n in composite}


def test_what_those_inside_verify_is_verified_through_the_composite(make):
    """A-14: not only offered: each call reaches the side that knows."""
    allocator = make.swa(32, 32, 4, debug=True)
    kept, gone = allocator.alloc(8), allocator.alloc(4)
    allocator.free(gone)
    assert allocator.live_pages() == [1, 2]
    for verify in (allocator.verify_slots, allocator.verify_live):
        verify(kept)
        with pytest.raises(SlotError, match="space 'full': pages of 4 slots from 12"):
            verify(gone)
    allocator.verify_pages(slots(1, 2))
    with pytest.raises(SlotError, match="from 12 are freed twice"):
        allocator.verify_pages(slots(3))
    growth = lengths.decode_growth([7], 4)
    allocator.verify_growth(growth, {"seq_lens": slots(7), "last_loc": slots(9)})
    allocator.swa.free_pages(slots(2))
    with pytest.raises(SlotError, match=r"space 'swa'.*were freed but are continued as last_loc"):
        allocator.verify_growth(growth, {"seq_lens": slots(7), "last_loc": slots(9)})


@pytest.mark.parametrize("page_size", [1, 4])
def test_bare_pages_come_in_pairs(make, page_size):
    allocator = make.swa(8 * page_size, 4 * page_size, page_size)
    pages = allocator.alloc_pages(3)
    assert pages.tolist() == [1, 2, 3]
    assert allocator.translate(pages * page_size).tolist() == [page_size, 2 * page_size, 3 * page_size]
    assert allocator.alloc_pages(2) is None
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (5 * page_size, page_size)
    with pytest.raises(SlotError, match=r"count=-1 is negative"):
        allocator.alloc_pages(-1)
    allocator.free_pages(pages)
    allocator.check(held=slots())


class Plain(Allocator):
    """The least that a vendor can write: a list of free pages, and nothing that is not asked for."""

    def __init__(self, query, parts):
        super().__init__(query, parts)
        (space,) = query.spaces
        self.space, self.page_size, self.size = space.name, space.page_size, parts.sizes[space.name]
        self.clear()

    @classmethod
    def buffers(cls, query):
        return (Buffer(name="unused", role="unused", shape=(1,), dtype="int64"),)

    def clear(self):
        self.pages = list(range(1, self.size // self.page_size + 1))

    def alloc(self, need_size, owner=None):
        count = need_size // self.page_size
        if count > len(self.pages):
            return None
        taken, self.pages = self.pages[:count], self.pages[count:]
        return torch.tensor([p * self.page_size + i for p in taken for i in range(self.page_size)], dtype=torch.int32)

    def alloc_extend(
        self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, owners=None
    ):
        found = []
        for prefix, seq, at in zip(prefix_lens_cpu, seq_lens_cpu, last_loc.tolist(), strict=True):
            for position in range(prefix, seq):
                at = self.pages.pop(0) * self.page_size if position % self.page_size == 0 else at + 1
                found.append(at)
        return torch.tensor(found, dtype=torch.int32)

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc, owners=None):
        before = [seq - 1 for seq in seq_lens_cpu]
        return self.alloc_extend(None, before, None, seq_lens_cpu, last_loc, len(before))

    def free(self, indices):
        self.pages += sorted({slot // self.page_size for slot in indices.tolist()})

    def free_pages(self, pages):
        self.pages += pages.tolist()

    def free_rows(self, table, rows, starts, ends):
        for row, start, end in zip(rows, starts, ends, strict=True):
            self.free(table[row, start:end])

    def checkpoint(self):
        pages = list(self.pages)
        return lambda: setattr(self, "pages", pages)

    def available_size(self):
        return len(self.pages) * self.page_size

    def pages_needed(self, prefix_lens, seq_lens):
        size = self.page_size
        return sum(-(-seq // size) - -(-prefix // size) for prefix, seq in zip(prefix_lens, seq_lens, strict=True))

    def shortfall(self, pages):
        lacks = Shortfall(space=self.space, needed=pages * self.page_size, available=self.available_size())
        return (lacks,) if lacks.missing else ()

    def free_group_begin(self):
        self.group = True

    def free_group_end(self):
        self.group = False

    def backup_state(self):
        return list(self.pages)

    def restore_state(self, state):
        self.pages = list(state)

    def resize(self, sizes):
        self.size = sizes[self.space]

    def check(self, held=None):
        live = set(range(1, self.size // self.page_size + 1)) - set(self.pages)
        if held is not None and live != {slot // self.page_size for slot in held.tolist()}:
            raise SlotError(f"space {self.space!r}: other pages are live than are held")


@pytest.mark.parametrize("plain", [("full",), ("swa",), ("full", "swa")])
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_inner_allocator_needs_nothing_beyond_the_interface(make, page_size, plain):
    allocator = make.swa(16 * page_size, 8 * page_size, page_size, inner=dict.fromkeys(plain, Plain))
    held = allocator.alloc(2 * page_size)
    batch = [0, 0], [5 * page_size // 2, 1]
    new = allocator.alloc_extend(
        slots(*batch[0]), batch[0], slots(*batch[1]), batch[1], slots(-1, -1), sum(batch[1]), owners=["a", "b"]
    )
    step = allocator.alloc_decode(slots(2), [2], new[-1:])
    assert int(step) == (int(new[-1]) + 1)
    mapped = allocator.translate(torch.cat([held, new, step]))
    assert mapped.unique().numel() == mapped.numel()
    assert int(mapped.min()) >= page_size
    allocator.free_swa(held[:page_size])
    assert allocator.translate(held).tolist() == [0] * page_size + list(range(2 * page_size, 3 * page_size))
    allocator.check()
    allocator.free(torch.cat([held, new, step]))
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (16 * page_size, 8 * page_size)
    allocator.check(held=slots())


class Stingy(PagedAllocator):
    """Says that it has pages, and gives none away."""

    def alloc_pages(self, count, owners=None):
        return None


class Breaks(PagedAllocator):
    """Has a kernel that fails, after others took their pages."""

    def alloc_pages(self, count, owners=None):
        raise RuntimeError("no kernel")


@pytest.mark.parametrize(
    ("cls", "error", "message"),
    [(Stingy, SlotError, "a side handed out less than its available_size"), (Breaks, RuntimeError, "no kernel")],
)
def test_a_side_that_fails_leaves_the_other_as_it_was(make, cls, error, message):
    allocator = make.swa(32, 32, 4, inner={"swa": cls})
    for call in (
        lambda: allocator.alloc(8),
        lambda: allocator.alloc_pages(2),
        lambda: allocator.alloc_extend(slots(0), [0], slots(6), [6], slots(-1), 6),
        lambda: allocator.alloc_extend_swa_tail(slots(0), [0], slots(6), [6], slots(-1), 6, [2]),
        lambda: allocator.alloc_decode(slots(1), [1], slots(-1)),
    ):
        with pytest.raises(error, match=message):
            call()
        assert (allocator.full_available_size(), allocator.swa_available_size()) == (32, 32)
    allocator.full.check(held=slots())


def broken(*arguments):
    """An inner call that fails."""
    raise RuntimeError("no memory")


@pytest.mark.parametrize("kind", ["single", "swa"])
def test_an_alloc_whose_slots_cannot_be_told_takes_nothing(make, monkeypatch, kind):
    allocator = make.single(32, 4) if kind == "single" else make.swa(32, 32, 4)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no memory"):
        patched.setattr(PagedAllocator, "_slots_of", broken)
        allocator.alloc(8)
    assert allocator.available_size() == 32
    allocator.check(held=slots())
    assert allocator.alloc(32).tolist() == list(range(4, 36))


@pytest.mark.parametrize("what", ["_erase", "free_pages"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_map_is_as_it_was_where_a_free_fails(make, monkeypatch, what, gone):
    allocator = make.swa(32, 32, 4)
    held = allocator.alloc(16)
    if gone:
        allocator.free_swa(held[:4])
    before = allocator.translate(held).tolist()
    assert before == [0 if gone and slot < 8 else slot for slot in range(4, 20)]
    erase = SWAAllocator._erase

    def half(self, pages):
        erase(self, pages[:2])
        broken()

    calls = {
        "rows": lambda: allocator.free_rows(row_of(held), [1], [0], [16], [4] if gone else None),
        "tokens": lambda: allocator.free(held),
    }
    for call in calls.values():
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no memory"):
            if what == "_erase":
                patched.setattr(SWAAllocator, what, half)
            else:
                patched.setattr(allocator.swa, what, broken)
            call()
        assert allocator.translate(held).tolist() == before
        assert (allocator.full_available_size(), allocator.swa_available_size()) == (16, 20 if gone else 16)
        allocator.check(held=held)
    calls["rows"]()
    allocator.check(held=slots())


def row_of(held, columns=32):
    table = torch.zeros(2, columns, dtype=torch.int32)
    table[1, : held.numel()] = held
    return table
