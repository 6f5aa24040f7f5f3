"""The options of a reader, and the length scale as it is written."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.errors import UsageError
from batchtune.manifests import ReadOptions, parse_scale


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        (" 1 / 16000 ", Fraction(1, 16000)),
        ("1e-3", Fraction(1, 1000)),
        ("0.5/2", Fraction(1, 4)),
        (".25", Fraction(1, 4)),
    ],
)
def test_a_scale_is_read_exactly(text, scale):
    assert parse_scale(text) == scale


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-1",
        "1/0",
        "1/-2",
        "nan",
        "1e999999999",
        "1_0",
        "1,5",
    ],
)
def test_what_is_no_positive_number_is_a_usage_error(text):
    with pytest.raises(UsageError) as caught:
        parse_scale(text)
    assert caught.value.hint


@given(
    st.fractions(min_value=Fraction(1, 10**9), max_value=10**9, max_denominator=10**9)
)
def test_a_written_fraction_is_read_back(scale):
    assert parse_scale(str(scale)) == scale


@given(st.text(max_size=20))
def test_any_text_gives_a_positive_scale_or_a_usage_error(text):
    try:
        assert parse_scale(text) > 0
    except UsageError:
        pass


def test_limits_that_exclude_each_other_are_a_usage_error():
    with pytest.raises(
        UsageError,
        match="no example has a length from --min-length 3 to --max-length 2",
    ):
        ReadOptions(min_length=3, max_length=2)


def test_truncated_examples_count_as_long_as_they_are_cut(read):
    content = "duration,num_words\n3,8\n5,6\n9,7\n40,1\n"
    limits = {"truncate": 5.0, "max_length": 30.0}
    found = read(content, target_key="num_words", **limits)
    assert found.values.tolist() == [5, 5, 3]
    # Targets are not truncated.
    assert sorted(found.targets.tolist()) == [6, 7, 8]
    assert (found.truncated, found.left_out) == (1, {"longer than --max-length 30": 1})
    assert found.summary().truncated == 1
