"""Free groups: what is queued is free at the end, once, however the calls cut it up."""

import random

import pytest
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")

from kvdock.allocators import SortedAllocator  # noqa: E402


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_any_cut_of_a_group_frees_each_page_once(make, page_size, seed, debug):
    """Random pieces of random pages, in any order, among frees by number and by rows."""
    chance = random.Random(10 * page_size + seed)
    allocator = make.single(40 * page_size, page_size, debug=debug)
    held = allocator.alloc(30 * page_size).tolist()
    kept, by_number, tokens = held[: 8 * page_size], [9, 11], held[12 * page_size :]
    tail = held[8 * page_size : 12 * page_size]
    if seed % 2:
        chance.shuffle(tokens)
    allocator.free_group_begin()
    allocator.free_pages(slots(*by_number))
    while tokens:
        cut = chance.randint(1, 3 * page_size)
        allocator.free(slots(*tokens[:cut]))
        tokens = tokens[cut:]
    allocator.free_group_end()
    allocator.check(held=slots(*kept, *(slot for slot in tail if slot // page_size not in by_number)))
    assert allocator.available_size() == (40 - 10) * page_size


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_handed_out_in_a_group_are_not_those_that_wait(make, page_size):
    """The ring is full but for one page: what is queued behind it is not handed out before the end."""
    allocator = make.single(4 * page_size, page_size)
    held = allocator.alloc(3 * page_size)
    allocator.free_group_begin()
    allocator.free(held[: 2 * page_size])
    last = allocator.alloc(page_size)
    assert last[0] == 4 * page_size
    assert allocator.alloc(page_size) is None
    allocator.free_group_end()
    assert allocator.alloc(2 * page_size).tolist() == held[: 2 * page_size].tolist()
    allocator.check(held=torch.arange(page_size, 5 * page_size))


def test_a_state_made_in_a_group_can_be_restored(make):
    allocator = make.single(6)
    held = allocator.alloc(4)
    allocator.free_group_begin()
    allocator.free(held[:2])
    state = allocator.backup_state()
    tried = allocator.alloc(2)
    allocator.restore_state(state)
    allocator.free_group_end()
    assert allocator.alloc(4).tolist() == [*tried.tolist(), 1, 2]


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_beyond_what_is_live_are_refused_when_they_are_queued(make, page_size):
    allocator = make.single(8 * page_size, page_size)
    allocator.alloc(2 * page_size)
    allocator.free_group_begin()
    allocator.free_pages(slots(1, 2))
    with pytest.raises(SlotError, match="3 pages are freed but only 2"):
        allocator.free_pages(slots(1))
    allocator.free_group_end()
    assert allocator.available_size() == 8 * page_size


def test_a_group_of_whole_pages_beyond_what_is_live_frees_nothing(make):
    allocator = make.single(32, 4)
    held = allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free_pages(slots(1))
    allocator.free(held)
    with pytest.raises(SlotError, match="3 pages are freed but only 2"):
        allocator.free_group_end()
    allocator.check(held=held)
    allocator.free(held)
    assert allocator.available_size() == 32


@pytest.mark.parametrize("cls", [None, SortedAllocator])
def test_a_cleared_group_leaves_nothing_behind(make, cls):
    allocator = make.single(8, 2, cls=cls)
    held = allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free(held[:4])
    allocator.clear()
    again = allocator.alloc(4)
    allocator.free_group_begin()
    allocator.free_group_end()
    assert allocator.available_size() == 4
    allocator.check(held=again)


def test_debug_finds_what_a_group_gave_back(make):
    allocator = make.single(16, 4, debug=True)
    held = allocator.alloc(12)
    allocator.free_group_begin()
    allocator.free(held[:8])
    allocator.free_pages(slots(3))
    allocator.free_group_end()
    allocator.check(held=slots())
    with pytest.raises(SlotError, match="are freed twice"):
        allocator.free(held[:4])


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("kind", ["single", "sorted", "swa", "pure"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("how", ["tokens", "one by one", "pages", "rows"])
def test_what_a_group_holds_is_neither_leaked_nor_missing(make, kind, page_size, how, debug):
    room = 8 * page_size
    allocator = {
        "single": lambda: make.single(room, page_size, debug=debug),
        "sorted": lambda: make.single(room, page_size, debug=debug, cls=SortedAllocator),
        "swa": lambda: make.swa(room, room, page_size, debug=debug),
        "pure": lambda: make.pure(room, page_size, debug=debug),
    }[kind]()
    held = allocator.alloc(6 * page_size)
    given, rest = held[: 4 * page_size], held[4 * page_size :]
    allocator.free_group_begin()
    if how == "pages":
        allocator.free_pages(given[::page_size] // page_size)
    elif how == "rows":
        allocator.free_rows(held.view(1, -1), [0], [0], [4 * page_size])
    else:
        for part in given.split(len(given) if how == "tokens" else 1):
            allocator.free(part)
    for known in (None, held, rest):
        allocator.check(known)
    with pytest.raises(SlotError, match="are live but held by nobody"):
        allocator.check(given)
    with pytest.raises(SlotError, match="are held but free"):
        allocator.check(torch.cat((rest, rest[-page_size:] + page_size)))
    allocator.free_group_end()
    allocator.check(rest)
    with pytest.raises(SlotError, match="are held but free"):
        allocator.check(held)


def test_sliding_pages_that_wait_are_no_leak(make):
    allocator = make.swa(32, 32, 4, debug=True)
    held = allocator.alloc(24)
    allocator.free_group_begin()
    allocator.free_swa_rows(held.view(1, -1), [0], [0], [8])
    allocator.check()
    allocator.check(held)
    allocator.free_group_end()
    allocator.check(held)
    assert allocator.swa_available_size() == 16


@pytest.mark.parametrize("kind", ["single", "swa", "pure"])
def test_debug_lets_nobody_write_to_what_waits(make, kind):
    allocator = (
        {"single": make.single, "pure": make.pure}[kind](16, 4, debug=True)
        if kind != "swa"
        else make.swa(16, 16, 4, debug=True)
    )
    held = allocator.alloc(12, "a")
    allocator.free_group_begin()
    allocator.free(held[:2])  # gives back its page as a whole
    with pytest.raises(
        SlotError, match=r"from 4 \(owner 'a'\) were freed \(they wait in a free group\) but are written"
    ):
        allocator.verify_live(held[2:6])
    allocator.verify_live(held[4:])
    lens = slots(3), [3], slots(4), [4]
    with pytest.raises(SlotError, match="they wait in a free group\\) but are continued as last_loc"):
        allocator.alloc_extend(*lens, held[2:3], 1)
    allocator.free_group_end()
    with pytest.raises(SlotError, match=r"from 4 .* were freed but are written"):
        allocator.verify_live(held[2:6])
