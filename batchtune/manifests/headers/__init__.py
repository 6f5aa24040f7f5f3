"""Lengths of audio and array files, from their headers alone: nothing is decoded, unpickled or evaluated.

Functions here raise Unreadable for a file whose length is unknown.
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

from batchtune.manifests.values import Unreadable

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_LARGEST_TEXT_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class AudioLength:
    """The length of an audio file: samples of each channel, and samples per second, above 0."""

    num_samples: int
    sample_rate: int

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
            text = self.read(0, self.size).decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
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
            yield Payload(status.st_size, lambda offset, size: os.pread(descriptor, size, offset))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Unreadable("can't be read", error.strerror or str(error)) from None


class PayloadStream(io.RawIOBase):
    """A payload as a binary file of which a C library, whose callbacks can't raise, reads at most `most_bytes`."""

    def __init__(self, payload: Payload, most_bytes: int) -> None:
        super().__init__()
        self._payload = payload
        self._position = 0
        self._left = most_bytes
        self._error: Exception | None = None

    def check(self) -> None:
        """Raise what went wrong while the library read, if anything did."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; before the beginning is the beginning."""
        self._position = max(0, (0, self._position, self._payload.size)[whence] + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer as far as there are bytes."""
        view = memoryview(buffer).cast("B")
        self._left -= len(view)
        try:
            self.check()
            if self._left < 0:
                raise Unreadable("a damaged file", "headers that refer to each other without end")
            data = self._payload.read(self._position, len(view))
        except Exception as error:
            self._error = error
            return 0
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
