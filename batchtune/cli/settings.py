"""Settings from `[tool.batchtune]` in pyproject.toml: defaults for the options of the same names."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import typer

from batchtune.errors import UsageError

# Options of one command line, never of a project.
_NEVER = {"help", "force", "json", "quiet", "output"}


def default_map(app: typer.Typer) -> dict[str, dict[str, Any]]:
    """Command → option → default, from the nearest pyproject.toml at or above the working folder.

    A key in `[tool.batchtune]` holds for every command that has the option, one in `[tool.batchtune.COMMAND]` for
    that command alone.

    Raises:
        UsageError: The file is no TOML, or a key names no option.
    """
    path = _nearest_pyproject(Path.cwd())
    table = _read(path) if path else {}
    if not table:
        return {}
    commands = _options(app)
    known = {name for names in commands.values() for name in names}
    chosen: dict[str, dict[str, Any]] = {command: {} for command in commands}
    for key, value in table.items():
        if isinstance(value, Mapping) and key in commands:
            options = commands[key]
            for own_key, one in value.items():
                name = _option(own_key, options, f"{path}, [tool.batchtune.{key}]")
                chosen[key][name] = _text(one, options[name])
        else:
            name = _option(key, known, f"{path}, [tool.batchtune]")
            for command, names in commands.items():
                if name in names:
                    chosen[command].setdefault(name, _text(value, names[name]))
    return chosen


def _nearest_pyproject(folder: Path) -> Path | None:
    candidates = (parent / "pyproject.toml" for parent in (folder, *folder.parents))
    return next((path for path in candidates if path.is_file()), None)


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


def _options(app: typer.Typer) -> dict[str, dict[str, bool]]:
    """Command → its options, by the name that the configuration uses → whether it can be given several times."""
    commands = getattr(typer.main.get_command(app), "commands", {})
    return {
        name: {
            parameter.name: parameter.multiple
            for parameter in command.params
            if parameter.param_type_name == "option" and parameter.name not in _NEVER
        }
        for name, command in commands.items()
    }


def _name(key: str) -> str:
    return key.replace("-", "_")


def _option(key: str, known: Collection[str], where: str) -> str:
    name = _name(key)
    if name in known:
        return name
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    raise UsageError(
        f"{where}: there is no setting {key!r}",
        f"Did you mean {near[0]!r}?" if near else f"Known ones: {', '.join(sorted(known))}.",
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
