"""Lengths of audio and array files by their headers: against libsndfile, and where the files are odd or damaged."""

import errno
import io
import os
import random
import struct
import sys

import numpy as np
import pytest
from manifests.samples import damaged

from batchtune.errors import ManifestError
from batchtune.manifests.formats import Unreadable
from batchtune.manifests.headers import (
    AudioLength,
    Payload,
    audio_length,
    opened_payload,
)

RATE = 16_000
COUNT = 1234


def payload_of(data):
    return Payload(len(data), lambda offset, size: data[offset : offset + size])


def length(data):
    return audio_length(payload_of(data))


def reason(data):
    with pytest.raises(Unreadable) as caught:
        length(data)
    return caught.value.reason


def written(
    form,
    subtype=None,
    channels=1,
    count=COUNT,
    **options,
):
    """A file written by libsndfile; the test is skipped without it."""
    soundfile = pytest.importorskip("soundfile")
    stream = io.BytesIO()
    noise = np.random.default_rng(0).standard_normal((count, channels)) * 0.1
    soundfile.write(stream, noise, RATE, format=form, subtype=subtype, **options)
    return stream.getvalue()


def chunk(name, data, size=None):
    return (
        name
        + struct.pack("<I", len(data) if size is None else size)
        + data
        + b"\0" * (len(data) % 2)
    )


def riff(*chunks, magic=b"RIFF", size=None):
    body = b"WAVE" + b"".join(chunks)
    return magic + struct.pack("<I", len(body) if size is None else size) + body


def fmt(
    codec=1,
    channels=1,
    rate=RATE,
    align=2,
    bits=16,
    more=b"",
):
    return chunk(
        b"fmt ",
        struct.pack("<HHIIHH", codec, channels, rate, rate * align, align, bits) + more,
    )


DATA = chunk(b"data", bytes(2000))


@pytest.mark.parametrize("form", ["WAV", "WAVEX", "RF64"])
def test_wav_of_any_encoding_has_its_samples(form):
    for subtype in (
        "PCM_U8",
        "PCM_16",
        "PCM_24",
        "PCM_32",
        "FLOAT",
        "DOUBLE",
        "ULAW",
        "ALAW",
    ):
        for channels in (1, 6):
            assert length(written(form, subtype, channels)) == AudioLength(
                COUNT, RATE
            ), (subtype, channels)


@pytest.mark.parametrize("subtype", ["IMA_ADPCM", "MS_ADPCM", "GSM610", "G721_32"])
def test_adpcm_has_the_samples_of_its_fact_chunk(subtype):
    data = written("WAV", subtype, count=20_000)
    fact = struct.unpack_from("<I", data, data.index(b"fact") + 8)[0]
    assert 20_000 <= fact < 20_600  # filled up to a block
    assert length(data).num_samples == fact


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(b"LIST", b"INFOISFT\x0e\0\0\0Lavf58.29.100\0"), fmt(), DATA],
        [fmt(), chunk(b"junk", b"odd"), DATA],
        [chunk(b"JUNK", bytes(100_001)), fmt(), DATA],
        [fmt(), DATA, chunk(b"LIST", b"INFO")],
        [fmt(more=b"\0\0"), chunk(b"fact", struct.pack("<I", 5)), DATA],
        [fmt(), *[chunk(b"cue ", b"")] * 400, DATA],
    ],
)
def test_other_chunks_do_not_matter(chunks):
    assert length(riff(*chunks)) == AudioLength(1000, RATE)


@pytest.mark.parametrize("magic", [b"RF64", b"BW64"])
def test_rf64_has_its_size_in_another_chunk(magic):
    for size in [2000, 0xFFFFFFFFFFFFFFFF]:
        ds64 = chunk(b"ds64", struct.pack("<QQQI", 0, size, 0, 0))
        data = riff(
            ds64,
            fmt(),
            chunk(b"data", bytes(2000), 0xFFFFFFFF),
            magic=magic,
            size=0xFFFFFFFF,
        )
        assert length(data).num_samples == 1000


def test_an_open_size_extends_to_the_end():
    for whole, size in [
        (0, 0),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (36, 0),
        # As sox leaves it: whole blocks.
        (0x7FFFF024, 0x7FFFF000),
        (0xFFFFFFFF, 0),
    ]:
        data = riff(fmt(), chunk(b"data", bytes(2000), size), size=whole)
        assert length(data).num_samples == 1000


def test_an_empty_recording_has_no_samples():
    assert length(riff(fmt(), chunk(b"data", b""))) == AudioLength(0, RATE)
    assert (
        length(riff(fmt(), chunk(b"data", b""), chunk(b"LIST", bytes(100)))).num_samples
        == 0
    )


def test_fewer_samples_than_the_header_says_are_an_error():
    for removed in (1, 2, 1000, 1999, 2000):
        assert reason(riff(fmt(), DATA)[:-removed]) == "truncated WAV", removed
    with pytest.raises(
        Unreadable, match=r"^truncated WAV: 1,900 of 2,000 bytes of audio$"
    ):
        length(riff(fmt(), DATA)[:-100])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "an empty file"),
        (b"RIFF", "no WAV header"),
        (b"RIFF\0\0\0\0AVI LIST", "no WAV header"),
        (riff(chunk(b"fmt ", bytes(10)), DATA), "WAV without a format chunk"),
        (riff(fmt(), *[chunk(b"cue ", b"")] * 600, DATA), "WAV without a data chunk"),
        (riff(fmt(rate=0), DATA), "a damaged WAV header"),
        (riff(fmt(channels=0, align=0), DATA), "a damaged WAV header"),
        (riff(fmt(codec=0x1234), DATA), "a WAV codec that is not read"),
        (bytes(1000), "no audio header"),
    ],
)
def test_what_is_not_audio_or_damaged_says_so(data, said):
    assert reason(data) == said


# Other audio


@pytest.mark.parametrize(
    ("form", "subtype"),
    [
        ("FLAC", "PCM_24"),
        ("OGG", "VORBIS"),
        ("MP3", "MPEG_LAYER_III"),
        ("AIFF", "PCM_16"),
    ],
)
def test_other_audio_has_the_samples_that_were_written(form, subtype):
    for channels in (1, 2):
        assert length(written(form, subtype, channels)) == AudioLength(COUNT, RATE)


def test_opus_counts_the_samples_that_it_decodes_to():
    assert length(written("OGG", "OPUS", count=RATE)) == AudioLength(48_000, 48_000)


def m4a(duration, rate):
    def atom(name, *parts):
        return struct.pack(">I", 8 + len(b"".join(parts))) + name + b"".join(parts)

    sample = atom(
        b"mp4a", bytes(6), struct.pack(">H8xHHIHH", 1, 2, 16, 0, rate, 0), atom(b"free")
    )
    media = [
        atom(b"mdhd", bytes(12), struct.pack(">IIHH", rate, duration, 0, 0)),
        atom(b"hdlr", bytes(8), b"soun", bytes(13)),
        atom(
            b"minf",
            atom(b"stbl", atom(b"stsd", bytes(4), struct.pack(">I", 1), sample)),
        ),
    ]
    return atom(b"ftyp", b"M4A \0\0\0\0M4A mp42") + atom(
        b"moov", atom(b"trak", atom(b"mdia", *media))
    )


def test_m4a_has_the_duration_of_its_audio_track():
    assert length(m4a(61_440, RATE)) == AudioLength(61_440, RATE)


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_mp3_without_a_tag_is_an_estimate(mode):
    data = written("MP3", count=32_000, bitrate_mode=mode)
    assert length(data) == AudioLength(32_000, RATE)
    first = data.index(b"\xff\xf3", 4)  # the frame after that with the tag
    assert length(data[first:]).is_estimate


def test_a_flac_without_a_length_is_unreadable():
    data = bytearray(written("FLAC"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    assert reason(bytes(data)) == "an audio header without a length"


@pytest.mark.parametrize(
    "data",
    [b"\xff\xd8\xff\xe0" + bytes(5000), b"\xff" * 100_000, b"fLaC\x04" + bytes(100)],
)
def test_what_only_begins_like_audio_is_not(data):
    assert reason(data) in ("damaged, or not audio", "no audio header", "no MP3 header")


def test_without_mutagen_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mutagen", None)
    with pytest.raises(ManifestError) as caught:
        length(b"OggS" + bytes(100))
    assert caught.value.hint == "Install it: pip install mutagen."
    assert length(riff(fmt(), DATA)).num_samples == 1000


def survives(data):
    try:
        found = length(data)
    except Unreadable as error:
        assert error.reason
    else:
        assert found.num_samples >= 0
        assert found.sample_rate > 0


@pytest.mark.parametrize(
    ("form", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("WAV", "MS_ADPCM"),
        ("WAVEX", "FLOAT"),
        ("RF64", "PCM_24"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
        ("AIFF", "PCM_16"),
        ("M4A", ""),
    ],
)
def test_a_damaged_audio_file_is_read_or_refused(form, subtype):
    data = m4a(61_440, RATE) if form == "M4A" else written(form, subtype, count=400)
    chance = random.Random(form)
    for _ in range(300):
        content = damaged(data, chance, (b"\0", b"\xff")) or data
        survives(damaged(content, chance, (b"\0", b"\xff")))


# What is read from


def test_an_error_of_the_disk_is_reported(tmp_path, monkeypatch):
    def read_first_bytes(descriptor, size, offset):
        if offset > 0:
            raise OSError(errno.EIO, "Input/output error")
        return original(descriptor, size, offset)

    original = os.pread
    monkeypatch.setattr(os, "pread", read_first_bytes)
    (tmp_path / "a.wav").write_bytes(riff(chunk(b"LIST", bytes(500)), fmt(), DATA))
    with (
        pytest.raises(Unreadable, match=r"^can't be read: Input/output error$"),
        opened_payload(tmp_path / "a.wav") as payload,
    ):
        audio_length(payload)
