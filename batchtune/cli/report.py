"""`batchtune report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchtune.cli.options import DEFAULT_RUN_FOLDER

EXAMPLE = "Example:  batchtune report --format html -o report.html"


_ENDINGS = {".md": "markdown", ".html": "html", ".htm": "html", ".json": "json"}


def report(
    run: Annotated[Path, typer.Argument(help="The run folder.")] = DEFAULT_RUN_FOLDER,
    format: Annotated[
        str | None,
        typer.Option(
            envvar="BATCHTUNE_REPORT_FORMAT",
            show_envvar=False,
            help="terminal, markdown, html or json; told from the ending of FILE unless given.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it; - is stdout.")
    ] = None,
) -> None:
    """Show a run: what to set, what it saves."""
    from batchtune.cli import console
    from batchtune.errors import UsageError
    from batchtune.reports import FORMATS, load_run, render

    if format is None:
        format = _ENDINGS.get(output.suffix.lower(), "terminal") if output else "terminal"
    if format not in FORMATS:
        raise UsageError(f"{format!r} is no report format", f"Known ones: {', '.join(FORMATS)}.")
    results = load_run(run)
    to_screen = output is None or str(output) == "-"
    if format == "terminal" and to_screen:
        from batchtune.reports.terminal import render_terminal

        render_terminal(results, console.result_console())
    else:
        console.write_result(render(format, results), output)
