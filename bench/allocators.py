"""Times the runtime's bookkeeping on one torch thread: `python bench/allocators.py [--write FILE] [--quick]`.

Sizes are measured in turn in one process after a warm-up, and the medians compared, since absolute times
move with the machine. Goals: alloc + free of 4,096 tokens grows at most 3 times from 64Ki to 32Mi slots at
page 1 and 2 times at pages 16 and 64; bookkeeping of 32Mi slots at page 16 is built in 0.1 s and takes at
most 16 bytes a page. `compare.py` has the goals beside SGLang's and vLLM's allocators, which are run where
they are installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import compare
import peers
import torch
from kvdock.allocators.base import Allocator
from ours import build, build_requests, build_sliding
from timing import MI, Pace, machine, median_us, size_name, table, timed

SIZES = compare.SIZES
PAGE_SIZES = (1, 16, 64)
TOKENS, REQUESTS, EXTEND = compare.TOKENS, compare.REQUESTS, compare.EXTEND


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


def report_machine(found: tuple[peers.SGLang | None, peers.VLLM | None]) -> str:
    names = {
        "SGLang": "default allocators (`need_sort` off), torch-native paths",
        "vLLM": "one group of full attention, without prefix caching",
    }
    ran = [f"{peer.name} {peer.version} ({names[peer.name]})" for peer in found if peer is not None]
    return f"{machine()}. Beside: {'; '.join(ran) or 'no peer is installed'}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the runtime's bookkeeping.")
    parser.add_argument("--write", type=Path, help="also write the tables to this file, as markdown")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    options = parser.parse_args()
    found = peers.sglang(), peers.vllm()
    torch.set_num_threads(1)
    turns, calls, repeats = (2, 5, 5) if options.quick else (12, 25, 60)
    parts = [
        report_machine(found),
        report_cycles(turns, calls),
        report_batches(repeats),
        report_building(max(3, repeats // 10)),
        compare.report(Pace(5, 3, 0.1) if options.quick else Pace(100, 20, 8.0), found),
    ]
    text = "\n".join(parts)
    print(text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
