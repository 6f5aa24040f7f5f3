"""Text without a header, an example on every line: Kaldi's, ESPnet's and fairseq's lists, RTTM, numbers, plain text."""

from __future__ import annotations

import functools
import itertools
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.columns import PEEKED_ROWS, summarise
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Unreadable, fault, number
from batchtune.units import counted

# Line, id (None in a list without ids) and value.
Record = tuple[int, "str | None", object]

_ROWS_AT_ONCE = 65_536
_FITTING_LINES = 100
_SHAPE = re.compile(r"\d+(?:,\d+)+", re.ASCII)
# Nothing in such a file says what it counts, only its name does.
_COUNTED_BY_NAME = {
    "utt2dur": "duration",
    "reco2dur": "duration",
    "utt2num_frames": "num_frames",
    "utt2num_samples": "num_samples",
    "text_shape": "num_tokens",
}
_SHAPED_BY_NAME = {"speech_shape": "num_frames", "feats_shape": "num_frames", "text_shape": "num_tokens"}


class LineList(Format):
    """A list of records: an id, if the format has ids, and one value."""

    named_columns = False
    id_column: ClassVar[str | None] = "id"

    @abstractmethod
    def records(self, source: Source, left_out: dict[str, int]) -> Iterator[Record]:
        """All records; what is left out is counted by its reason. Raises ManifestError for a line of another shape."""

    @abstractmethod
    def column(self, source: Source) -> str:
        """The name of the values' column."""

    def columns(self, source: Source) -> Sequence[Column]:
        """The ids, if there are any, and the values."""
        names = [name for name in (self.id_column, self.column(source)) if name is not None]
        first = list(itertools.islice(self.records(source, {}), PEEKED_ROWS))
        entries = [dict(zip(names, record[-len(names) :], strict=True)) for record in first]
        return summarise([dict.fromkeys(names), *entries] if self.id_column is not None else entries)

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The rows, some ten thousand at a time."""
        left_out: dict[str, int] = {}
        records = self.records(source, left_out)
        length, target = (1 if key == self.id_column else 2 for key in (length_key, target_key))
        while (chunk := list(itertools.islice(records, _ROWS_AT_ONCE))) or left_out:
            targets = None if target_key is None else [record[target] for record in chunk]
            yield _rows(chunk, [record[length] for record in chunk], targets, dict(left_out))
            left_out.clear()


def _rows(
    chunk: Sequence[Record], lengths: list[object], targets: list[object] | None, left_out: Mapping[str, int]
) -> Rows:
    return Rows(
        lengths,
        targets,
        lambda index: Place(chunk[index][0], chunk[index][1]),
        left_out,
        lambda: [record[1] for record in chunk],
    )


class Kaldi(LineList):
    """`utt2dur`, `reco2dur` (s), `utt2num_frames` (frames), ESPnet's `utt2num_samples` (samples).

    A file of another name is read too, with an unknown unit.
    """

    name = "kaldi"
    description = "an id and a number on every line, as in utt2dur"
    unique_ids = True
    joined_by_id = True
    # Of a folder as Kaldi and ESPnet lay it out.
    folder_names: ClassVar[tuple[str, ...]] = (
        "utt2dur",
        "utt2num_samples",
        "speech_shape",
        "utt2num_frames",
        "segments",
        "reco2dur",
    )
    hint: ClassVar[str] = "This format is an id, white space, and one number on every line, as in utt2dur."
    names: ClassVar[Mapping[str, str]] = _COUNTED_BY_NAME

    def fits(self, head: Head) -> bool:
        """Whether the first line is two words, the second of them a number."""
        words = head.lines[0].split() if head.lines else []
        return len(words) == 2 and number(words[1]) is not None and not words[0].startswith(("{", "["))

    def column(self, source: Source) -> str:
        """By a part of the file's name; `length` for any other file."""
        return next((name for part, name in self.names.items() if part in source.path.name), "length")

    def records(self, source: Source, left_out: dict[str, int]) -> Iterator[Record]:
        """Id and value; no value for an id alone."""
        for line, text in source.lines():
            words = text.split()
            if len(words) > 2:
                raise _words_error(source, line, len(words), "2", self.hint)
            if words:
                yield line, words[0], self.value(words[1]) if len(words) == 2 else None

    def value(self, word: str) -> object:
        """The value that a word stands for."""
        return word


class Shape(Kaldi):
    """ESPnet's `speech_shape`, `feats_shape` (frames, features) and `text_shape` (tokens, vocabulary).

    The first dimension is the length. A shape of one dimension alone is of the format `kaldi`: of raw speech, it
    counts samples.
    """

    name = "shape"
    description = "an id and a shape such as 1407,80 on every line, as in ESPnet's speech_shape"
    folder_names = ()
    hint = "This format is an id, white space, and numbers with commas between them on every line, as in speech_shape."
    names = _SHAPED_BY_NAME

    def fits(self, head: Head) -> bool:
        """Whether the first line is an id and a shape of two dimensions or more."""
        words = head.lines[0].split() if head.lines else []
        return len(words) == 2 and _SHAPE.fullmatch(words[1]) is not None

    def value(self, word: str) -> object:
        """The first dimension."""
        return word.partition(",")[0]


class Segments(LineList):
    """Kaldi's `segments`: an utterance, its recording, its start and its end in s on every line.

    As Kaldi's `extract-segments` reads it: length = end - start; an end of -1 is the recording's own, from the file
    `reco2dur` in the same folder. A fifth word, the channel, is passed over.
    """

    name = "segments"
    description = "an utterance, its recording, start and end on every line, as in Kaldi's segments"
    unique_ids = True
    joined_by_id = True

    def fits(self, head: Head) -> bool:
        """Whether the first lines are two names and two numbers, or these and a channel."""
        lines = head.lines[:_FITTING_LINES]
        return bool(lines) and all(_is_segment(line.split()) for line in lines)

    def column(self, source: Source) -> str:
        """`duration`."""
        return "duration"

    def records(self, source: Source, left_out: dict[str, int]) -> Iterator[Record]:
        """Utterance and duration in s."""
        ends = functools.cache(functools.partial(_recording_ends, source))
        hint = "This format is an utterance, its recording, its start and its end in s on every line, as in segments."
        for line, text in source.lines():
            words = text.split()
            if len(words) in (4, 5):
                yield line, words[0], _segment_length(words, ends)
            elif words:
                raise _words_error(source, line, len(words), "4", hint)


def _is_segment(words: Sequence[str]) -> bool:
    if len(words) not in (4, 5) or (len(words) == 5 and not words[4].isdecimal()):
        return False
    numeric = [number(word) is not None for word in words]
    # Four numbers are a matrix rather than segments.
    return numeric[2] and numeric[3] and not (numeric[0] and numeric[1]) and not words[0].startswith(("{", "["))


def _recording_ends(source: Source) -> dict[str, float] | None:
    path = source.path.parent / "reco2dur"
    if not (source.path.is_file() and path.is_file()):  # standard input has no folder
        return None
    words = (line.split() for _, line in Source(path).lines())
    pairs = ((one[0], number(one[1])) for one in words if len(one) == 2)
    return {recording: seconds for recording, seconds in pairs if seconds is not None}


def _segment_length(words: Sequence[str], ends: Callable[[], Mapping[str, float] | None]) -> object:
    start, end = number(words[2]), number(words[3])
    if start is None or end is None:
        odd = words[2] if start is None else words[3]
        return Unreadable(fault(odd, math.nan), shortened(odd))
    if end == -1:
        known = ends()
        if known is None:
            return Unreadable("open end", "-1, and there is no reco2dur")
        if words[1] not in known:
            return Unreadable("open end", "-1, and not in reco2dur")
        end = known[words[1]]
    return round(end - start, 9)  # what is left after that is the noise of subtracting binary fractions


class Rttm(LineList):
    """RTTM, the speaker turns of diarization: `SPEAKER file channel start duration <NA> <NA> speaker …`.

    Each SPEAKER record is an example, named by its recording, with its duration in s as length. Records of other types
    are left out and counted; comments (`;;`) are passed over.
    """

    name = "rttm"
    description = "RTTM, SPEAKER file channel start duration … on every line"
    id_column = "file"
    # NIST's "Rich Transcription Time Marked" specification (RTTM-format-v13) names these and SPEAKER.
    _OTHER_TYPES = frozenset(
        "SEGMENT NOSCORE NO_RT_METADATA LEXEME NON-LEX NON-SPEECH FILLER EDIT IP SU CB A/P SPKR-INFO".split()
    )

    def fits(self, head: Head) -> bool:
        """Whether the first lines are RTTM records, down to one of a speaker."""
        for line in head.lines:
            words = line.split()
            if line.startswith(";;") or not words:
                continue
            if words[0] == "SPEAKER":
                return len(words) >= 5 and all(number(word) is not None for word in words[3:5])
            if words[0] not in self._OTHER_TYPES:
                break
        return False

    def column(self, source: Source) -> str:
        """`duration`."""
        return "duration"

    def records(self, source: Source, left_out: dict[str, int]) -> Iterator[Record]:
        """Recording and duration of each turn."""
        hint = "This format is RTTM: SPEAKER file channel start duration <NA> <NA> speaker <NA> <NA> on every line."
        for line, text in source.lines():
            words = text.split()
            if not words or words[0].startswith(";;"):
                continue
            if words[0] in self._OTHER_TYPES:
                reason = "another record than SPEAKER"
                left_out[reason] = left_out.get(reason, 0) + 1
            elif words[0] != "SPEAKER":
                seen = f"{shortened(words[0])} is no type of RTTM record"
                raise ManifestError(f"{source.path}, line {line}: {seen}", hint)
            elif len(words) < 5:
                raise _words_error(source, line, len(words), "10", hint)
            else:
                yield line, words[1], None if words[4] == "<NA>" else words[4]


class Wav2vec(LineList):
    """The root folder on the first line, then `path<TAB>samples`, as fairseq's `wav2vec_manifest.py` writes it."""

    name = "wav2vec"
    description = "the root folder on the first line, then path<TAB>samples"
    id_column = "path"

    def fits(self, head: Head) -> bool:
        """Whether a line without a tab comes first, and then one with exactly one tab."""
        if len(head.lines) < 2 or "\t" in head.lines[0]:
            return len(head.lines) == 1 and head.complete and _is_folder(head.lines[0])
        path, tab, samples = head.lines[1].partition("\t")
        return bool(tab and path) and (number(samples) is not None or _is_folder(head.lines[0]))

    def column(self, source: Source) -> str:
        """`samples`."""
        return "samples"

    def records(self, source: Source, left_out: dict[str, int]) -> Iterator[Record]:
        """Path and number of samples; blank lines are passed over."""
        for line, text in itertools.islice(source.lines(), 1, None):
            cells = text.split("\t")
            if not text.strip(" "):
                continue
            if len(cells) != 2:
                raise ManifestError(
                    f"{source.path}, line {line}: {counted(len(cells), 'cell')} instead of 2",
                    "This format is the root folder on the first line, then a path, a tab and the samples on each.",
                )
            yield line, cells[0], cells[1]


def _is_folder(line: str) -> bool:
    return "," not in line and (line.strip() in (".", "..") or "/" in line or "\\" in line)


class Text(LineList):
    """Lines of text, each an example that is measured; only blank lines at the end are none."""

    name = "text"
    description = "plain text, one example on every line; never told from the content, so name it"
    id_column = None

    def fits(self, head: Head) -> bool:
        """False: any text would."""
        return False

    def column(self, source: Source) -> str:
        """`text`."""
        return "text"

    def columns(self, source: Source) -> Sequence[Column]:
        """The one column `text`."""
        first = next(self.records(source, {}), None)
        return [] if first is None else [Column("text", first[2], numeric=False, text=True)]

    def default_column(self, columns: Sequence[Column]) -> str:
        """`text`."""
        return "text"

    def records(self, source: Source, left_out: dict[str, int]) -> Iterator[Record]:
        """Every line, blank ones too, down to the last that is not blank."""
        blank_from: int | None = None
        for line, text in source.lines():
            if not text.strip():
                blank_from = blank_from or line
                continue
            if blank_from is not None:
                yield from ((before, None, "") for before in range(blank_from, line))
                blank_from = None
            yield line, None, text


class Numbers(Text):
    """Lines of one number each, without ids; only blank lines at the end are passed over."""

    name = "numbers"
    description = "one number on every line"

    def fits(self, head: Head) -> bool:
        """Whether the lines are single words, the first and most of the others numbers."""
        lines = [line.strip() for line in head.lines]
        if not lines or number(lines[0]) is None or any(len(line.split()) > 1 for line in lines):
            return False
        return 2 * sum(number(line) is not None for line in lines) > len(lines)

    def column(self, source: Source) -> str:
        """`length`."""
        return "length"

    def columns(self, source: Source) -> Sequence[Column]:
        """The one column `length`."""
        return LineList.columns(self, source)

    def default_column(self, columns: Sequence[Column]) -> str:
        """`length`."""
        return "length"


def _words_error(source: Source, line: int, found: int, wanted: str, hint: str) -> ManifestError:
    return ManifestError(f"{source.path}, line {line}: {counted(found, 'word')} instead of {wanted}", hint)


KALDI = Kaldi()
SHAPE = Shape()
SEGMENTS = Segments()
RTTM = Rttm()
WAV2VEC = Wav2vec()
TEXT = Text()
NUMBERS = Numbers()
