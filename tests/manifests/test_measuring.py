"""Texts, lists and nested values as lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchtune.errors import UsageError
from batchtune.manifests import ReadOptions

ENTRIES = [
    {"text": "one two", "ids": [5, 6, 7], "deep": {"q": "è", "turns": [{"content": "ab"}, {"content": "abcd"}]}},
    {"text": "three", "ids": [1], "deep": {"q": "ßß", "turns": [{"content": "abc"}]}},
]
LINES = "".join(json.dumps(entry) + "\n" for entry in ENTRIES)
LIST = json.dumps(ENTRIES, indent=1)
OBJECT = json.dumps({f"u{i}": entry for i, entry in enumerate(ENTRIES)}, indent=1)

layouts = pytest.mark.parametrize("content", [LINES, LIST, OBJECT], ids=["lines", "list", "object"])


@layouts
@pytest.mark.parametrize(
    ("options", "lengths", "unit"),
    [
        ({"length_key": "text"}, [7, 5], "characters"),
        ({"length_key": "text", "measure": "words"}, [2, 1], "words"),
        ({"length_key": "deep.q", "measure": "bytes"}, [4, 2], "bytes"),
        ({"length_key": "deep.turns.0.content"}, [3, 2], "characters"),
        ({"length_key": "deep.turns.content", "reduce": "sum"}, [6, 3], "characters"),
        ({"length_key": "deep.turns.content", "reduce": "first"}, [3, 2], "characters"),
        ({"length_key": "deep.turns.content", "reduce": "count"}, [2, 1], None),
        ({"length_key": "ids", "reduce": "count", "unit": "tokens"}, [3, 1], "tokens"),
        ({"length_key": "ids", "reduce": "max"}, [7, 1], None),
    ],
)
def test_texts_lists_and_nested_values(read, content: str, options: dict, lengths: list[int], unit: str) -> None:
    found = read(content, **options)
    assert (found.values.tolist(), found.unit) == (lengths, unit)


@layouts
def test_a_text_can_be_the_target(read, content: str) -> None:
    found = read(content, length_key="ids", reduce="count", target_key="text", measure="words", unit="tokens")
    assert found.values.tolist() == [3, 1]
    assert found.targets.tolist() == [2, 1]


@layouts
def test_length_and_target_may_stand_in_one_nested_value(read, content: str) -> None:
    found = read(content, length_key="deep.q", target_key="deep.turns.0.content")
    assert sorted(zip(found.values, found.targets, strict=True)) == [(1, 2), (2, 3)]


def test_a_key_with_a_dot_wins_over_a_path(read) -> None:
    assert read('{"a.b": 3, "a": {"b": 5}}\n', length_key="a.b").values.tolist() == [3]


def test_a_note_says_that_characters_are_counted_and_what_else(read) -> None:
    (note, *_) = read(LINES, length_key="text").notes
    assert "'text' holds text: its characters are counted" in note
    assert "--measure words" in note


def test_a_list_without_a_reduction_is_an_error_that_says_how(refusal) -> None:
    error = refusal(LINES, length_key="ids")
    assert "[5, 6, 7] (a list)" in error.message
    assert "--reduce max, sum, first or count" in error.hint


def test_a_column_of_numbers_is_not_measured_by_chance(read) -> None:
    assert read('{"id": "a", "duration": "12"}\n').values.tolist() == [12]


def test_measuring_what_holds_no_text_is_a_usage_error(read) -> None:
    with pytest.raises(UsageError, match="'duration' holds none"):
        read('{"id": "a", "duration": 12}\n', measure="words")


def test_a_text_of_digits_among_others_is_a_text(read) -> None:
    assert read('{"text": "in the year"}\n{"text": "1984"}\n{"text": "x"}\n', length_key="text").values.tolist() == [
        11,
        4,
        1,
    ]


def test_a_reduction_of_what_is_no_list_is_told(read) -> None:
    notes = read('{"id": "a", "duration": 12}\n', reduce="max").notes
    assert any("--reduce max has nothing to do" in note for note in notes)


def test_the_number_of_token_ids_counts_tokens(read) -> None:
    assert read('{"input_ids": [5, 6, 7]}\n', length_key="input_ids", reduce="count").unit == "tokens"


def test_digits_are_a_text_where_the_user_says_so(read) -> None:
    assert read('{"answer": "1234"}\n', length_key="answer", measure="characters").values.tolist() == [4]


def test_a_number_among_texts_is_invalid(refusal) -> None:
    rows = '{"text": "abc"}\n' * 1000 + '{"text": 5}\n'
    assert "line 1001: 'text' is 5 (not text)" in refusal(rows, length_key="text").message


def test_an_empty_text_is_said_to_be_empty(refusal) -> None:
    assert "line 2: 'text' is '' (empty)" in refusal('{"text": "abc"}\n{"text": ""}\n', length_key="text").message


def test_a_list_that_holds_a_text_can_not_be_summed(refusal) -> None:
    message = refusal('{"ids": [1, 2]}\n{"ids": [1, "x"]}\n', length_key="ids", reduce="sum").message
    assert "line 2: 'ids' is [1, 'x'] (a list that does not only hold numbers)" in message


def test_an_empty_list_has_no_largest_item(refusal) -> None:
    message = refusal('{"ids": [1, 2]}\n{"ids": []}\n', length_key="ids", reduce="max").message
    assert "(an empty list)" in message


@pytest.mark.parametrize(
    "options",
    [
        {"measure": "letters"},
        {"reduce": "mean"},
        {"measure": "words", "tokenizer": Path("tokenizer.json")},
        {"target_file": "a", "target_key": "b"},
    ],
)
def test_options_that_have_no_meaning_are_usage_errors(options: dict) -> None:
    with pytest.raises(UsageError):
        ReadOptions(**options)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(1)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_tokens_are_counted_without_truncation_and_padding(read, tokenizer: Path) -> None:
    found = read(LINES, length_key="text", tokenizer=tokenizer)
    assert (found.values.tolist(), found.unit) == ([2, 1], "tokens")


def test_a_tokenizer_that_is_none_is_an_error(refusal, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "broken.json").write_text("{}")
    assert "is not a tokenizer" in refusal(LINES, length_key="text", tokenizer=tmp_path / "broken.json").message
    assert "does not exist" in refusal(LINES, length_key="text", tokenizer=tmp_path / "absent.json").message


def test_a_path_below_what_is_null_in_the_first_rows_is_followed(read) -> None:
    rows = '{"extra": null}\n' * 1100 + '{"extra": {"duration": 7}}\n'
    assert read(rows, length_key="extra.duration", skip_invalid=True).values.tolist() == [7]
