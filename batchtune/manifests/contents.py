"""What the files of an example hold, in a shard or a folder: audio, an array, JSON, or else text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from batchtune.manifests.base import Place, Rows, last_part
from batchtune.manifests.headers import AudioLength, Payload
from batchtune.manifests.headers.arrays import ARRAY_SUFFIXES, array_shape
from batchtune.manifests.headers.audio import AUDIO_SUFFIXES, audio_length
from batchtune.manifests.json_objects import json_reader
from batchtune.manifests.values import Unreadable

JSON_SUFFIXES = frozenset(("json", "jsn"))
NUM_SAMPLES = "num_samples"
_LARGEST_TEXT_BYTES = 1024 * 1024
_LARGEST_JSON_BYTES = 16 * 1024 * 1024

Read = Callable[[Payload], object]


def is_audio(suffix: str) -> bool:
    """Return whether files with this suffix, in lower case, are audio."""
    return last_part(suffix) in AUDIO_SUFFIXES


def is_array(suffix: str) -> bool:
    """Return whether files with this suffix, in lower case, are arrays."""
    return last_part(suffix) in ARRAY_SUFFIXES


def is_json(suffix: str) -> bool:
    """Return whether files with this suffix, in lower case, are JSON."""
    return last_part(suffix) in JSON_SUFFIXES


@lru_cache(1000)
def reader(suffix: str) -> Read:
    """Make a function from a file with this suffix, in lower case, to its content.

    That is an AudioLength, the shape of an array as a tuple, the value of JSON, or a text without its last line's end;
    Unreadable for a damaged file.
    """
    kind = last_part(suffix)
    if kind in JSON_SUFFIXES:
        return column_reader(suffix, ())
    read: Callable[[Payload, str], object] = _text
    if is_audio(suffix):
        read = audio_length
    elif is_array(suffix):
        read = array_shape

    def content(payload: Payload) -> object:
        try:
            return read(payload, kind)
        except Unreadable as error:
            return error.with_traceback(None)

    return content


@lru_cache(1000)
def column_reader(suffix: str, path: tuple[str, ...]) -> Read:
    """Make a function from a file with this suffix, in lower case, to a column's value.

    The path leads to the value in JSON; `("num_samples",)` means those instead of the seconds of audio; of an array
    it is another dimension than the first, as text.
    """
    if not is_json(suffix):
        read = reader(suffix)
        return lambda payload: part(read(payload), path)
    decode = json_reader(path)

    def value(payload: Payload) -> object:
        if payload.size > _LARGEST_JSON_BYTES:
            return Unreadable("longer than 16 MiB of JSON", f"{payload.size:,} bytes")
        return decode(payload.read(0, payload.size).removeprefix(b"\xef\xbb\xbf"))

    return value


def part(content: object, path: tuple[str, ...] = ()) -> object:
    """Return a column's value in what `reader` made of a file; None without one."""
    if isinstance(content, AudioLength):
        return content.num_samples if path else content.seconds
    if isinstance(content, tuple):
        axis = ".".join(path) or "0"
        if axis.isdecimal() and int(axis) >= len(content):
            return Unreadable("too few dimensions", f"of shape {content}")
        return content[int(axis)] if axis.isdecimal() else None
    return None if path and not isinstance(content, Unreadable) else content


def named_rows(names: Sequence[str], columns: Sequence[Sequence[object]], left_out: Mapping[str, int]) -> Rows:
    """Return rows of examples with names."""
    return Rows(columns, lambda index: Place(None, names[index]), lambda: names, left_out)


def _text(payload: Payload, _: str) -> str:
    if payload.size > _LARGEST_TEXT_BYTES:
        raise Unreadable("longer than 1 MiB of text", f"{payload.size:,} bytes")
    try:
        text = payload.read(0, payload.size).decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise Unreadable("not text", f"byte {error.start} is not UTF-8") from None
    if "\0" in text:
        raise Unreadable("not text", "it holds NUL bytes")
    return text
