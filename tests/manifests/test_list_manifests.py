"""Lists without column names (Kaldi, ESPnet, wav2vec), and what is no manifest."""

from __future__ import annotations

import pytest

from batchtune.errors import UsageError


def test_the_name_of_a_kaldi_list_says_what_it_counts(read) -> None:
    for name, unit in [
        ("utt2dur", "s"),
        ("reco2dur", "s"),
        ("utt2dur.gz", "s"),
        ("train_utt2dur.txt", "s"),
        ("utt2num_frames", "frames"),
        ("utt2num_samples", "samples"),
        ("speech_shape", None),
    ]:
        assert read("a 3\nb 4\n", name).unit == unit


def test_a_kaldi_list_may_have_tabs_and_blanks_at_the_ends(read) -> None:
    assert read("a\t3.5 \nb   4 \n", "utt2dur").values.tolist() == [4.0, 3.5]


def test_a_kaldi_line_without_a_number_is_a_missing_length(refusal) -> None:
    assert "line 2, id 'b': 'duration' is missing" in refusal("a 3\nb \n", "utt2dur").message


def test_a_kaldi_line_of_more_words_is_an_error(refusal) -> None:
    assert "line 2 has another format: 'b 4 5'" in refusal("a 3\nb 4 5\n", "utt2dur").message


def test_wav2vec_counts_samples_of_paths_with_blanks(read) -> None:
    lengths = read("/my data\na b.flac\t16000\n")
    assert (lengths.values.tolist(), lengths.unit, lengths.notes) == ([16000.0], "samples", ())


@pytest.mark.parametrize("row", ["b.flac", "b.flac\t1\t2"])
def test_a_wav2vec_line_of_other_cells_is_an_error(refusal, row: str) -> None:
    assert "line 3" in refusal(f"/data\na.flac\t16000\n{row}\n").message


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"PK\x03\x04...", "a zip archive"),
        (b"fLaC\0\0", "an audio file"),
        (b"\x01\x02\0\x03", "binary data"),
        (b"some prose\nof two lines\n", "its first line is 'some prose'"),
    ],
)
def test_what_fits_no_format_is_described(refusal, content: bytes, seen: str) -> None:
    assert seen in refusal(content).message


def test_a_misspelt_format_is_corrected(read) -> None:
    with pytest.raises(UsageError) as caught:
        read("a 3\n", format="kaldix")
    assert "Did you mean 'kaldi'?" in str(caught.value.hint)


def test_what_fits_no_format_is_told_the_formats(refusal) -> None:
    hint = refusal("prose").hint
    assert all(name in hint for name in ("speechbrain-json", "nemo", "kaldi", "wav2vec", "table", "--format"))
