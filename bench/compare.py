"""The runtime's bookkeeping beside that of other engines, in turn in one process: ratios and whether a goal is met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from kvdock.allocators import PagedAllocator
from ours import build, build_requests
from peers import VLLM, SGLang
from timing import MI, Pace, Side, in_turn, size_name, table, time_name

SIZES = (64 * 2**10, MI, 8 * MI, 32 * MI)
TOKENS, REQUESTS, EXTEND, PREFIX = 4096, 256, 256, 2107
FREE_GOALS = {(1, MI): 25, (1, 8 * MI): 1000, (16, 8 * MI): 10}
"""Page size and slots → how many times faster a free of `TOKENS` tokens is to be than SGLang's."""


class Row(NamedTuple):
    """Two times of one thing. A goal is a ratio of at least so much; of `other` to ours, or of ours to another of ours."""

    what: str
    other: str
    other_us: float
    ours_us: float
    goal: float | None = None
    at_most: bool = False

    def cells(self) -> list[str]:
        ratio = self.ours_us / self.other_us if self.at_most else self.other_us / self.ours_us
        goal, met = "", ""
        if self.goal is not None:
            met = "met" if (ratio <= self.goal if self.at_most else ratio >= self.goal) else "NOT MET"
            goal = f"{'≤' if self.at_most else '≥'} ×{self.goal:,g}"
        name = f"×{ratio:.2f}" if ratio < 10 else f"×{ratio:,.1f}" if ratio < 100 else f"×{ratio:,.0f}"
        return [self.what, self.other, time_name(self.other_us), time_name(self.ours_us), name, goal, met]


def report(pace: Pace, peers: tuple[SGLang | None, VLLM | None]) -> str:
    """Return the table of all comparisons that the installed peers allow."""
    sglang, vllm = peers
    rows: list[Row] = []
    if sglang is not None:
        rows += [*frees(pace, sglang), group_beside(pace, sglang)]
    rows += groups_and_singles(pace)
    if sglang is not None:
        rows += [*extends(pace, sglang), *row_writes(pace, sglang)]
    rows += decodes(pace, sglang, vllm)
    title = "in turn with peers, one process, one thread: medians; a block of calls a side"
    return table(title, ["what", "beside", "there", "kvdock", "ratio", "goal", ""], [row.cells() for row in rows])


def pair(pace: Pace, other: Side, ours: Side) -> tuple[float, float]:
    found = in_turn({"other": other, "ours": ours}, pace)
    return found["other"], found["ours"]


# Frees of one request.


def frees(pace: Pace, sglang: SGLang) -> Iterable[Row]:
    for page_size in (1, 16):
        for size in SIZES:
            what = f"of {TOKENS:,} tokens, page {page_size}, {size_name(size)} slots"
            taken = pair(pace, alloc_side(sglang.allocator(size, page_size)), alloc_side(build(size, page_size)))
            yield Row(f"alloc {what}", "SGLang", *taken)
            freed = pair(pace, free_side(sglang.allocator(size, page_size)), free_side(build(size, page_size)))
            yield Row(f"free {what}", "SGLang", *freed, FREE_GOALS.get((page_size, size)))
    both = shuffled_free_side(sglang.allocator(MI, 16)), shuffled_free_side(build(MI, 16))
    yield Row(f"free of {TOKENS:,} tokens, page 16, 1Mi slots, pages in no order", "SGLang", *pair(pace, *both))


def alloc_side(allocator: Any) -> Side:
    return Side(lambda _: allocator.alloc(TOKENS), undo=allocator.free)


def free_side(allocator: Any) -> Side:
    return Side(allocator.free, prepare=lambda: allocator.alloc(TOKENS))


def shuffled_free_side(allocator: Any) -> Side:
    """Free a request whose pages are in no order, as they are once a pool has been used for a while."""
    order = torch.randperm(TOKENS // 16, generator=torch.Generator().manual_seed(7))
    return Side(allocator.free, prepare=lambda: allocator.alloc(TOKENS).view(-1, 16)[order].view(-1))


# Groups of frees.


def group_side(allocator: Any, requests: list[torch.Tensor]) -> Side:
    def call(_: object) -> None:
        allocator.free_group_begin()
        for slots in requests:
            allocator.free(slots)
        allocator.free_group_end()

    return Side(call, undo=lambda _: again(allocator, requests))


def single_side(allocator: Any, requests: list[torch.Tensor]) -> Side:
    def call(_: object) -> None:
        for slots in requests:
            allocator.free(slots)

    return Side(call, undo=lambda _: again(allocator, requests))


def again(allocator: Any, requests: list[torch.Tensor]) -> None:
    """Forget the slots that were freed, and hand out as many anew, request by request."""
    requests.clear()
    requests.extend(held(allocator))


def held(allocator: Any) -> list[torch.Tensor]:
    return [allocator.alloc(TOKENS) for _ in range(REQUESTS)]


def group_beside(pace: Pace, sglang: SGLang) -> Row:
    allocators = sglang.allocator(2 * MI, 16), build(2 * MI, 16)
    times = pair(pace, *(group_side(one, held(one)) for one in allocators))
    return Row(f"free group of {REQUESTS} requests of {TOKENS:,} tokens, page 16", "SGLang", *times, 12)


def groups_and_singles(pace: Pace) -> Iterable[Row]:
    for page_size in (1, 16, 64, 256):
        allocators = [build(2 * MI, page_size) for _ in range(2)]
        sides = [make(one, held(one)) for make, one in zip((single_side, group_side), allocators, strict=True)]
        what = f"free group of {REQUESTS} requests of {TOKENS:,} tokens, page {page_size}"
        yield Row(what, "kvdock, single frees", *pair(pace, *sides), 2 if page_size == 1 else 1, at_most=True)


# Extends, decodes, rows.


class Batch(NamedTuple):
    """Requests of so many tokens, their slots handed out: device and host lengths are the same tensor here."""

    lens: torch.Tensor
    last_loc: torch.Tensor


def batch(allocator: Any, lens: list[int]) -> Batch:
    given, zero = torch.tensor(lens), torch.zeros(len(lens), dtype=torch.int64)
    slots = allocator.alloc_extend(zero, zero, given, given, zero - 1, sum(lens))
    return Batch(given, slots[given.cumsum(0) - 1].clone())


def restoring(allocator: Any, call: Callable[[object], object]) -> Side:
    """Time `call`, and take back what it took; a peer's free list is an attribute."""
    if isinstance(allocator, PagedAllocator):
        state = allocator.backup_state()
        return Side(call, undo=lambda _: allocator.restore_state(state))
    before = allocator.free_pages
    return Side(call, undo=lambda _: setattr(allocator, "free_pages", before))


def extend_side(allocator: Any, requests: int) -> Side:
    before = batch(allocator, [5] * requests)
    after = before.lens + EXTEND
    tokens = requests * EXTEND
    return restoring(
        allocator,
        lambda _: allocator.alloc_extend(before.lens, before.lens, after, after, before.last_loc, tokens),
    )


def extends(pace: Pace, sglang: SGLang) -> Iterable[Row]:
    for requests, goal in ((REQUESTS, 10), (1, 1.5)):
        sides = (extend_side(one, requests) for one in (sglang.allocator(MI, 16), build(MI, 16)))
        yield Row(f"alloc_extend, {requests} × {EXTEND} tokens, page 16", "SGLang", *pair(pace, *sides), goal)


def decode_side(allocator: Any) -> Side:
    """A step of requests at all places in a page, of which a sixteenth starts a page."""
    before = batch(allocator, [1 + i % 16 for i in range(REQUESTS)])
    after = before.lens + 1
    return restoring(allocator, lambda _: allocator.alloc_decode(after, after, before.last_loc))


def decodes(pace: Pace, sglang: SGLang | None, vllm: VLLM | None) -> Iterable[Row]:
    what = f"decode step of {REQUESTS} requests, page 16"
    if sglang is not None:
        times = pair(pace, decode_side(sglang.allocator(MI, 16)), decode_side(build(MI, 16)))
        yield Row(what, "SGLang", *times, 2.5)
    if vllm is not None:
        times = pair(pace, vllm_side(vllm), decode_side(build(MI, 16)))
        yield Row(what, f"vLLM, allocate_slots × {REQUESTS}", *times, 40)


def vllm_side(vllm: VLLM) -> Side:
    """Successive steps, each a token longer; requests that become too long start anew."""
    manager = vllm.manager(MI // 16, 16)
    requests: list[Any] = []

    def start() -> None:
        for request in requests:
            manager.free(request)
        requests[:] = [vllm.request(str(i), 1 + i % 16) for i in range(REQUESTS)]
        for request in requests:
            manager.allocate_slots(request, request.num_tokens)

    def grow() -> None:
        if not requests or requests[-1].num_tokens > 2000:
            start()
        for request in requests:
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(7)

    def step(_: object) -> None:
        for request in requests:
            manager.allocate_slots(request, 1)

    return Side(step, prepare=grow)


def row_writes(pace: Pace, sglang: SGLang) -> Iterable[Row]:
    """SGLang writes the prefix of each request again; here the caller writes it once, so both are timed."""
    other = sglang_rows(sglang)
    what = f"request-table rows of {REQUESTS} extends of {EXTEND} tokens after {PREFIX:,}"
    yield Row(what, "SGLang, write_cache_indices", *pair(pace, other, our_rows(PREFIX)), 7)
    yield Row(f"{what}, prefix written as well", "SGLang", *pair(pace, other, our_rows(0)))


def our_rows(start: int) -> Side:
    pool = build_requests(REQUESTS, PREFIX + EXTEND)
    rows = pool.alloc(range(REQUESTS))
    starts, ends = torch.full((REQUESTS,), start), torch.full((REQUESTS,), PREFIX + EXTEND)
    slots = torch.arange(REQUESTS * (PREFIX + EXTEND - start))
    return Side(lambda _: pool.write(rows, starts, ends, slots))


def sglang_rows(sglang: SGLang) -> Side:
    write, pool = sglang.writer(), sglang.table(REQUESTS, PREFIX + EXTEND)
    rows = torch.arange(1, REQUESTS + 1)
    prefix, extend = torch.full((REQUESTS,), PREFIX), torch.full((REQUESTS,), EXTEND)
    seq, prefixes = prefix + extend, [torch.arange(PREFIX) for _ in range(REQUESTS)]
    slots = torch.arange(REQUESTS * EXTEND)
    return Side(lambda _: write(slots, rows, rows, prefix, prefix, seq, seq, extend, extend, prefixes, pool))
