"""Text without a header, an example on every line: Kaldi's, ESPnet's and fairseq's lists, RTTM, numbers, plain text."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.base import Column
from batchtune.manifests.formats.delimited import Record, Table
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Unreadable, fault, number


class LineList(Table):
    """A list of records: an id, if the format has ids, and one value; `hint` says what every line holds."""

    named_columns = False
    hint: ClassVar[str] = ""
    id_column: ClassVar[str | None] = "id"  # None without ids
    value_column: str = "length"
    first_line: ClassVar[int] = 1  # of the first record
    separator: ClassVar[str | None] = None  # between the words of a line; None for white space

    def opened(self) -> tuple[list[str], Iterator[Record]]:
        """Return the names of the columns, and their values on each line."""
        return [name for name in (self.id_column, self.value_column) if name is not None], self.records()

    def records(self) -> Iterator[Record]:
        """Yield all records. Raises ManifestError for other content."""
        for line, text in itertools.islice(self.source.lines(), self.first_line - 1, None):
            if cells := self.cells(text.split(self.separator)):
                yield line, cells
            elif cells is None and text.strip():
                place = f"{self.source.path}, line {line}"
                raise ManifestError(f"{place} has another format: {shortened(text)}", self.hint)

    def cells(self, words: Sequence[str]) -> Sequence[object] | None:
        """Return the id and the value of a line, nothing to pass over the line; None for a line of another shape."""
        return words if len(words) == 2 else None


class Kaldi(LineList):
    """`utt2dur`, `reco2dur` (s), `utt2num_frames` (frames), ESPnet's `utt2num_samples`; others in an unknown unit."""

    name = "kaldi"
    description = "an id and a number on every line, as in utt2dur"
    unique_ids = True
    joined_by_id = True
    # Files of a folder as Kaldi and ESPnet lay it out.
    folder_names: ClassVar[tuple[str, ...]] = tuple(
        "utt2dur utt2num_samples speech_shape utt2num_frames segments reco2dur".split()
    )
    hint = "This format is an id, white space, and one number on every line, as in utt2dur."
    # Only the file's name says what it counts: part of the name → column.
    names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("utt2dur", "reco2dur"), "duration"),
        **{"utt2num_frames": "num_frames", "utt2num_samples": "num_samples", "text_shape": "num_tokens"},
    }

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        known = (column for part, column in self.names.items() if part in source.path.name)
        self.value_column = next(known, self.value_column)

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first line is two words, the second of them a number."""
        words = head.lines[0].split() if head.lines else []
        return len(words) == 2 and number(words[1]) is not None and not words[0].startswith(("{", "["))

    def cells(self, words: Sequence[str]) -> Sequence[object] | None:
        """Return the id and the value of a line; no value for an id alone."""
        return (words[0], None) if len(words) == 1 else super().cells(words)


class Shape(Kaldi):
    """ESPnet's `speech_shape`, `feats_shape` (frames, features) and `text_shape` (tokens, vocabulary).

    The first dimension is the length. A shape of one dimension is of the format `kaldi`: raw speech, in samples.
    """

    name = "shape"
    description = "an id and a shape such as 1407,80 on every line, as in ESPnet's speech_shape"
    folder_names = ()
    hint = "This format is an id, white space, and numbers with commas between them on every line, as in speech_shape."
    names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("speech_shape", "feats_shape"), "num_frames"),
        "text_shape": "num_tokens",
    }

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first line is an id and a shape of two dimensions or more."""
        return bool(head.lines) and re.fullmatch(r"\s*\S+\s+[0-9]+(?:,[0-9]+)+\s*", head.lines[0]) is not None

    def cells(self, words: Sequence[str]) -> Sequence[object] | None:
        """Return the id and the first dimension of a line."""
        return super().cells([word.partition(",")[0] if at == 1 else word for at, word in enumerate(words)])


class Segments(LineList):
    """Kaldi's `segments`: an utterance, its recording, its start and its end in s on every line.

    As Kaldi's `extract-segments` reads it: length = end - start; an end of -1 is the recording's own, from the file
    `reco2dur` in the same folder. A fifth word, the channel, is passed over.
    """

    name = "segments"
    description = "an utterance, its recording, start and end on every line, as in Kaldi's segments"
    unique_ids = True
    joined_by_id = True
    hint = "This format is an utterance, its recording, its start and its end in s on every line, as in segments."
    value_column = "duration"

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first lines are two names and two numbers, or these and a channel."""
        for words in map(str.split, head.lines[:100]):
            if len(words) not in (4, 5) or (len(words) == 5 and not words[4].isdecimal()):
                return False
            numeric = [number(word) is not None for word in words]
            # Four numbers are a matrix rather than segments.
            if not (numeric[2] and numeric[3]) or (numeric[0] and numeric[1]) or words[0].startswith(("{", "[")):
                return False
        return bool(head.lines)

    def cells(self, words: Sequence[str]) -> Sequence[object] | None:
        """Return the utterance and its duration in s."""
        if len(words) not in (4, 5):
            return None
        name, recording, first, last = words[:4]
        start = number(first)
        end = number(last)
        if start is None or end is None:
            odd = first if start is None else last
            return name, Unreadable(fault(odd, math.nan), shortened(odd))
        if end == -1:
            known = self._recording_ends
            if known is None or recording not in known:
                absent = "there is no" if known is None else "not in"
                return name, Unreadable("open end", f"-1, and {absent} reco2dur")
            end = known[recording]
        return name, round(end - start, 9)  # the rest is the noise of subtracting binary fractions

    @cached_property
    def _recording_ends(self) -> dict[str, float] | None:
        path = self.source.path.parent / "reco2dur"
        if not (self.source.path.is_file() and path.is_file()):  # standard input has no folder
            return None
        words = (line.split() for _, line in Source(path).lines())
        pairs = ((one[0], number(one[1])) for one in words if len(one) == 2)
        return {recording: seconds for recording, seconds in pairs if seconds is not None}


class Rttm(LineList):
    """RTTM, the speaker turns of diarization: `SPEAKER file channel start duration <NA> <NA> speaker …`.

    Each SPEAKER record is an example, named by its recording, with its duration in s as length. Records of other types
    are left out and counted; comments (`;;`) are passed over.
    """

    name = "rttm"
    description = "RTTM, SPEAKER file channel start duration … on every line"
    hint = "This format is RTTM: SPEAKER file channel start duration <NA> <NA> speaker <NA> <NA> on every line."
    id_column = "file"
    value_column = "duration"
    # NIST's "Rich Transcription Time Marked" specification (RTTM-format-v13) names these and SPEAKER.
    _OTHER_TYPES = frozenset(
        "SEGMENT NOSCORE NO_RT_METADATA LEXEME NON-LEX NON-SPEECH FILLER EDIT IP SU CB A/P SPKR-INFO".split()
    )

    @classmethod
    def fits(cls, head: Head) -> bool:
        """Return whether the first lines are RTTM records, down to one of a speaker."""
        for first, *words in map(str.split, head.lines):
            if first == "SPEAKER":
                return len(words) >= 4 and all(number(word) is not None for word in words[2:4])
            if not (first in cls._OTHER_TYPES or first.startswith(";;")):
                break
        return False

    def cells(self, words: Sequence[str]) -> Sequence[object] | None:
        """Return the recording and the duration of a turn; count other records."""
        if len(words) >= 5 and words[0] == "SPEAKER":
            return words[1], None if words[4] == "<NA>" else words[4]
        if words and words[0] in self._OTHER_TYPES:
            self._left_out["another record than SPEAKER"] += 1
            return ()
        return () if words and words[0].startswith(";;") else None


class Wav2vec(LineList):
    """The root folder on the first line, then `path<TAB>samples`, as fairseq's `wav2vec_manifest.py` writes it."""

    name = "wav2vec"
    description = "the root folder on the first line, then path<TAB>samples"
    hint = "This format is the root folder on the first line, then a path, a tab and the samples on each."
    separator = "\t"
    id_column = "path"
    value_column = "samples"
    first_line = 2

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether a line without a tab comes first, and then one with exactly one tab."""
        root, *others = head.lines[:2] or [""]
        is_folder = "," not in root and (root.strip() in (".", "..") or "/" in root or "\\" in root)
        if not others or "\t" in root:
            return len(head.lines) == 1 and head.complete and is_folder
        path, tab, samples = others[0].partition("\t")
        return bool(tab and path) and (is_folder or number(samples) is not None)


class Numbers(LineList):
    """Lines of one number each, without ids; only blank lines at the end are passed over."""

    name = "numbers"
    description = "one number on every line"
    id_column = None
    length_column = "length"

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the lines are single words, the first and most of the others numbers."""
        lines = [line.strip() for line in head.lines]
        if not lines or number(lines[0]) is None or any(len(line.split()) > 1 for line in lines):
            return False
        return 2 * sum(number(line) is not None for line in lines) > len(lines)

    def records(self) -> Iterator[Record]:
        """Yield every line, blank ones too, down to the last that is not blank."""
        done = 0
        for line, text in self.source.lines():
            if text.strip():
                yield from ((before, ("",)) for before in range(done + 1, line))
                yield line, (text,)
                done = line


class Text(Numbers):
    """Lines of text, each an example whose length is counted; only blank lines at the end are passed over."""

    name = "text"
    description = "plain text, one example on every line; never told from the content, so name it"
    value_column = length_column = "text"

    @staticmethod
    def fits(head: Head) -> bool:
        """Return False: any text would fit."""
        return False

    def columns(self) -> Sequence[Column]:
        """Return the one column `text`."""
        return [replace(column, numeric=False, text=True) for column in super().columns()]
