"""What the headers are read from, the bytes of one file wherever they lie, and what comes of it."""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class HeaderError(Exception):
    """A file's length can't be told.

    Args:
        reason: In a few words, the same for all of a kind ("no WAV header"): by it they are counted.
        detail: What was seen, for the message; may be empty.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


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


class Payload(Protocol):
    """The bytes of one audio or array file, on disk or inside a tar."""

    @property
    def size(self) -> int:
        """How many they are."""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; fewer at the end. May raise OSError."""


class BytesPayload:
    """A file that is in memory already."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; fewer at the end."""
        return self._data[offset : offset + size]


class PartialPayload:
    """The bytes of another from some offset on, such as those after a tag.

    Args:
        payload: The other.
        start: Where its bytes begin; not beyond its end.
    """

    __slots__ = ("_payload", "_start")

    def __init__(self, payload: Payload, start: int) -> None:
        self._payload = payload
        self._start = start

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return self._payload.size - self._start

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; fewer at the end. May raise OSError."""
        return self._payload.read(self._start + offset, size)


class FilePayload:
    """A file on disk, open for reading; a context manager.

    Raises:
        HeaderError: It is no regular file: a pipe would never end.
        OSError: It can't be opened.
    """

    __slots__ = ("_descriptor", "_size")

    def __init__(self, path: Path | str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self._descriptor)
        self._size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise HeaderError("no regular file")

    @property
    def size(self) -> int:
        """How many bytes it had when it was opened."""
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; fewer at the end. May raise OSError."""
        return os.pread(self._descriptor, size, offset)

    def close(self) -> None:
        """Closes it; to be called once."""
        os.close(self._descriptor)

    def __enter__(self) -> FilePayload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PayloadStream(io.RawIOBase):
    """A payload as a binary file.

    It raises nothing, since a C library's callbacks can't: what goes wrong is kept for `check`, and from then on
    there is nothing more to read.

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
        """Raises HeaderError if anything went wrong."""
        if self._error is not None:
            raise self._error

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position; before the beginning is the beginning."""
        base = (0, self._position, self._payload.size)[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fills the buffer as far as there are bytes."""
        view = memoryview(buffer).cast("B")
        data = b"" if self._error else self._read(len(view))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            self._error = HeaderError("a damaged file", "headers that refer to each other without end")
            return b""
        try:
            return self._payload.read(self._position, size)
        except OSError as error:
            self._error = HeaderError("can't be read", error.strerror or str(error))
            return b""
