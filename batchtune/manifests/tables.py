"""Parquet and Arrow tables: their columns, and the values of some of them. Runs in the reader process."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import pyarrow  # noqa: TID253  # imported in the reader process alone
import pyarrow.compute  # noqa: TID253
from pyarrow import ipc, parquet, types  # noqa: TID253

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.arrow_values import (
    BYTES,
    SPANS,
    TEXTS,
    Budget,
    Key,
    as_listed,
    field_of,
    is_number,
    key_in,
    leaves,
    listed_keys,
    plain,
    values_at,
)
from batchtune.manifests.base import PEEKED_ROWS, dotted, id_name, summarise
from batchtune.manifests.values import Values

METADATA = b"batchtune"
_FORMAT: Literal["batchtune/lengths"] = "batchtune/lengths"
_VERSION: Literal[1] = 1

_MOST_ROWS_AT_ONCE = 1024 * 1024
_BYTES_AT_ONCE = 16 * 1024 * 1024
_VALUE_BYTES = 8
# Of more columns only the types are known: to read the first values of 20,000 takes half a minute.
_MOST_PEEKED_COLUMNS = 1000
_ERRORS = (pyarrow.ArrowException, OSError, ValueError, TypeError, MemoryError, OverflowError, RecursionError)


# The number of the first row, from 0, some rows, and the share of the file that is read with them, from 0 to 1.
_Batch = tuple[int, pyarrow.RecordBatch, float]


class _ParquetTable:
    def __init__(self, path: str) -> None:
        buffered = 4 * 1024 * 1024
        self._file = parquet.ParquetFile(path, buffer_size=buffered, page_checksum_verification=True, pre_buffer=False)
        self.size = os.stat(path).st_size
        self.schema = self._file.schema_arrow
        self._leaves = leaves(self.schema)
        self._names = [self._file.schema.column(index).path for index in range(len(self._file.schema))]
        if len(self._names) != len(self._leaves):
            raise pyarrow.ArrowInvalid("a schema that is not understood")

    def batches(self, keys: Sequence[Key], budget: Budget, from_row: int = 0) -> Iterator[_Batch]:
        metadata = self._file.metadata
        indices = {key.index for key in keys}
        whole = {key.path[0] for key in keys if key.whole}
        wanted = [leaf.index for leaf in self._leaves if leaf.index in indices or leaf.path[0] in whole]
        columns = [self._names[index] for index in wanted]
        budget.spend(0, at_once=metadata.num_rows)
        first = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if first + group.num_rows <= from_row:
                first += group.num_rows
                continue
            chunks = map(group.column, wanted)
            cells = sum(max(one.num_values, one.total_uncompressed_size // _VALUE_BYTES) for one in chunks)
            budget.spend(0, at_once=cells)
            at_once = _rows_at_once(group.num_rows, _VALUE_BYTES * cells)
            for rows in self._file.iter_batches(at_once, row_groups=[number], columns=columns, use_threads=False):
                yield first, rows, min(1.0, (first + rows.num_rows) / max(1, metadata.num_rows))
                first += rows.num_rows
        if first != metadata.num_rows:
            raise pyarrow.ArrowInvalid(f"{first:,} rows are found, and it says that it has {metadata.num_rows:,}")


class _ArrowTable:
    def __init__(self, path: str) -> None:
        # Mapped, so that of large columns that are not asked for (audio) nothing is read.
        with open(path, "rb") as stream:
            self._mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._mapped)
        self._is_file = self._mapped[:6] == b"ARROW1"
        self.schema = self._reader(pyarrow.BufferReader(self._mapped), []).schema

    def batches(self, keys: Sequence[Key], budget: Budget, from_row: int = 0) -> Iterator[_Batch]:
        data = pyarrow.BufferReader(self._mapped)
        reader = self._reader(data, sorted({self.schema.get_field_index(key.steps[0]) for key in keys}))
        first = 0
        batches = map(reader.get_batch, range(reader.num_record_batches)) if self._is_file else reader
        for number, rows in enumerate(batches):
            share = (number + 1) / reader.num_record_batches if self._is_file else data.tell() / self.size
            if first + rows.num_rows > from_row:
                yield first, rows, share
            first += rows.num_rows

    def _reader(self, data: pyarrow.BufferReader, columns: list[int]) -> Any:
        options = ipc.IpcReadOptions(included_fields=columns, use_threads=False)
        return (ipc.open_file if self._is_file else ipc.open_stream)(data, options=options)


class TableReader:
    """An open Parquet or Arrow file (`title`); all methods raise ManifestError if it is damaged."""

    def __init__(self, title: str, path: str, label: str) -> None:
        self._title = title
        self._label = label
        if not os.stat(path).st_size:
            raise ManifestError(f"{label} is empty", "Check that it was written to its end.")
        with self._explained():
            # Both read little more of their columns than the keys need.
            self._table = _ParquetTable(path) if title == "Parquet" else _ArrowTable(path)
        self._parts: Iterator[tuple[int, int, float, list[Values]]] = iter(())
        self._ids: Iterator[str | None] = iter(())
        self._next_id = -1

    def answer(self, method: str, arguments: Sequence[Any]) -> object:
        """Return what a method of this returns. Raises ManifestError where pyarrow raises anything."""
        with self._explained():
            return getattr(self, method)(*arguments)

    def described(self) -> tuple[list[tuple[str, object, bool, bool]], dict[str, Unit], str | None]:
        """Return the fields of each `Column`, column → unit if known, and the targets' column of `batchtune scan`."""
        schema = self._table.schema
        listed = listed_keys(schema)
        spans = [key.name for key in listed if not key.counted and key.type.id in SPANS]
        units: dict[str, Unit] = {**dict.fromkeys(spans, "s"), **self._noted_units()}
        ours = METADATA in (schema.metadata or {})
        target = "target_length" if ours and "target_length" in schema.names else None
        readable = [key for key in listed if key.type.id not in BYTES and not key.unclear]
        values = self._first_values(readable[:_MOST_PEEKED_COLUMNS])
        nothing: dict[str, object] = dict.fromkeys(key.name for key in listed)
        rows = (dict(zip(values, row, strict=True)) for row in itertools.zip_longest(*values.values()))
        found = []
        for column, key in zip(summarise([nothing, *rows]), listed, strict=True):
            numeric = key.counted or is_number(key.type)  # the type says more than the first values do
            example = [] if column.example is None and key.listed and not key.counted else column.example
            found.append((column.name, example, column.numeric or numeric, column.text and not numeric))
        return found, units, target

    def select(self, names: Sequence[str]) -> None:
        """Choose the columns that `next` returns."""
        self._parts = self._values([self._key(name) for name in names])

    def next(self) -> tuple[int, int, float, list[Values]] | None:
        """Return number of the first row and of rows, share of the file, values of each column; None at the end."""
        return next(self._parts, None)

    def ids(self, first: int, count: int) -> list[str | None]:
        """Return the ids of `count` rows from `first`, None for each row without one."""
        if first != self._next_id:
            self._ids = self._ids_from(first)
        found = list(itertools.islice(self._ids, count))
        self._next_id = first + len(found)
        return found + [None] * (count - len(found))  # a damaged file may have fewer of them than lengths

    def _ids_from(self, first: int) -> Iterator[str | None]:
        plain_keys = (key for key in listed_keys(self._table.schema) if not key.listed and not key.unclear)
        keys = {key.name: key for key in plain_keys if key.type.id in TEXTS or types.is_integer(key.type)}
        name = id_name(keys)
        if name is None:
            return
        for start, rows, _ in self._validated([keys[name]], first):
            array = rows.slice(max(0, first - start)).to_struct_array()
            for step in keys[name].steps:
                array = plain(field_of(array, step))
            yield from (None if value in (None, "") else str(value) for value in array.to_pylist())

    def _validated(self, keys: Sequence[Key], from_row: int = 0) -> Iterator[_Batch]:
        for batch in self._table.batches(keys, Budget(self._label, self._table.size), from_row):
            batch[1].validate(full=True)
            yield batch

    def _values(self, keys: Sequence[Key]) -> Iterator[tuple[int, int, float, list[Values]]]:
        budget = Budget(self._label, self._table.size)
        for first, rows, share in self._validated(keys):
            budget.spend(rows.num_rows + rows.nbytes // _VALUE_BYTES)
            at_once = _rows_at_once(len(rows), _VALUE_BYTES * len(rows) + rows.nbytes)
            for start in range(0, len(rows), at_once):
                part = rows.slice(start, at_once).to_struct_array()
                yield first + start, len(part), share, [values_at(part, key.steps, budget) for key in keys]

    def _first_values(self, keys: Sequence[Key]) -> dict[str, list[object]]:
        """Return column → its values in the first rows; not of those that can't be read."""
        budget = Budget(self._label, self._table.size)
        try:
            with self._explained():
                batches = self._validated(keys) if keys else iter(())
                rows = next((rows for _, rows, _ in batches if rows.num_rows), None)
                if rows is None:
                    return {}
                part = rows.slice(0, min(PEEKED_ROWS, _rows_at_once(len(rows), rows.nbytes))).to_struct_array()
                return {key.name: _shown(key, values_at(part, key.steps, budget)) for key in keys}
        except ManifestError:
            if len(keys) == 1:
                return {}
        return {name: values for key in keys for name, values in self._first_values([key]).items()}

    def _key(self, name: str) -> Key:
        """Return the column of a name, or an item of a list (`prompt.0.content`). Raises ManifestError."""
        found = leaves(self._table.schema)
        for spelt in (name, dotted(name)):
            keys = [key for leaf in found if (key := key_in(leaf, spelt)) is not None]
            columns = [key for key in keys if not key.counted]
            if len(columns) > 1 or any(key.unclear for key in keys):
                message = f"{self._label} has several columns {shortened(name)}"
                raise ManifestError(message, "Rename them, so that each has its own name.")
            if keys:
                return replace((columns or keys)[0], name=name)
        below = [leaf for leaf in found if leaf.path[0] == name]  # all fields of a column, such as of a chat's messages
        if below and not any(leaf.unclear for leaf in below):
            return replace(below[0], name=name, whole=True, steps=(name,))
        raise ManifestError(f"{self._label} has no column {shortened(name)}", "Name another column.")

    def _noted_units(self) -> dict[str, Unit]:
        """Return column → its unit, by the note of `lengths_table`; nothing for another program's file."""
        noted = (self._table.schema.metadata or {}).get(METADATA)
        if noted is None:
            return {}
        try:
            known = msgspec.json.decode(noted, type=_Version)
            if known.format == _FORMAT and known.version > _VERSION:
                seen = f"version {known.version} of batchtune's lengths; this batchtune knows {_VERSION}"
                hint = "Use a newer batchtune, or scan the data set again."
                raise ManifestError(f"{self._label} is of {seen}", hint)
            note = msgspec.json.decode(noted, type=_Note)
        except (msgspec.MsgspecError, RecursionError) as error:
            message = f"{self._label}: what its metadata say under 'batchtune' is not as batchtune writes it ({error})"
            raise ManifestError(message, "Scan the data set again.") from None
        units = {"length": note.unit, "target_length": note.target_unit}
        return {column: unit for column, unit in units.items() if unit is not None}

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what pyarrow raises for a damaged file into a ManifestError."""
        hint = f"Check that it is a whole {self._title} file; make or fetch it again."
        try:
            yield
        except ManifestError:
            raise
        except _ERRORS as error:
            said = shortened(next(iter(str(error).splitlines()), type(error).__name__), 160)
            if isinstance(error, (pyarrow.ArrowNotImplementedError, pyarrow.ArrowKeyError)):
                hint = "Try a newer pyarrow, or write the file again."
            raise ManifestError(f"{self._label} can't be read as {self._title}: {said}", hint) from None


def lengths_table(
    ids: Sequence[str | None], lengths: Values, targets: Values | None, unit: Unit | None
) -> pyarrow.Table:
    """Return lengths, shape (count,), as the table that `batchtune scan` writes and `TableReader` recognises."""
    columns = {"id": pyarrow.array(ids, pyarrow.string()), "length": pyarrow.array(lengths, pyarrow.float64())}
    if targets is not None:
        columns["target_length"] = pyarrow.array(targets, pyarrow.float64())
    note = msgspec.json.encode(_Note(unit=unit))
    return pyarrow.table(columns).replace_schema_metadata({METADATA: note})


class _Version(msgspec.Struct):
    format: str
    version: int


class _Note(msgspec.Struct):
    format: Literal["batchtune/lengths"] = _FORMAT
    version: Literal[1] = _VERSION
    unit: Unit | None = None
    target_unit: Unit | None = None


def _rows_at_once(rows: int, size: int) -> int:
    """Return how many rows to read at once, where all of them take `size` bytes."""
    return max(1, min(_MOST_ROWS_AT_ONCE, rows * _BYTES_AT_ONCE // max(1, size)))


def _shown(key: Key, values: Values) -> list[object]:
    whole = key.counted or types.is_integer(key.type)
    return [int(one) if whole and isinstance(one, float) and abs(one) < 2**53 else one for one in as_listed(values)]
