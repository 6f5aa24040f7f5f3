"""Lengths of audio files by their headers: against libsndfile, and where the files are odd or damaged."""

from __future__ import annotations

import errno
import importlib
import io
import os
import random
import struct
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io.wavfile
from hypothesis import given
from hypothesis import strategies as st

from batchtune.errors import ManifestError
from batchtune.manifests.headers import AudioLength, Payload, opened_payload
from batchtune.manifests.headers.audio import AUDIO_SUFFIXES, audio_length
from batchtune.manifests.values import Unreadable

RATE = 16_000
COUNT = 1234


def payload_of(data: bytes) -> Payload:
    return Payload(len(data), lambda offset, size: data[offset : offset + size])


def length(data: bytes, suffix: str = "wav") -> AudioLength:
    return audio_length(payload_of(data), suffix)


def reason(data: bytes, suffix: str = "wav") -> str:
    with pytest.raises(Unreadable) as caught:
        length(data, suffix)
    return caught.value.reason


def written(form: str, subtype: str | None = None, channels: int = 1, count: int = COUNT, **options: object) -> bytes:
    """A file written by libsndfile; the test is skipped where it can't write such."""
    soundfile = pytest.importorskip("soundfile")
    if form not in soundfile.available_formats() or not soundfile.check_format(form, subtype):
        pytest.skip(f"libsndfile writes no {form} of {subtype}")
    stream = io.BytesIO()
    noise = np.random.default_rng(0).standard_normal((count, channels)) * 0.1
    soundfile.write(stream, noise, RATE, format=form, subtype=subtype, **options)
    return stream.getvalue()


def chunk(name: bytes, data: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(data) if size is None else size) + data + b"\0" * (len(data) % 2)


def riff(*chunks: bytes, magic: bytes = b"RIFF", size: int | None = None) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return magic + struct.pack("<I", len(body) if size is None else size) + body


def fmt(
    codec: int = 1, channels: int = 1, rate: int = RATE, align: int = 2, bits: int = 16, more: bytes = b""
) -> bytes:
    return chunk(b"fmt ", struct.pack("<HHIIHH", codec, channels, rate, rate * align, align, bits) + more)


DATA = chunk(b"data", bytes(2000))

WAV_SUBTYPES = ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"]


@pytest.mark.parametrize("form", ["WAV", "WAVEX", "RF64", "W64"])
def test_wav_of_any_encoding_has_the_samples_that_were_written(form: str) -> None:
    for subtype in WAV_SUBTYPES:
        for channels in (1, 6):
            assert length(written(form, subtype, channels)) == AudioLength(COUNT, RATE), (subtype, channels)


@pytest.mark.parametrize(
    ("form", "subtype"),
    [
        *[("FLAC", subtype) for subtype in ("PCM_S8", "PCM_16", "PCM_24")],
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
        *[(form, "PCM_16") for form in ("AIFF", "AU", "CAF", "NIST", "VOC", "PVF", "PAF", "SVX", "AVR")],
        ("CAF", "ALAC_16"),
    ],
)
def test_other_formats_have_the_samples_that_were_written(form: str, subtype: str) -> None:
    for channels in (1,) if form == "SVX" else (1, 2):
        assert length(written(form, subtype, channels), "") == AudioLength(COUNT, RATE), channels


@pytest.mark.parametrize("subtype", ["IMA_ADPCM", "MS_ADPCM", "GSM610", "G721_32"])
def test_adpcm_has_the_samples_that_its_fact_chunk_counts(subtype: str) -> None:
    data = written("WAV", subtype, count=20_000)
    fact = struct.unpack_from("<I", data, data.index(b"fact") + 8)[0]
    assert 20_000 <= fact < 20_600  # filled up to a block
    assert length(data).num_samples == fact


def test_a_fact_chunk_that_can_not_be_true_is_no_length() -> None:
    soundfile = pytest.importorskip("soundfile")
    data = bytearray(written("WAV", "MS_ADPCM", count=20_000))
    struct.pack_into("<I", data, data.index(b"fact") + 8, 4_000_000_000)
    assert length(bytes(data)).num_samples == soundfile.info(io.BytesIO(bytes(data))).frames


def test_wav_written_by_scipy() -> None:
    for kind in ("uint8", "int16", "int32", "int64", "float32", "float64"):
        stream = io.BytesIO()
        scipy.io.wavfile.write(stream, RATE, np.zeros((COUNT, 3), dtype=kind))
        assert length(stream.getvalue()) == AudioLength(COUNT, RATE), kind


def test_wav_written_by_the_standard_library() -> None:
    for width in (1, 2, 3, 4):
        stream = io.BytesIO()
        with wave.open(stream, "wb") as file:
            file.setparams((2, width, RATE, 0, "NONE", ""))
            file.writeframes(bytes(COUNT * width * 2))
        assert length(stream.getvalue()) == AudioLength(COUNT, RATE), width


def test_seconds_are_samples_by_rate() -> None:
    assert AudioLength(24_000, 16_000).seconds == 1.5


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(b"LIST", b"INFOISFT\x0e\0\0\0Lavf58.29.100\0"), fmt(), DATA],
        [fmt(), chunk(b"LIST", b"INFO"), DATA],
        [fmt(), chunk(b"bext", bytes(602)), DATA],
        [fmt(), chunk(b"junk", b"odd"), DATA],
        [chunk(b"JUNK", bytes(28)), fmt(), chunk(b"PAD ", bytes(4044)), DATA],
        [chunk(b"JUNK", bytes(100_001)), fmt(), DATA],
        [fmt(), DATA, chunk(b"LIST", b"INFO")],
        [fmt(more=b"\0\0"), chunk(b"fact", struct.pack("<I", 5)), DATA],
        [fmt(), *[chunk(b"cue ", b"")] * 400, DATA],
    ],
)
def test_other_chunks_do_not_matter(chunks: list[bytes]) -> None:
    assert length(riff(*chunks)) == AudioLength(1000, RATE)


def test_an_odd_number_of_bytes_needs_no_padding_at_the_end() -> None:
    data = riff(fmt(align=1, bits=8), chunk(b"data", bytes(1001)))
    assert length(data[:-1]).num_samples == 1001


def test_an_extensible_header_names_its_codec_in_the_extension() -> None:
    guid = struct.pack("<H", 3) + bytes.fromhex("000000001000800000aa00389b71")
    extension = struct.pack("<HHI", 22, 32, 4) + guid
    data = riff(fmt(0xFFFE, channels=2, align=8, bits=32, more=extension), chunk(b"data", bytes(4000)))
    assert length(data).num_samples == 500


@pytest.mark.parametrize("magic", [b"RF64", b"BW64"])
def test_rf64_has_its_size_in_another_chunk(magic: bytes) -> None:
    for size in [2000, 0xFFFFFFFFFFFFFFFF]:
        ds64 = chunk(b"ds64", struct.pack("<QQQI", 0, size, 0, 0))
        data = riff(ds64, fmt(), chunk(b"data", bytes(2000), 0xFFFFFFFF), magic=magic, size=0xFFFFFFFF)
        assert length(data).num_samples == 1000


def test_a_size_beyond_4_gib_is_believed() -> None:
    size = 5_000_000_000
    head = riff(chunk(b"ds64", struct.pack("<QQQI", 0, size, 0, 0)), fmt(), magic=b"RF64", size=0xFFFFFFFF)
    head += struct.pack("<4sI", b"data", 0xFFFFFFFF)
    payload = Payload(len(head) + size, payload_of(head).read)
    assert audio_length(payload, "wav") == AudioLength(size // 2, RATE)


def test_an_open_size_written_to_a_pipe_extends_to_the_end() -> None:
    for whole, samples in [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), (36, 0), (0x7FFFF024, 0x7FFFF000), (0xFFFFFFFF, 0)]:
        assert length(riff(fmt(), chunk(b"data", bytes(2000), samples), size=whole)).num_samples == 1000


def test_sox_leaves_a_size_of_whole_blocks_open() -> None:
    data = riff(fmt(channels=3, align=6), chunk(b"data", bytes(6000), 0x7FFFF000 // 6 * 6), size=0x7FFFF024)
    assert length(data).num_samples == 1000


def test_no_samples_before_another_chunk_are_none() -> None:
    assert length(riff(fmt(), chunk(b"data", b""), chunk(b"LIST", bytes(100)))).num_samples == 0


def test_an_empty_recording_has_no_samples() -> None:
    assert length(riff(fmt(), chunk(b"data", b""))) == AudioLength(0, RATE)


def test_fewer_samples_than_the_header_says_are_a_truncated_file() -> None:
    for removed in (1, 2, 1000, 1999, 2000):
        assert reason(riff(fmt(), DATA)[:-removed]) == "truncated WAV", removed


def test_the_message_says_how_much_is_missing() -> None:
    with pytest.raises(Unreadable, match=r"^truncated WAV: 1,900 of 2,000 bytes of audio$"):
        length(riff(fmt(), DATA)[:-100])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "an empty file"),
        (b"RIFF", "no WAV header"),
        (b"RIFF\0\0\0\0AVI LIST", "no WAV header"),
        (riff(DATA), "WAV without a format chunk"),
        (riff(chunk(b"fmt ", bytes(10)), DATA), "WAV without a format chunk"),
        (riff(fmt()), "WAV without a data chunk"),
        (riff(fmt(), *[chunk(b"cue ", b"")] * 600, DATA), "WAV without a data chunk"),
        (riff(fmt(rate=0), DATA), "a damaged WAV header"),
        (riff(fmt(channels=0, align=0), DATA), "a damaged WAV header"),
        (riff(fmt(codec=0x1234), DATA), "a WAV codec that is not read"),
        (b"just text", "no audio header"),
        (bytes(1000), "no audio header"),
        (b"ID3\x04\0\0\0\0\0\x0a" + bytes(10), "no audio header"),
    ],
)
def test_what_is_no_audio_or_damaged_says_so(data: bytes, said: str) -> None:
    assert reason(data) == said


def test_the_reason_names_no_file_and_the_detail_the_bytes_seen() -> None:
    with pytest.raises(Unreadable) as caught:
        length(b"<html>")
    assert (caught.value.reason, caught.value.detail) == ("no audio header", "a file that begins with b'<htm'")


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3", "AIFF"])
def test_a_suffix_that_lies_does_not_matter(form: str) -> None:
    data = written(form)
    for suffix in ("wav", "flac", "ogg", "mp3", "txt", ""):
        assert length(data, suffix) == AudioLength(COUNT, RATE), suffix


@pytest.mark.parametrize("form", ["WAV", "FLAC", "MP3"])
def test_an_id3_tag_at_the_beginning_is_passed_over(form: str) -> None:
    tag = b"ID3\x04\0\0" + bytes([0, 0, 2, 44]) + bytes(300)
    for tags in (1, 2):
        assert length(tag * tags + written(form)) == AudioLength(COUNT, RATE), tags


# FLAC

TOTAL_AT, TOTAL_END = 21, 26


def without_total(data: bytes) -> bytes:
    return data[:TOTAL_AT] + bytes([data[TOTAL_AT] & 0xF0]) + bytes(4) + data[TOTAL_END:]


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_an_open_flac_length_is_read_from_the_last_frame(channels: int) -> None:
    for count in (1, 15, 4095, 4096, 4097, 100_000):
        assert length(without_total(written("FLAC", "PCM_16", channels, count)), "flac").num_samples == count


def test_an_id3v1_tag_is_no_part_of_the_last_flac_frame() -> None:
    data = without_total(written("FLAC", count=10_000)) + b"TAG" + bytes(125)
    assert length(data, "flac").num_samples == 10_000


def test_an_open_flac_length_is_unknown_if_the_last_frame_is_cut() -> None:
    assert reason(without_total(written("FLAC"))[:-1], "flac") == "a FLAC header without a length"


@pytest.mark.parametrize("filler", [b"\xff", b"\xff\xf8\x19\x18\x00"])
def test_a_flac_of_only_frame_beginnings_is_read_fast(filler: bytes) -> None:
    data = without_total(written("FLAC"))[:42] + filler * 100_000
    assert reason(data, "flac") == "a FLAC header without a length"


def test_a_flac_that_is_much_too_small_is_truncated() -> None:
    assert reason(written("FLAC", count=100_000)[:2000], "flac") == "truncated FLAC"


def test_a_flac_header_of_another_block_is_damaged() -> None:
    assert reason(b"fLaC\x04" + bytes(100), "flac") == "a damaged FLAC header"


# MP3

FRAME = bytes.fromhex("fffb90c4") + bytes(413)  # MPEG 1, layer III, 128 kbit/s, 44.1 kHz, mono: 1152 samples


def xing(frames: int, size: int = 0, delay: int = 0, padding: int = 0, encoder: bytes = b"LAME3.100") -> bytes:
    tag = b"Info" + struct.pack(">II", 3, frames) + struct.pack(">I", size) + encoder + bytes(12)
    tag += (delay << 12 | padding).to_bytes(3, "big")
    return (FRAME[:21] + tag).ljust(len(FRAME), b"\0")


@pytest.mark.parametrize("mode", ["CONSTANT", "AVERAGE", "VARIABLE"])
def test_mp3_has_the_samples_that_were_encoded(mode: str) -> None:
    for count in (1, 500, 5000, 32_000):
        assert length(written("MP3", count=count, bitrate_mode=mode), "mp3").num_samples == count


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_mp3_without_a_tag_is_counted_frame_by_frame(mode: str) -> None:
    data = written("MP3", count=32_000, bitrate_mode=mode)
    tag = data.index(b"Xing" if b"Xing" in data else b"Info")
    frames = struct.unpack_from(">I", data, tag + 8)[0]
    first = data.index(b"\xff\xf3", 4)  # the frame after that with the tag
    assert length(data[first:], "mp3").num_samples == frames * 576


@pytest.mark.parametrize(
    ("tag", "count"),
    [
        (xing(100, delay=576, padding=1000), 100 * 1152 - 1576),
        (xing(100, delay=576, padding=100), 100 * 1152 - 576 - 529),  # as mpg123 decodes it
        (xing(100, encoder=bytes(9)), 100 * 1152 - 529),
        (xing(0), 4 * 1152),
    ],
)
def test_the_tag_of_the_first_frame_tells_the_length(tag: bytes, count: int) -> None:
    assert length(tag + FRAME * 3 + bytes(10_000), "mp3").num_samples == count


def test_a_vbri_tag_tells_the_length() -> None:
    tag = FRAME[:36] + b"VBRI" + bytes(6) + struct.pack(">II", 2000, 50) + bytes(363)
    assert length(tag + FRAME * 4, "mp3").num_samples == 50 * 1152


def test_what_follows_the_last_mp3_frame_does_not_count() -> None:
    for end in [b"TAG" + bytes(125), b"APETAGEX" + bytes(200_000), bytes(1000), FRAME[:100], b"\xff"]:
        assert length(FRAME * 10 + end, "mp3") == AudioLength(11_520, 44_100)


@pytest.mark.parametrize("junk", [bytes(1000), b"\xff" * 1000, random.Random(0).randbytes(1000)])
def test_foreign_bytes_around_mp3_frames_are_skipped(junk: bytes) -> None:
    assert length(junk + FRAME * 5 + junk + FRAME * 5, "mp3").num_samples == 11_520


def test_an_mp3_that_lacks_what_its_tag_promises_is_truncated() -> None:
    assert reason(xing(1000, 417_000) + FRAME * 500, "mp3") == "truncated MP3"


def test_an_mp3_with_a_hole_is_damaged() -> None:
    assert reason(FRAME * 5 + bytes(100_000) + FRAME * 5, "mp3") == "a damaged MP3"


@pytest.mark.parametrize("data", [b"\xff\xd8\xff\xe0" + bytes(5000), b"\xff\xf1\x50\x80" * 500, b"\xff" * 100_000])
def test_what_only_begins_like_an_mp3_is_none(data: bytes) -> None:
    assert reason(data, "wav") == "no MP3 header"


# Whatever the bytes are

SMALL = [
    *(("WAV", subtype) for subtype in ("PCM_16", "ULAW", "IMA_ADPCM", "MS_ADPCM", "GSM610")),
    *(("WAVEX", "FLOAT"), ("RF64", "PCM_24"), ("W64", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")),
    *(("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16"), ("CAF", "PCM_16"), ("NIST", "PCM_16")),
]


def survives(data: bytes, suffix: str) -> None:
    try:
        found = length(data, suffix)
    except Unreadable as error:
        assert error.reason
    else:
        assert found.num_samples >= 0
        assert found.sample_rate > 0


@pytest.mark.parametrize(("form", "subtype"), SMALL)
def test_a_file_cut_or_changed_anywhere_is_read_or_refused(
    form: str, subtype: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = written(form, subtype, count=400)
    for end in [*range(min(len(data), 128)), *range(0, len(data), max(1, len(data) // 100))]:
        survives(data[:end], form.lower())
    chance = random.Random(form)
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            damaged[chance.randrange(chance.choice((64, len(data))))] = chance.choice((0, 255, chance.randrange(256)))
        survives(bytes(damaged), form.lower())
    assert capfd.readouterr() == ("", "")


@given(
    st.sampled_from((b"RIFF\0\0\0\0WAVE", b"RF64", b"fLaC\0\0\0\x22", b"\xff\xfb\x90\xc4", b"ID3", b"")),
    st.binary(max_size=600),
    st.sampled_from(("wav", "mp3", "flac")),
)
def test_any_bytes_are_read_or_refused(magic: bytes, rest: bytes, suffix: str) -> None:
    survives(magic + rest, suffix)


# What is read from


def test_a_file_is_read_by_its_path(tmp_path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(riff(fmt(), DATA))
    with opened_payload(path) as payload:
        assert payload.size == 2044
        assert payload.read(2040, 100) == bytes(4)
        assert audio_length(payload, "wav").num_samples == 1000


def test_a_pipe_is_no_file(tmp_path) -> None:
    os.mkfifo(tmp_path / "a.wav")
    with pytest.raises(Unreadable, match="not a regular file"), opened_payload(tmp_path / "a.wav"):
        pass


@pytest.mark.parametrize("make", [lambda: riff(chunk(b"LIST", bytes(500)), fmt(), DATA), lambda: written("OGG")])
def test_an_error_of_the_disk_is_told(
    make: Callable[[], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_first_bytes(descriptor: int, size: int, offset: int) -> bytes:
        if offset > 0:
            raise OSError(errno.EIO, "Input/output error")
        return original(descriptor, size, offset)

    original = os.pread
    monkeypatch.setattr(os, "pread", read_first_bytes)
    (tmp_path / "a.wav").write_bytes(make())
    with (
        pytest.raises(Unreadable, match=r"^can't be read: Input/output error$"),
        opened_payload(tmp_path / "a.wav") as payload,
    ):
        audio_length(payload, "wav")


def test_what_takes_soundfile_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ManifestError) as caught:
        length(b"OggS" + bytes(100))
    assert caught.value.hint == "Install it: pip install 'batchtune[audio]'."


def test_wav_flac_and_mp3_take_no_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [written("WAV"), written("FLAC"), written("MP3")]
    monkeypatch.setattr(importlib, "import_module", None)
    assert [length(data).num_samples for data in files] == [COUNT] * 3


def test_suffixes_are_lower_case_without_a_dot() -> None:
    assert {"wav", "flac", "ogg", "opus", "mp3", "aiff", "sph"} < AUDIO_SUFFIXES
    assert all(suffix == suffix.lower() and "." not in suffix for suffix in AUDIO_SUFFIXES)
