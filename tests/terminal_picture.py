"""Draws what a kept run ends with: `python tests/terminal_picture.py` writes examples/tune.svg."""

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from batchtune.files import write_whole
from batchtune.reports import DEFAULT_FOLDER, load_run
from batchtune.reports.page import build_page
from batchtune.reports.terminal import text_of

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = "-- python examples/scripts/llama.py"
COMMAND = f"batchtune tune --memory 900MiB {SCRIPT}"
# What this command wrote, on two idle cores.
KEPT = EXAMPLES / "tuned"
PICTURE = EXAMPLES / "tune.svg"
WIDTH = 96
# Fonts that rich would load from elsewhere.
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def picture():
    """Return the command and the report that it ends with, as rich draws a terminal."""
    run = replace(
        load_run(KEPT),
        folder=DEFAULT_FOLDER,
        manifest=f"{DEFAULT_FOLDER}/lengths.parquet",
        step=f" {SCRIPT}",
    )
    page = build_page(run)
    settings = {"width": WIDTH, "force_terminal": True, "color_system": "truecolor"}
    printed = text_of(page, Console(file=io.StringIO(), **settings, _environ={}), full=False)  # fmt: skip
    console = Console(file=io.StringIO(), record=True, **settings, _environ={})
    console.print(Text.assemble("$ ", (COMMAND, "bold"), "\n"))
    console.print(Text.from_ansi(printed), end="", soft_wrap=True)
    return FONTS.sub("", console.export_svg(title="batchtune", unique_id="tune"))


if __name__ == "__main__":
    write_whole(PICTURE, picture())
