"""Options that a run remembers: what is taken from it, and what is not."""

import pytest

from batchtune.manifests import ReadOptions

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


def test_all_options_are_remembered():
    assert ReadOptions().completed(EVERYTHING.record()) == EVERYTHING


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
def test_what_does_not_go_with_a_given_option_is_not_taken(given, not_taken):
    found = ReadOptions(**given).completed(EVERYTHING.record())
    assert {name: getattr(found, name) for name in not_taken} == not_taken
    assert found.max_length == 30.0
