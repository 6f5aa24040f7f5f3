"""A payload as a file to seek in, for libraries that want one."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from batchtune.manifests.headers.payload import HeaderError, Payload

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


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
