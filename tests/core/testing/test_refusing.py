"""What the kit says of a call that has to be refused, and of rows that differ."""

import functools

import pytest
from kvdock.errors import SlotError
from kvdock.testing.refusing import refused

REFUSED = functools.partial(refused, "a write of layer 7", "look it up", "layer 7")
WHY = r"raise kvdock.errors.SlotError that says 'layer 7': look it up$"


def test_a_refusal_that_names_what_is_wrong_will_do():
    with REFUSED():
        raise SlotError("layer 7 has no KV in this pool")


def test_what_is_accepted_is_named_with_the_reason_to_refuse_it():
    with pytest.raises(AssertionError, match=rf"^a write of layer 7 is accepted; {WHY}"), REFUSED():
        pass


def test_an_error_of_python_is_not_enough():
    with pytest.raises(AssertionError, match=rf"^a write of layer 7 raises KeyError\(7\); {WHY}"), REFUSED():
        raise KeyError(7)


def test_a_refusal_names_what_is_wrong():
    with pytest.raises(AssertionError, match=rf"^a write of layer 7 is refused with 'no'; {WHY}"), REFUSED():
        raise SlotError("no")


def test_rows_that_differ_are_named_by_layer_side_slot_and_distance():
    torch = pytest.importorskip("torch")
    from kvdock.testing.pool_data import Data

    data, zeros = Data.__new__(Data), torch.zeros(3, 2, 4)
    wrong = zeros.clone()
    wrong[1, 1, 2], wrong[2] = -5, 2
    with pytest.raises(
        AssertionError, match=r"^layer 4: the value of slot 17 is off; 2 of 3 slots differ, by 5 at most$"
    ):
        data._compare(4, 1, [16, 17, 18], wrong, zeros, "is off")
