"""The length of an audio file, whatever its format.

WAV after the Multimedia Programming Interface and Data Specifications 1.0 (RIFF, `fmt `, `fact`, `data`), EBU Tech 3306
(RF64, `ds64`) and Microsoft's WAVEFORMATEXTENSIBLE; FLAC after RFC 9639: STREAMINFO (8.2), frame headers (9.1).
"""

from __future__ import annotations

import importlib
import struct
from functools import cache

from batchtune.errors import ManifestError
from batchtune.manifests.headers import AudioLength, Payload, PayloadStream
from batchtune.manifests.headers.mp3 import mp3_length
from batchtune.manifests.values import Unreadable

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
# libsndfile says that a length is unknown by the largest possible one.
_UNKNOWN = 1 << 62


def audio_length(payload: Payload, suffix: str) -> AudioLength:
    """Return the length of an audio file, by its header.

    The content decides which format it is, and the suffix, in lower case, only without a magic number: suffixes lie.

    Raises:
        Unreadable: No audio, damaged, truncated, or a format that libsndfile does not read.
        ManifestError: Only libsndfile reads it, and the package soundfile is missing.
    """
    head = payload.read(0, _HEAD_BYTES)
    if head.startswith(b"ID3"):
        payload = _without_tags(payload)
        head = payload.read(0, _HEAD_BYTES)
    if head.startswith(_WAV):
        return _wav_length(payload, head) or _sndfile_length(payload)
    if head.startswith(b"fLaC"):
        return _flac_length(payload)
    if head.startswith(_LIBSNDFILE):
        return _sndfile_length(payload)
    if head.startswith(b"\xff") or suffix in _MPEG_SUFFIXES:
        return mp3_length(payload, search=suffix in _MPEG_SUFFIXES)
    if not head:
        raise Unreadable("an empty file")
    raise Unreadable("no audio header", f"a file that begins with {head[:4]!r}")


def _without_tags(payload: Payload) -> Payload:
    """Return what follows the ID3v2 tags (id3.org, ID3v2.4.0, 3.1): their size has 7 bits in each of 4 bytes."""
    start = 0
    for _ in range(8):
        tag = payload.read(start, 10)
        if len(tag) < 10 or not tag.startswith(b"ID3"):
            break
        size = sum((byte & 0x7F) << shift for byte, shift in zip(tag[6:10], (21, 14, 7, 0), strict=True))
        start += 10 + size + (10 if tag[5] & 0x10 else 0)
    if start >= payload.size:
        raise Unreadable("no audio header", "an ID3 tag and nothing after it")
    return Payload(payload.size - start, lambda offset, size: payload.read(start + offset, size))


def _sndfile_length(payload: Payload) -> AudioLength:
    """Return the length by libsndfile; a truncated file passes as a shorter one if libsndfile reads it as such."""
    try:
        soundfile = importlib.import_module("soundfile")
    except (ImportError, OSError) as error:  # the latter where libsndfile itself is missing
        message = f"audio files other than WAV, FLAC and MP3 are read by soundfile, which can't be imported ({error})"
        raise ManifestError(message, "Install it: pip install 'batchtune[audio]'.") from None
    stream = PayloadStream(payload, 4 * payload.size + 16 * 1024 * 1024)
    try:
        with soundfile.SoundFile(stream) as file:
            num_samples, sample_rate = int(file.frames), int(file.samplerate)
    except soundfile.SoundFileError as error:
        stream.check()
        said = getattr(error, "error_string", "") or str(error)
        raise Unreadable("not read by libsndfile", said.strip().rstrip(".")) from None
    stream.check()
    if not 0 <= num_samples < _UNKNOWN or sample_rate <= 0:
        raise Unreadable("an audio header without a length")
    return AudioLength(num_samples, sample_rate)


_CANONICAL = struct.Struct("<4sI4s4sIHHIIHH4sI")
_FMT = struct.Struct("<HHIIHH")
# A writer to a pipe leaves the size of the samples open: 0, all ones, or what SoX writes, rounded down to blocks.
_ALL_ONES = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
_SOX_UNKNOWN = 0x7FFFF000
_SURELY_KNOWN = 0x7FFF0000
_PER_SAMPLE = frozenset((0x0001, 0x0003, 0x0006, 0x0007))  # PCM, float, A-law, mu-law
_IN_BLOCKS = frozenset((0x0002, 0x0011, 0x0031))  # Microsoft's ADPCM, IMA's, GSM 6.10


def _wav_length(payload: Payload, head: bytes) -> AudioLength | None:
    """Return the length of a WAV file that begins so; None if only libsndfile can tell it."""
    if len(head) >= 44:  # the header of most files
        riff, _, wave, name, size, codec, channels, rate, _, align, bits, data, length = _CANONICAL.unpack_from(head)
        ordinary = (riff, wave, name, size, data) == (b"RIFF", b"WAVE", b"fmt ", 16, b"data") and codec in _PER_SAMPLE
        known = 0 < length < _SURELY_KNOWN and length <= payload.size - 44
        if ordinary and known and rate and align == channels * (bits + 7 >> 3) != 0:
            return AudioLength(length // align, rate)
    if len(head) < 12 or head[8:12] != b"WAVE":
        raise Unreadable("no WAV header")
    # Whether the size of the whole, too, is another than the file's.
    open_end = not head.startswith(b"RIFF") or abs(int.from_bytes(head[4:8], "little") + 8 - payload.size) > 1
    fmt, fact, long_size, offset = b"", 0, None, 12
    for _ in range(500):
        header = payload.read(offset, 8)
        if len(header) < 8:
            break
        name, length = header[:4], int.from_bytes(header[4:], "little")
        offset += 8
        if name == b"data":
            if len(fmt) < 16:
                raise Unreadable("WAV without a format chunk")
            if long_size is not None and length == _ALL_ONES[0]:
                length = long_size
            available, align = max(0, payload.size - offset), int.from_bytes(fmt[12:14], "little")
            left_open = length == 0 or _SOX_UNKNOWN - align < length <= _SOX_UNKNOWN
            if length in _ALL_ONES or (left_open and open_end):
                length = available
            if length > available:
                raise Unreadable("truncated WAV", f"{available:,} of {length:,} bytes of audio")
            return _samples(fmt, fact, length)
        if name == b"fmt ":
            fmt = payload.read(offset, min(length, 40))
        elif name == b"fact":
            fact = int.from_bytes(payload.read(offset, min(length, 4)), "little")
        elif name == b"ds64" and len(sizes := payload.read(offset, 16)) == 16:
            long_size = int.from_bytes(sizes[8:], "little")
        offset += length + (length & 1)
    raise Unreadable("WAV without a data chunk")


def _samples(fmt: bytes, fact: int, size: int) -> AudioLength | None:
    """Return the length by the chunk `fmt `, the number in `fact` (or 0) and the bytes of samples; None if unknown."""
    codec, channels, rate, _, align, bits = _FMT.unpack_from(fmt)
    if codec == 0xFFFE and len(fmt) >= 26:  # WAVE_FORMAT_EXTENSIBLE
        codec = int.from_bytes(fmt[24:26], "little")
    if rate == 0 or channels == 0:
        raise Unreadable("a damaged WAV header", f"{channels} channels, {rate} samples per second")
    if codec in _PER_SAMPLE:
        # Where the two sizes of a sample differ, libsndfile's way is as good as any.
        return AudioLength(size // align, rate) if align and align == channels * (bits + 7 >> 3) else None
    # Some writers' `fact` is wrong: libsndfile's (1.2) for IMA ADPCM of more than one channel, to name one. No codec in
    # use packs more than 100 samples of one channel into a byte.
    possible = range(100 * size + 1)
    if codec in _IN_BLOCKS and len(fmt) >= 20 and align:
        per_block = int.from_bytes(fmt[18:20], "little")
        possible = range((size // align - 1) * per_block + 1, -(-size // align) * per_block + 1)
    if fact and fact in possible:
        return AudioLength(fact, rate)
    if codec in _IN_BLOCKS:
        return None
    raise Unreadable("a WAV codec that is not read", f"codec 0x{codec:04x}, without a length")


_STREAMINFO_END = 4 + 4 + 34
# A frame of 65535 equal samples: a header of 6 bytes, a subframe of 2, a footer of 2.
_SMALLEST_FRAME = 10
# Bytes look like a frame's header by chance once in some dozen files; only a hostile file has many.
_MOST_TRIED = 8
_CODED_SIZES = {1: 192, **{code: 144 << code for code in range(2, 6)}, **{code: 1 << code for code in range(8, 16)}}


def _flac_length(payload: Payload) -> AudioLength:
    """Return the length of a FLAC file; if an encoder that wrote to a pipe left it open, by the last frame's number."""
    data = payload.read(0, _STREAMINFO_END)
    if len(data) < _STREAMINFO_END or data[4] & 0x7F != 0 or int.from_bytes(data[5:8], "big") != 34:
        raise Unreadable("a damaged FLAC header")
    largest_block, smallest_frame = int.from_bytes(data[10:12], "big"), int.from_bytes(data[12:15], "big")
    packed = int.from_bytes(data[18:26], "big")  # rate: 20 bits, channels: 3, bits per sample: 5, total: 36
    rate, total = packed >> 44, packed & (1 << 36) - 1
    if rate == 0 or largest_block < 16:
        raise Unreadable("a damaged FLAC header", f"{rate} samples per second, blocks of {largest_block}")
    if total == 0:
        return AudioLength(_end_of_last_frame(payload, largest_block), rate)
    full_frames = (total - 1) // largest_block
    if payload.size < _STREAMINFO_END + full_frames * max(smallest_frame, _SMALLEST_FRAME):
        raise Unreadable("truncated FLAC", f"{payload.size:,} bytes for {total:,} samples")
    return AudioLength(total, rate)


def _end_of_last_frame(payload: Payload, largest_block: int) -> int:
    start = max(_STREAMINFO_END, payload.size - 1024 * 1024)
    tail = payload.read(start, payload.size - start)
    if tail[-128:].startswith(b"TAG"):  # ID3v1
        tail = tail[:-128]
    position, tried = len(tail), 0
    while tried < _MOST_TRIED and (position := tail.rfind(b"\xff", 0, position)) >= 0:
        end = _frame_end(tail[position : position + 16], largest_block)
        if end is not None:
            tried += 1
            if _crc(tail[position:]) == 0:
                return end
    raise Unreadable("a FLAC header without a length", "no whole frame at the end")


def _frame_end(header: bytes, largest_block: int) -> int | None:
    """Return the number of the sample after a frame; None if this is not a frame's header."""
    if len(header) < 6 or header[1] & 0xFE != 0xF8 or header[3] & 0x01:
        return None
    # The number of the frame, or of its first sample, coded as UTF-8 codes a character.
    more = 7 - (header[4] ^ 0xFF).bit_length() if header[4] & 0x80 else 0
    after = 5 + more
    if (header[4] & 0x80 and not 1 <= more <= 6) or any(byte & 0xC0 != 0x80 for byte in header[5:after]):
        return None
    number = header[4] & (0x3F >> more if more else 0x7F)
    for byte in header[5:after]:
        number = number << 6 | byte & 0x3F
    code = header[2] >> 4
    samples = _CODED_SIZES.get(code, 0)
    if code in (6, 7):
        width = code - 5
        samples = int.from_bytes(header[after : after + width], "big") + 1
        after += width
    after += {12: 1, 13: 2, 14: 2}.get(header[2] & 0x0F, 0)
    if samples == 0 or after >= len(header):
        return None
    variable = header[1] & 1
    return number + samples if variable else number * largest_block + samples


def _crc(frame: bytes) -> int:
    """Return the checksum of a frame, which with its own is 0."""
    table, crc = _crc_table(), 0
    for byte in frame:
        crc = (crc << 8 & 0xFFFF) ^ table[crc >> 8 ^ byte]
    return crc


@cache
def _crc_table() -> list[int]:
    table = [byte << 8 for byte in range(256)]
    for _ in range(8):
        table = [crc << 1 ^ (0x18005 if crc >> 15 else 0) for crc in table]
    return table
