"""Texts, lists and nested values as lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from batchtune.errors import UsageError
from batchtune.manifests import ReadOptions, load_lengths

ENTRIES = [
    {
        "text": "one two",
        "ids": [5, 6, 7],
        "deep": {"q": "è", "turns": [{"content": "ab"}, {"content": "abcd"}]},
    },
    {"text": "three", "ids": [1], "deep": {"q": "ßß", "turns": [{"content": "abc"}]}},
]
LINES = "".join(json.dumps(entry) + "\n" for entry in ENTRIES)
LIST = json.dumps(ENTRIES, indent=1)
OBJECT = json.dumps({f"u{i}": entry for i, entry in enumerate(ENTRIES)}, indent=1)

layouts = pytest.mark.parametrize(
    "content", [LINES, LIST, OBJECT], ids=["lines", "list", "object"]
)


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
def test_texts_lists_and_nested_values(
    read, content: str, options: dict, lengths: list[int], unit: str
) -> None:
    found = read(content, **options)
    assert (found.values.tolist(), found.unit) == (lengths, unit)


@layouts
def test_a_text_can_be_the_target(read, content: str) -> None:
    found = read(
        content,
        length_key="ids",
        reduce="count",
        target_key="text",
        measure="words",
        unit="tokens",
    )
    assert found.values.tolist() == [3, 1]
    assert found.targets.tolist() == [2, 1]


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


def test_measuring_what_holds_no_text_is_a_usage_error(read) -> None:
    with pytest.raises(UsageError, match="'duration' holds no texts"):
        read('{"id": "a", "duration": 12}\n', measure="words")


def test_a_text_of_digits_among_others_is_a_text(read) -> None:
    assert read(
        '{"text": "in the year"}\n{"text": "1984"}\n{"text": "x"}\n', length_key="text"
    ).values.tolist() == [
        11,
        4,
        1,
    ]


TOKENIZED = {
    "input_ids": [[5, 6, 7], [1]],
    "attention_mask": [[1, 1, 1], [1]],
    "labels": [[2, 2], [9]],
}


def write_tokenized(folder: Path, kind: str) -> Path:
    """A tokenized data set as Hugging Face's tools write it."""
    table = pa.table(TOKENIZED)
    if kind == "folder":
        pytest.importorskip("datasets").Dataset.from_dict(TOKENIZED).save_to_disk(
            str(folder / "saved")
        )
        return folder / "saved"
    path = folder / f"tokenized.{kind}"
    if kind == "parquet":
        pa.parquet.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "folder"])
def test_a_tokenized_data_set_needs_no_options(tmp_path: Path, kind: str) -> None:
    path = write_tokenized(tmp_path, kind)
    found = load_lengths(path)
    assert (found.values.tolist(), found.unit) == ([3, 1], "tokens")
    found = load_lengths(path, ReadOptions(length_key="input_ids", target_key="labels"))
    assert (found.values.tolist(), found.targets.tolist(), found.unit) == (
        [3, 1],
        [2, 1],
        "tokens",
    )


def test_the_length_next_to_tokens_counts_them(read) -> None:
    found = read('{"input_ids": [5, 6, 7], "length": 3}\n')
    assert (found.values.tolist(), found.unit) == ([3], "tokens")
    assert read('{"labels": [5, 6, 7], "length": 3}\n').unit is None  # perhaps speech


@pytest.mark.parametrize(
    ("options", "lengths", "unit"),
    [
        ({"length_key": "prompt_tokens+answer_tokens"}, [9, 4], "tokens"),
        ({"length_key": "prompt + answer"}, [9, 4], "characters"),
        ({"length_key": "prompt+answer", "measure": "words"}, [3, 1], "words"),
        (
            {"length_key": "ids+ids", "reduce": "sum", "length_scale": "1/2"},
            [4, 3],
            None,
        ),
    ],
)
def test_a_length_can_be_the_sum_of_columns(
    read, options: dict, lengths: list[int], unit: str
) -> None:
    rows = (
        '{"prompt": "one two", "answer": "ok", "prompt_tokens": 6, "answer_tokens": 3, "ids": [1, 3]}\n'
        '{"prompt": "four", "answer": "", "prompt_tokens": 4, "answer_tokens": 0, "ids": [3]}\n'
    )
    found = read(rows, **options)
    assert (found.values.tolist(), found.unit) == (lengths, unit)


def test_a_column_whose_name_has_a_plus_wins_over_a_sum(read) -> None:
    assert read("a,b,a+b\n1,2,7\n", length_key="a+b").values.tolist() == [7]


@pytest.mark.parametrize(
    ("row", "said"), [("0,0", "'a+b' is 0.0 (zero)"), ("x,1", "'a' is 'x' (text)")]
)
def test_an_invalid_sum_is_named(refusal, row: str, said: str) -> None:
    assert f"line 3: {said}" in refusal(f"a,b\n0,1\n{row}\n", length_key="a+b").message


def test_a_summand_that_is_no_column_is_named(refusal) -> None:
    assert (
        "no column 'answr'"
        in refusal("prompt,answer\n1,2\n", length_key="prompt+answr").message
    )


def test_columns_of_two_units_are_not_added(read) -> None:
    with pytest.raises(UsageError, match="'duration' in s and 'num_tokens' in tokens"):
        read("duration,num_tokens\n1,2\n", length_key="duration+num_tokens")


def test_a_sum_can_be_read_from_several_files(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("prompt,answer\n3,4\n")
    options = ReadOptions(length_key="prompt+answer")
    assert load_lengths(
        [tmp_path / "a.csv", tmp_path / "b.csv"], options
    ).values.tolist() == [7, 7]


def test_digits_are_a_text_where_the_user_says_so(read) -> None:
    assert read(
        '{"answer": "1234"}\n', length_key="answer", measure="characters"
    ).values.tolist() == [4]


def test_a_number_among_texts_is_invalid(refusal) -> None:
    rows = '{"text": "abc"}\n' * 1000 + '{"text": 5}\n'
    assert (
        "line 1001: 'text' can't be read: not text: 5"
        in refusal(rows, length_key="text").message
    )


def test_an_empty_text_is_said_to_be_empty(refusal) -> None:
    assert (
        "line 2: 'text' is '' (empty)"
        in refusal('{"text": "abc"}\n{"text": ""}\n', length_key="text").message
    )


def test_a_list_that_holds_a_text_can_not_be_summed(refusal) -> None:
    message = refusal(
        '{"ids": [1, 2]}\n{"ids": [1, "x"]}\n', length_key="ids", reduce="sum"
    ).message
    assert (
        "line 2: 'ids' can't be read: an empty list, or not of numbers: [1, 'x']"
        in message
    )


def test_an_empty_list_has_no_largest_item(refusal) -> None:
    message = refusal(
        '{"ids": [1, 2]}\n{"ids": []}\n', length_key="ids", reduce="max"
    ).message
    assert "an empty list" in message


@pytest.mark.parametrize(
    "options",
    [
        {"measure": "letters"},
        {"truncate": 0.0},
        {"truncate": 5.0, "min_length": 7.0},
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
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(1)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_tokens_are_counted_without_truncation_and_padding(
    read, tokenizer: Path
) -> None:
    found = read(LINES, length_key="text", tokenizer=str(tokenizer))
    assert (found.values.tolist(), found.unit) == ([2, 1], "tokens")


def test_a_tokenizer_that_is_none_is_an_error(refusal, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "broken.json").write_text("{}")
    assert (
        "is not a tokenizer"
        in refusal(
            LINES, length_key="text", tokenizer=str(tmp_path / "broken.json")
        ).message
    )
    assert (
        "does not exist"
        in refusal(
            LINES, length_key="text", tokenizer=str(tmp_path / "absent.json")
        ).message
    )


def test_a_path_below_what_is_null_in_the_first_rows_is_followed(read) -> None:
    rows = '{"extra": null}\n' * 1100 + '{"extra": {"duration": 7}}\n'
    assert read(
        rows, length_key="extra.duration", skip_invalid=True
    ).values.tolist() == [7]
