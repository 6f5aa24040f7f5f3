"""NeMo's manifests, and any other JSON Lines: one JSON object on every line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from batchtune.errors import ManifestError
from batchtune.lengths import Unit
from batchtune.manifests.columns import PEEKED_ROWS, id_name, summarise
from batchtune.manifests.jsontext import (
    Entry,
    decoded,
    entry_decoder,
    holds_object_of_objects,
    objects,
    value,
    values,
)
from batchtune.manifests.rows import Column, Place, Rows
from batchtune.manifests.source import Block, Head, Source

_HINT = "This format holds one whole JSON object on every line."
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Nemo:
    """JSON Lines, as NeMo, Lhotse and request traces write it; blank lines are passed over."""

    name = "nemo"
    description = "one JSON object on every line"
    units: Mapping[str, Unit] = {}
    named_columns = True

    def fits(self, head: Head) -> bool:
        """Whether the file begins with a JSON object that is no object of objects."""
        return head.data.lstrip().startswith(b"{") and not holds_object_of_objects(head)

    def columns(self, source: Source) -> Sequence[Column]:
        """All keys of the first objects."""
        lines = itertools.islice(_objects(source), PEEKED_ROWS)
        return summarise(objects(decoded(source.path, data, _OBJECT, line, _HINT) for line, data in lines))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """One `Rows` for every block of the file."""
        id_key = id_name(column.name for column in self.columns(source))
        decoder = entry_decoder(length_key, target_key, id_key)
        for block in source.blocks():
            numbered = list(_lines(source, block))
            entries = [decoded(source.path, data, decoder, line, _HINT) for line, data in numbered]
            yield _rows(entries, [line for line, _ in numbered], target_key is not None)


def _rows(entries: Sequence[Entry], lines: Sequence[int], with_targets: bool) -> Rows:
    def place(index: int) -> Place:
        name = value(entries[index].id)
        return Place(lines[index], name if isinstance(name, str) else None)

    targets = values([entry.target for entry in entries]) if with_targets else None
    return Rows(values([entry.length for entry in entries]), targets, place)


def _objects(source: Source) -> Iterator[tuple[int, bytes]]:
    for block in source.blocks():
        yield from _lines(source, block)


def _lines(source: Source, block: Block) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(block.data.split(b"\n"), block.first_line):
        stripped = line.strip()
        if not stripped:
            continue
        if not stripped.startswith(b"{"):
            raise ManifestError(f"{source.path}, line {number} is no JSON object", _HINT)
        yield number, line


FORMAT = Nemo()
