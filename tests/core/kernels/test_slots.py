"""Slots of a batch that grows: the form of the host gives what the form of a device gives."""

import random

import pytest
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels import slots  # noqa: E402

EXTENDS = pytest.mark.parametrize("extend", [slots.extend_slots, slots.extend_slots_on_host])
DECODES = pytest.mark.parametrize("decode", [slots.decode_slots, slots.decode_slots_on_host])


def tensor(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


@EXTENDS
def test_an_extend_joins_last_pages_and_new_ones(extend):
    """A-09: page 4; a request that stays in its page, one of nothing, one over a bound, one that starts."""
    got = extend(tensor(1, 4, 3, 0), tensor(3, 4, 9, 5), tensor(8, 15, 22, -1), tensor(7, 3, 9, 2), 4, 13)
    assert got.tolist() == [9, 10, 23, 28, 29, 30, 31, 12, 36, 37, 38, 39, 8]
    assert got.dtype == torch.int64


@EXTENDS
def test_an_extend_of_no_request_is_empty(extend):
    empty = tensor()
    assert extend(empty, empty, empty, empty, 4, 0).shape == (0,)


@DECODES
def test_a_decode_hands_pages_to_requests_at_a_bound_in_order(decode):
    got = decode(tensor(4, 5, 1, 7), tensor(10, 19, -1, 33), tensor(6, 2), 4)
    assert (got.tolist(), got.dtype) == ([11, 24, 8, 34], torch.int64)


@DECODES
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_every_token_starts_a_page_of_one(decode, page_size):
    """Lengths 1 and page_size + 1 start a page, whatever its size."""
    got = decode(tensor(1, page_size + 1), tensor(-1, 2 * page_size - 1), tensor(9, 5), page_size)
    assert got.tolist() == [9 * page_size, 5 * page_size]


@EXTENDS
@DECODES
def test_32_bit_inputs_give_64_bit_slots(extend, decode):
    """S-23: page 40,000,000 of 64 slots starts at slot 2,560,000,000."""
    as_int32 = lambda *values: tensor(*values, dtype=torch.int32)  # noqa: E731
    page, first = as_int32(40_000_000), 2_560_000_000
    assert extend(as_int32(0), as_int32(2), as_int32(-1), page, 64, 2).tolist() == [first, first + 1]
    assert decode(as_int32(1), as_int32(-1), page, 64).tolist() == [first]
    assert decode(as_int32(2), as_int32(2**31 - 1), page[:0], 64).tolist() == [2**31]


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 48])
@pytest.mark.parametrize("seed", range(6))
def test_both_forms_agree_on_any_batch(page_size, seed):
    chance = random.Random(1000 * page_size + seed)
    prefix = [chance.choice((0, chance.randint(0, 5 * page_size))) for _ in range(chance.randint(1, 9))]
    seq = [n + chance.choice((0, 1, chance.randint(0, 4 * page_size))) for n in prefix]
    last = [chance.randint(1, 50) * page_size + (n - 1) % page_size if n else -1 for n in prefix]
    count = sum(-(-after // page_size) - -(-before // page_size) for before, after in zip(prefix, seq, strict=True))
    pages = tensor(*chance.sample(range(60, 60 + count), count))
    given = tensor(*prefix), tensor(*seq), tensor(*last), pages, page_size, sum(seq) - sum(prefix)
    assert slots.extend_slots_on_host(*given).tolist() == slots.extend_slots(*given).tolist()
    starts = [n % page_size == 0 for n in prefix]
    step = tensor(*prefix) + 1, tensor(*last), torch.arange(90, 90 + sum(starts)), page_size
    assert slots.decode_slots_on_host(*step).tolist() == slots.decode_slots(*step).tolist()


def test_lengths_that_differ_from_the_hosts_are_refused_on_the_host():
    zero, end = tensor(0), tensor(-1)
    with pytest.raises(SlotError, match="lengths on the device ask for 3 pages, but those of the host for 2"):
        slots.extend_slots_on_host(zero, tensor(9), end, tensor(1, 2), 4, 8)
    with pytest.raises(SlotError, match="lengths on the device ask for 8 tokens, but those of the host for 7"):
        slots.extend_slots_on_host(zero, tensor(8), end, tensor(1, 2), 4, 7)
    with pytest.raises(SlotError, match="lengths on the device ask for 2 pages, but those of the host for 1"):
        slots.decode_slots_on_host(tensor(5, 1), tensor(7, -1), tensor(3), 4)


def test_forms_leave_what_they_are_given():
    given = tensor(1, 3), tensor(3, 9), tensor(8, 22), tensor(7, 3), 4, 8
    before = [part.clone() for part in given[:4]]
    slots.extend_slots_on_host(*given)
    slots.decode_slots_on_host(given[1], given[2], tensor(6), 4)
    assert all(torch.equal(part, kept) for part, kept in zip(given[:4], before, strict=True))
