"""Kaldi's and ESPnet's lists: `id value` on every line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from batchtune.errors import ManifestError
from batchtune.lengths import Unit
from batchtune.manifests.columns import PEEKED_ROWS, summarise
from batchtune.manifests.rows import Column, Place, Rows
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import number
from batchtune.units import counted

_CHUNK = 65_536
_HINT = "This format is an id, white space, and one number on every line, as in utt2dur."

# Nothing in such a file says what it counts, only its name does.
_COLUMN_NAMES = {
    "utt2dur": "duration",
    "reco2dur": "duration",
    "utt2num_frames": "num_frames",
    "utt2num_samples": "num_samples",
}


class Kaldi:
    """`utt2dur`, `reco2dur` (s), `utt2num_frames` (frames), ESPnet's `utt2num_samples` (samples).

    A file of another name is read too, with an unknown unit.
    """

    name = "kaldi"
    description = "an id and a number on every line, as in utt2dur"
    units: Mapping[str, Unit] = {}
    named_columns = False

    def fits(self, head: Head) -> bool:
        """Whether the first line is two words, the second of them a number."""
        words = head.lines[0].split() if head.lines else []
        return len(words) == 2 and number(words[1]) is not None and not words[0].startswith(("{", "["))

    def columns(self, source: Source) -> Sequence[Column]:
        """`id` and one that the file's name names."""
        name = _column_name(source)
        records = itertools.islice(_records(source), PEEKED_ROWS)
        return summarise([{"id": None, name: None}, *({"id": i, name: value} for _, i, value in records)])

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The rows, some ten thousand at a time."""
        positions = {"id": 1, _column_name(source): 2}
        target = None if target_key is None else positions[target_key]
        records = _records(source)
        while chunk := list(itertools.islice(records, _CHUNK)):
            yield _rows(chunk, positions[length_key], target)


def _rows(chunk: Sequence[tuple[int, str, str | None]], length: int, target: int | None) -> Rows:
    def place(index: int) -> Place:
        return Place(chunk[index][0], chunk[index][1])

    targets = None if target is None else [record[target] for record in chunk]
    return Rows([record[length] for record in chunk], targets, place)


def _column_name(source: Source) -> str:
    return next((name for part, name in _COLUMN_NAMES.items() if part in source.path.name), "length")


def _records(source: Source) -> Iterator[tuple[int, str, str | None]]:
    for line_number, line in source.lines():
        words = line.split()
        if len(words) == 2:
            yield line_number, words[0], words[1]
        elif len(words) == 1:
            yield line_number, words[0], None
        elif words:
            raise ManifestError(f"{source.path}, line {line_number}: {counted(len(words), 'word')} instead of 2", _HINT)


FORMAT = Kaldi()
