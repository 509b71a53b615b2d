"""Token and paged allocators: what each promise means, by hand-computed values."""

import threading

import pytest
from kvdock.errors import BuildError, PlanError, SlotError
from kvdock.layout import SizeRule, Space

torch = pytest.importorskip("torch")

from kvdock.allocators import PagedAllocator, Shortfall, TokenAllocator  # noqa: E402


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


def extend(allocator, prefix, seq, last, total=None):
    total = sum(seq) - sum(prefix) if total is None else total
    return allocator.alloc_extend(
        torch.tensor(prefix), prefix, torch.tensor(seq), seq, torch.tensor(last, dtype=torch.int64), total
    )


def decode(allocator, seq, last):
    return allocator.alloc_decode(torch.tensor(seq), seq, torch.tensor(last, dtype=torch.int64))


def test_tokens_come_in_order_from_slot_one(make):
    assert make.single(8).alloc(3).tolist() == [1, 2, 3]


def test_pages_come_whole_and_start_after_the_padding_page(make):
    assert make.single(16, 4).alloc(8).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_alloc_of_nothing_is_an_empty_tensor(make):
    for allocator in (make.single(8), make.single(8, 4)):
        got = allocator.alloc(0)
        assert (got.shape, got.dtype, allocator.available_size()) == ((0,), torch.int64, 8)


def test_a_request_that_does_not_fit_gets_none_and_changes_nothing(make):
    allocator = make.single(8, 4)
    allocator.alloc(4)
    assert allocator.alloc(8) is None
    assert allocator.available_size() == 4
    assert allocator.alloc(4).tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("need", [5, -4, -1])
def test_alloc_takes_whole_pages_only(make, need):
    allocator = make.single(16, 4)
    with pytest.raises(SlotError, match=f"alloc\\({need}\\) is no whole number of pages of 4 slots"):
        allocator.alloc(need)
    assert allocator.available_size() == 16


def test_a_token_allocator_refuses_negative_sizes(make):
    with pytest.raises(SlotError, match=r"alloc\(-1\)"):
        make.single(4).alloc(-1)


def test_a_freed_token_comes_back_last(make):
    allocator = make.single(4)
    held = allocator.alloc(3)
    allocator.free(held[1:2])
    assert allocator.available_size() == 2
    assert allocator.alloc(2).tolist() == [4, 2]


def test_any_token_frees_its_whole_page_once(make):
    """A-08: page 3, alloc(3), free(t[2:3]): the page is free as a whole."""
    allocator = make.single(9, 3)
    held = allocator.alloc(3)
    assert allocator.available_size() == 6
    allocator.free(held[2:3])
    assert allocator.available_size() == 9
    allocator.check(held=slots())


def test_several_tokens_of_a_page_free_it_once(make):
    allocator = make.single(12, 4)
    held = allocator.alloc(12)
    allocator.free(held[2:7].flip(0))
    assert allocator.available_size() == 8
    allocator.check(held=held[8:])


def test_pages_can_be_freed_by_number(make):
    """A-08: the page-granular free beside `free`."""
    allocator = make.single(12, 4)
    held = allocator.alloc(12)
    allocator.free_pages(slots(3, 1))
    assert allocator.available_size() == 8
    allocator.check(held=held[4:8])


def test_int32_indices_are_accepted(make):
    for page_size in (1, 4):
        allocator = make.single(16, page_size)
        allocator.free(allocator.alloc(8).to(torch.int32))
        assert allocator.available_size() == 16


def test_rows_are_freed_by_column_ranges(make):
    allocator = make.single(40, 4)
    table = torch.zeros(4, 16, dtype=torch.int32)
    held = allocator.alloc(28)
    table[1, :12], table[3, :16] = held[:12], held[12:]
    allocator.free_rows(table, [1, 3], [4, 0], [10, 9])
    assert allocator.available_size() == 12 + 8 + 12
    allocator.check(held=torch.cat([held[:4], held[24:]]))


def test_one_row_is_freed_up_to_the_last_column(make):
    allocator = make.single(12, 3)
    table = torch.zeros(2, 10, dtype=torch.int32)
    held = allocator.alloc(12)
    table[1] = held[:10]
    allocator.free_rows(table, [1], [3], [10])
    allocator.check(held=held[:3])


def test_token_rows_are_freed_slot_by_slot(make):
    allocator = make.single(10)
    table = torch.zeros(3, 6, dtype=torch.int32)
    held = allocator.alloc(10)
    table[1, :6], table[2, :4] = held[:6], held[6:]
    allocator.free_rows(table, [1, 2, 2], [2, 0, 4], [5, 3, 4])
    allocator.check(held=slots(1, 2, 6, 10))


@pytest.mark.parametrize(
    ("rows", "starts", "ends"),
    [([4], [0], [4]), ([-1], [0], [4]), ([1], [-1], [4]), ([1], [0], [17]), ([1], [5], [4]), ([1, 2], [0], [4])],
)
def test_rows_outside_the_table_are_refused(make, rows, starts, ends):
    allocator = make.single(16, 4)
    allocator.alloc(16)
    with pytest.raises(SlotError, match=r"table of 4 rows and 16 columns|one of each"):
        allocator.free_rows(torch.zeros(4, 16, dtype=torch.int32), rows, starts, ends)
    assert allocator.available_size() == 0


def test_an_extend_fills_the_last_page_first(make):
    allocator = make.single(64, 4)
    first = extend(allocator, [0], [6], [-1])
    assert first.tolist() == [4, 5, 6, 7, 8, 9]
    assert extend(allocator, [6], [13], [9]).tolist() == [10, 11, 12, 13, 14, 15, 16]


def test_extends_of_a_batch_follow_each_other(make):
    """A-09: page 128; (prefix 10, seq 50), (0, 0), (128, 128), (127, 300) with exactly the pages needed."""
    allocator = make.single(128 * 5, 128)
    assert extend(allocator, [0, 0, 0], [10, 128, 127], [-1, -1, -1]).numel() == 265
    assert allocator.available_size() == 256
    got = extend(allocator, [10, 0, 128, 127], [50, 0, 128, 300], [128 + 9, -1, 256 + 127, 384 + 126])
    want = [*range(138, 178), 511, *range(512, 640), *range(640, 684)]
    assert got.tolist() == want
    assert (got.dtype, allocator.available_size()) == (torch.int64, 0)


def test_an_extend_of_nothing_is_empty(make):
    """A-09: zero-length extends, also with an empty free list."""
    for page_size in (1, 4):
        allocator = make.single(8, page_size)
        allocator.alloc(8)
        assert extend(allocator, [], [], []).shape == (0,)
        assert extend(allocator, [0, 8], [0, 8], [-1, 11]).shape == (0,)


def test_an_extend_that_does_not_fit_changes_nothing(make):
    allocator = make.single(16, 4)
    assert extend(allocator, [0, 0], [9, 5], [-1, -1]) is None
    assert allocator.available_size() == 16


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_extend_with_contradicting_counts_is_refused(make, page_size):
    allocator = make.single(16, page_size)
    with pytest.raises(SlotError, match="extend_num_tokens=5, but seq_lens_cpu - prefix_lens_cpu add up to 6"):
        extend(allocator, [0], [6], [-1], total=5)
    with pytest.raises(SlotError, match="request 1 of the batch grows from 7 to 6 tokens"):
        extend(allocator, [0, 7], [6, 6], [-1, 9])
    with pytest.raises(SlotError, match="1 prefix lengths but 2 sequence lengths"):
        allocator.alloc_extend(slots(0), [0], slots(2, 2), [2, 2], slots(-1), 4)
    with pytest.raises(SlotError, match=r"prefix_lens has shape \[2\], but seq_lens_cpu holds 1 requests"):
        allocator.alloc_extend(slots(0, 0), [0], slots(2, 2), [2], slots(-1, -1), 2)
    assert allocator.available_size() == 16


@pytest.mark.parametrize("page_size", [1, 4])
def test_host_lengths_may_be_cpu_tensors_but_not_elsewhere(make, page_size):
    allocator = make.single(16, page_size)
    lens = torch.tensor([3, 2], dtype=torch.int32)
    assert allocator.alloc_extend(lens * 0, lens * 0, lens, lens, lens * 0 - 1, 5).shape == (5,)
    with pytest.raises(SlotError, match="seq_lens_cpu is on meta; give the lengths that the host has"):
        allocator.alloc_decode(lens, lens.to("meta"), lens)


def test_a_decode_takes_a_page_exactly_at_a_page_bound(make):
    allocator = make.single(16, 4)
    extend(allocator, [0, 0], [4, 2], [-1, -1])
    assert decode(allocator, [5, 3], [7, 9]).tolist() == [12, 10]
    assert allocator.available_size() == 4
    assert decode(allocator, [6, 4], [12, 10]).tolist() == [13, 11]
    assert allocator.available_size() == 4


def test_a_decode_without_new_pages_works_on_a_full_pool(make):
    """A-09: the vectorised form must not index an empty free list."""
    allocator = make.single(8, 4)
    extend(allocator, [0, 0], [3, 2], [-1, -1])
    assert allocator.available_size() == 0
    assert decode(allocator, [4, 3], [6, 9]).tolist() == [7, 10]
    assert decode(allocator, [5, 4], [7, 10]) is None


def test_a_decode_of_the_first_token_starts_a_page(make):
    assert decode(make.single(8, 4), [1], [-1]).tolist() == [4]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_decode_counts_the_new_token(make, page_size):
    with pytest.raises(SlotError, match="count the new token, so they are at least 1, not 0"):
        decode(make.single(8, page_size), [3, 0], [4, -1])


def test_tiny_requests_need_a_page_each(make):
    """A-07: page 128, one free page, two requests of 2 tokens: 2 pages needed, the second is refused."""
    allocator = make.single(128, 128)
    assert allocator.pages_needed([0, 0], [2, 2]) == 2
    assert allocator.pages_needed([0], [2]) * 128 <= allocator.available_size()
    assert allocator.shortfall(2) == (Shortfall(space="full", needed=256, available=128),)
    assert allocator.shortfall(2)[0].missing == 128
    assert allocator.shortfall(1) == ()


def test_pages_needed_counts_from_the_prefix(make):
    assert make.single(64, 4).pages_needed([0, 3, 4, 5], [0, 4, 5, 13]) == 0 + 0 + 1 + 2


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_padding_is_never_handed_out(make, page_size):
    """A-12: alloc(all), clear, restore and again: page 0 never appears, and size counts usable slots only."""
    allocator = make.single(6 * page_size, page_size)
    want = list(range(page_size, 7 * page_size))
    state = allocator.backup_state()
    for reset in (lambda: allocator.restore_state(state), allocator.clear, allocator.clear):
        assert allocator.available_size() == allocator.size == 6 * page_size
        assert sorted(allocator.alloc(allocator.size).tolist()) == want
        assert allocator.alloc(page_size) is None
        reset()


@pytest.mark.parametrize("page_size", [1, 2])
def test_returned_slots_share_no_storage(make, page_size):
    """A-19: a kept result never changes, and changing a result never changes the allocator."""
    allocator = make.single(8, page_size)
    kept, other = allocator.alloc(2), allocator.alloc(2)
    before = kept.tolist()
    allocator.free(other)
    allocator.alloc(4)
    assert kept.tolist() == before
    kept.fill_(77)
    allocator.clear()
    assert sorted(allocator.alloc(8).tolist()) == list(range(page_size, 8 + page_size))


def test_what_is_freed_is_copied(make):
    for grouped in (False, True):
        allocator = make.single(4)
        held = allocator.alloc(4)
        if grouped:
            allocator.free_group_begin()
        allocator.free(held)
        held.fill_(9)
        if grouped:
            allocator.free_group_end()
        allocator.check(held=slots())


@pytest.mark.parametrize("page_size", [1, 4])
def test_available_size_never_exceeds_the_capacity(make, page_size):
    """A-01, A-11 without checks: more frees than live pages raise, and nothing changes."""
    allocator = make.single(8 * page_size, page_size)
    held = allocator.alloc(4 * page_size)
    allocator.free(held)
    with pytest.raises(SlotError, match="4 pages are freed but only 0 are handed out; nothing was freed"):
        allocator.free(held)
    assert allocator.available_size() == 8 * page_size
    allocator.alloc(2 * page_size)
    with pytest.raises(SlotError, match="3 pages are freed but only 2"):
        allocator.free_pages(slots(1, 1, 2))
    assert allocator.available_size() == 6 * page_size


@pytest.mark.parametrize(("page_size", "named"), [(1, "slots 1, 2, 3, 4"), (4, "pages of 4 slots from 4, 8, 12, 16")])
def test_debug_names_slots_freed_twice(make, page_size, named):
    """A-01: size 8; a = alloc(4); free(a); free(a) raises at the second free, for every page size."""
    allocator = make.single(8 * page_size, page_size, debug=True)
    held = allocator.alloc(4 * page_size, owner="request-7")
    allocator.free(held)
    with pytest.raises(SlotError, match=rf"space 'full': {named} \(owner 'request-7'\) are freed twice"):
        allocator.free(held)
    got = [allocator.alloc(4 * page_size) for _ in range(3)]
    assert got[2] is None
    assert len({*got[0].tolist(), *got[1].tolist()}) == 8 * page_size


def test_debug_names_duplicates_inside_one_call(make):
    """A-11: free([1, 1, 2]) after alloc of 1, 2."""
    allocator = make.single(8, debug=True)
    allocator.alloc(3)
    with pytest.raises(SlotError, match="slots 1 appear twice in one call"):
        allocator.free(slots(1, 1, 2))
    assert allocator.available_size() == 5
    paged = make.single(16, 4, debug=True)
    paged.alloc(12)
    with pytest.raises(SlotError, match="slots 5 appear twice in one call"):
        paged.free(slots(4, 5, 5))
    with pytest.raises(SlotError, match="pages of 4 slots from 8 appear twice in one call"):
        paged.free_pages(slots(2, 1, 2))
    assert paged.available_size() == 4


@pytest.mark.parametrize("index", [0, 3, 7, 9, -1])
def test_debug_names_slots_never_handed_out(make, index):
    """A-12: padding is nobody's to free."""
    allocator = make.single(8, debug=True)
    allocator.alloc(2)
    with pytest.raises(SlotError, match=f"slots {index} were never handed out but are freed"):
        allocator.free(slots(index))
    assert allocator.available_size() == 6


def test_debug_names_the_request_of_an_extend(make):
    allocator = make.single(32, 4, debug=True)
    got = allocator.alloc_extend(slots(0, 0), [0, 0], slots(4, 5), [4, 5], slots(-1, -1), 9, owners=["first", "second"])
    allocator.alloc_decode(slots(5), [5], slots(7), owners=["third"])
    allocator.free(torch.cat([got, slots(16)]))
    with pytest.raises(SlotError, match="owner 'second'"):
        allocator.free(got[8:])
    with pytest.raises(SlotError, match="owner 'third'"):
        allocator.free_pages(slots(4))


@pytest.mark.parametrize("page_size", [1, 4])
def test_debug_refuses_writes_through_freed_slots(make, page_size):
    allocator = make.single(4 * page_size, page_size, debug=True)
    held = allocator.alloc(2 * page_size, owner="r")
    allocator.verify_live(torch.cat([held, slots(0)]))
    allocator.free_pages(slots(2))
    with pytest.raises(SlotError, match=r"\(owner 'r'\) were freed but are written"):
        allocator.verify_live(held)
    with pytest.raises(SlotError, match="were never handed out but are written"):
        allocator.verify_live(slots(4 * page_size))
    make.single(4 * page_size, page_size).verify_live(held)


def test_debug_refuses_another_thread(make):
    allocator = make.single(8, debug=True)
    allocator.alloc(1)
    caught = []

    def call():
        try:
            allocator.alloc(1)
        except SlotError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call, name="other")
    thread.start()
    thread.join()
    assert "called from thread" in caught[0] and "(other)" in caught[0]
    assert allocator.available_size() == 7


def test_debug_follows_restore_and_clear(make):
    allocator = make.single(8, 2, debug=True)
    kept = allocator.alloc(2)
    state = allocator.backup_state()
    lost = allocator.alloc(4)
    allocator.restore_state(state)
    with pytest.raises(SlotError, match="are freed twice"):
        allocator.free(lost[:1])
    allocator.check(held=kept)
    allocator.clear()
    with pytest.raises(SlotError, match="never handed out"):
        allocator.free(kept)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_free_group_gives_back_at_its_end(make, page_size, debug):
    allocator = make.single(8 * page_size, page_size, debug=debug)
    held = allocator.alloc(6 * page_size)
    allocator.free_group_begin()
    allocator.free(held[: 2 * page_size])
    allocator.free_pages(slots(4))
    assert allocator.available_size() == 2 * page_size
    allocator.free_group_end()
    assert allocator.available_size() == 5 * page_size
    allocator.check(held=torch.cat([held[2 * page_size : 3 * page_size], held[4 * page_size :]]))


@pytest.mark.parametrize("debug", [False, True])
def test_token_frees_of_one_group_may_name_one_page(make, debug):
    allocator = make.single(16, 4, debug=debug)
    held = allocator.alloc(12)
    allocator.free_group_begin()
    allocator.free(held[:6])
    allocator.free(held[6:8])
    allocator.free_group_end()
    allocator.check(held=held[8:])


def test_debug_finds_slots_freed_twice_in_a_group(make):
    allocator = make.single(16, 4, debug=True)
    held = allocator.alloc(12)
    allocator.free_group_begin()
    allocator.free(held[:2])
    with pytest.raises(SlotError, match="slots 5 are freed twice in one free group"):
        allocator.free(held[1:3])
    with pytest.raises(SlotError, match="from 4 are freed twice in one free group"):
        allocator.free_pages(slots(1))
    allocator.free_pages(slots(2))
    with pytest.raises(SlotError, match="slots 8 are freed twice in one free group"):
        allocator.free(held[4:5])
    allocator.free_group_end()
    allocator.check(held=held[8:])


@pytest.mark.parametrize("page_size", [1, 4])
def test_debug_lets_a_later_group_free_the_same_slots(make, page_size):
    allocator = make.single(2 * page_size, page_size, debug=True)
    for _ in range(3):
        held = allocator.alloc(2 * page_size)
        allocator.free_group_begin()
        allocator.free(held)
        allocator.free_group_end()
    assert allocator.available_size() == 2 * page_size


def test_a_group_that_holds_more_than_is_live_frees_nothing(make):
    allocator = make.single(16, 4)
    held = allocator.alloc(4)
    allocator.free_group_begin()
    allocator.free_pages(slots(1))
    with pytest.raises(SlotError, match="2 pages are freed but only 1"):
        allocator.free_pages(slots(2))
    allocator.free(slots(8, 12))
    with pytest.raises(SlotError, match="3 pages are freed but only 1"):
        allocator.free_group_end()
    assert allocator.available_size() == 12
    allocator.check(held=held)
    allocator.free(held)
    assert allocator.available_size() == 16


def test_groups_do_not_nest(make):
    allocator = make.single(4)
    with pytest.raises(SlotError, match="no free group is open"):
        allocator.free_group_end()
    allocator.free_group_begin()
    with pytest.raises(SlotError, match="open already"):
        allocator.free_group_begin()
    allocator.free_group_end()
    assert allocator.available_size() == 4


@pytest.mark.parametrize("page_size", [1, 4])
def test_restore_takes_back_what_was_handed_out(make, page_size):
    allocator = make.single(8 * page_size, page_size)
    kept = allocator.alloc(2 * page_size)
    state = allocator.backup_state()
    tried = allocator.alloc(3 * page_size)
    allocator.restore_state(state)
    allocator.check(held=kept)
    assert allocator.alloc(3 * page_size).tolist() == tried.tolist()


def test_restore_after_a_free_is_refused(make):
    allocator = make.single(8)
    held = allocator.alloc(2)
    state = allocator.backup_state()
    allocator.free(held[:1])
    with pytest.raises(SlotError, match="slots were freed after this state was made"):
        allocator.restore_state(state)
    with pytest.raises(SlotError, match="not made by this allocator"):
        allocator.restore_state(make.single(8).backup_state())
    allocator.check(held=held[1:])


@pytest.mark.parametrize("page_size", [1, 4])
def test_restore_after_a_queued_free_is_refused(make, page_size):
    allocator = make.single(8 * page_size, page_size)
    held = allocator.alloc(2 * page_size)
    state = allocator.backup_state()
    allocator.free_group_begin()
    allocator.free(held)
    with pytest.raises(SlotError, match="slots were freed after this state was made"):
        allocator.restore_state(state)
    allocator.free_group_end()
    assert allocator.available_size() == 8 * page_size


def test_clear_drops_an_open_group(make):
    allocator = make.single(4)
    allocator.free_group_begin()
    allocator.free(allocator.alloc(2))
    allocator.clear()
    allocator.free_group_begin()
    allocator.free_group_end()
    assert allocator.available_size() == 4


def test_resize_shrinks_and_grows_within_what_was_allocated(make):
    allocator = make.single(16, 4)
    allocator.resize({"full": 8})
    assert (allocator.size, allocator.available_size()) == (8, 8)
    assert allocator.alloc(8).tolist() == list(range(4, 12))
    assert allocator.alloc(4) is None
    allocator.clear()
    allocator.resize({"full": 16})
    assert allocator.alloc(16).tolist() == list(range(4, 20))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"full": 20}, "size 20"), ({"full": 6}, "size 6"), ({"full": 0}, "size 0"), ({"swa": 8}, r"names \['swa'\]")],
)
def test_resize_beyond_the_buffers_is_refused(make, sizes, message):
    allocator = make.single(16, 4)
    with pytest.raises(SlotError, match=message):
        allocator.resize(sizes)
    assert allocator.size == 16


def test_resize_needs_an_empty_allocator(make):
    allocator = make.single(16, 4)
    allocator.alloc(4)
    with pytest.raises(SlotError, match="1 pages are live"):
        allocator.resize({"full": 8})
    assert (allocator.size, allocator.available_size()) == (16, 12)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_size_other_than_the_plans_is_refused(make, page_size):
    """A-17: sizes flow one way; twice the planned pages do not build."""
    with pytest.raises(BuildError, match=r"space 'full': size 32 is not what the plan allocated"):
        make.single(32, page_size, planned={"full": 16})


@pytest.mark.parametrize("debug", [False, True])
def test_check_names_leaked_and_missing_slots(make, debug):
    allocator = make.single(16, 4, debug=debug)
    held = allocator.alloc(8)
    allocator.check(held=held)
    with pytest.raises(SlotError, match=r"1 pages, at slots \[8\], are live but held by nobody \(leaked\)"):
        allocator.check(held=held[:4])
    with pytest.raises(SlotError, match=r"1 pages, at slots \[16\], are held but free"):
        allocator.check(held=torch.cat([held, slots(16)]))


def test_check_finds_pages_that_are_free_twice(make):
    """A-11 without checks: a duplicate inside one call is found by `check`."""
    allocator = make.single(4)
    allocator.alloc(3)
    allocator.free(slots(1, 1))
    with pytest.raises(SlotError, match=r"at slots \[1\], are free twice"):
        allocator.check()


def test_rings_take_eight_bytes_a_page(make):
    for page_size in (1, 16):
        allocator = make.single(1024 * page_size, page_size)
        fixed = 0 if page_size == 1 else 8 * page_size
        assert allocator.parts.tensors.nbytes == 8 * 1024 + fixed


def test_a_single_allocator_refuses_several_spaces(make):
    spaces = tuple(Space(name=name, rule=SizeRule()) for name in ("full", "swa"))
    with pytest.raises(PlanError, match=r"serves one space, not \['full', 'swa'\]"):
        PagedAllocator.buffers(make.query(spaces, {}))


def test_a_token_allocator_refuses_pages(make):
    space = Space(name="full", rule=SizeRule(), page_size=16)
    with pytest.raises(PlanError, match="page_size 1, but space 'full' has 16"):
        TokenAllocator.buffers(make.query((space,), {}))


def test_a_paged_allocator_serves_pages_of_one_token(make):
    allocator = make.single(8, 1, cls=PagedAllocator)
    held = extend(allocator, [0, 0], [3, 2], [-1, -1])
    assert held.tolist() == [1, 2, 3, 4, 5]
    assert decode(allocator, [4, 3], [3, 5]).tolist() == [6, 7]
    allocator.free(held)
    allocator.check(held=slots(6, 7))
