"""The bytes of a tar archive, in a file or a compressed stream: what headers, and what payloads, are read from."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import IO, BinaryIO, Protocol, cast

BLOCK = 512
UNKNOWN_END = sys.maxsize

# Read at once: the headers of a sample's members, the small ones, and the beginning of a large one.
_WINDOW = 6 * 1024
_STREAM_WINDOW = 64 * 1024
_PIECE = 1024 * 1024
_LARGEST_IN_MEMORY = 8 * 1024 * 1024


class Archive(ABC):
    """The bytes of an archive.

    Attributes:
        end: How many they are; `UNKNOWN_END` as long as that is not known.
    """

    end: int

    @property
    @abstractmethod
    def share(self) -> float:
        """How much of it is read, from 0 to 1; 0 if that is not known."""

    @abstractmethod
    def window(self, offset: int) -> bytes:
        """Some bytes from `offset` on, at least a block, fewer only at the end. May raise OSError."""

    @abstractmethod
    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on, fewer only at the end. What precedes `offset` may be gone then."""

    def read_member(self, start: int, end: int, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on of the member from `start` to `end`, before anything behind it is read."""
        return self.read(offset, size)


class Member:
    """A member of an archive, as a payload to read."""

    __slots__ = ("_archive", "_start", "size")

    def __init__(self, archive: Archive, start: int, size: int) -> None:
        self._archive = archive
        self._start = start
        self.size = size

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; fewer at the end."""
        size = max(0, min(size, self.size - offset))
        return self._archive.read_member(self._start, self._start + self.size, self._start + offset, size)


class Decompressed(Protocol):
    """A decompressed stream."""

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none only at the end."""

    def raw_position(self) -> int:
        """How much of the compressed file is read."""


@contextlib.contextmanager
def opened_archive(stream: BinaryIO, compressed_size: int | None) -> Iterator[Archive]:
    """Reads an archive from a file or, given the size of the compressed file (0 if unknown), a decompressed stream."""
    if compressed_size is None:
        yield _PlainArchive(stream)
        return
    with contextlib.closing(_StreamedArchive(cast(Decompressed, stream), compressed_size)) as archive:
        yield archive


class _PlainArchive(Archive):
    """An archive in a file: what is not wanted is not read.

    Args:
        file: Open for reading, with a descriptor.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self.end = os.fstat(self._descriptor).st_size
        self._window = b""
        self._start = 0

    @property
    def share(self) -> float:
        return self._start / max(1, self.end)

    def window(self, offset: int) -> bytes:
        self._window, self._start = os.pread(self._descriptor, _WINDOW, offset), offset
        return self._window if len(self._window) >= BLOCK else self._filled(BLOCK)

    def read(self, offset: int, size: int) -> bytes:
        start = offset - self._start
        if 0 <= start <= len(self._window) - size:
            return self._window[start : start + size]
        # Not through a memory map: a file that somebody cuts short meanwhile would end the process there.
        self._window, self._start = os.pread(self._descriptor, max(size, _WINDOW), offset), offset
        return self._filled(size)[:size]

    def _filled(self, size: int) -> bytes:
        """The window with at least `size` bytes in it, fewer only at the end: a network may hand out less at once."""
        while (missing := size - len(self._window)) > 0:
            more = os.pread(self._descriptor, missing, self._start + len(self._window))
            if not more:
                break
            self._window += more
        return self._window


class _StreamedArchive(Archive):
    """An archive that can only be read forward, such as a compressed one; to be closed.

    Args:
        stream: Of the decompressed bytes.
        size: Of the compressed file, in bytes; 0 where it is not known.
    """

    def __init__(self, stream: Decompressed, size: int = 0) -> None:
        self.end = UNKNOWN_END
        self._stream = stream
        self._compressed_size = size
        self._position = 0
        self._window = b""
        self._start = 0
        self._kept: IO[bytes] | None = None
        self._kept_from = -1

    @property
    def share(self) -> float:
        return min(1.0, self._stream.raw_position() / self._compressed_size) if self._compressed_size else 0.0

    def window(self, offset: int) -> bytes:
        self.read(offset, BLOCK)
        return self._window[offset - self._start :]

    def read(self, offset: int, size: int) -> bytes:
        if offset < self._start and self._kept is not None:
            self._kept.seek(offset - self._kept_from)
            return self._kept.read(size)
        if offset + size > self._start + len(self._window):
            self._move(offset, size)
        start = offset - self._start
        return self._window[start : start + size]

    def read_member(self, start: int, end: int, offset: int, size: int) -> bytes:
        if offset + size <= start + _STREAM_WINDOW:
            return self.read(start, min(end - start, _STREAM_WINDOW))[offset - start : offset - start + size]
        self._keep(start, end - start)  # more than its beginning is asked for
        return self.read(offset, size)

    def _keep(self, offset: int, size: int) -> None:
        """Keeps a payload until the next one is kept, so that all of it can be read; in memory where it is small."""
        if self._kept_from == offset:
            return
        if self._kept is None:
            self._kept = tempfile.SpooledTemporaryFile(_LARGEST_IN_MEMORY)
        self._kept.seek(0)
        self._kept.truncate()
        self._kept_from, end = offset, offset + size
        while offset < end and (data := self.read(offset, min(_PIECE, end - offset))):
            self._kept.write(data)
            offset += len(data)

    def close(self) -> None:
        """Removes what was kept."""
        if self._kept is not None:
            self._kept.close()

    def _move(self, offset: int, size: int) -> None:
        """Reads on, so that the window begins at `offset` and holds at least `size` bytes."""
        parts = [self._window[offset - self._start :]]
        wanted_end = offset + max(size, _STREAM_WINDOW)
        while self._position < wanted_end:
            piece_end = offset if self._position < offset else wanted_end
            data = self._stream.read(min(_PIECE, piece_end - self._position))
            if not data:
                self.end = self._position
                break
            if self._position >= offset:
                parts.append(data)
            self._position += len(data)
        self._window, self._start = b"".join(parts), offset
