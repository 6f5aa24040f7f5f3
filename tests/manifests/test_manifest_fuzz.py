"""Damaged manifests of every format: right lengths or one message, whatever the damage."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import SAMPLES

from batchtune.errors import ManifestError
from batchtune.manifests import ReadOptions, load_lengths

VALUES = [str(1 + number * 37 % 101) for number in range(40)]
WORDS = (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\r\n", b"\n\n", b'"', b"{", b"[", b"NaN", b"-1e999", b"\t", b",")
JUNK = (b"x" * 1_500_000, b"{" * 100_000, b"[" * 100_000, b'"' * 100_000, b"1 " * 60_000)
FEW, MANY = 40, 120

pytestmark = pytest.mark.parametrize("name", SAMPLES)


def outcome(path: Path, content: bytes, name: str, **options: object) -> ManifestError | None:
    """Reads damaged content by its format's name and without; anything but lengths or a ManifestError is raised."""
    path.write_bytes(content)
    refused = None
    try:
        load_lengths(path, ReadOptions(format=name, **options))  # type: ignore[arg-type]
    except ManifestError as error:
        assert error.message
        refused = error
    with contextlib.suppress(ManifestError):
        load_lengths(path)
    return refused


def flip(draw: random.Random, content: bytearray) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def overwrite(draw: random.Random, content: bytearray) -> None:
    start = draw.randrange(len(content))
    content[start : start + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(1, 9))


def cut(draw: random.Random, content: bytearray) -> None:
    start = draw.randrange(len(content))
    del content[start : start + draw.randrange(1, 200)]


def break_off(draw: random.Random, content: bytearray) -> None:
    del content[draw.randrange(len(content)) :]


def repeat(draw: random.Random, content: bytearray) -> None:
    start = draw.randrange(len(content))
    content[start:start] = content[start : start + draw.randrange(1, 300)] * draw.randrange(1, 4)


def insert_word(draw: random.Random, content: bytearray) -> None:
    start = draw.randrange(len(content))
    content[start:start] = draw.choice(WORDS)


DAMAGES: tuple[Callable[[random.Random, bytearray], None], ...] = (
    *(flip, flip, overwrite, cut, break_off),
    *(repeat, insert_word),
)


@pytest.mark.parametrize("mutations", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_any_damage_gives_lengths_or_one_message(name: str, mutations: int, tmp_path: Path) -> None:
    whole = SAMPLES[name].content(VALUES)
    draw = random.Random(name)
    for _ in range(mutations):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            if content:
                draw.choice(DAMAGES)(draw, content)
        target = draw.choice((None, SAMPLES[name].column))
        outcome(tmp_path / "manifest", bytes(content), name, skip_invalid=draw.random() < 0.5, target_key=target)


def test_a_very_long_line_gives_lengths_or_one_message(name: str, tmp_path: Path) -> None:
    content = SAMPLES[name].content(VALUES)
    for junk in JUNK:
        outcome(tmp_path / "manifest", content + junk, name)
        outcome(tmp_path / "manifest", junk + b"\n" + content, name)
