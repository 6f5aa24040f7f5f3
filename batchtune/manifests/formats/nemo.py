"""NeMo's manifests, and any other JSON Lines: one JSON object on every line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import cast

import msgspec

from batchtune.errors import ManifestError
from batchtune.lengths import Unit
from batchtune.manifests.columns import PEEKED_ROWS, id_name, summarise
from batchtune.manifests.jsontext import (
    Decoder,
    Entry,
    FastEntry,
    Keys,
    decoded,
    entry_decoder,
    fast_entry,
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
    """JSON Lines, as NeMo and request traces write it; blank lines are passed over."""

    name = "nemo"
    description = "one JSON object on every line"
    units: Mapping[str, Unit] = {}
    named_columns = True

    def fits(self, head: Head) -> bool:
        """Whether the file begins with a JSON object that is no object of objects."""
        return head.data.lstrip().startswith(b"{") and not holds_object_of_objects(head)

    def columns(self, source: Source) -> Sequence[Column]:
        """All keys of the first objects, those of nested ones under dotted names."""
        return summarise(_first(source))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """One `Rows` for every block of the file."""
        names = {name for entry in _first(source) for name in entry}
        keys = Keys.of(names, length_key, target_key, id_name(names))
        reader = _Reader(source, keys)
        for block in source.blocks():
            yield reader.rows(block)


class _Reader:
    """Blocks of lines → rows: as fast as msgspec is where nothing is wrong, else line by line."""

    def __init__(self, source: Source, keys: Keys) -> None:
        self._source = source
        self._keys = keys
        self._decoder: Decoder[Entry] = entry_decoder(keys)
        kind = fast_entry(keys)
        self._fast = None if kind is None else msgspec.json.Decoder(kind)

    def rows(self, block: Block) -> Rows:
        """The rows of a block. Raises ManifestError where a line is no JSON object."""
        entries = self._decoded_at_once(block)
        if entries is not None:
            found = self._keys.rows([entry.length for entry in entries], [entry.target for entry in entries])
            return Rows(*found, self._places(block))
        numbered = list(_lines(self._source, block))
        raws = [decoded(self._source.path, data, self._decoder, line, _HINT) for line, data in numbered]
        targets = values([raw.target for raw in raws]) if self._keys.target else ()
        return Rows(*self._keys.rows(values([raw.length for raw in raws]), targets), self._places(block))

    def _decoded_at_once(self, block: Block) -> list[FastEntry] | None:
        """The objects, or None unless each stands on a line of its own, without a fault."""
        if self._fast is None or not block.all_begin_with("{"):
            return None
        try:
            entries = self._fast.decode_lines(block.data)
        except (msgspec.DecodeError, RecursionError):  # said better, or done better, line by line
            return None
        return entries if len(entries) == block.lines else None

    def _places(self, block: Block) -> _Places:
        return _Places(self._source, block, self._decoder)


class _Places:
    """Where the rows of a block stand: worked out when first asked for."""

    def __init__(self, source: Source, block: Block, decoder: Decoder[Entry]) -> None:
        self._source = source
        self._block = block
        self._decoder = decoder

    def __call__(self, index: int) -> Place:
        """The place of a row of the block."""
        line, data = self._numbered[index]
        name = value(decoded(self._source.path, data, self._decoder, line).id)
        return Place(line, name if isinstance(name, str) else None)

    @cached_property
    def _numbered(self) -> list[tuple[int, bytes]]:
        return list(_lines(self._source, self._block))


def _first(source: Source) -> list[dict[str, object]]:
    """The first objects."""
    if "first" not in source.memo:
        source.memo["first"] = _read_first(source)
    return cast(list[dict[str, object]], source.memo["first"])


def _read_first(source: Source) -> list[dict[str, object]]:
    lines = (numbered for block in source.blocks() for numbered in _lines(source, block))
    first = itertools.islice(lines, PEEKED_ROWS)
    return list(objects(decoded(source.path, data, _OBJECT, line, _HINT) for line, data in first))


def _lines(source: Source, block: Block) -> Iterator[tuple[int, bytes]]:
    if block.data.isspace():
        return
    for number, line in enumerate(block.data.split(b"\n"), block.first_line):
        stripped = line.strip()
        if not stripped:
            continue
        if not stripped.startswith(b"{"):
            raise ManifestError(f"{source.path}, line {number} is no JSON object", _HINT)
        yield number, line


FORMAT = Nemo()
