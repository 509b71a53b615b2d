"""Times the runtime's bookkeeping on one torch thread: `python bench/allocators.py [--write FILE] [--quick]`.

Sizes are measured in turn in one process after a warm-up, and the medians compared, since absolute times
move with the machine. Goals: alloc + free of 4,096 tokens grows at most 3 times from 64Ki to 32Mi slots at
page 1 and 2 times at pages 16 and 64; bookkeeping of 32Mi slots at page 16 is built in 0.1 s and takes at
most 16 bytes a page.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from kvdock.allocators import PagedAllocator, SWAAllocator, TokenAllocator
from kvdock.allocators.base import Allocator
from kvdock.device import DeviceInfo
from kvdock.kernels.reference import ReferenceKernels
from kvdock.layout import SizeRule, Space
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import CacheOptions, Parallelism
from kvdock.planned import Parts
from kvdock.pools.storage import allocate
from kvdock.queries import AllocatorQuery, RequestQuery
from kvdock.requests import ReqToTokenPool

KI, MI = 2**10, 2**20
SIZES = (64 * KI, MI, 8 * MI, 32 * MI)
PAGE_SIZES = (1, 16, 64)
TOKENS, REQUESTS, EXTEND = 4096, 256, 256
CPU = torch.device("cpu")


def common() -> dict:
    """Return the fields that every query has; the model does not matter here."""
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128))
    return {
        "model": ModelSpec(name="m", architecture="M", layers=(layer,), context_length=4096, dtype="bfloat16"),
        "options": CacheOptions(),
        "parallel": Parallelism(),
        "device": DeviceInfo(device_type="cpu", name="cpu", total_bytes=1, free_before_load_bytes=1, free_bytes=1),
    }


def make_parts(buffers, sizes: dict[str, int], spaces: dict[str, Space], **more) -> Parts:
    tensors = allocate(buffers, sizes, spaces, CPU)
    return Parts(tensors=tensors, kernels=ReferenceKernels(), device=CPU, sizes=sizes, **more)


def build(size: int, page_size: int, space: str = "full") -> PagedAllocator:
    spaces = {space: Space(name=space, rule=SizeRule(), page_size=page_size)}
    cls = TokenAllocator if page_size == 1 else PagedAllocator
    query = AllocatorQuery(spaces=tuple(spaces.values()), **common())
    return cls(query, make_parts(cls.buffers(query), {space: size}, spaces))


def build_sliding(size: int, page_size: int) -> SWAAllocator:
    names = ("full", "swa")
    spaces = {name: Space(name=name, rule=SizeRule(), page_size=page_size) for name in names}
    inner = {name: build(size, page_size, name) for name in names}
    query = AllocatorQuery(spaces=tuple(spaces.values()), inner={n: type(a) for n, a in inner.items()}, **common())
    sizes = dict.fromkeys(names, size)
    return SWAAllocator(query, make_parts(SWAAllocator.buffers(query), sizes, spaces, allocators=inner))


def build_requests(rows: int, columns: int) -> ReqToTokenPool:
    spaces = {"requests": Space(name="requests", rule=SizeRule(), issued_by="request_pool")}
    query = RequestQuery(spaces=spaces, groups=(), columns=columns, **common())
    return ReqToTokenPool(query, make_parts(ReqToTokenPool.buffers(query), {"requests": rows}, spaces))


def timed(call: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e6, result


def once(allocator: Allocator, need: int, by_pages: bool) -> tuple[float, float]:
    """Return the microseconds of one alloc and of one free."""
    taken, held = timed(lambda: allocator.alloc(need))
    pages = held[:: allocator.page_size] // allocator.page_size
    call = (lambda: allocator.free_pages(pages)) if by_pages else (lambda: allocator.free(held))
    return taken, timed(call)[0]


def cycles(page_size: int, by_pages: bool, turns: int, calls: int) -> dict[int, tuple[float, float]]:
    """Return size → median microseconds of alloc and free, the sizes taken in turn."""
    allocators = {size: build(size, page_size) for size in SIZES}
    samples: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    for turn in range(turns + 2):
        for size, allocator in allocators.items():
            spent = [once(allocator, TOKENS, by_pages) for _ in range(calls)]
            if turn >= 2:
                samples[size].extend(spent)
    return {size: tuple(statistics.median(part) for part in zip(*got, strict=True)) for size, got in samples.items()}


def median_us(call: Callable[[], object], undo: Callable[[object], object], repeats: int) -> float:
    spent = []
    for turn in range(repeats + 3):
        took, result = timed(call)
        undo(result)
        if turn >= 3:
            spent.append(took)
    return statistics.median(spent)


def extend_us(allocator: Allocator, repeats: int) -> float:
    """Return the time of 256 requests that grow by 256 tokens from a prefix of 5."""
    prefix, seq = [5] * REQUESTS, [5 + EXTEND] * REQUESTS
    zero, grown = torch.zeros(REQUESTS, dtype=torch.int64), torch.full((REQUESTS,), 5)
    held = allocator.alloc_extend(zero, [0] * REQUESTS, grown, prefix, zero - 1, 5 * REQUESTS)
    last, after = held[4::5].clone(), torch.tensor(seq)
    state = allocator.backup_state()
    return median_us(
        lambda: allocator.alloc_extend(grown, prefix, after, seq, last, REQUESTS * EXTEND),
        lambda _: allocator.restore_state(state),
        repeats,
    )


def decode_us(allocator: Allocator, repeats: int) -> float:
    """Return the time of a decode step of 256 requests, a page's share of which start a page."""
    p = allocator.page_size
    lens = [1 + i % p for i in range(REQUESTS)]
    total, device_lens = sum(lens), torch.tensor(lens)
    zero = torch.zeros(REQUESTS, dtype=torch.int64)
    held = allocator.alloc_extend(zero, [0] * REQUESTS, device_lens, lens, zero - 1, total)
    last, grown = held[device_lens.cumsum(0) - 1].clone(), [n + 1 for n in lens]
    device_grown, state = device_lens + 1, allocator.backup_state()
    return median_us(
        lambda: allocator.alloc_decode(device_grown, grown, last),
        lambda _: allocator.restore_state(state),
        repeats,
    )


def release_us(page_size: int, repeats: int) -> float:
    """Return the time in which 256 requests of 256 tokens are freed by their rows, in one call."""
    allocator, table = build(MI, page_size), build_requests(REQUESTS, EXTEND)
    rows = table.alloc(range(REQUESTS))
    starts, ends = [0] * REQUESTS, [EXTEND] * REQUESTS

    def fill(_: object = None) -> None:
        table.write(rows, starts, ends, allocator.alloc(REQUESTS * EXTEND))

    fill()
    return median_us(lambda: allocator.free_rows(table.req_to_token, rows, starts, ends), fill, repeats)


def write_us(repeats: int) -> float:
    """Return the time of writing 256 extends of 256 tokens to the request table."""
    table = build_requests(REQUESTS, 1024)
    rows = table.alloc(range(REQUESTS))
    starts, ends = [512] * REQUESTS, [512 + EXTEND] * REQUESTS
    slots = torch.arange(REQUESTS * EXTEND)
    return median_us(lambda: table.write(rows, starts, ends, slots), lambda _: None, repeats)


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    lines = [f"### {title}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def size_name(size: int) -> str:
    return f"{size // MI}Mi" if size >= MI else f"{size // KI}Ki"


def report_cycles(turns: int, calls: int) -> str:
    rows = []
    for page_size in PAGE_SIZES:
        for by_pages in (False, True):
            spent = cycles(page_size, by_pages, turns, calls)
            both = [sum(spent[size]) for size in SIZES]
            goal = 3 if page_size == 1 else 2
            cells = [f"{spent[size][0]:.1f} + {spent[size][1]:.1f}" for size in SIZES]
            form = "free_pages" if by_pages else "free"
            rows.append([str(page_size), form, *cells, f"×{both[-1] / both[0]:.2f} (goal ≤ ×{goal})"])
    header = ["page", "form", *(size_name(size) for size in SIZES), "growth"]
    return table(f"alloc + free of {TOKENS:,} tokens, µs", header, rows)


def report_batches(repeats: int) -> str:
    rows = []
    for page_size in PAGE_SIZES:
        extend, decode = (f(build(MI, page_size), repeats) for f in (extend_us, decode_us))
        both_extend, both_decode = (f(build_sliding(MI, page_size), repeats) for f in (extend_us, decode_us))
        figures = (extend, decode, both_extend, both_decode, release_us(page_size, repeats))
        rows.append([str(page_size), *(f"{us:.0f}" for us in figures)])
    title = f"batches of {REQUESTS} requests in a pool of 1Mi, µs (extends and releases of {EXTEND} tokens each)"
    return table(title, ["page", "extend", "decode", "sliding extend", "sliding decode", "free_rows"], rows)


def report_building(repeats: int) -> str:
    size, page_size = 32 * MI, 16
    seconds = statistics.median(timed(lambda: build(size, page_size))[0] for _ in range(repeats)) / 1e6
    nbytes = build(size, page_size).parts.tensors.nbytes()
    rows = [
        ["bookkeeping of 32Mi slots at page 16, built", f"{seconds * 1e3:.1f} ms (goal ≤ 100 ms)"],
        ["its bytes a page", f"{nbytes / (size // page_size):.2f} (goal ≤ 16)"],
        [f"request table, {REQUESTS} writes of {EXTEND} columns", f"{write_us(repeats * 5):.0f} µs"],
    ]
    return table("building and the request table", ["what", "figure"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the runtime's bookkeeping.")
    parser.add_argument("--write", type=Path, help="also write the tables to this file, as markdown")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns, calls, repeats = (2, 5, 5) if options.quick else (12, 25, 60)
    text = "\n".join([report_cycles(turns, calls), report_batches(repeats), report_building(max(3, repeats // 10))])
    print(text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
