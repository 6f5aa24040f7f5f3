"""SpeechBrain's JSON manifests: one object of objects, id → entry."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from batchtune.errors import ManifestError
from batchtune.lengths import Unit
from batchtune.manifests.columns import PEEKED_ROWS, summarise
from batchtune.manifests.jsontext import (
    Entry,
    decoded,
    entry_decoder,
    holds_object_of_objects,
    objects,
    values,
)
from batchtune.manifests.rows import Column, Place, Rows
from batchtune.manifests.source import Head, Source, shortened

_HINT = 'This format is one JSON object of objects: {"id": {"duration": 3.2, …}, …}.'
_CHUNK = 65_536
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
        """All keys of the first entries."""
        content = source.content()
        raws = dict(itertools.islice(_entries(source, content).items(), PEEKED_ROWS))
        _check_objects(source, content, raws)
        decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
        return summarise(objects(decoder.decode(raw) for raw in raws.values()))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The entries, some ten thousand at a time."""
        content = source.content()
        raws = _entries(source, content)
        _check_objects(source, content, raws)
        decoder = entry_decoder(length_key, target_key, None)
        replaced = _count_entries(source, content) - len(raws)
        left_out = {"replaced by a later entry with the same id": replaced} if replaced else {}
        items = iter(raws.items())
        while chunk := list(itertools.islice(items, _CHUNK)):
            entries = [decoder.decode(raw) for _, raw in chunk]
            yield _rows(content, chunk, entries, target_key is not None, left_out)
            left_out = {}


def _rows(
    content: bytes,
    chunk: Sequence[tuple[str, msgspec.Raw]],
    entries: Sequence[Entry],
    with_targets: bool,
    left_out: Mapping[str, int],
) -> Rows:
    def place(index: int) -> Place:
        name, raw = chunk[index]
        return Place(_line(content, raw), name)

    targets = values([entry.target for entry in entries]) if with_targets else None
    return Rows(values([entry.length for entry in entries]), targets, place, left_out)


def _entries(source: Source, content: bytes) -> dict[str, msgspec.Raw]:
    first = content.lstrip()[:1]
    if first != b"{":
        seen = {b"[": "a JSON list", b"": "nothing"}.get(first, "no JSON object")
        raise ManifestError(f"{source.path} has {seen} at its top level", _HINT)
    return decoded(source.path, content, _ENTRIES, hint=_HINT)


def _count_entries(source: Source, content: bytes) -> int:
    """The number of entries that stand in the file: a dict keeps only one of those with the same id."""
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
