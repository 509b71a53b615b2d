"""``kvdock plan``: what fits, where every byte goes, and why."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import click

from kvdock.cli.inputs import make_plan, plan_arguments
from kvdock.cli.output import foreign_prints_to_stderr, warn


@click.command("plan")
@plan_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--explain", "as_text", is_flag=True, help="Print every decision and every byte.")
def command(
    model: str,
    device: str | None,
    memory: int | None,
    weights: int | None,
    as_json: bool,
    as_text: bool,
    **values: Any,
) -> None:
    """Plan the KV cache of MODEL (a config.json, a model folder, or hf:org/name) on one rank.

    Without --device and --memory the one live accelerator is planned for.
    """
    if device is not None and memory is not None:
        raise click.UsageError("--device and --memory both say how much memory there is; give one of them")
    if as_json and as_text:
        raise click.UsageError("--json and --explain are two ways to print one plan; give one of them")
    with foreign_prints_to_stderr(), _uncollected():
        made = make_plan(model, device, memory, weights, values)
        text = made.to_json() if as_json else made.explain() if as_text else None
    if text is None:
        from kvdock.cli.render import draw_plan

        draw_plan(made)
    elif as_json:
        for warning in made.warnings:
            warn(warning)
        click.echo(text.encode())
    else:
        click.echo(text)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Leave garbage alone: what planning makes stays in use, and looking for garbage among it costs a tenth."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
