"""Kaldi's and ESPnet's lists: `id value` on every line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from batchtune.errors import ManifestError
from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.columns import PEEKED_ROWS, summarise
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import number
from batchtune.units import counted

# Line, id and value.
Record = tuple[int, str, object]

_CHUNK = 65_536
_HINT = "This format is an id, white space, and one number on every line, as in utt2dur."

# Nothing in such a file says what it counts, only its name does.
_COLUMN_NAMES = {
    "utt2dur": "duration",
    "reco2dur": "duration",
    "utt2num_frames": "num_frames",
    "utt2num_samples": "num_samples",
    "text_shape": "num_tokens",
}


class Kaldi(Format):
    """`utt2dur`, `reco2dur` (s), `utt2num_frames` (frames), ESPnet's `utt2num_samples` (samples).

    A file of another name is read too, with an unknown unit.
    """

    name = "kaldi"
    description = "an id and a number on every line, as in utt2dur"
    named_columns = False
    unique_ids = True
    joined_by_id = True

    def fits(self, head: Head) -> bool:
        """Whether the first line is two words, the second of them a number."""
        words = head.lines[0].split() if head.lines else []
        return len(words) == 2 and number(words[1]) is not None and not words[0].startswith(("{", "["))

    def columns(self, source: Source) -> Sequence[Column]:
        """`id` and one that the file's name names."""
        return record_columns(_records(source), "id", named_by_file(source, _COLUMN_NAMES))

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The rows, some ten thousand at a time."""
        return record_rows(_records(source), "id", length_key, target_key)


def named_by_file(source: Source, names: Mapping[str, str]) -> str:
    """The column's name, by a part of the file's name; `length` for any other file."""
    return next((name for part, name in names.items() if part in source.path.name), "length")


def record_columns(records: Iterable[Record], id_column: str, column: str) -> list[Column]:
    """The two columns of a list."""
    first = itertools.islice(records, PEEKED_ROWS)
    return summarise([{id_column: None, column: None}, *({id_column: one, column: value} for _, one, value in first)])


def record_rows(records: Iterable[Record], id_column: str, length_key: str, target_key: str | None) -> Iterator[Rows]:
    """The rows of a list, some ten thousand at a time."""
    length = 1 if length_key == id_column else 2
    target = None if target_key is None else 1 if target_key == id_column else 2
    remaining = iter(records)
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        yield _rows(chunk, length, target)


def words_error(source: Source, line: int, found: int, wanted: str, hint: str) -> ManifestError:
    """That a line has another number of words than its format."""
    return ManifestError(f"{source.path}, line {line}: {counted(found, 'word')} instead of {wanted}", hint)


def _rows(chunk: Sequence[Record], length: int, target: int | None) -> Rows:
    def place(index: int) -> Place:
        return Place(chunk[index][0], chunk[index][1])

    def ids() -> list[str | None]:
        return [record[1] for record in chunk]

    targets = None if target is None else [record[target] for record in chunk]
    return Rows([record[length] for record in chunk], targets, place, ids=ids)


def _records(source: Source) -> Iterator[Record]:
    for line_number, line in source.lines():
        words = line.split()
        if len(words) == 2:
            yield line_number, words[0], words[1]
        elif len(words) == 1:
            yield line_number, words[0], None
        elif words:
            raise words_error(source, line_number, len(words), "2", _HINT)


FORMAT = Kaldi()
