"""The bytes of a tar archive, in a file or a compressed stream: what headers, and what payloads, are read from."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import IO, BinaryIO, Protocol

from batchtune.manifests.headers import Payload

BLOCK = 512
UNKNOWN_END = sys.maxsize

# Read at once: the headers of a sample's members, the small ones, and the beginning of a large one.
_WINDOW = 6 * 1024
_STREAM_WINDOW = 64 * 1024
_PIECE = 1024 * 1024
_LARGEST_IN_MEMORY = 8 * 1024 * 1024


class Archive(Protocol):
    """The bytes of an archive."""

    @property
    def end(self) -> int:
        """How many they are; `UNKNOWN_END` as long as that is not known."""

    @property
    def share(self) -> float:
        """How much of it is read, from 0 to 1."""

    def window(self, offset: int) -> bytes:
        """Some bytes from `offset` on, at least a block, fewer only at the end."""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on, fewer only at the end. What is before `offset` may be gone then."""

    def payload(self, offset: int, size: int) -> Payload:
        """What to read a member's payload from, before anything behind it is read."""


class Decompressed(Protocol):
    """What is used of a decompressed stream."""

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none only at the end."""

    def raw_position(self) -> int:
        """How much of the compressed file is read."""


class PlainArchive:
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
        """How much of it is read, from 0 to 1."""
        return self._start / max(1, self.end)

    def window(self, offset: int) -> bytes:
        """Some bytes from `offset` on, at least a block, fewer only at the end. May raise OSError."""
        self._window, self._start = os.pread(self._descriptor, _WINDOW, offset), offset
        return self._window if len(self._window) >= BLOCK else self._filled(BLOCK)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on, fewer only at the end. May raise OSError."""
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

    def payload(self, offset: int, size: int) -> Payload:
        """What to read a member's payload from."""
        return _Part(self, offset, size)


class _Part:
    """A member of an archive in a file."""

    __slots__ = ("_archive", "_offset", "size")

    def __init__(self, archive: PlainArchive, offset: int, size: int) -> None:
        self._archive = archive
        self._offset = offset
        self.size = size

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; fewer at the end."""
        if offset + size > self.size:
            size = max(0, self.size - offset)
        return self._archive.read(self._offset + offset, size)


class StreamedArchive:
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
        """How much of it is read, from 0 to 1; 0 where that is not known."""
        return min(1.0, self._stream.raw_position() / self._compressed_size) if self._compressed_size else 0.0

    def window(self, offset: int) -> bytes:
        """Some bytes from `offset` on, at least a block, fewer only at the end."""
        self.read(offset, BLOCK)
        return self._window[offset - self._start :]

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on, fewer only at the end; not before the last `offset`, but for what is kept."""
        if offset < self._start and self._kept is not None:
            self._kept.seek(offset - self._kept_from)
            return self._kept.read(size)
        if offset + size > self._start + len(self._window):
            self._move(offset, size)
        start = offset - self._start
        return self._window[start : start + size]

    def payload(self, offset: int, size: int) -> Payload:
        """What to read a member's payload from."""
        return _StreamedPart(self, offset, size)

    def keep(self, offset: int, size: int) -> None:
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


class _StreamedPart:
    """A member of an archive that is read forward: kept if more than its beginning is asked for."""

    __slots__ = ("_archive", "_offset", "size")

    def __init__(self, archive: StreamedArchive, offset: int, size: int) -> None:
        self._archive = archive
        self._offset = offset
        self.size = size

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; fewer at the end."""
        size = max(0, min(size, self.size - offset))
        if offset + size <= _STREAM_WINDOW:
            return self._archive.read(self._offset, min(self.size, _STREAM_WINDOW))[offset : offset + size]
        self._archive.keep(self._offset, self.size)
        return self._archive.read(self._offset + offset, size)
