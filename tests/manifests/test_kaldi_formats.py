"""The lists of Kaldi and ESPnet beside `utt2dur`: segments, shapes, and files of targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchtune.errors import ManifestError
from batchtune.manifests import FORMATS
from batchtune.manifests.planning import keyed_targets
from batchtune.manifests.source import Head, Source


def _detected(content: str) -> str | None:
    head = Head(content.encode(), complete=True)
    return next((name for name, member in FORMATS.items() if member.fits(head)), None)


# ---- kaldi ----


@pytest.mark.parametrize("name", ["text_shape", "text_shape.gz"])
def test_a_one_dimensional_shape_of_text_counts_tokens(read, name: str) -> None:
    assert read("a 3\nb 4\n", name).unit == "tokens"


# ---- segments ----


def test_a_segment_is_as_long_as_from_start_to_end(read) -> None:
    lengths = read("utt-a\trec\t1.5\t4.0\nutt-b rec 4 12.25\n")
    assert (lengths.values.tolist(), lengths.unit) == ([8.25, 2.5], "s")


def test_the_noise_of_subtraction_is_rounded_away(read) -> None:
    assert read("utt-a rec 0.1 0.3\n").values.tolist() == [0.2]


def test_a_channel_behind_the_end_is_passed_over(read) -> None:
    assert read("utt-a rec 1.5 4.0 0\nutt-b rec 4 12.25 1\n").values.tolist() == [8.25, 2.5]


def test_an_open_end_is_that_of_the_recording(read, tmp_path: Path) -> None:
    (tmp_path / "reco2dur").write_text("rec1 10.5\nrec2 20\n")
    assert read("a rec1 4 -1\nb rec2 4 -1.0\nc rec1 0 2\n").values.tolist() == [16.0, 6.5, 2.0]


@pytest.mark.parametrize(
    ("reco2dur", "said"),
    [(None, "-1, and there is no reco2dur"), ("rec1 10.5\n", "-1, and not in reco2dur"), ("rec2 x\n", "not in")],
)
def test_an_open_end_without_a_recording_length_is_invalid(
    refusal, tmp_path: Path, reco2dur: str | None, said: str
) -> None:
    if reco2dur is not None:
        (tmp_path / "reco2dur").write_text(reco2dur)
    message = refusal("a rec1 0 2\nb rec2 4 -1\n").message
    assert "line 2, id 'b'" in message
    assert said in message
    assert "(open end)" in message


def test_a_reco2dur_that_is_damaged_is_named(refusal, tmp_path: Path) -> None:
    (tmp_path / "reco2dur").write_bytes(b"rec1 1\nrec\xff 2\n")
    assert "reco2dur, line 2" in refusal("a rec1 0 -1\n").message


def test_a_segment_without_a_length_is_an_invalid_row(refusal) -> None:
    for words, reason in [
        ("5 2", "negative"),
        ("2 2", "zero"),
        ("2 x", "text"),
        ("x 2", "text"),
        ("0 nan", "NaN"),
        ("0 inf", "infinite"),
        ("0 1e400", "infinite"),
        ("0 -2", "negative"),
    ]:
        message = refusal(f"a rec 0 1\nb rec {words}\n", format="segments").message
        assert "line 2, id 'b'" in message
        assert f"({reason})" in message


@pytest.mark.parametrize("line", ["b rec 0", "b", "b rec 0 1 2 3"])
def test_a_segments_line_of_other_words_is_an_error(refusal, line: str) -> None:
    assert f"line 2 has another format: {line!r}" in refusal(f"a rec 0 1\n{line}\n", format="segments").message


def test_other_lines_of_words_and_numbers_are_no_segments() -> None:
    for content in [
        "1 2 3 4\n",
        "utt1 one 2 3\nutt2 four words of text\n",
        "sw2005 A 0.34 0.12 hello\n",
        "a rec 0 1 2 3\n",
    ]:
        assert _detected(content) != "segments"


# ---- shapes ----


def test_the_name_of_a_shape_file_says_what_it_counts(read) -> None:
    for name, unit in [
        ("speech_shape", "frames"),
        ("feats_shape", "frames"),
        ("text_shape.char", "tokens"),
        ("text_shape.bpe", "tokens"),
    ]:
        lengths = read("a 1407,80\nb 99,80\n", name)
        assert (lengths.values.tolist(), lengths.unit) == ([1407.0, 99.0], unit)


def test_a_shape_may_have_more_than_two_dimensions(read) -> None:
    assert read("a 14,80,2\nb 9,80,2\n").values.tolist() == [14.0, 9.0]


def test_a_shape_file_of_an_unknown_name_has_an_unknown_unit(read) -> None:
    assert read("a 14,80\n", "shapes").unit is None


def test_a_shape_without_a_length_is_an_invalid_row(refusal) -> None:
    for value, reason in [("0,80", "zero"), (",80", "empty"), ("x,80", "text"), ("-3,80", "negative")]:
        message = refusal(f"a 14,80\nb {value}\n").message
        assert "line 2, id 'b'" in message
        assert f"({reason})" in message


def test_a_shape_line_of_more_words_is_an_error(refusal) -> None:
    assert "line 2 has another format: 'b 14, 80'" in refusal("a 14,80\nb 14, 80\n").message


def test_a_shape_line_without_a_shape_is_a_missing_length(refusal) -> None:
    assert "line 2, id 'b': 'length' is missing" in refusal("a 14,80\nb\n").message


# ---- targets ----


def _source(folder: Path, content: str | bytes, name: str = "targets") -> Source:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return Source(folder / name)


def test_a_blank_line_is_an_empty_aligned_target_at_the_end_too(tmp_path: Path) -> None:
    assert list(_source(tmp_path, "A |\n\nB |\n\n").lines()) == [(1, "A |"), (2, ""), (3, "B |"), (4, "")]


def test_a_number_among_texts_is_a_text(tmp_path: Path) -> None:
    assert keyed_targets(_source(tmp_path, "a ONE TWO\nb 7\nc X\n")) == {"a": "ONE TWO", "b": "7", "c": "X"}


def test_what_is_no_number_among_numbers_stays_as_it_is(tmp_path: Path) -> None:
    assert keyed_targets(_source(tmp_path, "a 3\nb x\nc 7\nd\ne 2\n")) == {
        "a": 3.0,
        "b": "x",
        "c": 7.0,
        "d": "",
        "e": 2.0,
    }


def test_a_keyed_target_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="line 3: duplicate id 'a'") as caught:
        keyed_targets(_source(tmp_path, "a ONE\nb TWO\na THREE\n"))
    assert caught.value.hint
