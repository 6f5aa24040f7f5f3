"""What the files of an example hold, in a shard or a folder: audio, an array, JSON, or else text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from batchtune.manifests.base import Place, Rows
from batchtune.manifests.columns import last_part
from batchtune.manifests.headers import AudioLength, HeaderError, Payload
from batchtune.manifests.headers.arrays import ARRAY_SUFFIXES, array_shape
from batchtune.manifests.headers.audio import AUDIO_SUFFIXES, audio_length
from batchtune.manifests.json_objects import json_reader
from batchtune.manifests.values import Unreadable

JSON_SUFFIXES = frozenset(("json", "jsn"))
NUM_SAMPLES = "num_samples"
_LARGEST_TEXT_BYTES = 1024 * 1024
_LARGEST_JSON_BYTES = 16 * 1024 * 1024


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
def reader(suffix: str) -> Callable[[Payload], object]:
    """Make a function from a file to what it holds.

    Args:
        suffix: Of its name, in lower case.

    Returns:
        It gives an AudioLength, the shape of an array as a tuple, the value of JSON, a text without its last line's
        end; Unreadable for a damaged file.
    """
    kind = last_part(suffix)
    if kind in JSON_SUFFIXES:
        return _json(())
    if is_audio(suffix):
        return _explained(lambda payload: audio_length(payload, kind))
    return _explained(lambda payload: array_shape(payload, kind)) if is_array(suffix) else _text


@lru_cache(1000)
def column_reader(suffix: str, path: tuple[str, ...]) -> Callable[[Payload], object]:
    """Make a function from a file to a column's value.

    Args:
        suffix: Of its name, in lower case.
        path: The way to the value in JSON; `("num_samples",)` for those instead of the seconds of audio; another
            dimension of an array than the first, as text.
    """
    if is_json(suffix):
        return _json(path)
    if is_audio(suffix):
        kind = last_part(suffix)
        return _explained(lambda payload: part(audio_length(payload, kind), path))
    read = reader(suffix)
    return lambda payload: part(read(payload), path)


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
    """Return rows of examples with names: their lengths, and perhaps their target lengths."""
    lengths, targets = (*columns, None)[:2]
    assert lengths is not None
    return Rows(lengths, targets, lambda index: Place(None, names[index]), left_out, lambda: names)


def _explained(read: Callable[[Payload], object]) -> Callable[[Payload], object]:
    def explained(payload: Payload) -> object:
        try:
            return read(payload)
        except HeaderError as error:
            return Unreadable(error.reason, error.detail)

    return explained


def _json(path: tuple[str, ...]) -> Callable[[Payload], object]:
    decode = json_reader(path)

    def read(payload: Payload) -> object:
        if payload.size > _LARGEST_JSON_BYTES:
            return Unreadable("longer than 16 MiB of JSON", f"{payload.size:,} bytes")
        return decode(payload.read(0, payload.size).removeprefix(b"\xef\xbb\xbf"))

    return read


def _text(payload: Payload) -> object:
    if payload.size > _LARGEST_TEXT_BYTES:
        return Unreadable("longer than 1 MiB of text", f"{payload.size:,} bytes")
    try:
        text = payload.read(0, payload.size).decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        return Unreadable("not text", f"byte {error.start} is not UTF-8")
    return text if "\0" not in text else Unreadable("not text", "it holds NUL bytes")
