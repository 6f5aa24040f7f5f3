"""JSON files of objects: one on every line, in one list, or in one object by their ids.

msgspec reads them. Python's own json reads again what msgspec refuses: `NaN` and `Infinity`, which Python writes,
numbers beyond float64, and malformed text, to name its line and column.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import operator
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec
import numpy as np

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import IntArray
from batchtune.manifests.base import Format, Place, Rows, walk
from batchtune.manifests.headers import Payload
from batchtune.manifests.source import Block, Head, Source
from batchtune.manifests.values import Unreadable

_MARK = re.compile(r"\s*(\S?)\s*")
_KEY = re.compile(r'"(?:[^"\\]|\\.)*"\s*:\s*', re.DOTALL)
_FIRST_TOKEN = re.compile(r'"(?P<key>(?:[^"\\]|\\.)*)"\s*:\s*(?P<token>"(?:[^"\\]|\\.)*"|.?)', re.DOTALL)
_BETWEEN_ENTRIES = re.compile(rb'\}\s*,\s*"[^"\\]*"\s*:\s*\{')
_LARGEST_ENTRY_BYTES = 64 * 1024 * 1024
_LARGEST_FILE_BYTES = 16 * 1024 * 1024
# Raised by msgspec for a text that Python may yet read, or explain better.
_REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# The objects of some rows → the values of a column.
Getter: TypeAlias = Callable[[Sequence[Any]], list[object]]


# Longer whole numbers are beyond float64.
_PYTHON = json.JSONDecoder(parse_int=lambda one: int(one) if len(one) <= 300 else float(one), parse_constant=str)


class Item(NamedTuple):
    """A value of a JSON text: the line on which it begins, and its key in an object."""

    line: int
    key: str | None
    value: Any


def items(text: str) -> Iterator[Item]:
    """Yield the values of a JSON list or object, in order, down to the first fault.

    Raises ValueError if the text is malformed (JSONDecodeError) or holds half a surrogate pair, RecursionError if it
    is nested too deeply.
    """
    mark, begin, at = _mark(text, 0)
    end = {"{": "}", "[": "]"}.get(mark)
    if end is None:
        raise json.JSONDecodeError("Expecting value", text, begin)
    line, counted_to = 1, 0
    escaped = "\\u" in text
    if text.startswith(end, at):
        mark, begin, at = _mark(text, at)
    while mark != end:
        line, counted_to = line + text.count("\n", counted_to, at), at
        key = None
        if end == "}":
            match = _KEY.match(text, at)
            if match is None:
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
            key, at = json.loads(match[0].rstrip().removesuffix(":")), match.end()
        value, at = _PYTHON.raw_decode(text, at)
        if escaped:
            msgspec.json.encode(value)  # raises ValueError for half a surrogate pair
        yield Item(line, key, value)
        mark, begin, at = _mark(text, at)
        if mark not in (",", end):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, begin)
    if at < len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def _mark(text: str, at: int) -> tuple[str, int, int]:
    """Return the next character that is not space, "" at the end; where it stands; and where the next one does."""
    match = _MARK.match(text, at)
    assert match is not None
    return match[1], match.start(1), match.end()


def first_keys(head: Head) -> dict[str, str]:
    """Map the keys of the first object to the first token of each value; the head may hold anything, cut anywhere."""
    text = head.data.decode(errors="replace").lstrip().removeprefix("[").lstrip()
    found: dict[str, str] = {}
    mark, _, at = _mark(text, 0)
    with contextlib.suppress(ValueError, RecursionError):
        while mark in ("{", ",") and (match := _FIRST_TOKEN.match(text, at)):
            found.setdefault(match["key"], match["token"])
            _, at = _PYTHON.raw_decode(text, match.start("token"))
            mark, _, at = _mark(text, at)
    return found


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

    def first(self, kind: type[Any], most: int) -> list[Any]:
        """Return the first objects, without reading the whole file if its beginning holds some of them."""
        found: list[Item] = []
        if not self._on_lines:
            beginning = b"".join(itertools.islice(self.source.pieces(), 4)).decode()
            # It is cut off, or malformed, which is reported when all of it is read.
            with contextlib.suppress(ValueError, RecursionError):
                found += itertools.islice(items(beginning), most)
        if self.opening == "{":
            found = found or self._last_of_each_id()[0][:most]
        elif not found:
            return list(itertools.islice((one for block in self._blocks() for one in self._objects(block, kind)), most))
        return [self._converted(item, kind) for item in found]

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the rows of a block of lines at a time, of a whole list, or of about 1 MiB of an object of objects."""
        kind, getters = self.getters(keys)
        if self.opening == "{":
            yield from self._rows_by_id(kind, getters)
            return
        for block in self._blocks():
            objects = self._objects(block, kind)
            places = functools.cache(functools.partial(self._places, block))
            ids = functools.partial(self._ids, block, places) if self._on_lines else None
            yield _rows([get(objects) for get in getters], places, ids)

    def _blocks(self) -> Iterator[Block]:
        if self._on_lines:
            yield from self.source.blocks()
        else:
            yield Block(1, self.source.content())
            self.source.report(1.0)

    def _objects(self, block: Block, kind: type[Any]) -> list[Any]:
        found = self._decoded(block, kind)
        return [self._converted(item, kind) for item in self._items(block)] if found is None else found

    def _decoded(self, block: Block, kind: type[Any]) -> list[Any] | None:
        """Return the objects of a block, or None if msgspec refuses one, or one takes several lines."""
        with contextlib.suppress(*_REFUSED):
            if not self._on_lines:
                return msgspec.json.decode(block.data, type=list[kind])  # type: ignore[valid-type]
            if block.all_begin_with("{"):
                found = msgspec.json.Decoder(kind).decode_lines(block.data)
                return found if len(found) == block.newlines.size + (not block.data.endswith(b"\n")) else None
        return None

    def _items(self, block: Block) -> Iterator[Item]:
        """Yield the objects of a block as Python reads them. Raises ManifestError."""
        if not self._on_lines:
            text = block.data.decode()
            with self._explained(text):
                yield from items(text)
            return
        for number, line in enumerate(block.data.decode().split("\n"), block.first_line):
            if line.lstrip().startswith("{"):
                with self._explained(line, number):
                    value = _PYTHON.decode(line)
                    if "\\u" in line:
                        msgspec.json.encode(value)
                    yield Item(number, None, value)
            elif text := line.strip():
                yield Item(number, None, text)

    @contextlib.contextmanager
    def _explained(self, text: str, first_line: int = 1) -> Iterator[None]:
        """Turn an error of Python's json for a malformed text into a ManifestError with line and column."""
        place = f"line {first_line}"
        try:
            yield
            return
        except RecursionError:
            seen = "the JSON is nested too deeply"
        except json.JSONDecodeError as error:
            place = f"line {first_line + error.lineno - 1}, column {error.colno}"
            cut = not text[error.pos :].strip() or error.msg.startswith("Unterminated string")
            seen = "the JSON breaks off" if cut else f"the JSON is malformed: {error.msg}"
        except ValueError as error:
            seen = f"the JSON can't be decoded: {shortened(str(error), 200)}"
        raise ManifestError(f"{self.source.path}, {place}: {seen}", self.hint)

    def _converted(self, item: Item, kind: type[Any]) -> Any:
        if not isinstance(item.value, dict):
            seen = f" is not a JSON object: {shortened(item.value)}"
        else:
            try:
                return msgspec.convert(item.value, kind)
            except RecursionError:
                seen = ": the JSON is nested too deeply"
            except msgspec.ValidationError as error:
                seen = f": the object has another shape than needed: {error}"
        raise ManifestError(f"{self.source.path}, {Place(item.line, item.key)}{seen}", self.hint)

    def _places(self, block: Block) -> list[Place]:
        found = []
        for number, item in enumerate(self._items(block), 1):
            name = _text_or_none(item.value.get(self.id_key))
            found.append(Place(item.line, name if name or self._on_lines else f"item {number}"))
        return found

    def _ids(self, block: Block, places: Callable[[], Sequence[Place]]) -> list[str | None]:
        key = self.id_key or ""
        found = self._decoded(block, with_fields([key]))
        return [place.id for place in places()] if found is None else list(map(_text_or_none, values_of(found, 0, key)))

    def _rows_by_id(self, kind: type[Any], getters: Sequence[Getter]) -> Iterator[Rows]:
        entries = functools.cache(self._last_of_each_id)
        found = self._by_pieces(kind, getters)
        left_out: Mapping[str, int] = {}
        if found is None:  # there is a fault, or two entries have one id
            kept, replaced = entries()
            converted = [self._converted(item, kind) for item in kept]
            found = [[get(converted) for get in getters]]
            left_out = {"replaced by a later entry with the same id": replaced} if replaced else {}

        def places(start: int, count: int) -> list[Place]:
            return [Place(item.line, item.key) for item in entries()[0][start : start + count]]

        start = 0
        for columns in found:
            count = len(columns[0])
            yield _rows(columns, functools.cache(functools.partial(places, start, count)), None, left_out)
            start, left_out = start + count, {}

    def _last_of_each_id(self) -> tuple[list[Item], int]:
        """Return the entries, of those with one id the last, and how many others there were. Raises ManifestError."""
        text = self.source.content().decode()
        with self._explained(text):
            found = list(items(text))
        last = {item.key: item for item in found}
        return list(last.values()), len(found) - len(last)

    def _by_pieces(self, kind: type[Any], getters: Sequence[Getter]) -> list[list[list[object]]] | None:
        """Return the columns of all entries, piece by piece; None if an entry has a fault or two have one id."""
        decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, kind])  # type: ignore[valid-type]
        found: list[list[list[object]]] = []
        hashes: list[IntArray] = [np.empty(0, dtype=np.int64)]
        try:
            for piece in self._pieces():
                entries = decoder.decode(piece)
                # One opening brace for each entry (but for those that begin a string, as in "{root}/a.wav"): no entry
                # has replaced another with the same id.
                characters = np.frombuffer(piece, dtype=np.uint8)
                before = np.flatnonzero(characters == ord("{"))[1:] - 1
                if np.count_nonzero(characters[before] != ord('"')) != len(entries):
                    return None
                hashes.append(np.fromiter(map(hash, entries), dtype=np.int64, count=len(entries)))
                objects = list(entries.values())
                found.append([get(objects) for get in getters])
        except _REFUSED:
            return None
        ids = np.sort(np.concatenate(hashes))
        return None if (ids[1:] == ids[:-1]).any() else found

    def _pieces(self) -> Iterator[bytes]:
        """Cut the file into objects of about 1 MiB, which are not valid JSON if cut within an entry."""
        rest = b""
        for data in self.source.pieces():
            data = rest + data if rest else data.lstrip()
            ends = list(_BETWEEN_ENTRIES.finditer(data, max(0, len(data) - 64 * 1024)))
            if ends:
                end = ends[-1].start() + 1
                yield data[:end] + b"}"
                data = b"{" + data[data.index(b",", end) + 1 :]
            elif len(data) > _LARGEST_ENTRY_BYTES:
                raise msgspec.DecodeError
            rest = data
        yield rest


def _rows(
    columns: Sequence[list[object]],
    places: Callable[[], Sequence[Place]],
    ids: Callable[[], Sequence[str | None]] | None,
    left_out: Mapping[str, int] | None = None,
) -> Rows:
    ids = ids or (lambda: [place.id for place in places()])
    return Rows(columns, lambda index: places()[index], ids, left_out or {})


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
        return [one.get(key) for one in objects]
    return list(map(operator.attrgetter(f"f{index}"), objects))


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def json_reader(path: tuple[str, ...]) -> Callable[[Payload], object]:
    """Make a function from a file of one JSON text to the value at a path; None without one, or Unreadable."""
    decoder = msgspec.json.Decoder(with_fields(path[:1])) if path else msgspec.json.Decoder()

    def read(payload: Payload) -> object:
        if payload.size > _LARGEST_FILE_BYTES:
            return Unreadable("longer than 16 MiB of JSON", f"{payload.size:,} bytes")
        data = payload.read(0, payload.size).removeprefix(b"\xef\xbb\xbf")
        with contextlib.suppress(*_REFUSED):
            entry = decoder.decode(data)
            found = walk(values_of([entry], 0, path[0])[0], path[1:]) if path else entry
            if found is not None:
                return found
        try:
            value = _PYTHON.decode(data.decode())
        except (ValueError, RecursionError) as error:
            return Unreadable("malformed JSON", str(error))
        found = walk(value, path)
        # A key of the object that holds dots counts too.
        return value.get(".".join(path)) if found is None and isinstance(value, dict) else found

    return read
