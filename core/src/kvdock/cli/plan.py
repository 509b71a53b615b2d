"""``kvdock plan``: what fits, where every byte goes, and why; and the questions that a plan answers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from kvdock.cli.inputs import Bytes, is_given, make_plan, once, plan_arguments, read_inputs, read_whole
from kvdock.cli.output import foreign_prints_to_stderr, print_json, warn

if TYPE_CHECKING:
    from kvdock.cli.page import Page
    from kvdock.planner import CachePlan

QUESTIONS = {
    "fit": "the smallest --tp",
    "ranks": "every rank and the totals",
    "compare": "plans side by side",
    "max_length": "the longest length",
    "explain": "every decision and every byte of one plan",
}
"""Flags of which one is given at most, and what each prints; ``--length`` without any asks whether requests fit."""
BESIDE = {"fit": ("length",), "max_length": ("requests",)}
"""Question → what else of ``--requests`` and ``--length`` says more of it."""


@click.command("plan")
@plan_arguments
@once("--requests", callback=read_whole, metavar="N", help="With --length: do N fit? With --max-length: how long?")
@once("--length", callback=read_whole, metavar="L", help="Do requests of L tokens fit, and if not, what would?")
@click.option("--max-length", is_flag=True, help="The longest length that --requests N (default 1) can have.")
@once("--fit", callback=read_whole, metavar="N", help="The smallest --tp for N tokens, or N requests of --length L.")
@click.option("--compare", multiple=True, metavar="KEY=V1,V2", help="Plans side by side, one a value; repeatable.")
@click.option("--ranks", is_flag=True, help="Every rank, and the deployment's totals.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the plan, or the answer.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the tables as GitHub Markdown.")
@click.option("--explain", is_flag=True, help="Print every decision and every byte.")
def command(
    model: str,
    device: str | None,
    memory: Bytes,
    weights: Bytes,
    as_json: bool,
    as_markdown: bool,
    **values: Any,
) -> None:
    """Plan the KV cache of MODEL (a config.json, a model folder, or hf:org/name) on one rank.

    Without --device and --memory the one live accelerator is planned for. Exit code 0: planned, or answered, be it no.
    """
    asked = {name: values.pop(name) for name in (*QUESTIONS, "requests", "length")}
    if device is not None and memory is not None:
        raise click.UsageError("--device and --memory both say how much memory there is; give one of them")
    if as_json and as_markdown:
        raise click.UsageError("--json and --markdown are two ways to print one answer; give one of them")
    question = _question(asked)
    if question == "explain" and (as_json or as_markdown):
        other = "--json" if as_json else "--markdown"
        raise click.UsageError(f"{other} and --explain are two ways to print one plan; give one of them")
    if question is None or question == "explain":
        _plan(lambda: make_plan(model, device, memory, weights, values), question, as_json, as_markdown)
        return
    with foreign_prints_to_stderr(), _uncollected():
        from kvdock.cli.ask import ask

        answer = ask(question, model, read_inputs(device, memory, weights, values), asked)
    if as_json:
        for warning in answer.warnings:
            warn(warning)
        print_json(answer.data)
    else:
        show_page(answer.page, as_markdown)


def _question(asked: Mapping[str, Any]) -> str | None:
    """Return what is asked beside the plan itself, or ``None``.

    Raises:
        click.UsageError: two questions, or a number that says nothing about the one that is asked.
    """
    found = [name for name in QUESTIONS if is_given(asked[name])]
    if len(found) > 1:
        prints = ", ".join(f"{_flag(name)} prints {QUESTIONS[name]}" for name in found)
        raise click.UsageError(f"{prints}; choose one of them")
    numbers = [name for name in ("requests", "length") if asked[name] is not None]
    if found:
        idle = [name for name in numbers if name not in BESIDE.get(found[0], ())]
        if idle:
            raise click.UsageError(f"{_flag(idle[0])} has no effect beside {_flag(found[0])}; leave one of them out")
        return found[0]
    if numbers == ["requests"]:
        raise click.UsageError("--requests asks nothing alone; give --length L (do they fit?) or --max-length")
    return "serves" if numbers else None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _plan(make: Any, question: str | None, as_json: bool, as_markdown: bool) -> None:
    """Print a plan: drawn, as JSON, as Markdown, or with every decision."""
    with foreign_prints_to_stderr(), _uncollected():
        made: CachePlan = make()
        text = made.to_json() if as_json else made.explain() if question else None
    if text is None:
        from kvdock.cli.overview import plan_page

        show_page(plan_page(made), as_markdown)
    elif as_json:
        for warning in made.warnings:
            warn(warning)
        click.echo(text.encode())
    else:
        click.echo(text)


def show_page(page: Page, as_markdown: bool) -> None:
    """Print a page, drawn or as Markdown."""
    if as_markdown:
        from kvdock.cli.page import markdown

        click.echo(markdown(page))
    else:
        from kvdock.cli.render import draw

        draw(page)


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
