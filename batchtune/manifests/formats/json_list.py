"""One JSON list of objects, as many data sets of texts come."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import cast

import msgspec

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.columns import PEEKED_ROWS, id_name, summarise
from batchtune.manifests.jsontext import (
    FastEntry,
    Keys,
    decoded,
    entry_decoder,
    fast_entry,
    first_character,
    objects,
    value,
    values,
)
from batchtune.manifests.rows import Column, Place, Rows
from batchtune.manifests.source import Head, Source

_HINT = 'This format is one JSON list of objects: [{"text": "…", "duration": 3.2}, …].'
_CHUNK = 65_536
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonList:
    """A list of objects; where they stand is told by their number, from 1, and their id where they have one."""

    name = "json-list"
    description = "one JSON list of objects"
    units: Mapping[str, Unit] = {}
    named_columns = True

    def fits(self, head: Head) -> bool:
        """Whether the file begins with a list whose first item is an object."""
        start = head.data.lstrip()
        return start.startswith(b"[") and start[1:].lstrip()[:1] in (b"{", b"]")

    def columns(self, source: Source) -> Sequence[Column]:
        """All keys of the first objects, those of nested ones under dotted names."""
        return summarise(_opened(source).first)

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The objects, some ten thousand at a time."""
        listed = _opened(source)
        names = {name for entry in listed.first for name in entry}
        keys = Keys.of(names, length_key, target_key, id_name(names))
        entries = iter(listed.entries(keys))
        start = 0
        while chunk := list(itertools.islice(entries, _CHUNK)):
            found = keys.rows([entry.length for entry in chunk], [entry.target for entry in chunk])
            yield Rows(*found, partial(listed.place, keys, start))
            start += len(chunk)
        source.report(1.0)


class _Listed:
    """The content of a source, and what is worked out of it when first asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._content = source.content()

    @cached_property
    def _raws(self) -> list[msgspec.Raw]:
        first = first_character(self._content)
        if first != b"[":
            seen = "a JSON object" if first == b"{" else "no JSON list"
            raise ManifestError(f"{self._source.path} has {seen} at its top level", _HINT)
        raws = decoded(self._source.path, self._content, _LIST, hint=_HINT)
        for number, raw in enumerate(raws, 1):
            if memoryview(raw)[0] != ord("{"):
                seen = shortened(bytes(raw).decode())
                raise ManifestError(f"{self._source.path}, item {number} is no JSON object but {seen}", _HINT)
        return raws

    @cached_property
    def first(self) -> list[dict[str, object]]:
        """The first objects."""
        return list(objects(_OBJECT.decode(raw) for raw in self._raws[:PEEKED_ROWS]))

    def entries(self, keys: Keys) -> list[FastEntry]:
        """The values of all objects that these keys name."""
        kind = fast_entry(keys)
        if kind is not None:
            try:
                return cast(list[FastEntry], msgspec.json.decode(self._content, type=list[kind]))  # type: ignore[valid-type]
            except (msgspec.DecodeError, RecursionError):  # said better, or done better, one by one
                pass
        decoder = entry_decoder(keys)
        found = [decoder.decode(raw) for raw in self._raws]
        lengths, targets = values([one.length for one in found]), values([one.target for one in found])
        return [FastEntry(*pair) for pair in zip(lengths, targets, strict=True)]

    def place(self, keys: Keys, start: int, index: int) -> Place:
        """Where an object stands: an item of the list."""
        name = value(entry_decoder(keys).decode(self._raws[start + index]).id)
        return Place(None, name if isinstance(name, str) else f"item {start + index + 1}")


def _opened(source: Source) -> _Listed:
    if "listed" not in source.memo:
        source.memo["listed"] = _Listed(source)
    return cast(_Listed, source.memo["listed"])


FORMAT = JsonList()
