"""``kvdock plugins``, ``kvdock devices`` and ``kvdock models``: what is installed and known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvdock.cli.inputs import plugin_arguments, read_options
from kvdock.cli.output import foreign_prints_to_stderr, print_json
from kvdock.cli.text import size

if TYPE_CHECKING:
    from kvdock.plugins.report import Row

F = TypeVar("F", bound=Callable[..., Any])


def _json_flag(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


@click.command("plugins")
@plugin_arguments
@click.option("--check", is_flag=True, help="Import each plugin; add contract, hooks, status and reason.")
@_json_flag
def plugins_command(check: bool, as_json: bool, **values: Any) -> None:
    """List plugins, from metadata alone unless --check is given."""
    with foreign_prints_to_stderr():
        from kvdock import edge

        rows = edge.plugin_rows(check, read_options(values))
    if as_json:
        print_json(rows)
        return
    columns = ("name", "tier", "distribution", "status")
    details = ("contract", "hooks", "reason") if check else ("entry point", "reason")
    _draw("plugins", (*columns, *details), [_plugin_cells(row, check) for row in rows])


def _plugin_cells(row: Row, check: bool) -> tuple[str, ...]:
    cells = (row.name, row.tier, f"{row.distribution} {row.version}".strip(), row.status)
    return (*cells, row.contract, ", ".join(row.hooks), row.reason) if check else (*cells, row.entry_point, row.reason)


@click.command("devices")
@plugin_arguments
@_json_flag
def devices_command(as_json: bool, **values: Any) -> None:
    """List the device profiles that plans can be made for, with or without the device."""
    with foreign_prints_to_stderr():
        from kvdock import edge

        pairs = edge.devices(read_options(values))
    if as_json:
        import msgspec

        print_json([{"plugin": plugin, **msgspec.to_builtins(info)} for plugin, info in pairs])
        return
    columns = ("device", "type", "usable", "capabilities", "source")
    rows = [
        (f"{plugin}:{info.name}", info.device_type, size(info.free_bytes), " ".join(info.capabilities), info.source)
        for plugin, info in pairs
    ]
    _draw("devices", columns, rows, numeric=("usable",))


@click.command("models")
@_json_flag
def models_command(as_json: bool) -> None:
    """List the architectures that kvdock reads from a config.json."""
    with foreign_prints_to_stderr():
        from kvdock import families

        names = families.architectures()
    if as_json:
        print_json(names)
        return
    _draw("models", ("architecture",), [(name,) for name in names])


def _draw(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str] = ()) -> None:
    from kvdock.cli.render import draw_table

    if not rows:
        click.echo(f"no {title}")
        return
    draw_table(title, columns, rows, numeric)
