"""Where the values of options come from: the environment, and `[tool.batchtune]` in pyproject.toml."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer

from batchtune.cli.console import note
from batchtune.errors import UsageError, bounded, did_you_mean, shortened

# Options that name code to run, its arguments, or what is written.
_OF_TRUSTED_PROJECTS = {"workload", "set", "sweep", "run", "junit_xml"}
PREFIX = "BATCHTUNE_"
_ORIGINS = "batchtune.origins"


class WrongNumber(typer.BadParameter):
    """The value of an option is not the number that the option takes."""


class Origin(NamedTuple):
    """The value of an option that is not on the command line, as it would be there, and where it is set.

    `file` is a pyproject.toml; None for an environment variable.
    """

    value: str | list[str] | bool
    where: str
    file: Path | None


def apply_project(ctx: Any, load_commands: Callable[[], Iterable[Any]]) -> None:
    """Take the defaults of a command's options from the nearest pyproject.toml at or above the working folder.

    A key in `[tool.batchtune]` is named like the environment variable and sets the option of every command that has it;
    one in `[tool.batchtune.COMMAND]` is named like the option. The names differ if commands mean different things by
    one, such as `--format`. Raises UsageError for an unknown key, or a value of another kind.
    """
    path = _project_file(Path.cwd())
    if path is None or (table := _read(path)) is None:
        return
    known: dict[str, Any] = {}  # what is None sets no option of this command
    for command in load_commands():
        known.update(dict.fromkeys([command.name, *_keys(command, shared=True)]))
    known.update(_keys(ctx.command, shared=True))
    origins = _origins(table, known, path, "tool.batchtune")
    origins |= _origins(
        table.get(ctx.command.name, {}),
        _keys(ctx.command, shared=False),
        path,
        f"tool.batchtune.{ctx.command.name}",
    )
    ctx.meta[_ORIGINS] = origins
    ctx.default_map = {name: origin.value for name, origin in origins.items()}


def _origins(
    table: Any, known: Mapping[str, Any], path: Path, name: str
) -> dict[str, Origin]:
    """Return what a table sets, by the names of parameters; `known` are its keys and the parameters that they set."""
    if not isinstance(table, Mapping):
        raise UsageError(f"{path}: {name} must be a table")
    origins = {}
    for key, value in table.items():
        option = key.replace("_", "-")
        where = f"{path}, [{name}] {key}"
        if option not in known:
            raise UsageError(
                f"{path}, [{name}]: unknown setting {shortened(key)}",
                f"{did_you_mean(option, known)}Known settings: {', '.join(sorted(known))}.",
            )
        parameter = known[option]
        if parameter is None:
            continue
        if isinstance(value, bool) != getattr(parameter, "is_flag", False):
            raise UsageError(
                f"{where}: {shortened(value)} is of the wrong kind: only a flag is true or false"
            )
        origins[parameter.name] = Origin(_as_text(value, parameter), where, path)
    return origins


def _keys(command: Any, *, shared: bool) -> dict[str, Any]:
    """Return key → the option that it sets; in the table that all commands share, or in the command's own."""
    keys = {}
    for parameter in command.params:
        if parameter.envvar:
            name = (
                parameter.envvar.removeprefix(PREFIX).lower()
                if shared
                else parameter.name
            )
            keys[name.replace("_", "-")] = parameter
    return keys


def _project_file(working_folder: Path) -> Path | None:
    """Return the nearest pyproject.toml, looked for up to the project's root (.git) or the home folder."""
    home = os.path.realpath(os.path.expanduser("~"))
    for folder in (working_folder, *working_folder.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            return path
        if os.path.lexists(folder / ".git") or str(folder) == home:
            return None
    return None


def _read(path: Path) -> Any:
    """Return `[tool.batchtune]`; None without one."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:  # somebody else's file above the working folder
        return None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a TOML file: {error}",
            "Fix it: batchtune's settings may be in it.",
        ) from None
    return document.get("tool", {}).get("batchtune")


def _as_text(value: Any, parameter: Any) -> str | list[str] | bool:
    """Return a value of TOML as the command line would give it."""
    from batchtune.results import argument_text

    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping):  # set = { layers = 12 }
        value = [f"{key}={argument_text(part)}" for key, part in value.items()]
    if not isinstance(value, list):
        value = [value]
    words = [argument_text(part) for part in value]
    if getattr(parameter, "multiple", False):
        return words
    return ",".join(words)


def origin_of(ctx: Any, parameter: Any) -> Origin | None:
    """Return where an option is set; None if that is on the command line, or nowhere."""
    source = getattr(ctx.get_parameter_source(parameter.name), "name", None)
    if source == "ENVIRONMENT":
        return Origin(os.environ[parameter.envvar], parameter.envvar, None)
    if source == "DEFAULT_MAP":
        origin: Origin = ctx.meta[_ORIGINS][parameter.name]
        return origin
    return None


def show_origins(ctx: Any) -> None:
    """Say which options of the command come from the environment or pyproject.toml, unless it is quiet.

    Raises UsageError if one from pyproject.toml names code or a path to write, and the file is not to be trusted.
    """
    shown = []
    for parameter in ctx.command.params:
        origin = origin_of(ctx, parameter)
        if origin is None:
            continue
        option = max(parameter.opts, key=len)
        value = (
            " ".join(origin.value)
            if isinstance(origin.value, list)
            else str(origin.value)
        )
        source = origin.where
        if origin.file is not None:
            source = (
                origin.file.name
                if origin.file.parent == Path.cwd()
                else str(origin.file)
            )
            if parameter.name in _OF_TRUSTED_PROJECTS and (
                reason := _distrust(origin.file)
            ):
                raise UsageError(
                    f"{origin.where} = {shortened(value)} is not used: {reason}, and may name neither code nor files "
                    "to write",
                    f"If that is what you want, give {option} on the command line.",
                )
        shown.append(f"{option.lstrip('-')} {bounded(value)} from {source}")
    if shown:
        note(f"Settings: {', '.join(shown)}", quiet=bool(ctx.params.get("quiet")))


def _distrust(path: Path) -> str | None:
    """Return why a pyproject.toml may not name code to run or files to write; None if it may."""
    from batchtune.results import RUN_FILES

    if any(os.path.lexists(path.parent / name) for name in RUN_FILES):
        return "the file is in a run folder"
    # Whoever owns the working folder may be root's user: in a container, with a project of the machine outside.
    trusted = {os.geteuid(), os.stat(".").st_uid}
    if not {path.lstat().st_uid, path.stat().st_uid} <= trusted:
        return "the file belongs to another user"
    return None
