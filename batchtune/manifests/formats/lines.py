"""Text with an example on every line: tables (CSV, TSV), Kaldi's, ESPnet's and fairseq's lists, numbers, plain text."""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import ClassVar

from batchtune.errors import ManifestError, listed, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import (
    ID_NAMES,
    KNOWN_UNITS,
    PEEKED_ROWS,
    Column,
    Format,
    Rows,
    Unreadable,
    columns_of,
    id_name,
    normalised,
    number,
)
from batchtune.manifests.source import Head, Source
from batchtune.units import counted

# So few that they are gone before Python's garbage collector looks at them a second time.
_ROWS_AT_ONCE = 1024
_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
# Of a column in a first line between bars, which then is a header; LJSpeech's and VITS's tables have none.
_HEADINGS = {
    *KNOWN_UNITS,
    *ID_NAMES,
    *("text", "transcript", "transcription", "sentence", "audio_file", "speaker"),
}
_SHAPE = re.compile(r"\d+(?:,\d+)+", re.ASCII)

# Only a file's name says what it counts: part of the name → column.
_KALDI_COLUMNS = {
    "utt2dur": "duration",
    "reco2dur": "duration",
    "segments": "duration",
    "utt2num_frames": "num_frames",
    "utt2num_samples": "num_samples",
    "text_shape": "num_tokens",
    "speech_shape": "num_frames",
    "feats_shape": "num_frames",
}

NumberedCells = tuple[int, Sequence[object]]  # line and cells


class _Lines(Format):
    """The part of a format of records, a line or more each, that is the same for all."""

    @abstractmethod
    def opened(self) -> tuple[list[str], Iterator[NumberedCells]]:
        """Return the names of the columns, "" for one without a name, and as many cells of each record."""

    def columns(self) -> Sequence[Column]:
        """Return the columns by their names."""
        header, records = self.opened()
        rows = [
            dict(zip(header, cells, strict=True))
            for _, cells in itertools.islice(records, PEEKED_ROWS)
        ]
        return [
            column
            for column in columns_of([dict.fromkeys(header), *rows])
            if column.name
        ]

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the rows, a thousand at a time."""
        header, records = self.opened()
        for key in keys:
            if key not in header:
                message = f"{self.source.path} has no column {shortened(key)}"
                raise ManifestError(message, f"Its columns: {listed(header)}.")
        name = id_name(header)
        while chunk := list(itertools.islice(records, _ROWS_AT_ONCE)):
            lines, cells = zip(*chunk, strict=True)
            columns = dict(zip(header, zip(*cells, strict=True), strict=True))
            ids = columns[name] if name is not None else [None] * len(lines)
            yield Rows(
                [columns[key] for key in keys],
                partial(_stripped, ids),
                partial(_line, lines),
            )


def _line(lines: Sequence[int], index: int) -> str:
    return f"line {lines[index]}"


def _stripped(ids: Sequence[object]) -> list[str | None]:
    return [None if name is None else str(name).strip() for name in ids]


class TableLines(_Lines):
    """CSV and TSV; blank lines are passed over. Between tabs and bars, quotes are text, as in Common Voice's tables.

    The columns of a table between bars without a header are called 1, 2, …
    """

    name = "table"
    description = "a table, comma, tab, bar or semicolon separated, whose first line names its columns"

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first line can be a header: separated names, none a number; or cells between bars."""
        if (
            not head.lines
            or b"\0" in head.data
            or head.data.lstrip().startswith((b"{", b"["))
        ):
            return False
        names = _header_names(head.lines[0])
        if len(names) == 1:
            return normalised(names[0]) in KNOWN_UNITS
        return _delimiter_of(head.lines[0]) == "|" or all(
            number(name) is None for name in names
        )

    def opened(self) -> tuple[list[str], Iterator[NumberedCells]]:
        """Return the names in the header, and the cells of each row."""
        lines = self.source.lines()
        first_line, first = next(
            ((line, text) for line, text in lines if text.strip()), (0, "")
        )
        header = _header_names(first)
        delimiter = _delimiter_of(first)
        if delimiter == "|" and _HEADINGS.isdisjoint(map(normalised, header)):
            header = [str(number) for number in range(1, len(header) + 1)]
            lines = itertools.chain([(first_line, first)], lines)
            first_line -= 1
        if not header or len(set(header)) < len(header) - header.count(""):
            seen = "the header is malformed, or names a column twice"
            raise ManifestError(
                f"{self.source.path}, line {first_line}: {seen}",
                "Each column needs a name of its own.",
            )
        return header, self._records(lines, first_line, len(header), delimiter)

    def _records(
        self,
        lines: Iterator[tuple[int, str]],
        header_line: int,
        width: int,
        delimiter: str,
    ) -> Iterator[NumberedCells]:
        # A long document is longer than the module's 131,072 characters.
        csv.field_size_limit(2**31 - 1)
        texts = (text for _, text in lines)
        if delimiter in "\t|":
            reader = csv.reader(texts, delimiter=delimiter, quoting=csv.QUOTE_NONE)
        else:
            # Strict: otherwise a quote that is never closed swallows the rows up to the next quote, in silence.
            reader = csv.reader(
                texts, delimiter=delimiter, strict=True, skipinitialspace=True
            )
        line = header_line + 1
        try:
            for cells in reader:
                if len(cells) == width:
                    yield line, cells
                elif any(cell.strip() for cell in cells):
                    cells_seen = f"{counted(len(cells), 'cell')}, separated by {_NAMES[delimiter]}"
                    seen = f"{cells_seen}, not {width} as in the header"
                    hint = "Fix the row; between commas, a cell that holds the separator must be quoted."
                    raise ManifestError(
                        f"{self.source.path}, line {line}: {seen}", hint
                    )
                line = header_line + reader.line_num + 1
        except csv.Error as error:
            hint = "Quotes within a quoted cell are doubled, and each is closed."
            raise ManifestError(
                f"{self.source.path}, line {line}: the row is malformed: {error}", hint
            ) from None


class SpeechBrainCsv(TableLines):
    """SpeechBrain's CSV, as its `DynamicItemDataset.from_csv` reads it: two rows with one id are an error."""

    name = "speechbrain-csv"
    description = "a comma separated table with a column 'ID'"
    units: ClassVar[Mapping[str, Unit]] = {"length": "s", "len": "s"}
    unique_ids = True

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first line is a header with commas and an `ID`."""
        return (
            bool(head.lines)
            and _delimiter_of(head.lines[0]) == ","
            and "ID" in _header_names(head.lines[0])
        )


def _delimiter_of(header: str) -> str:
    """Return the character between the names of a header line: tab, else bar, else comma or semicolon, the commoner."""
    for delimiter in "\t|":
        if delimiter in header:
            return delimiter
    return max(",;", key=header.count)


def _header_names(header: str) -> list[str]:
    """Return the names of a header line, without spaces and quotes around them; none if it is malformed."""
    with contextlib.suppress(csv.Error):
        reader = csv.reader(
            [header], delimiter=_delimiter_of(header), skipinitialspace=True
        )
        return [name.strip() for name in next(reader)]
    return []


class _List(_Lines):
    """A list without a header, a record on every line: an id, if the format has ids, and one value."""

    names_columns = False
    hint: ClassVar[str]
    id_column: ClassVar[str | None] = "id"  # None without ids
    value_column: str = "length"
    first_line: ClassVar[int] = 1  # of the first record
    # Between the words of a line; None for white space.
    separator: ClassVar[str | None] = None

    def opened(self) -> tuple[list[str], Iterator[NumberedCells]]:
        """Return the names of the columns, and their values on each line."""
        return [
            name for name in (self.id_column, self.value_column) if name is not None
        ], self.records()

    def records(self) -> Iterator[NumberedCells]:
        """Yield all records. Raises ManifestError for other content."""
        for line, text in itertools.islice(
            self.source.lines(), self.first_line - 1, None
        ):
            if not text.strip():
                continue
            cells = self.cells(text.split(self.separator))
            if cells is None:
                place = f"{self.source.path}, line {line}"
                raise ManifestError(
                    f"{place} has another format: {shortened(text)}", self.hint
                )
            yield line, cells

    def cells(self, words: Sequence[str]) -> Sequence[object] | None:
        """Return the id and the value of a line; None for a line of another shape."""
        if len(words) == 2:
            return words
        return None


class Kaldi(_List):
    """`utt2dur`, `reco2dur` (s), `utt2num_frames` (frames), ESPnet's `utt2num_samples`, `speech_shape`, `text_shape`.

    Of a shape, `1407,80` (frames, features), the first dimension is the length. In `segments` (id, recording, start,
    end), the end may be -1: that of the recording, in the `reco2dur` beside it. Ids that the `text` or
    `segments` beside the file lack are invalid, since training does not see them.
    """

    name = "kaldi"
    description = "an id and a number, or a shape such as 1407,80, on every line, as in utt2dur and speech_shape"
    unique_ids = True
    hint = "This format is an id, white space, and one number or shape on every line, as in utt2dur; or `segments`."

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        # Raw speech, in samples, has a shape of one dimension.
        is_shape = "," in next(iter(source.head.lines), "")
        for part, column in _KALDI_COLUMNS.items():
            if part in source.name and (
                is_shape or part not in ("speech_shape", "feats_shape")
            ):
                self.value_column = column

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first line is two words, the second a number or a shape; or a segment's four."""
        words = next(iter(head.lines), "").split()
        if len(words) == 4:
            return None not in map(number, words[2:])
        if len(words) != 2 or words[0].startswith(("{", "[")):
            return False
        return number(words[1]) is not None or _SHAPE.fullmatch(words[1]) is not None

    def cells(self, words: Sequence[str]) -> Sequence[object] | None:
        """Return the id and the number, or first dimension, of a line; no value for an id alone."""
        name, *values = words
        if self._spoken is not None and name not in self._spoken:
            return name, Unreadable("an id that the utterances beside it lack")
        if len(values) == 3:
            return name, self._seconds(*values)
        if len(values) > 1:
            return None
        return name, values[0].partition(",")[0] if values else None

    @cached_property
    def _spoken(self) -> set[str] | None:
        """The ids of the utterances in the folder; None if no other file lists them."""
        utterances = self.source.beside("text") or self.source.beside("segments")
        if utterances is None:
            return None
        return {
            text.split(maxsplit=1)[0] for _, text in utterances.lines() if text.strip()
        }

    @cached_property
    def _recordings(self) -> dict[str | None, str]:
        """The duration of each recording in the folder, as text."""
        durations = self.source.beside("reco2dur")
        return {} if durations is None else keyed_values(durations)

    def _seconds(self, recording: str, start: str, end: str) -> object:
        """Return the duration of a segment."""
        if number(end) == -1:
            end = self._recordings.get(recording, "")
        try:
            return float(end) - float(start)
        except ValueError:
            return Unreadable(
                "a segment without an end", f"is {recording} in reco2dur?"
            )


def keyed_values(source: Source) -> dict[str | None, str]:
    """Read id → value from Kaldi's and ESPnet's files: `utt value`, `utt 52,31` (the first number), `utt words …`."""
    values: dict[str | None, str] = {}
    for line, text in source.lines():
        name, *rest = text.split(maxsplit=1) or [""]
        if name in values:
            message = f"{source.path}, line {line}: duplicate id {shortened(name)}"
            raise ManifestError(
                message, "Each id has one value: remove or rename one of the lines."
            )
        value = "".join(rest).rstrip()
        if _SHAPE.fullmatch(value):
            value = value.partition(",")[0]
        if name:
            values[name] = value
    return values


class Wav2vec(_List):
    """The root folder on the first line, then `path<TAB>samples`, as fairseq's `wav2vec_manifest.py` writes it."""

    name = "wav2vec"
    description = "the root folder on the first line, then path<TAB>samples"
    hint = "This format is the root folder on the first line, then a path, a tab and the samples on each."
    separator = "\t"
    id_column = "path"
    value_column = "samples"
    first_line = 2

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether a line without a tab comes first, and then one with exactly one tab."""
        root, first, *_ = [*head.lines[:2], "", ""]
        path, _, samples = first.partition("\t")
        is_folder = "/" in root or root.strip() == "."
        return (
            is_folder
            and "\t" not in root
            and bool(path)
            and number(samples) is not None
        )


class NumberLines(_List):
    """Lines of one number each, without ids; blank lines are passed over."""

    name = "numbers"
    description = "one number on every line"
    id_column = None
    separator = "\n"  # a line is one cell

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first line is a number, and most of the others."""
        numeric = [number(line) is not None for line in head.lines[:PEEKED_ROWS]]
        return numeric[:1] == [True] and 2 * sum(numeric) > len(numeric)

    def cells(self, words: Sequence[str]) -> Sequence[object] | None:
        """Return the value of a line."""
        return words


class Text(NumberLines):
    """Lines of text, each an example whose length is counted; blank lines are passed over."""

    name = "text"
    description = "plain text, one example on every line; never detected, so name it"
    value_column = "text"

    @staticmethod
    def fits(head: Head) -> bool:
        """Return False: any text would fit."""
        return False

    def columns(self) -> Sequence[Column]:
        """Return the one column `text`."""
        return [Column("text", is_text=True)]

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """Return `text`."""
        return "text"
