"""Slots of an NPU: int32, and the same as token by token."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdock.allocators import SWAAllocator
from kvdock.builder import build
from kvdock_ascend import allocators

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


def made(plan, kind="mha", **options):
    return build(plan(kind, **options), device="cpu", debug=True).token_to_kv_pool_allocator


def slot_by_slot(last, prefix, seq, pages, page_size):
    """Return the slots of one request, taking a page from `pages` at each page bound."""
    found = []
    for position in range(prefix, seq):
        last = pages.pop(0) * page_size if position % page_size == 0 else last + 1
        found.append(last)
    return found


def grown(allocator, requests, lasts):
    """Return what an extend answers, and what a loop over tokens would."""
    prefix, seq = zip(*requests, strict=True)
    free = list(range(1, allocator.size // allocator.page_size + 1))
    before = allocator.backup_state()
    pages = allocator.alloc_pages(allocator.pages_needed(prefix, seq)).tolist()
    allocator.restore_state(before)
    assert set(pages) <= set(free)
    wanted = []
    for (start, end), last in zip(requests, lasts, strict=True):
        wanted += slot_by_slot(last, start, end, pages, allocator.page_size)
    found = allocator.alloc_extend(
        torch.tensor(prefix), prefix, torch.tensor(seq), seq, torch.tensor(lasts, dtype=torch.int32), len(wanted)
    )
    return found, wanted


def with_prefixes(allocator, lengths):
    """Return the last slot of requests of so many tokens, −1 for none."""
    lasts = []
    for length in lengths:
        if not length:
            lasts.append(-1)
            continue
        found = allocator.alloc_extend(
            torch.tensor([0]), [0], torch.tensor([length]), [length], torch.tensor([-1], dtype=torch.int32), length
        )
        lasts.append(int(found[-1]))
    return lasts


@pytest.mark.parametrize("requests", [[(10, 50)], [(0, 0)], [(128, 128)], [(127, 300)]])
def test_an_extend_is_what_a_loop_over_tokens_gives(plan, requests):
    """A-09: short, empty and straddling extends with pages of 128."""
    allocator = made(plan, max_total_tokens=1024)
    lasts = with_prefixes(allocator, [prefix for prefix, _ in requests])
    found, wanted = grown(allocator, requests, lasts)
    assert found.dtype is torch.int32
    assert found.tolist() == wanted


def test_an_extend_takes_exactly_the_pages_that_are_left(plan):
    """A-09: 3 pages are left, and (127, 300) and (10, 50) and (0, 128) take 2, 0 and 1 of them."""
    allocator = made(plan, max_total_tokens=640)
    requests = [(127, 300), (10, 50), (0, 128)]
    lasts = with_prefixes(allocator, [127, 10, 0])
    assert allocator.available_size() == 3 * 128
    found, wanted = grown(allocator, requests, lasts)
    assert found.tolist() == wanted
    assert allocator.available_size() == 0


@given(st.integers(0, 2**32))
def test_random_batches_are_what_a_loop_gives(seed):
    """A-09: on the host and by the form that runs on a device."""
    from kvdock.kernels import slots

    rng = random.Random(seed)
    requests = [
        (prefix := rng.choice([0, 1, 127, 128, rng.randrange(400)]), prefix + rng.randrange(300)) for _ in range(5)
    ]
    pages = list(range(11, 60))
    lasts = [128 * (1000 + i) + (prefix - 1) % 128 if prefix else -1 for i, (prefix, _) in enumerate(requests)]
    needed = sum(-(-seq // 128) - -(-prefix // 128) for prefix, seq in requests)
    left, wanted = pages[:needed], []
    for (start, end), last in zip(requests, lasts, strict=True):
        wanted += slot_by_slot(last, start, end, left, 128)
    prefix, seq = (torch.tensor(column) for column in zip(*requests, strict=True))
    batch = (prefix, seq, torch.tensor(lasts, dtype=torch.int32), torch.tensor(pages[:needed]), 128, len(wanted))
    assert slots.extend_slots(*batch).tolist() == wanted
    assert slots.extend_slots_on_host(*batch).tolist() == wanted


@pytest.mark.parametrize(
    ("kind", "options", "cls"),
    [
        ("mha", {}, allocators.NpuPagedAllocator),
        ("mla", {"role": "prefill"}, allocators.NpuSortedAllocator),
        ("dsa", {"role": "decode", "max_running_requests": 2}, allocators.NpuSortedAllocator),
        ("pure", {}, allocators.NpuPureSWAAllocator),
        ("pure", {"role": "prefill"}, allocators.NpuPureSWASortedAllocator),
        ("linear", {"max_running_requests": 2}, allocators.NpuPagedAllocator),
    ],
)
def test_each_arrangement_hands_out_int32(plan, kind, options, cls):
    allocator = made(plan, kind, **options)
    assert type(allocator) is cls
    assert allocator.slot_dtype == "int32"
    page = allocator.alloc(128)
    assert page.dtype is torch.int32
    last = page[1:2]
    seq = torch.tensor([3])
    assert allocator.alloc_decode(seq, [3], last).dtype is torch.int32
    assert allocator.alloc_pages(1).dtype is torch.int64


@pytest.mark.parametrize("role", ["none", "prefill"])
def test_what_keeps_both_sides_in_step_asks_for_these(plan, role):
    allocator = made(plan, "sliding", max_total_tokens=4096, max_running_requests=2, role=role)
    cls = allocators.NpuSortedAllocator if role == "prefill" else allocators.NpuPagedAllocator
    assert type(allocator) is SWAAllocator
    assert type(allocator.full) is type(allocator.swa) is cls
    slots = allocator.alloc(256)
    assert slots.dtype is torch.int32
    assert allocator.translate(slots).dtype is torch.int64
    allocator.free(slots)
    allocator.check(held=slots[:0])


def test_tails_of_sliding_requests_are_int32(plan):
    allocator = made(plan, "pure", max_total_tokens=4096)
    found = allocator.alloc_extend_swa_tail(
        torch.tensor([0]), [0], torch.tensor([400]), [400], torch.tensor([-1], dtype=torch.int32), 400, [100]
    )
    assert found.dtype is torch.int32
    assert found[:256].tolist() == [0] * 256


def test_nothing_of_the_interface_is_hidden(plan):
    """A-14: a form of this plugin has all that the core's has, and long prompts are bounded by the full side."""
    for core, ours in allocators.FORMS.items():
        public = {name for name in dir(core) if not name.startswith("_")}
        assert public <= set(dir(ours)) | {"page_size", "size"}
    allocator = made(plan, "sliding", max_total_tokens=4096, max_running_requests=2, chunked_prefill_size=256)
    assert allocator.full_available_size() > allocator.swa_available_size()
    assert allocator.size == allocator.full.size


def test_a_call_that_cannot_be_served_takes_nothing(plan):
    allocator = made(plan, max_total_tokens=256)
    held = allocator.alloc(128)
    assert allocator.alloc(256) is None
    assert allocator.available_size() == 128
    allocator.check(held=held)
