"""Two rows with one id: an error where the format's own tools refuse it, else two examples."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("content", "name", "first"),
    [
        ("ID,duration\na,1\nb,2\nc,3\nb,4\n", "train.csv", 3),
        ("a 1\nx 9\nb 2\nc 3\nb 4\n", "utt2dur", 3),
        ("a rec 0 1\nb rec 1 2\nc rec 0 3\nb rec 2 3\n", "segments", 2),
        ("a 10,80\nb 20,80\nb 30,80\n", "speech_shape", 2),
    ],
)
def test_an_id_that_is_there_twice_is_named_with_both_lines(refusal, content: str, name: str, first: int) -> None:
    error = refusal(content, name)
    assert f"id 'b': duplicate id, first at line {first}" in error.message
    assert "rename or remove" in error.hint


def test_ids_with_the_same_hash_are_not_taken_for_one(read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchtune.manifests.collecting.hash", lambda _: 0, raising=False)
    assert read("ID,duration\na,1\nb,2\n").count == 2


@pytest.mark.parametrize(
    "content",
    [
        '{"audio_filepath": "a.wav", "duration": 1}\n{"audio_filepath": "a.wav", "duration": 2}\n',
        "path,duration\na.wav,1\na.wav,2\n",
    ],
    ids=["nemo", "table"],
)
def test_segments_of_one_file_are_examples_of_their_own(read, content: str) -> None:
    assert read(content).count == 2
