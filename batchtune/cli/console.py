"""What goes to the terminal: results on stdout, all else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.errors import BatchtuneError, WorkloadError

if TYPE_CHECKING:
    from rich.console import Console

    from batchtune.lengths import Lengths


def print_error(error: BatchtuneError) -> None:
    """One message: what and where, what to do, and the end of the workload's own traceback where it failed."""
    if isinstance(error, WorkloadError) and error.traceback:
        lines = "\n".join(f"  | {line}" for line in error.traceback.splitlines())
        note(f"The workload's own traceback, its end:\n{lines}")
    hint = f"\n{error.hint}" if error.hint else ""
    note(f"Error: {error.message}{hint}")


def note(text: str) -> None:
    """A line for the user, on stderr."""
    print(text, file=sys.stderr, flush=True)


def notes(texts: Iterable[str], *, quiet: bool) -> None:
    """Lines for the user, unless they asked for quiet."""
    if not quiet:
        for text in texts:
            note(text)


@contextmanager
def spinner(text: str, *, quiet: bool) -> Iterator[None]:
    """Shows that something is at work, where stderr is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(text)):
        yield


def result_console() -> Console:
    """Rich on stdout; plain where that is no terminal, and as wide as a report needs."""
    from rich.console import Console

    class ResultConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # Rich would end with exit code 1: a reader that has seen enough is no failure

    console = ResultConsole(highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100
    return console


def write_result(text: str, output: Path | None) -> None:
    """Writes a result to a file, whole or not at all; to stdout for None and `-`."""
    from batchtune.files import write_whole

    if output is None or str(output) == "-":
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
    else:
        write_whole(output, text)


def describe(lengths: Lengths) -> list[str]:
    """The data in a few lines: what was read, what was left out, what the reader found."""
    from batchtune.units import counted, format_length

    unit = lengths.unit
    lines = [
        f"{counted(lengths.count, 'length')} in descending order: {format_length(lengths.longest, unit)} to "
        f"{format_length(lengths.shortest, unit)}, {format_length(lengths.total, unit)} in all."
    ]
    lines += [f"Left out: {counted(count, 'example')}, {reason}." for reason, count in lengths.left_out.items()]
    return lines + list(lengths.notes)
