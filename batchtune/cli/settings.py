"""Options that environment variables set."""

from __future__ import annotations

import os
from typing import Any

import typer

from batchtune.cli.console import note
from batchtune.errors import bounded

PREFIX = "BATCHTUNE_"


class WrongNumber(typer.BadParameter):
    """The value of an option is not the number that the option takes."""


def is_from_environment(ctx: Any, parameter: Any) -> bool:
    """Return whether an environment variable sets the option, and the command line does not."""
    source = ctx.get_parameter_source(parameter.name)
    return getattr(source, "name", None) == "ENVIRONMENT"


def show_environment(ctx: Any) -> None:
    """Say which options of the command come from the environment, unless it is quiet."""
    shown = []
    for parameter in ctx.command.params:
        if is_from_environment(ctx, parameter):
            option = max(parameter.opts, key=len).lstrip("-")
            value = bounded(os.environ[parameter.envvar])
            shown.append(f"{option} {value} from {parameter.envvar}")
    if shown:
        note(f"Settings: {', '.join(shown)}", quiet=bool(ctx.params.get("quiet")))
