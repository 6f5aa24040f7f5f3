"""The format `audio`: a folder of audio files."""

import os

import pytest
from samples import wav


def test_each_audio_file_is_an_example(read):
    files = {
        "a.wav": wav(8000),
        "b.WAV": wav(16_000),
        "deep/er/a.wav": wav(24_000),
        "README": b"",
        "a.pth": b"",
    }
    lengths = read(files)
    assert lengths.values.tolist() == [1.5, 1.0, 0.5]
    assert (lengths.unit, lengths.left_out) == ("s", {})
    samples = read({}, length_key="num_samples")
    assert samples.values.tolist() == [24_000, 16_000, 8000]


def test_estimated_lengths_are_counted_in_a_note(read):
    pytest.importorskip("mutagen")
    # MPEG 1, layer III, 128 kbit/s, 44.1 kHz: 1152 samples.
    frame = bytes.fromhex("fffb90c4") + bytes(413)
    lengths = read({"a.mp3": frame * 100, "b.mp3": frame * 200, "c.wav": wav(8000)})
    seconds = [230_400 / 44_100, 115_200 / 44_100, 0.5]
    assert lengths.values.tolist() == pytest.approx(seconds, rel=0.003)
    assert lengths.notes[-1].startswith(
        "2 lengths of MP3 files without a Xing or VBRI header: estimated"
    )


def test_files_that_can_not_be_read_are_named_with_the_reason(read, refusal, tmp_path):
    os.mkfifo(tmp_path / "d.wav")
    files = {"a.wav": wav(8000), "b.wav": wav(8000)[:-1], "deep/c.wav": b"text"}
    assert refusal(files).message.splitlines()[1:] == [
        "  id 'b.wav': 'duration' can't be read: truncated WAV: 15,999 of 16,000 bytes of audio",
        "  id 'd.wav': 'duration' can't be read: not a regular file",
        "  id 'deep/c.wav': 'duration' can't be read: no audio header: a file that begins with b'text'",
    ]
    assert read({}, skip_invalid=True).values.tolist() == [0.5]


def test_audio_that_is_not_read_is_counted_as_such(read):
    lengths = read({"a.wav": wav(1), "b.au": b"", "c.CAF": b""})
    assert lengths.left_out == {
        "audio in a format that is not read: convert it to WAV or FLAC": 2
    }
