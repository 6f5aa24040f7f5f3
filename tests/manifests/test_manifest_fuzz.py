"""Damaged manifests: right lengths or one message, whatever the damage. pyarrow's formats promise less, see below."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from samples import SAMPLES

from batchtune.errors import BatchtuneError
from batchtune.manifests import ReadOptions, load_lengths

VALUES = [str(1 + number * 37 % 101) for number in range(40)]
WORDS = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\r\n",
    b"\n\n",
    b'"',
    b"{",
    b"[",
    b"NaN",
    b"-1e999",
    b"\t",
    b",",
)
JUNK = (
    b"x" * 1_500_000,
    b"{" * 100_000,
    b"[" * 100_000,
    b'"' * 100_000,
    b"1 " * 60_000,
)

# A damaged Parquet or Arrow file can do to batchtune what it does to pandas.
pytestmark = pytest.mark.parametrize(
    "name", sorted(SAMPLES.keys() - {"parquet", "arrow"})
)


def check(path: Path, content: bytes, name: str, **options: object) -> None:
    """Reads damaged content by its format's name and without: lengths, or one error."""
    path.write_bytes(content)
    with contextlib.suppress(BatchtuneError):
        load_lengths(path, ReadOptions(format=name, **options))  # type: ignore[arg-type]
    with contextlib.suppress(BatchtuneError):
        load_lengths(path)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Some bytes replaced by random ones, by a word or by nothing; or all from there on cut off."""
    start = draw.randrange(len(content))
    end = draw.choice((start, start + draw.randrange(1, 9), start + 200, len(content)))
    return (
        content[:start]
        + draw.choice((b"", draw.choice(WORDS), draw.randbytes(4)))
        + content[end:]
    )


def test_any_damage_gives_lengths_or_one_message(name: str, tmp_path: Path) -> None:
    whole = SAMPLES[name].content(VALUES)
    draw = random.Random(name)
    for _ in range(40):
        target = draw.choice((None, SAMPLES[name].column))
        content = damaged(damaged(whole, draw) or whole, draw)
        check(
            tmp_path / "manifest",
            content,
            name,
            skip_invalid=draw.random() < 0.5,
            target_key=target,
        )


def test_a_very_long_line_gives_lengths_or_one_message(
    name: str, tmp_path: Path
) -> None:
    content = SAMPLES[name].content(VALUES)
    for junk in JUNK:
        check(tmp_path / "manifest", content + junk, name)
        check(tmp_path / "manifest", junk + b"\n" + content, name)
