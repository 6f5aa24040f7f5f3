"""The objects of a JSON file, on its lines, in one list, or in one object by their ids: read as fast as msgspec is.

What msgspec refuses is read again by Python's own json, object by object: `NaN` and `Infinity`, which Python writes,
numbers beyond float64, and what is malformed, whose line and column that tells.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import msgspec

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.base import Place
from batchtune.manifests.columns import walk
from batchtune.manifests.source import Block, Head, Source
from batchtune.manifests.values import Unreadable

T = TypeVar("T")

_SPACE = re.compile(r"\s*")
_KEY = re.compile(r'"(?:[^"\\]|\\.)*"\s*:\s*', re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|.?', re.DOTALL)
_LONGEST_WHOLE_NUMBER = 300


def _whole_number(digits: str) -> float:
    return int(digits) if len(digits) <= _LONGEST_WHOLE_NUMBER else float(digits)


_PYTHON = json.JSONDecoder(parse_int=_whole_number, parse_constant=str)


@dataclass(frozen=True, slots=True)
class Item:
    """A value of a list, or of an object under a key, and the line on which it begins."""

    line: int
    key: str | None
    value: Any


def items(text: str) -> Iterator[Item]:
    """The values of a JSON list or object. Raises JSONDecodeError or RecursionError; those before come first."""
    at = _after_space(text, 0)
    end = {"{": "}", "[": "]"}.get(text[at : at + 1])
    if end is None:
        raise json.JSONDecodeError("Expecting value", text, at)
    at = _after_space(text, at + 1)
    more = not text.startswith(end, at)
    line, counted_to = 1, 0
    while more:
        key = None
        line, counted_to = line + text.count("\n", counted_to, at), at
        if end == "}":
            match = _KEY.match(text, at)
            if match is None:
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
            key = json.loads(match[0].rstrip().removesuffix(":"))
            at = match.end()
        value, at = _PYTHON.raw_decode(text, at)
        yield Item(line, key, value)
        at = _after_space(text, at)
        more = text.startswith(",", at)
        if more:
            at = _after_space(text, at + 1)
        elif not text.startswith(end, at):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    rest = _after_space(text, at + 1)
    if rest < len(text):
        raise json.JSONDecodeError("Extra data", text, rest)


def first_items(source: Source, most: int) -> list[Item]:
    """The values that the beginning of a file holds whole, in a list or an object; those of an object with their ids.

    Raises:
        ManifestError: It holds none, and the file can't be read.
    """
    beginning = b"".join(itertools.islice(source.pieces(), 4)).decode()
    found: list[Item] = []
    try:
        found += itertools.islice(items(beginning), most)
    except (ValueError, RecursionError):  # cut off, or malformed, which is said when all of it is read
        pass
    return found


def first_keys(head: Head) -> dict[str, str]:
    """Keys of the first object, of the file or of the list that it is → the token that each value begins with.

    The head of the file need not hold the object whole, and may hold anything.
    """
    text = head.data.decode(errors="replace").lstrip().removeprefix("[").lstrip()
    found: dict[str, str] = {}
    at = _after_space(text, 1) if text.startswith("{") else len(text)
    while match := _KEY.match(text, at):
        token = _TOKEN.match(text, match.end())
        assert token is not None
        found.setdefault(match[0].rstrip().removesuffix(":").rstrip().strip('"'), token[0])
        try:
            _, at = _PYTHON.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            break
        at = _after_space(text, at)
        at = _after_space(text, at + 1) if text.startswith(",", at) else len(text)
    return found


def holds_objects_by_id(head: Head) -> bool:
    """Whether a JSON file that begins so is one object of objects, rather than an object on every line."""
    if not head.data.lstrip().startswith(b"{"):
        return False
    try:
        first = _PYTHON.decode(head.lines[0])
    except (ValueError, RecursionError):
        pass
    else:
        return len(head.lines) == 1 and head.complete and all(isinstance(value, dict) for value in first.values())
    token = next(iter(first_keys(head).values()), None)
    return token == "{" or (token is None and head.data.strip(b"{} \t\r\n") == b"")


class Chunk(Generic[T]):
    """Some consecutive objects.

    Args:
        objects: The objects.
        places: → where each of them stands; worked out only if asked for.
    """

    def __init__(self, objects: Sequence[T], places: Callable[[], Sequence[Place]]) -> None:
        self.objects = objects
        self._find_places = places

    def place(self, start: int, index: int) -> Place:
        """Where one of them stands, counted from `start`."""
        return self._places[start + index]

    def ids(self, start: int, stop: int) -> list[str | None]:
        """The ids of some of them."""
        return [place.id for place in self._places[start:stop]]

    @cached_property
    def _places(self) -> Sequence[Place]:
        return self._find_places()


class Objects(Generic[T]):
    """The objects of a file that is one list of them, or has one on each line.

    Args:
        source: The file.
        kind: The type of an object; keys that it has no field for are passed over.
        id_key: The key of an object's id, or None if it has none.
        hint: What to do if the file is of another shape.
    """

    def __init__(self, source: Source, kind: type[T], id_key: str | None, hint: str) -> None:
        self._source = source
        self._kind = kind
        self._id_key = id_key
        self._hint = hint
        self._decoder = msgspec.json.Decoder(kind)

    def chunks(self) -> Iterator[Chunk[T]]:
        """All objects: those of a block of lines at a time, or the whole list at once.

        Raises:
            ManifestError: One is malformed or of another shape; the message says where.
        """
        if not begins_with_list(self._source.head):
            for block in self._source.blocks():
                yield Chunk(self._of_block(block), partial(self._places_of_block, block))
            return
        content = self._source.content()
        yield Chunk(self._of_list(content), partial(self._places_of_list, content))
        self._source.report(1.0)

    def first(self, most: int) -> list[T]:
        """The first objects; of a list, those that the beginning of the file holds whole, or else all."""
        if begins_with_list(self._source.head):
            found = [self._converted(item.value, item.line) for item in first_items(self._source, most)]
            if found:
                return found
        return list(itertools.islice((one for chunk in self.chunks() for one in chunk.objects), most))

    def _of_block(self, block: Block) -> list[T]:
        if block.all_begin_with("{"):
            try:
                entries = self._decoder.decode_lines(block.data)
                if len(entries) == block.lines:
                    return entries
            except (msgspec.DecodeError, RecursionError):  # said better, or done better, line by line
                pass
        return [self._of_line(line, data) for line, data in numbered_lines(block)]

    def _of_line(self, line: int, data: bytes) -> T:
        if not data.lstrip().startswith(b"{"):
            raise ManifestError(f"{self._source.path}, line {line} is no JSON object", self._hint)
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError):
            text = data.decode()
        with explained(self._source, text, self._hint, line):
            value = checked_value(_PYTHON.decode(text), text)
        return self._converted(value, line)

    def _of_list(self, content: bytes) -> list[T]:
        try:
            return msgspec.json.decode(content, type=list[self._kind])  # type: ignore[name-defined]
        except (msgspec.DecodeError, RecursionError):  # said better, or done better, one by one
            pass
        found = explained_items(self._source, content.decode(), self._hint)
        return [self._converted(item.value, item.line) for item in found]

    def _places_of_block(self, block: Block) -> list[Place]:
        lines = numbered_lines(block)
        if self._id_key is None:
            return [Place(line, None) for line, _ in lines]
        decoder = msgspec.json.Decoder(with_fields([self._id_key]))
        places = []
        for line, data in lines:
            try:
                entry = decoder.decode(data)
            except (msgspec.DecodeError, RecursionError):
                entry = _PYTHON.decode(data.decode())
            (name,) = values_of([entry], 0, self._id_key)
            places.append(Place(line, _text_or_none(name)))
        return places

    def _places_of_list(self, content: bytes) -> list[Place]:
        found = []
        for number, item in enumerate(explained_items(self._source, content.decode(), self._hint), 1):
            name = _text_or_none(item.value.get(self._id_key)) if self._id_key is not None else None
            found.append(Place(item.line, name or f"item {number}"))
        return found

    def _converted(self, value: object, line: int | None) -> T:
        try:
            return msgspec.convert(value, self._kind)
        except RecursionError:
            fault = "the JSON is nested too deeply"
        except msgspec.ValidationError as error:
            fault = f"the object has another shape than needed: {error}"
        raise ManifestError(f"{self._source.path}, {Place(line, None)}: {fault}", self._hint)


def explained_items(source: Source, text: str, hint: str) -> Iterator[Item]:
    """The values of a list or object. Raises ManifestError, with line and column, if it is malformed."""
    with explained(source, text, hint):
        for item in items(text):
            checked_value(item.value, text)
            yield item


def checked_value(value: object, text: str) -> object:
    """A value of a JSON text, if it holds no halves of surrogate pairs, which are no text. Raises ValueError."""
    if "\\u" in text:
        msgspec.json.encode(value)
    return value


@contextlib.contextmanager
def explained(source: Source, text: str, hint: str, first_line: int = 1) -> Iterator[None]:
    """Turns what Python's json raises for a malformed text into a ManifestError with line and column."""
    try:
        yield
    except RecursionError:
        raise ManifestError(f"{source.path}, line {first_line}: the JSON is nested too deeply", hint) from None
    except json.JSONDecodeError as error:
        place = f"{source.path}, line {first_line + error.lineno - 1}, column {error.colno}"
        if not text[error.pos :].strip() or error.msg.startswith("Unterminated string"):
            raise ManifestError(f"{place}: the JSON breaks off", hint) from None
        raise ManifestError(f"{place}: the JSON is malformed: {error.msg}", hint) from None
    except ValueError as error:
        message = f"{source.path}, line {first_line}: the JSON can't be decoded: {shortened(str(error), 200)}"
        raise ManifestError(message, hint) from None


def begins_with_list(head: Head) -> bool:
    """Whether a file that begins so is one JSON list."""
    return head.data.lstrip().startswith(b"[")


def numbered_lines(block: Block) -> list[tuple[int, bytes]]:
    """Number and text of the lines that are not blank."""
    if block.data.isspace():
        return []
    return [(number, line) for number, line in enumerate(block.data.split(b"\n"), block.first_line) if line.strip()]


def with_fields(keys: Sequence[str]) -> type[Any]:
    """A type of objects of which only these keys are read: fields f0, f1, …; a dict if a key can't be a field's."""
    names = {f"f{index}": key for index, key in enumerate(keys)}
    try:
        return msgspec.defstruct("Fields", [(name, Any, None) for name in names], rename=names, gc=False)
    except ValueError:  # a key with a quote, a backslash or a control character
        return dict[str, Any]


def values_of(objects: Sequence[Any], index: int, key: str) -> list[object]:
    """The values of a key in objects of a type by `with_fields`, or in dicts; None in those that lack it."""
    if objects and isinstance(objects[0], dict):
        return [one.get(key) for one in objects]
    return list(map(operator.attrgetter(f"f{index}"), objects))


def json_reader(path: tuple[str, ...]) -> Callable[[bytes], object]:
    """A function from one JSON text to the value at a path in it, None if that has none, Unreadable if malformed."""
    decoder = msgspec.json.Decoder(with_fields(path[:1])) if path else msgspec.json.Decoder()

    def read(data: bytes) -> object:
        try:
            entry = decoder.decode(data)
            found = walk(values_of([entry], 0, path[0])[0], path[1:]) if path else entry
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if found is not None:
            return found
        try:
            return value_below(_PYTHON.decode(data.decode()), path)
        except (ValueError, RecursionError) as error:
            return Unreadable("malformed JSON", str(error))

    return read


def value_below(value: object, path: tuple[str, ...]) -> object:
    """The value at a path below another; a key of an object that holds dots counts too."""
    found = walk(value, path)
    return value.get(".".join(path)) if found is None and isinstance(value, dict) else found


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None
