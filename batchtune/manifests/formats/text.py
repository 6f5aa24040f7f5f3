"""Plain text: one example on every line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.source import Head, Source

_CHUNK = 65_536


class Text(Format):
    """Lines of text, each an example that is measured; only blank lines at the end are none."""

    name = "text"
    description = "plain text, one example on every line; never told from the content, so name it"
    named_columns = False

    def fits(self, head: Head) -> bool:
        """False: any text would."""
        return False

    def columns(self, source: Source) -> Sequence[Column]:
        """The one column `text`."""
        first = next(lines_to_the_last(source), None)
        return [] if first is None else [Column("text", first[1], numeric=False, text=True)]

    def default_column(self, columns: Sequence[Column]) -> str:
        """What is read where the user names nothing."""
        return "text"

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The lines without their ends, some ten thousand at a time."""
        return line_rows(source, target_key)


def lines_to_the_last(source: Source) -> Iterator[tuple[int, str]]:
    """Number and text of every line, blank ones too, down to the last that is not blank."""
    blank_from: int | None = None
    for number, line in source.lines():
        if not line.strip():
            blank_from = blank_from or number
            continue
        if blank_from is not None:
            yield from ((before, "") for before in range(blank_from, number))
            blank_from = None
        yield number, line


def line_rows(source: Source, target_key: str | None) -> Iterator[Rows]:
    """The lines as values of the only column; rows have no ids."""
    lines = lines_to_the_last(source)
    while chunk := list(itertools.islice(lines, _CHUNK)):
        values = [line for _, line in chunk]
        yield Rows(values, None if target_key is None else values, partial(_place, chunk[0][0]))


def _place(first: int, index: int) -> Place:
    return Place(first + index, None)


FORMAT = Text()
