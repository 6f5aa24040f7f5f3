"""`batchtune schema`."""

from __future__ import annotations

from typing import Annotated

import typer

from batchtune.cli import console
from batchtune.cli.options import Json, Output, complete_from, expand
from batchtune.errors import UsageError, did_you_mean, shortened

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
            help="Name of the schema; without it, lists all names.",
            autocompletion=complete_from("batchtune.schemas:SCHEMAS"),
        ),
    ] = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Print the JSON Schema of a result file.

    Each file in a run folder, and each command's output with --json, has one: JSON Schema 2020-12, with the meaning of
    each field. Its $id ends in the version of the files, which is also in their meta.

    Reads nothing. Writes to FILE if -o is given. A schema is always JSON; --json applies to the list of names.
    """
    from batchtune.schemas import SCHEMAS, render_list, render_names, render_schema

    if name is None:
        console.write_result(render_list() if json else render_names(), output)
        return
    if name not in SCHEMAS:
        near = did_you_mean(name.removeprefix("batchtune/").partition(".")[0], SCHEMAS)
        raise UsageError(f"unknown schema {shortened(name)}", f"{near}Known schemas: {', '.join(SCHEMAS)}.")
    console.write_result(render_schema(name), output)
