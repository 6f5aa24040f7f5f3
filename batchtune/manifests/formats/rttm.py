"""RTTM, the speaker turns of diarization: `SPEAKER file channel start duration <NA> <NA> speaker …`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.formats.kaldi import Record, record_columns, record_rows, words_error
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import number

_HINT = "This format is RTTM: SPEAKER file channel start duration <NA> <NA> speaker <NA> <NA> on every line."
_WORDS = 5
_COMMENT = ";;"
_SPEAKER = "SPEAKER"
_NONE = "<NA>"
_LEFT_OUT = "another record than SPEAKER"

# The types that NIST's "Rich Transcription Time Marked" specification (RTTM-format-v13) names.
_TYPES = {
    "SEGMENT",
    "NOSCORE",
    "NO_RT_METADATA",
    "LEXEME",
    "NON-LEX",
    "NON-SPEECH",
    "FILLER",
    "EDIT",
    "IP",
    "SU",
    "CB",
    "A/P",
    _SPEAKER,
    "SPKR-INFO",
}


class Rttm(Format):
    """RTTM files: each SPEAKER record is an example, named by its recording, with its duration in s as length.

    Records of other types are left out and counted; comments (`;;`) are passed over.
    """

    name = "rttm"
    description = "RTTM, SPEAKER file channel start duration … on every line"
    named_columns = False

    def fits(self, head: Head) -> bool:
        """Whether the first lines are RTTM records, down to one of a speaker."""
        for line in head.lines:
            words = line.split()
            if line.startswith(_COMMENT) or not words:
                continue
            if words[0] == _SPEAKER:
                return len(words) >= _WORDS and all(number(word) is not None for word in words[3:_WORDS])
            if words[0] not in _TYPES:
                break
        return False

    def columns(self, source: Source) -> Sequence[Column]:
        """`file` and `duration`."""
        return record_columns(_Turns(source), "file", "duration")

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The rows, some ten thousand at a time."""
        turns = _Turns(source)
        for rows in record_rows(turns, "file", length_key, target_key):
            yield replace(rows, left_out=turns.take_left_out())
        if left_out := turns.take_left_out():  # behind the last row
            yield Rows([], None if target_key is None else [], lambda _: Place(None, None), left_out)


class _Turns:
    """The SPEAKER records, and the number of others that stood between them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._others = 0

    def take_left_out(self) -> dict[str, int]:
        """The others since this was last asked."""
        others, self._others = self._others, 0
        return {_LEFT_OUT: others} if others else {}

    def __iter__(self) -> Iterator[Record]:
        """Raises ManifestError where a line is no RTTM record."""
        for line_number, line in self._source.lines():
            words = line.split()
            if not words or words[0].startswith(_COMMENT):
                continue
            if words[0] not in _TYPES:
                fault = f"{shortened(words[0])} is no type of RTTM record"
                raise ManifestError(f"{self._source.path}, line {line_number}: {fault}", _HINT)
            if words[0] != _SPEAKER:
                self._others += 1
            elif len(words) < _WORDS:
                raise words_error(self._source, line_number, len(words), "10", _HINT)
            else:
                yield line_number, words[1], None if words[4] == _NONE else words[4]


FORMAT = Rttm()
