"""JSON of any objects: one on every line (NeMo), one list of them, or one object of objects (SpeechBrain)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from batchtune.lengths import Unit
from batchtune.manifests.base import Column, Format, Rows
from batchtune.manifests.columns import PEEKED_ROWS, id_name, summarise, walk
from batchtune.manifests.json_objects import Objects, first_keys, values_of, with_fields
from batchtune.manifests.source import Head, Source

# What a folder of JSON Lines is called, and the endings of their names.
JSON_LINES = ("JSON Lines", (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".jsonl.xz"))


class Nemo(Format):
    """JSON Lines, as NeMo and request traces write it; blank lines are passed over."""

    name = "nemo"
    description = "one JSON object on every line"
    folder_kind: ClassVar[tuple[str, tuple[str, ...]] | None] = JSON_LINES
    hint: ClassVar[str] = "This format holds one whole JSON object on every line."
    opening: ClassVar[str | None] = None

    def fits(self, head: Head) -> bool:
        """Return whether the file begins with a JSON object that is not an object of objects."""
        return head.data.lstrip().startswith(b"{") and not _holds_objects_by_id(head)

    def columns(self, source: Source) -> Sequence[Column]:
        """Return all keys of the first objects, those of nested ones under dotted names."""
        return summarise(self._first(source))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """Yield the rows; the keys may be dotted paths. A key of the object itself that holds dots wins over a path."""
        names = {name for entry in self._first(source) for name in entry}
        asked = [length_key] if target_key is None else [length_key, target_key]
        paths = [(key,) if key in names else tuple(key.split(".")) for key in asked]
        tops = list(dict.fromkeys(path[0] for path in paths))
        columns: list[Callable[[Sequence[Any]], list[object]]] = [
            partial(_column, tops.index(path[0]), path) for path in paths
        ]
        yield from Objects(source, with_fields(tops), self.hint, id_name(names), self.opening).rows(*columns)

    def _first(self, source: Source) -> list[dict[str, Any]]:
        if "first" not in source.memo:
            kind = cast(type[dict[str, Any]], dict[str, Any])
            source.memo["first"] = Objects(source, kind, self.hint, None, self.opening).first(PEEKED_ROWS)
        return cast(list[dict[str, Any]], source.memo["first"])


def _column(index: int, path: Sequence[str], objects: Sequence[Any]) -> list[object]:
    values = values_of(objects, index, path[0])
    return [walk(value, path[1:]) for value in values] if path[1:] else values


class JsonList(Nemo):
    """A list of objects; messages name their lines, and their ids or else their numbers, from 1."""

    name = "json-list"
    description = "one JSON list of objects"
    folder_kind = None
    hint = 'This format is one JSON list of objects: [{"text": "…", "duration": 3.2}, …].'
    opening = "["

    def fits(self, head: Head) -> bool:
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

    def fits(self, head: Head) -> bool:
        """Return whether the file begins with a JSON object whose first value is an object."""
        return _holds_objects_by_id(head)


def _holds_objects_by_id(head: Head) -> bool:
    """Tell whether a JSON file that begins so is one object of objects, rather than an object on every line."""
    if not head.data.lstrip().startswith(b"{"):
        return False
    try:
        first = json.loads(head.lines[0])
    except (ValueError, RecursionError):
        token = next(iter(first_keys(head).values()), None)
        return token == "{" or (token is None and head.data.strip(b"{} \t\r\n") == b"")
    return len(head.lines) == 1 and head.complete and all(isinstance(value, dict) for value in first.values())


NEMO = Nemo()
JSON_LIST = JsonList()
SPEECHBRAIN_JSON = SpeechBrainJson()
