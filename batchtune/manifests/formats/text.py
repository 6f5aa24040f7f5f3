"""Text: tables (CSV, TSV), lists of Kaldi, ESPnet and fairseq, numbers, plain text, and JSON."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import operator
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar

import msgspec

from batchtune.errors import ManifestError, listed, shortened
from batchtune.lengths import Unit
from batchtune.manifests.formats import (
    ID_NAMES,
    KNOWN_UNITS,
    PEEKED_ROWS,
    Column,
    Format,
    KeyPath,
    Rows,
    Unreadable,
    columns_of,
    id_name,
    normalised,
    number,
    walk,
)
from batchtune.manifests.source import Head, LineBlock, Source
from batchtune.results import MALFORMED
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

# What SpeechBrain's files count.
_OF_SPEECHBRAIN: dict[str, Unit] = {"length": "s", "len": "s"}

NumberedCells = tuple[int, Sequence[object]]  # line and cells


class _Lines(Format):
    """The part of a format of records, a line or more each, that is the same for all."""

    @abstractmethod
    def opened(self) -> tuple[list[str], Iterator[NumberedCells]]:
        """Return the names of the columns, "" for one without a name, and a cell of each record for each name."""

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
                raise ManifestError(
                    f"{self.source.path} has no column {shortened(key)}",
                    f"Its columns: {listed(header)}.",
                )
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
            raise ManifestError(
                f"{self.source.path}, line {first_line}: the header is malformed, or names a column twice",
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
                    raise ManifestError(
                        f"{self.source.path}, line {line}: {counted(len(cells), 'cell')}, separated by "
                        f"{_NAMES[delimiter]}, not {width} as in the header",
                        "Fix the row; between commas, a cell that holds the separator must be quoted.",
                    )
                line = header_line + reader.line_num + 1
        except csv.Error as error:
            raise ManifestError(
                f"{self.source.path}, line {line}: the row is malformed: {error}",
                "Quotes within a quoted cell are doubled, and each is closed.",
            ) from None


class SpeechBrainCsv(TableLines):
    """SpeechBrain's CSV, as its `DynamicItemDataset.from_csv` reads it: two rows with one id are an error."""

    name = "speechbrain-csv"
    description = "a comma separated table with a column 'ID'"
    units = _OF_SPEECHBRAIN
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
                raise ManifestError(
                    f"{self.source.path}, line {line} has another format: {shortened(text)}",
                    self.hint,
                )
            yield line, cells

    def cells(self, words: Sequence[str]) -> Sequence[object] | None:
        """Return the id and the value of a line; None for a line of another shape."""
        if len(words) == 2:
            return words
        return None


class Kaldi(_List):
    """`utt2dur`, `reco2dur` (s), `utt2num_frames` (frames), ESPnet's `utt2num_samples`, `speech_shape`, `text_shape`.

    Of a shape, `1407,80` (frames, features), the first dimension is the length. In `segments` (id,
    recording, start, end), the end may be -1: that of the recording, in the `reco2dur` next to it.
    Ids that the `text` or `segments` next to the file lack are invalid, since training does not see
    them.
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
            raise ManifestError(
                f"{source.path}, line {line}: duplicate id {shortened(name)}",
                "Each id has one value: remove or rename one of the lines.",
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
    length_column = "text"

    @staticmethod
    def fits(head: Head) -> bool:
        """Return False: any text would fit."""
        return False

    def columns(self) -> Sequence[Column]:
        """Return the one column `text`."""
        return [Column("text", is_text=True)]


# JSON objects with a length, decoded by msgspec: on lines (NeMo), in a list, or by their ids (SpeechBrain).
#
# JSON Lines are read some lines at a time. Any other JSON text is read at once: it takes the file's size in memory, and
# about as much again for the values of the columns that are read.

# A comma, and the key in an object.
_BEFORE_VALUE = re.compile(r'[\s,]*(?:"[^"\\]*(?:\\.[^"\\]*)*"\s*:\s*)?')

# Texts, which are passed over, and what `json.dumps` writes for numbers that JSON does not have.
_TEXT_OR_NAN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|-?(?:NaN|Infinity)', re.DOTALL)

Getter = Callable[[Any], object]


def begins_with(head: Head, opening: str) -> bool:
    """Return whether a file with this head begins with `opening`, after white space."""
    return head.data.lstrip().startswith(opening.encode())


def without_nan(data: bytes) -> bytes:
    """Return JSON with null in place of NaN and Infinity: in a field that nobody asked for, they do no harm."""
    if b"NaN" not in data and b"Infinity" not in data:
        return data
    return _TEXT_OR_NAN.sub(
        lambda match: match[0] if match[0].startswith(b'"') else b"null", data
    )


def _first_values(head: Head) -> list[object]:
    """Return the first values of the list or object that a file begins with, as far as they are whole."""
    text = head.data.decode(errors="replace").lstrip()
    decoder = json.JSONDecoder()  # msgspec decodes whole texts only
    values: list[object] = []
    position = 1
    with contextlib.suppress(ValueError, RecursionError):
        while len(values) < PEEKED_ROWS:
            position += len(_BEFORE_VALUE.match(text, position)[0])  # type: ignore[index]  # it matches ""
            value, position = decoder.raw_decode(text, position)
            values.append(value)
    return values


def _holds_objects_by_id(head: Head) -> bool:
    """Return whether a JSON file is one object of objects, rather than an object on every line."""
    if not begins_with(head, "{"):
        return False
    with contextlib.suppress(*MALFORMED):
        first = msgspec.json.decode(head.lines[0])
        return (
            len(head.lines) == 1
            and head.complete
            and all(isinstance(value, dict) for value in first.values())
        )
    return isinstance(next(iter(_first_values(head)), None), dict)


class Nemo(Format):
    """JSON Lines, as NeMo, Lhotse and request traces write it; blank lines are passed over.

    Attributes:
        hint: What to do if a file is of another shape.
        opening: "{" for one object of objects, whose keys are the ids; "[" for one list; None for an object on every
            line.
    """

    name = "nemo"
    description = "one JSON object on every line"
    endings: ClassVar[tuple[str, ...]] = (
        ".jsonl",
        ".jsonl.gz",
        ".jsonl.zst",
        ".jsonl.bz2",
        ".jsonl.xz",
    )
    hint: ClassVar[str] = "This format holds one whole JSON object on every line."
    opening: ClassVar[str | None] = None

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins with a JSON object that is not an object of objects."""
        return begins_with(head, "{") and not _holds_objects_by_id(head)

    @cached_property
    def _first(self) -> list[dict[str, Any]]:
        head = self.source.head
        values: list[object] = []
        if self.opening is None:
            with contextlib.suppress(*MALFORMED):  # those before a fault are kept
                lines = without_nan("\n".join(head.lines[:PEEKED_ROWS]).encode())
                values.extend(map(msgspec.json.decode, lines.split(b"\n")))
        elif self.fits(head):
            values = _first_values(head)
        objects = [value for value in values if isinstance(value, dict)]
        if not objects:
            # The first is longer than the head, or damaged, or of another shape.
            for block in self._blocks():
                objects = list(self._objects(block, dict[str, Any]))
                break
        return objects[:PEEKED_ROWS]

    @cached_property
    def _names(self) -> set[str]:
        return set().union(*self._first)

    def columns(self) -> Sequence[Column]:
        """Return all keys of the first objects, those of nested ones under dotted names."""
        return columns_of(self._first)

    def _fields(
        self, paths: Sequence[KeyPath], value: Any = Any
    ) -> tuple[Any, list[Getter]]:
        """Return the type of objects with values of a type at these paths, and of each path object → value."""
        names = list(dict.fromkeys(path[0] for path in paths))
        fields = {f"f{index}": name for index, name in enumerate(names)}
        try:
            kind: Any = msgspec.defstruct(
                "Fields",
                [(field, value, None) for field in fields],
                rename=fields,
                gc=False,
            )
            getters: dict[str, Getter] = {
                name: operator.attrgetter(field) for field, name in fields.items()
            }
        except ValueError:  # a name with a quote, a backslash or a control character
            kind = dict[str, Any]
            getters = {name: operator.methodcaller("get", name) for name in names}
        return kind, [_below(getters[path[0]], path[1:]) for path in paths]

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the rows of a block of lines at a time, or all of a list or an object of objects."""
        paths = [self._path(key) for key in keys]
        of_numbers, _ = self._fields(paths, float | None)  # faster, for most manifests
        kind, getters = self._fields(paths)
        for block in self._blocks():
            objects = self._objects(block, of_numbers, kind)
            columns = [list(map(get, objects)) for get in getters]
            del objects
            yield Rows(columns, partial(self._ids, block), partial(self._place, block))

    def _path(self, key: str) -> KeyPath:
        """Return the path that a column's name means. A key of the object itself that holds dots wins."""
        if key in self._names:
            return (key,)
        return tuple(key.split("."))

    def _blocks(self) -> Iterator[LineBlock]:
        if self.opening is None:
            yield from self.source.blocks()
        else:
            yield LineBlock(1, self.source.content(), 0)

    def _objects(self, block: LineBlock, *kinds: Any) -> Collection[Any]:
        """Return the objects, of the first of these types that fits. Raises ManifestError for a fault."""
        decoded: Any
        for kind in kinds:
            with contextlib.suppress(*MALFORMED):
                if self.opening == "{":
                    decoded = msgspec.json.decode(block.data, type=dict[str, kind])  # type: ignore[valid-type]
                    return decoded.values()  # type: ignore[no-any-return]
                if self.opening == "[":
                    return msgspec.json.decode(block.data, type=list[kind])  # type: ignore[valid-type]
                decoded = msgspec.json.Decoder(kind).decode_lines(block.data)
                if len(decoded) == block.num_ends + (not block.data.endswith(b"\n")):
                    return decoded  # type: ignore[no-any-return]
        # Only now: looking for NaN takes as long as decoding.
        data = without_nan(block.data)
        if data != block.data:
            return self._objects(block._replace(data=data), *kinds)
        # There are blank lines, or a fault.
        objects = []
        for place, _, text in self._entries(block):
            try:
                objects.append(msgspec.json.decode(text, type=kinds[-1]))
            except MALFORMED as error:
                raise self._refused(place, error) from None
        return objects

    def _entries(
        self, block: LineBlock
    ) -> Iterator[tuple[str, str | None, bytes | msgspec.Raw]]:
        """Yield place, id and text of the objects of a block. Raises ManifestError for malformed JSON."""
        data = without_nan(block.data)
        if self.opening is None:
            for line, text in enumerate(data.split(b"\n"), block.first_line):
                if text.strip():
                    yield f"line {line}", None, text
            return
        kind: Any = list[msgspec.Raw]
        if self.opening == "{":
            kind = dict[str, msgspec.Raw]
        try:
            values = msgspec.json.decode(data, type=kind)
        except MALFORMED as error:
            byte = re.search(r"\(byte (\d+)\)", str(error))
            position = len(data.rstrip())
            if byte is not None:
                position = int(byte[1])
            raise self._refused(
                f"line {1 + data.count(bytes([10]), 0, position)}", error
            ) from None
        if self.opening == "{":
            for name, value in values.items():
                yield f"id {shortened(name)}", name, value
        else:
            for index, value in enumerate(values, 1):
                yield f"item {index}", None, value

    def _refused(self, place: str, error: Exception) -> ManifestError:
        """Return the error for what msgspec refuses."""
        seen = str(error)
        if isinstance(error, RecursionError):
            seen = "the JSON is nested too deeply"
        return ManifestError(f"{self.source.path}, {place}: {seen}", self.hint)

    def _place(self, block: LineBlock, index: int) -> str:
        place, _, _ = next(islice(self._entries(block), index, None))
        return place

    def _ids(self, block: LineBlock) -> Sequence[str | None]:
        if self.opening == "{":
            return [name for _, name, _ in self._entries(block)]
        kind, (get,) = self._fields([(id_name(self._names) or "",)])
        names = map(get, self._objects(block, kind))
        return [name if isinstance(name, str) else None for name in names]


def _below(get: Getter, path: KeyPath) -> Getter:
    return (lambda entry: walk(get(entry), path)) if path else get


class JsonList(Nemo):
    """A list of objects."""

    name = "json-list"
    description = "one JSON list of objects"
    endings = ()
    hint = (
        'This format is one JSON list of objects: [{"text": "…", "duration": 3.2}, …].'
    )
    opening = "["

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins with a list of objects, or one that can't be read."""
        values = _first_values(head)
        holds_object = any(isinstance(value, dict) for value in values)
        return begins_with(head, "[") and (holds_object or not values)


class SpeechBrainJson(Nemo):
    """As SpeechBrain's `DynamicItemDataset.from_json` reads it: of entries with one id, the last counts."""

    name = "speechbrain-json"
    description = "one JSON object of objects, id → entry"
    units = _OF_SPEECHBRAIN
    endings = ()
    hint = 'This format is one JSON object of objects: {"id": {"duration": 3.2, …}, …}.'
    opening = "{"

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins with a JSON object whose first value is an object."""
        return _holds_objects_by_id(head)
