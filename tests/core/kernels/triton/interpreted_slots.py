"""Page arithmetic in Triton gives what a loop over tokens gives; run by `test_interpreted_slots`, in a process of its own.

With TRITON_INTERPRET=1 it runs anywhere, without it on the accelerator.
"""

import os
import random

import numpy as np
import pytest
import torch
from kvdock.kernels import slots, spans, triton_slots
from kvdock.kernels.reference import ReferenceKernels
from kvdock.kernels.triton_set import TritonKernels

torch.set_num_threads(1)

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
INTEGERS = pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 8 requests or tokens, two programs a request: sums and loops take several turns."""
    monkeypatch.setattr(triton_slots, "CHUNK", 8)
    monkeypatch.setattr(triton_slots, "SPLITS", 2)


def ints(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def extended(prefix, seq, last, pages, page_size):
    """The slots of an extend, token by token."""
    next_page, found = iter(pages), []
    for before, after, slot in zip(prefix, seq, last, strict=True):
        for position in range(before, after):
            slot = next(next_page) * page_size if position % page_size == 0 else slot + 1
            found.append(slot)
    assert list(next_page) == []
    return found


def pages_needed(prefix, seq, page_size):
    return sum(-(-after // page_size) - -(-before // page_size) for before, after in zip(prefix, seq, strict=True))


def batch_of(chance, page_size, size, most_pages=4):
    """Lengths, last slots and exactly the pages that a batch needs; some requests stay as they are."""
    prefix = [chance.choice((0, chance.randint(0, most_pages * page_size))) for _ in range(size)]
    seq = [n + chance.choice((0, 1, chance.randint(0, most_pages * page_size))) for n in prefix]
    last = [chance.randint(1, 50) * page_size + (n - 1) % page_size if n else -1 for n in prefix]
    count = pages_needed(prefix, seq, page_size)
    return prefix, seq, last, chance.sample(range(60, 60 + 2 * count), count)


def extend(prefix, seq, last, pages, page_size, total, dtype=torch.int64):
    given = [ints(values, dtype) for values in (prefix, seq, last, pages)]
    return triton_slots.alloc_extend(*given, page_size, total)


@INTEGERS
def test_short_and_empty_extends_find_their_slots(dtype):
    #
    prefix, seq, last = [10, 0, 128, 127], [50, 0, 128, 300], [393, -1, 255, 766]
    got = extend(prefix, seq, last, [7, 8], 128, 213, dtype)
    assert got.tolist() == [*range(394, 434), 767, *range(896, 1024), *range(1024, 1068)]
    assert (got.dtype, got.device.type) == (torch.int64, DEVICE)


#
@pytest.mark.parametrize(
    ("prefix", "seq", "last", "pages", "first_and_last"),
    [
        (10, 50, 393, [], (394, 433)),
        (0, 0, -1, [], None),
        (128, 128, 255, [], None),
        (127, 300, 766, [7, 8], (767, 1067)),
    ],
)
def test_each_extend_alone_takes_exactly_its_pages(prefix, seq, last, pages, first_and_last):
    got = extend([prefix], [seq], [last], pages, 128, seq - prefix).tolist()
    assert len(got) == seq - prefix
    assert (first_and_last is None) == (got == [])
    assert first_and_last is None or (got[0], got[-1]) == first_and_last


@PAGE_SIZES
@INTEGERS
@pytest.mark.parametrize("seed", range(3))
def test_an_extend_is_what_a_loop_over_its_tokens_gives(page_size, dtype, seed):
    #
    chance = random.Random(f"{page_size} {seed}")
    prefix, seq, last, pages = batch_of(chance, page_size, chance.randint(1, 12))
    got = extend(prefix, seq, last, pages, page_size, sum(seq) - sum(prefix), dtype)
    assert got.tolist() == extended(prefix, seq, last, pages, page_size)


@PAGE_SIZES
def test_long_requests_and_batches_are_treated_in_chunks(page_size, small_chunks):
    chance = random.Random(page_size)
    prefix, seq, last, _ = batch_of(chance, page_size, 21, most_pages=1)
    prefix[5], seq[5], last[5] = 0, 99, -1
    pages = list(range(60, 60 + pages_needed(prefix, seq, page_size)))
    got = extend(prefix, seq, last, pages, page_size, sum(seq) - sum(prefix))
    assert got.tolist() == extended(prefix, seq, last, pages, page_size)


def test_more_requests_than_a_chunk_holds_are_summed():
    prefix = [n % 5 for n in range(1100)]
    seq = [n + (i % 97 == 0) * 3 for i, n in enumerate(prefix)]
    last = [4 * (10 + i) + n - 1 if n else -1 for i, n in enumerate(prefix)]
    pages = list(range(5000, 5000 + pages_needed(prefix, seq, 4)))
    got = extend(prefix, seq, last, pages, 4, sum(seq) - sum(prefix))
    assert got.tolist() == extended(prefix, seq, last, pages, 4)
    step = [n + 1 for n in prefix]
    starting = sum(n % 4 == 0 for n in prefix)
    new = list(range(9000, 9000 + starting))
    got = triton_slots.alloc_decode(ints(step), ints(last), ints(new), 4)
    assert got.tolist() == extended(prefix, step, last, new, 4)


@PAGE_SIZES
@INTEGERS
def test_a_decode_is_an_extend_by_one(page_size, dtype, small_chunks):
    chance = random.Random(page_size)
    prefix, _, last, _ = batch_of(chance, page_size, 30)
    step = [n + 1 for n in prefix]
    pages = chance.sample(range(60, 200), sum(n % page_size == 0 for n in prefix))
    got = triton_slots.alloc_decode(ints(step, dtype), ints(last, dtype), ints(pages, dtype), page_size)
    assert got.tolist() == extended(prefix, step, last, pages, page_size)
    assert got.dtype == torch.int64


def test_no_request_asks_for_nothing():
    none = ints([])
    assert triton_slots.alloc_extend(none, none, none, none, 16, 0).shape == (0,)
    assert triton_slots.alloc_decode(none, none, none, 16).shape == (0,)
    assert triton_slots.translate(ints([0]), none, 16).shape == (0,)
    table = ints([[1, 2]])
    triton_slots.write_rows(table, none, none, none)
    nowhere = np.zeros(0, dtype=np.int64)
    triton_slots.write_spans(table, nowhere, nowhere, nowhere, none)
    assert triton_slots.read_pages(table, nowhere, nowhere, nowhere, 1).shape == (0,)
    assert table.tolist() == [[1, 2]]


def test_lengths_may_be_columns_of_a_larger_tensor():
    lens = ints([[3, 6], [4, 9]])
    last, pages = ints([10, 0, 15, 0])[::2], ints([5, 0, 7, 0, 6, 0])[::2]
    got = triton_slots.alloc_extend(lens[:, 0], lens[:, 1], last, pages, 4, 8)
    assert got.tolist() == [11, 20, 21, 28, 29, 30, 31, 24]
    assert triton_slots.alloc_decode(lens[:, 1], last, pages, 4).tolist() == [11, 20]


@pytest.mark.parametrize(
    ("prefix", "seq"),
    [([0, 3], [9, 40]), ([0, 3], [30, 4]), ([0, 9], [9, 2]), ([5, 0], [-3, 3]), ([-7, 0], [2, 1]), ([0, 0], [0, 0])],
    ids=["more at the end", "more before", "shrinks", "negative", "negative prefix", "none"],
)
def test_other_lengths_on_the_device_write_nothing_past_the_end(prefix, seq, small_chunks):
    #
    total, count = 12, 3
    out = ints([-77] * (total + 64))
    new_pages = ints([99, 99, 99, 50, 51, 52, 99, 99, 99])[3 : 3 + count]
    triton_slots.extend_kernel[(2, 2)](
        ints(prefix), ints(seq), ints([-1, 18]), new_pages, out[32:], count, total, PAGE_SIZE=4, CHUNK=8
    )
    assert out[:32].tolist() == [-77] * 32
    assert out[32 + total :].tolist() == [-77] * 32
    inside = out[32 : 32 + total]
    assert -77 not in inside.tolist()
    assert not set((inside // 4).tolist()) & {99}


def test_tokens_that_the_device_does_not_name_are_padding():
    #
    assert extend([0, 4], [2, 5], [-1, 11], [7, 8], 4, 9).tolist() == [28, 29, 32, 0, 0, 0, 0, 0, 0]
    assert extend([], [], [], [], 4, 3).tolist() == [0, 0, 0]


def test_a_request_without_a_page_left_writes_to_padding():
    assert extend([0, 0], [4, 4], [-1, -1], [7], 4, 8).tolist() == [28, 29, 30, 31, 0, 1, 2, 3]
    assert triton_slots.alloc_decode(ints([1, 5, 3]), ints([-1, 7, 9]), ints([6, 99])[:1], 4).tolist() == [24, 0, 10]


@INTEGERS
def test_slots_past_31_bits_are_exact(dtype):
    # S-23: page 40,000,000 of 64 slots starts at slot 2,560,000,000.
    page, first = [40_000_000], 2_560_000_000
    assert extend([0], [2], [-1], page, 64, 2, dtype).tolist() == [first, first + 1]
    long = 2**31
    assert extend([long], [long + 2], [63], [9], 64, 2).tolist() == [576, 577]
    one = ints([1], dtype)
    assert triton_slots.alloc_decode(one, -one, ints(page, dtype), 64).tolist() == [first]
    assert triton_slots.alloc_decode(2 * one, ints([2**31 - 1], dtype), ints([], dtype), 64).tolist() == [2**31]
    mapping = ints([0, *page], dtype)
    assert triton_slots.translate(mapping, ints([64 + 5], dtype), 64).tolist() == [first + 5]
    large = ints([2**31 // 128 * 128 + 130])
    assert triton_slots.translate(ints([0, 2]), large, 2**31).tolist() == [2 * 2**31 + 130]
    table = ints([[first + 64 * n for n in range(3)]])
    got = triton_slots.read_pages(table, np.array([0]), np.array([0]), np.array([3]), 1)
    assert got.tolist() == [first, first + 64, first + 128]


def test_words_past_31_bits_of_a_table_are_found():
    # S-23: row 2 of rows of 2^30 columns starts at element 2^31.
    table = torch.empty(2**31 + 64, dtype=torch.int8, device=DEVICE).as_strided((3, 64), (2**30, 1))
    two, here = np.array([2]), np.array([3])
    triton_slots.write_spans(table, two, here, here + 4, ints([10, 11, 12, 13]))
    triton_slots.write_rows(table, ints([2]), ints([4]), ints([99]))
    assert table[2, 3:7].tolist() == [10, 99, 12, 13]
    assert triton_slots.read_pages(table, two, here, here + 4, 1).tolist() == [10, 99, 12, 13]


@PAGE_SIZES
@INTEGERS
def test_translate_sends_pages_to_pages(page_size, dtype, small_chunks):
    chance = random.Random(page_size)
    mapping = ints([0, 9, 0, 4, 70, 2], dtype)
    loc = ints(
        [[-1, 0, page_size - 1], *([chance.randrange(6 * page_size) for _ in range(3)] for _ in range(9))], dtype
    )
    got = triton_slots.translate(mapping, loc, page_size)
    pairs = {0: 0, 1: 9, 2: 0, 3: 4, 4: 70, 5: 2}
    expected = [
        [-1 if n < 0 else pairs[n // page_size] and pairs[n // page_size] * page_size + n % page_size for n in row]
        for row in loc.tolist()
    ]
    assert (got.tolist(), got.dtype) == (expected, torch.int64)
    assert got[0].tolist() == [-1, 0, 0]
    assert got.tolist() == ReferenceKernels().translate(mapping, loc, page_size).tolist()


def test_translate_reads_a_column_of_a_map_and_nothing_beyond_it():
    mapping = ints([[0, 7], [5, 7], [6, 7], [99, 99]])[:3, 0]
    assert triton_slots.translate(mapping, ints([2, 3, 500, -1, 1]), 1).tolist() == [6, 0, 0, -1, 5]


@INTEGERS
@pytest.mark.parametrize("transposed", [False, True])
def test_words_reach_their_rows_and_columns(dtype, transposed, small_chunks):
    table = torch.zeros((20, 4) if transposed else (4, 20), dtype=torch.int32, device=DEVICE)
    table = table.T if transposed else table
    rows, columns = [n % 4 for n in range(19)], [(7 * n) % 20 for n in range(19)]
    triton_slots.write_rows(table, ints(rows, dtype), ints(columns, dtype), ints(range(1, 20), dtype))
    expected = np.zeros((4, 20), dtype=int)
    expected[rows, columns] = range(1, 20)
    assert table.tolist() == expected.tolist()


SPANS = ([3, 1, 2, 3], [0, 2, 5, 41], [40, 9, 5, 44])


@INTEGERS
@pytest.mark.parametrize("transposed", [False, True])
def test_spans_reach_their_rows(dtype, transposed, small_chunks):
    shape = (48, 5) if transposed else (5, 48)
    table = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
    table = table.T if transposed else table
    rows, starts, ends = (np.array(part) for part in SPANS)
    triton_slots.write_spans(table, rows, starts, ends, ints(range(100, 150), dtype))
    expected = np.zeros((5, 48), dtype=int)
    expected[3, :40], expected[1, 2:9], expected[3, 41:44] = range(100, 140), range(140, 147), range(147, 150)
    assert table.tolist() == expected.tolist()


@PAGE_SIZES
@INTEGERS
def test_pages_of_rows_are_read_from_their_first_words(page_size, dtype, small_chunks):
    table = torch.arange(5 * 48 * page_size, device=DEVICE).view(5, -1).to(dtype) + 7 * page_size
    rows, firsts, lasts = (np.array(part) for part in SPANS)
    got = triton_slots.read_pages(table, rows, firsts, lasts, page_size)
    numbers = [7 + 48 * row + n for row, a, b in zip(*SPANS, strict=True) for n in range(a, b)]
    assert (got.tolist(), got.dtype) == (numbers, torch.int64)
    assert got.tolist() == spans.read_pages(table, rows, firsts, lasts, page_size).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_triton_agrees_with_torch(seed):
    chance = random.Random(seed)
    prefix, seq, last, pages = batch_of(chance, 16, 40)
    given = [ints(values) for values in (prefix, seq, last, pages)]
    total = sum(seq) - sum(prefix)
    assert triton_slots.alloc_extend(*given, 16, total).tolist() == slots.extend_slots(*given, 16, total).tolist()


CALLS = {
    "alloc_extend": lambda kernels: kernels.alloc_extend(
        ints([3, 0]), ints([6, 9]), ints([10, -1]), ints([5, 6, 7, 8]), 4, 12
    ),
    "alloc_decode": lambda kernels: kernels.alloc_decode(ints([4, 5]), ints([10, 15]), ints([6]), 4),
    "translate": lambda kernels: kernels.translate(ints([0, 3]), ints([[4], [-1]]), 4),
    "read_pages": lambda kernels: kernels.read_pages(
        ints([[8, 9, 4, 5]] * 3), *map(np.array, ([2, 0], [0, 1], [2, 2])), 2
    ),
    "write_rows": lambda kernels: kernels.write_rows(ints([[0, 0]] * 3), ints([1]), ints([0]), ints([7])),
    "write_spans": lambda kernels: kernels.write_spans(
        ints([[0, 0]] * 3), *map(np.array, ([2, 1], [0, 1], [2, 2])), ints([7, 8, 9])
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_one_launch(name, monkeypatch):
    found, launch = [], triton_slots.launch

    def counted(kernel, *arguments, **constants):
        found.append(kernel)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(triton_slots, "launch", counted)
    got, expected = CALLS[name](TritonKernels()), CALLS[name](ReferenceKernels())
    assert len(found) == 1
    assert (got is None) == (expected is None)
    assert got is None or got.tolist() == expected.tolist()
