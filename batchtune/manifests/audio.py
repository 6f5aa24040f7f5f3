"""Lengths of audio and array files, from their headers alone: nothing is decoded, unpickled or evaluated.

WAV is read here, after the Multimedia Programming Interface and Data Specifications 1.0 (RIFF, `fmt `, `fact`, `data`),
EBU Tech 3306 (RF64, `ds64`) and Microsoft's WAVEFORMATEXTENSIBLE; all other audio by mutagen. Functions
here raise Unreadable for a file whose length is unknown.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpy.lib import format as npy

from batchtune.errors import ManifestError
from batchtune.manifests.base import Unreadable
from batchtune.manifests.storage import RandomAccess

# In lower case, without the dot. `.raw` is not among them: such a file says nothing about itself.
AUDIO_SUFFIXES = frozenset(
    "wav wave bwf rf64 bw64 mp3 mp2 mp1 mpga flac ogg oga opus spx m4a aiff aif aifc".split()
)

_LARGEST_TEXT_BYTES = 1024 * 1024
_HEAD_BYTES = 256
# NumPy's own limit, with room for the magic number and the length before it.
_LARGEST_NPY_HEADER = 10_000 + 16


class AudioLength(NamedTuple):  # made in half of a frozen dataclass's time
    """The length of an audio file.

    Attributes:
        num_samples: Samples of each channel.
        sample_rate: Samples per second, above 0.
        is_estimate: Whether the length is derived from the file's size and its first bit rate.
    """

    num_samples: int
    sample_rate: int
    is_estimate: bool = False

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.num_samples / self.sample_rate


@dataclass(slots=True)
class Payload:
    """A file on disk or inside a tar: its size in bytes, and offset and size → the bytes there, fewer at the end."""

    size: int
    read: Callable[[int, int], bytes]

    def text(self) -> str:
        """Return it as text, without the end of its last line. Raises Unreadable."""
        if self.size > _LARGEST_TEXT_BYTES:
            raise Unreadable("longer than 1 MiB of text", f"{self.size:,} bytes")
        try:
            text = (
                self.read(0, self.size)
                .decode("utf-8-sig")
                .removesuffix("\n")
                .removesuffix("\r")
            )
        except UnicodeDecodeError as error:
            raise Unreadable("not text", f"byte {error.start} is not UTF-8") from None
        if "\0" in text:
            raise Unreadable("not text", "it holds NUL bytes")
        return text


@contextlib.contextmanager
def opened_payload(path: Path | str) -> Iterator[Payload]:
    """Open a file on disk. Raises Unreadable if it can't be read, or is not a regular file: a pipe would never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("not a regular file")
            yield Payload(
                status.st_size, lambda offset, size: os.pread(descriptor, size, offset)
            )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Unreadable("can't be read", error.strerror or str(error)) from None


def audio_length(payload: Payload) -> AudioLength:
    """Return the length of an audio file, by its header; the content decides which format it is: suffixes lie.

    Raises:
        Unreadable: Not audio, damaged, truncated, or a format that is not read.
        ManifestError: It is not a WAV file, and the package mutagen is missing.
    """
    head = payload.read(0, _HEAD_BYTES)
    if head.startswith((b"RIFF", b"RF64", b"BW64")):
        return _wav_length(payload, head)
    if not head:
        raise Unreadable("an empty file")
    return _mutagen_length(payload)


# WAV

_FMT = struct.Struct("<HHIIHH")
# A writer to a pipe leaves the size of the samples open: 0, all ones, or what SoX writes, rounded down to blocks.
_ALL_ONES = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
_SOX_UNKNOWN = 0x7FFFF000
_PER_SAMPLE = frozenset((0x0001, 0x0003, 0x0006, 0x0007))  # PCM, float, A-law, mu-law
_EXTENSIBLE = 0xFFFE
_MOST_CHUNKS = 500


def _wav_length(payload: Payload, head: bytes) -> AudioLength:
    """Return the length of a WAV file that begins so."""
    if len(head) < 12 or head[8:12] != b"WAVE":
        raise Unreadable("no WAV header")
    read = payload.read
    fmt = b""
    fact = 0
    long_size = None
    offset = 12
    for _ in range(_MOST_CHUNKS):
        header = read(offset, 8)
        if len(header) < 8:
            break
        name = header[:4]
        length = int.from_bytes(header[4:], "little")
        offset += 8
        if name == b"data":
            if len(fmt) < 16:
                raise Unreadable("WAV without a format chunk")
            if long_size is not None and length == _ALL_ONES[0]:
                length = long_size
            available = max(0, payload.size - offset)
            if _is_open(length, fmt, head, payload.size):
                length = available
            if length > available:
                raise Unreadable(
                    "truncated WAV", f"{available:,} of {length:,} bytes of audio"
                )
            return _wav_samples(fmt, fact, length)
        if name == b"fmt ":
            fmt = read(offset, min(length, 40))
        elif name == b"fact":
            fact = int.from_bytes(read(offset, min(length, 4)), "little")
        elif name == b"ds64" and len(sizes := read(offset, 16)) == 16:
            long_size = int.from_bytes(sizes[8:], "little")
        offset += length + (length & 1)
    raise Unreadable("WAV without a data chunk")


def _is_open(length: int, fmt: bytes, head: bytes, file_size: int) -> bool:
    """Return whether the writer left the size of the samples open: then they extend to the end of the file."""
    if length in _ALL_ONES:
        return True
    align = int.from_bytes(fmt[12:14], "little")
    looks_open = length == 0 or _SOX_UNKNOWN - align < length <= _SOX_UNKNOWN
    return looks_open and abs(int.from_bytes(head[4:8], "little") + 8 - file_size) > 1


def _wav_samples(fmt: bytes, fact: int, size: int) -> AudioLength:
    """Return the length by the chunk `fmt `, the number of samples in `fact` (or 0) and the bytes of samples."""
    codec, channels, rate, _, align, _ = _FMT.unpack_from(fmt)
    if codec == _EXTENSIBLE and len(fmt) >= 26:
        codec = int.from_bytes(fmt[24:26], "little")
    if rate == 0 or channels == 0 or align == 0:
        seen = (
            f"{channels} channels, {rate} samples per second, blocks of {align} bytes"
        )
        raise Unreadable("a damaged WAV header", seen)
    if codec in _PER_SAMPLE:
        return AudioLength(size // align, rate)
    # No codec in use packs more than 100 samples of one channel into a byte.
    if 0 < fact <= 100 * size:
        return AudioLength(fact, rate)
    raise Unreadable(
        "a WAV codec that is not read", f"codec 0x{codec:04x}, without a length"
    )


# Other audio


def _mutagen_length(payload: Payload) -> AudioLength:
    """Return the length of an audio file by mutagen.

    MP3 without a Xing or VBRI header is an estimate: such a file doesn't say how many frames it has.
    """
    try:
        import mutagen
        from mutagen.mp3 import MP3, BitrateMode
        from mutagen.oggopus import OggOpus
    except ImportError as error:
        message = f"audio files other than WAV are read by mutagen, which can't be imported ({error})"
        raise ManifestError(message, "Install it: pip install mutagen.") from None
    try:
        audio: Any = mutagen.File(RandomAccess(payload))
        if audio is None:
            raise Unreadable(
                "no audio header", f"a file that begins with {payload.read(0, 4)!r}"
            )
        info = audio.info
        sample_rate = 48_000  # to which Opus always decodes
        if not isinstance(audio, OggOpus):
            sample_rate = int(info.sample_rate)
        num_samples = round(info.length * sample_rate)
    except (mutagen.MutagenError, *_PARSER_ERRORS) as error:
        raise Unreadable(
            "damaged, or not audio", str(error).strip() or type(error).__name__
        ) from None
    is_mp3 = isinstance(audio, MP3)
    if is_mp3 and info.sketchy:
        raise Unreadable("no MP3 header")
    if num_samples <= 0 or sample_rate <= 0:
        raise Unreadable("an audio header without a length")
    return AudioLength(
        num_samples, sample_rate, is_mp3 and info.bitrate_mode == BitrateMode.UNKNOWN
    )


# What mutagen and NumPy may raise for bytes made to hurt them.
_PARSER_ERRORS = (
    *(
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        RecursionError,
    ),
    *(TypeError, ValueError, struct.error),
)


def array_shape(payload: Payload) -> tuple[int, ...]:
    """Return the shape of a .npy file, by NumPy; nothing is unpickled."""
    stream = io.BytesIO(payload.read(0, _LARGEST_NPY_HEADER))
    try:
        read_header = npy.read_array_header_2_0
        if npy.read_magic(stream) == (1, 0):
            read_header = npy.read_array_header_1_0
        shape, _, _ = read_header(stream)
    except (*_PARSER_ERRORS, SyntaxError, tokenize.TokenError) as error:
        raise Unreadable("no array header, or a damaged one", str(error)) from None
    return tuple(shape)
