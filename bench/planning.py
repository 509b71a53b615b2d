"""Times planning: the call in one process, and ``kvdock plan --json`` as a process of its own.

    python bench/planning.py [--write FILE]

The process is compared, in turn, with an interpreter that only imports click, msgspec, pluggy and
importlib_metadata, since that is what no command line built on them can go below.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import kvdock
from kvdock.edge import find_device, read_models
from kvdock.options import CacheOptions, Parallelism
from kvdock.startup import installed

MODELS = Path(__file__).parents[1] / "tests" / "models"
IMPORTS = "import click, msgspec, pluggy, importlib_metadata"
BUDGET_BYTES = 32 * 2**30


def plan_ms(path: Path, rounds: int) -> float:
    registry, options = installed(), CacheOptions(page_size=16)
    models, _ = read_models(path, options, registry)
    device = find_device(None, registry, BUDGET_BYTES)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        kvdock.plan_from(models, device, options, Parallelism(), registry, budget_bytes=BUDGET_BYTES)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def wall_s(command: list[str]) -> float:
    # An installed package runs from its bytecode; an environment that forbids writing it would time the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start


def process_ratio(rounds: int) -> tuple[float, float, float]:
    """Median seconds of the command, of the bare imports, and the median of the ratios, taken in turn."""
    model = str(MODELS / "llama-3.1-8b.json")
    ours = [str(Path(sys.executable).with_name("kvdock")), "plan", model, "--memory", "32GiB", "--json"]
    bare = [sys.executable, "-c", IMPORTS]
    pairs = [(wall_s(ours), wall_s(bare)) for _ in range(rounds + 1)][1:]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    lines = ["| model | plan_from(), median ms |", "|---|---|"]
    for path in sorted(MODELS.glob("*.json")):
        try:
            lines.append(f"| {path.stem} | {plan_ms(path, args.rounds):.2f} |")
        except kvdock.KVDockError:
            continue  # a model of a kind that no installed plugin serves
    ours, bare, ratio = process_ratio(args.rounds)
    lines += [
        "",
        f"`kvdock plan --json` as a process: {ours * 1e3:.0f} ms, bare imports {bare * 1e3:.0f} ms, "
        f"ratio {ratio:.2f} (medians of {args.rounds} pairs taken in turn)",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.write:
        args.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
