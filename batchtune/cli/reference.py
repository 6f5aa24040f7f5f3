"""`batchtune doctor` and `batchtune schema`."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

from batchtune.cli import console
from batchtune.cli.options import Json, Output, expand, option
from batchtune.errors import UsageError, did_you_mean, shortened

EXAMPLES = {
    "doctor": """
batchtune doctor
batchtune doctor --json > doctor.json
""",
    "schema": """
batchtune schema
batchtune schema sweep
batchtune schema probe -o probe.schema.json
""",
}


@expand
def doctor(
    timeout: Annotated[
        float,
        option("Time limit for PyTorch and the driver to answer.", "SECONDS", min=1),
    ] = 120.0,
    json: Json = False,
) -> None:
    """Show the devices, memory and software of this machine.

    Shows devices with their memory, driver and clocks, the processes that use them, whether memory can be limited here,
    the settings that a probe would run with, and installed packages. Uses no GPU memory, and reads and writes no file.
    Send its output along with a bug report.
    """
    from batchtune.probe.doctor import examine

    found = examine(timeout)
    if json:
        console.write_json(found)
    else:
        from batchtune.reports.page import doctor_page

        console.show_page(doctor_page(found))


@expand
def schema(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of the schema; without it, lists all names."
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
    from batchtune.schemas import SCHEMAS, schema_list, schema_of

    if name is None and json:
        text = json_format.dumps({"schemas": schema_list()}, indent=2)
    elif name is None:
        text = "\n".join(
            f"{known:<13}  {schema.file}: {schema.summary}"
            for known, schema in SCHEMAS.items()
        )
    elif name in SCHEMAS:
        text = json_format.dumps(schema_of(name), indent=2, ensure_ascii=False)
    else:
        hint = f"{did_you_mean(name, SCHEMAS)}Known schemas: {', '.join(SCHEMAS)}."
        raise UsageError(f"unknown schema {shortened(name)}", hint)
    console.write_result(f"{text}\n", output)
