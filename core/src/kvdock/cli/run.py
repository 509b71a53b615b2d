"""``kvdock run``: build a plan here, drive requests through it, check every value."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from kvdock.cli.inputs import make_plan, once, plan_arguments, read_options, read_whole
from kvdock.cli.output import foreign_prints_to_stderr
from kvdock.cli.text import one_line
from kvdock.errors import BuildError, PlanError

if TYPE_CHECKING:
    from kvdock.cache import KVCache
    from kvdock.planner import CachePlan
    from kvdock.testing.report import Progress, Report
    from kvdock.testing.trace import Arrival

DEFAULT_BYTES = 2**28
"""What a run allocates unless it is told: 256 MiB, small enough for any machine."""
DEFAULT_REQUESTS = 16


@click.command("run")
@plan_arguments
@once("--trace", type=click.Path(), help="JSON lines or CSV with one request a row, instead of seeded ones.")
@once(
    "--requests",
    callback=read_whole,
    metavar="N",
    help="Requests to drive. Default: 16 seeded ones, or the whole trace.",
)
@once("--seed", type=int, default=0, show_default=True, help="Seed of arrivals and values.")
@click.option("--on-cpu", is_flag=True, help="Build what is planned for --device in host memory, with torch's kernels.")
@once("--scale", type=float, default=1.0, show_default=True, help="Multiply the lengths of the requests.")
def command(
    model: str,
    device: str | None,
    memory: int | None,
    weights: int | None,
    trace: str | None,
    requests: int | None,
    seed: int,
    scale: float,
    on_cpu: bool,
    **values: Any,
) -> None:
    """Build the cache of MODEL and drive requests through it, checking every value that is read back.

    Runs on the CPU unless --device names a live device, in 256MiB unless --memory says otherwise. With --on-cpu the
    form for any device runs here, also for one that is not.
    """
    if not 0 < scale < float("inf"):
        raise click.UsageError(f"--scale {scale} is no factor; give a number above 0")
    if requests is not None and requests < 1:
        raise click.UsageError(f"--requests {requests} drives nothing; give at least 1")
    if memory is None and weights is None and values["reserve"] is None and values["mem_fraction_static"] is None:
        memory = DEFAULT_BYTES
    _need_torch()
    with foreign_prints_to_stderr():
        plan = make_plan(model, device or _host(values), memory, weights, values)
        report = _drive(plan, _arrivals(plan, trace, requests, seed, scale), seed, on_cpu)
    from kvdock.cli.render import draw_report

    if report.rejected == report.arrived:
        raise PlanError(
            f"none of the {report.arrived} requests can be served: this plan holds requests of at most "
            f"{report.longest_tokens} tokens; shorten them with --scale, or give more --memory"
        )
    draw_report(report)
    if not report.ok:
        raise BuildError(
            f"the run failed: {'; '.join(report.problems)}; this is a fault of the pools, please report it"
        )


def _host(values: Mapping[str, Any]) -> str:
    """Return the device of a run that names none: the CPU, unless hardware is asked for by name.

    Raises:
        PlanError: it is; the CPU does not take its place.
    """
    from kvdock.startup import candidates

    asked = read_options(values).plugins or ()
    hardware = sorted({found.name for found in candidates() if found.tier == "hardware" and found.name in asked})
    if hardware:
        ways = " or ".join(f"--device {name}:0" for name in hardware)
        raise PlanError(
            f"--plugin {' and '.join(hardware)} asks for hardware, and no device is named to run on; give {ways}, or "
            "--device cpu"
        )
    return "cpu"


def _need_torch() -> None:
    try:
        import torch
    except ImportError as error:
        reason = one_line(str(error))
        raise BuildError(f"kvdock run needs torch ({reason}); install it with: pip install 'kvdock[torch]'") from error
    # Small operations on shared cores cost more with several threads than with one.
    torch.set_num_threads(1)


def _arrivals(plan: CachePlan, trace: str | None, requests: int | None, seed: int, scale: float) -> Iterator[Arrival]:
    from itertools import islice

    from kvdock.testing.trace import read_trace, scaled, seeded

    if trace is not None:
        return scaled(islice(read_trace(trace), requests), scale)
    return scaled(seeded(seed, requests or DEFAULT_REQUESTS, max(2, plan.max_request_tokens)), scale)


def _drive(plan: CachePlan, arrivals: Iterator[Arrival], seed: int, on_cpu: bool) -> Report:
    from kvdock.builder import build
    from kvdock.testing.driver import drive

    cache: KVCache = build(plan, "cpu" if on_cpu else None)
    with _progress() as show:
        return drive(cache, arrivals, seed=seed, on_progress=show)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Progress], None] | None]:
    """Yield what draws the progress on a terminal, ``None`` where there is none."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("building", total=None)

        def show(progress: Progress) -> None:
            text = f"{progress.finished} of {progress.arrived} requests, {progress.tokens_written:,} tokens"
            bar.update(task, description=text, completed=progress.finished, total=progress.arrived)

        yield show
