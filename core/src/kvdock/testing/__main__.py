"""The command ``python -m kvdock.testing``: starts a plugin."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import click

from kvdock.errors import KVDockError
from kvdock.testing import new as templates


class _Refused(click.ClickException):
    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"kvdock.testing: {self.message}", err=True)


@click.group()
def main() -> None:
    """Tools for authors of plugins."""


@main.command("new")
@click.argument("name")
@click.option("--kind", type=click.Choice(templates.KINDS), default="hardware", help="What it is a plugin for.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Folder to make kvdock-NAME in; it is made too, if its parent is there.",
)
def new_command(name: str, kind: str, out: Path) -> None:
    """Write kvdock-NAME, a plugin that works and passes the conformance suites, to be changed file by file."""
    try:
        target = templates.write(name, kind, out)
    except KVDockError as error:
        raise _Refused(str(error)) from error
    count = sum(1 for path in target.rglob("*") if path.is_file())
    click.echo(f"wrote {target} ({count} files); next:")
    click.echo(f"  pip install -e '{target}[test]'")
    click.echo(f"  python -m pytest {target}")


if __name__ == "__main__":
    main(prog_name="python -m kvdock.testing")
