"""Damaged manifests: right lengths or one message, whatever the damage. pyarrow's formats promise less, see below."""

import contextlib
import random

import pytest
from samples import SAMPLES, damaged

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
    b'"' + b'\\"' * 20_000,
    b'{"a":' * 5000,
    b'ID,duration\na,"1\n',
    b"\x1c",
)

# A damaged Parquet or Arrow file can do to batchtune what it does to pandas.
pytestmark = pytest.mark.parametrize(
    "name", sorted(SAMPLES.keys() - {"parquet", "arrow"})
)


def check(path, content, name, **options):
    """Reads damaged content by its format's name and without: lengths, or one error."""
    path.write_bytes(content)
    with contextlib.suppress(BatchtuneError):
        load_lengths(path, ReadOptions(format=name, **options))
    with contextlib.suppress(BatchtuneError):
        load_lengths(path)


def test_any_damage_gives_lengths_or_one_message(name, tmp_path):
    whole = SAMPLES[name].content(VALUES)
    draw = random.Random(name)
    for _ in range(40):
        target = draw.choice((None, SAMPLES[name].column))
        content = damaged(damaged(whole, draw, WORDS) or whole, draw, WORDS)
        check(
            tmp_path / "manifest",
            content,
            name,
            skip_invalid=draw.random() < 0.5,
            target_key=target,
        )


def test_a_very_long_line_gives_lengths_or_one_message(name, tmp_path):
    content = SAMPLES[name].content(VALUES)
    for junk in JUNK:
        check(tmp_path / "manifest", content + junk, name)
        check(tmp_path / "manifest", junk + b"\n" + content, name)
