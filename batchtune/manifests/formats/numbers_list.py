"""A list of lengths: one number on every line, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from batchtune.manifests.base import Column, Format, Rows
from batchtune.manifests.columns import PEEKED_ROWS, summarise
from batchtune.manifests.formats.text import line_rows, lines_to_the_last
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import number


class Numbers(Format):
    """Lines of one number each, without ids; only blank lines at the end are passed over."""

    name = "numbers"
    description = "one number on every line"
    named_columns = False

    def fits(self, head: Head) -> bool:
        """Whether the lines are single words, the first and most of the others numbers."""
        lines = [line.strip() for line in head.lines]
        if not lines or number(lines[0]) is None or any(len(line.split()) > 1 for line in lines):
            return False
        return 2 * sum(number(line) is not None for line in lines) > len(lines)

    def columns(self, source: Source) -> Sequence[Column]:
        """The one column `length`."""
        first = itertools.islice(lines_to_the_last(source), PEEKED_ROWS)
        return summarise({"length": line} for _, line in first)

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The numbers as text, some ten thousand at a time."""
        return line_rows(source, target_key)


FORMAT = Numbers()
