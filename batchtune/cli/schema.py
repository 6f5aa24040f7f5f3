"""`batchtune schema`."""

from __future__ import annotations

from typing import Annotated

import typer

from batchtune.cli import console
from batchtune.cli.options import Json, Output, complete_from, expand
from batchtune.cli.settings import nearest
from batchtune.errors import UsageError, shortened

EXAMPLES = """
batchtune schema
batchtune schema sweep
batchtune schema probe -o probe.schema.json
"""


@expand
def schema(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of the schema; all names are listed without it.",
            autocompletion=complete_from("batchtune.schemas:SCHEMAS"),
        ),
    ] = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Print the JSON Schema of a result file.

    There is one for each file in a run folder, and for the output of other commands with --json: JSON Schema 2020-12,
    with the meaning of each field. A schema's $id ends in the version of the files, which is also in their meta.

    Reads nothing. Writes to FILE if -o is given. A schema is always JSON; --json applies to the list of names.
    """
    from batchtune.schemas import SCHEMAS, render_list, render_names, render_schema

    if name is None:
        console.write_result(render_list() if json else render_names(), output)
        return
    if name not in SCHEMAS:
        near = nearest(name.removeprefix("batchtune/").partition(".")[0], SCHEMAS)
        known = f"Known schemas: {', '.join(SCHEMAS)}."
        raise UsageError(f"unknown schema {shortened(name)}", f"Did you mean {near}? {known}" if near else known)
    console.write_result(render_schema(name), output)
