"""Calls that contradict themselves take nothing; calls that free nothing change nothing."""

import re
import threading

import pytest
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")

from kvdock.allocators import SortedAllocator  # noqa: E402


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


def extend(allocator, prefix, seq, last):
    return allocator.alloc_extend(
        torch.tensor(prefix), prefix, torch.tensor(seq), seq, slots(*last), sum(seq) - sum(prefix)
    )


def decode(allocator, seq, last):
    return allocator.alloc_decode(torch.tensor(seq), seq, slots(*last))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("kind", ["single", "swa"])
def test_a_call_whose_arguments_disagree_in_number_takes_nothing(make, kind, page_size, debug):
    room = 64 * page_size
    allocator = (
        make.single(room, page_size, debug=debug) if kind == "single" else make.swa(room, room, page_size, debug=debug)
    )
    two = slots(20, 20)
    wrong = {
        "last_loc has shape [3]": lambda: allocator.alloc_extend(
            slots(0, 0), [0, 0], two, [20, 20], slots(-1, -1, -1), 40
        ),
        "last_loc has shape [1]": lambda: allocator.alloc_extend(slots(0, 0), [0, 0], two, [20, 20], slots(-1), 40),
        "last_loc has shape [1, 2]": lambda: allocator.alloc_extend(
            slots(0, 0), [0, 0], two, [20, 20], slots(-1, -1).view(1, 2), 40
        ),
        "prefix_lens has shape [1]": lambda: allocator.alloc_extend(slots(0), [0, 0], two, [20, 20], slots(-1, -1), 40),
        "seq_lens has shape [1]": lambda: allocator.alloc_decode(slots(17), [17, 17], slots(31, 31)),
        "last_loc has shape [1], but seq_lens_cpu holds 2": lambda: allocator.alloc_decode(
            slots(17, 17), [17, 17], slots(31)
        ),
        "owners names 1 requests, but seq_lens_cpu holds 2": lambda: allocator.alloc_extend(
            slots(0, 0), [0, 0], two, [20, 20], slots(-1, -1), 40, owners=["x"]
        ),
        "holds [2.5], which are no whole numbers": lambda: allocator.alloc_decode(slots(2), [2.5], slots(1)),
    }
    for message, call in wrong.items():
        with pytest.raises(SlotError, match=re.escape(message)):
            call()
        assert allocator.available_size() == room
    allocator.check(held=slots())


@pytest.mark.parametrize("kind", ["single", "swa"])
def test_debug_compares_device_lengths_with_the_hosts_and_last_slots_with_what_is_live(make, kind):
    allocator = make.single(64, 16, debug=True) if kind == "single" else make.swa(64, 64, 16, debug=True)
    held = extend(allocator, [0], [5], [-1]).clone()
    assert held.tolist() == [16, 17, 18, 19, 20]
    for message, call in {
        "prefix_lens holds [5] on the device, but the host says [0]": lambda: allocator.alloc_extend(
            slots(5), [0], slots(20), [20], slots(-1), 20
        ),
        "seq_lens holds [7] on the device, but the host says [6]": lambda: allocator.alloc_decode(
            slots(7), [6], slots(20)
        ),
        "from -16 were never handed out but are continued as last_loc": lambda: extend(allocator, [5], [20], [-1]),
        "from 32 were never handed out but are continued as last_loc": lambda: decode(allocator, [6], [36]),
        "last_loc 19 does not have the place in its page of 16": lambda: decode(allocator, [6], [19]),
    }.items():
        with pytest.raises(SlotError, match=re.escape(message)):
            call()
        assert allocator.available_size() == 48
    assert decode(allocator, [6], [20]).tolist() == [21]
    allocator.check(held=held)


def test_an_extend_whose_kernel_fails_takes_nothing(make):
    allocator = make.single(64, 16)
    with pytest.raises(SlotError, match="lengths on the device ask for 1 pages, but those of the host for 2"):
        # The host says 20 tokens from nothing, the device 15 after a prefix: the slots do not add up.
        allocator.alloc_extend(slots(5), [0], slots(20), [20], slots(-1), 20)
    assert allocator.available_size() == 64
    allocator.check(held=slots())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["single", "swa"])
def test_freeing_nothing_leaves_a_state_that_can_be_restored(make, kind, page_size):
    room = 4 * page_size
    allocator = make.single(room, page_size) if kind == "single" else make.swa(room, room, page_size)
    held = allocator.alloc(page_size)
    state = allocator.backup_state()
    table = torch.zeros(2, room, dtype=torch.int32)
    allocator.free(slots())
    allocator.free_pages(slots())
    allocator.free_rows(table, [1], [0], [0])
    allocator.free_group_begin()
    allocator.free(slots())
    allocator.free_group_end()
    if kind == "swa":
        allocator.free_swa(slots())
        allocator.free_swa_rows(table, [1], [0], [0])
    allocator.alloc(2 * page_size)
    allocator.restore_state(state)
    assert allocator.available_size() == 3 * page_size
    allocator.check(held=held)


def test_debug_refuses_to_be_read_from_another_thread(make):
    allocator = make.single(8, 2, debug=True)
    allocator.alloc(2)
    for read in (allocator.available_size, allocator.check):
        errors = []

        def call(read=read, errors=errors):
            with pytest.raises(SlotError, match="nothing locks") as error:
                read()
            errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(errors) == 1


def made(make, kind, page_size, debug):
    room = 8 * page_size
    if kind == "swa":
        return make.swa(room, room, page_size, debug=debug)
    return {"single": make.single, "pure": make.pure}[kind](room, page_size, debug=debug)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["single", "swa", "pure"])
def test_only_tensors_of_whole_numbers_are_freed(make, kind, page_size, debug):
    allocator = made(make, kind, page_size, debug)
    held = allocator.alloc(4 * page_size)
    pages = held[::page_size] // page_size
    calls = [(allocator.free, held), (allocator.free_pages, pages)]
    if kind != "single":
        calls += [(allocator.free_swa, held), (allocator.free_swa_pages, pages)]
    for call, given in calls:
        for wrong, found in (
            (given.tolist(), "a list"),
            (given.numpy(), "a ndarray"),
            (given.float(), "of type torch.f"),
        ):
            with pytest.raises(SlotError, match=f"(slots|pages) is {found}.*; give a tensor of int64 or int32"):
                call(wrong)
        call(torch.tensor([]))  # of no number any type will do
    assert allocator.available_size() == 4 * page_size
    allocator.check(held)
    allocator.free(held.int())
    allocator.check(slots())


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("kind", ["single", "swa", "pure"])
def test_lengths_on_the_device_are_tensors_of_whole_numbers(make, kind, debug):
    allocator = made(make, kind, 4, debug)
    none, five, last = slots(0), slots(5), slots(-1)
    for found, call in {
        "prefix_lens is a list": lambda: allocator.alloc_extend([0], [0], five, [5], last, 5),
        "seq_lens is of type torch.float32": lambda: allocator.alloc_extend(none, [0], five.float(), [5], last, 5),
        "last_loc is a list": lambda: allocator.alloc_extend(none, [0], five, [5], [-1], 5),
        "seq_lens is a ndarray": lambda: allocator.alloc_decode(five.numpy(), [5], last),
        "last_loc is of type torch.float64": lambda: allocator.alloc_decode(five, [5], last.double()),
    }.items():
        with pytest.raises(SlotError, match=f"{found}; give a tensor of int64 or int32"):
            call()
        assert allocator.available_size() == 32
    allocator.check(slots())


@pytest.mark.parametrize("kind", ["single", "swa"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_no_number_of_pages_wraps(make, kind, page_size):
    allocator = made(make, kind, page_size, False)
    most = 2**40
    assert allocator.pages_needed([0] * 4, [most] * 4) == 4 * most // page_size
    for lens in ([2**62] * 4, [2**63 - 1], [most + 1]):
        with pytest.raises(SlotError, match=rf"request 0 of the batch has {lens[0]} tokens; none has more than {most}"):
            allocator.pages_needed([0] * len(lens), lens)
    for lens in ([2**63], [2**64], [2**80]):
        with pytest.raises(SlotError, match=r"seq_lens holds .*, which are no whole numbers"):
            allocator.pages_needed([0], lens)
    for prefix, seq in (([-1], [1]), ([2], [1]), ([-2], [-1])):
        with pytest.raises(SlotError, match="a prefix is at least 0 and at most the sequence"):
            allocator.pages_needed(prefix, seq)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("kind", ["single", "swa", "pure"])
def test_what_is_held_is_named_by_slot_or_page_and_once(make, kind, debug):
    allocator = made(make, kind, 4, debug)
    held = allocator.alloc(16)
    for known in (held, held[::4], held[3::4], held[:13], held.flip(0), held.int(), held.view(2, 8)):
        allocator.check(known)
    for wrong, message in (
        (held.float(), "held is of type torch.float32; give a tensor of int64 or int32"),
        (held.tolist(), "held is a list; give a tensor"),
        (torch.cat((held, held[:2])), "held names slots 4, 5 more than once; give each slot once"),
        (torch.cat((held, slots(1))), "held names slots 1, which are padding or do not exist; there are 4 … 35"),
        (torch.cat((held, slots(36))), "held names slots 36, which are padding or do not exist"),
        (torch.cat((held, slots(-1))), "held names slots -1, which are padding or do not exist"),
        (torch.cat((held, slots(20))), "are held but free"),
        (held[4:], "are live but held by nobody"),
    ):
        with pytest.raises(SlotError, match=message):
            allocator.check(wrong)


def all_of(make, debug=False):
    """Return one allocator of each class with pages of 4 tokens, and those of one token."""
    found = {name: made(make, name, 4, debug) for name in ("single", "swa", "pure")}
    found["sorted"] = make.single(32, 4, debug=debug, cls=SortedAllocator)
    found["token"] = make.single(32, debug=debug)
    found["sorted token"] = make.single(32, debug=debug, cls=SortedAllocator)
    return found


def sizes_of(allocator):
    """Return the size and the free slots, both ints."""
    free = allocator.available_size()
    assert type(free) is type(allocator.size) is int
    return allocator.size, free


@pytest.mark.parametrize("size", [16.0, torch.tensor(16.0), "16", None, [16], torch.tensor([16]), True, float("nan")])
def test_a_size_is_one_whole_number(make, size):
    for allocator in all_of(make).values():
        space = getattr(allocator, "space", "full")
        before = sizes_of(allocator)
        with pytest.raises(SlotError, match=f"the size of '{space}' (holds .* no whole numbers|is .*; give one whole)"):
            allocator.resize({space: size})
        with pytest.raises(SlotError, match="is no mapping from spaces to slots"):
            allocator.resize(size)
        with pytest.raises(SlotError, match="resize names"):
            allocator.resize({space: 16, None: 4, "zz": 4})
        assert sizes_of(allocator) == before
        allocator.resize({space: torch.tensor(16)})
        assert allocator.size == 16
        assert sizes_of(allocator)[0] == 16


@pytest.mark.parametrize("debug", [False, True])
def test_an_open_group_is_not_dropped_by_a_resize(make, debug):
    for allocator in all_of(make, debug).values():
        held, before = allocator.alloc(8), sizes_of(allocator)
        allocator.free_group_begin()
        allocator.free(held)
        with pytest.raises(SlotError, match="a free group is open; end it before a resize"):
            allocator.resize({})
        allocator.free_group_end()
        assert sizes_of(allocator) == (before[0], before[1] + 8)
        allocator.check(slots())
        allocator.resize({})


@pytest.mark.parametrize("count", [5.0, torch.tensor(5.0), "5", None, [5], torch.tensor([5])])
def test_a_number_of_new_tokens_is_one_whole_number(make, count):
    for allocator in all_of(make).values():
        before = sizes_of(allocator)
        with pytest.raises(SlotError, match=r"extend_num_tokens (holds .* no whole numbers|is .*; give one whole)"):
            allocator.alloc_extend(slots(0), [0], slots(5), [5], slots(-1), count)
        assert sizes_of(allocator) == before


def test_a_number_of_new_tokens_that_is_a_tensor_counts_as_one(make):
    for allocator in all_of(make).values():
        before, state = sizes_of(allocator), allocator.backup_state()
        found = allocator.alloc_extend(slots(0), [0], slots(8), [8], slots(-1), torch.tensor(8))
        assert found.tolist() == list(range(allocator.page_size, allocator.page_size + 8))
        assert sizes_of(allocator) == (before[0], before[1] - 8)
        allocator.restore_state(state)
        assert sizes_of(allocator) == before


@pytest.mark.parametrize("length", [0, -1, -(2**63), 1 - 2**63, 2**40 + 1, 2**63 - 1])
def test_a_decode_of_no_length_that_can_be_takes_nothing(make, length):
    for allocator in all_of(make).values():
        before = sizes_of(allocator)
        message = f"at least 1, not {length}" if length < 1 else f"has {length} tokens; none"
        with pytest.raises(SlotError, match=message):
            allocator.alloc_decode(slots(3, length), [3, length], slots(5, -1))
        assert sizes_of(allocator) == before


@pytest.mark.parametrize("debug", [False, True])
def test_pages_come_in_one_dimension(make, debug):
    for allocator in all_of(make, debug).values():
        held = allocator.alloc(8)
        before = sizes_of(allocator)
        calls = [allocator.free_pages, allocator.verify_pages]
        calls += [allocator.free_swa_pages] if hasattr(allocator, "free_swa_pages") else []
        for call in calls:
            for pages in (slots(1, 2).view(1, 2), torch.tensor(1)):
                with pytest.raises(SlotError, match=re.escape(f"pages has the shape {list(pages.shape)}")):
                    call(pages)
        with pytest.raises(SlotError, match="slots is a list"):
            allocator.free(held.tolist())
        assert sizes_of(allocator) == before
        allocator.check(held)


@pytest.mark.parametrize("table", [torch.ones(2, 16), torch.ones(16, dtype=torch.int32)])
def test_rows_are_freed_from_a_table_of_whole_numbers(make, table):
    for allocator in all_of(make).values():
        held = allocator.alloc(8)
        calls = [allocator.free_rows, *([allocator.free_swa_rows] if hasattr(allocator, "free_swa_rows") else [])]
        for call in calls:
            with pytest.raises(SlotError, match=r"table is of type torch.float32|the table has the shape \[16\]"):
                call(table, [0], [0], [4])
        allocator.check(held)


@pytest.mark.parametrize("pages", [1.5, "2", None, [2]])
def test_a_number_of_pages_is_one_whole_number(make, pages):
    for allocator in all_of(make).values():
        before = sizes_of(allocator)
        for call in (allocator.shortfall, allocator.alloc_pages):
            with pytest.raises(SlotError, match=r"(pages|count) (holds .* no whole numbers|is \[2\]; give one whole)"):
                call(pages)
        assert sizes_of(allocator) == before


def test_a_state_of_one_part_is_no_state_of_the_whole(make):
    allocator = make.swa(32, 32, 4)
    state = allocator.backup_state()
    allocator.alloc(8)
    with pytest.raises(SlotError, match="this state was not made by this allocator"):
        allocator.restore_state(state.mark)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (24, 24)
    allocator.restore_state(state)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (32, 32)


@pytest.mark.parametrize("call", ["free_group_end", "restore_state"])
def test_another_thread_leaves_a_group_and_a_state_as_they_are(make, call):
    allocator = make.swa(32, 32, 4, debug=True)
    held = allocator.alloc(8)
    if call == "free_group_end":
        allocator.free_group_begin()
        allocator.free(held)
    given = [allocator.backup_state()] if call == "restore_state" else []
    more = allocator.alloc(4)
    refused = []

    def from_another_thread():
        try:
            getattr(allocator, call)(*given)
        except SlotError as error:
            refused.append(str(error))

    thread = threading.Thread(target=from_another_thread)
    thread.start()
    thread.join()
    assert "nothing locks" in refused[0]
    allocator.check(torch.cat((held, more)))
    getattr(allocator, call)(*given)
    allocator.check(more if call == "free_group_end" else held)


def test_any_thread_may_ask_how_many_pages_lengths_need(make):
    """It reads nothing of the allocator."""
    allocator = make.single(32, 4, debug=True)
    allocator.alloc(4)
    found = []
    thread = threading.Thread(target=lambda: found.append(allocator.pages_needed([0], [9])))
    thread.start()
    thread.join()
    assert found == [3]
