"""What the tables have in common: lines → cells, with exact line numbers."""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchtune.errors import ManifestError, listed, shortened
from batchtune.manifests.base import Column, Place, Rows
from batchtune.manifests.columns import PEEKED_ROWS, id_name, summarise
from batchtune.manifests.source import Source
from batchtune.units import counted

_CHUNK = 16_384
_LONGEST_CELL = 2**31 - 1
_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons"}

Cells = list[str]


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose header is read.

    Attributes:
        path: For messages.
        header: The column names; a column may be without one ("").
        records: Line and cells of each row, as many cells as columns.
    """

    path: Path
    header: Cells
    records: Iterator[tuple[int, Cells]]


def delimiter_of(header: str) -> str | None:
    """The character that separates the names of a header line: tab, else comma or semicolon, else None."""
    if "\t" in header:
        return "\t"
    commas, semicolons = header.count(","), header.count(";")
    if commas == semicolons == 0:
        return None
    return "," if commas >= semicolons else ";"


def header_cells(header: str, delimiter: str) -> Cells:
    """The names of a header line, without spaces and quotes around them. Raises csv.Error."""
    return [name.strip() for name in next(csv.reader([header], delimiter=delimiter, skipinitialspace=True))]


def open_table(source: Source, delimiter: str | None = None) -> Table:
    """Reads the header of a table; its rows are read as they are asked for.

    Args:
        source: The file.
        delimiter: What separates the cells, or None to detect it.

    Raises:
        ManifestError: The file is empty, or its header names a column twice.
    """
    lines = source.lines()
    number, first = next(((number, line) for number, line in lines if line.strip()), (0, ""))
    if not first:
        raise ManifestError(f"{source.path} is empty", "A table needs a first line that names its columns.")
    delimiter = delimiter or delimiter_of(first) or ","
    try:
        header = header_cells(first, delimiter)
    except csv.Error as error:
        raise ManifestError(f"{source.path}, line {number}: the header is malformed: {error}") from None
    twice = [name for name, count in Counter(header).items() if count > 1 and name]
    if twice:
        raise ManifestError(
            f"{source.path}, line {number}: the header names {listed(twice)} more than once",
            "Rename or remove one of them.",
        )
    read = _tab_records if delimiter == "\t" else _csv_records
    records = _checked(source.path, read(source.path, lines, number, len(header), delimiter), header, delimiter)
    return Table(source.path, header, records)


def peek_columns(table: Table) -> list[Column]:
    """The named columns of a table, by its first rows."""
    rows = itertools.islice(table.records, PEEKED_ROWS)
    entries: list[Mapping[str, object]] = [
        dict.fromkeys(table.header, None),
        *(dict(zip(table.header, cells, strict=True)) for _, cells in rows),
    ]
    return [column for column in summarise(entries) if column.name]


def read_rows(table: Table, length_key: str, target_key: str | None) -> Iterator[Rows]:
    """All rows of a table, some ten thousand at a time."""
    for key in (length_key, target_key):
        if key is not None and key not in table.header:
            raise ManifestError(
                f"{table.path} has no column {shortened(key)}", "A table's columns hold nothing nested."
            )
    length = table.header.index(length_key)
    target = None if target_key is None else table.header.index(target_key)
    named = id_name(table.header)
    name = None if named is None else table.header.index(named)
    while chunk := list(itertools.islice(table.records, _CHUNK)):
        yield _rows(chunk, length, target, name)


def _rows(chunk: Sequence[tuple[int, Cells]], length: int, target: int | None, name: int | None) -> Rows:
    def place(index: int) -> Place:
        line, cells = chunk[index]
        return Place(line, None if name is None else cells[name].strip())

    def ids() -> list[str | None]:
        return [None if name is None else cells[name].strip() for _, cells in chunk]

    targets = None if target is None else [cells[target] for _, cells in chunk]
    return Rows([cells[length] for _, cells in chunk], targets, place, ids=ids)


def _csv_records(
    path: Path, lines: Iterator[tuple[int, str]], number: int, width: int, delimiter: str
) -> Iterator[tuple[int, Cells]]:
    # Strict: otherwise a quote that is never closed swallows the rows up to the next quote, in silence.
    reader = csv.reader((line for _, line in lines), delimiter=delimiter, strict=True, skipinitialspace=True)
    start = number
    with _long_cells():
        try:
            for cells in reader:
                blank = not cells or (len(cells) == 1 < width and not cells[0].strip())
                if not blank:
                    yield start + 1, cells
                start = number + reader.line_num
        except csv.Error as error:
            raise ManifestError(
                f"{path}, line {start + 1}: the row is malformed: {error}",
                "Quotes within a quoted cell are doubled, and each is closed.",
            ) from None


def _tab_records(
    path: Path, lines: Iterator[tuple[int, str]], number: int, width: int, delimiter: str
) -> Iterator[tuple[int, Cells]]:
    # Tables with tabs are mostly written without any quoting (sentences may hold quotes that are not closed),
    # but pandas quotes cells that hold a tab: quotes join cells only where the cells don't add up.
    for number, line in lines:
        cells = line.split(delimiter)
        if len(cells) != width and '"' in line:
            yield number, _quoted_cells(line, lines, delimiter) or cells
        elif '"' in line:
            yield number, [_unquoted(cell) for cell in cells]
        elif line.strip(" \r"):
            yield number, cells


def _unquoted(cell: str) -> str:
    return cell[1:-1] if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell


def _quoted_cells(line: str, rest: Iterator[tuple[int, str]], delimiter: str) -> Cells | None:
    following = (text for _, text in rest)
    with _long_cells():
        try:
            return next(csv.reader(itertools.chain([line], following), delimiter=delimiter, strict=True))
        except csv.Error:
            return None


@contextlib.contextmanager
def _long_cells() -> Iterator[None]:
    """Lifts the csv module's limit of 131,072 characters: a long document is longer."""
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _checked(
    path: Path, records: Iterator[tuple[int, Cells]], header: Cells, delimiter: str
) -> Iterator[tuple[int, Cells]]:
    width = len(header)
    for line, cells in records:
        if len(cells) != width:
            seen = f"{counted(len(cells), 'cell')}, separated by {_NAMES[delimiter]}"
            raise ManifestError(
                f"{path}, line {line}: {seen}, where the header has {width}",
                "Mend the row; a cell that holds the separator must be quoted.",
            )
        yield line, cells
