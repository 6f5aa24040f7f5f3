"""Objects of one known type, on the lines of a file or in one JSON list: read as fast as msgspec is."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from batchtune.errors import ManifestError
from batchtune.manifests.columns import PEEKED_ROWS, summarise
from batchtune.manifests.jsontext import decoded, value
from batchtune.manifests.paths import walk
from batchtune.manifests.rows import Column, Place, Rows
from batchtune.manifests.source import Block, Head, Source

_RAW = msgspec.json.Decoder(msgspec.Raw)
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_PYTHON = json.JSONDecoder()
_FIRST_ITEM = re.compile(r"\s*\[\s*(?=\{)")
_NEXT_ITEM = re.compile(r"\s*,\s*(?=\{)")
# A string, closed or not, a bracket, a separator, or a literal.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]:,]|[^\s{}\[\]:,"]+', re.DOTALL)


class Identified(msgspec.Struct, gc=False):
    """An object with an id; base of the types that are read."""

    id: Any = None


T = TypeVar("T", bound=Identified)
Getters: TypeAlias = Mapping[str, Callable[[T], object]]


class Chunk(Generic[T]):
    """Some consecutive objects.

    Args:
        entries: The objects.
        lines: → the line on which each of them begins, None where that can't be told.
    """

    def __init__(self, entries: Sequence[T], lines: Callable[[], Sequence[int | None]]) -> None:
        self.entries = entries
        self._find_lines = lines

    def place(self, index: int) -> Place:
        """Where one of them stands."""
        return Place(self._lines[index], _text_or_none(self.entries[index].id))

    def ids(self) -> list[str | None]:
        """The ids of all of them."""
        return [_text_or_none(entry.id) for entry in self.entries]

    @cached_property
    def _lines(self) -> Sequence[int | None]:
        return self._find_lines()


class Objects(Generic[T]):
    """The objects of a file: one JSON list of them, or one on each line.

    Values of a field of type Any may be of any type: numbers beyond float64 become infinite, and `NaN` and
    `Infinity` the strings of that name.

    Args:
        source: The file.
        kind: Their type; keys that it has no field for are passed over.
        hint: What to do where the file is of another shape.
    """

    def __init__(self, source: Source, kind: type[T], hint: str) -> None:
        self._source = source
        self._kind = kind
        self._hint = hint
        self._decoder = msgspec.json.Decoder(kind)

    def chunks(self) -> Iterator[Chunk[T]]:
        """All objects: those of a block of lines at a time, or the whole list at once.

        Raises:
            ManifestError: One is malformed or of another shape; the message says where.
        """
        if not begins_with_list(self._source.head):
            for block in self._source.blocks():
                yield Chunk(self._of_block(block), partial(_line_numbers, block))
            return
        content = self._source.content()
        yield Chunk(self._of_list(content), partial(self._lines_of_list, content))
        self._source.report(1.0)

    def columns(self, getters: Getters[T]) -> list[Column]:
        """The columns that the first objects have, the one called `duration` in any case.

        Args:
            getters: Name of a column → what it is of an object. `id` and `text…` are texts, the others numbers.
        """
        found: list[Mapping[str, object]] = []
        for entry in self._first():
            values = {name: get(entry) for name, get in getters.items()}
            found.append({name: one for name, one in values.items() if one is not None or name == "duration"})
        # A number that is written as something else is still no text to be measured.
        return [
            replace(column, text=column.text and column.name.startswith(("id", "text"))) for column in summarise(found)
        ]

    def rows(self, getters: Getters[T], length_key: str, target_key: str | None) -> Iterator[Rows]:
        """All rows; the keys are names of columns, perhaps with an index into a list (`durations.0`)."""
        for chunk in self.chunks():
            targets = None if target_key is None else _column(chunk.entries, getters, target_key)
            yield Rows(_column(chunk.entries, getters, length_key), targets, chunk.place, ids=chunk.ids)

    def _first(self) -> list[T]:
        """The first objects; of a list those that the head of the file holds whole, or else all."""
        if begins_with_list(self._source.head) and (found := self._in_head()):
            return found
        return list(itertools.islice((entry for chunk in self.chunks() for entry in chunk.entries), PEEKED_ROWS))

    def _in_head(self) -> list[T]:
        text = self._source.head.data.decode(errors="replace")
        found: list[T] = []
        item = _FIRST_ITEM.match(text)
        while item:
            try:
                _, end = _PYTHON.raw_decode(text, item.end())
                found.append(self._decoder.decode(text[item.end() : end].encode()))
            except (ValueError, RecursionError, msgspec.DecodeError):
                break
            item = _NEXT_ITEM.match(text, end)
        return found

    def _of_block(self, block: Block) -> list[T]:
        found = self._at_once(block)
        if found is not None:
            return found
        path, hint = self._source.path, self._hint
        found = []
        for line, data in _numbered(block):
            if not data.lstrip().startswith(b"{"):
                raise ManifestError(f"{path}, line {line} is no JSON object", hint)
            found.append(self._one(decoded(path, data, _RAW, line, hint), line))
        return found

    def _at_once(self, block: Block) -> list[T] | None:
        """The objects, or None unless each stands on a line of its own, without a fault."""
        if not block.all_begin_with("{"):
            return None
        try:
            entries = self._decoder.decode_lines(block.data)
        except (msgspec.DecodeError, RecursionError):  # said better, or done better, line by line
            return None
        return entries if len(entries) == block.lines else None

    def _of_list(self, content: bytes) -> list[T]:
        try:
            return msgspec.json.decode(content, type=list[self._kind])  # type: ignore[name-defined]
        except (msgspec.DecodeError, RecursionError):  # said better, or done better, one by one
            pass
        raws = decoded(self._source.path, content, _RAWS, hint=self._hint)
        lines = _lines_of(content, raws)
        return [self._one(raw, line) for raw, line in zip(raws, lines, strict=True)]

    def _lines_of_list(self, content: bytes) -> Sequence[int | None]:
        return _lines_of(content, decoded(self._source.path, content, _RAWS, hint=self._hint))

    def _one(self, raw: msgspec.Raw, line: int | None) -> T:
        try:
            return self._decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            pass
        try:  # once more, with numbers beyond float64 made infinite
            return msgspec.convert(value(raw), self._kind)
        except RecursionError:
            fault = "the JSON is nested too deeply"
        except msgspec.ValidationError as error:
            fault = f"the object has another shape than needed: {error}"
        raise ManifestError(f"{self._source.path}, {Place(line, None)}: {fault}", self._hint)


def begins_with_list(head: Head) -> bool:
    """Whether a file that begins so is one JSON list."""
    return head.data.lstrip().startswith(b"[")


def first_keys(head: Head) -> dict[str, str]:
    """Keys of the first object, of the file or of the list that it is → the token that each value begins with.

    The head of the file need not hold the object whole, and may hold anything.
    """
    text = head.data.decode(errors="replace").lstrip().removeprefix("[").lstrip()
    found: dict[str, str] = {}
    if not text.startswith("{"):
        return found
    depth, key, previous = 0, "", ""
    for match in _TOKEN.finditer(text):
        token = match[0]
        if depth == 1 and token == ":":
            key = previous
        elif depth == 1 and previous == ":":
            found.setdefault(key.strip('"'), token)
        if token in ("{", "["):
            depth += 1
        elif token in ("}", "]"):
            depth -= 1
            if depth == 0:
                break
        previous = token
    return found


def _column(entries: Sequence[T], getters: Getters[T], key: str) -> list[object]:
    name, *path = key.split(".")
    values = list(map(getters[name], entries))
    return [walk(one, path) for one in values] if path else values


def _numbered(block: Block) -> Iterator[tuple[int, bytes]]:
    """Number and text of the lines that are not blank."""
    if block.data.isspace():
        return
    for number, line in enumerate(block.data.split(b"\n"), block.first_line):
        if line.strip():
            yield number, line


def _line_numbers(block: Block) -> list[int]:
    return [number for number, _ in _numbered(block)]


def _lines_of(content: bytes, raws: Sequence[msgspec.Raw]) -> list[int | None]:
    """The lines on which the items of a list begin; None from the first that had to be rewritten to be read."""
    lines: list[int | None] = []
    line, begin, end = 1, 0, 0
    for raw in raws:
        start = content.find(bytes(raw), end)
        if start < 0:
            break
        line += content.count(b"\n", begin, start)
        lines.append(line)
        begin, end = start, start + len(memoryview(raw))
    return lines + [None] * (len(raws) - len(lines))


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None
