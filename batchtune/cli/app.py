"""The commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from batchtune import __version__
from batchtune.cli import console, settings
from batchtune.cli.doctor import EXAMPLE as DOCTOR_EXAMPLE
from batchtune.cli.doctor import doctor
from batchtune.cli.export import EXAMPLE as EXPORT_EXAMPLE
from batchtune.cli.export import export
from batchtune.cli.probe_oom import EXAMPLE as PROBE_OOM_EXAMPLE
from batchtune.cli.probe_oom import probe_oom
from batchtune.cli.report import EXAMPLE as REPORT_EXAMPLE
from batchtune.cli.report import report
from batchtune.cli.scan import EXAMPLE as SCAN_EXAMPLE
from batchtune.cli.scan import scan
from batchtune.cli.schema import EXAMPLE as SCHEMA_EXAMPLE
from batchtune.cli.schema import schema
from batchtune.cli.sweep_buckets import EXAMPLE as SWEEP_BUCKETS_EXAMPLE
from batchtune.cli.sweep_buckets import sweep_buckets
from batchtune.cli.tune import EXAMPLE as TUNE_EXAMPLE
from batchtune.cli.tune import tune
from batchtune.cli.verify import EXAMPLE as VERIFY_EXAMPLE
from batchtune.cli.verify import verify
from batchtune.errors import BatchtuneError

EXIT_INTERRUPTED = 130


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class Commands(TyperGroup):
    """Runs a command and turns what went wrong into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        signal.signal(signal.SIGTERM, _interrupt)  # what a CI sends: worker processes are ended as on Ctrl-C
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BatchtuneError as error:
            if ctx.params.get("debug"):
                raise
            console.print_error(error)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if ctx.params.get("debug"):
                raise
            if error.filename is not None:  # a file or folder, where no better message was thought of
                console.note(f"Error: {error.filename}: {error.strerror}")
                raise typer.Exit(1) from None
            # What is left is stdout. Nothing more can be written there, at the end of the process neither.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):  # the reader has seen enough, as in `| head`
                raise typer.Exit from None
            console.note(f"Error: the result can't be written: {error.strerror or error}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            probing = ctx.invoked_subcommand in ("tune", "probe-oom")
            kept = " What was measured is kept: the same command goes on from there." if probing else ""
            console.note(f"Interrupted.{kept}")
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    # Plain help: Rich's costs as long to import as everything else together.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Settings: flags over environment (BATCHTUNE_MEMORY, ...) over [tool.batchtune] in pyproject.toml.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchtune {__version__}")
        raise typer.Exit


@app.callback()
def common(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option(envvar="BATCHTUNE_DEBUG", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Which batches should this GPU be given?

    batchtune reads the lengths of a data set, finds by measurement the largest batches that fit, compares bucket
    tables, and writes the sampler config that wastes least.
    """
    ctx.default_map = settings.default_map(app)


app.command("tune", epilog=TUNE_EXAMPLE)(tune)
app.command("probe-oom", epilog=PROBE_OOM_EXAMPLE)(probe_oom)
app.command("sweep-buckets", epilog=SWEEP_BUCKETS_EXAMPLE)(sweep_buckets)
app.command("scan", epilog=SCAN_EXAMPLE)(scan)
app.command("report", epilog=REPORT_EXAMPLE)(report)
app.command("export", epilog=EXPORT_EXAMPLE)(export)
app.command("verify", epilog=VERIFY_EXAMPLE)(verify)
app.command("doctor", epilog=DOCTOR_EXAMPLE)(doctor)
app.command("schema", epilog=SCHEMA_EXAMPLE)(schema)
