"""The format `audio`: a folder of audio files."""

import os

import numpy as np
import pytest
from samples import wav

from batchtune.errors import ManifestError
from batchtune.manifests import ReadOptions, load_lengths


@pytest.fixture
def folder(tmp_path):
    """Writes files into a folder and reads it: folder({"a.wav": …}, **options)."""

    def load(files, **options):
        for name, content in files.items():
            path = tmp_path / "audio" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load_lengths(tmp_path / "audio", ReadOptions(**options))

    return load


def test_each_audio_file_is_an_example(folder):
    files = {
        "a.wav": wav(8000),
        "b.WAV": wav(16_000),
        "deep/er/a.wav": wav(24_000),
        "README": b"",
        "a.pth": b"",
    }
    lengths = folder(files)
    assert (lengths.values.tolist(), lengths.unit, lengths.left_out) == (
        [1.5, 1.0, 0.5],
        "s",
        {},
    )
    assert folder({}, length_key="num_samples").values.tolist() == [
        24_000,
        16_000,
        8000,
    ]


def test_formats_and_rates_may_be_mixed(folder, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    (tmp_path / "audio").mkdir()
    for name, rate in (
        ("a.flac", 8000),
        ("b.ogg", 16_000),
        ("c.wav", 44_100),
        ("d.mp3", 22_050),
    ):
        soundfile.write(tmp_path / "audio" / name, np.zeros(2 * rate), rate)
    assert folder({}).values.tolist() == [2.0] * 4


def test_estimated_lengths_are_counted_in_a_note(folder):
    pytest.importorskip("mutagen")
    # MPEG 1, layer III, 128 kbit/s, 44.1 kHz: 1152 samples.
    frame = bytes.fromhex("fffb90c4") + bytes(413)
    lengths = folder({"a.mp3": frame * 100, "b.mp3": frame * 200, "c.wav": wav(8000)})
    assert lengths.values.tolist() == pytest.approx(
        [200 * 1152 / 44_100, 100 * 1152 / 44_100, 0.5], rel=0.003
    )
    assert lengths.notes[-1].startswith(
        "2 lengths of MP3 files without a Xing or VBRI header: estimated"
    )


def test_files_that_can_not_be_read_are_named_with_the_reason(folder, tmp_path):
    (tmp_path / "audio").mkdir()
    os.mkfifo(tmp_path / "audio" / "d.wav")
    with pytest.raises(ManifestError) as caught:
        folder({"a.wav": wav(8000), "b.wav": wav(8000)[:-1], "deep/c.wav": b"text"})
    assert caught.value.message.splitlines()[1:] == [
        "  id 'b.wav': 'duration' can't be read: truncated WAV: 15,999 of 16,000 bytes of audio",
        "  id 'd.wav': 'duration' can't be read: not a regular file",
        "  id 'deep/c.wav': 'duration' can't be read: no audio header: a file that begins with b'text'",
    ]
    assert folder({}, skip_invalid=True).values.tolist() == [0.5]


def test_audio_that_is_not_read_is_counted_as_such(folder):
    lengths = folder({"a.wav": wav(1), "b.au": b"", "c.CAF": b""})
    assert lengths.left_out == {
        "audio in a format that is not read: convert it to WAV or FLAC": 2
    }
