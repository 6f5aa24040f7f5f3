"""The bytes under a manifest: a file opened, decompressed, and checked to be text whose lines can be named."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import shutil
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from batchtune.errors import ManifestError, did_you_mean, shortened
from batchtune.lengths import IntArray
from batchtune.machine import total_memory

HEAD_BYTES = 64 * 1024
BLOCK_BYTES = 1024 * 1024
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
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
_MAGIC = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip archive",
    b"RIFF": "an audio file (RIFF)",
    b"fLaC": "an audio file (FLAC)",
    b"OggS": "an audio file (Ogg)",
    b"ID3": "an audio file (MP3)",
}


@dataclass(frozen=True)
class Head:
    """The first bytes of a manifest, decompressed and without a byte order mark, by which its format is recognised."""

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

    @property
    def blank(self) -> bool:
        """Whether it holds only white space."""
        return not self.data.strip(_BLANK)

    @property
    def returns_alone(self) -> bool:
        """Whether lines end with carriage returns alone, as on the first Macintoshes."""
        return self.data.count(b"\r") > 1 and b"\n" not in self.data

    def describe(self) -> str:
        """Describe the bytes for the message that no format fits."""
        for magic, description in _MAGIC.items():
            if self.data.startswith(magic):
                return f"it is {description}"
        if b"\0" in self.data:
            return "it holds binary data (NUL bytes)"
        if self.data.lstrip().startswith(b"["):
            return "it begins with a JSON list"
        if self.returns_alone:
            return "its lines end with carriage returns alone (convert it: tr '\\r' '\\n' < FILE > NEW)"
        if not self.lines:
            return f"its first {len(self.data):,} bytes are blank"
        return f"its first line is {shortened(self.lines[0])}"


@dataclass(frozen=True)
class Block:
    """Some whole lines of a manifest, the first with that number: UTF-8 without NUL bytes."""

    first_line: int
    data: bytes

    @cached_property
    def newlines(self) -> IntArray:
        """The positions of the line ends, shape (newlines,); far faster than counting bytes in Python."""
        return np.flatnonzero(np.frombuffer(self.data, dtype=np.uint8) == ord("\n"))


class Source:
    """A file (plain or compressed), standard input, or files of a folder, from which a manifest is read.

    The first bytes tell how it is compressed (gzip, zstd, bzip2, xz), not its name. Text is checked to be UTF-8 without
    NUL bytes; a byte order mark is taken off. All reading raises ManifestError if the file is missing, a device or
    damaged. A pipe is first copied to a temporary file. Another process opens a source again, by its path.

    Attributes:
        path: The file, or the folder if there are names; for messages.
        names: Files relative to the folder, sorted: each an example or a part of one.
        is_named: Whether the user named the file, which may then be a pipe; not one that was found in a folder.
        report: Called now and then with the share that is read, from 0 to 1.
        reader: The reader of its format, once it is known.
    """

    def __init__(self, path: Path, names: Sequence[str] | None = None, *, is_named: bool = True) -> None:
        self.path = Path("standard input") if path == STDIN else path
        self.names = None if names is None else tuple(names)
        self.is_named = is_named
        self.report: Callable[[float], None] = lambda share: None
        self.reader: Any = None
        self._given = path

    def __reduce__(self) -> tuple[type[Source], tuple[Path, tuple[str, ...] | None]]:
        return Source, (self._given, self.names)

    @property
    def rereadable(self) -> bool:
        """Whether another process, or a later one, can read the same: not from a pipe."""
        return self.names is not None or self._given.is_file()

    @property
    def size(self) -> int:
        """Bytes to read, 1 if unknown; a rough guess for files of which only the headers are read."""
        if self.names is not None:
            return len(self.names) * 16_384
        try:
            return max(1, self._given.stat().st_size)
        except OSError:
            return 1

    def forget(self) -> None:
        """Free the reader and the first bytes."""
        self.reader = None
        vars(self).pop("head", None)

    @cached_property
    def head(self) -> Head:
        """The first 64 KiB, decompressed."""
        if self.names is not None:
            return Head(b"", complete=True, names=self.names)
        data = bytearray()
        # Gzip returns less than asked for at the end of each of its members.
        with self._raw() as raw, _decompressed(raw, self.compression) as stream:
            while len(data) <= HEAD_BYTES and (more := stream.read(HEAD_BYTES + 1 - len(data))):
                data += more
        if data.startswith(_UTF16):
            hint = "Convert it: iconv -f UTF-16 -t UTF-8."
            raise ManifestError(f"{self.path} is UTF-16 text; manifests are read as UTF-8", hint)
        return Head(bytes(data[:HEAD_BYTES]).removeprefix(_BOM), len(data) <= HEAD_BYTES)

    @cached_property
    def compression(self) -> str | None:
        """How the file is compressed, or None."""
        with self._raw() as raw:
            magic = raw.read(6)
        return next((name for first, name in _COMPRESSED.items() if magic.startswith(first)), None)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Stream]:
        """Open the bytes, decompressed, to be read forward."""
        with self._raw() as raw, _decompressed(raw, self.compression) as stream:
            yield Stream(stream, raw, self)

    @contextlib.contextmanager
    def seekable(self) -> Iterator[BinaryIO]:
        """Open the bytes as a file to seek in: a compressed one is first decompressed to a temporary file."""
        if self.compression is None:
            with self._raw() as raw:
                yield raw
            return
        with self.opened() as stream, _copied(cast(BinaryIO, stream)) as copy:
            yield cast(BinaryIO, copy)

    def content(self) -> bytes:
        """Read the whole content."""
        content = io.BytesIO()
        limit = total_memory() // 2
        for piece in self.pieces():
            if content.tell() + len(piece) > limit:
                seen = f"one JSON text of more than {limit / 2**30:.1f} GiB, half of this machine's memory"
                hint = "Write it as JSON Lines, an object on every line: these are read line by line."
                raise ManifestError(f"{self.path} is {seen}", hint)
            content.write(piece)
        return content.getvalue()  # not a copy

    def blocks(self) -> Iterator[Block]:
        """Read whole lines, about 1 MiB at a time; a line longer than any example is an error."""
        if self.head.returns_alone:
            hint = "Convert it: tr '\\r' '\\n' < FILE > NEW."
            raise ManifestError(f"{self.path} ends its lines with carriage returns alone", hint)
        # Once so much was freed, glibc keeps freed memory for the next blocks, which saves a quarter of the time.
        bytes(16 * 1024 * 1024)
        line = 1
        parts: list[bytes] = []
        for piece in self.pieces():
            end = piece.rfind(b"\n") + 1
            if end:
                block = Block(line, b"".join([*parts, piece[:end]]))
                yield block
                line += block.newlines.size
                parts = []
            parts.append(piece[end:])
            if sum(map(len, parts)) > _LARGEST_LINE_BYTES:
                hint = "Are the line ends missing? If the file is of another format, name that with --format."
                longest = f"{_LARGEST_LINE_BYTES // 2**20} MiB: no example is that long"
                raise ManifestError(f"{self.path}, line {line:,} is longer than {longest}", hint)
        rest = b"".join(parts)
        if rest:
            yield Block(line, rest)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Read number, from 1, and text of every line, without its end."""
        for block in self.blocks():
            lines = block.data.decode().split("\n")
            if not lines[-1]:
                lines.pop()
            for number, line in enumerate(lines, block.first_line):
                yield number, line.removesuffix("\r")

    def pieces(self) -> Iterator[bytes]:
        """Read text about 1 MiB at a time, cut anywhere but within a character; what precedes a fault comes first."""
        offset = 0
        rest = b""
        for piece in self._read_on():
            text = rest + piece
            if offset == 0 and text.startswith(_BOM):
                text = text.removeprefix(_BOM)
                offset = len(_BOM)
            valid, faulty = _checked(text)
            yield text[:valid]
            offset += valid
            rest = text[valid:]
            if faulty:
                break
        if rest:
            raise self._no_text(rest[0], offset)

    def _read_on(self) -> Iterator[bytes]:
        with self.opened() as stream:
            while data := stream.read(BLOCK_BYTES):
                yield data

    def _no_text(self, byte: int, offset: int) -> ManifestError:
        """Return the error for a byte of the text, whose line is counted only now."""
        line = 1
        left = offset
        for data in self._read_on():
            line += data.count(b"\n", 0, max(0, left))
            left -= len(data)
            if left <= 0:
                break
        place = f"{self.path}, line {line}"
        if byte == 0:
            hint = "The file is damaged or not text; write it again."
            return ManifestError(f"{place}: NUL byte at byte {offset:,} of the text", hint)
        hint = "Convert the file to UTF-8, from Latin-1 for example with: iconv -f ISO-8859-1 -t UTF-8."
        return ManifestError(f"{place}: byte {offset:,} of the text (0x{byte:02x}) is not UTF-8", hint)

    @cached_property
    def _copy(self) -> IO[bytes] | None:
        """A temporary file with what can be read only once; None for a file on disk."""
        if self._given.is_char_device() or self._given.is_block_device():
            raise ManifestError(f"{self.path} is a device, not a manifest", "Name a file.")
        if not self.is_named:
            self.check_ordinary()
        if self._given != STDIN and not self._given.is_fifo():
            return None
        with contextlib.nullcontext(sys.stdin.buffer) if self._given == STDIN else self._given.open("rb") as stream:
            copy = _copied(stream)
        weakref.finalize(self, copy.close)
        return copy

    def check_ordinary(self) -> None:
        """Raise ManifestError if it is a pipe, a socket or a device, which may never end."""
        if self.names is None and (self._given == STDIN or (self._given.exists() and not self._given.is_file())):
            raise ManifestError(f"{self.path} is not an ordinary file", "Remove it, or name the files to read.")

    @contextlib.contextmanager
    def _raw(self) -> Iterator[BinaryIO]:
        with explained(self.path), open(self._given if self._copy is None else self._copy.name, "rb") as raw:
            yield raw


class Stream:
    """A stream that reports progress and ends a bomb: a small compressed file that would become terabytes."""

    def __init__(self, stream: IO[bytes], raw: BinaryIO, source: Source) -> None:
        self._stream = stream
        self._raw = raw
        self._source = source
        self._size = max(1, os.fstat(raw.fileno()).st_size)
        self._expanded = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none only at the end."""
        data = self._stream.read(size)
        self._expanded += len(data)
        position = self._raw.tell()
        self._source.report(min(1.0, position / self._size))
        if self._expanded > max(_TRUSTED_BYTES, _LARGEST_EXPANSION * position):
            seen = f"expands more than {_LARGEST_EXPANSION}-fold, to over {self._expanded // 2**20:,} MiB"
            hint = "Decompress it yourself if you trust it."
            raise ManifestError(f"{self._source.path} {seen}: it is damaged, or made to do harm", hint)
        return data


def _decompressed(raw: BinaryIO, compression: str | None) -> contextlib.AbstractContextManager[IO[bytes]]:
    if compression is None:
        return contextlib.nullcontext(raw)
    if compression == "zstd":
        import pyarrow

        return cast(IO[bytes], pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"))
    if compression == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if compression == "bzip2":
        return bz2.BZ2File(raw)
    return lzma.LZMAFile(raw)


def missing(path: Path) -> ManifestError:
    """Return the error for a path that does not exist, with a similar name next to it if there is one."""
    hint = "Check the path." if path.is_absolute() else f"Check the path: it starts at {Path.cwd()}."
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        hint = did_you_mean(path.name, [entry.name for _, entry in zip(range(1000), entries, strict=False)]) + hint
    return ManifestError(f"{path} does not exist", hint)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is read or decompressed into a ManifestError."""
    try:
        yield
    except FileNotFoundError:
        raise missing(path) from None
    except PermissionError:
        raise ManifestError(f"{path} can't be read: permission denied", "Ask for the right to read it.") from None
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a file's, not a decompressor's
            raise ManifestError(f"{path} can't be read: {error.strerror or error}") from error
        fault = f"is damaged: it can't be decompressed ({error})"
        if isinstance(error, EOFError) or "runcated" in str(error):
            fault = "breaks off in the middle: its compressed data end too early"
        raise ManifestError(f"{path} {fault}", "Make or fetch the file again, then try again.") from None


def _checked(text: bytes) -> tuple[int, bool]:
    """Count the bytes before the first fault, or a last character that is cut off; return whether it is a fault."""
    end = text.find(b"\0")
    if end < 0:
        end = len(text)
    if not text.isascii():
        try:
            text[:end].decode()
        except UnicodeDecodeError as error:
            return error.start, error.reason != "unexpected end of data" or end < len(text)
    return end, end < len(text)


def _copied(stream: IO[bytes] | BinaryIO) -> IO[bytes]:
    """Copy the rest of a stream to a temporary file, which is removed when it is closed."""
    copy = tempfile.NamedTemporaryFile(prefix="batchtune-")
    shutil.copyfileobj(stream, copy, BLOCK_BYTES)
    copy.flush()
    copy.seek(0)
    return cast(IO[bytes], copy)
