"""What the lengths count in the end."""

from __future__ import annotations

import pytest
from manifests.conftest import cases

NAME_IT = "name it with --unit"
READ = {
    "an unknown unit stays unknown with a note": ("length", 5000, {}, 5000, None, NAME_IT),
    "the user's unit is taken where nothing else says one": ("length", 5000, {"unit": "frames"}, 5000, "frames", ""),
    "ms are converted to s with a note": (
        "duration_ms",
        4644,
        {"unit": "s"},
        4.644,
        "s",
        "Lengths are converted from ms to s.",
    ),
    "s are converted to ms": ("duration", 4.644, {"unit": "ms"}, 4644, "ms", ""),
    "the user's unit wins where there is a scale": (
        "frames",
        5000,
        {"unit": "s", "length_scale": "1/100"},
        50,
        "s",
        "",
    ),
}  # fmt: skip


@cases(READ, "column value options longest unit note")
def test_the_unit_of_the_lengths(
    read, column, value, options, longest, unit, note
) -> None:
    lengths = read(f"path,{column}\na,{value}\n", **options)
    assert (lengths.longest, lengths.unit) == (longest, unit)
    assert note in " ".join(lengths.notes)


def test_another_unit_without_a_scale_is_an_error_that_shows_one(refusal) -> None:
    error = refusal("path,samples\na,5000\n", unit="s")
    assert "in samples, and --unit asks for s" in error.message
    assert "--length-scale X (1/16000 for 16 kHz audio)" in error.hint


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
    lengths = read(f"path,{column}\na,5000\n", length_scale=scale)
    assert lengths.unit == unit
    assert any(NAME_IT in note for note in lengths.notes) == (unit is None)


def test_a_length_that_the_scale_makes_infinite_is_invalid(refusal) -> None:
    error = refusal("path,duration\na,1e308\n", length_scale="1000")
    assert "(infinite)" in error.message


@pytest.mark.parametrize("column", ["length", "len"])
@pytest.mark.parametrize("layout", ['{{"a": {{"{}": "3.5"}}}}', "ID,{}\na,3.5\n"])
def test_a_length_of_speechbrain_is_in_s(read, layout: str, column: str) -> None:
    assert read(layout.format(column)).unit == "s"
