"""Parquet and Arrow tables by pyarrow: their columns, the values of some of them, and the table that `scan` writes.

pyarrow is trusted as pandas trusts it: a file that is crafted to do harm can take this process's memory or crash it.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import msgspec
import pyarrow  # noqa: TID253  # this module is imported where a table is read or written
import pyarrow.compute as pc  # noqa: TID253
from pyarrow import ipc, parquet, types  # noqa: TID253

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import FloatArray, Unit
from batchtune.manifests.base import Column, Place, Rows, dotted, id_name, summarise, walk
from batchtune.manifests.values import Unreadable, Values

METADATA = b"batchtune"
_FORMAT: Literal["batchtune/lengths"] = "batchtune/lengths"
_VERSION: Literal[1] = 1

# A column of lists comes with another, of their numbers of items: input_ids.count.
_COUNT = "count"
# Numbers stay arrays; of texts and lists, Python objects are made.
_NUMBERS_AT_ONCE = 256 * 1024
_OBJECTS_AT_ONCE = 4096
_PEEKED_ROWS = 1000
_BUFFER_BYTES = 4 * 1024 * 1024
# Of more columns only the types are known: to read the first values of 20,000 takes half a minute.
_MOST_PEEKED_COLUMNS = 1000
_TICKS_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_ERRORS = (pyarrow.ArrowException, OSError, ValueError, TypeError, MemoryError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A column without fields of its own, or such a field of one.

    Attributes:
        fields: Names of fields, that of the column first; those below a map are left out.
        name: As the user sees it.
        type: Of the values; a list's, of its items.
        lists: Names of the lists on the way, as the user sees them.
    """

    fields: tuple[str, ...]
    name: str
    type: pyarrow.DataType
    lists: tuple[str, ...] = ()


class CellPath(NamedTuple):
    """The way from a row to a value: names of fields, and indices of lists; `counted` for a list's number of items."""

    steps: tuple[str, ...]
    counted: bool = False


class Table:
    """An open Parquet or Arrow file. Use its methods within `explained`."""

    schema: pyarrow.Schema

    def batches(self, paths: Sequence[CellPath], rows_at_once: int) -> Iterator[tuple[pyarrow.RecordBatch, float]]:
        """Yield all rows, with the columns that these paths need at least, and the share of the file that is read."""
        raise NotImplementedError

    def leaves(self) -> list[Leaf]:
        """Return the columns; if they have fields, these in their place, however deep."""
        return list(_leaves_below(pyarrow.struct(list(self.schema)), (), "", ()))

    def columns(self) -> list[Column]:
        """Return the columns as a user sees them: all leaves, and before the first leaf of a list its length."""
        types_of: dict[str, pyarrow.DataType] = {}
        for leaf in self.leaves():
            if leaf.lists:
                types_of.setdefault(f"{leaf.lists[0]}.{_COUNT}", pyarrow.int64())
            types_of.setdefault(leaf.name, leaf.type)
        examples = self._first_rows([name for name, kind in types_of.items() if not _is_binary(kind)])
        listed = {leaf.name for leaf in self.leaves() if leaf.lists}
        columns = []
        for column in summarise([dict.fromkeys(types_of), *examples]):
            numeric = _is_number(types_of[column.name])  # the type says more than the first values do
            example = column.example
            if example is None and column.name in listed:
                example = []
            columns.append(Column(column.name, example, column.numeric or numeric, column.text and not numeric))
        return columns

    def rows(self, names: Sequence[str], label: str) -> Iterator[tuple[Rows, float]]:
        """Yield the values of some columns, a few thousand rows at a time, and the share of the file that is read."""
        paths = [self.path_of(name, label) for name in names]
        plain = [
            leaf for leaf in self.leaves() if not leaf.lists and (_is_text(leaf.type) or types.is_integer(leaf.type))
        ]
        id_column = id_name(leaf.name for leaf in plain)
        needed = list(paths)
        if id_column is not None:
            needed.append(self.path_of(id_column, label))
        numeric = {leaf.name for leaf in self.leaves() if _is_number(leaf.type) and not leaf.lists}
        rows_at_once = _NUMBERS_AT_ONCE if numeric.issuperset(names) else _OBJECTS_AT_ONCE
        start = 0
        for batch, share in self.batches(needed, rows_at_once):
            for offset in range(0, batch.num_rows, rows_at_once):
                rows = batch.slice(offset, rows_at_once)
                rows.validate(full=True)
                columns = [_values_at(rows, path) for path in paths]
                ids = pyarrow.nulls(rows.num_rows)
                if id_column is not None:
                    ids, _ = _array_at(rows, needed[-1])
                yield Rows(columns, partial(_place, ids, start), partial(_ids, ids)), share
                start += rows.num_rows

    def path_of(self, name: str, label: str) -> CellPath:
        """Return the path of a column, or of an item of a list (`prompt.0.content`). Raises ManifestError."""
        for spelling in (name, dotted(name)):
            path = _path_below(pyarrow.struct(list(self.schema)), spelling, in_list=False)
            if path is not None:
                if len(self.schema.get_all_field_indices(path.steps[0])) > 1:
                    message = f"{label} has several columns {shortened(path.steps[0])}"
                    raise ManifestError(message, "Rename them, so that each has its own name.")
                return path
        raise ManifestError(f"{label} has no column {shortened(name)}", "Name another column.")

    def noted_units(self, label: str) -> dict[str, Unit]:
        """Return column → its unit: seconds for spans of time, and what `lengths_table` noted."""
        units: dict[str, Unit] = {leaf.name: "s" for leaf in self.leaves() if _is_span(leaf.type)}
        if not self.is_scan:
            return units
        try:
            note = msgspec.json.decode(self.schema.metadata[METADATA], type=_Note)
        except (msgspec.MsgspecError, RecursionError) as error:
            message = f"{label}: what its metadata say under 'batchtune' is not as batchtune writes it ({error})"
            raise ManifestError(message, "Scan the data set again, with this batchtune.") from None
        if note.unit is not None:
            units["length"] = note.unit
        if note.target_unit is not None:
            units["target_length"] = note.target_unit
        return units

    @property
    def is_scan(self) -> bool:
        """Whether `batchtune scan` wrote the table."""
        return METADATA in (self.schema.metadata or {})

    def _first_rows(self, names: Sequence[str]) -> list[dict[str, object]]:
        paths = {}
        for name in names[:_MOST_PEEKED_COLUMNS]:
            path = _path_below(pyarrow.struct(list(self.schema)), name, in_list=False)
            if path is not None and len(self.schema.get_all_field_indices(path.steps[0])) == 1:
                paths[name] = path
        for batch, _ in self.batches(list(paths.values()), _PEEKED_ROWS):
            rows = batch.slice(0, _PEEKED_ROWS)
            rows.validate(full=True)
            values = [_values_at(rows, path, exact=True) for path in paths.values()]
            return [dict(zip(paths, row, strict=True)) for row in zip(*values, strict=True)]
        return []


class ParquetTable(Table):
    """A Parquet file, of which only the fields that are asked for are read."""

    def __init__(self, path: str) -> None:
        # Not the whole file at once, which pre-buffering reads.
        self._file = parquet.ParquetFile(
            path, buffer_size=_BUFFER_BYTES, page_checksum_verification=True, pre_buffer=False
        )
        self.schema = self._file.schema_arrow

    def batches(self, paths: Sequence[CellPath], rows_at_once: int) -> Iterator[tuple[pyarrow.RecordBatch, float]]:
        """Yield all rows, with the columns that these paths need, and the share of the file that is read."""
        leaves = self.leaves()
        stored_names = [column.path for column in map(self._file.schema.column, range(len(self._file.schema)))]
        wanted = [tuple(step for step in path.steps if not step.isdecimal()) for path in paths]
        columns = []
        for leaf, stored_name in zip(leaves, stored_names, strict=True):
            if any(fields[: len(leaf.fields)] == leaf.fields[: len(fields)] for fields in wanted):
                columns.append(stored_name)
        first = 0
        for rows in self._file.iter_batches(rows_at_once, columns=columns):
            first += rows.num_rows
            yield rows, first / self._file.metadata.num_rows


class ArrowTable(Table):
    """An Arrow file or stream, mapped into memory: of columns that are not asked for (audio) nothing is read."""

    def __init__(self, path: str) -> None:
        self._mapped = pyarrow.memory_map(path)
        self._is_file = self._mapped.read(6) == b"ARROW1"
        self.schema = self._reader(None).schema

    def batches(self, paths: Sequence[CellPath], rows_at_once: int) -> Iterator[tuple[pyarrow.RecordBatch, float]]:
        """Yield all rows, as they were written, with the columns that these paths need."""
        reader = self._reader(sorted({self.schema.get_field_index(path.steps[0]) for path in paths}))
        if not self._is_file:
            for rows in reader:
                yield rows, self._mapped.tell() / self._mapped.size()
            return
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index), (index + 1) / reader.num_record_batches

    def _reader(self, columns: list[int] | None) -> Any:
        self._mapped.seek(0)
        options = ipc.IpcReadOptions(included_fields=columns)
        if self._is_file:
            return ipc.open_file(self._mapped, options=options)
        return ipc.open_stream(self._mapped, options=options)


def _ids(column: pyarrow.Array) -> list[str | None]:
    return [None if value in (None, "") else str(value) for value in column.to_pylist()]


def _place(column: pyarrow.Array, start: int, index: int) -> Place:
    (name,) = _ids(column.slice(index, 1))
    return Place(None, name or f"row {start + index + 1}")


@contextlib.contextmanager
def explained(label: str, title: str) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into a ManifestError."""
    try:
        yield
    except _ERRORS as error:
        reason = shortened(next(iter(str(error).splitlines()), type(error).__name__), 160)
        hint = f"Check that it is a whole {title} file; make or fetch it again."
        if isinstance(error, (pyarrow.ArrowNotImplementedError, pyarrow.ArrowKeyError)):
            hint = "Try a newer pyarrow, or write the file again."
        raise ManifestError(f"{label} can't be read as {title}: {reason}", hint) from None


class _Note(msgspec.Struct):
    """What the table of `scan` says of itself."""

    format: Literal["batchtune/lengths"] = _FORMAT
    version: Literal[1] = _VERSION
    unit: Unit | None = None
    target_unit: Unit | None = None


def lengths_table(
    ids: Sequence[str | None], lengths: Values, targets: Values | None, unit: Unit | None
) -> pyarrow.Table:
    """Return lengths, shape (count,), as the table that `batchtune scan` writes and `Table` recognises."""
    columns = {"id": pyarrow.array(ids, pyarrow.string()), "length": pyarrow.array(lengths, pyarrow.float64())}
    if targets is not None:
        columns["target_length"] = pyarrow.array(targets, pyarrow.float64())
    note = msgspec.json.encode(_Note(unit=unit))
    return pyarrow.table(columns).replace_schema_metadata({METADATA: note})


def _leaves_below(kind: pyarrow.DataType, fields: tuple[str, ...], name: str, lists: tuple[str, ...]) -> Iterator[Leaf]:
    """Yield the leaves of a type, in the order in which Parquet stores them."""
    kind = _storage_type(kind)
    if types.is_struct(kind):
        for field in kind:
            full_name = f"{name}.{field.name}" if name else field.name
            yield from _leaves_below(field.type, (*fields, field.name), full_name, lists)
    elif types.is_map(kind):
        for part, child in (("key", kind.key_type), ("value", kind.item_type)):
            for leaf in _leaves_below(child, fields, f"{name}.{part}", (*lists, name)):
                yield Leaf(fields, leaf.name, leaf.type, leaf.lists)
    elif _is_list(kind):
        yield from _leaves_below(kind.value_type, fields, name, (*lists, name))
    else:
        yield Leaf(fields, name, kind, lists)


def _path_below(kind: pyarrow.DataType, name: str, *, in_list: bool) -> CellPath | None:
    """Return the path that a dotted name means below a type, or None; `in_list` below a list without an index."""
    kind = _storage_type(kind)
    if not name:
        return CellPath(())
    if types.is_map(kind):
        kind = pyarrow.list_(pyarrow.struct([("key", kind.key_type), ("value", kind.item_type)]))
    if types.is_struct(kind):
        for field in kind:
            if name == field.name or name.startswith(f"{field.name}."):
                path = _path_below(field.type, name[len(field.name) + 1 :], in_list=in_list)
                if path is not None:
                    return CellPath((field.name, *path.steps), path.counted)
    elif _is_list(kind):
        first, _, rest = name.partition(".")
        path = _path_below(kind.value_type, name, in_list=True)
        if path is not None:
            return path
        if first.isdecimal():
            path = _path_below(kind.value_type, rest, in_list=in_list)
            if path is not None:
                return CellPath((first, *path.steps), path.counted)
        if name == _COUNT and not in_list:
            return CellPath((), counted=True)
    return None


def _array_at(rows: pyarrow.RecordBatch, path: CellPath) -> tuple[pyarrow.Array, tuple[str, ...]]:
    """Return what is at a path, or the first list on it and the steps that are left."""
    array = _decoded(rows.column(rows.schema.get_field_index(path.steps[0])))
    steps = path.steps[1:]
    while steps and types.is_struct(array.type):
        array = _decoded(pc.struct_field(array, [array.type.get_field_index(steps[0])]))
        steps = steps[1:]
    return array, steps


def _values_at(rows: pyarrow.RecordBatch, path: CellPath, *, exact: bool = False) -> Values:
    """Return the values at a path: numbers as floats, an array if there is nothing else; spans of time in seconds.

    A value that can't be a length is Unreadable. `exact` gives a list, with whole numbers as they are.
    """
    array, steps = _array_at(rows, path)
    is_counted = False
    if path.counted and _is_list(array.type) and not steps:
        array = pc.list_value_length(array)
        is_counted = True
    if _is_number(array.type) and not (exact and types.is_integer(array.type)):
        return _floats(array, is_listed=exact)
    if _is_binary(array.type):
        value = Unreadable("binary data")
        return [value if valid else None for valid in array.is_valid().to_pylist()]
    values = array.to_pylist()
    if not (_is_text(array.type) or _is_number(array.type)):
        values = [_json_value(value) for value in values]
    if steps:
        values = [walk(value, steps) for value in values]
    if path.counted and not is_counted:
        values = [len(value) if isinstance(value, list) else None for value in values]
    return cast(list[object], values)


def _floats(array: pyarrow.Array, *, is_listed: bool) -> Values:
    kind = array.type
    if types.is_decimal(kind):
        # Not straight to a float: that is off by one in the last digit, for 3.51 already.
        array = array.cast(pyarrow.string()).cast(pyarrow.float64())
    elif _is_span(kind):
        ticks = array.cast(pyarrow.int64() if kind.bit_width == 64 else pyarrow.int32())
        array = pc.divide(ticks.cast(pyarrow.float64(), safe=False), _TICKS_PER_SECOND[kind.unit])
    else:
        array = array.cast(pyarrow.float64(), safe=False)
    if array.null_count or is_listed:
        return cast(list[object], array.to_pylist())
    return cast(FloatArray, array.to_numpy(zero_copy_only=False))


def _json_value(value: object) -> object:
    """Return a value as JSON has it, a map as a list of its pairs; Unreadable for what can't be a length."""
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, tuple):
        return {"key": _json_value(value[0]), "value": _json_value(value[1])}
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return Unreadable("binary data")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (datetime.date, datetime.time)):
        return Unreadable("a date or time", shortened(value))
    return Unreadable("of a type that can't be a length", type(value).__name__)


def _decoded(array: pyarrow.Array) -> pyarrow.Array:
    """Return an array without extension types, dictionaries, and runs of equal values."""
    while isinstance(array.type, pyarrow.BaseExtensionType):
        array = array.storage
    if types.is_dictionary(array.type):
        return _decoded(array.dictionary_decode())
    if types.is_run_end_encoded(array.type):
        return _decoded(pc.run_end_decode(array))
    return array


def _storage_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return the type that `_decoded` gives."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _storage_type(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _storage_type(kind.value_type)
    return kind


def _is_list(kind: pyarrow.DataType) -> bool:
    is_view = types.is_list_view(kind) or types.is_large_list_view(kind)
    return bool(is_view or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(kind: pyarrow.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_binary(kind: pyarrow.DataType) -> bool:
    is_variable = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(is_variable or types.is_fixed_size_binary(kind))


def _is_span(kind: pyarrow.DataType) -> bool:
    """Whether values are spans of time; a time of day is one since midnight."""
    return bool(types.is_duration(kind) or types.is_time(kind))


def _is_number(kind: pyarrow.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or _is_span(kind))
