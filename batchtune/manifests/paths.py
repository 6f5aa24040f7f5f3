"""Dotted paths into nested values: `extra_info.question`, `prompt.0.content`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

_DEPTH = 4
_INDEX = re.compile(r"\[(\d{1,6})\]")


def dotted(key: str) -> str:
    """A path as it is written here: `prompt[0].content` becomes `prompt.0.content`."""
    return _INDEX.sub(r".\1", key)


def without_indices(key: str) -> str:
    """A path as columns are listed: `prompt.0.content` becomes `prompt.content`."""
    return ".".join(part for part in key.split(".") if not part.isdecimal())


def walk(value: object, path: Sequence[str]) -> object:
    """What stands at a path below a value, or None.

    A list on the way is indexed by a whole number, and else gives the list of what its items have there.
    """
    for position, part in enumerate(path):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if len(part) <= 9 and int(part) < len(value) else None
        elif isinstance(value, list):
            rest = path[position:]
            return [walk(item, rest) for item in value]
        else:
            return None
    return value


def flattened(entry: Mapping[str, object]) -> dict[str, object]:
    """An entry with its nested values under dotted names, four levels deep; what is not nested comes first."""
    found = {name: value for name, value in entry.items() if not _nested(value)}
    for name, value in entry.items():
        if _nested(value):
            for path in _paths(value, _DEPTH - 1):
                found.setdefault(".".join((name, *path)), walk(value, path))
    return found


def _nested(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value))


def _paths(value: object, depth: int) -> Iterator[tuple[str, ...]]:
    """The paths of the leaves below a mapping, or below the first mappings of a list."""
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, Mapping)), None)
    if not isinstance(value, Mapping):
        return
    for name, one in value.items():
        if _nested(one) and depth > 1:
            for path in _paths(one, depth - 1):
                yield (name, *path)
        else:
            yield (name,)
