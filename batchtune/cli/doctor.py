"""`batchtune doctor`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from batchtune.cli.options import Json

EXAMPLE = """Examples:
batchtune doctor
batchtune doctor --json > doctor.json
"""


def doctor(
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            envvar="BATCHTUNE_TIMEOUT",
            show_envvar=False,
            metavar="SECONDS",
            help="Longest that PyTorch and the driver may take to answer.",
        ),
    ] = 120.0,
    json: Json = False,
) -> None:
    """Show what this machine offers.

    Devices with their memory, driver and clocks, who else uses them, how memory can be limited here, the settings
    that a probe would run with, what is installed, and what stands in the way. Uses no memory of a GPU, and reads and
    writes no file. It is what to look at first, and what to send along with a bug report.
    """
    import shutil

    from batchtune.cli import console
    from batchtune.errors import UsageError
    from batchtune.reports.doctor_text import render_doctor
    from batchtune.results import encode
    from batchtune.tuning.doctor import examine

    if not timeout > 0:
        raise UsageError(f"--timeout must be above 0, got {timeout:g}")
    found = examine(timeout)
    if json:
        console.write_result(encode(found).decode(), None)
    else:
        width = max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 100
        console.write_result(console.harmless(render_doctor(found, min(width, 100))), None)
