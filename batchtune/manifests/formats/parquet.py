"""Parquet: of its columns only those that are asked for are read, some ten thousand rows at a time."""

from __future__ import annotations

import bisect
import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from batchtune.errors import ManifestError
from batchtune.manifests.columnar import Columnar, Part, explained
from batchtune.manifests.columnar_schema import Key, Leaf, leaves
from batchtune.manifests.columnar_values import ROWS_AT_ONCE, Budget, is_text
from batchtune.manifests.parquet_footer import ColumnSize, column_sizes
from batchtune.manifests.source import Head, Source

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
# Of a column all that is in a row group is read at once. Where that is much, it goes through a buffer: not always,
# since pyarrow then takes as much memory as a damaged page says that it needs, which may be 2 GiB.
_LARGE_CHUNK_BYTES = 64 * 1024 * 1024
_BUFFER_BYTES = 4 * 1024 * 1024
# Where a row may be any number of values, few are taken at once, and put together while they are small.
_LARGE_ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 16 * 1024 * 1024
_VALUE_BYTES = 8


class Parquet(Columnar):
    """Parquet, as pandas, Spark, Hugging Face and `batchtune scan` write it."""

    name = "parquet"
    title = "Parquet"
    description = "a Parquet file"

    def fits(self, head: Head) -> bool:
        """Whether the file begins as Parquet does, also where it is encrypted."""
        return head.data.startswith((_MAGIC, _ENCRYPTED))

    @contextlib.contextmanager
    def opened(self, source: Source) -> Iterator[ParquetTable]:
        """The file. Raises ManifestError where it is none, or damaged."""
        with source.seekable() as stream, explained(source.path, self.title):
            yield ParquetTable(source.path, stream)


class ParquetTable:
    """An open Parquet file; see `columnar.Table`.

    Of its metadata pyarrow is asked for counts only: what else they hold (`row_group(…)`, `column(…)`), it hands out
    without a net, and the process ends where that is damaged.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.size = stream.seek(0, io.SEEK_END)
        self._path = path
        self._stream = stream
        self._metadata: Any = None
        self._file = self._opened(0)
        self._metadata = self._file.metadata
        self.schema = self._file.schema_arrow
        self._leaves = leaves(self.schema)
        self._names = [self._file.schema.column(index).path for index in range(len(self._file.schema))]
        self._starts = [0]  # of the row groups, as far as they are known
        if len(self._names) != len(self._leaves):
            raise ManifestError(f"{path} has a schema that is not understood", "Write the file anew.")

    def batches(self, keys: Sequence[Key], *, from_row: int = 0, at_once: int = ROWS_AT_ONCE) -> Iterator[Part]:
        """Its rows, from the row group on in which the first that is needed lies."""
        wanted = self._wanted(keys)
        rows, groups = self._metadata.num_rows, self._metadata.num_row_groups
        sizes = [self._sizes.get(leaf.index, ColumnSize()) for leaf in wanted]
        self._check(rows, sizes)
        largest = min(self.size, max(size.largest_chunk for size in sizes))
        file = self._file if largest < _LARGE_CHUNK_BYTES else self._opened(_BUFFER_BYTES)
        columns = [self._names[leaf.index] for leaf in wanted]
        read_at_once = at_once
        if any(is_text(leaf.type) or leaf.listed for leaf in wanted):
            read_at_once = min(at_once, _LARGE_ROWS_AT_ONCE)
        group = max(0, bisect.bisect_right(self._starts, from_row) - 1)
        first = self._starts[group]
        for number in range(group, groups):
            for batch in _together(_read(file, number, columns, read_at_once), at_once):
                yield Part(first, batch, min(1.0, (first + batch.num_rows) / max(1, rows)))
                first += batch.num_rows
            if number + 1 == len(self._starts):
                self._starts.append(first)
        if first != rows:
            raise ManifestError(
                f"{self._path} can't be read as Parquet: {first:,} rows are found, and it says that it has {rows:,}",
                "Make or fetch the file anew; if it is whole, try a newer pyarrow.",
            )

    def _opened(self, buffer_bytes: int) -> pyarrow.parquet.ParquetFile:
        from pyarrow import parquet

        return parquet.ParquetFile(
            self._stream,
            metadata=self._metadata,
            buffer_size=buffer_bytes,
            pre_buffer=False,
            page_checksum_verification=True,
        )

    def _check(self, rows: int, sizes: Sequence[ColumnSize]) -> None:
        """Raises ManifestError where the file says that it has far more than its bytes can stand for."""
        budget = Budget(self._path, self.size)
        budget.check(rows)
        for size in sizes:
            budget.check(max(size.values, size.bytes // _VALUE_BYTES))

    @cached_property
    def _sizes(self) -> Mapping[int, ColumnSize]:
        try:
            return column_sizes(self._stream)
        except ValueError as error:
            raise ManifestError(f"{self._path} is damaged: {error}", "Make or fetch the file anew.") from None

    def _wanted(self, keys: Sequence[Key]) -> list[Leaf]:
        """What must be read for some columns."""
        indices = {key.leaf.index for key in keys}
        # Of a map without its keys pyarrow reads no rows.
        mapped = {key.leaf.path[0] for key in keys if key.leaf.mapped}
        return [leaf for leaf in self._leaves if leaf.index in indices or leaf.path[0] in mapped]


def _read(
    file: pyarrow.parquet.ParquetFile, group: int, columns: Sequence[str], at_once: int
) -> Iterator[pyarrow.RecordBatch]:
    for batch in file.iter_batches(at_once, row_groups=[group], columns=columns, use_threads=False):
        batch.validate(full=True)
        yield batch


def _together(batches: Iterable[pyarrow.RecordBatch], at_once: int) -> Iterator[pyarrow.RecordBatch]:
    """The same rows in fewer batches, which are still small or have about as many rows as are wanted at once."""
    held: list[pyarrow.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= at_once or size >= _BYTES_AT_ONCE:
            yield from _joined(held)
            held, rows, size = [], 0, 0
    yield from _joined(held)


def _joined(batches: Sequence[pyarrow.RecordBatch]) -> Sequence[pyarrow.RecordBatch]:
    import pyarrow

    if len(batches) < 2:
        return batches
    return list(pyarrow.Table.from_batches(batches).combine_chunks().to_batches())


FORMAT = Parquet()
