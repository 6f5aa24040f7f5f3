"""Parquet and Arrow, read by pyarrow in this process, and the table that `scan` writes.

pyarrow is trusted as pandas trusts it: a file that is crafted to do harm can take this process's memory or crash it.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import UNITS, FloatArray, IntArray, Lengths, Unit
from batchtune.manifests.formats import (
    COUNT,
    PEEKED_ROWS,
    Column,
    Format,
    KeyPath,
    Rows,
    Values,
    columns_of,
    count_estimates,
    id_name,
    walk,
)
from batchtune.manifests.formats.members import read_value
from batchtune.manifests.headers import Payload
from batchtune.manifests.source import Head
from batchtune.manifests.storage import Stored

if TYPE_CHECKING:
    import pyarrow

# In the metadata of the table that `scan` writes, the unit.
_METADATA = "batchtune.unit"
# In that of a histogram: the digest of its rows, and the fingerprint of the lengths that it counts.
_FINGERPRINTS = "batchtune.histogram"
_COUNT = "count"
# In the table that `scan` writes, which is sorted by length: the example's row in its source, from 0.
ROW = "row"
_MOST_EXAMPLES = 1 << 40  # of one length
# Of texts and lists, Python objects are made.
_ROWS_AT_ONCE = 16 * 1024
_BUFFER_BYTES = 4 * 1024 * 1024
# Of more columns only the names are known: to read the first values of 20,000 takes half a minute.
_MOST_PEEKED_COLUMNS = 1000

# Of audio, each some hundred KiB, the bytes of all are held.
_AUDIO_AT_ONCE = 32

# Names of columns, or of fields in them (`info.duration`), and a number → that many rows at once, and the share of
# the file that is read.
_Batches = Callable[[Sequence[str], int], "Iterator[tuple[pyarrow.RecordBatch, float]]"]


class Columnar(Format):
    """The part of a columnar format that is the same for all; `title` is its name in messages."""

    title: ClassVar[str]

    @staticmethod
    @abstractmethod
    def opened(stored: Stored) -> tuple[pyarrow.Schema, _Batches]:
        """Return the schema of a file, and how to read it."""

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[pyarrow.Schema, _Batches]]:
        """Open the file. Raises ManifestError if it is of another format or damaged."""
        import pyarrow

        errors = (
            pyarrow.ArrowException,
            OSError,
            KeyError,
            ValueError,
            TypeError,
            MemoryError,
            OverflowError,
            RecursionError,
        )
        with self.source.plain_file() as stored:
            try:
                yield self.opened(stored)
            except errors as error:
                reason = shortened(
                    next(iter(str(error).splitlines()), type(error).__name__), 160
                )
                raise ManifestError(
                    f"{self.source.path} can't be read as {self.title}: {reason}",
                    f"Check that it is a whole {self.title} file; make or fetch it again.",
                ) from None

    @cached_property
    def _schema(self) -> pyarrow.Schema:
        with self._opened() as (schema, _):
            return schema

    @cached_property
    def _binary(self) -> set[str]:
        """The columns, and fields, of bytes."""
        return {name for name, kind in _leaves(self._schema) if _is_binary(kind)}

    @property
    def _scanned_unit(self) -> str | None:
        """The unit that `batchtune scan` noted in its table, "" if it knew none; None in any other table."""
        return self._noted(_METADATA)

    def _noted(self, name: str) -> str | None:
        note = (self._schema.metadata or {}).get(name.encode())
        return None if note is None else note.decode(errors="replace")

    def columns(self) -> Sequence[Column]:
        """Return all columns, and the fields of those that have fields under dotted names."""
        with self._opened() as (schema, batches):
            leaves = [name for name, _ in _leaves(schema)]
            names = [name for name in leaves if name not in self._binary]
            rows: list[dict[str, Any]] = [dict.fromkeys(leaves)]
            peeked = batches(names[:_MOST_PEEKED_COLUMNS], _ROWS_AT_ONCE)
            for batch, _ in itertools.islice(peeked, 1):
                rows += batch.slice(0, PEEKED_ROWS).to_pylist()
            return [
                replace(column, is_binary=column.name in self._binary)
                for column in columns_of(rows)
                if column.name in rows[0]
            ]

    def unit_in(self, column: str) -> Unit | None:
        """Return the unit by the note of `batchtune scan`, s for audio, else what the name says."""
        if column in self._binary:
            return "s"
        for unit in UNITS:
            if column == "length" and unit == self._scanned_unit:
                return unit
        return super().unit_in(column)

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """Return `length` for a table that batchtune wrote."""
        return None if self._scanned_unit is None else "length"

    def default_target(self) -> str | None:
        """Return `target_length` for a table that `batchtune scan` wrote with targets."""
        if self._scanned_unit is not None and "target_length" in self._schema.names:
            return "target_length"
        return None

    @property
    def noted_fingerprints(self) -> tuple[str, str] | None:
        """The digest and the fingerprint that `batchtune scan --histogram` noted; None in any other table."""
        note = self._noted(_FINGERPRINTS)
        if note is None:
            return None
        digest, _, fingerprint = note.partition(" ")
        return digest, fingerprint

    @property
    def order_is_lost(self) -> bool:
        """Whether `batchtune scan` sorted the rows, and the column that says which row each was is gone."""
        is_scanned = self._scanned_unit is not None and self.noted_fingerprints is None
        return is_scanned and ROW not in self._schema.names

    def _counts(self, batch: pyarrow.RecordBatch, first: int) -> IntArray:
        """Return how many examples the rows of a histogram stand for. Raises ManifestError if one is not above 0."""
        counts: IntArray = batch.column(_COUNT).cast("int64").fill_null(0).to_numpy()
        wrong = np.flatnonzero((counts < 1) | (counts > _MOST_EXAMPLES))
        if wrong.size:
            raise ManifestError(
                f"{self.source.path} is a damaged histogram: row {first + int(wrong[0]) + 1:,} counts "
                f"{counts[wrong[0]]:,} examples",
                "Create it again with `batchtune scan --histogram`.",
            )
        return counts

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield some thousand rows at a time."""
        import pyarrow
        from pyarrow import types

        with self._opened() as (schema, batches):
            places = [_located(schema, key) for key in keys]
            id_column = id_name(
                field.name
                for field in schema
                if not (types.is_nested(field.type) or _is_binary(field.type))
            )
            needed = [".".join(fields) for fields, _ in places]
            if id_column is not None:
                needed.append(id_column)
            counts = None
            order = None
            place = None
            is_ordered = self._scanned_unit is not None and ROW in schema.names
            if self.noted_fingerprints is not None:
                needed.append(_COUNT)
            if is_ordered:
                needed.append(ROW)
            first = 0
            rows_at_once = _ROWS_AT_ONCE
            if self._binary.intersection(keys):
                rows_at_once = _AUDIO_AT_ONCE
            for batch, share in batches(needed, rows_at_once):
                values = [_values(batch, *place) for place in places]
                ids = (
                    pyarrow.nulls(batch.num_rows)
                    if id_column is None
                    else batch.column(id_column)
                )
                if self.noted_fingerprints is not None:
                    counts = self._counts(batch, first)
                    place = partial(_row, first)
                if is_ordered:
                    order = batch.column(ROW).cast("int64").fill_null(-1).to_numpy()
                rows = Rows(
                    values, partial(_ids, ids), place, counts=counts, order=order
                )
                if keys[0] in self._binary:
                    rows = replace(rows, num_estimates=count_estimates(values[0]))
                yield rows
                first += batch.num_rows
                self.source.report(share)


def _row(first: int, index: int) -> str:
    return f"row {first + index + 1:,}"


def _ids(column: pyarrow.Array) -> list[str | None]:
    return [None if value in (None, "") else str(value) for value in column.to_pylist()]


class Parquet(Columnar):
    """Parquet, as pandas, Spark, Hugging Face and `batchtune scan` write it."""

    name = "parquet"
    title = "Parquet"
    description = "a Parquet file"
    endings = (".parquet",)

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins as Parquet does, or as encrypted Parquet."""
        return head.data.startswith((b"PAR1", b"PARE"))

    @staticmethod
    def opened(stored: Stored) -> tuple[pyarrow.Schema, _Batches]:
        """Return the schema of a file, and how to read it: only the fields that are asked for."""
        from pyarrow import parquet

        # Not the whole file at once, which pre-buffering reads.
        file = parquet.ParquetFile(
            stored.path or stored.random_access(),
            buffer_size=_BUFFER_BYTES,
            page_checksum_verification=True,
            pre_buffer=False,
        )

        def batches(
            names: Sequence[str], rows_at_once: int
        ) -> Iterator[tuple[pyarrow.RecordBatch, float]]:
            first = 0
            for batch in file.iter_batches(rows_at_once, columns=list(names)):
                first += batch.num_rows
                yield batch, first / file.metadata.num_rows

        return file.schema_arrow, batches


class Arrow(Columnar):
    """Arrow IPC, the file (Feather) and the stream (what `Dataset.save_to_disk` writes).

    The file is mapped into memory: of columns that are not asked for (audio) nothing is read. An object is read whole.
    """

    name = "arrow"
    title = "Arrow"
    description = (
        "an Arrow file or stream, as Feather or Hugging Face's datasets write them"
    )
    endings = (".arrow",)

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether it begins as a file, or as a stream: with the mark and the size of a schema's message."""
        size = int.from_bytes(head.data[4:8], "little", signed=True)
        return head.data.startswith(b"ARROW1") or (
            head.data.startswith(b"\xff\xff\xff\xff") and 64 <= size < 2**26
        )

    @staticmethod
    def opened(stored: Stored) -> tuple[pyarrow.Schema, _Batches]:
        """Return the schema of a file, and how to read it."""
        import pyarrow
        from pyarrow import ipc

        is_file = stored.read(0, 6) == b"ARROW1"
        if stored.path is not None:
            file = pyarrow.memory_map(stored.path)
        elif is_file:
            file = pyarrow.PythonFile(stored.random_access(), mode="r")
        else:
            file = pyarrow.PythonFile(stored.stream(), mode="r")
        reader = ipc.open_file(file) if is_file else ipc.open_stream(file)

        def batches(
            names: Sequence[str], rows_at_once: int
        ) -> Iterator[tuple[pyarrow.RecordBatch, float]]:
            stored_batches = (
                map(reader.get_batch, range(reader.num_record_batches))
                if is_file
                else reader
            )
            for index, batch in enumerate(stored_batches, 1):
                batch.validate(full=True)
                share = (
                    index / reader.num_record_batches
                    if is_file
                    else file.tell() / stored.size
                )
                for start in range(0, batch.num_rows, rows_at_once):
                    yield batch.slice(start, rows_at_once), share

        return reader.schema, batches


def noted_table(
    columns: dict[str, Any], unit: Unit | None, fingerprints: str | None = None
) -> pyarrow.Table:
    """Return columns, but those that are None, as the table that `batchtune scan` writes and these formats recognise.

    Among them are `length` and maybe `target_length`; `fingerprints` are those of a histogram.
    """
    import pyarrow

    present = {name: column for name, column in columns.items() if column is not None}
    notes: dict[str, str] = {_METADATA: unit or ""}
    if fingerprints is not None:
        notes[_FINGERPRINTS] = fingerprints
    return pyarrow.table(present).replace_schema_metadata(notes)


def histogram_table(lengths: Lengths) -> pyarrow.Table:
    """Return the distinct lengths as the table that `batchtune scan --histogram` writes, the longest first."""
    runs = lengths.runs
    columns = {
        "length": runs.values,
        "target_length": runs.targets,
        _COUNT: runs.counts,
    }
    return noted_table(columns, lengths.unit, f"{runs.digest} {lengths.fingerprint}")


def _leaves(fields: Any, prefix: str = "") -> Iterator[tuple[str, pyarrow.DataType]]:
    """Yield name and type of the columns without fields, and of the fields of the others."""
    from pyarrow import types

    for field in fields:
        if types.is_struct(field.type):
            yield from _leaves(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.type


def _located(schema: pyarrow.Schema, key: str) -> tuple[list[str], KeyPath]:
    """Return a column and its fields on the way to a value, and the rest of the way below them. Raises KeyError."""
    from pyarrow import types

    if key in schema.names:
        return [key], ()
    top, *rest = key.split(".")
    kind = schema.field(top).type
    fields = [top]
    while rest and types.is_struct(kind) and kind.get_field_index(rest[0]) >= 0:
        kind = kind.field(rest[0]).type
        fields.append(rest.pop(0))
    return fields, tuple(rest)


def _values(batch: pyarrow.RecordBatch, fields: Sequence[str], rest: KeyPath) -> Values:
    """Return the values in a column's field, or below it; numbers as an array of floats if none is missing."""
    import pyarrow
    from pyarrow import compute, types

    array = batch.column(fields[0])
    for name in fields[1:]:
        array = compute.struct_field(array, name)
    kind = array.type
    if (
        rest == (COUNT,)
        and not types.is_dictionary(kind)
        and hasattr(kind, "value_type")
    ):
        array = compute.list_value_length(array)
        kind = array.type
        rest = ()
    if _is_binary(kind):
        return [_seconds(content.as_py()) for content in array]
    if (types.is_integer(kind) or types.is_floating(kind)) and not array.null_count:
        floats: FloatArray = array.cast(pyarrow.float64(), safe=False).to_numpy()
        return floats
    if types.is_decimal(kind):
        array = array.cast(pyarrow.string())
    values: list[object] = array.to_pylist()
    if rest:
        return [walk(value, rest) for value in values]
    return values


def _seconds(content: bytes | None) -> object:
    """Return the duration of an audio file by its header, or Unreadable."""
    if content is None:
        return None
    payload = Payload(
        len(content), lambda offset, size: content[offset : offset + size]
    )
    return read_value(payload, "wav", ())


def _is_binary(kind: pyarrow.DataType) -> bool:
    return "binary" in str(kind)
