"""What the columnar formats share: from batches to rows, what is known of the columns, and what a scan notes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

import msgspec

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.columnar_schema import Key, find_key, id_key, listed_keys
from batchtune.manifests.columnar_values import (
    ROWS_AT_ONCE,
    Budget,
    Values,
    as_listed,
    cut,
    handed_on,
    is_binary,
    is_span,
)
from batchtune.manifests.columns import PEEKED_ROWS, summarise
from batchtune.manifests.rows import Column, Place, Rows
from batchtune.manifests.source import Source

if TYPE_CHECKING:
    import pyarrow

_MEMO = "columnar"
_METADATA = b"batchtune"
_FORMAT: Literal["batchtune/lengths"] = "batchtune/lengths"
_VERSION: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a columnar file.

    Attributes:
        first: Number of the first of them, from 0.
        batch: Fully validated.
        share: How much of the file is read with them, from 0 to 1.
    """

    first: int
    batch: pyarrow.RecordBatch
    share: float


class Table(Protocol):
    """An open columnar file."""

    @property
    def schema(self) -> pyarrow.Schema:
        """Its columns."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def batches(self, keys: Sequence[Key], *, from_row: int = 0, at_once: int = ROWS_AT_ONCE) -> Iterator[Part]:
        """Its rows, with little more of its columns than the keys need.

        Args:
            keys: What is read, at least one.
            from_row: What comes before is not needed, from 0.
            at_once: That many rows are enough, where there is a choice.
        """


class Columnar:
    """The part of a columnar format that is the same for all; see `rows.Format` and `rows.TellsUnit`.

    Attributes:
        title: As the format calls itself, for messages.
    """

    name: str
    description: str
    title: str
    units: Mapping[str, Unit] = {
        **dict.fromkeys(("input_ids_count", "token_ids_count", "tokens_count", "labels_count"), "tokens"),
        "input_values_count": "samples",
    }
    named_columns = True

    def opened(self, source: Source) -> AbstractContextManager[Table]:
        """The file. Raises ManifestError where it is of another format or damaged."""
        raise NotImplementedError

    def columns(self, source: Source) -> Sequence[Column]:
        """All columns, those within others under dotted names, and the numbers of items of all lists."""
        return self._seen(source).columns

    def unit_in(self, source: Source, column: str) -> Unit | None:
        """What a column counts: by what `batchtune scan` noted, and for spans of time, which are read in seconds."""
        return self._seen(source).units.get(column)

    def default_target(self, source: Source) -> str | None:
        """Whoever scanned a data set with targets wants them: `target_length` of what `batchtune scan` wrote."""
        with self.opened(source) as table:
            ours = _METADATA in (table.schema.metadata or {})
            return "target_length" if ours and "target_length" in table.schema.names else None

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """One `Rows` for some ten thousand rows, or fewer where they are large."""
        with self.opened(source) as table:
            asked = [length_key] if target_key is None else [length_key, target_key]
            keys = [find_key(source.path, table.schema, key) for key in asked]
            budget = Budget(source.path, table.size)
            with contextlib.closing(_Names(source.path, table, self.title)) as names:
                for part in table.batches(keys):
                    budget.spend(part.batch.num_rows)
                    for start in range(0, part.batch.num_rows, ROWS_AT_ONCE):
                        batch = part.batch.slice(start, ROWS_AT_ONCE)
                        yield from _rows(batch, part.first + start, keys, names, budget)
                    source.report(part.share)

    def _seen(self, source: Source) -> _Seen:
        if _MEMO not in source.memo:
            with self.opened(source) as table:
                source.memo[_MEMO] = _Seen(_columns(source, table), _units(source.path, table.schema))
        return cast(_Seen, source.memo[_MEMO])


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of a file without reading all of it."""

    columns: Sequence[Column]
    units: Mapping[str, Unit]


def _rows(batch: pyarrow.RecordBatch, first: int, keys: Sequence[Key], names: _Names, budget: Budget) -> Iterator[Rows]:
    arrays = [key.values(batch, budget) for key in keys]
    for rows in cut(arrays, budget):
        count = rows.stop - rows.start
        found = [handed_on(array.slice(rows.start, count)) for array in arrays]
        at = first + rows.start
        targets = found[1] if len(found) == 2 else None
        yield Rows(found[0], targets, partial(names.place, at, count), ids=partial(names.of, at, count))


class _Names:
    """The ids of the rows, read when first asked for, in a pass of their own over the file."""

    def __init__(self, path: Path, table: Table, title: str) -> None:
        self._table = table
        self._explained = partial(explained, path, title)
        self._budget = Budget(path, table.size)
        self._key = id_key(table.schema)
        self._parts: Iterator[Part] = iter(())
        self._part: Part | None = None
        self._known: tuple[int, int, list[str | None]] = (0, 0, [])

    def place(self, first: int, count: int, index: int) -> Place:
        """Where a row stands, counted from `first`: by its id, or by its number, from 1, where it has none."""
        name = None
        with contextlib.suppress(ManifestError):  # a message is being made of something else
            name = self.of(first, count)[index]
        return Place(None, name or f"row {first + index + 1}")

    def of(self, first: int, count: int) -> list[str | None]:
        """The ids of `count` rows from `first`. Raises ManifestError where they can't be read."""
        if self._known[:2] != (first, count):
            with self._explained():
                self._known = (first, count, self._read(first, count))
        return self._known[2]

    def close(self) -> None:
        """The file is closed: what is not known now has no name any more."""
        self._key = None

    def _read(self, first: int, count: int) -> list[str | None]:
        key = self._key
        if key is None:
            return [None] * count
        found: list[str | None] = []
        while len(found) < count:
            row = first + len(found)
            part = self._at(key, row)
            if part is None:  # a damaged file, which has another number of them than of lengths
                return found + [None] * (count - len(found))
            array = key.values(part.batch.slice(row - part.first, count - len(found)), self._budget)
            found += [None if value in (None, "") else str(value) for value in array.to_pylist()]
        return found

    def _at(self, key: Key, row: int) -> Part | None:
        """The part in which a row is."""
        if self._part is None or row < self._part.first:
            self._parts = self._table.batches([key], from_row=row)
            self._part = next(self._parts, None)
        while self._part is not None and row >= self._part.first + self._part.batch.num_rows:
            self._part = next(self._parts, None)
        return self._part


def noted_units(path: Path, schema: pyarrow.Schema) -> dict[str, Unit]:
    """Column → what it counts, by what `lengths_table` noted in a schema; nothing where another wrote it.

    Raises:
        ManifestError: The note is damaged or of a newer version.
    """
    noted = (schema.metadata or {}).get(_METADATA)
    if noted is None:
        return {}
    try:
        known = msgspec.json.decode(noted, type=_Version)
        if known.format == _FORMAT and known.version > _VERSION:
            raise ManifestError(
                f"{path} is of version {known.version} of batchtune's lengths; this batchtune knows {_VERSION}",
                "Use a newer batchtune, or scan the data set again.",
            )
        note = msgspec.json.decode(noted, type=_Note)
    except (msgspec.MsgspecError, RecursionError) as error:
        message = f"{path}: what its metadata say under 'batchtune' is not as batchtune writes it ({error})"
        raise ManifestError(message, "Scan the data set again.") from None
    units = {"length": note.unit, "target_length": note.target_unit}
    return {column: unit for column, unit in units.items() if unit is not None}


def lengths_table(
    ids: Sequence[str | None],
    lengths: Values,
    targets: Values | None,
    sources: Sequence[str | None] | None,
    unit: Unit | None,
    target_unit: Unit | None = None,
) -> pyarrow.Table:
    """Lengths as the table that `batchtune scan` writes and `noted_units` knows again.

    Args:
        ids: Shape (count,), of the examples.
        lengths: Shape (count,), numbers; None where one is not known.
        targets: Shape (count,), likewise, or None: then there is no column `target_length`.
        sources: Shape (count,), the file in which each was found, or None: then there is no column `source`.
        unit: What the lengths count, or None where nothing says it.
        target_unit: What the targets count.
    """
    import pyarrow

    columns = {"id": pyarrow.array(ids, pyarrow.string()), "length": pyarrow.array(lengths, pyarrow.float64())}
    if targets is not None:
        columns["target_length"] = pyarrow.array(targets, pyarrow.float64())
    if sources is not None:
        columns["source"] = pyarrow.array(sources, pyarrow.string())
    note = msgspec.json.encode(_Note(unit=unit, target_unit=target_unit))
    return pyarrow.table(columns).replace_schema_metadata({_METADATA: note})


@contextlib.contextmanager
def explained(path: Path, title: str) -> Iterator[None]:
    """What pyarrow raises for a damaged file becomes a ManifestError.

    Args:
        path: For the message.
        title: The format, for the message.
    """
    import pyarrow

    anew = f"Check that it is a whole {title} file; make or fetch it anew."
    try:
        yield
    except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowKeyError) as error:
        message = f"{path} holds something that the installed pyarrow can't read: {_said(error)}"
        raise ManifestError(message, "Try a newer pyarrow, or write the file anew.") from None
    except (pyarrow.ArrowMemoryError, MemoryError) as error:
        message = (
            f"{path} asks for more memory than there is ({_said(error)}): it is damaged or its parts are too large"
        )
        raise ManifestError(message, anew) from None
    except OSError as error:
        if error.errno is not None:  # the file's own, not pyarrow's
            raise
        raise ManifestError(f"{path} can't be read as {title}: {_said(error)}", anew) from None
    except (pyarrow.ArrowException, OverflowError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} can't be read as {title}: {_said(error)}", anew) from None


class _Version(msgspec.Struct):
    format: str
    version: int


class _Note(msgspec.Struct):
    format: Literal["batchtune/lengths"] = _FORMAT
    version: Literal[1] = _VERSION
    unit: Unit | None = None
    target_unit: Unit | None = None


def _said(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return shortened(first, 160)


def _units(path: Path, schema: pyarrow.Schema) -> dict[str, Unit]:
    spans = [key.name for key in listed_keys(schema) if not key.counted and is_span(key.leaf.type)]
    return {**dict.fromkeys(spans, "s"), **noted_units(path, schema)}


def _columns(source: Source, table: Table) -> list[Column]:
    listed = listed_keys(table.schema)
    read = [key for key in listed if not is_binary(key.leaf.type) and not key.leaf.unclear]
    values = _first_values(source, table, read)
    nothing: dict[str, object] = dict.fromkeys(key.name for key in listed)
    rows = (dict(zip(values, row, strict=True)) for row in itertools.zip_longest(*values.values()))
    return [_as_typed(column, key) for column, key in zip(summarise([nothing, *rows]), listed, strict=True)]


def _as_typed(column: Column, key: Key) -> Column:
    """A column of which its type says more than its first values do."""
    example = [] if column.example is None and key.leaf.listed and not key.counted else column.example
    return Column(column.name, example, column.numeric or key.numeric, column.text and not key.numeric)


def _first_values(source: Source, table: Table, keys: Sequence[Key]) -> dict[str, list[object]]:
    """Column → its values in the first rows, fewer where they are large; not of those that can't be read."""
    try:
        with explained(source.path, "table"):
            return _read_first(source, table, keys)
    except ManifestError:
        if len(keys) == 1:
            return {}
    return {name: values for key in keys for name, values in _first_values(source, table, [key]).items()}


def _read_first(source: Source, table: Table, keys: Sequence[Key]) -> dict[str, list[object]]:
    budget = Budget(source.path, table.size)
    parts = table.batches(keys, at_once=PEEKED_ROWS) if keys else iter(())
    batch = next((part.batch for part in parts if part.batch.num_rows), None)
    if batch is None:
        return {}
    batch = batch.slice(0, PEEKED_ROWS)
    arrays = [key.values(batch, budget) for key in keys]
    count = next(rows.stop for rows in cut(arrays, budget))
    return {key.name: _shown(key, array.slice(0, count)) for key, array in zip(keys, arrays, strict=True)}


def _shown(key: Key, array: pyarrow.Array) -> list[object]:
    from pyarrow import types

    values = as_listed(handed_on(array))
    if key.counted or types.is_integer(key.leaf.type):
        return [int(value) if isinstance(value, float) else value for value in values]
    return values
