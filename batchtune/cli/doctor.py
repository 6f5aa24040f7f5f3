"""`batchtune doctor`."""

from __future__ import annotations

from typing import Annotated

from batchtune.cli import console
from batchtune.cli.options import Json, expand, option
from batchtune.errors import UsageError

EXAMPLES = """
batchtune doctor
batchtune doctor --json > doctor.json
"""


@expand
def doctor(
    timeout: Annotated[float, option("Time limit for PyTorch and the driver to answer.", "SECONDS")] = 120.0,
    json: Json = False,
) -> None:
    """Show the devices, memory and software of this machine.

    Shows devices with their memory, driver and clocks, the processes that use them, whether memory can be limited here,
    the settings that a probe would run with, and installed packages. Uses no GPU memory, and reads and writes no file.
    Send its output along with a bug report.
    """
    from batchtune.probe.doctor import examine

    if not timeout > 0:
        raise UsageError(f"--timeout must be above 0, got {timeout:g}")
    found = examine(timeout)
    if json:
        console.write_json(found)
    else:
        console.show_doctor(found)
