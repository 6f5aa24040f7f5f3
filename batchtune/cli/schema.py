"""`batchtune schema`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from batchtune.cli.options import Json, complete_from

EXAMPLE = """Examples:
batchtune schema
batchtune schema sweep
batchtune schema probe -o probe.schema.json
"""


def _names() -> Sequence[str]:
    from batchtune.schemas import SCHEMAS

    return list(SCHEMAS)


def schema(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="What the schema is of; all names are listed without it.",
            autocompletion=complete_from(_names),
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it; - is stdout.")
    ] = None,
    json: Json = False,
) -> None:
    """Print the JSON Schema of a result file.

    Of the files in a run folder, and of what other commands print with --json: JSON Schema 2020-12, with what each
    field means. A schema's $id ends in the version of the files it is of, which is also in their meta.

    Reads nothing. Writes FILE where -o names one. A schema is JSON in any case; --json is for the list of names.
    """
    from batchtune.cli import console
    from batchtune.cli.settings import nearest
    from batchtune.errors import UsageError, shortened
    from batchtune.schemas import SCHEMAS, render_list, render_names, render_schema

    if name is None:
        console.write_result(render_list() if json else render_names(), output)
        return
    if name not in SCHEMAS:
        near = nearest(name.removeprefix("batchtune/").partition(".")[0], SCHEMAS)
        known = f"There are {', '.join(SCHEMAS)}."
        raise UsageError(f"there is no schema {shortened(name)}", f"Did you mean {near}? {known}" if near else known)
    console.write_result(render_schema(name), output)
