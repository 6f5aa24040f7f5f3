"""What the lengths count in the end."""

from __future__ import annotations

import pytest


def _one(column: str, value: str = "5000") -> str:
    return f"path,{column}\na,{value}\n"


def test_an_unknown_unit_stays_unknown_with_a_note(read) -> None:
    lengths = read(_one("length"))
    assert lengths.unit is None
    assert any("name it with --unit" in note for note in lengths.notes)


def test_the_users_unit_is_taken_where_nothing_else_says_one(read) -> None:
    lengths = read(_one("length"), unit="frames")
    assert (lengths.unit, lengths.longest) == ("frames", 5000.0)


def test_ms_are_converted_to_s_with_a_note(read) -> None:
    lengths = read(_one("duration_ms", "4644"), unit="s")
    assert (lengths.unit, lengths.longest) == ("s", 4.644)
    assert "Lengths are converted from ms to s." in lengths.notes


def test_s_are_converted_to_ms(read) -> None:
    lengths = read(_one("duration", "4.644"), unit="ms")
    assert (lengths.unit, lengths.longest) == ("ms", 4644.0)


def test_another_unit_without_a_scale_is_an_error_that_shows_one(refusal) -> None:
    error = refusal(_one("samples"), unit="s")
    assert "in samples, and --unit asks for s" in error.message
    assert "--length-scale X (1/16000 for 16 kHz audio)" in error.hint


def test_the_users_unit_wins_where_there_is_a_scale(read) -> None:
    lengths = read(_one("frames"), unit="s", length_scale="1/100")
    assert (lengths.unit, lengths.longest) == ("s", 50.0)


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
def test_a_scale_gives_a_unit_only_where_there_is_no_doubt(
    read, column: str, scale: str, unit: str | None
) -> None:
    lengths = read(_one(column), length_scale=scale)
    assert lengths.unit == unit
    assert any("name it with --unit" in note for note in lengths.notes) == (
        unit is None
    )


def test_a_length_that_the_scale_makes_infinite_is_invalid(refusal) -> None:
    assert (
        "(infinite)" in refusal(_one("duration", "1e308"), length_scale="1000").message
    )


@pytest.mark.parametrize("column", ["length", "len"])
@pytest.mark.parametrize("layout", ['{{"a": {{"{}": "3.5"}}}}', "ID,{}\na,3.5\n"])
def test_a_length_of_speechbrain_is_in_s(read, layout: str, column: str) -> None:
    assert read(layout.format(column)).unit == "s"
