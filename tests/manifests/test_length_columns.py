"""Which column the lengths are taken from."""

from __future__ import annotations

import pytest

from batchtune.errors import UsageError
from batchtune.lengths import UNITS
from batchtune.manifests.base import KNOWN_UNITS, normalised


@pytest.mark.parametrize(
    ("header", "unit"),
    [
        ("duration", "s"),
        ("Duration", "s"),
        ("duration (s)", "s"),
        ("duration_ms", "ms"),
        ("Duration [ms]", "ms"),
        ("num_samples", "samples"),
        ("num-frames", "frames"),
        ("input_length", "tokens"),
        ("num_chars", "characters"),
        ("size", "bytes"),
        ("length", None),
    ],
)
def test_a_known_name_is_found_and_implies_its_unit(
    read, header: str, unit: str | None
) -> None:
    assert read(f"path,{header},text\na,3,x\n").unit == unit


def test_every_known_name_is_normalised_and_has_a_known_unit() -> None:
    assert all(normalised(name) == name for name in KNOWN_UNITS)
    assert {unit for unit in KNOWN_UNITS.values() if unit} == set(UNITS)


def test_a_note_says_which_column_was_taken(read) -> None:
    assert read("path,duration\na,3\n").notes == (
        "Lengths are taken from column 'duration', in s.",
    )


def test_no_note_where_the_user_named_the_column(read) -> None:
    assert read("path,duration\na,3\n", length_key="duration").notes == ()


def test_two_candidates_are_listed_with_an_example_of_each(refusal) -> None:
    error = refusal('{"duration": 3.5, "num_samples": 56000, "text": "a"}\n')
    assert "2 columns" in error.message
    assert "'duration' (such as 3.5), 'num_samples' (such as 56000)" in error.message
    assert "--length-key" in error.hint


def test_a_candidate_that_is_the_target_is_no_candidate(read) -> None:
    lengths = read(
        "num_prefill_tokens,num_decode_tokens\n10,3\n", target_key="num_decode_tokens"
    )
    assert (lengths.values.tolist(), lengths.targets.tolist()) == ([10.0], [3.0])


def test_a_known_name_without_numbers_yields_to_one_with_numbers(read) -> None:
    assert read('{"tokens": ["a", "b"], "duration": 2}\n').values.tolist() == [2.0]


def test_without_a_candidate_all_columns_are_listed(refusal) -> None:
    error = refusal("path,votes,text\na,3,x\n")
    assert "'path', 'votes', 'text'" in error.message
    assert "--length-key" in error.hint


def test_a_table_without_a_header_is_told_that_it_needs_one(refusal) -> None:
    assert "first line" in refusal("a,3.5\nb,4.5\n", format="table").hint


def test_a_name_of_no_column_lists_the_columns(refusal) -> None:
    error = refusal("path,num_words\na,7\n", length_key="num_word")
    assert (
        "no column 'num_word' (--length-key). Its columns: 'path', 'num_words'"
        in error.message
    )


def test_a_target_of_no_column_is_said_to_be_the_target_key(refusal) -> None:
    assert (
        "(--target-key)" in refusal("path,duration\na,7\n", target_key="tokens").message
    )


def test_one_column_can_not_be_both(read) -> None:
    with pytest.raises(UsageError, match="both name 'duration'"):
        read("path,duration\na,7\n", length_key="duration", target_key="duration")


def test_targets_stay_and_are_filtered_with_their_lengths(read) -> None:
    assert read(
        "duration,words\n3,1\n5,9\n4,0\n", target_key="words"
    ).targets.tolist() == [9.0, 0.0, 1.0]
    lengths = read(
        "duration,words\n3,1\n5,9\n0,7\n4,2\n",
        target_key="words",
        max_length=4,
        skip_invalid=True,
    )
    assert lengths.targets.tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [("-1", "negative"), ("x", "text"), ("", "empty"), ("nan", "NaN")],
)
def test_an_invalid_target_is_named(refusal, value: str, reason: str) -> None:
    message = refusal(
        f"id,duration,words\na,3,{value}\nb,1,1\n", target_key="words"
    ).message
    assert "line 2, id 'a': 'words' is" in message
    assert reason in message


def test_a_row_with_invalid_length_and_target_counts_once(read) -> None:
    lengths = read(
        "duration,words\n0,x\n5,9\n4,x\n3,8\n2,7\n",
        target_key="words",
        skip_invalid=True,
    )
    assert lengths.left_out == {
        "invalid length (zero)": 1,
        "invalid target length (text)": 1,
    }


def test_the_length_scale_leaves_targets_alone(read) -> None:

    lengths = read(
        "samples,words\n16000,3\n", target_key="words", length_scale="1/16000"
    )
    assert (lengths.longest, lengths.targets.tolist()) == (1.0, [3.0])
