"""Tables: CSV and TSV, SpeechBrain's and any other."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_the_delimiter_is_detected(read, delimiter: str) -> None:
    rows = [["path", "duration", "text"], ["a", "3", "x"], ["b", "4", "y"]]
    assert read("\n".join(delimiter.join(row) for row in rows)).values.tolist() == [
        4.0,
        3.0,
    ]


def test_a_table_of_one_column_is_read(read) -> None:
    assert read("duration\n3\n4\n").values.tolist() == [4.0, 3.0]


def test_a_quoted_cell_may_hold_the_delimiter_and_line_ends(read) -> None:
    assert read('text,duration\n"a, ""b""\nc",3\n').values.tolist() == [3.0]


def test_lines_are_counted_as_they_stand_in_the_file(refusal) -> None:
    message = refusal('id,text,duration\na,"x\ny\nz",3\n\nb,t,0\n').message
    assert "line 6, id 'b'" in message


@pytest.mark.parametrize(("row", "cells"), [("a", "1 cell"), ("a,3,x", "3 cells")])
def test_a_row_of_another_width_is_an_error_even_if_skipped(
    refusal, row: str, cells: str
) -> None:
    for skip_invalid in (False, True):
        message = refusal(
            f"path,duration\nb,1\n{row}\n", skip_invalid=skip_invalid
        ).message
        assert (
            f"line 3: {cells}, separated by commas, not 2 as in the header" in message
        )


def test_a_quote_that_is_never_closed_is_an_error_where_it_opens(refusal) -> None:
    content = 'path,duration,text\na,1,x\nb,2,"y\nc,3,z\nd,4,w\n'
    assert "line 3: the row is malformed" in refusal(content).message


def test_a_quote_closed_by_a_later_row_loses_no_rows_silently(refusal) -> None:
    content = 'path,duration,text\na,1,"x\nb,2,y\nc,3,"z"\n'
    assert "line 2: the row is malformed" in refusal(content).message


def test_quotes_inside_a_cell_are_text(read) -> None:
    assert read('path,duration,text\na,1,say "hi"\n').values.tolist() == [1.0]


def test_single_quotes_in_a_tab_separated_table_do_not_join_rows(read) -> None:
    assert read('path\tduration\ttext\na\t1\t"x, y\nb\t2\ty"\n').values.tolist() == [
        2.0,
        1.0,
    ]


def test_a_row_of_empty_cells_is_no_blank_line(refusal) -> None:
    assert (
        "line 3: 'duration' is '' (empty)"
        in refusal("text\tduration\na\t1\n\t\n").message
    )


def test_a_column_named_twice_is_an_error(refusal) -> None:
    assert (
        "line 1: the header is malformed, or names a column twice"
        in refusal("a,duration,a\n1,2,3\n").message
    )


def test_columns_without_a_name_are_passed_over(read) -> None:
    assert read(",duration,\n0,3,\n").values.tolist() == [3.0]


def test_a_decimal_comma_is_no_number(refusal) -> None:
    assert "'1,5' (text)" in refusal("path;duration\na;1,5\nb;2\n").message


def test_spaces_around_speechbrains_cells_are_passed_over(read) -> None:
    lengths = read('ID , duration , wrd\n a , 3.5 , "x, y"\n')
    assert (lengths.values.tolist(), lengths.unit) == ([3.5], "s")
