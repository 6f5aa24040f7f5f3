"""SpeechBrain's CSV manifests: a header with an `ID` column, spaces allowed around the cells."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from batchtune.errors import ManifestError
from batchtune.lengths import Unit
from batchtune.manifests.base import Column, Format, Rows
from batchtune.manifests.formats.delimited import (
    Table,
    delimiter_of,
    header_cells,
    open_table,
    peek_columns,
    read_rows,
)
from batchtune.manifests.source import Head, Source


class SpeechBrainCsv(Format):
    """As SpeechBrain's `DynamicItemDataset.from_csv` reads it, with the older column sets too.

    It refuses two rows with one id, and so is it done here.
    """

    name = "speechbrain-csv"
    description = "a comma separated table with a column 'ID'"
    units: ClassVar[Mapping[str, Unit]] = {"length": "s", "len": "s"}
    named_columns = True
    unique_ids = True

    def fits(self, head: Head) -> bool:
        """Whether the first line is a header with commas and an `ID`."""
        if not head.lines or delimiter_of(head.lines[0]) != ",":
            return False
        try:
            return "ID" in header_cells(head.lines[0], ",")
        except csv.Error:
            return False

    def columns(self, source: Source) -> Sequence[Column]:
        """The names in the header."""
        return peek_columns(_open(source))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The rows, some ten thousand at a time."""
        return read_rows(_open(source), length_key, target_key)


def _open(source: Source) -> Table:
    table = open_table(source, ",")
    if "ID" not in table.header:
        raise ManifestError(
            f"{source.path} has no column 'ID', which SpeechBrain needs, but {', '.join(table.header)}",
            "Read it as any other table with --format table.",
        )
    return table


FORMAT = SpeechBrainCsv()
