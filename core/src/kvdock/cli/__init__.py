"""The command ``kvdock``: arguments in, drawings or JSON out, one line on standard error for what cannot be served.

Only click is imported here; a command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from kvdock.cli import output
from kvdock.cli.text import one_line
from kvdock.errors import KVDockError

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
PIPE_CLOSED = 1
"""Exit code when the reader of the output has gone; click and rich end with the same."""


COMMANDS = {
    "plan": ("plan", "command"),
    "diff": ("diff", "command"),
    "run": ("run", "command"),
    "plugins": ("listing", "plugins_command"),
    "devices": ("listing", "devices_command"),
    "models": ("listing", "models_command"),
}
"""Command → its module in this package and its name there; imported when it is asked for."""


class _Command(click.Group):
    """A group that turns every error a user can cause into one line and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, the most used first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"{__name__}.{module}"), name)
        return command

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        """Run the command line and exit: 0 (`diff`: 1 where it found any), or 2 with a reason and advice on standard error."""
        extra["standalone_mode"] = False
        ours = None
        try:
            ours = output.claim()
            code = super().main(list(args) if args is not None else None, *rest, **extra)
            sys.stdout.flush()
        except click.ClickException as error:
            code = _refuse(_with_help(error))
        except KVDockError as error:
            code = _refuse(str(error))
        except (KeyboardInterrupt, click.Abort):
            code = INTERRUPTED
        except BrokenPipeError:
            output.forget()
            code = PIPE_CLOSED
        except OSError as error:
            output.forget()
            code = _refuse(f"the system refused: {error}; check the file, its rights and the space on the disk")
        output.release(ours)
        sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str) -> int:
    click.echo(f"kvdock: {one_line(message)}", err=True)
    return 2


def _with_help(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    if context is None:
        return error.format_message()
    return f"{error.format_message().rstrip('.')}; see {context.command_path} --help"


def _print_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from kvdock import __version__

        click.echo(f"kvdock {__version__}")
        context.exit()


@click.group(cls=_Command, invoke_without_command=True)
@click.option("--version", is_flag=True, callback=_print_version, expose_value=False, is_eager=True, help="Version.")
@click.pass_context
def main(context: click.Context) -> None:
    """Plan, build and check the KV cache of an LLM inference engine."""
    if context.invoked_subcommand is None:
        raise click.UsageError(f"give a command: {', '.join(COMMANDS)}", context)
