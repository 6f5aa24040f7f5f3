"""The commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup

from batchtune import __version__
from batchtune.cli import console, settings
from batchtune.cli.commands import Command, improve
from batchtune.errors import BatchtuneError, bounded, shortened

EXIT_INTERRUPTED = 130


class Entry(NamedTuple):
    """Where a command is, and the first line of its help."""

    module: str
    purpose: str


# A command's module is imported when it is run; for the list of all, this is enough.
COMMANDS = {
    "tune": Entry("tune", "Probe, sweep and report, all in one."),
    "probe-oom": Entry("probe_oom", "Find the largest batches that fit."),
    "sweep-buckets": Entry("sweep_buckets", "Compare bucket tables, recommend one."),
    "scan": Entry("scan", "Read the lengths of a data set, once."),
    "report": Entry("report", "Show a run: what to set, what it saves. In CI: hold it to rules."),
    "export": Entry("export", "Write the recommendation in another framework's words."),
    "verify": Entry("verify", "Run the recommended batches for real."),
    "doctor": Entry("doctor", "Show what this machine offers."),
    "schema": Entry("schema", "Print the JSON Schema of a result file."),
}


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class Commands(TyperGroup):
    """Loads a command, runs it, and turns what went wrong into one message and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name; None where there is none."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.commands[cmd_name] = load_command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names; a misspelt one is told with what was meant."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = [command for command in COMMANDS if command.startswith(name.lower().replace("_", "-"))]
            meant = near or [one for one in [settings.nearest(name, COMMANDS)] if one]
            hint = f"Did you mean {' or '.join(meant)}?" if meant else f"There are {', '.join(COMMANDS)}."
            ctx.fail(f"There is no command {shortened(name)}. {hint}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses what stands before the command."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter.__base__ as error:  # type: ignore[misc]  # of all errors of usage
            improve(error, ctx)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.purpose) for name, entry in COMMANDS.items()])

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        signal.signal(signal.SIGTERM, _interrupt)  # what a CI sends: worker processes are ended as on Ctrl-C
        try:
            try:
                return super().invoke(ctx)
            finally:  # what can't be written is told here, not at the end of the process
                sys.stdout.flush()
        except BatchtuneError as error:
            if ctx.params.get("debug"):
                raise
            console.print_error(error)
            raise typer.Exit(error.exit_code) from None
        except MemoryError:
            if ctx.params.get("debug"):
                raise
            console.note("Error: this process may not take as much memory as that needs\nRaise its limit (ulimit -v).")
            raise typer.Exit(1) from None
        except OSError as error:
            if ctx.params.get("debug"):
                raise
            if error.filename is not None:  # a file or folder, where no better message was thought of
                console.note(bounded(f"Error: {error.filename}: {error.strerror}"))
                raise typer.Exit(1) from None
            # What is left is stdout. Nothing more can be written there, at the end of the process neither.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            console.note(f"Error: the result can't be written: {error.strerror or error}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            probing = ctx.invoked_subcommand in ("tune", "probe-oom")
            kept = " What was measured is kept: the same command goes on from there." if probing else ""
            console.note(f"Interrupted.{kept}")
            raise typer.Exit(EXIT_INTERRUPTED) from None


def load_command(name: str) -> Any:
    """Imports a command's module and makes a command of its function; its `EXAMPLE` goes to the help's end."""
    module = import_module(f"batchtune.cli.{COMMANDS[name].module}")
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=Command, epilog=module.EXAMPLE)(getattr(module, COMMANDS[name].module))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands,
    # Plain help: Rich's costs as long to import as everything else together.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`batchtune COMMAND --help` shows a command's options, with examples. Settings: flags over environment "
    "(BATCHTUNE_MEMORY, ...) over [tool.batchtune] in pyproject.toml.",
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
    """Which batches should this GPU be given?

    batchtune reads the lengths of a data set, finds by measurement the largest batches that fit, compares bucket
    tables, and writes the sampler config that wastes least.
    """
    group: Any = ctx.command
    settings.apply_project(ctx, lambda: {name: group.get_command(ctx, name) for name in COMMANDS})
