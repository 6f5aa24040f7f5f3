"""Options that a run remembers: what is taken from it, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from batchtune.errors import ResultError
from batchtune.manifests import ReadOptions
from batchtune.results import ReadingRecord

EVERYTHING = ReadOptions(
    format="table",
    length_key="duration_ms",
    target_file="text",
    unit="s",
    length_scale="1/1000",
    min_length=0.0,
    max_length=30.0,
    truncate=20.0,
    skip_invalid=True,
    tokenizer="tokenizer.json",
    reduce="max",
)


def test_all_options_are_remembered() -> None:
    assert ReadOptions().completed(EVERYTHING.record()) == EVERYTHING


def test_what_was_given_goes_first() -> None:
    given = ReadOptions(max_length=40.0, min_length=0.0)
    found = given.completed(
        ReadingRecord(max_length=30.0, min_length=1.0, length_scale="1/1000")
    )
    assert found == ReadOptions(max_length=40.0, min_length=0.0, length_scale="1/1000")


@pytest.mark.parametrize(
    ("given", "not_taken"),
    [
        ({"measure": "words"}, {"tokenizer": None}),
        ({"target_key": "text"}, {"target_file": None}),
        # What another column's values mean.
        (
            {"length_key": "seconds"},
            {"unit": None, "length_scale": None, "tokenizer": None, "reduce": None},
        ),
    ],
)
def test_what_does_not_go_with_a_given_option_is_not_taken(
    given: dict[str, Any], not_taken: dict[str, Any]
) -> None:
    found = ReadOptions(**given).completed(EVERYTHING.record())
    assert {name: getattr(found, name) for name in not_taken} == not_taken
    assert found.max_length == 30.0


@pytest.mark.parametrize(
    "record",
    [
        ReadingRecord(unit="parsecs"),
        ReadingRecord(length_scale="__import__('os')"),
        ReadingRecord(measure="evil"),
        ReadingRecord(min_length=2.0, max_length=1.0),
    ],
)
def test_a_damaged_record_is_an_error_of_the_file(record: ReadingRecord) -> None:
    with pytest.raises(ResultError, match="the run"):
        ReadOptions().completed(record)
