"""A survey as plain text.

The snapshots hold whole surveys, 80 columns wide. To write them anew after a wanted change:

    REFRESH_SNAPSHOTS=1 python -m pytest tests/reports/test_survey_text.py

and read the difference before keeping it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchtune.lengths import Lengths, Unit
from batchtune.reports.survey_text import headline, render_survey

SNAPSHOTS = Path(__file__).parent / "snapshots"


def speech() -> Lengths:
    """Sentences of 1 s to 16 s, most of them near 14 s, cut off at 16 s."""
    part = (np.arange(28_000) + 0.5) / 28_000
    values = np.round(16 - 15 * part**1.5 * (1 - 0.2 * part), 3)
    return Lengths.of([*values, *[16.0] * 539], unit="s", notes=("Lengths are converted from ms to s.",))


def texts() -> Lengths:
    """Prompts and answers, some of the prompts very long."""
    part = (np.arange(12_000) + 0.5) / 12_000
    values = np.ceil(900 * (1 / part) ** 0.65)
    return Lengths.of(
        values,
        np.ceil(800 * part),
        unit="tokens",
        left_out={"invalid length (zero)": 247, "longer than --max-length 700000": 1},
    )


SURVEYS = {"survey-speech": speech(), "survey-tail": texts(), "survey-equal": Lengths.of([512.0] * 4000)}


def bars(text: str) -> list[str]:
    """What stands behind the share of each bin."""
    return [line.rpartition("%")[2].strip() for line in text.splitlines() if re.match(r" +\S+ to +\S+ ", line)]


@pytest.mark.parametrize("name", SURVEYS)
def test_the_survey_is_as_in_its_snapshot(name: str) -> None:
    path, text = SNAPSHOTS / f"{name}.txt", render_survey(SURVEYS[name])
    if os.environ.get("REFRESH_SNAPSHOTS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@given(st.lists(st.floats(1e-9, 1e15), min_size=1, max_size=50), st.booleans())
@example([0.0078125, 1.192092896e-07], False)
@settings(deadline=None, max_examples=30)
def test_no_line_is_wider_than_80_columns(values: list[float], with_targets: bool) -> None:
    text = render_survey(Lengths.of(values, values if with_targets else None, unit="s"))
    assert max(map(len, text.splitlines())) <= 80


def test_the_longest_bin_comes_first() -> None:
    lines = render_survey(Lengths.of([1, 5, 9, 9, 9, 9], unit="s")).splitlines()
    start = next(index for index, line in enumerate(lines) if "examples" in line)
    assert lines[start + 1].split()[:5] == ["9", "to", "8", "4", "66.7%"]


def test_bars_are_as_long_as_the_shares() -> None:
    drawn = bars(render_survey(Lengths.of([1] * 10 + [2] * 40, unit="tokens")))
    assert len(drawn[0]) == pytest.approx(4 * len(drawn[1]), abs=3)


def test_a_bin_with_one_example_of_many_has_a_bar_to_see() -> None:
    drawn = bars(render_survey(Lengths.of([1] * 100_000 + [20], unit="tokens")))
    assert drawn[0] == "▏" and drawn[1] == ""


def test_a_stream_without_block_characters_gets_ascii() -> None:
    lengths = Lengths.of([0.000001] * 9 + [0.00002], unit="s", notes=("é is read.",))
    text = render_survey(lengths, ascii=True)
    assert text.isascii()
    assert set("".join(bars(render_survey(texts(), ascii=True)))) <= {"#", "."}


def test_an_option_and_its_value_stay_on_one_line() -> None:
    for longest in (8e5, 9e5, 1e6, 2e6, 1e7, 1e8):
        lines = render_survey(Lengths.of([*np.linspace(100_000, 200_000, 300), longest], unit="s")).splitlines()
        assert not any(line.rstrip().rsplit(" ", 1)[-1].startswith("--") for line in lines)


def test_very_long_numbers_stand_one_below_the_other() -> None:
    text = render_survey(Lengths.of([1e14 + 2e8 * index for index in range(500_000, 500_009)], [1] * 9, unit="bytes"))
    assert "  longest   200,001,600,000,000       1" in text.splitlines()


@pytest.mark.parametrize(
    ("values", "unit", "line"),
    [
        ([24.525, 14, 1.41], "s", "3 lengths in descending order: 24.52 s to 1.41 s, 39.9 s in all."),
        ([24_525, 9000, 9000], "ms", "3 lengths in descending order: 24,525 ms to 9000 ms, 42.5 s in all."),
        ([3000, 600.2], "s", "2 lengths in descending order: 3000 s to 600.2 s, 1 h in all."),
        ([4000, 1], "tokens", "2 lengths in descending order: 4000 to 1 token, 4001 in all."),
        ([999_999, 1], "bytes", "2 lengths in descending order: 999,999 to 1 byte, 1 million in all."),
        ([5e9, 1], None, "2 lengths in descending order: 5,000,000,000 to 1, 5 billion in all."),
        ([30, 30], "s", "2 lengths, all of 30 s: 1 min 00 s in all."),
        ([30], "s", "1 length: 30 s."),
    ],
)
def test_the_first_line_says_how_many_how_long_and_how_much(values: list[float], unit: Unit | None, line: str) -> None:
    assert headline(Lengths.of(values, unit=unit))[0] == line


def test_the_second_line_says_how_lengths_are_spread() -> None:
    assert headline(Lengths.of([4, 3, 3, 2, 1], unit="s"))[1] == "Median 3, p95 4, p99 4 s; 4 different lengths."


def test_the_third_line_says_how_long_targets_are() -> None:
    assert (
        headline(Lengths.of([4, 3, 2], [10, 0, 12000], unit="tokens"))[2]
        == "Targets: 12,000 to 0, 12,010 in all; median 10, p95 12,000, p99 12,000."
    )


def test_the_headline_ends_with_left_out_examples_and_notes() -> None:
    lengths = Lengths.of([4, 3], left_out={"shorter than --min-length 1": 1, "empty": 2}, notes=("Read twice.",))
    assert headline(lengths)[-3:] == [
        "Left out: 1 example, shorter than --min-length 1.",
        "Left out: 2 examples, empty.",
        "Read twice.",
    ]
