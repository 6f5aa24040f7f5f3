"""Files without any structure: lines of text, lines of numbers."""

from __future__ import annotations

import pytest

from batchtune.manifests import FORMATS
from batchtune.manifests.formats import delimited
from batchtune.manifests.source import Head

# ---- text ----


def test_each_line_is_an_example_of_so_many_characters(read) -> None:
    lengths = read("HELLO\nME\n", format="text")
    assert (lengths.values.tolist(), lengths.unit) == ([5.0, 2.0], "characters")
    assert read("10\n200\n", format="text").values.tolist() == [3.0, 2.0]
    assert read("ONE TWO\n THREE \n", format="text", measure="words").values.tolist() == [2.0, 1.0]


def test_blanks_in_a_line_count_and_line_ends_do_not(read) -> None:
    assert read(" A \r\nB\n", format="text").values.tolist() == [3.0, 1.0]


def test_a_blank_line_between_others_has_length_zero(refusal) -> None:
    message = refusal("ONE\n\nTWO\n", format="text").message
    assert "1 of 3 rows is invalid" in message
    assert "line 2" in message


def test_blank_lines_can_be_skipped_and_are_counted(read) -> None:
    lengths = read("ONE\n \n\nTWO\n\n\n", format="text", skip_invalid=True)
    assert (lengths.values.tolist(), sum(lengths.left_out.values())) == ([3.0, 3.0], 2)


def test_lines_are_counted_across_chunks(refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_ROWS_AT_ONCE", 2)
    assert "line 5" in refusal("A\nB\nC\nD\n\nE\n", format="text").message


@pytest.mark.parametrize("content", [b"plain prose\n", b"3\n", b"", b"{}"])
def test_text_is_never_told_from_the_content(content: bytes) -> None:
    assert not FORMATS["text"].fits(Head(content, complete=True))


# ---- numbers ----


def test_each_number_is_a_length(read) -> None:
    lengths = read("12\n 3.5 \n1e2\n")
    assert (lengths.values.tolist(), lengths.unit) == ([100.0, 12.0, 3.5], None)


def test_what_a_list_of_numbers_counts_is_to_be_said(read) -> None:
    assert any("--unit" in note for note in read("3\n4\n").notes)
    assert read("3\n4\n", unit="tokens").unit == "tokens"


def test_a_blank_line_between_numbers_is_an_invalid_row(refusal) -> None:
    assert "line 2: 'length' is '' (empty)" in refusal("3\n\n4\n").message


@pytest.mark.parametrize("content", ["duration\n3\n4\n", "3 4\n5 6\n", "3,4\n", "a\n3\n", "3\na\nb\nc\n"])
def test_other_lines_are_no_list_of_numbers(content: str) -> None:
    assert not FORMATS["numbers"].fits(Head(content.encode(), complete=True))
