"""Lists without column names: Kaldi's, ESPnet's and fairseq's, numbers, lines of text; and what is no manifest."""

from __future__ import annotations

import pytest
from manifests.conftest import cases

from batchtune.errors import UsageError
from batchtune.manifests import FORMATS
from batchtune.manifests.source import Head


@pytest.mark.parametrize(
    ("name", "value", "unit"),
    [
        ("utt2dur", "3", "s"),
        ("reco2dur", "3", "s"),
        ("train_utt2dur.txt", "3", "s"),
        ("utt2num_frames", "3", "frames"),
        ("utt2num_samples", "3", "samples"),
        ("speech_shape", "3", None),
        ("speech_shape", "3,80", "frames"),
        ("text_shape.bpe", "3,80,2", "tokens"),
        ("shapes", "3,80", None),
    ],
)
def test_the_name_of_a_kaldi_list_says_what_it_counts(
    read, name: str, value: str, unit: str | None
) -> None:
    lengths = read(f"a {value}\nb\t{value} \n", name)
    assert (lengths.values.tolist(), lengths.unit) == ([3.0, 3.0], unit)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("b ", "line 2, id 'b': 'duration' is missing"),
        ("b 0", "line 2, id 'b': 'duration' is '0' (zero)"),
        ("b x", "line 2, id 'b': 'duration' is 'x' (text)"),
        ("b 4 5", "line 2 has another format: 'b 4 5'"),
        ("a 4", "line 2, id 'a': duplicate id"),
    ],
)
def test_a_kaldi_line_without_a_length_is_named(refusal, line: str, said: str) -> None:
    assert said in refusal(f"a 3\n{line}\n", "utt2dur").message


READ = {
    "samples of paths with blanks": ("/my data\na b.flac\t16000\n", {}, [16000], "samples"),
    "lines of text": ("HELLO \r\n\nME\n", {"format": "text"}, [6, 2], "characters"),
    "lines of digits": ("10\n200\n", {"format": "text"}, [3, 2], "characters"),
    "words of lines": ("ONE TWO\n THREE \n", {"format": "text", "measure": "words"}, [2, 1], "words"),
    "numbers": ("12\n 3.5 \n\n1e2\n", {}, [100, 12, 3.5], None),
    "numbers with a unit": ("3\n4\n", {"unit": "tokens"}, [4, 3], "tokens"),
    "ids may repeat in a table": ("path,duration\na.wav,1\na.wav,2\n", {}, [2, 1], "s"),
    "ids may repeat in NeMo's lines": ('{"audio_filepath": "a.wav", "duration": 1}\n' * 2, {}, [1, 1], "s"),
}  # fmt: skip


@cases(READ, "content options lengths unit")
def test_lists_are_read(read, content, options, lengths, unit) -> None:
    found = read(content, **options)
    assert (found.values.tolist(), found.unit) == (lengths, unit)
    assert any("--unit" in note for note in found.notes) == (unit is None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("/data\na.flac\t16000\nb.flac\n", "line 3"),
        ("/data\na.flac\t16000\nb.flac\t1\t2\n", "line 3"),
        ("ID,duration\na,1\nb,2\nb,4\n", "line 4, id 'b': duplicate id"),
        ("3\nx\n4\n", "line 2: 'length' is 'x' (text)"),
    ],
)
def test_a_line_that_is_off_is_named(refusal, content: str, said: str) -> None:
    assert said in refusal(content).message


@pytest.mark.parametrize("content", [b"plain prose\n", b"3\n", b"", b"{}"])
def test_text_is_never_told_from_the_content(content: bytes) -> None:
    assert not FORMATS["text"].fits(Head(content, complete=True))


@pytest.mark.parametrize(
    "content", ["duration\n3\n4\n", "3 4\n5 6\n", "3,4\n", "a\n3\n", "3\na\nb\nc\n"]
)
def test_other_lines_are_no_list_of_numbers(content: str) -> None:
    assert not FORMATS["numbers"].fits(Head(content.encode(), complete=True))


@pytest.mark.parametrize(
    "content",
    [b"PK\x03\x04...", b"fLaC\0\0", b"some prose\nof two lines\n", b"[1, 2, 3]"],
)
def test_what_fits_no_format_is_shown_with_the_formats(refusal, content: bytes) -> None:
    error = refusal(content)
    assert "fits no known manifest format: it begins with '" in error.message
    assert all(
        name in error.hint
        for name in (
            "speechbrain-json",
            "nemo",
            "kaldi",
            "wav2vec",
            "table",
            "--format",
        )
    )


def test_a_misspelt_format_is_corrected(read) -> None:
    with pytest.raises(UsageError) as caught:
        read("a 3\n", format="kaldix")
    assert "Did you mean 'kaldi'?" in str(caught.value.hint)
