"""Where the values of options come from: the environment, and `[tool.batchtune]` in pyproject.toml."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import typer

from batchtune.errors import UsageError, nearest, shortened

# Options of one command line, never of a project.
_NEVER = {"help", "force", "json", "quiet", "output", "patch", "key_path", "list_known"}
PREFIX = "BATCHTUNE_"
_ORIGINS = "batchtune.origins"

Project = dict[str, dict[str, tuple[Any, str]]]
"""Command → option → its value, as the command line would give it, and where it is set."""


def apply_project(ctx: typer.Context, load_commands: Callable[[], Mapping[str, Any]]) -> None:
    """Take the defaults of the commands' options from the nearest pyproject.toml at or above the working folder."""
    here = Path.cwd()
    path = next((file for parent in (here, *here.parents) if (file := parent / "pyproject.toml").is_file()), None)
    if path and (table := _read(path)):
        project = _project(table, path, load_commands())
        ctx.default_map = {name: {key: value for key, (value, _) in own.items()} for name, own in project.items()}
        ctx.meta[_ORIGINS] = project


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


def _project(table: Mapping[str, Any], path: Path, commands: Mapping[str, Any]) -> Project:
    """Return what `[tool.batchtune]` sets.

    A key in it is named like the environment variable and sets the option of every command; one in
    `[tool.batchtune.COMMAND]` is named like the option and sets it for that command alone. The names differ if commands
    mean different things by one, such as `--format`.
    """
    project: Project = {command: {} for command in commands}
    of_commands = {key: value for key, value in table.items() if isinstance(value, Mapping) and key in commands}
    # Table → key → the options that it sets, each with its command.
    known: dict[str, dict[str, list[tuple[str, Any]]]] = {name: {} for name in ("", *commands)}
    for command, its in commands.items():
        for one in its.params:
            # The run folder is an option, even if a command takes it as an argument.
            if (one.param_type_name == "option" or one.name == "run") and one.name not in _NEVER:
                shared = one.envvar.removeprefix(PREFIX).lower() if one.envvar else one.name
                known[""].setdefault(shared, []).append((command, one))
                known[command][one.name] = [(command, one)]
    general = {key: value for key, value in table.items() if key not in of_commands}
    for name, own in {"": general, **of_commands}.items():  # the more specific ones later, so that they win
        where = f"{path}, [tool.batchtune{'.' if name else ''}{name}]"
        for key, value in own.items():
            tables = commands if not name and isinstance(value, Mapping) else ()
            for command, one in known[name][_checked(key, known[name], where, tables)]:
                project[command][one.name] = _as_text(value, one), f"{where} {key}"
    return project


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
    """Return a value of TOML as the command line would give it."""

    def word(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    if isinstance(value, Mapping):  # set = { layers = 12 }
        value = [f"{key}={word(one)}" for key, one in value.items()]
    if getattr(parameter, "multiple", False):  # arguments don't have it
        return list(map(word, value if isinstance(value, list) else [value]))
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
