"""The manifests of wav2vec and fairseq: the root folder on the first line, then `path<TAB>samples`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from batchtune.errors import ManifestError
from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.columns import PEEKED_ROWS, summarise
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import number
from batchtune.units import counted

_CHUNK = 65_536
_HINT = "This format is the root folder on the first line, then a path, a tab and a number of samples on each."


class Wav2vec(Format):
    """As fairseq's `wav2vec_manifest.py` writes it; blank lines are passed over."""

    name = "wav2vec"
    description = "the root folder on the first line, then path<TAB>samples"
    named_columns = False

    def fits(self, head: Head) -> bool:
        """Whether a line without a tab comes first, and then one with exactly one tab."""
        if len(head.lines) < 2 or "\t" in head.lines[0]:
            return len(head.lines) == 1 and head.complete and _is_folder(head.lines[0])
        path, tab, samples = head.lines[1].partition("\t")
        return bool(tab and path) and (number(samples) is not None or _is_folder(head.lines[0]))

    def columns(self, source: Source) -> Sequence[Column]:
        """The two that every file has."""
        rows = itertools.islice(_records(source), PEEKED_ROWS)
        return summarise([{"path": None, "samples": None}, *({"path": a, "samples": b} for _, a, b in rows)])

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The rows, some ten thousand at a time."""
        records = _records(source)
        while chunk := list(itertools.islice(records, _CHUNK)):
            yield _rows(chunk, length_key, target_key)


def _rows(chunk: Sequence[tuple[int, str, str]], length_key: str, target_key: str | None) -> Rows:
    positions = {"path": 1, "samples": 2}

    def place(index: int) -> Place:
        return Place(chunk[index][0], chunk[index][1])

    targets = None if target_key is None else [record[positions[target_key]] for record in chunk]
    return Rows([record[positions[length_key]] for record in chunk], targets, place)


def _records(source: Source) -> Iterator[tuple[int, str, str]]:
    lines = source.lines()
    next(lines, None)
    for line_number, line in lines:
        if not line.strip(" "):
            continue
        cells = line.split("\t")
        if len(cells) != 2:
            seen = counted(len(cells), "cell")
            raise ManifestError(f"{source.path}, line {line_number}: {seen} instead of 2", _HINT)
        yield line_number, cells[0], cells[1]


def _is_folder(line: str) -> bool:
    return "," not in line and (line.strip() in (".", "..") or "/" in line or "\\" in line)


FORMAT = Wav2vec()
