"""The length of an audio file, whatever its format; FLAC after RFC 9639: STREAMINFO (8.2), frame headers (9.1)."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from batchtune.errors import ManifestError
from batchtune.manifests.headers.mp3 import mp3_length
from batchtune.manifests.headers.payload import AudioLength, HeaderError, PartialPayload, Payload, PayloadStream
from batchtune.manifests.headers.wav import wav_length, wav_length_of

# Lower case, without the dot; `.raw` is not among them, since such a file says nothing about itself.
AUDIO_SUFFIXES = frozenset(
    (
        *("wav", "wave", "bwf", "rf64", "bw64", "w64"),
        *("flac", "ogg", "oga", "opus", "mp3", "mp2", "mp1", "mpga"),
        *("aiff", "aif", "aifc", "au", "snd", "caf", "sph", "nist", "voc", "paf", "pvf", "svx", "8svx", "avr"),
    )
)
_MPEG_SUFFIXES = ("mp3", "mp2", "mp1", "mpga")

_WAV = (b"RIFF", b"RF64", b"BW64")
# Ogg (Vorbis, Opus, FLAC), AIFF and 8SVX, AU, CAF, W64, big-endian WAV, NIST SPHERE, VOC, PVF, PAF, AVR. Nothing else
# reaches libsndfile: of what has no name of its own it makes guesses.
_LIBSNDFILE = (
    *(b"OggS", b"FORM", b".snd", b"dns.", b"caff", b"riff", b"RIFX"),
    *(b"NIST_1A", b"Creative Voice File", b"PVF1", b" paf", b"fap ", b"2BIT"),
)
_HEAD_BYTES = 256
_MOST_TAGS = 8
# libsndfile's way to say that a length is unknown is the largest that there is.
_UNKNOWN = 1 << 62
_MOST_READS = 4
_SPARE_BYTES = 16 * 1024 * 1024


def audio_length(payload: Payload, suffix: str) -> AudioLength:
    """How long an audio file is, by its header.

    The content decides which format it is, since many a file's suffix lies; the suffix, where the content has no
    magic number.

    Args:
        payload: The file.
        suffix: Of its name, in lower case, without the dot.

    Raises:
        HeaderError: It can't be told: no audio, damaged, truncated, or a format that libsndfile does not read.
        ManifestError: It takes libsndfile, and the package soundfile is missing.
    """
    try:
        return _length(payload, suffix)
    except OSError as error:
        raise HeaderError("can't be read", error.strerror or str(error)) from None


def _length(payload: Payload, suffix: str) -> AudioLength:
    head = payload.read(0, _HEAD_BYTES)
    if head.startswith(b"ID3"):
        payload = _without_tags(payload)
        head = payload.read(0, _HEAD_BYTES)
    if head.startswith(_WAV):
        return wav_length(head, payload.size) or wav_length_of(payload) or _sndfile_length(payload)
    if head.startswith(b"fLaC"):
        return flac_length(payload)
    if head.startswith(_LIBSNDFILE):
        return _sndfile_length(payload)
    if head.startswith(b"\xff") or suffix in _MPEG_SUFFIXES:
        return mp3_length(payload, search=suffix in _MPEG_SUFFIXES)
    if not head:
        raise HeaderError("an empty file")
    raise HeaderError("no audio header", f"a file that begins with {head[:4]!r}")


def _without_tags(payload: Payload) -> Payload:
    """What follows the ID3v2 tags (id3.org, ID3v2.4.0, 3.1): their size has 7 bits in each of 4 bytes."""
    start = 0
    for _ in range(_MOST_TAGS):
        tag = payload.read(start, 10)
        if len(tag) < 10 or not tag.startswith(b"ID3"):
            break
        size = 0
        for byte in tag[6:10]:
            size = size << 7 | byte & 0x7F
        start += 10 + size + (10 if tag[5] & 0x10 else 0)
    if start >= payload.size:
        raise HeaderError("no audio header", "an ID3 tag and nothing after it")
    return PartialPayload(payload, start)


def _sndfile_length(payload: Payload) -> AudioLength:
    """The length of an audio file, by libsndfile.

    A truncated file passes as a shorter one wherever libsndfile reads it as such.

    Raises:
        HeaderError: libsndfile does not read it.
        ManifestError: The package soundfile is missing.
    """
    soundfile = _soundfile()
    stream = PayloadStream(payload, _MOST_READS * payload.size + _SPARE_BYTES)
    try:
        with soundfile.SoundFile(stream) as file:
            num_samples, sample_rate = int(file.frames), int(file.samplerate)
    except soundfile.SoundFileError as error:
        stream.check()
        said = getattr(error, "error_string", "") or str(error)
        raise HeaderError("not read by libsndfile", said.strip().rstrip(".")) from None
    stream.check()
    if not 0 <= num_samples < _UNKNOWN or sample_rate <= 0:
        raise HeaderError("an audio header without a length")
    return AudioLength(num_samples, sample_rate)


def _soundfile() -> ModuleType:
    try:
        return importlib.import_module("soundfile")
    except (ImportError, OSError) as error:  # the latter where libsndfile itself is missing
        raise ManifestError(
            f"audio files other than WAV, FLAC and MP3 are read by soundfile, which can't be imported ({error})",
            "Install it: pip install 'batchtune[audio]'.",
        ) from None


_STREAMINFO_END = 4 + 4 + 34
# A frame of 65535 equal samples: a header of 6 bytes, a subframe of 2, a footer of 2.
_SMALLEST_FRAME = 10
_TAIL_BYTES = 1024 * 1024
# What looks like a frame's header is none once in some thousand files; only one that was made to has many.
_MOST_TRIED = 8
_CODED_SIZES = {1: 192, **{code: 144 << code for code in range(2, 6)}, **{code: 1 << code for code in range(8, 16)}}


@dataclass(frozen=True, slots=True)
class _Info:
    """What STREAMINFO says that matters."""

    largest_block: int
    smallest_frame: int
    rate: int
    total: int


def flac_length(payload: Payload) -> AudioLength:
    """The length of a FLAC file.

    An encoder that wrote to a pipe left the total open: then the last frame's number tells.

    Raises:
        HeaderError: No FLAC file, damaged, or much too small for what its header says.
    """
    info = _info(payload.read(0, _STREAMINFO_END))
    if info.total == 0:
        return AudioLength(_end_of_last_frame(payload, info), info.rate)
    full_frames = (info.total - 1) // info.largest_block
    if payload.size < _STREAMINFO_END + full_frames * max(info.smallest_frame, _SMALLEST_FRAME):
        raise HeaderError("truncated FLAC", f"{payload.size:,} bytes for {info.total:,} samples")
    return AudioLength(info.total, info.rate)


def _info(data: bytes) -> _Info:
    if len(data) < _STREAMINFO_END or data[4] & 0x7F != 0 or int.from_bytes(data[5:8], "big") != 34:
        raise HeaderError("a damaged FLAC header")
    packed = int.from_bytes(data[18:26], "big")  # rate: 20 bits, channels: 3, bits per sample: 5, total: 36
    info = _Info(
        largest_block=int.from_bytes(data[10:12], "big"),
        smallest_frame=int.from_bytes(data[12:15], "big"),
        rate=packed >> 44,
        total=packed & (1 << 36) - 1,
    )
    if info.rate == 0 or info.largest_block < 16:
        raise HeaderError("a damaged FLAC header", f"{info.rate} samples per second, blocks of {info.largest_block}")
    return info


def _end_of_last_frame(payload: Payload, info: _Info) -> int:
    start = max(_STREAMINFO_END, payload.size - _TAIL_BYTES)
    tail = payload.read(start, payload.size - start)
    if tail[-128:].startswith(b"TAG"):  # ID3v1
        tail = tail[:-128]
    position, tried = len(tail), 0
    while tried < _MOST_TRIED and (position := tail.rfind(b"\xff", 0, position)) >= 0:
        end = _frame_end(tail[position : position + 16], info)
        if end is not None:
            tried += 1
            if _crc(tail[position:], 16, 0x8005) == 0:
                return end
    raise HeaderError("a FLAC header without a length", "no whole frame at the end")


def _frame_end(header: bytes, info: _Info) -> int | None:
    """The number of the sample after a frame; None if no frame's header stands."""
    if len(header) < 6 or header[1] & 0xFE != 0xF8 or header[3] & 0x01:
        return None
    number, after = _coded_number(header, 4)
    code = header[2] >> 4
    samples = _CODED_SIZES.get(code, 0)
    if code in (6, 7):
        width = code - 5
        samples = int.from_bytes(header[after : after + width], "big") + 1
        after += width
    after += {12: 1, 13: 2, 14: 2}.get(header[2] & 0x0F, 0)
    if number is None or samples == 0 or after >= len(header) or _crc(header[:after], 8, 0x07) != header[after]:
        return None
    variable = header[1] & 1
    return number + samples if variable else number * info.largest_block + samples


def _coded_number(data: bytes, at: int) -> tuple[int | None, int]:
    """A number as UTF-8 codes one, up to 36 bits, and the position after it."""
    first = data[at]
    ones = 8 - (first ^ 0xFF).bit_length()
    if ones == 0:
        return first, at + 1
    rest = data[at + 1 : at + ones]
    if ones == 1 or ones == 8 or len(rest) < ones - 1 or any(byte & 0xC0 != 0x80 for byte in rest):
        return None, at
    number = first & (0x7F >> ones)
    for byte in rest:
        number = number << 6 | byte & 0x3F
    return number, at + ones


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    """The checksum of a frame's header (8 bits) or of a whole frame (16 bits), which with its own is 0."""
    table, shift, mask = _crc_table(bits, polynomial), bits - 8, (1 << bits) - 1
    crc = 0
    for byte in data:
        crc = (crc << 8 & mask) ^ table[crc >> shift ^ byte]
    return crc


@cache
def _crc_table(bits: int, polynomial: int) -> list[int]:
    """What each value of a byte adds to a checksum."""
    table = []
    for byte in range(256):
        crc = byte << bits - 8
        for _ in range(8):
            crc = crc << 1 ^ ((1 << bits | polynomial) if crc >> bits - 1 else 0)
        table.append(crc)
    return table
