"""JSON objects with a length, decoded by msgspec: on lines (NeMo), in a list, or by their ids (SpeechBrain).

JSON Lines are read some lines at a time. Any other JSON text is read at once: it takes the file's size in memory, and
about as much again for the values of the columns that are read.
"""

from __future__ import annotations

import contextlib
import json
import operator
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import PEEKED_ROWS, Column, Format, Place, Rows, id_name, summarise, walk
from batchtune.manifests.headers import Payload
from batchtune.manifests.source import Block, Head, Source
from batchtune.manifests.values import Unreadable

# A folder of JSON Lines: a name for the files, and their endings.
JSON_LINES = ("JSON Lines", (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".jsonl.xz"))

# The first key of an object, and the first token of its value.
_FIRST_TOKEN = re.compile(r'\s*[{,]\s*"(?P<key>(?:[^"\\]|\\.)*)"\s*:\s*(?P<token>"(?:[^"\\]|\\.)*"|\S|$)', re.DOTALL)
_LARGEST_MEMBER_BYTES = 16 * 1024 * 1024
_REFUSED = (msgspec.DecodeError, RecursionError)

# The objects of some rows → the values of a column.
Getter: TypeAlias = Callable[[Sequence[Any]], list[object]]


class Entry(NamedTuple):
    """An object as it is written: the position of its first byte in its block, its key in an object of objects."""

    begin: int
    key: str | None
    text: bytes


def first_keys(head: Head) -> dict[str, str]:
    """Map the keys of the first object to the first token of each value; the head may hold anything, cut anywhere."""
    text = head.data.decode(errors="replace").lstrip().removeprefix("[").lstrip()
    tokens: dict[str, str] = {}
    position = 0
    with contextlib.suppress(ValueError, RecursionError):
        while match := _FIRST_TOKEN.match(text, position):
            tokens.setdefault(match["key"], match["token"])
            # msgspec can't say where a value ends.
            _, position = json.JSONDecoder().raw_decode(text, match.start("token"))
    return tokens


def begins_with_list(head: Head) -> bool:
    """Return whether a file with this head is one JSON list."""
    return head.data.lstrip().startswith(b"[")


class JsonFormat(Format):
    """The part of a JSON format that is the same for all.

    Attributes:
        hint: What to do if a file is of another shape.
        opening: "{" for one object of objects, whose keys are the ids; "[" for one list; None for an object on every
            line, or one list if the file begins with one.
    """

    hint: ClassVar[str]
    opening: ClassVar[str | None] = None

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._on_lines = self.opening is None and not begins_with_list(source.head)
        begin = source.head.data.lstrip()[:1].decode("latin-1")
        if self.opening is not None and begin not in ("", self.opening):
            seen = {"[": "a JSON list", "{": "a JSON object"}.get(begin, "neither a JSON list nor an object")
            raise ManifestError(f"{source.path} has {seen} at its top level", self.hint)

    @abstractmethod
    def getters(self, keys: Sequence[str]) -> tuple[type[Any], list[Getter]]:
        """Return the type of the objects, with the fields that these columns need, and objects → values of each."""

    @property
    def id_key(self) -> str | None:
        """The key of an object's id, or None if it has none."""
        return "id"

    def first(self, kind: type[Any]) -> list[Any]:
        """Return the first objects."""
        objects: list[Any] = []
        for block in self._blocks():
            entries = islice(self._entries(block), PEEKED_ROWS - len(objects))
            objects += [self._decoded(block, entry, kind) for entry in entries]
            if len(objects) == PEEKED_ROWS:
                break
        return objects

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the rows of a block of lines at a time, or all of a list or an object of objects."""
        kind, getters = self.getters(keys)
        for block in self._blocks():
            names, objects = self._objects(block, kind)
            columns = [get(objects) for get in getters]
            del objects
            entries = cache(lambda block: list(self._entries(block)))
            place = partial(self._place, block, entries)
            ids = partial(self._ids, block, names)
            yield Rows(columns, place, ids)

    def _blocks(self) -> Iterator[Block]:
        if self._on_lines:
            yield from self.source.blocks()
        else:
            yield Block(1, self.source.content())
            self.source.report(1.0)

    def _objects(self, block: Block, kind: type[Any]) -> tuple[list[str] | None, list[Any]]:
        """Return the keys of an object of objects, else None, and the objects. Raises ManifestError for a fault."""
        with contextlib.suppress(*_REFUSED):
            if self.opening == "{":
                entries = msgspec.json.decode(block.data, type=dict[str, kind])  # type: ignore[valid-type]
                return list(entries), list(entries.values())
            if not self._on_lines:
                return None, msgspec.json.decode(block.data, type=list[kind])  # type: ignore[valid-type]
            objects = msgspec.json.Decoder(kind).decode_lines(block.data)
            if len(objects) == block.newlines.size + (not block.data.endswith(b"\n")):
                return None, objects
        # There are blank lines, or a fault, or an object takes several lines.
        written = list(self._entries(block))
        objects = [self._decoded(block, entry, kind) for entry in written]
        return [entry.key or "" for entry in written] if self.opening == "{" else None, objects

    def _entries(self, block: Block) -> Iterator[Entry]:
        """Yield the objects of a block as they are written."""
        if self._on_lines:
            begin = 0
            for line in block.data.split(b"\n"):
                if line.strip():
                    yield Entry(begin, None, line)
                begin += len(line) + 1
            return
        with self._explained(block, 0, block.data):
            if self.opening == "{":
                values = msgspec.json.decode(block.data, type=dict[str, msgspec.Raw])
                pairs: list[tuple[str | None, msgspec.Raw]] = list(values.items())
            else:
                pairs = [(None, value) for value in msgspec.json.decode(block.data, type=list[msgspec.Raw])]
        end = 0
        for key, value in pairs:
            text = bytes(value)
            begin = block.data.find(text, end)
            if begin < 0:  # an entry before it was replaced by a later one of the same id
                begin = block.data.find(text)
            end = begin + len(text)
            yield Entry(begin, key, text)

    def _decoded(self, block: Block, entry: Entry, kind: type[Any]) -> Any:
        """Return an object. Raises ManifestError if it is malformed, or of another shape than needed."""
        with self._explained(block, entry.begin, entry.text):
            try:
                return msgspec.json.decode(entry.text, type=kind)
            except msgspec.ValidationError as error:
                seen = f": {error}"
                with contextlib.suppress(msgspec.DecodeError):
                    value = msgspec.json.decode(entry.text)
                    if not isinstance(value, dict):
                        seen = f" is not a JSON object: {shortened(value)}"
        place = Place(_line_of(block, entry.begin), entry.key)
        raise ManifestError(f"{self.source.path}, {place}{seen}", self.hint)

    @contextlib.contextmanager
    def _explained(self, block: Block, begin: int, text: bytes) -> Iterator[None]:
        """Turn what msgspec raises for a malformed text, which begins there in a block, into a ManifestError."""
        try:
            yield
            return
        except msgspec.ValidationError:
            raise
        except RecursionError:
            position = 0
            seen = "the JSON is nested too deeply"
        except msgspec.DecodeError as error:
            byte = re.search(r"\(byte (\d+)\)", str(error))
            position = int(byte[1]) if byte is not None else len(text)
            seen = f"the JSON is malformed: {str(error).removeprefix('JSON is malformed: ')}"
            if byte is None:
                seen = "the JSON breaks off"
            elif re.match(rb"NaN|Infinity", text[position : position + 8]):
                seen = "NaN and Infinity are not JSON; write null for an unknown number"
        line_begin = block.data.rfind(b"\n", 0, begin + position) + 1
        column = len(block.data[line_begin : begin + position].decode(errors="replace")) + 1
        place = f"line {_line_of(block, begin + position)}, column {column}"
        raise ManifestError(f"{self.source.path}, {place}: {seen}", self.hint)

    def _place(self, block: Block, entries: Callable[[Block], list[Entry]], index: int) -> Place:
        entry = entries(block)[index]
        name = entry.key
        if name is None and self.id_key is not None:
            name = _text_or_none(msgspec.json.decode(entry.text, type=dict[str, Any]).get(self.id_key))
        if name is None and not self._on_lines:
            name = f"item {index + 1}"
        return Place(_line_of(block, entry.begin), name)

    def _ids(self, block: Block, names: list[str] | None) -> Sequence[str | None]:
        if names is not None:
            return names
        key = self.id_key or ""
        _, objects = self._objects(block, with_fields([key]))
        return [_text_or_none(value) for value in values_of(objects, 0, key)]


def _line_of(block: Block, position: int) -> int:
    return block.first_line + block.data.count(b"\n", 0, position)


def with_fields(keys: Sequence[str]) -> type[Any]:
    """Make a type of objects of which only these keys are read; a dict if a key can't be a field's."""
    names = {f"f{index}": key for index, key in enumerate(keys)}
    try:
        return msgspec.defstruct("Fields", [(name, Any, None) for name in names], rename=names, gc=False)
    except ValueError:  # a key with a quote, a backslash or a control character
        return dict[str, Any]


def values_of(objects: Sequence[Any], index: int, key: str) -> list[object]:
    """Return the values of a key in objects of a type by `with_fields`, or in dicts; None in those that lack it."""
    if objects and isinstance(objects[0], dict):
        return [entry.get(key) for entry in objects]
    return list(map(operator.attrgetter(f"f{index}"), objects))


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def json_reader(path: tuple[str, ...]) -> Callable[[Payload], object]:
    """Make a function from a file of one JSON text to the value at a path; None without one, or Unreadable."""

    def read(payload: Payload) -> object:
        if payload.size > _LARGEST_MEMBER_BYTES:
            return Unreadable("longer than 16 MiB of JSON", f"{payload.size:,} bytes")
        data = payload.read(0, payload.size).removeprefix(b"\xef\xbb\xbf")
        try:
            content = msgspec.json.decode(data)
        except (*_REFUSED, UnicodeDecodeError) as error:
            return Unreadable("malformed JSON", str(error))
        value = walk(content, path)
        if value is None and isinstance(content, dict):
            return content.get(".".join(path))  # a key of the object may hold dots
        return value

    return read


class Nemo(JsonFormat):
    """JSON Lines, as NeMo and request traces write it; blank lines are passed over."""

    name = "nemo"
    description = "one JSON object on every line"
    folder_kind: ClassVar[tuple[str, tuple[str, ...]] | None] = JSON_LINES
    hint = "This format holds one whole JSON object on every line."

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins with a JSON object that is not an object of objects."""
        return head.data.lstrip().startswith(b"{") and not _holds_objects_by_id(head)

    def columns(self) -> Sequence[Column]:
        """Return all keys of the first objects, those of nested ones under dotted names."""
        return summarise(self._first)

    def getters(self, keys: Sequence[str]) -> tuple[type[Any], list[Getter]]:
        """Return getters of keys that may be dotted paths. A key of the object itself that holds dots wins."""
        paths = [(key,) if key in self._names else tuple(key.split(".")) for key in keys]
        fields = list(dict.fromkeys(path[0] for path in paths))

        def values(path: Sequence[str], objects: Sequence[Any]) -> list[object]:
            field_values = values_of(objects, fields.index(path[0]), path[0])
            if len(path) == 1:
                return field_values
            return [walk(value, path[1:]) for value in field_values]

        return with_fields(fields), [partial(values, path) for path in paths]

    @property
    def id_key(self) -> str | None:
        """The key of an object's id, or None if it has none."""
        return id_name(self._names)

    @cached_property
    def _first(self) -> list[dict[str, Any]]:
        return self.first(dict[str, Any])

    @cached_property
    def _names(self) -> set[str]:
        return set().union(*self._first)


class JsonList(Nemo):
    """A list of objects; messages name their lines, and their ids or else their numbers, from 1."""

    name = "json-list"
    description = "one JSON list of objects"
    folder_kind = None
    hint = 'This format is one JSON list of objects: [{"text": "…", "duration": 3.2}, …].'
    opening = "["

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins with a list whose first item is an object."""
        start = head.data.lstrip()
        return start.startswith(b"[") and start[1:].lstrip()[:1] in (b"{", b"]")


class SpeechBrainJson(Nemo):
    """As SpeechBrain's `DynamicItemDataset.from_json` reads it: of entries with one id, the last counts."""

    name = "speechbrain-json"
    description = "one JSON object of objects, id → entry"
    units: ClassVar[Mapping[str, Unit]] = {"length": "s", "len": "s"}
    folder_kind = None
    hint = 'This format is one JSON object of objects: {"id": {"duration": 3.2, …}, …}.'
    opening = "{"

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins with a JSON object whose first value is an object."""
        return _holds_objects_by_id(head)


def _holds_objects_by_id(head: Head) -> bool:
    """Return whether a JSON file is one object of objects, rather than an object on every line."""
    if not head.data.lstrip().startswith(b"{"):
        return False
    try:
        first = msgspec.json.decode(head.lines[0])
    except _REFUSED:
        token = next(iter(first_keys(head).values()), None)
        return token == "{" or (token is None and head.data.strip(b"{} \t\r\n") == b"")
    return len(head.lines) == 1 and head.complete and all(isinstance(value, dict) for value in first.values())
