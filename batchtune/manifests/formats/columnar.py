"""Parquet and Arrow, read in a process of their own, and what `batchtune scan` notes in the tables that it writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

from batchtune.errors import ManifestError
from batchtune.lengths import Unit
from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.reader_process import opened
from batchtune.manifests.source import Head

_STREAM_MARK = b"\xff\xff\xff\xff"


class Columnar(Format):
    """The part of a columnar format that is the same for all.

    Attributes:
        title: As the format calls itself, for messages.
    """

    title: ClassVar[str]
    units: ClassVar[Mapping[str, Unit]] = {
        **dict.fromkeys(("input_ids_count", "token_ids_count", "tokens_count", "labels_count"), "tokens"),
        "input_values_count": "samples",
    }

    @cached_property
    def _described(self) -> tuple[list[Any], dict[str, Unit], str | None]:
        with opened(self.source, self.title) as table:
            found: tuple[list[Any], dict[str, Unit], str | None] = table.ask("described")
            return found

    def columns(self) -> Sequence[Column]:
        """Return all columns, those within others under dotted names, and the numbers of items of all lists."""
        return [Column(*fields) for fields in self._described[0]]

    def unit_in(self, column: str) -> Unit | None:
        """Return the unit of a column: by the note of `batchtune scan`, and seconds for spans of time."""
        return self._described[1].get(column)

    def default_target(self) -> str | None:
        """Return `target_length` for a table that `batchtune scan` wrote with targets."""
        return self._described[2]

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield some ten thousand rows at a time, or fewer if they are large; ids are read in a pass of their own."""
        is_open = True
        with opened(self.source, self.title) as table:

            @lru_cache(1)
            def ids(first: int, count: int) -> list[str | None]:
                return table.ask("ids", first, count) if is_open else [None] * count

            def place(first: int, count: int, index: int) -> Place:
                name = None
                with contextlib.suppress(ManifestError):  # a message is being made of something else
                    name = ids(first, count)[index]
                return Place(None, name or f"row {first + index + 1}")

            try:
                table.ask("select", keys)
                while (part := table.ask("next")) is not None:
                    first, count, share, columns = part
                    yield Rows(columns, partial(place, first, count), partial(ids, first, count))
                    self.source.report(share)
            finally:
                is_open = False


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
        size, root = (int.from_bytes(head.data[at : at + 4], "little", signed=True) for at in (4, 8))
        stream = head.data.startswith(_STREAM_MARK) and 4 <= root < size and len(head.data) > 12
        return head.data.startswith(b"ARROW1") or stream
