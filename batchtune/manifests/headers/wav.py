"""WAV: RIFF, RF64 and BW64.

After the Multimedia Programming Interface and Data Specifications 1.0 (RIFF, `fmt `, `fact`, `data`), EBU Tech 3306
(RF64, `ds64`) and Microsoft's WAVEFORMATEXTENSIBLE.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from batchtune.manifests.headers.payload import AudioLength, BytesPayload, HeaderError, Payload

_CANONICAL = struct.Struct("<4sI4s4sIHHIIHH4sI")
_CHUNK = struct.Struct("<4sI")
_FMT = struct.Struct("<HHIIHH")
_DS64 = struct.Struct("<QQ")

_MOST_CHUNKS = 500
_UNKNOWN, _UNKNOWN_LONG = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
# What SoX writes for a size that it does not know, rounded down to whole blocks.
_SOX_UNKNOWN = 0x7FFFF000
_SURELY_KNOWN = 0x7FFF0000

_PER_SAMPLE = frozenset((0x0001, 0x0003, 0x0006, 0x0007))  # PCM, float, A-law, mu-law
_IN_BLOCKS = frozenset((0x0002, 0x0011, 0x0031))  # Microsoft's ADPCM, IMA's, GSM 6.10
_EXTENSIBLE = 0xFFFE
# No codec in use packs more samples of one channel into a byte.
_MOST_PER_BYTE = 100


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the chunks say, up to the samples.

    Attributes:
        fmt: Content of the chunk `fmt `, up to 40 bytes.
        fact: Number of samples by the chunk `fact`, or None.
        size: Bytes of the samples.
    """

    fmt: bytes
    fact: int | None
    size: int


def wav_length(header: bytes, size: int) -> AudioLength | None:
    """The length of an ordinary WAV file, fast.

    Args:
        header: The file's first bytes, as many as are at hand.
        size: Of the whole file, in bytes.

    Returns:
        None where these bytes do not tell: `wav_length_of` then does, or says what is wrong.
    """
    if len(header) < 44:
        return None
    riff, _, wave, fmt, fmt_size, codec, channels, rate, _, align, bits, data, data_size = _CANONICAL.unpack_from(
        header
    )
    if (
        data == b"data"
        and riff == b"RIFF"
        and wave == b"WAVE"
        and fmt == b"fmt "
        and fmt_size == 16
        and codec in _PER_SAMPLE
        and rate
        and align
        and align == channels * (bits + 7 >> 3)
        and 0 < data_size < _SURELY_KNOWN
        and data_size <= size - 44
    ):
        return AudioLength(data_size // align, rate)
    try:
        return _told_by(_layout(BytesPayload(header), size))
    except HeaderError:
        return None


def wav_length_of(payload: Payload) -> AudioLength | None:
    """The length of any WAV file; None if only libsndfile can tell it.

    A size of the samples that a writer to a pipe left open (0, all ones, SoX's 0x7FFFF000) means all to the end.

    Raises:
        HeaderError: No WAV file, damaged, or truncated: fewer samples than the header says.
    """
    return _told_by(_layout(payload, payload.size))


def _layout(payload: Payload, size: int) -> _Layout:
    """Walks the chunks; `size` is that of the whole file, of which `payload` may be only the beginning."""
    head = payload.read(0, 12)
    if len(head) < 12 or head[8:] != b"WAVE":
        raise HeaderError("no WAV header")
    open_end = not head.startswith(b"RIFF") or abs(int.from_bytes(head[4:8], "little") + 8 - size) > 1
    fmt, fact, long_size = b"", None, None
    offset = 12
    for _ in range(_MOST_CHUNKS):
        header = payload.read(offset, 8)
        if len(header) < 8:
            break
        name, length = _CHUNK.unpack(header)
        offset += 8
        if name == b"data":
            if long_size is not None and length == _UNKNOWN:
                length = long_size
            if len(fmt) < 16:
                raise HeaderError("WAV without a format chunk")
            return _Layout(fmt, fact, _data_size(length, size - offset, int.from_bytes(fmt[12:14], "little"), open_end))
        if name == b"fmt ":
            fmt = payload.read(offset, min(length, 40))
        elif name == b"fact":
            fact = int.from_bytes(payload.read(offset, min(length, 4)), "little")
        elif name == b"ds64":
            sizes = payload.read(offset, _DS64.size)
            long_size = _DS64.unpack(sizes)[1] if len(sizes) == _DS64.size else None
        offset += length + (length & 1)
    raise HeaderError("WAV without a data chunk")


def _data_size(declared: int, available: int, align: int, open_end: bool) -> int:
    """Bytes of the samples. Raises HeaderError where fewer are there than declared.

    Args:
        declared: By the header of the data chunk.
        available: From there to the end of the file.
        align: Bytes of a block.
        open_end: Whether the size of the whole, too, is another than the file's.
    """
    left_open = declared == 0 or _SOX_UNKNOWN - align < declared <= _SOX_UNKNOWN
    if declared in (_UNKNOWN, _UNKNOWN_LONG) or (left_open and open_end):
        return max(0, available)
    if declared <= available:
        return declared
    raise HeaderError("truncated WAV", f"{max(0, available):,} of {declared:,} bytes of audio")


def _told_by(layout: _Layout) -> AudioLength | None:
    """The length, or None if it takes libsndfile. Raises HeaderError where nothing could tell it."""
    codec, channels, rate, _, align, bits = _FMT.unpack_from(layout.fmt)
    if codec == _EXTENSIBLE and len(layout.fmt) >= 26:
        codec = int.from_bytes(layout.fmt[24:26], "little")
    if rate == 0 or channels == 0:
        raise HeaderError("a damaged WAV header", f"{channels} channels, {rate} samples per second")
    if codec in _PER_SAMPLE:
        # Where the two sizes of a sample differ, libsndfile's way is as good as any.
        return AudioLength(layout.size // align, rate) if align and align == channels * (bits + 7 >> 3) else None
    if layout.fact and layout.fact in _possible(layout, codec, align):
        return AudioLength(layout.fact, rate)
    if codec in _IN_BLOCKS:
        return None
    raise HeaderError("a WAV codec that is not read", f"codec 0x{codec:04x}, without a length")


def _possible(layout: _Layout, codec: int, align: int) -> range:
    """How many samples of one channel the data may hold.

    Some writers' `fact` is wrong: libsndfile's (1.2) for IMA ADPCM of more than one channel, to name one.
    """
    if codec in _IN_BLOCKS and len(layout.fmt) >= 20 and align:
        per_block = int.from_bytes(layout.fmt[18:20], "little")
        return range((layout.size // align - 1) * per_block + 1, -(-layout.size // align) * per_block + 1)
    return range(layout.size * _MOST_PER_BYTE + 1)
