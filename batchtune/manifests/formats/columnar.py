"""Parquet and Arrow, read by pyarrow in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from batchtune.lengths import Unit
from batchtune.manifests.base import Column, Format, Rows
from batchtune.manifests.source import Head

if TYPE_CHECKING:
    from batchtune.manifests.tables import Table


class Columnar(Format):
    """The part of a columnar format that is the same for all; `title` is its name in messages."""

    title: ClassVar[str]
    units: ClassVar[Mapping[str, Unit]] = {
        **dict.fromkeys(("input_ids_count", "token_ids_count", "tokens_count", "labels_count"), "tokens"),
        "input_values_count": "samples",
    }

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Table]:
        """Open the table. Raises ManifestError if it is of another format or damaged."""
        from batchtune.manifests import tables

        kinds = {"Parquet": tables.ParquetTable, "Arrow": tables.ArrowTable}
        with self.source.seekable() as stream, tables.explained(str(self.source.path), self.title):
            yield kinds[self.title](stream.name)

    @cached_property
    def _units(self) -> dict[str, Unit]:
        with self._opened() as table:
            return table.noted_units(str(self.source.path))

    def columns(self) -> Sequence[Column]:
        """Return all columns, those within others under dotted names, and the numbers of items of all lists."""
        with self._opened() as table:
            return table.columns()

    def unit_in(self, column: str) -> Unit | None:
        """Return the unit by the note of `batchtune scan`, seconds for spans of time, else what the name says."""
        return self._units.get(column) or super().unit_in(column)

    def default_target(self) -> str | None:
        """Return `target_length` for a table that `batchtune scan` wrote with targets."""
        with self._opened() as table:
            if table.is_scan and "target_length" in table.schema.names:
                return "target_length"
        return None

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield some thousand rows at a time."""
        with self._opened() as table:
            for rows, share in table.rows(keys, str(self.source.path)):
                yield rows
                self.source.report(share)


class Parquet(Columnar):
    """Parquet, as pandas, Spark, Hugging Face and `batchtune scan` write it."""

    name = "parquet"
    title = "Parquet"
    description = "a Parquet file"
    folder_kind = ("parquet files", (".parquet",))

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins as Parquet does, or as encrypted Parquet."""
        return head.data.startswith((b"PAR1", b"PARE"))


class Arrow(Columnar):
    """Arrow IPC, the file (Feather) and the stream (what `Dataset.save_to_disk` writes)."""

    name = "arrow"
    title = "Arrow"
    description = "an Arrow file or stream, as Feather or Hugging Face's datasets write them"
    folder_kind = ("arrow files", (".arrow",))

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether it begins as a file, or as a stream: with the mark, size and root of a schema's message."""
        if head.data.startswith(b"ARROW1"):
            return True
        size = int.from_bytes(head.data[4:8], "little", signed=True)
        root = int.from_bytes(head.data[8:12], "little", signed=True)
        return head.data.startswith(b"\xff\xff\xff\xff") and 4 <= root < size and len(head.data) > 12
