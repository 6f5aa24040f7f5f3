"""MPEG audio (MP3, and layers I and II), counted frame by frame where no header tells their number.

After ISO/IEC 11172-3 and 13818-3 (frame headers), and the Xing, Info, LAME and VBRI tags as their writers describe
them. libsndfile is not asked: without such a tag it guesses the length from the first frame's bit rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from batchtune.manifests.headers import AudioLength, HeaderError, Payload

_RATES = (44_100, 48_000, 32_000)
# kbit/s, by (MPEG 1, layer).
_BIT_RATES = {
    (True, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
# The delay of the decoder itself, which mpg123 takes off the end where there is an Info tag.
_DECODER_DELAY = 529

_WINDOW_BYTES = 256 * 1024
_LONGEST_GAP = 64 * 1024
_SMALLEST_FRAME = 24
_LONGEST_FRAME = 2881
_END_TAGS = (b"TAG", b"APETAGEX", b"LYRICSBEGIN")


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a frame's header says.

    Attributes:
        kind: Bits that are the same in all frames of a stream: version and layer, sample rate.
        version: 1; 2 for MPEG 2 and 2.5.
        layer: 1, 2 or 3.
        rate: In Hz.
        samples: Of one channel.
        length: In bytes, with the header.
    """

    kind: int
    version: int
    layer: int
    rate: int
    samples: int
    length: int


def mp3_length(payload: Payload, search: bool = False) -> AudioLength:
    """The length of MPEG audio, without the encoder's delay and padding where a LAME tag tells them.

    Args:
        payload: The file, without an ID3v2 tag.
        search: Whether other bytes may stand before the first frame.

    Raises:
        HeaderError: No MPEG audio, damaged, or truncated: less than its Xing tag says.
    """
    reader = _Reader(payload)
    start = reader.next_frame(0, None)
    if start is None or (start > 0 and not search):
        raise HeaderError("no MP3 header")
    frame = reader.frame(start)
    assert frame is not None
    tag = payload.read(start, 256)
    count = _xing_count(tag, frame, payload.size - start)
    if count is None:
        count = reader.count(start, frame) * frame.samples
    return AudioLength(count, frame.rate)


def _xing_count(data: bytes, frame: _Frame, available: int) -> int | None:
    """The number of samples by the tag in the first frame, or None without a tag.

    Args:
        data: The beginning of the first frame.
        frame: Its header.
        available: Bytes from there to the end of the file.
    """
    if data[36:40] == b"VBRI":
        size, frames = (int.from_bytes(data[at : at + 4], "big") for at in (46, 50))
        return _checked(frames, size, available) * frame.samples or None
    mono = data[3] >> 6 == 3
    at = 4 + ((17 if mono else 32) if frame.version == 1 else (9 if mono else 17))
    if data[at : at + 4] not in (b"Xing", b"Info"):
        return None
    flags = int.from_bytes(data[at + 4 : at + 8], "big")
    if not flags & 1:
        return None
    frames = int.from_bytes(data[at + 8 : at + 12], "big")
    size = int.from_bytes(data[at + 12 : at + 16], "big") if flags & 2 else 0
    samples = _checked(frames, size, available) * frame.samples
    lame = at + 12 + (4 if flags & 2 else 0) + (100 if flags & 4 else 0) + (4 if flags & 8 else 0)
    delay, padding = 0, 0
    if data[lame : lame + 4].strip(b"\0") and len(data) >= lame + 24:
        both = int.from_bytes(data[lame + 21 : lame + 24], "big")
        delay, padding = both >> 12, both & 0xFFF
    trimmed = samples - delay - max(padding, _DECODER_DELAY)
    return trimmed if trimmed > 0 else samples or None


def _checked(frames: int, size: int, available: int) -> int:
    if size > available + _LONGEST_FRAME or frames * _SMALLEST_FRAME > available:
        declared = max(size, frames * _SMALLEST_FRAME)
        raise HeaderError("truncated MP3", f"{available:,} of {declared:,} bytes of audio")
    return frames


class _Reader:
    """Finds frames, through a window that moves over the file."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._size = payload.size
        self._start = 0
        self._window = payload.read(0, _WINDOW_BYTES)

    def frame(self, position: int) -> _Frame | None:
        """The header at a position, or None if none stands."""
        at = self._at(position, 4)
        window = self._window
        if at + 4 > len(window) or window[at] != 0xFF:
            return None
        return _frame(window[at + 1], window[at + 2])

    def count(self, position: int, first: _Frame) -> int:
        """The number of whole frames from this one on. Raises HeaderError where others than frames lie between."""
        frames = 0
        kind: int | None = first.kind
        while True:
            frame = self.frame(position)
            if frame is not None and frame.kind == kind:
                if position + frame.length > self._size:
                    return frames
                frames += 1
                position += frame.length
            elif position + 4 > self._size or self._bytes(position, 16).startswith(_END_TAGS):
                return frames
            else:
                found = self.next_frame(position, kind)
                if found is None and self._size - position > _LONGEST_GAP:
                    raise HeaderError("a damaged MP3", f"no frame for {_LONGEST_GAP:,} bytes after byte {position:,}")
                if found is None:
                    return frames
                position = found

    def next_frame(self, position: int, kind: int | None) -> int | None:
        """Where the next frame begins that another follows or that ends the file; None within 64 KiB."""
        last = min(position + _LONGEST_GAP, self._size - 4)
        while position <= last:
            frame = self.frame(position)
            if frame is not None and kind in (None, frame.kind):
                after = position + frame.length
                following = self.frame(after)
                if after == self._size or (following is not None and following.kind == frame.kind):
                    return position
            at = self._at(position + 1, _LONGEST_FRAME)
            found = self._window.find(b"\xff", at)
            position = self._start + (found if found >= 0 else max(len(self._window), at))
        return None

    def _bytes(self, position: int, size: int) -> bytes:
        at = self._at(position, size)
        return self._window[at : at + size]

    def _at(self, position: int, size: int) -> int:
        """The index in the window of a position, with that many bytes after it, as far as the file has them."""
        at = position - self._start
        if at < 0 or (at + size > len(self._window) and self._start + len(self._window) < self._size):
            self._start, at = position, 0
            self._window = self._payload.read(position, _WINDOW_BYTES)
        return at


@cache
def _frame(second: int, third: int) -> _Frame | None:
    """The header with these as its second and third byte; the first is 0xFF."""
    version_bits, layer_bits = second >> 3 & 3, second >> 1 & 3
    bit_rate_index, rate_index = third >> 4, third >> 2 & 3
    if second < 0xE0 or version_bits == 1 or layer_bits == 0 or bit_rate_index in (0, 15) or rate_index == 3:
        return None
    layer = 4 - layer_bits
    first_version = version_bits == 3
    rate = _RATES[rate_index] >> {3: 0, 2: 1, 0: 2}[version_bits]
    bits = 1000 * _BIT_RATES[first_version, layer][bit_rate_index - 1]
    padding = third >> 1 & 1
    if layer == 1:
        samples, length = 384, (12 * bits // rate + padding) * 4
    else:
        samples = 1152 if first_version or layer == 2 else 576
        length = samples // 8 * bits // rate + padding
    kind = (second & 0xFE) << 2 | rate_index
    return _Frame(kind, 1 if first_version else 2, layer, rate, samples, length)
