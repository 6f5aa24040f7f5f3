"""What the headers are read from, the bytes of one file wherever they lie, and what comes of it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol


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
