"""Parquet and Arrow, read in a process of their own, and what `batchtune scan` notes in the tables that it writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, cast

from batchtune.errors import ManifestError
from batchtune.lengths import Unit
from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.reader_process import opened
from batchtune.manifests.source import Head, Source

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

    def columns(self, source: Source) -> Sequence[Column]:
        """Return all columns, those within others under dotted names, and the numbers of items of all lists."""
        return [Column(*fields) for fields in self._answer(source, "columns")]

    def unit_in(self, source: Source, column: str) -> Unit | None:
        """Return what a column counts: by the note of `batchtune scan`, and seconds for spans of time."""
        return cast("Unit | None", self._answer(source, "units").get(column))

    def default_target(self, source: Source) -> str | None:
        """Return `target_length` for what `batchtune scan` wrote with targets."""
        return cast("str | None", self._answer(source, "default_target"))

    def _answer(self, source: Source, question: str) -> Any:
        if question not in source.memo:
            with opened(source, self.title) as table:
                source.memo[question] = table.ask(question)
        return source.memo[question]

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """Yield some ten thousand rows at a time, or fewer if they are large; ids are read in a pass of their own."""
        is_open = True
        with opened(source, self.title) as table:

            @lru_cache(1)
            def ids(first: int, count: int) -> list[str | None]:
                return table.ask("ids", first, count) if is_open else [None] * count

            def place(first: int, count: int, index: int) -> Place:
                name = None
                with contextlib.suppress(ManifestError):  # a message is being made of something else
                    name = ids(first, count)[index]
                return Place(None, name or f"row {first + index + 1}")

            try:
                table.ask("select", [length_key] if target_key is None else [length_key, target_key])
                while (part := table.ask("next")) is not None:
                    first, count, share, (lengths, *targets) = part
                    target = targets[0] if targets else None
                    yield Rows(lengths, target, partial(place, first, count), ids=partial(ids, first, count))
                    source.report(share)
            finally:
                is_open = False


class Parquet(Columnar):
    """Parquet, as pandas, Spark, Hugging Face and `batchtune scan` write it."""

    name = "parquet"
    title = "Parquet"
    description = "a Parquet file"
    folder_kind = ("parquet files", (".parquet",))

    def fits(self, head: Head) -> bool:
        """Return whether the file begins as Parquet does, or as encrypted Parquet."""
        return head.data.startswith((b"PAR1", b"PARE"))


class Arrow(Columnar):
    """Arrow IPC, the file (Feather) and the stream (what `Dataset.save_to_disk` writes)."""

    name = "arrow"
    title = "Arrow"
    description = "an Arrow file or stream, as Feather or Hugging Face's datasets write them"
    folder_kind = ("arrow files", (".arrow",))

    def fits(self, head: Head) -> bool:
        """Return whether it begins as a file, or as a stream: with the mark, size and root of a schema's message."""
        size, root = (int.from_bytes(head.data[at : at + 4], "little", signed=True) for at in (4, 8))
        stream = head.data.startswith(_STREAM_MARK) and 4 <= root < size and len(head.data) > 12
        return head.data.startswith(b"ARROW1") or stream


PARQUET = Parquet()
ARROW = Arrow()
