"""Where the values of options come from: the environment, and `[tool.batchtune]` in pyproject.toml."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import typer

from batchtune.cli import console
from batchtune.errors import UsageError, bounded, nearest, shortened

# Options of one command line, never of a project.
_NEVER = {"help", "force", "json", "quiet", "output", "patch", "key_path", "list_known"}
# Options that name code to run, its arguments, or what is written.
_OF_TRUSTED_PROJECTS = {"workload", "set", "sweep", "run", "junit_xml"}
PREFIX = "BATCHTUNE_"
_ORIGINS = "batchtune.origins"
_FILE = "batchtune.project_file"

Project = dict[str, dict[str, tuple[Any, str]]]
"""Command → option → its value, as the command line would give it, and where it is set."""


def apply_project(ctx: typer.Context, load_commands: Callable[[], Mapping[str, Any]]) -> None:
    """Take the defaults of the commands' options from the nearest pyproject.toml at or above the working folder."""
    path = _project_file(Path.cwd())
    if path and (table := _read(path)):
        project = _project(table, path, load_commands())
        ctx.default_map = {name: {key: value for key, (value, _) in own.items()} for name, own in project.items()}
        ctx.meta[_ORIGINS] = project
        ctx.meta[_FILE] = path


def _project_file(working_folder: Path) -> Path | None:
    """Return the nearest pyproject.toml, looked for up to the project's root (.git) or the home folder."""
    home = os.path.realpath(os.path.expanduser("~"))
    for folder in (working_folder, *working_folder.parents):
        path = folder / "pyproject.toml"
        if os.path.isfile(path):
            return path
        if os.path.lexists(folder / ".git") or str(folder) == home:
            return None
    return None


def check_project(ctx: Any) -> None:
    """Say which options of the command come from pyproject.toml, unless it is quiet.

    Raises UsageError if one of them names code or a path to write, and the file is not to be trusted with that.
    """
    used = []
    for parameter in ctx.command.params:
        if getattr(ctx.get_parameter_source(parameter.name), "name", None) != "DEFAULT_MAP":
            continue
        value, where = ctx.meta[_ORIGINS][ctx.info_name][parameter.name]
        values = " ".join(map(str, value)) if isinstance(value, list) else value
        name = parameter.name.replace("_", "-")
        used.append(f"{name} {bounded(str(values))}")
        if parameter.name in _OF_TRUSTED_PROJECTS and (reason := _distrust(ctx.meta[_FILE])):
            given = f"--{name}" if parameter.param_type_name == "option" else name.upper()
            raise UsageError(
                f"{where} = {shortened(values)} is not used: {reason}, and may name neither code nor files to write",
                f"If that is what you want, give {given} on the command line.",
            )
    if used:
        path = ctx.meta[_FILE]
        shown = path.name if path.parent == Path.cwd() else path
        console.note(f"Settings: {', '.join(used)} from {shown}", quiet=bool(ctx.params.get("quiet")))


def _distrust(path: Path) -> str | None:
    """Return why a pyproject.toml may not name code to run or files to write; None if it may."""
    from batchtune.results import RUN_FILES

    if any(os.path.lexists(path.parent / name) for name in RUN_FILES):
        return "the file lies in a run folder"
    # Whoever owns the working folder may be root's user: in a container, with a project of the machine outside.
    trusted = {os.geteuid(), os.stat(".").st_uid}
    if not {path.lstat().st_uid, path.stat().st_uid} <= trusted:
        return "the file belongs to another user"
    return None


def _read(path: Path) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:  # somebody else's file above the working folder
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
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
    of_commands: dict[str, Mapping[str, Any]] = {}
    general: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and key in commands:
            of_commands[key] = value
        else:
            general[key] = value
    known = _known_keys(commands)
    for name, values in {"": general, **of_commands}.items():  # the more specific ones later, so that they win
        where = f"{path}, [tool.batchtune.{name}]" if name else f"{path}, [tool.batchtune]"
        for key, value in values.items():
            tables: Collection[str] = ()
            if name == "" and isinstance(value, Mapping):
                tables = commands
            for command, parameter in known[name][_checked(key, known[name], where, tables)]:
                project[command][parameter.name] = _as_text(value, parameter), f"{where} {key}"
    return project


def _known_keys(commands: Mapping[str, Any]) -> dict[str, dict[str, list[tuple[str, Any]]]]:
    """Return table → key → the options that it sets, each with its command; the general table is called ""."""
    known: dict[str, dict[str, list[tuple[str, Any]]]] = {name: {} for name in ("", *commands)}
    for command, declared in commands.items():
        for parameter in declared.params:
            # The run folder is an option, even if a command takes it as an argument.
            is_option = parameter.param_type_name == "option" or parameter.name == "run"
            if not is_option or parameter.name in _NEVER:
                continue
            shared = parameter.name
            if parameter.envvar:
                shared = parameter.envvar.removeprefix(PREFIX).lower()
            known[""].setdefault(shared, []).append((command, parameter))
            known[command][parameter.name] = [(command, parameter)]
    return known


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
    if isinstance(value, Mapping):  # set = { layers = 12 }
        value = [f"{key}={_word(part)}" for key, part in value.items()]
    if getattr(parameter, "multiple", False):  # arguments don't have it
        parts = value if isinstance(value, list) else [value]
        return list(map(_word, parts))
    if isinstance(value, list):
        return ",".join(map(_word, value))
    if isinstance(value, bool):
        return value
    return str(value)


def _word(value: Any) -> str:
    text = str(value)
    return text.lower() if isinstance(value, bool) else text


def origin_of(ctx: Any, parameter: Any) -> tuple[Any, str] | None:
    """Return an option's value and where it is set; None if that is on the command line, or nowhere."""
    source = getattr(ctx.get_parameter_source(parameter.name), "name", None)
    if source == "ENVIRONMENT":
        return os.environ.get(parameter.envvar), f"set by the environment variable {parameter.envvar}"
    if source == "DEFAULT_MAP":
        value, where = ctx.meta[_ORIGINS][ctx.info_name][parameter.name]
        return value, f"set in {where}"
    return None
