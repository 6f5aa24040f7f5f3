"""Values of columns in one file of an example: the length of audio, the shape of an array, JSON, text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from batchtune.manifests.base import Place, Rows, last_part
from batchtune.manifests.formats.json import json_reader
from batchtune.manifests.headers import (
    ARRAY_SUFFIXES,
    AUDIO_SUFFIXES,
    AudioLength,
    Payload,
    array_shape,
    audio_length,
)
from batchtune.manifests.values import Unreadable

NUM_SAMPLES = "num_samples"
MOST_SUFFIXES = 1000
CHUNK = 1000

# By the last part of a suffix, in lower case; any other file is text.
_KINDS = {
    **dict.fromkeys(AUDIO_SUFFIXES, "audio"),
    **dict.fromkeys(ARRAY_SUFFIXES, "array"),
    **dict.fromkeys(("json", "jsn"), "json"),
}

ValuePath = tuple[str, ...]


class MemberReader(NamedTuple):
    """Reads the value of a column from a file.

    Attributes:
        content: Maps a file to what it holds: an AudioLength, an array's shape, text, the value in JSON, or Unreadable.
        path: For audio, `("num_samples",)` for samples instead of seconds; for an array, the number of a dimension;
            None for the content itself.
    """

    content: Callable[[Payload], object]
    path: ValuePath | None

    def value(self, content: object) -> object:
        """Return the column's value in the content of a file; None without one."""
        if self.path is None:
            return content
        if isinstance(content, AudioLength):
            return content.num_samples if self.path else content.seconds
        if isinstance(content, tuple):
            return _dimension(content, ".".join(self.path) or "0")
        if self.path and not isinstance(content, Unreadable):
            return None
        return content


def _dimension(shape: tuple[int, ...], axis: str) -> object:
    if not axis.isdecimal():
        return None
    if int(axis) >= len(shape):
        return Unreadable("too few dimensions", f"of shape {shape}")
    return shape[int(axis)]


def kind_of(suffix: str) -> str:
    """Return what files with a suffix hold: `audio`, `array`, `json` or `text`."""
    return _KINDS.get(last_part(suffix), "text")


@functools.lru_cache(MOST_SUFFIXES)
def member_reader(suffix: str, path: ValuePath | None = ()) -> MemberReader:
    """Make the reader of the value at a path in files with a suffix."""
    kind = kind_of(suffix)
    if kind == "json":
        return MemberReader(json_reader(path or ()), None)
    audio_suffix = last_part(suffix)

    def content(payload: Payload) -> object:
        try:
            if kind == "audio":
                return audio_length(payload, audio_suffix)
            if kind == "array":
                return array_shape(payload)
            return payload.text()
        except Unreadable as error:
            return error.with_traceback(None)

    return MemberReader(content, path)


def named_rows(
    names: Sequence[str], columns: Sequence[Sequence[object]], left_out: Mapping[str, int], num_estimates: int = 0
) -> Rows:
    """Return rows of which only the names tell their place."""
    return Rows(columns, lambda index: Place(None, names[index]), lambda: names, left_out, num_estimates)
