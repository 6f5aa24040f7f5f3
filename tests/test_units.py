"""Numbers with their units, at the edges where rounding changes the unit."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchtune.errors import UsageError
from batchtune.units import (
    counted,
    format_number,
    format_seconds,
    format_size,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1073741824", 1024**3),
        ("2 gib", 2 * 1024**3),
        ("1.5K", 1536),
        ("500MB", 500 * 1000**2),
        (" 1kB ", 1000),
    ],
)
def test_a_size_is_read_with_its_unit(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "0.5", "1e3", "1\u212a", "9" * 308 + "TiB"],
)
def test_what_is_no_size_is_a_usage_error_that_names_it(text):
    with pytest.raises(UsageError, match=re.escape(repr(text)[:70])):
        parse_size(text)


def test_a_small_size_needs_a_unit():
    with pytest.raises(UsageError, match="16' needs a unit") as caught:
        parse_size("16")
    assert "16GiB" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1000 * 1024, "1,000 KiB"),
        (1023.6 * 1024, "1 MiB"),
        (1.9 * 1024**3, "1.9 GiB"),
        (1234 * 1024**4, "1,234 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_a_size_is_shown_with_three_digits_in_a_fitting_unit(size_bytes, text):
    assert format_size(size_bytes) == text


@given(st.integers(0, 2**60))
@example(1152)
def test_a_shown_size_is_within_half_a_percent_or_a_byte(size_bytes):
    shown = parse_size(format_size(size_bytes).replace(",", "")) if size_bytes else 0
    assert abs(shown - size_bytes) <= max(1.0, 0.005 * size_bytes)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (24.525, "24.52"),
        (9999.4, "9999"),
        (9999.5, "10,000"),
    ],
)
def test_a_number_is_shown_with_four_digits_or_in_groups(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.000_999_4, "999 µs"),
        (0.000_999_6, "1 ms"),
        (59.96, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
    ],
)
def test_a_time_span_is_shown_in_the_unit_of_its_rounded_value(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(1, "1 cell"), (28539, "28,539 cells")])
def test_a_count_agrees_with_its_noun(count, text):
    assert counted(count, "cell") == text
