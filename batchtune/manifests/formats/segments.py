"""Kaldi's `segments`: an utterance, its recording, its start and its end in s on every line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from batchtune.errors import shortened
from batchtune.manifests.base import Column, Format, Rows
from batchtune.manifests.formats.kaldi import Record, record_columns, record_rows, words_error
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Unreadable, fault, number

_HINT = "This format is an utterance, its recording, its start and its end in seconds on every line, as in segments."
_FITTING_LINES = 100
# What is left after that is the noise of subtracting binary fractions.
_DIGITS = 9


class Segments(Format):
    """As Kaldi's `extract-segments` reads it: length = end - start; an end of -1 is the recording's own.

    The recordings' lengths are then taken from the file `reco2dur` in the same folder. A fifth word, the channel,
    is passed over.
    """

    name = "segments"
    description = "an utterance, its recording, start and end on every line, as in Kaldi's segments"
    named_columns = False
    unique_ids = True
    joined_by_id = True

    def fits(self, head: Head) -> bool:
        """Whether the first lines are two names and two numbers, or these and a channel."""
        lines = head.lines[:_FITTING_LINES]
        return bool(lines) and all(_fits(line.split()) for line in lines)

    def columns(self, source: Source) -> Sequence[Column]:
        """`id`, the utterance's, and `duration`."""
        return record_columns(_records(source), "id", "duration")

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The rows, some ten thousand at a time."""
        return record_rows(_records(source), "id", length_key, target_key)


class _Recordings:
    """The lengths of the recordings, read when first asked for."""

    def __init__(self, source: Source) -> None:
        self._segments = source.path

    def end(self, recording: str) -> float | Unreadable:
        """Where a recording ends, in s."""
        if self._ends is None:
            return Unreadable("open end", "-1, and there is no reco2dur")
        found = self._ends.get(recording)
        return Unreadable("open end", "-1, and not in reco2dur") if found is None else found

    @cached_property
    def _ends(self) -> dict[str, float] | None:
        path = self._segments.parent / "reco2dur"
        if not (self._segments.is_file() and path.is_file()):  # standard input has no folder
            return None
        words = (line.split() for _, line in Source(path).lines())
        pairs = ((one[0], number(one[1])) for one in words if len(one) == 2)
        return {recording: seconds for recording, seconds in pairs if seconds is not None}


def _fits(words: Sequence[str]) -> bool:
    if len(words) not in (4, 5) or (len(words) == 5 and not words[4].isdecimal()):
        return False
    numeric = [number(word) is not None for word in words]
    # Four numbers are a matrix rather than segments.
    return numeric[2] and numeric[3] and not (numeric[0] and numeric[1]) and not words[0].startswith(("{", "["))


def _records(source: Source) -> Iterator[Record]:
    recordings = _Recordings(source)
    for line_number, line in source.lines():
        words = line.split()
        if len(words) in (4, 5):
            yield line_number, words[0], _length(words, recordings)
        elif words:
            raise words_error(source, line_number, len(words), "4", _HINT)


def _length(words: Sequence[str], recordings: _Recordings) -> object:
    start, end = number(words[2]), number(words[3])
    if start is None or end is None:
        odd = words[2] if start is None else words[3]
        return Unreadable(fault(odd, math.nan), shortened(odd))
    if end == -1:
        known = recordings.end(words[1])
        if isinstance(known, Unreadable):
            return known
        end = known
    return round(end - start, _DIGITS)


FORMAT = Segments()
