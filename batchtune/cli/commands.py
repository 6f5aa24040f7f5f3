"""How commands behave on the command line: their manual page, and the messages about wrong usage.

`click` is reached through typer alone: newer releases of typer carry their own copy of it, older ones need it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand

from batchtune.cli import console, settings
from batchtune.errors import BatchtuneError, UsageError, bounded, nearest, shortened

# The base of all errors of usage that parsing raises; typer has no public name for it.
_ParsingError: Any = typer.BadParameter.__base__

# The option whose value may be left out, and the form of its value.
_WAIT = "--wait"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+|inf|nan)(e[-+]?\d+)?", re.IGNORECASE)

# pydantic's type of an error → the same in our words.
_RULES = {
    "float_parsing": "it must be a number",
    "int_parsing": "it must be a whole number",
    "int_parsing_size": "it must be a whole number, and not so large",
    "bool_parsing": "it must be true or false",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
}

# Set by batchtune itself for the processes that it starts.
_INTERNAL = {"BATCHTUNE_WORKER"}
COMMON = "Common"
_EXIT_3 = {
    "tune": "with --verify: the recommended batches do not hold",
    "verify": "the recommended batches do not hold",
    "report": "a rule of --fail-if fails",
}


class Command(TyperCommand):
    """A command with a manual page for its help, whose errors say where a wrong value was set."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        with improving(ctx):
            return super().parse_args(ctx, _with_wait(args))

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if not ctx.params.get("quiet"):
            _warn_of_variables(ctx)
        settings.check_project(ctx)
        try:
            return super().invoke(ctx)
        except BatchtuneError as error:
            error.message += _origins(error, ctx)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, without the braces that newer releases of typer put in: `MANIFEST...`."""
        return [piece.strip("{}").replace("}...", "...") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by topic."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            if parameter.param_type_name == "argument":
                panel = "Arguments"
                record = (record[0].partition(" <")[0], record[1])  # without its type
            elif parameter.name == "help" and COMMON in panels:
                panel = COMMON
            panels.setdefault(panel, []).append(record)
        for name in sorted(panels, key=lambda name: name == COMMON):  # the last
            if panels[name]:
                with formatter.section(name):
                    formatter.write_dl(panels[name])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the rest of the manual page: examples, where settings come from, exit codes."""
        with formatter.section("Examples"):
            for line in (self.epilog or "").strip().splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
        name = ctx.info_name or ""
        text = _settings_of(self, name)
        if text is not None:
            with formatter.section("Settings"):
                formatter.write_text(text)
        codes = [("0", "done"), ("1", "failed; the message says what, where, and what to do"), ("2", "wrong usage")]
        if name in _EXIT_3:
            codes.append(("3", _EXIT_3[name]))
        codes.append(("130", "interrupted"))
        with formatter.section("Exit codes"):
            formatter.write_dl(codes)


def _with_wait(args: list[str]) -> list[str]:
    """Return a command line in which `--wait` has a value."""
    complete = list(args)
    options_end = args.index("--") if "--" in args else len(args)
    for index, word in enumerate(args[:options_end]):
        following = "".join(args[index + 1 : index + 2])
        if word == _WAIT and not _NUMBER.fullmatch(following):
            complete[index] = f"{_WAIT}=inf"
    return complete


def environment_variables(command: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return option → variable: those with the same name, and the others."""
    alike: dict[str, str] = {}
    others: dict[str, str] = {}
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.envvar:
            option = max(parameter.opts, key=len)
            regular = f"{settings.PREFIX}{option.lstrip('-').replace('-', '_').upper()}"
            if parameter.envvar == regular:
                alike[option] = parameter.envvar
            else:
                others[option] = parameter.envvar
    return alike, others


def _settings_of(command: Any, name: str) -> str | None:
    """Describe how else a command's options can be set; None if none can be."""
    alike, others = environment_variables(command)
    settable = {**alike, **others}
    if not settable:
        return None
    option, variable = next(iter(settable.items()))
    text = (
        f"Options can also be set by environment variables and in pyproject.toml: {option} as {variable}, and as "
        f"{option.lstrip('-')} under [tool.batchtune] or [tool.batchtune.{name}]"
    )
    if len(alike) > 1:
        text += "; the others likewise"
    for other, its_variable in others.items():
        if other != option:
            text += f"; {other} as {its_variable}"
    options = [max(parameter.opts, key=len) for parameter in _options_of(command.params)]
    only_here = [name for name in options if name not in settable]
    if only_here:
        text += f"; except {', '.join(only_here)}"
    return f"{text}. Flags override the environment, which overrides pyproject.toml."


def _options_of(parameters: Iterable[Any]) -> list[Any]:
    return [parameter for parameter in parameters if parameter.param_type_name == "option"]


@contextmanager
def improving(ctx: Any) -> Iterator[None]:
    """Add to a parsing error which option may have been meant, or where the wrong value was set."""
    try:
        yield
    except _ParsingError as error:
        parameter = getattr(error, "param", None)
        if hasattr(error, "possibilities"):
            error.possibilities = None
            error.message = f"Unknown option {error.option_name}. {_meant(error.option_name, ctx)}"
        elif parameter is not None and error.message:  # a missing argument has none
            error.message = _wrong_value(error, settings.origin_of(ctx, parameter))
        error.message = bounded(error.message)
        raise


def _wrong_value(error: Any, origin: tuple[Any, str] | None) -> str:
    """Return the message for a value that can't be converted or is out of range, with where it was set."""
    message = error.message.rstrip(".")
    # Newer releases of typer convert with pydantic, older ones with click.
    details = getattr(error.__cause__, "errors", None)
    value = None
    if details is not None:
        detail = details()[0]
        value = detail["input"]
        rule = _RULES.get(detail["type"])
        if rule is not None:
            message = rule.format(**detail.get("ctx", {}))
    if origin is not None:
        return f"{message}, got {shortened(origin[0])}, {origin[1]}."
    if value is not None:
        return f"{message}, got {shortened(value)}."
    return f"{message}."


def _meant(option: str, ctx: Any) -> str:
    """Say which option a misspelt one may stand for, or which commands have it."""
    parameters = ctx.command.get_params(ctx)
    flags = {}
    for parameter in _options_of(parameters):
        for flag in parameter.opts:
            flags[flag.lstrip("-")] = flag
    bare = option.lstrip("-").replace("_", "-")
    lists = f"`{ctx.command_path} --help` lists all options."
    if bare in [parameter.name for parameter in parameters if parameter.param_type_name == "argument"]:
        return f"{bare.upper()} is an argument here: `{ctx.command_path} {bare.upper()}`."
    if bare not in flags:
        commands = [command for command in _siblings(ctx) if any(option in one.opts for one in command.params)]
        if commands:
            names = ", ".join(f"`batchtune {command.name}`" for command in commands)
            return f"It is an option of {names}. {lists}"
    near = nearest(bare, flags)
    if near is None:
        return lists
    return f"Did you mean {flags[near]}?"


def _origins(error: BatchtuneError, ctx: Any) -> str:
    """Say where the options that an error names were set, if not on the command line; of a UsageError, any option."""
    text = f"{error.message} {error.hint or ''}"
    all_origins = []
    concerned = []
    for parameter in ctx.command.params:
        origin = settings.origin_of(ctx, parameter)
        if origin is None:
            continue
        value, where = origin
        values = [str(part) for part in value] if isinstance(value, list) else [str(value)]
        line = f"\n{max(parameter.opts, key=len)} is {', '.join(values)}, {where}."
        all_origins.append(line)
        words = [re.escape(word) for word in (*parameter.opts, *values[:1]) if word]
        if re.search(rf"(?<![\w-])({'|'.join(words)})(?![\w-])", text):
            concerned.append(line)
    if not concerned and isinstance(error, UsageError):
        concerned = all_origins
    return "".join(concerned)


def _warn_of_variables(ctx: Any) -> None:
    """Warn of environment variables that look like batchtune's and set nothing."""
    suspects = {name for name in os.environ if name.startswith(settings.PREFIX)} - _INTERNAL
    if not suspects:
        return
    commands = [ctx.command, *_siblings(ctx)]
    if ctx.parent:
        commands.append(ctx.parent.command)
    known = set()
    for command in commands:
        known |= {parameter.envvar for parameter in command.params if parameter.envvar}
    for name in sorted(suspects - known):
        near = nearest(name, known)
        hint = f"Did you mean {near}?" if near else "`batchtune COMMAND --help` lists the names."
        console.note(f"Warning: the environment variable {name} sets no option. {hint}")


def _siblings(ctx: Any) -> list[Any]:
    """Return all commands of the group."""
    if not ctx.parent:
        return []
    group = ctx.parent.command
    return [group.get_command(ctx.parent, name) for name in group.list_commands(ctx.parent)]
