"""SpeechBrain's JSON manifests: one object of objects, id → entry."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

import msgspec
import numpy as np

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import IntArray, Unit
from batchtune.manifests.columns import PEEKED_ROWS, summarise
from batchtune.manifests.jsontext import (
    FastEntry,
    Keys,
    decoded,
    entry_decoder,
    fast_entry,
    first_character,
    first_objects,
    holds_object_of_objects,
    objects,
    values,
)
from batchtune.manifests.rows import Column, Place, Rows
from batchtune.manifests.source import Head, Source

_HINT = 'This format is one JSON object of objects: {"id": {"duration": 3.2, …}, …}.'
_SEARCHED_BYTES = 64 * 1024
_LARGEST_ENTRY_BYTES = 64 * 1024 * 1024
_BETWEEN_ENTRIES = re.compile(rb'\}\s*,\s*"[^"\\]*"\s*:\s*\{')
_ENTRIES = msgspec.json.Decoder(dict[str, msgspec.Raw])


class SpeechBrainJson:
    """As SpeechBrain's `DynamicItemDataset.from_json` reads it: of entries with one id, the last counts."""

    name = "speechbrain-json"
    description = "one JSON object of objects, id → entry"
    units: Mapping[str, Unit] = {"length": "s", "len": "s"}
    named_columns = True

    def fits(self, head: Head) -> bool:
        """Whether the file begins with a JSON object whose first value is an object."""
        return head.data.lstrip().startswith(b"{") and holds_object_of_objects(head)

    def columns(self, source: Source) -> Sequence[Column]:
        """All keys of the first entries, those of nested ones under dotted names."""
        return summarise(_first(source))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The entries, some thousands at a time."""
        names = {name for entry in _first(source) for name in entry}
        keys = Keys.of(names, length_key, target_key)
        found = _by_pieces(source, keys) or _one_by_one(source, keys)
        places = _Places(source)
        left_out, start = found.left_out, 0
        for lengths, targets in found.values:
            ids = partial(places.ids, start, len(lengths))
            yield Rows(*keys.rows(lengths, targets), partial(places, start), left_out, ids)
            left_out, start = {}, start + len(lengths)


@dataclass(frozen=True, slots=True)
class _Found:
    """The entries of a file.

    Attributes:
        values: Chunks of the values of the length's and the target's key.
        left_out: Reason → number of entries.
    """

    values: Sequence[tuple[Sequence[object], Sequence[object]]]
    left_out: Mapping[str, int]


class _Places:
    """Where entries stand, and their ids: worked out, from the whole file, when first asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __call__(self, start: int, index: int) -> Place:
        """The place of an entry."""
        name = self._ids[start + index]
        return Place(_line(self._content, self._raws[name]), name)

    def ids(self, start: int, count: int) -> list[str]:
        """The ids of some consecutive entries."""
        return self._ids[start : start + count]

    @cached_property
    def _content(self) -> bytes:
        return self._source.content()

    @cached_property
    def _raws(self) -> dict[str, msgspec.Raw]:
        return _entries(self._source, self._content)

    @cached_property
    def _ids(self) -> list[str]:
        return list(self._raws)


def _by_pieces(source: Source, keys: Keys) -> _Found | None:
    """The entries, without ever holding the file whole; None where that finds a fault, or two entries with one id.

    What comes of it is right: members that are valid JSON, piece by piece, are valid together.
    """
    kind = fast_entry(keys)
    if kind is None:
        return None
    decoder: msgspec.json.Decoder[dict[str, FastEntry]] = msgspec.json.Decoder(dict[str, kind])  # type: ignore[valid-type]
    values: list[tuple[Sequence[object], Sequence[object]]] = []
    hashes: list[IntArray] = []
    try:
        for piece in _pieces(source):
            entries = decoder.decode(piece)
            # As many opening braces as there must be, so that no entry has replaced another with the same id.
            if _braces(piece) != len(entries) + 1:
                return None
            hashes.append(np.fromiter(map(hash, entries), dtype=np.int64, count=len(entries)))
            chunk = entries.values()
            values.append(([entry.length for entry in chunk], [entry.target for entry in chunk] if keys.target else ()))
    except (msgspec.DecodeError, RecursionError):  # said better, or done better, one by one
        return None
    ids = np.sort(np.concatenate(hashes or [np.empty(0, dtype=np.int64)]))
    return None if (ids[1:] == ids[:-1]).any() else _Found(values, {})


def _pieces(source: Source) -> Iterator[bytes]:
    """The entries of the file as objects of about 1 MiB each: cut where an entry ends and another begins."""
    rest = b"{"
    first = True
    for data in source.pieces():
        if first:
            data = data.lstrip()
            first = not data
            if first:
                continue
            if not data.startswith(b"{"):
                raise msgspec.DecodeError
            data = data[1:]
        data = rest + data
        end = _last_end(data)
        if end is None:
            rest = data
            if len(rest) > _LARGEST_ENTRY_BYTES:
                raise msgspec.DecodeError
            continue
        yield data[:end] + b"}"
        rest = b"{" + data[data.index(b",", end) + 1 :]
    yield rest


def _last_end(data: bytes) -> int | None:
    """Where the last entry ends that another follows, near the end of the data; None where none does.

    Should that be the end of something within an entry, the piece is no valid JSON.
    """
    ends = [match.start() + 1 for match in _BETWEEN_ENTRIES.finditer(data, max(0, len(data) - _SEARCHED_BYTES))]
    return ends[-1] if ends else None


def _braces(content: bytes) -> int:
    """How many opening braces there are, but for those that begin a string, as in "{data_root}/a.wav"."""
    data = np.frombuffer(content, dtype=np.uint8)
    begins = int(np.count_nonzero(data[:1] == ord("{")))
    return begins + int(np.count_nonzero((data[1:] == ord("{")) & (data[:-1] != ord('"'))))


def _one_by_one(source: Source, keys: Keys) -> _Found:
    """The entries, of entries with one id the last. Raises ManifestError where one is malformed."""
    content = source.content()
    raws = _entries(source, content)
    _check_objects(source, content, raws)
    decoder = entry_decoder(keys)
    entries = [decoder.decode(raw) for raw in raws.values()]
    lengths = values([entry.length for entry in entries])
    targets = values([entry.target for entry in entries]) if keys.target else ()
    replaced = _count_entries(source, content) - len(raws)
    left_out = {"replaced by a later entry with the same id": replaced} if replaced else {}
    return _Found([(lengths, targets)] if raws else [], left_out)


def _first(source: Source) -> list[dict[str, object]]:
    """The first entries: those that the head of the file holds whole or, where it holds none, of all."""
    if "first" not in source.memo:
        source.memo["first"] = first_objects(source.head) or _read_first(source)
    return cast(list[dict[str, object]], source.memo["first"])


def _read_first(source: Source) -> list[dict[str, object]]:
    content = source.content()
    raws = dict(itertools.islice(_entries(source, content).items(), PEEKED_ROWS))
    _check_objects(source, content, raws)
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    return list(objects(decoder.decode(raw) for raw in raws.values()))


def _entries(source: Source, content: bytes) -> dict[str, msgspec.Raw]:
    first = first_character(content)
    if first != b"{":
        seen = {b"[": "a JSON list", b"": "nothing"}.get(first, "no JSON object")
        raise ManifestError(f"{source.path} has {seen} at its top level", _HINT)
    return decoded(source.path, content, _ENTRIES, hint=_HINT)


def _count_entries(source: Source, content: bytes) -> int:
    """The number of entries that stand in the file."""
    counter = itertools.count()
    kind = msgspec.defstruct("Counted", [], namespace={"__post_init__": lambda _: next(counter)})
    decoded(source.path, content, msgspec.json.Decoder(dict[str, kind]), hint=_HINT)  # type: ignore[valid-type]
    return next(counter)


def _check_objects(source: Source, content: bytes, raws: Mapping[str, msgspec.Raw]) -> None:
    for name, raw in raws.items():
        if memoryview(raw)[0] != ord("{"):
            place = Place(_line(content, raw), name)
            raise ManifestError(
                f"{source.path}, {place}: the entry is no JSON object but {shortened(bytes(raw).decode())}",
                _HINT,
            )


def _line(content: bytes, raw: msgspec.Raw) -> int | None:
    """The line on which an entry begins: `raw` is a view of `content`, unless that had to be rewritten."""
    offset = _address(raw) - _address(content)
    return content.count(b"\n", 0, offset) + 1 if 0 <= offset < len(content) else None


def _address(data: bytes) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


FORMAT = SpeechBrainJson()
