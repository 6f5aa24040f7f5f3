"""Tables whose first line names their columns: any CSV and TSV, and SpeechBrain's CSV manifests."""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

from batchtune.errors import ManifestError, listed, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import (
    KNOWN_UNITS,
    PEEKED_ROWS,
    Column,
    Format,
    Place,
    Rows,
    id_name,
    normalised,
    summarise,
)
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import number
from batchtune.units import counted

# So few that they are gone before Python's garbage collector looks at them a second time.
_ROWS_AT_ONCE = 1024
_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons"}

Record = tuple[int, Sequence[object]]  # line and cells


class Table(Format):
    """CSV and TSV; blank lines are passed over."""

    name = "table"
    description = "a table, comma, tab or semicolon separated, whose first line names its columns"
    delimiter: ClassVar[str | None] = None  # the one of the header

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        # Reason → number of lines that are no records, since the last rows.
        self._left_out: Counter[str] = Counter()

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first line can be a header: separated names, none of them a number."""
        if not head.lines or b"\0" in head.data:
            return False
        names = _header_names(head)
        if names is None:
            return _delimiter_of(head.lines[0]) is None and normalised(head.lines[0]) in KNOWN_UNITS
        return not head.data.lstrip().startswith((b"{", b"[")) and all(number(name) is None for name in names)

    def columns(self) -> Sequence[Column]:
        """Return the columns by their names in the header."""
        header, records = self.opened()
        entries = [dict(zip(header, cells, strict=True)) for _, cells in itertools.islice(records, PEEKED_ROWS)]
        self._left_out.clear()
        return [column for column in summarise([dict.fromkeys(header), *entries]) if column.name]

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the rows, a thousand at a time."""
        header, records = self.opened()
        if missing := [key for key in keys if key not in header]:
            message = f"{self.source.path} has no column {shortened(missing[0])}"
            raise ManifestError(message, "A table's columns hold nothing nested.")
        name = id_name(header)
        identity = None if name is None else header.index(name)
        while (chunk := list(itertools.islice(records, _ROWS_AT_ONCE))) or self._left_out:
            columns = [[cells[index] for _, cells in chunk] for index in map(header.index, keys)]
            yield Rows(columns, partial(_place, chunk, identity), partial(_ids, chunk, identity), dict(self._left_out))
            self._left_out.clear()

    def opened(self) -> tuple[list[str], Iterator[Record]]:
        """Return the names in the header, "" for a column without one, and as many cells of each row."""
        lines = self.source.lines()
        first_line, first = next(((at, line) for at, line in lines if line.strip()), (0, ""))
        if not first:
            raise ManifestError(f"{self.source.path} is empty", "A table needs a first line that names its columns.")
        delimiter = self.delimiter or _delimiter_of(first) or ","
        place = f"{self.source.path}, line {first_line}"
        try:
            header = _header_cells(first, delimiter)
        except csv.Error as error:
            raise ManifestError(f"{place}: the header is malformed: {error}") from None
        if twice := [name for name, count in Counter(header).items() if count > 1 and name]:
            message = f"{place}: the header names {listed(twice)} more than once"
            raise ManifestError(message, "Rename or remove one of them.")
        return header, _records(self.source, lines, first_line, len(header), delimiter)


class SpeechBrainCsv(Table):
    """SpeechBrain's CSV, as its `DynamicItemDataset.from_csv` reads it: two rows with one id are an error."""

    name = "speechbrain-csv"
    description = "a comma separated table with a column 'ID'"
    units: ClassVar[Mapping[str, Unit]] = {"length": "s", "len": "s"}
    unique_ids = True
    delimiter = ","

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first line is a header with commas and an `ID`."""
        return bool(head.lines) and _delimiter_of(head.lines[0]) == "," and "ID" in (_header_names(head) or ())

    def opened(self) -> tuple[list[str], Iterator[Record]]:
        """Return the names in the header, which must hold `ID`, and the cells of each row."""
        header, records = super().opened()
        if "ID" not in header:
            message = f"{self.source.path} has no column 'ID', which SpeechBrain needs, but {', '.join(header)}"
            raise ManifestError(message, "Read it as any other table with --format table.")
        return header, records


def _place(chunk: Sequence[Record], identity: int | None, index: int) -> Place:
    return Place(chunk[index][0], _ids(chunk[index : index + 1], identity)[0])


def _ids(chunk: Sequence[Record], identity: int | None) -> list[str | None]:
    return [None if identity is None else str(cells[identity]).strip() for _, cells in chunk]


def _delimiter_of(header: str) -> str | None:
    """Return the character between the names of a header line: tab, else comma or semicolon, else None."""
    if "\t" in header:
        return "\t"
    commas = header.count(",")
    semicolons = header.count(";")
    if commas == semicolons == 0:
        return None
    return "," if commas >= semicolons else ";"


def _header_cells(header: str, delimiter: str) -> list[str]:
    """Return the names of a header line, without spaces and quotes around them. Raises csv.Error."""
    return [name.strip() for name in next(csv.reader([header], delimiter=delimiter, skipinitialspace=True))]


def _header_names(head: Head) -> list[str] | None:
    """Return the names of the first line; None if it is not a header of several columns."""
    if (delimiter := _delimiter_of(head.lines[0])) is not None:
        with contextlib.suppress(csv.Error):
            return _header_cells(head.lines[0], delimiter)
    return None


def _records(
    source: Source, lines: Iterator[tuple[int, str]], header_line: int, width: int, delimiter: str
) -> Iterator[Record]:
    records = _csv_records(source, lines, header_line, width, delimiter)
    if delimiter == "\t":
        records = _tab_records(lines, width)
    before = csv.field_size_limit(2**31 - 1)  # a long document is longer than the module's 131,072 characters
    try:
        for line, cells in records:
            if len(cells) != width:
                seen = f"{counted(len(cells), 'cell')}, separated by {_NAMES[delimiter]}, where the header has {width}"
                hint = "Fix the row; a cell that holds the separator must be quoted."
                raise ManifestError(f"{source.path}, line {line}: {seen}", hint)
            yield line, cells
    finally:
        csv.field_size_limit(before)


def _csv_records(
    source: Source, lines: Iterator[tuple[int, str]], header_line: int, width: int, delimiter: str
) -> Iterator[Record]:
    # Strict: otherwise a quote that is never closed swallows the rows up to the next quote, in silence.
    reader = csv.reader((line for _, line in lines), delimiter=delimiter, strict=True, skipinitialspace=True)
    start = header_line
    try:
        for cells in reader:
            blank = not cells or (len(cells) == 1 < width and not cells[0].strip())
            if not blank:
                yield start + 1, cells
            start = header_line + reader.line_num
    except csv.Error as error:
        hint = "Quotes within a quoted cell are doubled, and each is closed."
        raise ManifestError(f"{source.path}, line {start + 1}: the row is malformed: {error}", hint) from None


def _tab_records(lines: Iterator[tuple[int, str]], width: int) -> Iterator[Record]:
    # Tables with tabs are mostly written without any quoting (sentences may hold quotes that are not closed),
    # but pandas quotes cells that hold a tab: quotes join cells only if the cells don't add up.
    for at, line in lines:
        cells = line.split("\t")
        if '"' not in line:
            if line.strip(" \r"):
                yield at, cells
            continue
        if len(cells) == width:
            cells = [cell[1:-1] if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell for cell in cells]
        else:
            following = (text for _, text in lines)
            with contextlib.suppress(csv.Error):
                cells = next(csv.reader(itertools.chain([line], following), delimiter="\t", strict=True))
        yield at, cells
