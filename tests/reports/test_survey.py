"""The survey of a data set's lengths: its figures against plain definitions, and what it cautions against."""

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports.test_terminal import AsciiStream
from rich.console import Console

from batchtune.lengths import Lengths
from batchtune.reports.page import make_page, survey, survey_section, survey_sentences
from batchtune.reports.terminal import text_of

FLOATS = st.floats(1e-9, 1e15)
ANY_LENGTHS = st.one_of(
    st.lists(FLOATS, min_size=1, max_size=200),
    st.lists(st.floats(0.2, 40), min_size=1, max_size=200),
    st.lists(st.integers(1, 300).map(float), min_size=1, max_size=200),
    st.lists(st.integers(1, 10**6).map(float), min_size=1, max_size=200),
)


def nearest_rank(values, thousandths):
    """The smallest value that at least that share does not exceed, by counting."""
    return min(
        value
        for value in values
        if 1000 * sum(v <= value for v in values) >= thousandths * len(values)
    )


def warnings_of(values, unit=None):
    return survey(Lengths.of(values, unit=unit)).warnings


def spoken(count=2000):
    """Lengths as of spoken sentences: 1 s to 16 s, each different."""
    return [1 + 15 * (index + 0.37) / count for index in range(count)]


@given(ANY_LENGTHS)
def test_percentiles_are_the_nearest_ranks(values):
    found = survey(Lengths.of(values))
    ranks = {"min": 0, "median": 500, "p95": 950, "p99": 990, "p999": 999, "max": 1000}
    for name, thousandths in ranks.items():
        assert getattr(found.percentiles, name) == nearest_rank(values, thousandths)
    assert found.distinct == len(set(values))


@given(ANY_LENGTHS)
def test_the_bins_hold_each_example_once_in_descending_order(values):
    bins = survey(Lengths.of(values)).histogram
    assert [one.count for one in bins] == [
        sum(one.from_ < value <= one.to for value in values) for one in bins
    ]
    assert sum(one.count for one in bins) == len(values)
    assert [one.from_ for one in bins[:-1]] == [one.to for one in bins[1:]]
    assert all(one.from_ < one.to for one in bins)
    assert len(bins) <= 20 and bins[0].count and bins[-1].count


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        (spoken(), "s"),
        (range(200, 15_200), "ms"),
        (range(1, 4000), "tokens"),
        (np.arange(1, 4000) + 0.5, None),
    ],
)
def test_ordinary_data_give_no_caution(values, unit):
    assert survey(Lengths.of(values, unit=unit)).warnings == []


def test_a_few_very_long_examples_come_with_cost_and_gain():
    (warning,) = warnings_of([*[16.2] * 3000, *spoken(997), 33.0, 34.0, 35.2], "s")
    assert warning == (
        "3 examples longer than 16.2 s, up to 35.2 s, alone decide how large a fixed batch can be. --max-length 16.2 "
        "leaves them out, 0.179% of the total length."
    )


@pytest.mark.parametrize(
    ("median", "unit", "said"),
    [
        (
            224_000.0,
            "s",
            "A median of 224,000 s is 62 h 13 min for one example. Is the unit right?",
        ),
        (11_000_000.0, "ms", "is 3 h 03 min for one example"),
        (0.000875, "s", "is 875 µs for one example"),
        (14.08, "ms", "is 14.1 ms for one example"),
        (14.08, "samples", "is 880 µs for one example"),
        (
            140.8,
            "frames",
            "Frames come in whole numbers, but some lengths are not whole, such as 169. Is the unit right?",
        ),
        (14.08, "tokens", "such as 16.9"),
    ],
)
def test_a_unit_that_does_not_fit_the_median_is_told(median, unit, said):
    warning = warnings_of([0.8 * median, median, 1.2 * median], unit)[0]
    assert said in warning and "--length-scale" in warning


# In words


@pytest.mark.parametrize(
    ("values", "unit", "line"),
    [
        (
            [24.525, 14, 1.41],
            "s",
            "3 lengths in descending order: 24.52 s to 1.41 s, 39.9 s in all.",
        ),
        (
            [24_525, 9000, 9000],
            "ms",
            "3 lengths in descending order: 24,525 ms to 9000 ms, 42.5 s in all.",
        ),
        (
            [4000, 1],
            "tokens",
            "2 lengths in descending order: 4000 tokens to 1 token, 4001 tokens in all.",
        ),
        ([30], "s", "1 length in descending order: 30 s to 30 s, 30 s in all."),
    ],
)
def test_the_first_line_says_how_many_how_long_and_how_much(values, unit, line):
    assert next(survey_sentences(survey(Lengths.of(values, unit=unit)))) == line


def test_the_next_lines_say_the_spread_and_what_was_left_out():
    left_out = {"shorter than --min-length 1": 1, "empty": 2}
    lengths = replace(
        Lengths.of([4, 3, 2], [10, 0, 12000], unit="tokens"),
        left_out=left_out,
        notes=("Read twice.",),
    )
    assert list(survey_sentences(survey(lengths)))[1:] == [
        "Percentiles: median 3, p95 4, p99 4, p99.9 4; 3 distinct lengths.",
        "Targets: 12,000 to 0; median 10, p95 12,000, p99 12,000, p99.9 12,000.",
        "Left out: 1 example, shorter than --min-length 1.",
        "Left out: 2 examples, empty.",
        "Read twice.",
    ]


@pytest.mark.parametrize(("stream", "bar"), [(io.StringIO, "█"), (AsciiStream, "#")])
def test_the_histogram_has_bars_as_long_as_the_shares(stream, bar):
    console = Console(file=stream(), width=80, color_system=None, _environ={})
    scan = survey(Lengths.of([1] * 10 + [20] * 40, unit="tokens"))
    page = make_page("scan", [survey_section(scan)])
    lines = text_of(page, console, full=True).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.count(bar) for line in lines if bar in line] == [30, 8]
