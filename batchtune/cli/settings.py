"""Where the values of options come from: the environment, and `[tool.batchtune]` in pyproject.toml."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from batchtune.errors import UsageError, shortened

# Options of one command line, never of a project.
_NEVER = {"help", "force", "json", "quiet", "output", "patch", "key_path", "list_known"}
_PREFIX = "BATCHTUNE_"
# Set by batchtune itself for the processes that it starts.
_INTERNAL = {"BATCHTUNE_PROBE_WORKER"}
_PROJECT = "batchtune.project"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """What pyproject.toml sets.

    Attributes:
        defaults: Command → option → value, as the command line would give it.
        origins: Command → option → where it is set, for messages.
    """

    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, dict[str, str]] = field(default_factory=dict)


def apply_project(ctx: typer.Context, load_commands: Callable[[], Mapping[str, Any]]) -> None:
    """Takes the defaults of the commands' options from the nearest pyproject.toml at or above the working folder.

    Args:
        ctx: Of the group of all commands.
        load_commands: Gives them by name; not called where nothing is set.

    Raises:
        UsageError: The file is no TOML, or a key names no option.
    """
    path = nearest_pyproject(Path.cwd())
    table = _read(path) if path else {}
    if path and table:
        project = project_of(table, path, load_commands())
        ctx.default_map = project.defaults
        ctx.meta[_PROJECT] = project


def project_of(table: Mapping[str, Any], path: Path, commands: Mapping[str, Any]) -> Project:
    """What `[tool.batchtune]` says.

    A key in it is called as the environment variable and holds for every command that has the option; one in
    `[tool.batchtune.COMMAND]` is called as the option and holds for that command alone. They differ where commands
    mean different things by one name, as `--format`.

    Raises:
        UsageError: A key names no option.
    """
    of_command = {name: _options(command) for name, command in commands.items()}
    known = {option.shared_name for options in of_command.values() for option in options.values()}
    defaults: dict[str, dict[str, Any]] = {command: {} for command in commands}
    origins: dict[str, dict[str, str]] = {command: {} for command in commands}

    def put(command: str, name: str, value: Any, origin: str) -> None:
        defaults[command][name] = _text(value, of_command[command][name].multiple)
        origins[command][name] = origin

    general = f"{path}, [tool.batchtune]"
    for key, value in table.items():
        if isinstance(value, Mapping) and key in of_command:
            continue
        name = _option(key, known, general, [*commands] if isinstance(value, Mapping) else ())
        for command, options in of_command.items():
            for own_name, option in options.items():
                if option.shared_name == name:
                    put(command, own_name, value, f"{general} {key}")
    for command in of_command:  # the more special ones later: they hold
        own = table.get(command)
        where = f"{path}, [tool.batchtune.{command}]"
        for key, value in own.items() if isinstance(own, Mapping) else ():
            put(command, _option(key, of_command[command], where), value, f"{where} {key}")
    return Project(defaults=defaults, origins=origins)


def nearest_pyproject(folder: Path) -> Path | None:
    """The pyproject.toml that counts for a folder; None where there is none."""
    candidates = (parent / "pyproject.toml" for parent in (folder, *folder.parents))
    return next((path for path in candidates if path.is_file()), None)


def from_elsewhere(ctx: Any) -> dict[str, str]:
    """The options that were not given on the command line → their value and where it is set."""
    found: dict[str, str] = {}
    for parameter in ctx.command.params:
        origin = origin_of(ctx, parameter)
        if origin is not None:
            found[parameter.name] = f"{_shown(raw_value(ctx, parameter))}, {origin}"
    return found


def origin_of(ctx: Any, parameter: Any) -> str | None:
    """Where an option's value is set; None for the command line and for what nobody set."""
    source = getattr(ctx.get_parameter_source(parameter.name), "name", None)
    if source == "ENVIRONMENT":
        return f"set by the environment variable {parameter.envvar}"
    if source == "DEFAULT_MAP":
        project: Project | None = ctx.meta.get(_PROJECT)
        where = project.origins.get(ctx.info_name, {}).get(parameter.name) if project else None
        return f"set in {where}" if where else None
    return None


def raw_value(ctx: Any, parameter: Any) -> Any:
    """The value as the environment or pyproject.toml has it; None where it comes from the command line."""
    source = getattr(ctx.get_parameter_source(parameter.name), "name", None)
    if source == "ENVIRONMENT":
        return os.environ.get(parameter.envvar)
    return (ctx.default_map or {}).get(parameter.name) if source == "DEFAULT_MAP" else None


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def unknown_variables(known: Collection[str], environment: Iterable[str]) -> list[str]:
    """A warning for each variable that looks as if it were batchtune's and is none."""
    warnings = []
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known and name not in _INTERNAL:
            near = nearest(name, known)
            hint = f"Did you mean {near}?" if near else "`batchtune COMMAND --help` tells how they are called."
            warnings.append(f"Warning: the environment variable {name} sets no option. {hint}")
    return warnings


def variables_of(commands: Iterable[Any]) -> set[str]:
    """The environment variables that set options."""
    return {parameter.envvar for command in commands for parameter in command.params if parameter.envvar}


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that is most like it, and like enough to be what was meant."""
    import difflib

    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


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
        raise UsageError(f"{path} is no TOML file: {error}", "Mend it: batchtune's settings may be in it.") from None
    table = document.get("tool", {}).get("batchtune", {})
    if not isinstance(table, Mapping):
        raise UsageError(f"{path}: tool.batchtune must be a table")
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """An option as the configuration sees it: what it is called for all commands, and whether it can be repeated."""

    shared_name: str
    multiple: bool


def _options(command: Any) -> dict[str, _Option]:
    """A command's options by their names."""
    return {
        parameter.name: _Option(
            shared_name=parameter.envvar.removeprefix(_PREFIX).lower() if parameter.envvar else parameter.name,
            multiple=getattr(parameter, "multiple", False),
        )
        for parameter in command.params
        # Where a command takes the run folder as an argument, it is the same setting.
        if (parameter.param_type_name == "option" or parameter.name == "run") and parameter.name not in _NEVER
    }


def _option(key: str, known: Collection[str], where: str, tables: Collection[str] = ()) -> str:
    name = key.replace("-", "_")
    if name in known:
        return name
    if name in _NEVER:
        raise UsageError(f"{where}: {shortened(key)} can't be set here", "It is an option of the command line alone.")
    near = nearest(key, tables) or nearest(name, known)
    raise UsageError(
        f"{where}: there is no setting {shortened(key)}",
        f"Did you mean {near!r}?" if near else f"Known ones: {', '.join(sorted(known))}.",
    )


def _text(value: Any, multiple: bool) -> Any:
    """Values as the command line would give them: it parses text."""
    if isinstance(value, Mapping):  # set = { layers = 12 }
        value = [f"{key}={_word(one)}" for key, one in value.items()]
    if multiple:
        return [_word(one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        return ",".join(map(_word, value))
    return value if isinstance(value, bool) else str(value)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
