"""Where the values of options come from: the environment, and `[tool.batchtune]` in pyproject.toml."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import typer

from batchtune.errors import UsageError, shortened

# Options of one command line, never of a project.
_NEVER = {"help", "force", "json", "quiet", "output", "patch", "key_path", "list_known"}
PREFIX = "BATCHTUNE_"
_ORIGINS = "batchtune.origins"

Project = dict[str, dict[str, tuple[Any, str]]]
"""Command → option → its value, as the command line would give it, and where it is set."""


def apply_project(ctx: typer.Context, load_commands: Callable[[], Mapping[str, Any]]) -> None:
    """Take the defaults of the commands' options from the nearest pyproject.toml at or above the working folder.

    `load_commands` is not called if nothing is set.

    Raises:
        UsageError: The file is not a TOML file, or a key names no option.
    """
    here = Path.cwd()
    path = next((file for parent in (here, *here.parents) if (file := parent / "pyproject.toml").is_file()), None)
    table = _read(path) if path else {}
    if path and table:
        project = project_of(table, path, load_commands())
        ctx.default_map = {name: {key: value for key, (value, _) in own.items()} for name, own in project.items()}
        ctx.meta[_ORIGINS] = project


def project_of(table: Mapping[str, Any], path: Path, commands: Mapping[str, Any]) -> Project:
    """Return what `[tool.batchtune]` sets.

    A key in it has the name of the environment variable and holds for every command that has the option; a key in
    `[tool.batchtune.COMMAND]` has the name of the option and holds for that command alone. They differ if commands
    mean different things by one name, such as `--format`.

    Raises:
        UsageError: A key names no option.
    """
    options = {name: _options(command) for name, command in commands.items()}
    shared = {_shared_name(parameter) for own in options.values() for parameter in own.values()}
    project: Project = {command: {} for command in commands}
    general = f"{path}, [tool.batchtune]"
    for key, value in table.items():
        if isinstance(value, Mapping) and key in commands:
            continue
        name = _checked(key, shared, general, commands if isinstance(value, Mapping) else ())
        for command, own in options.items():
            for parameter in own.values():
                if _shared_name(parameter) == name:
                    project[command][parameter.name] = _as_text(value, parameter), f"{general} {key}"
    for command, own in options.items():  # the more specific ones later, so that they win
        where, of_command = f"{path}, [tool.batchtune.{command}]", table.get(command)
        for key, value in of_command.items() if isinstance(of_command, Mapping) else ():
            parameter = own[_checked(key, own, where)]
            project[command][parameter.name] = _as_text(value, parameter), f"{where} {key}"
    return project


def _read(path: Path) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:  # somebody else's file above the working folder
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a TOML file: {error}", "Fix it: batchtune's settings may be in it.") from None
    table = document.get("tool", {}).get("batchtune", {})
    if not isinstance(table, Mapping):
        raise UsageError(f"{path}: tool.batchtune must be a table")
    return table


def _options(command: Any) -> dict[str, Any]:
    """Return a command's options by name. The run folder is one, even if a command takes it as an argument."""
    return {
        parameter.name: parameter
        for parameter in command.params
        if (parameter.param_type_name == "option" or parameter.name == "run") and parameter.name not in _NEVER
    }


def _shared_name(parameter: Any) -> str:
    """Return the name of an option for all commands: that of its environment variable."""
    return str(parameter.envvar.removeprefix(PREFIX).lower() if parameter.envvar else parameter.name)


def _checked(key: str, known: Collection[str], where: str, tables: Collection[str] = ()) -> str:
    name = key.replace("-", "_")
    if name in known:
        return name
    if name in _NEVER:
        raise UsageError(f"{where}: {shortened(key)} can't be set here", "It works only on the command line.")
    near = nearest(key, tables) or nearest(name, known)
    raise UsageError(
        f"{where}: unknown setting {shortened(key)}",
        f"Did you mean {near!r}?" if near else f"Known settings: {', '.join(sorted(known))}.",
    )


def _as_text(value: Any, parameter: Any) -> Any:
    """Return a value as the command line would give it, which parses text."""

    def word(one: Any) -> str:
        return str(one).lower() if isinstance(one, bool) else str(one)

    if isinstance(value, Mapping):  # set = { layers = 12 }
        value = [f"{key}={word(one)}" for key, one in value.items()]
    if getattr(parameter, "multiple", False):  # arguments don't have it
        return [word(one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        return ",".join(map(word, value))
    return value if isinstance(value, bool) else str(value)


def origin_of(ctx: Any, parameter: Any) -> tuple[Any, str] | None:
    """Return an option's value and where it is set; None if that is on the command line, or nowhere."""
    source = getattr(ctx.get_parameter_source(parameter.name), "name", None)
    if source == "ENVIRONMENT":
        return os.environ.get(parameter.envvar), f"set by the environment variable {parameter.envvar}"
    if source == "DEFAULT_MAP":
        value, where = ctx.meta[_ORIGINS][ctx.info_name][parameter.name]
        return value, f"set in {where}"
    return None


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most similar, if any is similar enough."""
    import difflib

    return next(iter(difflib.get_close_matches(name, known, n=1)), None)
