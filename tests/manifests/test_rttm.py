"""RTTM: the turns of speakers, among other records."""

from __future__ import annotations

import pytest

from batchtune.manifests import FORMATS
from batchtune.manifests.formats import delimited
from batchtune.manifests.source import Head

_WHOLE = """\
;; made by hand
SPKR-INFO ES2011a 1 <NA> <NA> <NA> unknown FEE041 <NA> <NA>
SPEAKER ES2011a 1 34.27 5.75 <NA> <NA> FEE041 <NA> <NA>
LEXEME ES2011a 1 34.27 0.31 hello lex FEE041 0.9 <NA>
SPEAKER ES2011a 1 40.5 1.25 <NA> <NA> FEE042 <NA> <NA>
NON-SPEECH ES2011a 1 42 0.5 <NA> noise <NA> <NA> <NA>
"""


def test_each_turn_is_an_example(read) -> None:
    lengths = read(_WHOLE)
    assert (lengths.values.tolist(), lengths.unit) == ([5.75, 1.25], "s")


def test_other_records_are_left_out_and_counted_but_not_comments(read) -> None:
    assert read(_WHOLE).left_out == {"another record than SPEAKER": 3}


def test_other_records_are_counted_once_across_chunks(read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_ROWS_AT_ONCE", 2)
    lengths = read(_WHOLE * 4)
    assert (lengths.count, lengths.left_out) == (8, {"another record than SPEAKER": 12})


def test_other_records_alone_are_no_examples(refusal) -> None:
    assert "no examples" in refusal("LEXEME a 1 0 1 hello lex b 0.9 <NA>\n", format="rttm").message


@pytest.mark.parametrize("ending", ["", "\t<NA>\t<NA>\tA", " <NA>", " <NA> <NA> A", " <NA> <NA> A <NA> <NA>"])
def test_the_words_behind_the_duration_may_be_missing(read, ending: str) -> None:
    assert read(f"SPEAKER a 1 0 2.5{ending}\n").values.tolist() == [2.5]


def test_a_turn_of_too_few_words_is_an_error(refusal) -> None:
    assert "line 7 has another format: 'SPEAKER a 1 0'" in refusal(_WHOLE + "SPEAKER a 1 0\n").message


def test_a_record_of_no_known_type_is_an_error(refusal) -> None:
    error = refusal(_WHOLE + "SPEKAER a 1 0 2 <NA> <NA> A <NA> <NA>\n")
    assert "line 7 has another format: 'SPEKAER a 1 0" in error.message
    assert "SPEAKER file channel start duration" in error.hint


def test_a_turn_without_a_duration_is_missing_its_length(refusal) -> None:
    message = refusal(_WHOLE + "SPEAKER a 1 0 <NA> <NA> <NA> A <NA> <NA>\n").message
    assert "line 7, id 'a': 'duration' is missing" in message


@pytest.mark.parametrize(
    "content", ["SPEAKER of the house\n", "SPEAKER a b c d e\n", "speaker a 1 0 2\n", ";; nothing\n"]
)
def test_other_text_is_no_rttm(content: str) -> None:
    assert not FORMATS["rttm"].fits(Head(content.encode(), complete=True))


def test_a_speaker_far_behind_other_records_is_found() -> None:
    content = "SPKR-INFO a 1 <NA> <NA> <NA> unknown b <NA> <NA>\n" * 500 + _WHOLE
    assert FORMATS["rttm"].fits(Head(content.encode(), complete=True))
