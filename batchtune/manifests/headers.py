"""Lengths from headers alone, of audio, arrays and tar archives: nothing is decoded, unpickled, evaluated or extracted.

WAV is read here, after the Multimedia Programming Interface and Data Specifications 1.0 (RIFF, `fmt `, `fact`, `data`),
EBU Tech 3306 (RF64, `ds64`) and Microsoft's WAVEFORMATEXTENSIBLE; all other audio by mutagen. Functions
here raise Unreadable for a file whose length is unknown.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import stat
import struct
import tarfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import adler32

from numpy.lib import format as npy

from batchtune.errors import ManifestError
from batchtune.manifests.formats import Unreadable
from batchtune.manifests.source import Source
from batchtune.manifests.storage import RandomAccess, Window

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
        raise Unreadable(
            "a damaged WAV header",
            f"{channels} channels, {rate} samples per second, blocks of {align} bytes",
        )
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
        raise ManifestError(
            f"audio files other than WAV are read by mutagen, which can't be imported ({error})",
            "Install it: pip install mutagen.",
        ) from None
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


# The files in a tar archive, found by their headers: payloads are passed over, and nothing is extracted.
#
# The headers of ordinary files are read here, after POSIX.1-2008 (pax, "ustar Interchange Format"): shards hold
# millions of them. All others are left to Python's `tarfile`, with which WebDataset reads its shards; but a damaged
# header in the middle, which ends an archive there in silence, is an error here.

BLOCK = 512

_LARGEST_EXTENSION = 1024 * 1024

_HINT = "Make or fetch the shard again."

_FILE = ord("0")
_PAX = frozenset(b"xX")
# Of the records of a PAX header only these say where a file is; most headers only hold a time, which Python writes so
# if it is not a whole number.
_RECORDS = (b"path=", b"size=", b"GNU.sparse.")


class File(NamedTuple):
    """A file in an archive.

    Attributes:
        name: With bytes that are not UTF-8 as four characters each.
        start: The byte of the (decompressed) archive at which its payload begins.
        size: In bytes.
        is_sparse: Whether its payload is only what stands between its holes.
    """

    name: str
    start: int
    size: int
    is_sparse: bool = False


@contextlib.contextmanager
def open_tar(source: Source) -> Iterator[Tar]:
    """Open an archive; a compressed one is first copied. What goes wrong while it is open becomes a ManifestError."""
    with source.plain_file() as stored:
        yield Tar(source, Window(stored))


def is_header(block: bytes) -> bool:
    """Return whether a block is a member's header, by its checksum: the sum of its bytes, its own as blanks."""
    if len(block) < BLOCK:
        return False
    # Computed ten times faster than the sum: Adler-32, whose lower half is 1 + sum, modulo 65,521.
    return adler32(block) & 0xFFFF == _expected(block[148:156])


@functools.lru_cache(maxsize=65536)
def _expected(field: bytes) -> int:
    """Return the lower half of a header's Adler-32 by its checksum; -1 if that is malformed."""
    try:
        return (
            1 + int(field.split(b"\0", 1)[0], 8) - 8 * ord(" ") + sum(field)
        ) % 65521
    except ValueError:
        return -1


class Tar:
    """An open archive.

    Attributes:
        left_out: Reason → number of members that `members` passed over although they may be meant as files.
    """

    def __init__(self, source: Source, archive: Window) -> None:
        self.left_out: Counter[str] = Counter()
        self._source = source
        self._archive = archive
        self._position = 0
        # Only to read single headers of the archive: it is opened empty.
        self._tarfile = tarfile.TarFile(
            fileobj=io.BytesIO(bytes(2 * BLOCK)),
            encoding="utf-8",
            errors="backslashreplace",
        )
        self._tarfile.fileobj = RandomAccess(Payload(archive.end, self._read_extension))

    def payload(self, file: File) -> Payload:
        """Return the bytes of the last file that `members` yielded."""
        archive = self._archive

        def read(start: int, count: int) -> bytes:
            if start + count > file.size:
                count = max(0, file.size - start)
            return archive.read(file.start + start, count)

        return Payload(file.size, read)

    def report(self) -> None:
        """Report how much is read."""
        self._source.report(min(1.0, self._position / max(1, self._archive.end)))

    def members(self) -> Iterator[File]:
        """Yield the files in their order, once; no folders, devices, pipes and links.

        Raises ManifestError where a header is damaged, or the archive breaks off.
        """
        archive = self._archive
        while True:
            position = self._position
            if position > archive.end:
                raise self._cut(position)
            block = archive.read(position, BLOCK)
            if not is_header(block):
                if block.strip(b"\0"):
                    if len(block) < BLOCK:
                        raise self._cut(position + BLOCK)
                    raise self._damaged(position, "no header")
                return  # what follows is ignored, as by tarfile: it may be a hole of terabytes
            try:
                size = int(block[124:135], 8)
            except ValueError:  # written in another way
                size = -1
            start = position + BLOCK
            self._position = start + size + BLOCK - 1 & -BLOCK
            file: File | None
            if block[156] in _PAX and not self._matters(start, size):
                continue
            if (
                block[156] == _FILE
                and size >= 0
                and block[135] in b"\0 "
                and not block[345]
            ):
                file = File(
                    block[:100].split(b"\0", 1)[0].decode("utf-8", "backslashreplace"),
                    start,
                    size,
                )
            else:
                file = self._special(position)
            if file is not None:
                if file.start + file.size > archive.end and not file.is_sparse:
                    raise self._cut(file.start + file.size)
                yield file

    def _matters(self, start: int, size: int) -> bool:
        """Return whether a PAX header says something of the next member's place."""
        records = self._read_extension(start, size)
        return len(records) != size or any(record in records for record in _RECORDS)

    def _read_extension(self, start: int, size: int) -> bytes:
        if size > _LARGEST_EXTENSION:
            raise self._damaged(self._position, f"an extended header of {size:,} bytes")
        return self._archive.read(start, size)

    def _special(self, position: int) -> File | None:
        """Return a file with extended headers, an old or a sparse one; None for another member, which is counted."""
        archive = self._tarfile
        assert archive.fileobj is not None
        archive.fileobj.seek(position)
        archive.offset = position
        try:
            member = tarfile.TarInfo.fromtarfile(archive)
        except (
            tarfile.HeaderError,
            ValueError,
            ArithmeticError,
            LookupError,
            RecursionError,
        ) as error:
            raise self._damaged(
                position, str(error) or "an extended header without its member"
            ) from None
        if archive.offset <= position or member.size < 0:
            raise self._damaged(position, f"a member of {member.size:,} bytes")
        self._position = archive.offset
        if member.isreg():
            return File(member.name, member.offset_data, member.size, member.issparse())
        if not member.isdir():
            self.left_out["a link, a device or a member of unknown type"] += 1
        return None

    def _damaged(self, position: int, seen: str) -> ManifestError:
        return ManifestError(
            f"{self._source.path} is damaged at byte {position:,}: {seen}", _HINT
        )

    def _cut(self, end: int) -> ManifestError:
        return ManifestError(
            f"{self._source.path} breaks off in the middle: its last member goes on up to byte {end:,}",
            _HINT,
        )
