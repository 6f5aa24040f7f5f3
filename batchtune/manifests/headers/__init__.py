"""Lengths of audio and array files, from their headers alone: nothing is decoded, unpickled or evaluated.

Here is what the headers are read from, the bytes of one file wherever they lie, and what comes of it.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class HeaderError(Exception):
    """A file's length can't be told.

    Args:
        reason: In a few words, the same for all of a kind ("no WAV header"): by it they are counted.
        detail: What was seen, for the message; may be empty.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class AudioLength:
    """How long an audio file is.

    Attributes:
        num_samples: For each channel.
        sample_rate: In Hz; positive.
    """

    num_samples: int
    sample_rate: int

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.num_samples / self.sample_rate


@dataclass(slots=True)
class Payload:
    """The bytes of one audio or array file, on disk or inside a tar.

    Attributes:
        size: How many they are.
        read: Offset and size → the bytes there, fewer at the end. May raise OSError.
    """

    size: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, data: bytes) -> Payload:
        """Return a file that is in memory already."""
        return cls(len(data), lambda offset, size: data[offset : offset + size])


@contextlib.contextmanager
def opened_payload(path: Path | str) -> Iterator[Payload]:
    """Open a file on disk.

    Raises:
        HeaderError: It is not a regular file: a pipe would never end.
        OSError: It can't be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise HeaderError("not a regular file")
        yield Payload(status.st_size, lambda offset, size: os.pread(descriptor, size, offset))
    finally:
        os.close(descriptor)


class PayloadStream(io.RawIOBase):
    """A payload as a binary file.

    It raises nothing, since a C library's callbacks can't: a fault is kept for `check`, and from then on there is
    nothing more to read.

    Args:
        payload: The bytes.
        most_bytes: How many may be read in all, so that no file can keep its reader busy without end.
    """

    def __init__(self, payload: Payload, most_bytes: int) -> None:
        super().__init__()
        self._payload = payload
        self._position = 0
        self._left = most_bytes
        self._error: HeaderError | None = None

    def check(self) -> None:
        """Raise HeaderError if anything went wrong."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; before the beginning is the beginning."""
        base = (0, self._position, self._payload.size)[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer as far as there are bytes."""
        view = memoryview(buffer).cast("B")
        self._left -= len(view)
        if self._left < 0 and self._error is None:
            self._error = HeaderError("a damaged file", "headers that refer to each other without end")
        if self._error is not None:
            return 0
        try:
            data = self._payload.read(self._position, len(view))
        except OSError as error:
            self._error = HeaderError("can't be read", error.strerror or str(error))
            return 0
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
