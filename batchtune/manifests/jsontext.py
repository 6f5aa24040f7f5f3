"""JSON read by msgspec, with what it leaves to be wished for: places of errors, `NaN` and `Infinity`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from batchtune.errors import ManifestError
from batchtune.manifests.paths import walk
from batchtune.manifests.source import Head

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
KeyPath: TypeAlias = tuple[str, ...]

MISSING = msgspec.Raw(b"null")

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
# A literal, or a string, closed or not: a broken text is then passed over once, not once for every quote.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"?|-?\b(?:NaN|Infinity)\b', re.DOTALL)
_AT_BYTE = re.compile(r"byte (\d+)")
_LARGEST_PARSED_TWICE = 64 * 1024 * 1024
_NO_SPACE = re.compile(rb"\S")
_KEY = re.compile(r'\s*,?\s*"(?:[^"\\]|\\.)*"\s*:\s*', re.DOTALL)
_FIRST_VALUE_IS_OBJECT = re.compile(rb'\s*\{\s*(?:"(?:[^"\\]|\\.)*"\s*:\s*\{|\}\s*$)', re.DOTALL)


class Decoder(Protocol[T_co]):
    """What is used of `msgspec.json.Decoder`."""

    def decode(self, buf: bytes, /) -> T_co:
        """JSON to a value."""


class Entry(msgspec.Struct):
    """The values of one example that matter, as the JSON text that they are.

    As text even those values pass that msgspec refuses (1e400), so that they can be reported like any other
    invalid length.
    """

    length: msgspec.Raw = MISSING
    target: msgspec.Raw = MISSING
    id: msgspec.Raw = MISSING


class FastEntry(msgspec.Struct, gc=False):
    """The same, decoded at once. Only the fields asked for are built, which is what makes it fast."""

    length: Any = None
    target: Any = None


@dataclass(frozen=True, slots=True)
class Keys:
    """Which values of an object are wanted.

    Attributes:
        length: Key of the object, then the path below it.
        target: Likewise, or None.
        id: Key of the object, or None.
    """

    length: KeyPath
    target: KeyPath | None = None
    id: str | None = None

    @classmethod
    def of(cls, top_level: Collection[str], length: str, target: str | None, id: str | None = None) -> Keys:
        """From dotted names; a key of the object itself that holds dots wins over a path."""

        def path(name: str) -> KeyPath:
            return (name,) if name in top_level else tuple(name.split("."))

        return cls(path(length), None if target is None else path(target), id)

    def rows(
        self, lengths: Sequence[object], targets: Sequence[object]
    ) -> tuple[Sequence[object], Sequence[object] | None]:
        """The values at the paths, given those of the objects' own keys."""
        if self.target is None:
            return _below(lengths, self.length), None
        if self.target[0] == self.length[0]:
            targets = lengths
        return _below(lengths, self.length), _below(targets, self.target)


def _below(values: Sequence[object], path: KeyPath) -> Sequence[object]:
    return [walk(one, path[1:]) for one in values] if len(path) > 1 else values


class _AnyKeyDecoder:
    """Decodes entries whose keys can't be the names of a struct's fields; several times slower."""

    def __init__(self, names: Mapping[str, str | None]) -> None:
        self._names = names

    def decode(self, buf: bytes, /) -> Entry:
        found = _OBJECT.decode(buf)
        return Entry(**{field: found[name] for field, name in self._names.items() if name in found})


def entry_decoder(keys: Keys) -> Decoder[Entry]:
    """A decoder of JSON objects that keeps the text of these keys' values only."""
    names = _top_names(keys)
    # Named once more, since only a class's own fields are renamed.
    kind = _renamed("Entry", Entry, [(field, msgspec.Raw, MISSING) for field in names], names)
    return _AnyKeyDecoder(names) if kind is None else msgspec.json.Decoder(kind)


def fast_entry(keys: Keys, namespace: dict[str, Any] | None = None) -> type[FastEntry] | None:
    """The type of the objects, to be decoded by msgspec; None where a key can't be the name of a field."""
    names = _top_names(keys)
    names.pop("id")
    return _renamed("FastEntry", FastEntry, [(field, Any, None) for field in names], names, namespace)


def _top_names(keys: Keys) -> dict[str, str | None]:
    length, target = keys.length[0], keys.target[0] if keys.target else None
    return {"length": length, "target": None if target == length else target, "id": _unless(keys.id, length, target)}


def _unless(name: str | None, *taken: str | None) -> str | None:
    return None if name in taken else name


def _renamed(
    name: str,
    base: type[T],
    fields: list[tuple[str, Any, Any]],
    names: Mapping[str, str | None],
    namespace: dict[str, Any] | None = None,
) -> type[T] | None:
    # A field that is not wanted gets a name that no key has, or it would be read from a key of its own name.
    keys = {field: f"\ue000{field}" if key is None else key for field, key in names.items()}
    try:
        return msgspec.defstruct(name, fields, bases=(base,), rename=keys, gc=False, namespace=namespace)  # type: ignore[return-value]
    except ValueError:  # a key with a quote, a backslash or a control character
        return None


def first_character(content: bytes) -> bytes:
    """The first byte that is no white space; nothing where there is none."""
    found = _NO_SPACE.search(content)
    return found[0] if found else b""


def decoded(path: Path, data: bytes, decoder: Decoder[T], first_line: int = 1, hint: str | None = None) -> T:
    """Decodes JSON; `NaN` and `Infinity`, which Python's json writes, pass as the strings of that name.

    Args:
        path: For messages.
        data: UTF-8.
        decoder: Of msgspec.
        first_line: The line on which `data` begin, for messages.
        hint: What to do where it is malformed.

    Raises:
        ManifestError: It is malformed, breaks off (the message has line and column), or is of another shape.
    """
    try:
        return decoder.decode(data)
    except RecursionError:
        raise ManifestError(f"{path}, line {first_line}: the JSON is nested too deeply", hint) from None
    except msgspec.ValidationError as error:
        raise ManifestError(
            f"{path}, line {first_line}: the JSON has another shape than needed: {error}", hint
        ) from None
    except msgspec.DecodeError as error:
        if b"NaN" in data or b"Infinity" in data:
            try:
                return decoder.decode(_TOKEN.sub(_quoted, data))
            except msgspec.DecodeError:
                pass  # the place in the original text is wanted
        raise _malformed(path, data, first_line, str(error), hint) from None


def values(raws: Sequence[msgspec.Raw]) -> Sequence[object]:
    """The Python values of some JSON texts; numbers beyond float64 become infinite."""
    joined = b"[" + b",".join(raws) + b"]"
    try:
        found: list[object] = msgspec.json.decode(joined, type=list[Any])
    except msgspec.DecodeError:
        found = json.loads(joined, parse_int=float)
    return found


def value(raw: msgspec.Raw) -> object:
    """The Python value of one JSON text."""
    return values([raw])[0]


def objects(entries: Iterable[dict[str, msgspec.Raw]]) -> Iterable[dict[str, object]]:
    """Entries with their values decoded."""
    for entry in entries:
        yield dict(zip(entry, values(list(entry.values())), strict=True))


def first_objects(head: Head) -> list[dict[str, object]]:
    """The entries of an object of objects that the head of the file holds whole."""
    text = head.data.decode(errors="replace")
    decoder = json.JSONDecoder()
    found: list[dict[str, object]] = []
    start = text.find("{") + 1
    while start and (key := _KEY.match(text, start)):
        try:
            value, end = decoder.raw_decode(text, key.end())
        except (ValueError, RecursionError):
            break
        if not isinstance(value, dict):
            return []
        found.append(value)
        start = end
    return found


def holds_object_of_objects(head: Head) -> bool:
    """Whether a JSON file that begins so is one object of objects, rather than an object on every line."""
    if len(head.lines) == 1 and head.complete:
        try:
            entries = _OBJECT.decode(_TOKEN.sub(_quoted, head.data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        else:
            return all(bytes(raw).startswith(b"{") for raw in entries.values())
    elif len(head.lines) > 1:
        try:
            _OBJECT.decode(_TOKEN.sub(_quoted, head.lines[0].encode()))
            return False  # the first line is an object of its own
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    return _FIRST_VALUE_IS_OBJECT.match(head.data) is not None


def _quoted(match: re.Match[bytes]) -> bytes:
    token = match[0]
    return token if token.startswith(b'"') else b'"' + token + b'"'


def _malformed(path: Path, data: bytes, first_line: int, reason: str, hint: str | None) -> ManifestError:
    """The error with line and column, by Python's own parser: msgspec has none where the text breaks off."""
    if len(data) > _LARGEST_PARSED_TWICE:  # Python's parser holds it many times
        at = _AT_BYTE.search(reason)
        line = first_line + data.count(b"\n", 0, int(at[1]) if at else len(data))
        return ManifestError(f"{path}, line {line}: the JSON is malformed: {reason}", hint)
    text = data.decode()
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        place = f"{path}, line {line}, column {error.colno}"
        if not text[error.pos :].strip() or error.msg.startswith("Unterminated string"):
            return ManifestError(f"{place}: the JSON breaks off", hint)
        return ManifestError(f"{place}: the JSON is malformed: {error.msg}", hint)
    except (ValueError, RecursionError):
        pass
    return ManifestError(f"{path}, line {first_line}: the JSON can't be decoded: {reason}", hint)
