"""Compressed files: told by their first bytes, decompressed as they are read, and stopped if they are bombs."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from batchtune.errors import ManifestError

_PIECE_BYTES = 1024 * 1024
_TRUSTED_BYTES = 256 * 1024 * 1024
_LARGEST_EXPANSION = 500


class Guarded:
    """A decompressed stream that ends a bomb: a small file that would become terabytes.

    Args:
        stream: The decompressed bytes.
        raw: The file.
        path: For messages.
        report: Called with the share of the file that is read, from 0 to 1.
    """

    def __init__(self, stream: IO[bytes], raw: BinaryIO, path: Path, report: Callable[[float], None]) -> None:
        self._stream = stream
        self._raw = raw
        self._path = path
        self._report = report
        self._size = max(1, os.fstat(raw.fileno()).st_size)
        self._expanded = 0

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes, all of them for -1."""
        if size < 0:
            return b"".join(iter(lambda: self.read(_PIECE_BYTES), b""))
        data = self._stream.read(size)
        self._expanded += len(data)
        self._report(min(1.0, self.raw_position() / self._size))
        if self._expanded > _TRUSTED_BYTES and self._expanded > _LARGEST_EXPANSION * self.raw_position():
            raise ManifestError(
                f"{self._path} expands more than {_LARGEST_EXPANSION}-fold, to over "
                f"{self._expanded // 2**20:,} MiB: it is damaged, or made to do harm",
                "Decompress it yourself if you trust it.",
            )
        return data

    def raw_position(self) -> int:
        """How much of the compressed file is read."""
        return self._raw.tell()


def _zstd(raw: BinaryIO) -> IO[bytes]:
    import pyarrow

    return cast(IO[bytes], pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"))


_DECOMPRESSORS: dict[str, Callable[[Any], IO[bytes]]] = {
    "gzip": lambda raw: cast(IO[bytes], gzip.GzipFile(fileobj=raw)),
    "zstd": _zstd,
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
}
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}


def compression_of(raw: BinaryIO) -> str | None:
    """How a file is compressed, by its first bytes, or None."""
    magic = raw.read(6)
    raw.seek(0)
    return next((name for first, name in _COMPRESSED.items() if magic.startswith(first)), None)


def decompressed(raw: BinaryIO, compression: str) -> IO[bytes]:
    """The decompressed bytes of a file, as `compression_of` names its compression."""
    return _DECOMPRESSORS[compression](raw)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns what goes wrong while a file is read or decompressed into a ManifestError."""
    anew = "Make or fetch the file anew, then try again."
    try:
        yield
    except FileNotFoundError:
        raise ManifestError(f"{path} does not exist", "Check the path.") from None
    except EOFError:
        raise ManifestError(f"{path} breaks off in the middle: its compressed data are truncated", anew) from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise ManifestError(f"{path} is damaged: it can't be decompressed ({error})", anew) from None
    except PermissionError:
        raise ManifestError(f"{path} can't be read: permission denied", "Ask for the right to read it.") from None
    except OSError as error:
        if error.errno is None:  # no file's, but a decompressor's
            cut = "breaks off in the middle" if "runcated" in str(error) else "is damaged"
            raise ManifestError(f"{path} {cut}: it can't be decompressed ({error})", anew) from None
        raise ManifestError(f"{path} can't be read: {error.strerror or error}") from error
