"""Which column the lengths are taken from."""

from __future__ import annotations

import re

import pytest
from manifests.conftest import cases

from batchtune.errors import UsageError


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


def test_a_note_says_which_column_was_taken_unless_named(read) -> None:
    said = ("Lengths are taken from column 'duration', in s.",)
    assert read("path,duration\na,3\n").notes == said
    assert read("path,duration\na,3\n", length_key="duration").notes == ()


WORDS = {"target_key": "words"}
READ = {
    "a candidate that is the target is no candidate": (
        "num_prefill_tokens,num_decode_tokens\n10,3\n",
        {"target_key": "num_decode_tokens"},
        [(10, 3)],
    ),
    "a known name without numbers yields to one with numbers": (
        '{"tokens": ["a", "b"], "duration": 2, "words": 1}\n',
        WORDS,
        [(2, 1)],
    ),
    "targets stay with their lengths": (
        "duration,words\n3,1\n5,9\n4,0\n",
        WORDS,
        [(5, 9), (4, 0), (3, 1)],
    ),
    "targets are left out with their lengths": (
        "duration,words\n3,1\n5,9\n0,7\n4,2\n",
        {**WORDS, "max_length": 4, "skip_invalid": True},
        [(4, 2), (3, 1)],
    ),
    "the length scale leaves targets alone": (
        "samples,words\n16000,3\n",
        {**WORDS, "length_scale": "1/16000"},
        [(1, 3)],
    ),
}


@cases(READ, "content options pairs")
def test_lengths_and_targets_are_read(read, content, options, pairs) -> None:
    found = read(content, **options)
    assert list(zip(found.values, found.targets, strict=True)) == pairs


REFUSED = {
    "two candidates are listed with an example of each": (
        '{"duration": 3.5, "num_samples": 56000, "text": "a"}\n',
        {},
        "2 columns.*'duration' .such as 3.5., 'num_samples' .such as 56000.",
        "--length-key",
    ),
    "without a candidate all columns are listed": (
        "path,votes,text\na,3,x\n",
        {},
        "'path', 'votes', 'text'",
        "--length-key",
    ),
    "a table without a header needs one": (
        "a,3.5\nb,4.5\n",
        {"format": "table"},
        "",
        "first line",
    ),
    "a name of no column lists the columns": (
        "path,num_words\na,7\n",
        {"length_key": "num_word"},
        r"no column 'num_word' \(--length-key\)\. Its columns: 'path', 'num_words'",
        "",
    ),
    "a target of no column is said to be the target key": (
        "path,duration\na,7\n",
        {"target_key": "tokens"},
        r"\(--target-key\)",
        "",
    ),
}


@cases(REFUSED, "content options message hint")
def test_what_has_no_column_is_refused(
    refusal, content, options, message, hint
) -> None:
    error = refusal(content, **options)
    assert re.search(message, error.message)
    assert hint in error.hint


def test_one_column_can_not_be_both(read) -> None:
    with pytest.raises(UsageError, match="both name 'duration'"):
        read("path,duration\na,7\n", length_key="duration", target_key="duration")


@pytest.mark.parametrize(
    ("value", "reason"),
    [("-1", "negative"), ("x", "text"), ("", "empty"), ("nan", "NaN")],
)
def test_an_invalid_target_is_named(refusal, value: str, reason: str) -> None:
    message = refusal(f"id,duration,words\na,3,{value}\nb,1,1\n", **WORDS).message
    assert "line 2, id 'a': 'words' is" in message
    assert reason in message


def test_a_row_with_invalid_length_and_target_counts_once(read) -> None:
    rows = "duration,words\n0,x\n5,9\n4,x\n3,8\n2,7\n"
    assert read(rows, **WORDS, skip_invalid=True).left_out == {
        "invalid length (zero)": 1,
        "invalid target length (text)": 1,
    }
