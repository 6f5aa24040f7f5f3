"""MPEG audio (MP3, and layers I and II), counted frame by frame where no header tells their number.

After ISO/IEC 11172-3 and 13818-3 (frame headers), and the Xing, Info, LAME and VBRI tags as their writers describe
them. libsndfile is not asked: without such a tag it guesses the length from the first frame's bit rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from batchtune.manifests.headers import AudioLength, Payload
from batchtune.manifests.values import Unreadable

_RATES = (44_100, 48_000, 32_000)
# kbit/s, by (MPEG 1, layer).
_BIT_RATES = {
    (True, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    **dict.fromkeys([(False, 2), (False, 3)], (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)),
}
# The delay of the decoder itself, which mpg123 takes off the end if there is an Info tag.
_DECODER_DELAY = 529
_WINDOW_BYTES = 256 * 1024
_LONGEST_GAP = 64 * 1024
_SMALLEST_FRAME = 24
_LONGEST_FRAME = 2881
_END_TAGS = (b"TAG", b"APETAGEX", b"LYRICSBEGIN")


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame's header."""

    kind: int  # bits that are the same in all frames of a stream: version and layer, sample rate
    first_version: bool  # MPEG 1, rather than 2 or 2.5
    rate: int  # in Hz
    samples: int  # of one channel
    length: int  # in bytes, with the header


def mp3_length(payload: Payload, search: bool = False) -> AudioLength:
    """Return the length of MPEG audio without ID3v2 tags, less the encoder's delay and padding by a LAME tag.

    With `search`, other bytes may precede the first frame. Raises Unreadable if it is damaged, truncated or not MPEG.
    """
    reader = _Reader(payload)
    start = reader.next_frame(0, None)
    if start is None or (start > 0 and not search):
        raise Unreadable("no MP3 header")
    frame = reader.frame(start)
    assert frame is not None
    count = _tagged_count(payload.read(start, 256), frame, payload.size - start)
    return AudioLength(reader.count(start, frame) * frame.samples if count is None else count, frame.rate)


def _tagged_count(data: bytes, frame: _Frame, available: int) -> int | None:
    """Return the number of samples by the tag in the first frame, `data`, of a file of `available` bytes, or None."""

    def number(at: int) -> int:
        return int.from_bytes(data[at : at + 4], "big")

    mono = data[3] >> 6 == 3
    at = 4 + ((17 if mono else 32) if frame.first_version else (9 if mono else 17))
    delay = 0
    if data[36:40] == b"VBRI":
        frames, size = number(50), number(46)
    elif data[at : at + 4] in (b"Xing", b"Info") and (flags := number(at + 4)) & 1:
        frames, size = number(at + 8), number(at + 12) if flags & 2 else 0
        lame = at + 12 + (4 if flags & 2 else 0) + (100 if flags & 4 else 0) + (4 if flags & 8 else 0)
        both = 0
        if data[lame : lame + 4].strip(b"\0") and len(data) >= lame + 24:
            both = int.from_bytes(data[lame + 21 : lame + 24], "big")
        delay = (both >> 12) + max(both & 0xFFF, _DECODER_DELAY)
    else:
        return None
    if size > available + _LONGEST_FRAME or frames * _SMALLEST_FRAME > available:
        declared = max(size, frames * _SMALLEST_FRAME)
        raise Unreadable("truncated MP3", f"{available:,} of {declared:,} bytes of audio")
    samples = frames * frame.samples
    return samples - delay if samples > delay else samples or None


class _Reader:
    """Find frames, through a window that moves over the file."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._size = payload.size
        self._start = 0
        self._window = payload.read(0, _WINDOW_BYTES)

    def frame(self, position: int) -> _Frame | None:
        """Return the header at a position, or None without one."""
        at = self._at(position, 4)
        window = self._window
        if at + 4 > len(window) or window[at] != 0xFF:
            return None
        return _frame(window[at + 1], window[at + 2])

    def count(self, position: int, first: _Frame) -> int:
        """Return the number of whole frames from this one on. Raises Unreadable if others than frames lie between."""
        frames = 0
        found: int | None = position
        while found is not None:
            position, frame = found, self.frame(found)
            if frame is not None and frame.kind == first.kind:
                if position + frame.length > self._size:
                    break
                frames, found = frames + 1, position + frame.length
                continue
            if position + 4 > self._size or self._window.startswith(_END_TAGS, self._at(position, 16)):
                break
            found = self.next_frame(position, first.kind)
            if found is None and self._size - position > _LONGEST_GAP:
                raise Unreadable("a damaged MP3", f"no frame for {_LONGEST_GAP:,} bytes after byte {position:,}")
        return frames

    def next_frame(self, position: int, kind: int | None) -> int | None:
        """Return where the next frame begins that another follows or that ends the file; None if beyond 64 KiB."""
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

    def _at(self, position: int, size: int) -> int:
        """Return the index of a position in the window, which then holds `size` bytes from there, if the file does."""
        at = position - self._start
        if at < 0 or (at + size > len(self._window) and self._start + len(self._window) < self._size):
            self._start, at = position, 0
            self._window = self._payload.read(position, _WINDOW_BYTES)
        return at


@cache
def _frame(second: int, third: int) -> _Frame | None:
    """Return the header with these as its second and third byte; the first is 0xFF."""
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
    return _Frame(kind, first_version, rate, samples, length)
