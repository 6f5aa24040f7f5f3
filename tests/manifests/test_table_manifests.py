"""Tables: CSV and TSV, SpeechBrain's and any other."""

from __future__ import annotations

import pytest
from manifests.conftest import cases

READ = {
    "commas": ("path,duration,text\na,3,x\nb,4,y", [4, 3]),
    "tabs": ("path\tduration\ttext\na\t3\tx\nb\t4\ty", [4, 3]),
    "semicolons": ("path;duration;text\na;3;x\nb;4;y", [4, 3]),
    "one column": ("duration\n3\n4\n", [4, 3]),
    "a quoted cell with delimiter and line end": ('text,duration\n"a, ""b""\nc",3\n', [3]),
    "quotes inside a cell are text": ('path,duration,text\na,1,say "hi"\n', [1]),
    "a quote in a table with tabs joins no rows": ('path\tduration\ttext\na\t1\t"x, y\nb\t2\ty"\n', [2, 1]),
    "columns without a name are passed over": (",duration,\n0,3,\n", [3]),
    "spaces around SpeechBrain's cells": ('ID , duration , wrd\n a , 3.5 , "x, y"\n', [3.5]),
}  # fmt: skip


@cases(READ, "content lengths")
def test_tables_are_read(read, content: str, lengths: list[float]) -> None:
    found = read(content)
    assert (found.values.tolist(), found.unit) == (lengths, "s")


REFUSED = {
    "lines are counted as they stand": ('id,text,duration\na,"x\ny\nz",3\n\nb,t,0\n', "line 6, id 'b'"),
    "a quote is never closed": ('path,duration,text\na,1,x\nb,2,"y\nc,3,z\nd,4,w\n', "line 3: the row is malformed"),
    "a quote closed by a later row": ('path,duration,text\na,1,"x\nb,2,y\nc,3,"z"\n', "line 2: the row is malformed"),
    "empty cells are no blank line": ("text\tduration\na\t1\n\t\n", "line 3: 'duration' is '' (empty)"),
    "a column named twice": ("a,duration,a\n1,2,3\n", "line 1: the header is malformed, or names a column twice"),
    "a decimal comma is no number": ("path;duration\na;1,5\nb;2\n", "'1,5' (text)"),
}  # fmt: skip


@cases(REFUSED, "content said")
def test_what_is_no_table_is_refused(refusal, content: str, said: str) -> None:
    assert said in refusal(content).message


@pytest.mark.parametrize("skip_invalid", [False, True])
@pytest.mark.parametrize(("row", "cells"), [("a", "1 cell"), ("a,3,x", "3 cells")])
def test_a_row_of_another_width_is_an_error_even_if_skipped(
    refusal, row: str, cells: str, skip_invalid: bool
) -> None:
    error = refusal(f"path,duration\nb,1\n{row}\n", skip_invalid=skip_invalid)
    said = f"line 3: {cells}, separated by commas, not 2 as in the header"
    assert said in error.message
