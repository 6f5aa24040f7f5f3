"""How commands behave on the command line: their manual page, and what is said of wrong usage.

`click` is not imported: newer releases of typer carry their own copy of it, older ones need it. What is needed of it
is reached through typer.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand

from batchtune.cli import console, settings
from batchtune.errors import BatchtuneError, UsageError, bounded, shortened

# The base of all errors of usage that parsing raises; typer has no public name for it.
_ParsingError: Any = typer.BadParameter.__base__

# The option whose value may be left out, and what its value looks like.
_WAIT = "--wait"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+|inf|nan)(e[-+]?\d+)?", re.IGNORECASE)

_ARGUMENTS = "Arguments"
_OWN_PANEL = "Options"
_LAST_PANEL = "Common"
_SETTINGS = (
    "Options can be set by environment variables and in pyproject.toml, too: {option} as {variable}, and as {key} "
    "under [tool.batchtune] or [tool.batchtune.{command}]{others}. Flags come first, then the environment, then "
    "pyproject.toml."
)
_EXIT_CODES = {
    0: "done",
    1: "it failed; the message says what, where, and what to do",
    2: "wrong usage",
    130: "interrupted",
}


class Command(TyperCommand):
    """A command with a manual page for its help, whose errors say where a wrong value was set."""

    # What exit code 3 says, by command; others never end with it.
    EXIT_3: ClassVar[Mapping[str, str]] = {
        "tune": "with --verify: the recommended batches do not hold",
        "verify": "the recommended batches do not hold",
        "report": "a rule of --fail-if does not hold",
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the command line; what is wrong with it is told with its remedy."""
        try:
            return super().parse_args(ctx, _with_value(args, _WAIT))
        except _ParsingError as error:
            improve(error, ctx)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        if not ctx.params.get("quiet"):
            _warn_of_variables(ctx)
        try:
            return super().invoke(ctx)
        except BatchtuneError as error:
            error.message += _told_from_elsewhere(error, ctx)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, without the braces that newer releases of typer put in: `MANIFEST...`."""
        return [piece.strip("{}").replace("}...", "...") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then the options by what they are about."""
        panels: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: [], _OWN_PANEL: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                panel = _ARGUMENTS
                record = (record[0].partition(" <")[0], record[1])  # its type is no news
            elif parameter.name == "help":
                panel = _LAST_PANEL if _LAST_PANEL in panels else _OWN_PANEL
            else:
                panel = getattr(parameter, "rich_help_panel", None) or _OWN_PANEL
            panels.setdefault(panel, []).append(record)
        for name in sorted(panels, key=lambda name: name == _LAST_PANEL):
            if panels[name]:
                with formatter.section(name):
                    formatter.write_dl(panels[name])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes what else a manual page holds: examples, where settings come from, exit codes."""
        with formatter.section("Examples"):
            for line in examples(self.epilog or ""):
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
        name = ctx.info_name or ""
        if text := _settings_of(self, name):
            with formatter.section("Settings"):
                formatter.write_text(text)
        with formatter.section("Exit codes"):
            codes = {**_EXIT_CODES, **({3: self.EXIT_3[name]} if name in self.EXIT_3 else {})}
            formatter.write_dl([(str(code), codes[code]) for code in sorted(codes)])


def _with_value(args: list[str], option: str) -> list[str]:
    """The arguments, with an infinite value for an option that is followed by no number."""
    given = []
    for index, argument in enumerate(args):
        given.append(argument)
        if argument == "--":
            return given + args[index + 1 :]
        if argument == option and not _NUMBER.fullmatch((args[index + 1 :] or [""])[0]):
            given[-1] = f"{option}=inf"
    return given


def examples(epilog: str) -> list[str]:
    """The command lines of an `EXAMPLE`: one a line, after the word `Example:` or `Examples:`."""
    lines = re.sub(r"^Examples?:\s*", "", inspect.cleandoc(epilog)).splitlines()
    return [line.strip() for line in lines if line.strip()]


def environment_variables(command: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Option → variable, of those that are called alike, and of the others."""
    alike: dict[str, str] = {}
    others: dict[str, str] = {}
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.envvar:
            option = max(parameter.opts, key=len)
            regular = f"BATCHTUNE_{option.lstrip('-').replace('-', '_').upper()}"
            (alike if parameter.envvar == regular else others)[option] = parameter.envvar
    return alike, others


def _settings_of(command: Any, name: str) -> str | None:
    """How a command's options are set elsewhere; None where none can be."""
    alike, unlike = environment_variables(command)
    if not alike and not unlike:
        return None
    option, variable = next(iter({**alike, **unlike}.items()))
    others = [f"; {one} as {its}" for one, its in unlike.items() if one != option]
    options = [max(one.opts, key=len) for one in command.params if one.param_type_name == "option"]
    only_here = [one for one in options if one not in alike and one not in unlike]
    if only_here:
        others.append(f"; not so {', '.join(only_here)}")
    likewise = "; the others likewise" if len(alike) > 1 else ""
    return _SETTINGS.format(
        option=option, variable=variable, key=option.lstrip("-"), command=name, others=likewise + "".join(others)
    )


def improve(error: Any, ctx: Any) -> None:
    """Says in a parsing error what was meant, or where the wrong value was set."""
    parameter = getattr(error, "param", None)
    if hasattr(error, "possibilities"):
        error.possibilities = None
        error.message = f"There is no option {error.option_name}. {_meant(error.option_name, ctx)}"
    elif parameter is not None and (origin := settings.origin_of(ctx, parameter)) is not None:
        value = settings.raw_value(ctx, parameter)
        error.message = f"{error.message.rstrip('.')}: {shortened(value)}, {origin}."
    error.message = bounded(error.message)


def _meant(option: str, ctx: Any) -> str:
    """What a misspelt option may have been meant for, or who else has it."""
    own = {name.lstrip("-"): name for parameter in ctx.command.get_params(ctx) for name in parameter.opts}
    bare = option.lstrip("-").replace("_", "-")
    if bare in own:
        return f"Did you mean {own[bare]}?"
    lists = f"`{ctx.command_path} --help` lists those that there are."
    others = [
        f"`batchtune {command.name}`"
        for command in _siblings(ctx)
        if any(option in parameter.opts for parameter in command.params)
    ]
    if others:
        return f"It is one of {', '.join(others)}. {lists}"
    near = settings.nearest(bare, own)
    return f"Did you mean {own[near]}?" if near is not None else lists


def _told_from_elsewhere(error: BatchtuneError, ctx: Any) -> str:
    """Where the options that an error is about were set, if not on the command line.

    For wrong usage that names none of them, all are told.
    """
    elsewhere = settings.from_elsewhere(ctx)
    if not elsewhere:
        return ""
    said = f"{error.message} {error.hint or ''}"
    parameters = {parameter.name: parameter for parameter in ctx.command.params}
    concerned = {
        name: told
        for name, told in elsewhere.items()
        if _mentions(said, [*parameters[name].opts, _plain(settings.raw_value(ctx, parameters[name]))])
    }
    if not concerned and isinstance(error, UsageError):
        concerned = elsewhere
    return "".join(f"\n{max(parameters[name].opts, key=len)} is {told}." for name, told in concerned.items())


def _plain(value: Any) -> str:
    return value[0] if isinstance(value, list) and value else str(value)


def _mentions(text: str, words: Iterable[str]) -> bool:
    return any(word and re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) for word in words)


def _warn_of_variables(ctx: Any) -> None:
    """Tells of environment variables that look like batchtune's and set nothing."""
    suspects = [name for name in os.environ if name.startswith("BATCHTUNE_")]
    own = settings.variables_of([ctx.command, *([ctx.parent.command] if ctx.parent else [])])
    if all(name in own for name in suspects):
        return
    for warning in settings.unknown_variables(own | settings.variables_of(_siblings(ctx)), suspects):
        console.note(warning)


def _siblings(ctx: Any) -> list[Any]:
    """All commands."""
    if ctx.parent is None:
        return []
    group = ctx.parent.command
    return [group.get_command(ctx.parent, name) for name in group.list_commands(ctx.parent)]
