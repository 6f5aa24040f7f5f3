"""The length of an audio file, whatever its format."""

from __future__ import annotations

import importlib
from types import ModuleType

from batchtune.errors import ManifestError
from batchtune.manifests.headers.flac import flac_length
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
