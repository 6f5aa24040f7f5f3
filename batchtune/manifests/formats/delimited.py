"""Tables whose first line names their columns: any CSV and TSV, and SpeechBrain's CSV manifests."""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from batchtune.errors import ManifestError, listed, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.columns import KNOWN_UNITS, PEEKED_ROWS, id_name, normalised, summarise
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import number
from batchtune.units import counted

_ROWS_AT_ONCE = 16_384
_LONGEST_CELL = 2**31 - 1
_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons"}

Cells = list[str]


class Table(Format):
    """CSV and TSV; blank lines are passed over."""

    name = "table"
    description = "a table, comma, tab or semicolon separated, whose first line names its columns"

    def fits(self, head: Head) -> bool:
        """Whether the first line can be a header: separated names, none of them a number."""
        if not head.lines or b"\0" in head.data:
            return False
        names = _header_names(head)
        if names is None:
            return _delimiter_of(head.lines[0]) is None and normalised(head.lines[0]) in KNOWN_UNITS
        return not head.data.lstrip().startswith((b"{", b"[")) and all(number(name) is None for name in names)

    def columns(self, source: Source) -> Sequence[Column]:
        """The names in the header."""
        table = self.opened(source)
        entries: list[Mapping[str, object]] = [dict.fromkeys(table.header)]
        for _, cells in itertools.islice(table.records, PEEKED_ROWS):
            entries.append(dict(zip(table.header, cells, strict=True)))
        return [column for column in summarise(entries) if column.name]

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The rows, some ten thousand at a time."""
        table = self.opened(source)
        for key in (length_key, target_key):
            if key is not None and key not in table.header:
                raise ManifestError(
                    f"{source.path} has no column {shortened(key)}", "A table's columns hold nothing nested."
                )
        length, target, name = (
            None if key is None else table.header.index(key) for key in (length_key, target_key, id_name(table.header))
        )
        assert length is not None
        while chunk := list(itertools.islice(table.records, _ROWS_AT_ONCE)):
            targets = None if target is None else [cells[target] for _, cells in chunk]
            yield Rows([cells[length] for _, cells in chunk], targets, partial(_place, chunk, name))

    def opened(self, source: Source) -> _Opened:
        """The table, its header read. Raises ManifestError if it is empty or names a column twice."""
        return _opened(source, None)


class SpeechBrainCsv(Table):
    """SpeechBrain's CSV, as its `DynamicItemDataset.from_csv` reads it, with the older column sets too.

    It refuses two rows with one id, and so does batchtune.
    """

    name = "speechbrain-csv"
    description = "a comma separated table with a column 'ID'"
    units: ClassVar[Mapping[str, Unit]] = {"length": "s", "len": "s"}
    unique_ids = True

    def fits(self, head: Head) -> bool:
        """Whether the first line is a header with commas and an `ID`."""
        return bool(head.lines) and _delimiter_of(head.lines[0]) == "," and "ID" in (_header_names(head) or ())

    def opened(self, source: Source) -> _Opened:
        """The table. Raises ManifestError if it has no column `ID`, too."""
        table = _opened(source, ",")
        if "ID" not in table.header:
            raise ManifestError(
                f"{source.path} has no column 'ID', which SpeechBrain needs, but {', '.join(table.header)}",
                "Read it as any other table with --format table.",
            )
        return table


@dataclass(frozen=True, slots=True)
class _Opened:
    """A table whose header is read: the names, "" for a column without one, then line and as many cells of each row."""

    header: Cells
    records: Iterator[tuple[int, Cells]]


def _place(chunk: Sequence[tuple[int, Cells]], name: int | None, index: int) -> Place:
    line, cells = chunk[index]
    return Place(line, None if name is None else cells[name].strip())


def _delimiter_of(header: str) -> str | None:
    """The character that separates the names of a header line: tab, else comma or semicolon, else None."""
    if "\t" in header:
        return "\t"
    commas, semicolons = header.count(","), header.count(";")
    if commas == semicolons == 0:
        return None
    return "," if commas >= semicolons else ";"


def _header_cells(header: str, delimiter: str) -> Cells:
    """The names of a header line, without spaces and quotes around them. Raises csv.Error."""
    return [name.strip() for name in next(csv.reader([header], delimiter=delimiter, skipinitialspace=True))]


def _header_names(head: Head) -> Cells | None:
    """The names of the first line, None if it is no header of several columns."""
    delimiter = _delimiter_of(head.lines[0])
    if delimiter is None:
        return None
    with contextlib.suppress(csv.Error):
        return _header_cells(head.lines[0], delimiter)
    return None


def _opened(source: Source, delimiter: str | None) -> _Opened:
    """Reads the header of a table, with a delimiter or (None) the detected one; its rows are read as they are taken."""
    lines = source.lines()
    first_line, first = next(((at, line) for at, line in lines if line.strip()), (0, ""))
    if not first:
        raise ManifestError(f"{source.path} is empty", "A table needs a first line that names its columns.")
    delimiter = delimiter or _delimiter_of(first) or ","
    try:
        header = _header_cells(first, delimiter)
    except csv.Error as error:
        raise ManifestError(f"{source.path}, line {first_line}: the header is malformed: {error}") from None
    twice = [name for name, count in Counter(header).items() if count > 1 and name]
    if twice:
        raise ManifestError(
            f"{source.path}, line {first_line}: the header names {listed(twice)} more than once",
            "Rename or remove one of them.",
        )
    if delimiter == "\t":
        return _Opened(header, _checked(source, _tab_records(lines, len(header)), header, delimiter))
    return _Opened(
        header, _checked(source, _csv_records(source, lines, first_line, len(header), delimiter), header, delimiter)
    )


def _csv_records(
    source: Source, lines: Iterator[tuple[int, str]], header_line: int, width: int, delimiter: str
) -> Iterator[tuple[int, Cells]]:
    # Strict: otherwise a quote that is never closed swallows the rows up to the next quote, in silence.
    reader = csv.reader((line for _, line in lines), delimiter=delimiter, strict=True, skipinitialspace=True)
    start = header_line
    with _long_cells():
        try:
            for cells in reader:
                blank = not cells or (len(cells) == 1 < width and not cells[0].strip())
                if not blank:
                    yield start + 1, cells
                start = header_line + reader.line_num
        except csv.Error as error:
            raise ManifestError(
                f"{source.path}, line {start + 1}: the row is malformed: {error}",
                "Quotes within a quoted cell are doubled, and each is closed.",
            ) from None


def _tab_records(lines: Iterator[tuple[int, str]], width: int) -> Iterator[tuple[int, Cells]]:
    # Tables with tabs are mostly written without any quoting (sentences may hold quotes that are not closed),
    # but pandas quotes cells that hold a tab: quotes join cells only if the cells don't add up.
    for at, line in lines:
        cells = line.split("\t")
        if '"' not in line:
            if line.strip(" \r"):
                yield at, cells
        elif len(cells) == width:
            yield at, [cell[1:-1] if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell for cell in cells]
        else:
            yield at, _quoted_cells(line, lines) or cells


def _quoted_cells(line: str, rest: Iterator[tuple[int, str]]) -> Cells | None:
    following = (text for _, text in rest)
    with _long_cells(), contextlib.suppress(csv.Error):
        return next(csv.reader(itertools.chain([line], following), delimiter="\t", strict=True))
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
    source: Source, records: Iterator[tuple[int, Cells]], header: Cells, delimiter: str
) -> Iterator[tuple[int, Cells]]:
    for line, cells in records:
        if len(cells) != len(header):
            seen = f"{counted(len(cells), 'cell')}, separated by {_NAMES[delimiter]}"
            raise ManifestError(
                f"{source.path}, line {line}: {seen}, where the header has {len(header)}",
                "Fix the row; a cell that holds the separator must be quoted.",
            )
        yield line, cells


TABLE = Table()
SPEECHBRAIN_CSV = SpeechBrainCsv()
