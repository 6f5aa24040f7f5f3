"""Output to the terminal: results on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.errors import UsageError, without_commands

if TYPE_CHECKING:
    from rich.console import Console

    from batchtune.lengths import Lengths
    from batchtune.reports import RunResults
    from batchtune.reports.page import Page
    from batchtune.results.shared import Result


def note(text: str, *, quiet: bool = False) -> None:
    """Print a line to stderr, unless quiet."""
    if not quiet:
        print(harmless(text), file=sys.stderr, flush=True)


def notes(texts: Iterable[str], *, quiet: bool) -> None:
    """Print lines to stderr, unless quiet."""
    for text in texts:
        note(text, quiet=quiet)


def harmless(text: str) -> str:
    """Return text that can't control a terminal or a log: names of files and columns may come from anywhere."""
    return visible(without_commands(text, wrapped=False))


def visible(text: str) -> str:
    """Return text whose control and formatting characters are escapes; line ends and tabs stay."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in "\n\t"
        and unicodedata.category(character) in ("Cc", "Cf", "Cs")
        else character
        for character in text
    )


def show(results: RunResults, *, full: bool, verification: bool = False) -> None:
    """Show a run, or its verification, on stdout; without a terminal it is plain, and as wide as a report needs."""
    from batchtune.reports.page import build_page, build_verification_page

    build = build_verification_page if verification else build_page
    show_page(build(results), full=full)


def show_page(page: Page, *, full: bool = True) -> None:
    """Show a page on stdout."""
    from batchtune.reports.terminal import text_of

    sys.stdout.write(text_of(page, _console(), full=full))


def _console() -> Console:
    """Return the console of stdout; where that is no terminal it is as wide as a report needs."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100
    return console


def write_result(
    text: str, output: Path | None, *, inputs: Sequence[str | Path] = ()
) -> None:
    """Write a result to a file, whole or not at all, but none of `inputs` or of a run; to stdout for None and `-`."""
    from batchtune.files import write_whole

    if output is None or str(output) == "-":
        sys.stdout.write(text.removesuffix("\n") + "\n")
    else:
        refuse_overwriting(output, inputs)
        write_whole(output, text)


def write_json(record: Result) -> None:
    """Write a record to stdout as JSON."""
    from batchtune.results import encode

    write_result(encode(record).decode(), None)


def refuse_overwriting(output: Path, inputs: Sequence[str | Path] = ()) -> None:
    """Raise UsageError if a file is one of the inputs, or a file of a run folder."""
    from batchtune.results import RUN_FILES

    if not output.exists():
        return
    if output.name in RUN_FILES:
        raise UsageError(
            f"{output} is a file of a run folder and must not be overwritten",
            "Give another name.",
        )
    if any(Path(one).exists() and output.samefile(one) for one in inputs):
        raise UsageError(
            f"{output} is an input and must not be overwritten", "Give another name."
        )


def describe(lengths: Lengths, *, quiet: bool) -> None:
    """Describe the data in a few lines on stderr: what was read, what was left out, what looks wrong."""
    from batchtune.reports.survey import survey, survey_sentences

    scan = survey(lengths)
    notes(
        [*survey_sentences(scan), *(f"Warning: {text}" for text in scan.warnings)],
        quiet=quiet,
    )
