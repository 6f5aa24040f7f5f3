"""ESPnet's shape files: an id and a shape on every line, `utt1 1407,80`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from batchtune.manifests.base import Column, Format, Rows
from batchtune.manifests.formats.kaldi import Record, named_by_file, record_columns, record_rows, words_error
from batchtune.manifests.source import Head, Source

_HINT = "This format is an id, white space, and numbers with commas between them on every line, as in speech_shape."
_SHAPE = re.compile(r"\d+(?:,\d+)+", re.ASCII)

# Nothing in such a file says what it counts, only its name does.
_COLUMN_NAMES = {"speech_shape": "num_frames", "feats_shape": "num_frames", "text_shape": "num_tokens"}


class Shape(Format):
    """`speech_shape`, `feats_shape` (frames, features) and `text_shape` (tokens, vocabulary).

    The first dimension is the length. A shape of one dimension alone is of the format `kaldi`: of raw speech, it
    counts samples.
    """

    name = "shape"
    description = "an id and a shape such as 1407,80 on every line, as in ESPnet's speech_shape"
    named_columns = False
    unique_ids = True
    joined_by_id = True

    def fits(self, head: Head) -> bool:
        """Whether the first line is an id and a shape of two dimensions or more."""
        words = head.lines[0].split() if head.lines else []
        return len(words) == 2 and _SHAPE.fullmatch(words[1]) is not None

    def columns(self, source: Source) -> Sequence[Column]:
        """`id` and one that the file's name names."""
        return record_columns(_records(source), "id", named_by_file(source, _COLUMN_NAMES))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The rows, some ten thousand at a time."""
        return record_rows(_records(source), "id", length_key, target_key)


def _records(source: Source) -> Iterator[Record]:
    for line_number, line in source.lines():
        words = line.split()
        if len(words) == 2:
            yield line_number, words[0], words[1].partition(",")[0]
        elif len(words) == 1:
            yield line_number, words[0], None
        elif words:
            raise words_error(source, line_number, len(words), "2", _HINT)


FORMAT = Shape()
