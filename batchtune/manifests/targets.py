"""Target lengths that lie in a file of their own: read, counted, and joined with the rows of the manifest."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.base import Format, Rows
from batchtune.manifests.columns import PEEKED_ROWS, summarise
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.source import Source
from batchtune.manifests.values import Count, counter, number

_SHAPE = re.compile(r"\d+(?:,\d+)+", re.ASCII)


def keyed_targets(source: Source) -> dict[str, object]:
    """Id → target: Kaldi's and ESPnet's files, `utt value`, `utt 52,31` or `utt words …`.

    Where most values are numbers, or shapes (the first dimension counts), they are numbers, and what is neither
    stays text. Else all are texts, so that a transcript `7` among others has one character like the letter `A`.

    Raises:
        ManifestError: An id is there twice, or the file can't be read or is no UTF-8.
    """
    found: dict[str, object] = {}
    numeric = 0
    for line_number, line in source.lines():
        words = line.split(maxsplit=1)
        if not words:
            continue
        name, value = words[0], words[1].rstrip() if len(words) > 1 else ""
        if name in found:
            raise ManifestError(
                f"{source.path}, line {line_number}: the id {shortened(name)} is there a second time",
                "Each id has one target: remove or rename one of the lines.",
            )
        found[name] = value
        numeric += _size(value) is not None
    if 2 * numeric > len(found):
        for name, text in found.items():
            size = _size(str(text))
            found[name] = text if size is None else size
    return found


def _size(value: str) -> float | None:
    return number(value.partition(",")[0] if _SHAPE.fullmatch(value) else value)


# fairseq's: letters or words, separated by spaces.
_SYMBOLS = (".ltr", ".wrd", ".ltr.gz", ".wrd.gz")


def joined(chunks: Iterator[Rows], reader: Format, targets: Sequence[Source]) -> Iterator[Rows]:
    """The rows with their targets: by id where the format is keyed by ids (Kaldi's), else line by line.

    Raises:
        ManifestError: The target file can't be read, or has fewer or more lines than the manifest has examples.
    """
    if not targets:
        yield from chunks
    elif reader.joined_by_id:
        yield from _joined_by_id(chunks, targets[0])
    else:
        yield from _joined_by_line(chunks, targets[0])


def count_of(targets: Sequence[Source], reader: Format, options: ReadOptions) -> tuple[Count | None, str]:
    """How the targets are counted, by the first of them, and what that counts; None if they are numbers."""
    first: list[object]
    if reader.joined_by_id:
        first = list(itertools.islice(keyed_targets(targets[0]).values(), PEEKED_ROWS))
    else:
        first = [text for _, text in itertools.islice(targets[0].lines(), PEEKED_ROWS)]
    columns = summarise({"target": value} for value in first)
    if not columns or not columns[0].text:
        return None, "numbers"
    symbols = targets[0].path.name.endswith(_SYMBOLS)
    return counter(options.measure or ("words" if symbols else "characters"), options.tokenizer)


def _joined_by_id(chunks: Iterator[Rows], source: Source) -> Iterator[Rows]:
    table = keyed_targets(source)
    for rows in chunks:
        yield replace(rows, targets=[table.get(name or "") for name in rows.names()])


def _joined_by_line(chunks: Iterator[Rows], source: Source) -> Iterator[Rows]:
    lines = source.lines()
    count = 0
    for rows in chunks:
        texts = [text for _, text in itertools.islice(lines, len(rows.lengths))]
        count += len(rows.lengths)
        if len(texts) < len(rows.lengths):
            missing = count - len(rows.lengths) + len(texts)
            raise ManifestError(
                f"{source.path} ends after line {missing:,}, and the manifest has more examples",
                "A target file has one line for each example, in the same order.",
            )
        yield replace(rows, targets=texts)
    rest = next((number for number, text in lines if text.strip()), None)
    if rest is not None:
        raise ManifestError(
            f"{source.path} goes on at line {rest:,}, where the manifest has no more examples",
            "A target file has one line for each example, in the same order.",
        )
