"""The group of all commands, where errors become messages and exit codes.

`click` is reached through typer alone: newer releases of typer carry their own copy of it, older ones need it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from functools import cache
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from batchtune import __version__
from batchtune.cli import console
from batchtune.errors import (
    BatchtuneError,
    UsageError,
    WorkloadError,
    bounded,
    shortened,
)


class Declared(NamedTuple):
    """A command's module, and the first line of its help."""

    module: str
    summary: str


# A module is imported only when its command is run, or the command's own help is shown.
COMMANDS = {
    "tune": Declared("tune", "Probe, sweep, prove and report, all in one."),
    "probe-oom": Declared("tune", "Find the largest batches that fit."),
    "sweep-buckets": Declared("tune", "Compare bucket tables and recommend one."),
    "sweep-stream": Declared("tune", "Tune the batches of a stream of tar shards."),
    "tune-loader": Declared(
        "tune", "Measure a data loader, and recommend its arguments."
    ),
    "scan": Declared("describe", "Read the lengths of a data set, once."),
    "report": Declared(
        "report", "Show a run: what to set, what it saves. In CI: hold it to rules."
    ),
    "export": Declared(
        "report", "Write the recommendation as a config for another framework."
    ),
    "verify": Declared("verify", "Run the recommended batches for real."),
    "record": Declared(
        "script", "Run a training script as it is, and record its steps."
    ),
    "run": Declared(
        "script", "Run a training script as it is, with the recommended batches."
    ),
    "doctor": Declared(
        "describe", "Show the devices, memory and software of this machine."
    ),
    "schema": Declared("describe", "Print the JSON Schema of a result file."),
}
COMMON = "Options"
PREFIX = "BATCHTUNE_"  # of the environment variables that set options

# The base of all errors of usage that parsing raises; typer has no public name for it.
_ParsingError: Any = typer.BadParameter.__base__
_WAIT = "--wait"


class WrongNumber(typer.BadParameter):
    """The value of an option is not the number that the option takes."""


def is_from_environment(ctx: Any, name: str) -> bool:
    """Return whether an environment variable sets the option, and the command line does not."""
    return getattr(ctx.get_parameter_source(name), "name", None) == "ENVIRONMENT"


def show_environment(ctx: Any) -> None:
    """Say which options of the command come from the environment, unless it is quiet."""
    shown = []
    for parameter in ctx.command.params:
        if is_from_environment(ctx, parameter.name):
            option = max(parameter.opts, key=len).lstrip("-")
            value = bounded(os.environ[parameter.envvar])
            shown.append(f"{option} {value} from {parameter.envvar}")
    if shown:
        console.note(
            f"Settings: {', '.join(shown)}", quiet=bool(ctx.params.get("quiet"))
        )


class Command(TyperCommand):
    """A command with a manual page for its help, whose errors say where a wrong value was set."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; the environment sets options that it leaves out."""
        try:
            words = self._with_run(self._with_command(_with_wait(args)))
            return super().parse_args(ctx, words)
        except _ParsingError as error:
            parameter: Any = getattr(error, "param", None)
            variable = None
            if parameter is not None and is_from_environment(ctx, parameter.name):
                variable = parameter.envvar
            if isinstance(error, WrongNumber):
                source = f" (from {variable})" if variable else ""
                message = f"{parameter.opts[0]}: {error.message}{source}"
                hint = f"Give another number, or leave {parameter.opts[0]} out."
                raise UsageError(message, hint) from None
            if self._takes_a_command and getattr(parameter, "name", "") == "manifest":
                raise UsageError(
                    "neither a MANIFEST nor the command of a script is given",
                    f"Write one of them, or both: batchtune {self.name} MANIFEST -- python train.py",
                ) from None
            if variable:
                value = shortened(os.environ[variable])
                error.message += f", got {value} from {variable}"
            error.message = bounded(error.message)
            raise

    def _with_command(self, args: list[str]) -> list[str]:
        """Return a command line with the words after `--` as the value of one option, for commands that take them.

        The manifest may then be left out.
        """
        parameters = {parameter.name: parameter for parameter in self.params}
        if "command" not in parameters:
            return args
        if "manifest" in parameters:
            parameters["manifest"].required = "--" not in args
        if "--" not in args:
            self._refuse_script(args)
            return args
        end = args.index("--")
        words = args[end + 1 :]
        if not words:
            raise UsageError(
                "no command follows --", "Give it as in a shell: -- python train.py"
            )
        if shutil.which(words[0]) is None:
            hint = "Is it installed, and on PATH?"
            if words[0].endswith(".py"):
                hint = f"Give it as in a shell: -- python {shlex.join(words)}"
            raise UsageError(
                f"{bounded(words[0])} can't be started: no program has this name",
                hint,
            )
        return [*args[:end], "--command", json.dumps(words)]

    def _refuse_script(self, args: list[str]) -> None:
        """Raise UsageError for a script's command that stands where the manifest does."""
        for place, word in enumerate(args):
            follows_option = place > 0 and args[place - 1].startswith("-")
            if word.endswith(".py") and not follows_option:
                start = place
                if place > 0 and shutil.which(args[place - 1]) is not None:
                    start -= 1
                command = [self.name or "", *args[:start], "--", *args[start:]]
                raise UsageError(
                    f"{shortened(word)} is a script, not a manifest",
                    f"Put its command after --: batchtune {shlex.join(command)}",
                )

    def _with_run(self, args: list[str]) -> list[str]:
        """Return a command line whose `--run DIR` is an argument, for commands that take the run folder as one."""
        run = next((each for each in self.params if each.name == "run"), None)
        if run is None or run.param_type_name != "argument":
            return args
        return [word.removeprefix("--run=") for word in args if word != "--run"]

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        show_environment(ctx)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            kept = ""
            if self.name in ("tune", "probe-oom") and _holds_trials(ctx.params["run"]):
                kept = " All measurements are kept: the same command continues there."
            raise KeyboardInterrupt(kept) from None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, without the braces that newer releases of typer put in: `MANIFEST...`."""
        pieces = [
            piece.strip("{}").replace("}...", "...")
            for piece in super().collect_usage_pieces(ctx)
        ]
        if self._takes_a_command:
            pieces.append("[-- COMMAND...]")
        return pieces

    @property
    def _takes_a_command(self) -> bool:
        return any(parameter.name == "command" for parameter in self.params)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by topic."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            name, text = parameter.get_help_record(ctx) or ("", "")
            panel = getattr(parameter, "rich_help_panel", None) or COMMON
            if parameter.param_type_name == "argument":
                panel = "Arguments"
                if self._takes_a_command:
                    text = text.replace("[required]", "[required without -- COMMAND]")
                name = name.partition(" <")[0]  # without its type
            panels.setdefault(panel, []).append((name, text))
        for panel in sorted(panels, key=lambda panel: panel == COMMON):  # the last
            with formatter.section(panel):
                formatter.write_dl(panels[panel])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, and where to read on."""
        with formatter.section("Examples"):
            for line in (self.epilog or "").strip().splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
        formatter.write_paragraph()
        formatter.write_text(
            "`batchtune --help` lists the exit codes, and says how to set options by environment variables."
        )


def _holds_trials(run: str) -> bool:
    from batchtune.results import TRIALS_FILE

    journal = Path(run, TRIALS_FILE)
    return journal.exists() and journal.stat().st_size > 0


def _with_wait(args: list[str]) -> list[str]:
    """Return a command line in which `--wait`, whose value may be left out, has one."""
    complete = []
    for word, following in zip_longest(args, args[1:], fillvalue=""):
        if word == _WAIT and not _is_number(following):
            complete.append(f"{_WAIT}=inf")
        else:
            complete.append(word)
    return complete


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class Commands(TyperGroup):
    """The group of all commands. Turns an error into one message and an exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names: Any = dict.fromkeys(COMMANDS)
        self.commands = names  # what typer suggests for a misspelt one

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name; None if it is unknown."""
        if cmd_name not in COMMANDS:
            return None
        return load_command(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, declared.summary) for name, declared in COMMANDS.items()]
            )

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        # Sent by CI systems, and by a terminal that closes: workers end as on Ctrl-C.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
                signal.signal(number, signal.default_int_handler)
        try:
            try:
                return super().invoke(ctx)
            finally:  # an error of writing is reported here, not at the end of the process
                sys.stdout.flush()
        except (BatchtuneError, MemoryError, OSError) as error:
            if ctx.params["debug"]:
                raise
            _report(error)
            raise typer.Exit(getattr(error, "exit_code", 1)) from None
        except KeyboardInterrupt as interrupt:
            console.note(f"Interrupted.{interrupt}")
            raise typer.Exit(130) from None


def _report(error: BatchtuneError | MemoryError | OSError) -> None:
    if isinstance(error, WorkloadError) and error.traceback:
        lines = "\n".join(f"  | {line}" for line in error.traceback.splitlines())
        console.note(f"The last lines of your code's output:\n{lines}")
    if isinstance(error, BatchtuneError):
        message = error.message
        if error.hint:
            message += f"\n{error.hint}"
    elif isinstance(error, MemoryError):
        message = "this needs more memory than the process may use\nRaise its limit (ulimit -v)."
    elif error.filename is not None:  # a file or folder without a message of its own
        message = bounded(f"{error.filename}: {error.strerror}")
    else:  # it is stdout, and nothing more can be written there, not even at the end of the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        message = f"the result can't be written: {error.strerror or error}"
    console.note(f"Error: {message}")


@cache
def load_command(name: str) -> Any:
    """Import a command's module and make a command of its function; the module's `EXAMPLES` end its help."""
    module = import_module(f"batchtune.cli.{COMMANDS[name].module}")
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=Command, epilog=module.EXAMPLES[name])(
        getattr(module, name.replace("-", "_"))
    )
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands,
    # Plain help: Rich takes as long to import as everything else together.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`batchtune COMMAND --help` shows a command's options, with examples. An option such as --num-buckets can "
    "also be set by the environment variable BATCHTUNE_NUM_BUCKETS; flags override the environment. Exit codes: 0 "
    "done; 1 failed: the message says what, where, and what to do; 2 wrong usage; 3 a rule of `report --fail-if` "
    "or the verification fails; 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchtune {__version__}")
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            envvar="BATCHTUNE_DEBUG",
            show_envvar=False,
            help="Show tracebacks of errors.",
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Tune the batching of variable-length sequences to your GPU.

    batchtune reads the lengths of a data set, measures the largest batches that fit, compares bucket tables, and writes
    the sampler config that wastes the least.
    """
