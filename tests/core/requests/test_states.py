"""State slots: handed out in turn, owned by name, given back once."""

import threading

import pytest
from kvdock.errors import BuildError, SlotError

numpy = pytest.importorskip("numpy")

from kvdock.requests.states import Donated, StateSlots  # noqa: E402


def slots(size, debug=False, room=None):
    return StateSlots("space 'state'", numpy.zeros(room or size, dtype=numpy.int64), size, debug)


def test_padding_is_never_handed_out():
    """A-12: all slots, twice, and after a restore; the size counts usable slots only."""
    states = slots(4)
    for _ in range(2):
        assert states.alloc("abcd") == [1, 2, 3, 4]
        assert states.alloc(["e"]) is None
        states.clear()
    before = states.backup_state()
    states.alloc("abcd")
    states.restore_state(before)
    assert states.alloc("abcd") == [1, 2, 3, 4]


def test_an_alloc_that_does_not_fit_changes_nothing():
    states = slots(3)
    states.alloc(["a"])
    assert states.alloc(["b", "b", "b"]) is None
    assert (states.available_size(), states.live_slots()) == (2, {1: "a"})
    assert states.alloc(["b", "b"]) == [2, 3]
    assert states.alloc([]) == []
    states.check(held=[1, 2, 3])


def test_a_freed_slot_rests_until_the_others_were_used():
    states = slots(3)
    states.alloc("ab")
    states.free([2, 1])
    assert states.alloc("cde") == [3, 2, 1]
    assert [states.owner_of(slot) for slot in (0, 1, 2, 3)] == [None, "e", "d", "c"]
    states.check()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("freed", "message"),
    [
        ([1, 3], r"slots \[3\].* are (freed twice|not handed out but freed)"),
        ([4], r"slots \[4\] are not handed out but freed"),
        ([0], r"slots \[0\] are not handed out but freed"),
        ([1, 2, 1], r"slots \[1\] \(of request 'a'\) appear twice in one call"),
        ([-1], r"slots \[-1\] are not handed out"),
    ],
)
def test_a_free_that_makes_no_sense_changes_nothing(freed, message, debug):
    states = slots(4, debug)
    states.alloc("abc")
    states.free([3])
    with pytest.raises(SlotError, match=message):
        states.free(freed)
    assert states.available_size() == 2
    states.check(held=[1, 2])


def test_debug_names_the_last_owner_of_what_is_freed_twice():
    states = slots(4, debug=True)
    states.alloc(["chat-7", "chat-8"])
    states.free([1, 2])
    with pytest.raises(SlotError, match=r"\[1, 2\] \(of request 'chat-7', of request 'chat-8'\) are freed twice"):
        states.free([1, 2])


def test_what_is_passed_on_has_another_owner():
    states = slots(4)
    states.alloc("ab")
    states.pass_on([2], Donated("b"))
    assert states.live_slots() == {1: "a", 2: Donated("b")}
    with pytest.raises(SlotError, match=r"slots \[3\] are not handed out but passed on"):
        states.pass_on([1, 3], "z")
    assert states.owner_of(1) == "a"


def test_leaks_are_reported_with_slots_and_owners():
    """H-08: the check takes what is held and reports slot ids."""
    states = slots(6)
    states.alloc(["a", "a", "b", "c"])
    states.pass_on([4], Donated("c"))
    states.check(held=[1, 2, 3, 4])
    with pytest.raises(SlotError, match=r"slots \[2, 4\] \(of request 'a', left by request 'c'\) are live but held by"):
        states.check(held=[1, 3])
    with pytest.raises(SlotError, match=r"slots \[5\] are held but free"):
        states.check(held=[1, 2, 3, 4, 5])


def test_a_restore_takes_back_what_was_handed_out_since():
    states = slots(5)
    states.alloc("ab")
    states.free([1])
    state = states.backup_state()
    assert states.alloc("cdef") == [3, 4, 5, 1]
    states.restore_state(state)
    assert (states.available_size(), states.live_slots()) == (4, {2: "b"})
    assert states.alloc("gh") == [3, 4]
    states.check(held=[2, 3, 4])


def test_a_restore_after_a_free_is_refused():
    states = slots(3)
    state = states.backup_state()
    states.alloc("ab")
    states.free([])
    states.free([1])
    with pytest.raises(SlotError, match="slots were freed after this state was made"):
        states.restore_state(state)
    with pytest.raises(SlotError, match="not made by this allocator"):
        states.restore_state(slots(3).backup_state())
    states.check(held=[2])


def test_a_resize_needs_empty_slots_and_room():
    states = slots(3, room=5)
    states.alloc(["a"])
    with pytest.raises(SlotError, match="1 slots are live; free them before a resize"):
        states.resize(5)
    states.free([1])
    for size in (0, 6):
        with pytest.raises(SlotError, match=f"size {size} is outside 1 … 5"):
            states.resize(size)
    states.resize(5)
    assert states.alloc("abcde") == [1, 2, 3, 4, 5]
    states.clear()
    states.resize(2)
    assert states.alloc("abc") is None
    states.check(held=[])


def test_a_ring_of_another_size_is_refused():
    with pytest.raises(BuildError, match="4 slots do not fit a ring of 3"):
        slots(4, room=3)


def test_check_names_slots_that_do_not_add_up():
    ring = numpy.zeros(3, dtype=numpy.int64)
    states = StateSlots("space 'state'", ring, 3)
    states.alloc(["a"])
    ring[1] = 1
    with pytest.raises(SlotError, match=r"slots \[1\] are free twice, or free and held"):
        states.check()
    ring[1] = 9
    with pytest.raises(SlotError, match=r"slots \[2, 9\] are lost"):
        states.check()


def test_debug_refuses_another_thread():
    states = slots(3, debug=True)
    states.alloc(["a"])
    refused = []

    def elsewhere():
        calls = (lambda: states.alloc("b"), lambda: states.free([1]), states.available_size, states.check, states.clear)
        for call in calls:
            with pytest.raises(SlotError, match="nothing locks"):
                call()
            refused.append(call)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 5
    assert states.live_slots() == {1: "a"}
