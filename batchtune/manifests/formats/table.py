"""Any table with a header: comma, tab or semicolon between its cells."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from batchtune.manifests.base import Column, Format, Rows
from batchtune.manifests.columns import KNOWN_UNITS, normalised
from batchtune.manifests.formats.delimited import (
    delimiter_of,
    header_cells,
    open_table,
    peek_columns,
    read_rows,
)
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import number


class DelimitedTable(Format):
    """CSV and TSV; blank lines are passed over."""

    name = "table"
    description = "a table, comma, tab or semicolon separated, whose first line names its columns"
    named_columns = True

    def fits(self, head: Head) -> bool:
        """Whether the first line can be a header: separated names, none of them a number."""
        if not head.lines or b"\0" in head.data:
            return False
        delimiter = delimiter_of(head.lines[0])
        if delimiter is None:
            return normalised(head.lines[0]) in KNOWN_UNITS
        try:
            names = header_cells(head.lines[0], delimiter)
        except csv.Error:
            return False
        return not head.data.lstrip().startswith((b"{", b"[")) and all(number(name) is None for name in names)

    def columns(self, source: Source) -> Sequence[Column]:
        """The names in the header."""
        return peek_columns(open_table(source))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The rows, some ten thousand at a time."""
        return read_rows(open_table(source), length_key, target_key)


FORMAT = DelimitedTable()
