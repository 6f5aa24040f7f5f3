"""Files beside a manifest that tell the target lengths: one line for each of its rows, or one for each id."""

from __future__ import annotations

import re
from collections.abc import Iterator

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.source import Source
from batchtune.manifests.values import number

_SHAPE = re.compile(r"\d+(?:,\d+)+", re.ASCII)


def aligned_targets(source: Source) -> Iterator[tuple[int, str]]:
    """Number and text of every line: fairseq's `.ltr` and `.wrd`, and any plain text.

    A blank line is the target of its row like any other, since targets may be empty.

    Raises:
        ManifestError: It can't be read, or is no UTF-8.
    """
    return source.lines()


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
