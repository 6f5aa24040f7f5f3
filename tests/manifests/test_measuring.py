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

LAYOUTS = {"lines": LINES, "list": LIST, "object": OBJECT}
COUNTED = {"reduce": "count", "unit": "tokens"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("key", "options", "lengths", "unit"),
    [
        ("text", {}, [7, 5], "characters"),
        ("text", {"measure": "words"}, [2, 1], "words"),
        ("deep.q", {"measure": "bytes"}, [4, 2], "bytes"),
        ("deep.turns.0.content", {}, [3, 2], "characters"),
        ("deep.turns.content", {"reduce": "sum"}, [6, 3], "characters"),
        ("deep.turns.content", {"reduce": "first"}, [3, 2], "characters"),
        ("deep.turns.content", {"reduce": "count"}, [2, 1], None),
        ("ids", COUNTED, [3, 1], "tokens"),
        ("ids", {"reduce": "max"}, [7, 1], None),
    ],
)
def test_texts_lists_and_nested_values(
    read, layout: str, key: str, options: dict, lengths: list[int], unit: str
) -> None:
    found = read(LAYOUTS[layout], length_key=key, **options)
    assert (found.values.tolist(), found.unit) == (lengths, unit)


def test_a_note_says_that_characters_are_counted_and_what_else(read) -> None:
    (note, *_) = read(LINES, length_key="text").notes
    assert "'text' holds text: its characters are counted" in note
    assert "--measure words" in note


TOKENIZED = {
    "input_ids": [[5, 6, 7], [1]],
    "attention_mask": [[1, 1, 1], [1]],
    "labels": [[2, 2], [9]],
}


def test_a_sum_can_be_read_from_several_files(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("prompt,answer\n3,4\n")
    options = ReadOptions(length_key="prompt+answer")
    assert load_lengths(
        [tmp_path / "a.csv", tmp_path / "b.csv"], options
    ).values.tolist() == [7, 7]


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


def test_tokens_are_counted_without_truncation_and_padding(
    read, tokenizer: Path
) -> None:
    found = read(LINES, length_key="text", tokenizer=str(tokenizer / "tokenizer.json"))
    # Each with the token that begins a text.
    assert (found.values.tolist(), found.unit) == ([3, 2], "tokens")


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_tokenized_data_set_needs_no_options(tmp_path: Path, as_folder: bool) -> None:
    path = tmp_path / "tokenized"
    if as_folder:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict(TOKENIZED).save_to_disk(str(path))
    else:
        pa.parquet.write_table(pa.table(TOKENIZED), path)
    found = load_lengths(path)
    assert (found.values.tolist(), found.unit) == ([3, 1], "tokens")
    found = load_lengths(path, ReadOptions(length_key="input_ids", target_key="labels"))
    assert (found.values.tolist(), found.unit) == ([3, 1], "tokens")
    assert found.targets.tolist() == [2, 1]


def test_a_tokenizer_that_is_none_is_an_error(refusal, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "broken.json").write_text("{}")
    for name, said in (("broken", "is not a tokenizer"), ("absent", "does not exist")):
        path = str(tmp_path / f"{name}.json")
        assert said in refusal(LINES, length_key="text", tokenizer=path).message
