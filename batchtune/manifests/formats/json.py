"""JSON of any objects: one on every line (NeMo), one list of them, or one object of objects (SpeechBrain)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import msgspec
import numpy as np

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import IntArray, Unit
from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.columns import PEEKED_ROWS, id_name, summarise, walk
from batchtune.manifests.json_objects import (
    Objects,
    begins_with_list,
    explained_items,
    first_items,
    holds_objects_by_id,
    values_of,
    with_fields,
)
from batchtune.manifests.source import Head, Source

_ON_LINES = "This format holds one whole JSON object on every line."
_IN_LIST = 'This format is one JSON list of objects: [{"text": "…", "duration": 3.2}, …].'
_BY_ID = 'This format is one JSON object of objects: {"id": {"duration": 3.2, …}, …}.'
_ROWS_AT_ONCE = 65_536

_SEARCHED_BYTES = 64 * 1024
_LARGEST_ENTRY_BYTES = 64 * 1024 * 1024
_BETWEEN_ENTRIES = re.compile(rb'\}\s*,\s*"[^"\\]*"\s*:\s*\{')

Values = list[object]

# What a folder of JSON Lines is called, and the endings of their names.
JSON_LINES = ("JSON Lines", (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".jsonl.xz"))


class Nemo(Format):
    """JSON Lines, as NeMo and request traces write it; blank lines are passed over."""

    name = "nemo"
    description = "one JSON object on every line"
    folder_kind: ClassVar[tuple[str, tuple[str, ...]] | None] = JSON_LINES
    hint: ClassVar[str] = _ON_LINES

    def fits(self, head: Head) -> bool:
        """Whether the file begins with a JSON object that is no object of objects."""
        return head.data.lstrip().startswith(b"{") and not holds_objects_by_id(head)

    def columns(self, source: Source) -> Sequence[Column]:
        """All keys of the first objects, those of nested ones under dotted names."""
        return summarise(self._first(source))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The objects of a block of lines at a time, or those of a list, some ten thousand at a time."""
        names = {name for entry in self._first(source) for name in entry}
        keys = _Keys(names, length_key, target_key)
        for chunk in Objects(source, keys.kind, id_name(names), self.hint).chunks():
            for start in range(0, max(1, len(chunk.objects)), _ROWS_AT_ONCE):
                lengths, targets = keys.values(chunk.objects[start : start + _ROWS_AT_ONCE])

                part = partial(chunk.ids, start, start + len(lengths))
                yield Rows(lengths, targets, partial(chunk.place, start), ids=part)

    def _first(self, source: Source) -> list[dict[str, Any]]:
        if "first" not in source.memo:
            kind = cast(type[dict[str, Any]], dict[str, Any])
            source.memo["first"] = Objects(source, kind, None, self.hint).first(PEEKED_ROWS)
        return cast(list[dict[str, Any]], source.memo["first"])


class JsonList(Nemo):
    """A list of objects; where they stand is told by their line, and by their id or else their number, from 1."""

    name = "json-list"
    description = "one JSON list of objects"
    folder_kind = None
    hint = _IN_LIST

    def fits(self, head: Head) -> bool:
        """Whether the file begins with a list whose first item is an object."""
        start = head.data.lstrip()
        return start.startswith(b"[") and start[1:].lstrip()[:1] in (b"{", b"]")

    def _first(self, source: Source) -> list[dict[str, Any]]:
        if not begins_with_list(source.head):
            seen = "a JSON object" if source.head.data.lstrip().startswith(b"{") else "no JSON list"
            raise ManifestError(f"{source.path} has {seen} at its top level", _IN_LIST)
        return super()._first(source)


class SpeechBrainJson(Format):
    """As SpeechBrain's `DynamicItemDataset.from_json` reads it: of entries with one id, the last counts."""

    name = "speechbrain-json"
    description = "one JSON object of objects, id → entry"
    units: ClassVar[Mapping[str, Unit]] = {"length": "s", "len": "s"}

    def fits(self, head: Head) -> bool:
        """Whether the file begins with a JSON object whose first value is an object."""
        return holds_objects_by_id(head)

    def columns(self, source: Source) -> Sequence[Column]:
        """All keys of the first entries, those of nested ones under dotted names."""
        return summarise(_first_entries(source))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The entries, some thousands at a time."""
        names = {name for entry in _first_entries(source) for name in entry}
        keys = _Keys(names, length_key, target_key)
        found = _by_pieces(source, keys)
        left_out: Mapping[str, int] = {}
        entries = _Entries(source)
        if found is None:  # there is a fault, or two entries have one id
            found = [keys.values([entry for _, _, entry in entries.checked()])]
            left_out = entries.replaced
        start = 0
        for lengths, targets in found:
            places = partial(entries.place, start)
            yield Rows(lengths, targets, places, left_out, partial(entries.ids, start, len(lengths)))
            left_out, start = {}, start + len(lengths)


class _Keys:
    """What is read of an object: the values at one or two dotted paths.

    A key of the object itself that holds dots wins over a path.
    """

    def __init__(self, names: set[str], length_key: str, target_key: str | None) -> None:
        asked = [length_key] if target_key is None else [length_key, target_key]
        paths = [(key,) if key in names else tuple(key.split(".")) for key in asked]
        tops = list(dict.fromkeys(path[0] for path in paths))
        self._paths = [(tops.index(path[0]), path[0], path[1:]) for path in paths]
        self.kind: type[Any] = with_fields(tops)

    def values(self, objects: Sequence[Any]) -> tuple[Values, Values | None]:
        """The lengths and the targets of some objects, which are of the type `kind` or dicts."""
        found = [self._column(objects, *path) for path in self._paths]
        return found[0], found[1] if len(found) > 1 else None

    @staticmethod
    def _column(objects: Sequence[Any], index: int, key: str, below: tuple[str, ...]) -> Values:
        values = values_of(objects, index, key)
        return [walk(value, below) for value in values] if below else values


class _Entries:
    """The entries of a whole file, of those with one id the last: for faults, ids and places alone."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: list[tuple[str, int, Any]] | None = None
        self.replaced: dict[str, int] = {}

    def checked(self) -> list[tuple[str, int, Any]]:
        """Id, line and value of each. Raises ManifestError if one is malformed or no object."""
        if self._known is None:
            self._known = self._read()
        return self._known

    def place(self, start: int, index: int) -> Place:
        """Where an entry stands, counted from `start`."""
        name, line, _ = self.checked()[start + index]
        return Place(line, name)

    def ids(self, start: int, count: int) -> list[str]:
        """The ids of some consecutive entries."""
        return [name for name, _, _ in self.checked()[start : start + count]]

    def _read(self) -> list[tuple[str, int, Any]]:
        text = self._source.content().decode()
        if not text.lstrip().startswith("{"):
            seen = {"[": "a JSON list", "": "nothing"}.get(text.lstrip()[:1], "no JSON object")
            raise ManifestError(f"{self._source.path} has {seen} at its top level", _BY_ID)
        found: dict[str, tuple[str, int, Any]] = {}
        count = 0
        for item in explained_items(self._source, text, _BY_ID):
            count += 1
            name = str(item.key)
            found[name] = (name, item.line, item.value)
        for name, line, value in found.values():
            if not isinstance(value, dict):
                seen = f"the entry is no JSON object but {shortened(str(value))}"
                raise ManifestError(f"{self._source.path}, {Place(line, name)}: {seen}", _BY_ID)
        if count > len(found):
            self.replaced = {"replaced by a later entry with the same id": count - len(found)}
        return list(found.values())


def _first_entries(source: Source) -> list[dict[str, Any]]:
    if "first" not in source.memo:
        found = [item.value for item in first_items(source, PEEKED_ROWS) if item.key is not None]
        if not found or not all(isinstance(one, dict) for one in found):
            found = [entry for _, _, entry in itertools.islice(_Entries(source).checked(), PEEKED_ROWS)]
        source.memo["first"] = found
    return cast(list[dict[str, Any]], source.memo["first"])


def _by_pieces(source: Source, keys: _Keys) -> list[tuple[Values, Values | None]] | None:
    """The entries, without ever holding the file whole; None if that finds a fault, or two entries with one id.

    What comes of it is right: members that are valid JSON, piece by piece, are valid together.
    """
    decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, keys.kind])  # type: ignore[name-defined]
    found: list[tuple[Values, Values | None]] = []
    hashes: list[IntArray] = []
    try:
        for piece in _pieces(source):
            entries = decoder.decode(piece)
            # As many opening braces as there must be, so that no entry has replaced another with the same id.
            if _braces(piece) != len(entries) + 1:
                return None
            hashes.append(np.fromiter(map(hash, entries), dtype=np.int64, count=len(entries)))
            found.append(keys.values(list(entries.values())))
    except (msgspec.DecodeError, RecursionError):  # said better, or done better, one by one
        return None
    ids = np.sort(np.concatenate(hashes or [np.empty(0, dtype=np.int64)]))
    return None if (ids[1:] == ids[:-1]).any() else found


def _pieces(source: Source) -> Iterator[bytes]:
    """The entries of the file as objects of about 1 MiB each: cut where an entry ends and another begins.

    Should a cut be at the end of something within an entry, the piece is no valid JSON.
    """
    rest = b""
    for data in source.pieces():
        data = rest + data if rest else data.lstrip()
        ends = list(_BETWEEN_ENTRIES.finditer(data, max(0, len(data) - _SEARCHED_BYTES)))
        if ends:
            end = ends[-1].start() + 1
            yield data[:end] + b"}"
            data = b"{" + data[data.index(b",", end) + 1 :]
        elif len(data) > _LARGEST_ENTRY_BYTES:
            raise msgspec.DecodeError
        rest = data
    yield rest


def _braces(content: bytes) -> int:
    """How many opening braces there are, but for those that begin a string, as in "{data_root}/a.wav"."""
    data = np.frombuffer(content, dtype=np.uint8)
    begins = int(np.count_nonzero(data[:1] == ord("{")))
    return begins + int(np.count_nonzero((data[1:] == ord("{")) & (data[:-1] != ord('"'))))


NEMO = Nemo()
JSON_LIST = JsonList()
SPEECHBRAIN_JSON = SpeechBrainJson()
