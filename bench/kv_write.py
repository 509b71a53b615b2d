"""Times writes of keys and values on one torch thread: `python bench/kv_write.py [--write FILE] [--quick]`.

Goal: `set_kv_buffer` takes at most 1 / 0.9 of the time of the best single torch operation that writes the same
rows (the best of four, K and V each), whatever the arrangement. The share of a contiguous copy of the same bytes is
reported beside it. SGLang's pool runs in turn where it is installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from kvdock.builder import build
from kvdock.device import DeviceInfo
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.startup import core_only

HEADS, DIM, TOKENS = 8, 128, 65536
BATCHES = (256, 1024, 4096)
GOAL = 0.9
MEMORY = 2**34
DEVICE = DeviceInfo(device_type="cpu", name="cpu", total_bytes=MEMORY, free_before_load_bytes=MEMORY, free_bytes=MEMORY)


def make_pool(page_size: int, **options):
    """Return the pool of one MHA layer of 8 heads of 128 in bfloat16."""
    registry = core_only()
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=HEADS, head_dim=DIM, v_head_dim=DIM))
    model = ModelSpec(name="m", architecture="M", layers=(layer,), context_length=4096, dtype="bfloat16")
    given = {"page_size": page_size, "max_total_tokens": TOKENS, "max_running_requests": 8, **options}
    plan = plan_from((model,), DEVICE, make_options(given), Parallelism(), registry, budget_bytes=2**30)
    return build(plan).token_to_kv_pool


def median(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each call; they take turns, in blocks of three."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            call()
            for _ in range(3):
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def single_operations(loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return ways to write the rows of K and V with one torch operation each, in tensors of their own."""
    keys = torch.zeros(TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    values = torch.zeros_like(keys)
    pairs = [(keys, k), (values, v)]
    flat = [(target.view(TOKENS, -1), rows.view(len(loc), -1)) for target, rows in pairs]
    words = [(target.view(torch.int64), rows.view(torch.int64)) for target, rows in flat]
    return {
        "index_put_": lambda: [target.index_put_((loc,), rows) for target, rows in pairs],
        "index_copy_": lambda: [target.index_copy_(0, loc, rows) for target, rows in pairs],
        "index_copy_ of flat rows": lambda: [target.index_copy_(0, loc, rows) for target, rows in flat],
        "index_copy_ of 64-bit words": lambda: [target.index_copy_(0, loc, rows) for target, rows in words],
    }


def peer_write(loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object] | None:
    """Return SGLang's write of the same rows, or ``None`` where it is not installed."""
    try:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    except Exception as error:  # an engine that is half installed fails in many ways; the bench goes on without it
        print(f"SGLang is left out: {type(error).__name__}: {error}")
        return None
    pool = MHATokenToKVPool(TOKENS - 1, 1, torch.bfloat16, HEADS, DIM, 1, "cpu", False)
    layer = type("Layer", (), {"layer_id": 0})()
    return lambda: pool.set_kv_buffer(layer, loc, k, v)


def measure(repeats: int) -> list[str]:
    """Return the table: one line an arrangement and batch."""
    lines = [
        "| arrangement | rows | set_kv_buffer | best single operation | of the best | of a copy | SGLang |",
        "|---|---|---|---|---|---|---|",
    ]
    for page_size, page_major in ((1, False), (16, False), (64, False), (16, True), (64, True)):
        pool = make_pool(page_size, page_major=page_major)
        for batch in BATCHES:
            lines.append(one_line(pool, page_size, page_major, batch, repeats))
            print(lines[-1], flush=True)
    return lines


def one_line(pool, page_size: int, page_major: bool, batch: int, repeats: int) -> str:
    loc = torch.randperm(TOKENS - page_size)[:batch] + page_size
    k, v = (torch.randn(batch, HEADS, DIM).to(torch.bfloat16) for _ in range(2))
    singles = single_operations(loc, k, v)
    room = torch.empty(2, batch, HEADS, DIM, dtype=torch.bfloat16)
    calls = {
        "ours": lambda: pool.set_kv_buffer(0, loc, k, v),
        **singles,
        "copy": lambda: (room[0].copy_(k), room[1].copy_(v)),
    }
    peer = peer_write(loc, k, v)
    if peer is not None:
        calls["peer"] = peer
    found = median(calls, repeats)
    best = min(singles, key=lambda name: found[name])
    share = found[best] / found["ours"]
    mark = "" if share >= GOAL else " (missed)"
    theirs = f"{found['peer'] * 1e6:.0f} µs" if "peer" in found else "–"
    form = f"page {page_size}{', page-major' if page_major else ''}"
    return (
        f"| {form} | {batch} | {found['ours'] * 1e6:.0f} µs | {found[best] * 1e6:.0f} µs ({best}) "
        f"| {share:.2f}{mark} | {found['copy'] / found['ours']:.2f} | {theirs} |"
    )


def main() -> None:
    """Measure and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = measure(3 if arguments.quick else 15)
    if arguments.write:
        arguments.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
