"""The sliding composite: two sides in step, one map."""

import pytest
from kvdock.errors import BuildError, PlanError, SlotError
from kvdock.layout import SizeRule, Space

torch = pytest.importorskip("torch")

from kvdock.allocators import Shortfall, SWAAllocator, lengths  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


def extend(allocator, prefix, seq, last):
    return allocator.alloc_extend(
        torch.tensor(prefix), prefix, torch.tensor(seq), seq, slots(*last), sum(seq) - sum(prefix)
    )


def row_of(held, columns=32):
    table = torch.zeros(2, columns, dtype=torch.int32)
    table[1, : held.numel()] = held
    return table


def test_the_map_has_one_row_a_full_page_and_one_for_padding(make):
    spaces = tuple(Space(name=name, rule=SizeRule(), page_size=16) for name in ("full", "swa"))
    (declared,) = SWAAllocator.buffers(make.query(spaces, {}))
    assert (declared.name, declared.space, declared.dtype, declared.is_kv) == ("full_to_swa", "full", "int64", False)
    pages = declared.units_in({space.name: space for space in spaces}, {"full": 64, "swa": 64})
    assert (pages, declared.tensor_nbytes(pages)) == (4, (4 + 1) * 8)


def test_a_request_that_grows_inside_a_page_writes_no_word_of_the_map(make):
    allocator = make.swa(32, 16, 4)
    held = extend(allocator, [0], [2], [-1])
    allocator.full_to_swa[1] = 3  # what is written now would set it back to 1
    new = allocator.alloc_decode(torch.tensor([3]), [3], held[1:])
    assert (new.tolist(), allocator.translate(new).tolist()) == ([6], [14])


def test_every_slot_of_a_page_without_a_sliding_page_translates_to_slot_0(make):
    allocator = make.swa(32, 32, 4)
    held = allocator.alloc(8)
    allocator.free_swa_pages(slots(1))
    assert allocator.translate(held).tolist() == [0, 0, 0, 0, 8, 9, 10, 11]
    assert allocator.translate(slots(-1, 0, 1, 3, 31).view(1, 5)).tolist() == [[-1, 0, 0, 0, 0]]


def test_both_sides_get_the_same_layout(make):
    allocator = make.swa(32, 16, 4)
    allocator.swa.free(allocator.swa.alloc(4))
    held = extend(allocator, [0], [6], [-1])
    assert held.tolist() == [4, 5, 6, 7, 8, 9]
    assert allocator.translate(held).tolist() == [8, 9, 10, 11, 12, 13]
    more = extend(allocator, [6], [9], [9])
    assert more.tolist() == [10, 11, 12]
    assert allocator.translate(more).tolist() == [14, 15, 16]
    allocator.check(held=torch.cat([held, more]))


def test_decode_extends_both_sides(make):
    allocator = make.swa(32, 16, 4)
    held = extend(allocator, [0, 0], [4, 2], [-1, -1])
    new = allocator.alloc_decode(torch.tensor([5, 3]), [5, 3], held[[3, 5]])
    assert new.tolist() == [12, 10]
    assert allocator.translate(new).tolist() == [12, 10]
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (20, 4)


def test_no_slot_translates_to_no_slot(make):
    allocator = make.swa(8, 4)
    allocator.alloc(2)
    assert allocator.translate(slots(-1, 0, 2, 5)).tolist() == [-1, 0, 2, 0]


def test_a_shortfall_names_the_side_that_lacks(make):
    """A-18: full 1,000 free, sliding 8 free, request 64: available is 8 and sliding lacks 56."""
    allocator = make.swa(1000, 8)
    assert allocator.available_size() == 8
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (1000, 8)
    (lacks,) = allocator.shortfall(64)
    assert lacks == Shortfall(space="swa", needed=64, available=8)
    assert lacks.missing == 56
    assert allocator.shortfall(8) == ()
    assert [s.space for s in allocator.shortfall(1001)] == ["full", "swa"]


@pytest.mark.parametrize(("full", "swa"), [(4, 12), (12, 4)])
def test_nothing_is_taken_when_one_side_is_short(make, full, swa):
    allocator = make.swa(full, swa, 4)
    assert allocator.alloc(8) is None
    assert extend(allocator, [0, 0], [3, 2], [-1, -1]) is None
    held = extend(allocator, [0], [4], [-1])
    assert allocator.alloc_decode(torch.tensor([5]), [5], held[3:]) is None
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (full - 4, swa - 4)
    allocator.check(held=held)


def test_tokens_out_of_the_window_keep_their_full_slot(make):
    allocator = make.swa(8, 8)
    held = allocator.alloc(4)
    allocator.free_swa(held[:2])
    assert allocator.translate(held).tolist() == [0, 0, 3, 4]
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (4, 6)
    allocator.check(held=held)
    allocator.free_swa(held[:3])
    assert allocator.swa_available_size() == 7
    allocator.free(held)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (8, 8)
    allocator.check(held=slots())


def test_a_partly_visible_page_is_kept(make):
    allocator = make.swa(32, 32, 4)
    held = allocator.alloc(16)
    allocator.free_swa(held[:7])
    assert allocator.translate(held).tolist() == [0] * 4 + list(range(8, 20))
    allocator.free_swa(held[7:9])
    assert allocator.translate(held).tolist() == [0] * 8 + list(range(12, 20))
    allocator.check(held=held)


def test_row_ranges_follow_each_other_across_page_bounds(make):
    allocator = make.swa(32, 32, 4)
    held = allocator.alloc(16)
    table = row_of(held)
    for start, end, free in [(0, 7, 20), (7, 7, 20), (7, 8, 24), (8, 11, 24), (11, 15, 28)]:
        allocator.free_swa_rows(table, [1], [start], [end])
        assert allocator.swa_available_size() == free
    assert allocator.translate(held).tolist() == [0] * 12 + list(range(16, 20))
    allocator.free_rows(table, [1], [0], [16], swa_starts=[15])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (32, 32)
    allocator.check(held=slots())


def test_rows_are_freed_with_and_without_evicted_tokens(make):
    allocator = make.swa(64, 64, 4)
    table = torch.zeros(4, 16, dtype=torch.int32)
    held = [allocator.alloc(16) for _ in range(3)]
    for row, own in enumerate(held, start=1):
        table[row] = own
    allocator.free_swa_rows(table, [1, 3], [0, 0], [9, 16])
    assert allocator.swa_available_size() == 16 + 8 + 16
    allocator.free_rows(table, [1, 2, 3], [4, 0, 0], [14, 16, 12], swa_starts=[9, 0, 12])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (16 + 12 + 16 + 12, 64)
    allocator.check(held=torch.cat([held[0][:4], held[2][12:]]))


def test_swa_starts_default_to_the_starts(make):
    allocator = make.swa(32, 32, 4)
    held = allocator.alloc(12)
    allocator.free_rows(row_of(held), [1], [4], [12])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (28, 28)
    allocator.check(held=held[:4])


def test_swa_starts_before_the_start_change_nothing(make):
    allocator = make.swa(32, 32, 4)
    held = allocator.alloc(12)
    allocator.free_rows(row_of(held), [1], [4], [12], swa_starts=[0])
    allocator.check(held=held[:4])


@pytest.mark.parametrize("swa_starts", [[13], [-1], [0, 0]])
def test_swa_starts_outside_the_row_are_refused(make, swa_starts):
    allocator = make.swa(32, 32, 4)
    held = allocator.alloc(12)
    with pytest.raises(SlotError, match="swa_starts"):
        allocator.free_rows(row_of(held), [1], [0], [12], swa_starts=swa_starts)
    allocator.check(held=held)


def test_pages_are_freed_on_both_sides_or_on_the_full_side(make):
    allocator = make.swa(32, 32, 4)
    held = allocator.alloc(16)
    allocator.free_swa_pages(slots(1, 2))
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (16, 24)
    allocator.free_pages(slots(1), has_swa=False)
    allocator.free_pages(slots(3))
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (24, 28)
    allocator.check(held=torch.cat([held[4:8], held[12:]]))


def test_a_group_records_pages_when_they_are_queued(make):
    """A-05: begin; free_swa(i) [i -> P1]; map i -> P2; end: P1 is returned, P2 stays."""
    allocator = make.swa(8, 4)
    i, j = allocator.alloc(1), allocator.alloc(1)
    p1, p2 = allocator.translate(i), allocator.translate(j)
    allocator.free_group_begin()
    allocator.free_swa(i)
    allocator.full_to_swa[i] = p2
    allocator.free_group_end()
    allocator.swa.check(held=p2)
    assert allocator.swa.alloc(3).tolist() == [3, 4, *p1.tolist()]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_group_frees_both_sides_at_its_end(make, page_size, debug):
    allocator = make.swa(16 * page_size, 16 * page_size, page_size, debug=debug)
    held = allocator.alloc(8 * page_size)
    table = row_of(held)
    allocator.free_group_begin()
    allocator.free_swa_rows(table, [1], [0], [2 * page_size])
    allocator.free(held[: 3 * page_size])
    allocator.free_rows(table, [1], [3 * page_size], [5 * page_size])
    assert allocator.available_size() == 8 * page_size
    allocator.free_group_end()
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (13 * page_size, 13 * page_size)
    allocator.check(held=held[5 * page_size :])


@pytest.mark.parametrize("debug", [False, True])
def test_token_frees_of_one_group_may_name_one_page(make, debug):
    allocator = make.swa(16, 16, 4, debug=debug)
    held = allocator.alloc(12)
    allocator.free_group_begin()
    allocator.free(held[:6])
    allocator.free(held[6:8])
    allocator.free_group_end()
    allocator.check(held=held[8:])


@pytest.mark.parametrize("page_size", [1, 4])
def test_freeing_more_than_is_live_changes_neither_side(make, page_size):
    """A-01 without checks, on both sides."""
    allocator = make.swa(8 * page_size, 8 * page_size, page_size)
    held = allocator.alloc(page_size)
    with pytest.raises(SlotError, match="2 pages are freed but only 1"):
        allocator.free_pages(slots(1, 2))
    with pytest.raises(SlotError, match="2 pages are freed but only 1"):
        allocator.free_swa_pages(slots(1, 2))
    with pytest.raises(SlotError, match="2 pages are freed but only 1"):
        allocator.free(torch.cat([held, held + page_size]))
    allocator.check(held=held)


def test_debug_finds_double_frees_on_either_side(make):
    """A-01 with checks: nothing changes on the other side."""
    allocator = make.swa(32, 32, 4, debug=True)
    held = allocator.alloc(12, owner="r")
    table = row_of(held)
    allocator.free_swa_rows(table, [1], [0], [4])
    for misuse in (
        lambda: allocator.free_swa_rows(table, [1], [0], [8]),
        lambda: allocator.free_rows(table, [1], [0], [12]),
        lambda: allocator.free_pages(slots(1)),
        lambda: allocator.free_swa_pages(slots(1)),
    ):
        with pytest.raises(SlotError, match="sliding slots are freed twice"):
            misuse()
    allocator.check(held=held)
    allocator.free_rows(table, [1], [0], [12], swa_starts=[4])
    for misuse in (lambda: allocator.free(held), lambda: allocator.free_pages(slots(2), has_swa=False)):
        with pytest.raises(SlotError, match=r"owner 'r'\) are freed twice"):
            misuse()
    with pytest.raises(SlotError, match="were freed but are written"):
        allocator.verify_live(held)
    allocator.check(held=slots())


def test_debug_finds_overlapping_rows(make):
    allocator = make.swa(32, 32, 4, debug=True)
    held = allocator.alloc(12)
    with pytest.raises(SlotError, match="appear twice in one call"):
        allocator.free_rows(row_of(held), [1, 1], [0, 4], [8, 12])
    allocator.check(held=held)


@pytest.mark.parametrize("page_size", [1, 3])
def test_padding_is_never_handed_out(make, page_size):
    """A-12: alloc(all), clear and restore, then again; neither side gives page 0."""
    allocator = make.swa(6 * page_size, 6 * page_size, page_size)
    state = allocator.backup_state()
    for reset in (lambda: allocator.restore_state(state), allocator.clear, allocator.clear):
        assert allocator.size == allocator.available_size() == 6 * page_size
        held = allocator.alloc(6 * page_size)
        assert sorted(held.tolist()) == list(range(page_size, 7 * page_size))
        assert sorted(allocator.translate(held).tolist()) == list(range(page_size, 7 * page_size))
        reset()


def test_restore_takes_back_both_sides(make):
    allocator = make.swa(32, 16, 4)
    kept = allocator.alloc(4)
    state = allocator.backup_state()
    allocator.alloc(8)
    allocator.restore_state(state)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (28, 12)
    allocator.check()
    allocator.check(held=kept)


def test_restore_after_a_free_on_either_side_is_refused(make):
    allocator = make.swa(32, 16, 4)
    held = allocator.alloc(8)
    state = allocator.backup_state()
    allocator.free_swa(held[:4])
    allocator.alloc(4)
    with pytest.raises(SlotError, match="slots were freed after this state was made"):
        allocator.restore_state(state)
    with pytest.raises(SlotError, match="not made by this allocator"):
        allocator.restore_state("state")
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (20, 8)


def test_returned_slots_share_no_storage(make):
    """A-19."""
    allocator = make.swa(8, 8)
    held = allocator.alloc(4)
    held.fill_(0)
    assert allocator.translate(slots(1, 2, 3, 4)).tolist() == [1, 2, 3, 4]
    allocator.translate(slots(1, 2)).fill_(7)
    assert allocator.full_to_swa[:5].tolist() == [0, 1, 2, 3, 4]


def test_clear_unmaps_everything(make):
    allocator = make.swa(8, 8)
    held = allocator.alloc(4)
    allocator.clear()
    assert allocator.translate(held).tolist() == [0, 0, 0, 0]
    assert allocator.available_size() == 8


def test_resize_changes_both_sides_or_neither(make):
    allocator = make.swa(32, 16, 4)
    allocator.resize({"full": 16, "swa": 8})
    assert (allocator.size, allocator.full_available_size(), allocator.swa_available_size()) == (16, 16, 8)
    with pytest.raises(SlotError, match="size 20"):
        allocator.resize({"full": 32, "swa": 20})
    assert (allocator.size, allocator.full_available_size(), allocator.swa_available_size()) == (16, 16, 8)
    with pytest.raises(SlotError, match=r"names \['c4'\]"):
        allocator.resize({"c4": 4})
    allocator.resize({"full": 32})
    assert (allocator.size, allocator.swa_available_size()) == (32, 8)
    allocator.alloc(4)
    with pytest.raises(SlotError, match="are live"):
        allocator.resize({"swa": 16})


def test_check_finds_sliding_slots_that_nobody_maps_to(make):
    allocator = make.swa(16, 16, 4)
    held = allocator.alloc(8)
    allocator.full_to_swa[1] = 0
    with pytest.raises(SlotError, match=r"space 'swa': 1 pages, at slots \[4\], are live but held by nobody"):
        allocator.check(held=held)
    allocator.full_to_swa[1] = allocator.full_to_swa[2]
    with pytest.raises(SlotError, match="two full pages map to one sliding page"):
        allocator.check()


def test_contradicting_counts_are_refused_before_either_side_changes(make):
    allocator = make.swa(16, 16, 4)
    with pytest.raises(SlotError, match="extend_num_tokens=3"):
        allocator.alloc_extend(slots(0), [0], slots(4), [4], slots(-1), 3)
    with pytest.raises(SlotError, match="no whole number of pages"):
        allocator.alloc(3)
    assert allocator.available_size() == 16


def test_pages_needed_are_those_of_one_side(make):
    assert make.swa(16, 16, 4).pages_needed([0, 3], [5, 4]) == 2


def test_a_map_of_another_size_is_refused(make):
    """A-17."""
    with pytest.raises(BuildError, match="full_to_swa has 3 rows for 32 full slots in pages of 8"):
        make.swa(32, 16, 8, planned={"full": 16, "swa": 16})


@pytest.mark.parametrize(
    ("pages", "message"),
    [({"full": 4}, r"not \['full'\]"), ({"full": 4, "c4": 4}, "c4"), ({"full": 4, "swa": 8}, "pages of 4 and 8 slots")],
)
def test_other_spaces_are_refused(make, pages, message):
    spaces = tuple(Space(name=name, rule=SizeRule(), page_size=size) for name, size in pages.items())
    with pytest.raises(PlanError, match=message):
        SWAAllocator.buffers(make.query(spaces, {}))


class Waits(TorchDispatchMode):
    """Notes the operations for which the host waits for a device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = str(function)
        masks = [a for a in arguments if isinstance(a, (list, tuple))]
        is_mask = any(getattr(a, "dtype", None) is torch.bool for mask in masks for a in mask)
        if any(word in name for word in ("unique", "nonzero", "_local_scalar_dense")) or (".index" in name and is_mask):
            self.found.append(name)
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("page_size", [1, 4])
def test_token_frees_wait_for_the_device_once(make, page_size, monkeypatch):
    allocator = make.swa(32, 32, page_size)
    held = allocator.alloc(16)
    reads = []
    to_host = lengths.to_host
    monkeypatch.setattr(lengths, "to_host", lambda values: reads.append(values) or to_host(values))
    with Waits() as waits:
        allocator.free_swa(held[:8])
        assert len(reads) == 1
        allocator.free(held)
    assert (len(reads), waits.found) == (2, [])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (32, 32)


def test_slots_of_any_type_and_shape_translate_to_int64(make):
    allocator = make.swa(12, 12, 3)
    allocator.swa.alloc(3)
    allocator.alloc(6)
    found = allocator.translate(torch.tensor([[3, 5, -1], [8, 0, 11]], dtype=torch.int32))
    assert (found.tolist(), found.dtype) == ([[6, 8, -1], [11, 0, 0]], torch.int64)
