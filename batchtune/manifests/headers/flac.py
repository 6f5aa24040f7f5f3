"""FLAC, after RFC 9639: the block STREAMINFO (8.2) and the frame headers (9.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from batchtune.manifests.headers.payload import AudioLength, HeaderError, Payload

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
    """The number of the sample after a frame; None where no frame's header stands."""
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
