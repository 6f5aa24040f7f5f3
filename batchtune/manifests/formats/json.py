"""JSON objects with a length, decoded by msgspec: on lines (NeMo), in a list, or by their ids (SpeechBrain).

JSON Lines are read some lines at a time. Any other JSON text is read at once: it takes the file's size in memory, and
about as much again for the values of the columns that are read.
"""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar

import msgspec

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import (
    PEEKED_ROWS,
    Column,
    Format,
    KeyPath,
    Rows,
    columns_of,
    id_name,
    walk,
)
from batchtune.manifests.source import Head, LineBlock
from batchtune.results import MALFORMED

# A comma, and the key in an object.
_BEFORE_VALUE = re.compile(r'[\s,]*(?:"[^"\\]*(?:\\.[^"\\]*)*"\s*:\s*)?')

# Texts, which are passed over, and what `json.dumps` writes for numbers that JSON does not have.
_TEXT_OR_NAN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|-?(?:NaN|Infinity)', re.DOTALL)

Getter = Callable[[Any], object]


def begins_with(head: Head, opening: str) -> bool:
    """Return whether a file with this head begins so, after white space."""
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
            for block in self.source.blocks():
                yield block._replace(data=without_nan(block.data))
        else:
            yield LineBlock(1, without_nan(self.source.content()), 0)

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
        if self.opening is None:
            for line, text in enumerate(block.data.split(b"\n"), block.first_line):
                if text.strip():
                    yield f"line {line}", None, text
            return
        kind: Any = list[msgspec.Raw]
        if self.opening == "{":
            kind = dict[str, msgspec.Raw]
        try:
            values = msgspec.json.decode(block.data, type=kind)
        except MALFORMED as error:
            byte = re.search(r"\(byte (\d+)\)", str(error))
            position = len(block.data.rstrip())
            if byte is not None:
                position = int(byte[1])
            raise self._refused(
                f"line {1 + block.data.count(bytes([10]), 0, position)}", error
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
    units: ClassVar[Mapping[str, Unit]] = {"length": "s", "len": "s"}
    endings = ()
    hint = 'This format is one JSON object of objects: {"id": {"duration": 3.2, …}, …}.'
    opening = "{"

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins with a JSON object whose first value is an object."""
        return _holds_objects_by_id(head)
