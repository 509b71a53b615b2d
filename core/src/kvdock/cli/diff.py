"""``kvdock diff``: in what two plan files differ, or what keeps one side's KV from being read by the other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvdock.cli.output import foreign_prints_to_stderr, print_json
from kvdock.cli.plan import show_page
from kvdock.errors import PlanError, printable

if TYPE_CHECKING:
    from kvdock.differences import Difference
    from kvdock.planner import CachePlan

FOUND = 1
"""Exit code where there are differences, as that of other tools that compare files."""
PATH = click.Path(exists=True, dir_okay=False)


@click.command("diff")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--transfer", is_flag=True, help="Compare only what a transfer of KV between the two depends on.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a table as GitHub Markdown.")
def command(a: str, b: str, transfer: bool, as_json: bool, as_markdown: bool) -> int:
    """Compare two plan files, as kvdock plan --json writes them. Exit code 0: no difference, 1: some."""
    if as_json and as_markdown:
        raise click.UsageError("--json and --markdown are two ways to print one answer; give one of them")
    with foreign_prints_to_stderr():
        from kvdock.compat import compatible
        from kvdock.differences import diff

        found = (compatible if transfer else diff)(_read(a), _read(b))
    _show(found, transfer, as_json, as_markdown)
    return FOUND if found else 0


def _show(found: tuple[Difference, ...], transfer: bool, as_json: bool, as_markdown: bool) -> None:
    """Print differences: a line each, as JSON, or as a Markdown table."""
    from kvdock.cli.answers import NO_DIFFERENCE, differences_page
    from kvdock.differences import render_lines

    if as_json:
        print_json(found)
    elif as_markdown:
        show_page(differences_page(found, transfer=transfer), as_markdown)
    else:
        click.echo("\n".join(render_lines(found)) or NO_DIFFERENCE[transfer])


def _read(path: str) -> CachePlan:
    """Return the plan of a file.

    Raises:
        PlanError: no plan file, too long, or planned otherwise now; names the file.
    """
    from kvdock.planfile import MAX_FILE_BYTES
    from kvdock.planner import CachePlan

    with Path(path).open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    try:
        return CachePlan.from_json(raw)
    except PlanError as error:
        raise PlanError(f"{printable(os.fsdecode(path))}: {error}") from error
