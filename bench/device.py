"""Times the kernels of a device: `python bench/device.py [--device cuda] [--small] [--only TEXT] [--write FILE]`.

Each kernel is measured beside a contiguous copy that moves as many bytes, both with cold caches, and by what the
device takes; what the host takes to start it stands beside that. Goal: at 16,384 tokens, rows move at 0.8 of the copy's
speed. `--device cpu --kernels reference` runs the same measurements anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timing
import torch
from kvdock import dtypes
from kvdock.kernels.interface import Kernels
from kvdock.kernels.reference import ReferenceKernels

FLUSH = 2**29
"""Bytes written before each call, so that nothing that it reads is in a cache and the host is ahead of the device."""
BF16, I64 = torch.bfloat16, torch.int64


class Scale(NamedTuple):
    """How much is measured: slots of a pool, tokens of a call, layers of a move, and the calls that count."""

    slots: int
    tokens: tuple[int, ...]
    layers: int
    calls: int
    flush: int


FULL = Scale(2**18, (256, 16384), 32, 30, FLUSH)
SMALL = Scale(2**10, (16, 64), 2, 3, 2**16)


class Case(NamedTuple):
    """A call to time, and the bytes that it reads and writes."""

    name: str
    call: Callable[[], object]
    nbytes: int


class Bed(NamedTuple):
    """What cases are made of: the kernels, where they run, and how large."""

    kernels: Kernels
    device: str
    scale: Scale

    def slots_of(self, tokens: int) -> torch.Tensor:
        """Return `tokens` different slots in runs of 16, in random order, on the device."""
        starts = torch.randperm(self.scale.slots // 16)[: -(-tokens // 16)] * 16
        return (starts[:, None] + torch.arange(16)).view(-1)[:tokens].to(self.device)

    def view(self, page_size: int, *shape: int, dtype: torch.dtype = BF16, layers: int = 1) -> torch.Tensor:
        """Return the view of one of `layers` layers that share pages; of one layer it is contiguous."""
        pages = self.scale.slots // page_size
        return torch.zeros(pages, layers, page_size, *shape, dtype=dtype, device=self.device)[:, -1]

    def values(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(BF16)


def rows(bed: Bed, n: int) -> Iterator[Case]:
    """Give the cases of rows of keys and values, 8 heads of 128, and of latents of 512 and 64."""
    kernels, loc, k, v = bed.kernels, bed.slots_of(n), bed.values(n, 8, 128), bed.values(n, 8, 128)
    for page_size, layers in ((1, 1), (16, 1), (16, 4)):
        k_view, v_view = (bed.view(page_size, 8, 128, layers=layers) for _ in range(2))
        where = f"page {page_size}, {'page' if layers > 1 else 'layer'}-major"
        yield Case(f"store_kv, {where}", lambda a=k_view, b=v_view: kernels.store_kv(a, b, loc, k, v), 4 * _nbytes(k))
        yield Case(f"gather, {where}", lambda a=k_view: kernels.gather(a, loc), 2 * _nbytes(k))
    yield Case(f"store, {where}", lambda: kernels.store(k_view, loc, k), 2 * _nbytes(k))
    latent, rope, mla = bed.values(n, 1, 512), bed.values(n, 1, 64), bed.view(64, 1, 576)
    nbytes = 2 * (_nbytes(latent) + _nbytes(rope))
    yield Case("store_mla, page 64", lambda: kernels.store_mla(mla, loc, latent, rope), nbytes)


def moves(bed: Bed, n: int) -> Iterator[Case]:
    """Give the cases that treat the slots of many layers, or of two views."""
    kernels, both = bed.kernels, bed.slots_of(2 * n)
    target, source = both[:n].contiguous(), both[n:].contiguous()
    views = [bed.view(16, 1, 128) for _ in range(bed.scale.layers)]
    nbytes = n * 256 * len(views)
    yield Case(f"move, {len(views)} layers", lambda: kernels.move(views, target, source), 2 * nbytes)
    yield Case(f"clear, {len(views)} layers", lambda: kernels.clear(views, target), nbytes)
    between = lambda: kernels.copy_rows(views[0], target, views[1], source)  # noqa: E731
    yield Case("copy_rows", between, 2 * n * 256)


def blocks(bed: Bed, n: int) -> Iterator[Case]:
    """Give the cases of formats with a scale a block, heads of 8 × 128."""
    kernels, loc, values = bed.kernels, bed.slots_of(n), bed.values(n, 8, 128)
    for name in ("nvfp4", "mxfp8"):
        form = dtypes.find(name)
        width = 128 * form.bits // 8
        data = bed.view(16, 8, width, dtype=torch.uint8)
        scales = bed.view(16, 8, 128 // form.block, dtype=torch.uint8)
        nbytes = _nbytes(values) + n * 8 * (width + 128 // form.block)
        store = lambda d=data, s=scales, f=form: kernels.store_blocks(d, s, loc, values, f)  # noqa: E731
        load = lambda d=data, s=scales, f=form: kernels.load_blocks(d, s, loc, f, BF16)  # noqa: E731
        yield Case(f"store_blocks, {name}", store, nbytes)
        yield Case(f"load_blocks, {name}", load, nbytes)
    data, scales = kernels.quantize_blocks(values, "float8_e4m3fn", 128)
    written = _nbytes(data) + _nbytes(scales)
    quantize = lambda: kernels.quantize_blocks(values, "float8_e4m3fn", 128)  # noqa: E731
    dequantize = lambda: kernels.dequantize_blocks(data, scales, "float8_e4m3fn", 128)  # noqa: E731
    yield Case("quantize_blocks, 8 bits", quantize, _nbytes(values) + written)
    yield Case("dequantize_blocks, 8 bits", dequantize, 4 * values.numel() + written)


def arithmetic(bed: Bed, n: int) -> Iterator[Case]:
    """Give the cases of slots and request rows: 64 tokens a request, pages of 16 slots."""
    kernels, size, batch = bed.kernels, 16, max(1, n // 64)
    on_device = lambda values: torch.as_tensor(values, dtype=I64, device=bed.device)  # noqa: E731
    prefix, seq = on_device([5] * batch), on_device([69] * batch)
    last, pages = on_device(range(size + 4, size * (batch + 1), size)), on_device(range(batch, 5 * batch))
    extend = lambda: kernels.alloc_extend(prefix, seq, last, pages, size, 64 * batch)  # noqa: E731
    yield Case(f"alloc_extend, {batch} requests", extend, 8 * (64 * batch + 7 * batch))
    steps, ends = on_device([17] * n), on_device(range(size - 1, size * n, size))
    step_pages = on_device(range(n, 2 * n))
    decode = lambda: kernels.alloc_decode(steps, ends, step_pages, size)  # noqa: E731
    yield Case("alloc_decode", decode, 8 * 4 * n)
    mapping, loc = torch.arange(bed.scale.slots // size, device=bed.device), bed.slots_of(n)
    yield Case("translate", lambda: kernels.translate(mapping, loc, size), 8 * (2 * n + n // size))
    table = torch.zeros(batch + 1, 256, dtype=torch.int32, device=bed.device)
    some = np.arange(1, batch + 1)
    starts = np.full(batch, 5)
    slots = on_device(range(64 * batch))
    write = lambda: kernels.write_spans(table, some, starts, starts + 64, slots)  # noqa: E731
    yield Case(f"write_spans, {batch} requests", write, 64 * batch * (8 + 4))
    read = lambda: kernels.read_pages(table, some, 0 * starts, 0 * starts + 16, size)  # noqa: E731
    yield Case(f"read_pages, {batch} requests", read, 16 * batch * (8 + 4))
    row, column = (
        torch.arange(64 * batch, device=bed.device) // 64 + 1,
        torch.arange(64 * batch, device=bed.device) % 64,
    )
    yield Case("write_rows", lambda: kernels.write_rows(table, row, column, slots), 64 * batch * (24 + 4))


GROUPS = {"rows": rows, "moves": moves, "blocks": blocks, "arithmetic": arithmetic}


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def copy_of(nbytes: int, device: str) -> Callable[[], object]:
    """Return a contiguous copy that reads and writes so many bytes in all."""
    source = torch.zeros(max(1, nbytes // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


class Clock:
    """Measures calls on one device, each after its caches were emptied."""

    def __init__(self, device: str, scale: Scale) -> None:
        self._calls = scale.calls
        self._on_device = torch.device(device).type != "cpu"
        self._flushed = torch.zeros(scale.flush, dtype=torch.uint8, device=device)

    def measure(self, call: Callable[[], object]) -> tuple[float, float]:
        """Return the median microseconds that the device takes, and those that the host takes to start it."""
        for _ in range(3):
            call()
        return self._of_events(call) if self._on_device else self._of_host(call)

    def _of_host(self, call: Callable[[], object]) -> tuple[float, float]:
        spent = []
        for _ in range(self._calls):
            self._flushed.zero_()
            spent.append(timing.timed(call)[0])
        return statistics.median(spent), statistics.median(spent)

    def _of_events(self, call: Callable[[], object]) -> tuple[float, float]:
        pairs, started = [], []
        torch.cuda.synchronize()
        for _ in range(self._calls):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flushed.zero_()
            pair[0].record()
            began = time.perf_counter()
            call()
            started.append((time.perf_counter() - began) * 1e6)
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs), statistics.median(started)


def measured(bed: Bed, only: str = "") -> Iterator[tuple[str, list[list[str]]]]:
    """Give a title and a row a kernel for each group and number of tokens."""
    clock = Clock(bed.device, bed.scale)
    for group, cases in GROUPS.items():
        for n in bed.scale.tokens:
            found = [_row(clock, case, bed.device) for case in cases(bed, n) if only in f"{group} {case.name}"]
            if found:
                yield f"{group}, {n} tokens", found


def _row(clock: Clock, case: Case, device: str) -> list[str]:
    (took, started), (copied, _) = clock.measure(case.call), clock.measure(copy_of(case.nbytes, device))
    speed = f"{case.nbytes / took / 1e3:.1f}"
    return [
        case.name,
        timing.time_name(took),
        speed,
        timing.time_name(copied),
        f"{copied / took:.2f}",
        f"{started:.0f} µs",
    ]


HEADER = ["kernel", "device", "GB/s", "copy of the bytes", "of the copy's speed", "host"]


def make_kernels(name: str) -> Kernels:
    if name == "reference":
        return ReferenceKernels()
    from kvdock.kernels.triton_set import TritonKernels

    return TritonKernels()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the kernels of a device beside a copy of the same bytes.")
    parser.add_argument("--device", default="cuda", help="where kernels run, as torch names it (default: cuda)")
    parser.add_argument("--kernels", choices=["triton", "reference"], default="triton", help="default: triton")
    parser.add_argument("--small", action="store_true", help="little of everything, to see that it runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels with this text in group and name")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables as markdown, too")
    given = parser.parse_args(arguments)
    if given.device != "cpu" and not torch.cuda.is_available():
        print(f"{given.device} is not here; run this on an accelerator, or with --device cpu --kernels reference", file=sys.stderr)  # fmt: skip
        return 2
    if given.device == "cpu" and given.kernels == "triton":
        print("Triton serves no cpu; add --kernels reference", file=sys.stderr)
        return 2
    torch.manual_seed(1)
    bed = Bed(make_kernels(given.kernels), given.device, SMALL if given.small else FULL)
    tables = []
    # Events are of the current device, whichever one kernels run on.
    with contextlib.nullcontext() if given.device == "cpu" else torch.cuda.device(given.device):
        for title, found in measured(bed, given.only):
            tables.append(timing.table(title, HEADER, found))
            print(tables[-1], flush=True)
    if not tables:
        print(f"no kernel has {given.only!r} in its name; groups are {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    if given.write is not None:
        given.write.write_text("\n".join(tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
