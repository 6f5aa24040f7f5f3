"""The group of all commands, where errors become messages and exit codes."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from batchtune import __version__
from batchtune.cli import console, settings
from batchtune.cli.commands import Command, improving
from batchtune.errors import BatchtuneError, WorkloadError, bounded, nearest, shortened

# The first line of each command's help. Its module is imported only when it is run, or its own help is shown.
COMMANDS = {
    "tune": "Probe, sweep and report, all in one.",
    "probe-oom": "Find the largest batches that fit.",
    "sweep-buckets": "Compare bucket tables and recommend one.",
    "sweep-stream": "Tune the batches of a stream of tar shards.",
    "tune-loader": "Measure a data loader, and recommend its arguments.",
    "scan": "Read the lengths of a data set, once.",
    "report": "Show a run: what to set, what it saves. In CI: hold it to rules.",
    "export": "Write the recommendation as a config for another framework.",
    "verify": "Run the recommended batches for real.",
    "doctor": "Show the devices, memory and software of this machine.",
    "schema": "Print the JSON Schema of a result file.",
}
# What an interrupted command leaves behind.
_KEPT = {
    **dict.fromkeys(("tune", "probe-oom"), " All measurements are kept: the same command continues there."),
    "tune-loader": " The settings that were measured are in loader.json; the same command starts over.",
}


class Commands(TyperGroup):
    """The group of all commands. Turns an error into one message and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name; None if it is unknown."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.commands[cmd_name] = load_command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first argument names; for a misspelt one, suggest others."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            begun = [command for command in COMMANDS if command.startswith(name.lower().replace("_", "-"))]
            meant = " or ".join(begun) or nearest(name, COMMANDS)
            hint = f"Did you mean {meant}?" if meant else f"Commands: {', '.join(COMMANDS)}."
            ctx.fail(f"Unknown command {shortened(name)}. {hint}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        with improving(ctx):
            return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # sent by CI systems: workers end as on Ctrl-C
        try:
            try:
                return super().invoke(ctx)
            finally:  # an error of writing is reported here, not at the end of the process
                sys.stdout.flush()
        except (BatchtuneError, MemoryError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            _report(error)
            raise typer.Exit(error.exit_code if isinstance(error, BatchtuneError) else 1) from None
        except KeyboardInterrupt:
            console.note(f"Interrupted.{_KEPT.get(ctx.invoked_subcommand, '')}")
            raise typer.Exit(130) from None


def _report(error: BatchtuneError | MemoryError | OSError) -> None:
    if isinstance(error, WorkloadError) and error.traceback:
        lines = "\n".join(f"  | {line}" for line in error.traceback.splitlines())
        console.note(f"The last lines of your code's traceback:\n{lines}")
    if isinstance(error, BatchtuneError):
        console.note(f"Error: {error.message}" + (f"\n{error.hint}" if error.hint else ""))
    elif isinstance(error, MemoryError):
        console.note("Error: this needs more memory than the process may use\nRaise its limit (ulimit -v).")
    elif error.filename is not None:  # a file or folder without a message of its own
        console.note(bounded(f"Error: {error.filename}: {error.strerror}"))
    else:  # it is stdout, and nothing more can be written there, not even at the end of the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        console.note(f"Error: the result can't be written: {error.strerror or error}")


def load_command(name: str) -> Any:
    """Import a command's module and make a command of its function; its `EXAMPLES` go to the end of the help."""
    function = name.replace("-", "_")
    module = import_module(f"batchtune.cli.{function}")
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=Command, epilog=module.EXAMPLES)(getattr(module, function))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands,
    # Plain help: Rich takes as long to import as everything else together.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`batchtune COMMAND --help` shows a command's options, with examples. Flags override the environment "
    "(BATCHTUNE_MEMORY, ...), which overrides [tool.batchtune] in pyproject.toml.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchtune {__version__}")
        raise typer.Exit


@app.callback()
def common(
    ctx: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="BATCHTUNE_DEBUG", show_envvar=False, help="Show tracebacks of errors.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Tune the batching of variable-length sequences to your GPU.

    batchtune reads the lengths of a data set, measures the largest batches that fit, compares bucket tables, and writes
    the sampler config that wastes least.
    """
    group: Any = ctx.command
    settings.apply_project(ctx, lambda: {name: group.get_command(ctx, name) for name in COMMANDS})
