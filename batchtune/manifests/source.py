"""The bytes under a manifest: a file opened, decompressed, and checked to be text whose lines can be named."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import shutil
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, cast

import numpy as np

from batchtune.errors import ManifestError
from batchtune.manifests.storage import (
    Listed,
    LocalFile,
    RemoteFile,
    Stored,
    Traffic,
)
from batchtune.processes.pool import total_memory

HEAD_BYTES = 1024 * 1024
BLOCK_BYTES = 1024 * 1024
# If there is a NUL among so many bytes, it is no text, of which more must be seen.
_BINARY_BYTES = 2048
# Of an object that was not listed; only the progress depends on it.
_GUESSED_BYTES = 256 * 1024 * 1024
# Some hundred thousand words: no example is longer, and each step of reading holds a line once more.
_LARGEST_LINE_BYTES = 64 * 1024 * 1024
# A compressed file that expands further than both is a bomb.
_TRUSTED_BYTES = 256 * 1024 * 1024
_LARGEST_EXPANSION = 500

# The path that stands for standard input.
STDIN = Path("-")

_BLANK = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}


@dataclass(frozen=True)
class Head:
    """The first bytes of a manifest, decompressed and without a byte order mark, to recognise its format."""

    data: bytes
    complete: bool  # whether these are all
    names: tuple[str, ...] = ()  # of the files of a folder

    @cached_property
    def lines(self) -> list[str]:
        """The lines that are not blank, without their ends; a last line that is cut off only if alone."""
        lines = self.data.decode("utf-8", errors="replace").split("\n")
        if not self.complete and len(lines) > 1:
            lines.pop()
        return [line.rstrip("\r") for line in lines if line.strip()]


class LineBlock(NamedTuple):
    """Some whole lines of a manifest, the first with that number: UTF-8; and how many of them end."""

    first_line: int
    data: bytes
    num_ends: int


class Source:
    """A file (plain or compressed), standard input, a URL, or files of a folder, from which a manifest is read.

    The first bytes tell how it is compressed (gzip, zstd, bzip2, xz), not its name. Text is checked to be UTF-8; a byte
    order mark is taken off. All reading raises ManifestError if the file is missing, a device or
    damaged. A pipe is first copied to a temporary file. Another process opens a source again, by its path.

    Attributes:
        path: The file, or the folder if there are names; a text if it is a URL.
        names: Files relative to the folder, sorted: each an example.
        is_named: Whether the user named the file, which may then be a pipe; not one that was found in a folder.
        listed: What a listing said of a URL; None without one.
        traffic: What was read over the network.
        report: Called now and then with the share that is read, from 0 to 1.
    """

    def __init__(
        self,
        path: Path | str,
        names: Sequence[str] | None = None,
        listed: Listed | None = None,
        *,
        is_named: bool = True,
    ) -> None:
        self.path = path
        if path == STDIN:
            self.path = Path("standard input")
        self.names = None if names is None else tuple(names)
        self.listed = listed
        self.traffic = Traffic()
        self.is_named = is_named
        self.report: Callable[[float], None] = lambda share: None
        self._address = path
        self._given = Path(path)

    def __reduce__(self) -> tuple[object, ...]:
        return Source, (self._address, self.names, self.listed)

    @property
    def is_remote(self) -> bool:
        """Whether it is a URL."""
        return isinstance(self.path, str)

    @property
    def name(self) -> str:
        """The file's name, without the folders."""
        return self._given.name

    @property
    def label(self) -> str:
        """The file, or the folder, for messages."""
        if self.names is not None and len(self.names) == 1:
            return self.address_of(self.names[0])
        return str(self.path)

    def address_of(self, name: str) -> str:
        """Return the path, or URL, of one of the files of a folder."""
        if self.is_remote:
            return f"{self.path}/{name}"
        return str(self._given / name)

    def beside(self, name: str) -> Source | None:
        """Return another file in the same folder; None without one, or if this is no file on disk."""
        path = self._given.with_name(name)
        if self.is_remote or not self._given.is_file() or not path.is_file():
            return None
        return Source(path, is_named=False)

    @property
    def rereadable(self) -> bool:
        """Whether another process, or a later one, can read the same: not from a pipe."""
        return self.is_remote or self.names is not None or self._given.is_file()

    @property
    def version(self) -> object:
        """What changes whenever its bytes do; None for a pipe, and for the files of a folder."""
        if self.names is not None:
            return None
        if self.is_remote:
            return self._remote.version
        if not self._given.is_file():
            return None
        status = self._given.stat()
        return status.st_size, status.st_mtime_ns

    @cached_property
    def _remote(self) -> RemoteFile:
        """The object behind the URL."""
        return RemoteFile(str(self.path), self.traffic, self.listed)

    def check_unchanged(self) -> None:
        """Raise ManifestError if an object was replaced while it was read."""
        if self.is_remote and self.names is None:
            self._remote.check_unchanged()

    @property
    def size(self) -> int:
        """Bytes to read, 1 if unknown; a rough guess for files whose headers alone are read."""
        if self.names is not None:
            return len(self.names) * 16_384
        if self.is_remote:
            return self.listed.size if self.listed is not None else _GUESSED_BYTES
        try:
            return max(1, self._given.stat().st_size)
        except OSError:
            return 1

    @cached_property
    def head(self) -> Head:
        """The first MiB, decompressed."""
        if self.names is not None:
            return Head(b"", complete=True, names=self.names)
        data = bytearray()
        wanted = _BINARY_BYTES
        # Gzip returns less than asked for at the end of each of its members.
        with self.opened() as stream:
            while len(data) < wanted and (more := stream.read(wanted - len(data))):
                data += more
                # A binary file is recognised by its beginning.
                if len(data) == _BINARY_BYTES and b"\0" not in data:
                    wanted = HEAD_BYTES + 1
        if data.startswith(_UTF16):
            raise ManifestError(
                f"{self.path} is UTF-16 text; manifests are read as UTF-8",
                "Convert it: iconv -f UTF-16 -t UTF-8.",
            )
        return Head(bytes(data[:HEAD_BYTES]).removeprefix(_BOM), len(data) < wanted)

    @property
    def blank(self) -> bool:
        """Whether it is a file that holds only white space."""
        return (
            self.names is None
            and self.head.complete
            and not self.head.data.strip(_BLANK)
        )

    @cached_property
    def compression(self) -> str | None:
        """How the file is compressed, or None."""
        with self.stored() as stored:
            magic = stored.read(0, 6)
        return next(
            (name for first, name in _COMPRESSED.items() if magic.startswith(first)),
            None,
        )

    @contextlib.contextmanager
    def stored(self) -> Iterator[Stored]:
        """Open the bytes as they are stored."""
        with explained(self.path):
            if self.is_remote:
                yield self._remote
                return
            name = self._given if self._copy is None else self._copy.name
            with open(name, "rb") as file:
                yield LocalFile(file)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Stream]:
        """Open the bytes, decompressed, to be read forward."""
        compression = self.compression
        with self.stored() as stored:
            raw = stored.stream()
            with _decompressed(raw, compression) as stream:
                yield Stream(stream, raw, stored.size, self)

    @contextlib.contextmanager
    def plain_file(self) -> Iterator[Stored]:
        """Open the bytes, decompressed: in a temporary file if the source is compressed."""
        if self.compression is None:
            with self.stored() as stored:
                yield stored
        else:
            with self.opened() as stream, _copied(cast(BinaryIO, stream)) as copy:
                yield LocalFile(cast(BinaryIO, copy))

    def content(self) -> bytes:
        """Read the whole content."""
        limit = total_memory() // 2
        size = self.size
        pieces = []
        with self.opened() as stream:
            while size <= limit and (
                piece := stream.read(max(BLOCK_BYTES, self.size + 1))
            ):
                pieces.append(piece)
                size = sum(map(len, pieces))
        if size > limit:
            raise ManifestError(
                f"{self.path} is one JSON text of more than {limit / 2**30:.1f} GiB, half of this machine's memory",
                "Write it as JSON Lines, an object on every line: these are read line by line.",
            )
        content = b"".join(pieces).removeprefix(_BOM)  # not a copy of a single piece
        self._check_text(content, 1, 0)
        return content

    def blocks(self) -> Iterator[LineBlock]:
        """Read whole lines, about 1 MiB at a time; a line longer than any example is an error."""
        # Once so much was freed, glibc keeps freed memory for the next blocks, which saves a quarter of the time.
        bytes(16 * 1024 * 1024)
        line = 1
        offset = 0
        rest = b""
        with self.opened() as stream:
            while piece := stream.read(max(BLOCK_BYTES, len(rest))):
                data = rest + piece
                if offset == 0:
                    data = data.removeprefix(_BOM)
                end = data.rfind(b"\n") + 1
                rest = data[end:]
                if end:
                    block = self._block(data[:end], line, offset)
                    yield block
                    line += block.num_ends
                    offset += end
                if len(rest) > _LARGEST_LINE_BYTES:
                    raise ManifestError(
                        f"{self.path}, line {line:,} is longer than {_LARGEST_LINE_BYTES // 2**20} MiB: no example is "
                        "that long",
                        "Are the line ends missing?",
                    )
        if rest:
            yield self._block(rest, line, offset)

    def _block(self, data: bytes, line: int, offset: int) -> LineBlock:
        self._check_text(data, line, offset)
        # Far faster than `data.count`.
        return LineBlock(
            line,
            data,
            int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n"))),
        )

    def lines(self) -> Iterator[tuple[int, str]]:
        """Read number, from 1, and text of every line, without its end."""
        for block in self.blocks():
            lines = block.data.decode().split("\n")
            if not lines[-1]:
                lines.pop()
            for number, line in enumerate(lines, block.first_line):
                yield number, line.removesuffix("\r")

    def _check_text(self, data: bytes, line: int, offset: int) -> None:
        """Raise ManifestError if a part of the text, from this line and byte on, is not UTF-8."""
        if data.isascii():
            return
        try:
            data.decode()
        except UnicodeDecodeError as error:
            line += data.count(b"\n", 0, error.start)
            raise ManifestError(
                f"{self.path}, line {line}: byte {offset + error.start:,} of the text (0x{data[error.start]:02x}) is "
                "not UTF-8",
                "Convert the file to UTF-8, from Latin-1 for example with: iconv -f ISO-8859-1 -t UTF-8.",
            ) from None

    @cached_property
    def _copy(self) -> IO[bytes] | None:
        """A temporary file with what can be read only once; None for a file on disk."""
        if self.is_remote:
            return None
        if self._given.is_char_device() or self._given.is_block_device():
            raise ManifestError(
                f"{self.path} is a device, not a manifest", "Name a file."
            )
        if not self.is_named:
            self.check_ordinary()
        if self._given != STDIN and not self._given.is_fifo():
            return None
        with (
            contextlib.nullcontext(sys.stdin.buffer)
            if self._given == STDIN
            else self._given.open("rb") as stream
        ):
            copy = _copied(stream)
        weakref.finalize(self, copy.close)
        return copy

    def check_ordinary(self) -> None:
        """Raise ManifestError if it is a pipe, a socket or a device, which may never end."""
        if self.is_remote or self.names is not None:
            return
        if self._given == STDIN or (self._given.exists() and not self._given.is_file()):
            raise ManifestError(
                f"{self.path} is not an ordinary file",
                "Remove it, or name the files to read.",
            )


class Stream:
    """A stream that reports progress and stops decompression bombs: small files that would become terabytes."""

    def __init__(
        self, stream: IO[bytes], raw: BinaryIO, size: int, source: Source
    ) -> None:
        self._stream = stream
        self._raw = raw
        self._source = source
        self._size = max(1, size)
        self._expanded = 0

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, none only at the end."""
        data = self._stream.read(size)
        self._expanded += len(data)
        position = self._raw.tell()
        self._source.report(min(1.0, position / self._size))
        if self._expanded > max(_TRUSTED_BYTES, _LARGEST_EXPANSION * position):
            raise ManifestError(
                f"{self._source.path} expands more than {_LARGEST_EXPANSION}-fold, to over "
                f"{self._expanded // 2**20:,} MiB: it is damaged, or made to do harm",
                "Decompress it yourself if you trust it.",
            )
        return data


def _decompressed(
    raw: BinaryIO, compression: str | None
) -> contextlib.AbstractContextManager[IO[bytes]]:
    if compression is None:
        return contextlib.nullcontext(raw)
    if compression == "zstd":
        import pyarrow

        return cast(
            IO[bytes],
            pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"),
        )
    if compression == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if compression == "bzip2":
        return bz2.BZ2File(raw)
    return lzma.LZMAFile(raw)


@contextlib.contextmanager
def explained(path: Path | str) -> Iterator[None]:
    """Turn what goes wrong while a file is read or decompressed into a ManifestError."""
    try:
        yield
    except FileNotFoundError:
        raise ManifestError(
            f"{path} does not exist",
            f"Check the path; relative ones start at {Path.cwd()}.",
        ) from None
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        # A file's, not a decompressor's.
        if isinstance(error, OSError) and error.errno is not None:
            reason = (error.strerror or str(error)).lower()
            raise ManifestError(
                f"{path} can't be read: {reason}", "Check the file and its rights."
            ) from error
        raise ManifestError(
            f"{path} is damaged or breaks off: it can't be decompressed ({error})",
            "Make or fetch the file again, then try again.",
        ) from None


def _copied(stream: IO[bytes] | BinaryIO) -> IO[bytes]:
    """Copy the rest of a stream to a temporary file, which is removed when it is closed."""
    copy = tempfile.NamedTemporaryFile(prefix="batchtune-")
    shutil.copyfileobj(stream, copy, BLOCK_BYTES)
    copy.seek(0)
    return cast(IO[bytes], copy)
