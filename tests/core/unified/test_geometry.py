"""Where spaces lie in one byte buffer, in numbers worked out by hand."""

import itertools
import random

import pytest
from kvdock.layout import Buffer, SizeRule, Space
from kvdock.unified.geometry import Line, Stretch, Window, first_pages, lay_paddings, line_of

TWO = {"state": 48, "full": 32}
FULL = Space(name="full", rule=SizeRule(), page_size=2)
SPACES = {
    "full": FULL,
    "swa": Space(name="swa", rule=SizeRule(), page_size=2),
    "state": Space(name="state", rule=SizeRule(), issued_by="request_pool"),
}


def buffers(**nbytes):
    """A buffer of one layer for each space, of so many bytes a page; the first space measures."""
    first = next(iter(nbytes))
    return [
        Buffer(
            name="b",
            owner=space,
            role="key",
            shape=(size // SPACES[space].page_size,),
            dtype="uint8",
            space=space,
            layers=(0,),
            guard=SPACES[space].page_size,
            storage="shared" if space == first else "within",
            is_kv=True,
        )
        for space, size in nbytes.items()
    ]


def test_paddings_lie_together_and_the_first_space_follows_its_own():
    paddings = lay_paddings(TWO)
    assert paddings.offsets == {"full": 0, "state": 32}
    assert paddings.nbytes == 80
    assert paddings.pages == 3  # its own, and 48 bytes of the states' are two more
    assert first_pages(TWO) == {"state": 1, "full": 3}  # byte 80 = 32 + 48, and byte 96


def test_two_spaces_fill_the_buffer_from_both_ends():
    line = line_of(buffers(full=32, state=48), SPACES, {"full": 20, "state": 6})
    # 10 full pages and 3 of paddings: 416 bytes; from byte 80 on there are 336, seven states, of which six have a number
    assert (line.low, line.high) == (80, 416)
    states, full = line.stretches
    assert (states.space, states.start, states.first, states.places) == ("state", 80, 1, 6)
    assert (full.space, full.start, full.first, full.places) == ("full", 96, 3, 10)


def test_whole_pages_fit_exactly_until_they_do_not():
    line = line_of(buffers(full=32, state=48), SPACES, {"full": 20, "state": 6})
    assert line.fits({"full": 10}) and not line.fits({"full": 11})
    assert line.fits({"state": 6}) and not line.fits({"state": 7})
    # four states end at byte 272, four full pages begin at byte 288; a fifth would begin at 256
    assert line.fits({"state": 4, "full": 4}) and not line.fits({"state": 4, "full": 5})
    assert line.room("full", {"state": 4}) == 4
    assert line.room("state", {"full": 4}) == 4


def test_a_space_between_loses_only_what_its_grid_begins_later():
    spaces = line_of(buffers(full=32, swa=48, state=80), SPACES, {"full": 40, "swa": 40, "state": 9}).stretches
    assert [stretch.space for stretch in spaces] == ["state", "swa", "full"]  # the largest pages first
    assert all(a.start <= b.start for a, b in itertools.pairwise(spaces))


def test_a_space_of_limited_size_comes_first():
    rule = SizeRule(fixed=2, at_most=2)
    spaces = {**SPACES, "state": Space(name="state", rule=rule, issued_by="request_pool")}
    line = line_of(buffers(full=32, swa=64, state=48), spaces, {"full": 40, "swa": 40, "state": 2})
    assert [stretch.space for stretch in line.stretches] == ["state", "swa", "full"]


def test_windows_take_gaps_first_and_holes_of_others_only_as_far_as_needed():
    line = Line((Stretch("a", 1, 10, 0, 1, 10), Stretch("b", 1, 20, 0, 0, 5)), 0, 100)
    now = {"a": Window(0, 4), "b": Window(3, 5)}  # bytes 0 … 40 and 60 … 100
    assert line.gap("a", now) == 2 and line.gap("b", now) == 1
    assert line.grown(now, {"a": 2}) == {"a": Window(0, 6), "b": Window(3, 5)}
    assert line.grown(now, {"a": 3}) is None
    # b lives on one page: it gives up one of two, and the new page of a lies where that was
    assert line.windows(now, {"a": 7, "b": 1}) == {"a": Window(0, 7), "b": Window(4, 5)}
    assert line.windows(now, {"a": 7, "b": 2}) is None


def brute(line, pages):
    """Whether any packing in order exists, by trying every place of the spaces between."""

    def place(i, cursor):
        if i == len(line.stretches):
            return True
        stretch, count = line.stretches[i], pages[line.stretches[i].space]
        if not count:
            return place(i + 1, cursor)
        lows = [0] if i == 0 else [stretch.places - count] if i == len(line.stretches) - 1 else range(stretch.places)
        for low in lows:
            ends = stretch.start + (low + count) * stretch.page_nbytes
            begins = stretch.start + low * stretch.page_nbytes
            is_free = low >= 0 and begins >= cursor and low + count <= stretch.places and ends <= line.high
            if is_free and place(i + 1, ends):
                return True
        return False

    return place(0, line.low)


@pytest.mark.parametrize("seed", range(20))
def test_fits_room_and_windows_agree_with_every_packing(seed):
    rng = random.Random(seed)
    sizes = {"full": 2 * rng.randint(4, 20), "swa": 60, "state": rng.randint(2, 8)}
    nbytes = {"full": 16 * rng.randint(1, 3), "swa": 16 * rng.randint(1, 4), "state": 16 * rng.randint(4, 9)}
    line = line_of(buffers(**nbytes), SPACES, sizes)
    for _ in range(60):
        pages = {s.space: rng.randint(0, s.places + 1) // rng.choice((1, 2, 4)) for s in line.stretches}
        fits = line.fits(pages)
        assert fits == brute(line, pages), (seed, pages)
        now = {s.space: Window(0, 0) for s in line.stretches}
        now[line.stretches[-1].space] = Window(*(line.stretches[-1].places,) * 2)
        windows = line.windows(now, pages)
        assert (windows is not None) == fits
        if windows is None:
            continue
        cursor = line.low
        for stretch in line.stretches:
            low, high = windows[stretch.space]
            assert high - low >= pages[stretch.space] and 0 <= low <= high <= stretch.places
            if high > low:
                assert stretch.at(low) >= cursor
                cursor = stretch.at(high)
        assert cursor <= line.high
        for space in pages:
            others = {name: count for name, count in pages.items() if name != space}
            room = line.room(space, others)
            assert line.fits({**others, space: room}) and not line.fits({**others, space: room + 1})
