"""What is under a manifest: a file opened, decompressed, checked to be text, with line numbers kept."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import IntArray
from batchtune.machine import total_memory
from batchtune.manifests.decompression import Guarded, compression_of, decompressed, explained

HEAD_BYTES = 64 * 1024
# Once a piece of that size was given back, glibc keeps freed memory up to there for the next block, rather than give
# every block back to the system and get it anew, page by page: that took a quarter of the time of reading.
_KEPT_BYTES = 16 * 1024 * 1024
# Some hundred thousand words: no example is longer, and each step of reading holds a line once more.
_LARGEST_LINE_BYTES = 64 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024

# The path that stands for standard input.
STDIN = Path("-")

_BLANK = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
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
    """The first bytes of a manifest, decompressed, by which its format is recognised.

    Attributes:
        data: The bytes, without a byte order mark.
        complete: Whether that is the whole file.
        names: Of the files, where a folder is read.
    """

    data: bytes
    complete: bool
    names: tuple[str, ...] = ()

    @cached_property
    def lines(self) -> list[str]:
        """The lines that are not blank, without their ends; a last line that is cut off only if alone."""
        lines = self.data.decode("utf-8", errors="replace").split("\n")
        if not self.complete and len(lines) > 1:
            lines.pop()
        return [line.rstrip("\r") for line in lines if line.strip()]

    @property
    def blank(self) -> bool:
        """Whether there is nothing but white space in it."""
        return not self.data.strip(_BLANK)

    @property
    def returns_alone(self) -> bool:
        """Whether lines end as they did on the first Macintoshes."""
        return self.data.count(b"\r") > 1 and b"\n" not in self.data

    def describe(self) -> str:
        """What was seen, for the message that no format fits."""
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
    """Some whole lines of a manifest.

    Attributes:
        first_line: Number of the first of them, from 1.
        data: UTF-8 without NUL bytes; lines end with a newline, the file's last one perhaps without.
    """

    first_line: int
    data: bytes

    @cached_property
    def newlines(self) -> IntArray:
        """Where its lines end, shape (number of newlines,). Faster by far than counting bytes in Python."""
        return np.flatnonzero(np.frombuffer(self.data, dtype=np.uint8) == ord("\n"))

    @property
    def lines(self) -> int:
        """How many there are."""
        return self.newlines.size + (not self.data.endswith(b"\n"))

    def all_begin_with(self, first: str) -> bool:
        """Whether every line begins with this character."""
        data = np.frombuffer(self.data, dtype=np.uint8)
        starts = self.newlines + 1
        return self.data.startswith(first.encode()) and bool((data[starts[starts < data.size]] == ord(first)).all())


class Source:
    """What a manifest is read from: a file, plain or compressed, standard input, or files of a folder.

    Compression (gzip, zstd, bzip2, xz) is told by the first bytes, not by the name. What `content`, `blocks` and
    `lines` hand out is checked to be UTF-8 without NUL bytes; a byte order mark is taken off.

    Args:
        path: The file, or `STDIN`; the folder where there are names. What can't be read twice (a pipe) is copied
            to a temporary file first.
        names: Relative to the folder, sorted: what is read are these files, each an example or a part of one.

    Attributes:
        path: For messages.
        on_progress: Called with the share that is read, from 0 to 1, whenever a good part more is.
        memo: What a format found out about it and will want to know again.

    Raises:
        ManifestError: Missing, a folder, or not to be read.
    """

    def __init__(self, path: Path, names: Sequence[str] | None = None) -> None:
        self.path = Path("standard input") if path == STDIN else path
        self.names = None if names is None else tuple(names)
        self.on_progress: Callable[[float], None] | None = None
        self.memo: dict[str, Any] = {}
        self._copy: IO[bytes] | None = None
        if names is not None:
            return
        with explained(self.path):
            if path == STDIN:
                self._copy = _copied(sys.stdin.buffer)
            elif path.is_dir():
                raise ManifestError(f"{path} is a folder, not a manifest", "Name a file in it.")
            elif path.is_char_device() or path.is_block_device():
                raise ManifestError(f"{path} is a device, not a manifest", "Name a file.")
            elif not path.is_file():
                with path.open("rb") as stream:
                    self._copy = _copied(stream)
        if self._copy is not None:
            weakref.finalize(self, self._copy.close)

    @property
    def copied(self) -> bool:
        """Whether this holds all that there is: what it was read from can't be read again."""
        return self._copy is not None

    @cached_property
    def head(self) -> Head:
        """The first 64 KiB, decompressed. Raises ManifestError if they can't be read."""
        if self.names is not None:
            return Head(b"", complete=True, names=self.names)
        with explained(self.path), self.opened() as stream:
            data = _read_up_to(stream, HEAD_BYTES + 1)
        if data.startswith(_UTF16):
            raise ManifestError(
                f"{self.path} is UTF-16 text; manifests are read as UTF-8",
                "Convert it: iconv -f UTF-16 -t UTF-8.",
            )
        return Head(data[:HEAD_BYTES].removeprefix(_BOM), len(data) <= HEAD_BYTES)

    @cached_property
    def compression(self) -> str | None:
        """How the file is compressed, or None."""
        with explained(self.path), self._raw() as raw:
            return compression_of(raw)

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The bytes, decompressed, to be read forward; what goes wrong there becomes a ManifestError."""
        with explained(self.path), self._raw() as raw:
            compression = compression_of(raw)
            if compression is None:
                yield raw
                return
            with decompressed(raw, compression) as stream:
                yield cast(BinaryIO, Guarded(stream, raw, self.path, self.report))

    @contextlib.contextmanager
    def seekable(self) -> Iterator[BinaryIO]:
        """The bytes, decompressed, as a file to seek in: to a temporary file first where they are compressed."""
        with self.opened() as stream:
            if self.compression is None:
                yield stream
                return
            with _copied(stream) as copy:
                yield cast(BinaryIO, copy)

    def report(self, share: float) -> None:
        """Tells who wants to know how much of it is read."""
        if self.on_progress is not None:
            self.on_progress(share)

    def content(self) -> bytes:
        """The whole content. Raises ManifestError if it can't be read or held, or is no UTF-8."""
        content, most = io.BytesIO(), total_memory() // 2
        for piece in self.pieces():
            if content.tell() + len(piece) > most:
                raise ManifestError(
                    f"{self.path} is one JSON text of more than {most / 2**30:.1f} GiB, half of this machine's memory",
                    "Write it as JSON Lines, an object on every line: these are read line by line.",
                )
            content.write(piece)
        return content.getvalue()  # not a copy

    def pieces(self) -> Iterator[bytes]:
        """The content in pieces of about 1 MiB, cut anywhere but within a character. Raises as `blocks` does."""
        line, offset, rest = 1, 0, b""
        for piece in self._read_on():
            data = rest + piece
            whole = _whole_characters(data)
            data, rest = data[:whole], data[whole:]
            text = data.removeprefix(_BOM) if offset == 0 else data
            self._check_text(text, line, offset + len(data) - len(text))
            yield text
            line += text.count(b"\n")
            offset += len(data)
        self._check_text(rest, line, offset)

    def blocks(self) -> Iterator[Block]:
        """The content as blocks of whole lines, about 1 MiB each, so that a large file is never held whole.

        Raises:
            ManifestError: It can't be read, is no UTF-8, or has a line longer than any example; it says where.
        """
        line, offset = 1, 0
        for block in self._whole_lines():
            data = block.removeprefix(_BOM) if offset == 0 else block
            self._check_text(data, line, offset + len(block) - len(data))
            found = Block(line, data)
            yield found
            line += found.newlines.size
            offset += len(block)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Number, from 1, and text of every line, without its end. Raises as `blocks` does."""
        for block in self.blocks():
            text = block.data.decode()
            lines = text.split("\n")
            if not lines[-1]:
                lines.pop()
            for number, line in enumerate(lines, block.first_line):
                yield number, line.removesuffix("\r")

    def _whole_lines(self) -> Iterator[bytes]:
        if self.head.returns_alone:
            raise ManifestError(
                f"{self.path} ends its lines with carriage returns alone",
                "Convert it: tr '\\r' '\\n' < FILE > NEW.",
            )
        parts: list[bytes] = []
        bytes(_KEPT_BYTES)
        line, offset, held = 1, 0, 0
        for data in self._read_on():
            end = data.rfind(b"\n") + 1
            if end:
                block = b"".join([*parts, data[:end]])
                yield block
                line, offset, parts, held = line + block.count(b"\n"), offset + len(block), [], 0
            parts.append(data[end:])
            held += len(data) - end
            if held > _LARGEST_LINE_BYTES:
                raise self._endless_line(line, offset, parts[0])
        if rest := b"".join(parts):
            yield rest

    def _read_on(self) -> Iterator[bytes]:
        """The bytes, decompressed, about 1 MiB at a time; tells how much is read."""
        with self.opened() as stream, self._raw() as raw:
            size = max(1, os.fstat(raw.fileno()).st_size)
            read = 0
            while data := stream.read(BLOCK_BYTES):
                if not isinstance(stream, Guarded):  # which tells it itself
                    read += len(data)
                    self.report(min(1.0, read / size))
                yield data

    def _endless_line(self, number: int, offset: int, begin: bytes) -> ManifestError:
        self._check_text(begin[: begin.rfind(b"\0") + 1], number, offset)  # holes in a file are NUL bytes
        return ManifestError(
            f"{self.path}, line {number:,} is longer than {_LARGEST_LINE_BYTES // 2**20} MiB: no example is that long",
            "Are the line ends missing? If the file is of another format, name that with --format.",
        )

    @contextlib.contextmanager
    def _raw(self) -> Iterator[BinaryIO]:
        if self._copy is None:
            with self.path.open("rb") as raw:
                yield raw
        else:
            with open(self._copy.name, "rb") as raw:  # anew: each reader has a position of its own
                yield raw

    def _check_text(self, data: bytes, first_line: int, first_byte: int) -> None:
        position = data.find(b"\0")
        if position >= 0:
            line = first_line + data.count(b"\n", 0, position)
            raise ManifestError(
                f"{self.path}, line {line}: NUL byte at byte {first_byte + position:,} of the text",
                "The file is damaged or no text; write it anew.",
            )
        if data.isascii():
            return
        try:
            data.decode()
        except UnicodeDecodeError as error:
            line = first_line + data.count(b"\n", 0, error.start)
            raise ManifestError(
                f"{self.path}, line {line}: byte {first_byte + error.start:,} of the text "
                f"(0x{data[error.start]:02x}) is no UTF-8",
                "Convert the file to UTF-8, from Latin-1 for example with: iconv -f ISO-8859-1 -t UTF-8.",
            ) from None


def _whole_characters(data: bytes) -> int:
    """How many of the bytes there are before a last UTF-8 character that is cut off."""
    for behind in range(1, min(4, len(data)) + 1):
        if data[-behind] >= 0xC0:
            needed = 2 + (data[-behind] >= 0xE0) + (data[-behind] >= 0xF0)
            return len(data) - behind if needed > behind else len(data)
        if data[-behind] < 0x80:
            break
    return len(data)


def _copied(stream: IO[bytes]) -> IO[bytes]:
    """A temporary file with the rest of a stream; it is removed when it is closed."""
    copy = tempfile.NamedTemporaryFile(prefix="batchtune-")
    shutil.copyfileobj(stream, copy, BLOCK_BYTES)
    copy.flush()
    copy.seek(0)
    return cast(IO[bytes], copy)


def _read_up_to(stream: BinaryIO, size: int) -> bytes:
    # A gzip stream hands out less than asked for where one of its members ends.
    parts = []
    while size > 0 and (data := stream.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
