"""Manifests as texts, and what is read from them: the cases in `cases/read.yaml` and `cases/refused.yaml`."""

import json
from pathlib import Path

import pytest
from manifests.conftest import CASES
from manifests.samples import parquet
from ruamel.yaml import YAML

from batchtune.errors import UsageError
from batchtune.manifests import FORMATS, ReadOptions
from batchtune.manifests.source import Head


def cases_of(name):
    """Run a test for each case of a file."""
    cases = YAML(typ="safe").load(CASES / name)
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["case"])


def in_all(said, text):
    """Whether a text holds what must be said."""
    parts = [said] if isinstance(said, str) else said
    return all(part in (text or "") for part in parts)


@cases_of("read.yaml")
def test_lengths_are_read(read, case):
    name = case.get("file", "manifest")
    found = read(case["content"], name, **case.get("options", {}))
    assert found.values.tolist() == case["lengths"]
    if "unit" in case:
        assert found.unit == case["unit"]
    if "targets" in case:
        assert found.targets.tolist() == case["targets"]
    assert in_all(case.get("note", ""), " ".join(found.notes))


@cases_of("refused.yaml")
def test_what_is_off_is_named(refusal, case):
    name = case.get("file", "manifest")
    error = refusal(case["content"], name, **case.get("options", {}))
    assert in_all(case.get("message", ""), error.message)
    assert in_all(case.get("hint", ""), error.hint)


# What is too long for a file of cases

LONG = "x" * 2_000_000
NULLS = '{"extra": null}\n' * 1100 + '{"extra": {"duration": 7}}\n'


@pytest.mark.parametrize(
    ("content", "options", "length"),
    [
        (f'{{"text": "{LONG}", "duration": 2}}\n', {}, 2),
        (f'[{{"text": "{LONG}", "duration": 2}}]', {}, 2),
        (NULLS, {"length_key": "extra.duration", "skip_invalid": True}, 7),
    ],
    ids=["a long line", "a long item", "first rows without the path"],
)
def test_what_comes_late_is_read(read, content, options, length):
    assert read(content, **options).values.tolist() == [length]


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ('{"a":' * 100_000, {}, "line 1: the JSON is nested too deeply"),
        ("[" * 100_000, {}, "line 1: the JSON is nested too deeply"),
        (
            '{"text": "abc"}\n' * 1000 + '{"text": 5}\n',
            {"length_key": "text"},
            "line 1001: 'text' can't be read: not text: 5",
        ),
        (b"PK\x03\x04...", {}, "fits no known manifest format: it begins with '"),
        (b"fLaC\0\0", {}, "fits no known manifest format: it begins with '"),
    ],
    ids=["objects", "lists", "a number after many texts", "a zip", "a FLAC"],
)
def test_what_comes_late_or_is_binary_is_named(refusal, content, options, said):
    assert said in refusal(content, **options).message


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (
            "path,duration\na,7\n",
            {"length_key": "duration", "target_key": "duration"},
            "both name 'duration'",
        ),
        (
            '{"id": "a", "duration": 12}\n',
            {"measure": "words"},
            "'duration' holds no texts",
        ),
        (
            "duration,num_tokens\n1,2\n",
            {"length_key": "duration+num_tokens"},
            "'duration' in s and 'num_tokens' in tokens",
        ),
    ],
)
def test_options_that_do_not_go_with_it_are_usage_errors(read, content, options, said):
    with pytest.raises(UsageError, match=said):
        read(content, **options)


def test_a_misspelt_format_is_corrected(read):
    with pytest.raises(UsageError) as caught:
        read("a 3\n", format="kaldix")
    assert "Did you mean 'kaldi'?" in str(caught.value.hint)


# Formats


@pytest.mark.parametrize(
    "content", ["duration\n3\n4\n", "3 4\n5 6\n", "3,4\n", "a\n3\n", "3\na\nb\nc\n"]
)
def test_other_lines_are_no_list_of_numbers(content):
    assert not FORMATS["numbers"].fits(Head(content.encode(), complete=True))


@pytest.mark.parametrize("is_list", [False, True])
def test_cuts_of_lhotse_have_their_durations_and_texts(read, is_list):
    cut = {
        "id": "a",
        "start": 0,
        "duration": 2.5,
        "channel": 0,
        "supervisions": [{"id": "1", "text": "hello"}, {"id": "2", "text": "you"}],
        "type": "MonoCut",
    }
    written = json.dumps([cut] if is_list else cut) + "\n"
    lengths = read(written, target_key="supervisions.text", reduce="sum")
    assert (lengths.values.tolist(), lengths.unit) == ([2.5], "s")
    assert lengths.targets.tolist() == [8.0]


# Columns and units


def test_no_note_says_which_column_was_named(read):
    assert read("path,duration\na,3\n", length_key="duration").notes == ()


def test_a_row_with_invalid_length_and_target_counts_once(read):
    rows = "duration,words\n0,x\n5,9\n4,x\n3,8\n2,7\n"
    assert read(rows, target_key="words", skip_invalid=True).left_out == {
        "invalid length (zero)": 1,
        "invalid target length (text)": 1,
    }


@pytest.mark.parametrize(
    ("column", "scale", "unit"),
    [
        ("samples", "1/4000", "s"),
        ("samples", "1/192000", "s"),
        ("samples", "1/3999", None),
        ("samples", "1/192001", None),
        ("duration_ms", "1/1000", "s"),
        ("duration", "1000", "ms"),
        ("duration", "60", None),
        ("bytes", "1", "bytes"),
        ("length", "1", None),
        ("frames", "1/100", None),
    ],
)
def test_a_scale_gives_a_unit_only_where_there_is_no_doubt(read, column, scale, unit):
    lengths = read(f"path,{column}\na,5000\n", length_scale=scale)
    assert lengths.unit == unit
    told = any("name it with --unit" in note for note in lengths.notes)
    assert told == (unit is None)


# Texts and tokens

TEXTS = '{"text": "one two"}\n{"text": "three"}\n'


def test_a_note_says_that_characters_are_counted_and_what_else(read):
    (note, *_) = read(TEXTS, length_key="text").notes
    assert "'text' holds text: its characters are counted" in note
    assert "--measure words" in note


TOKENIZED = [
    {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [2, 2]},
    {"input_ids": [1], "attention_mask": [1], "labels": [9]},
]


def test_a_sum_can_be_read_from_several_files(read):
    files = dict.fromkeys(("a.csv", "b.csv"), "prompt,answer\n3,4\n")
    assert read(files, "*.csv", length_key="prompt+answer").values.tolist() == [7, 7]


@pytest.mark.parametrize(
    "options",
    [
        {"truncate": 0.0},
        {"truncate": 5.0, "min_length": 7.0},
        {"measure": "words", "tokenizer": Path("tokenizer.json")},
        {"target_file": "a", "target_key": "b"},
    ],
)
def test_options_that_have_no_meaning_are_usage_errors(options):
    with pytest.raises(UsageError):
        ReadOptions(**options)


def test_tokens_are_counted_without_truncation_and_padding(read, tokenizer):
    found = read(TEXTS, length_key="text", tokenizer=str(tokenizer / "tokenizer.json"))
    # Each with the token that begins a text.
    assert (found.values.tolist(), found.unit) == ([3, 2], "tokens")


def test_a_tokenized_data_set_needs_no_options(read):
    found = read(parquet(TOKENIZED))
    assert (found.values.tolist(), found.unit) == ([3, 1], "tokens")
    found = read(parquet(TOKENIZED), length_key="input_ids", target_key="labels")
    assert found.targets.tolist() == [2, 1]


def test_a_tokenizer_that_is_none_is_an_error(refusal, tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "broken.json").write_text("{}")
    for name, said in (("broken", "is not a tokenizer"), ("absent", "does not exist")):
        path = str(tmp_path / f"{name}.json")
        assert said in refusal(TEXTS, length_key="text", tokenizer=path).message
