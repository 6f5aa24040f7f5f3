"""The file under a manifest: opened, decompressed, checked to be text, with line numbers kept."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

from batchtune.errors import ManifestError

HEAD_BYTES = 64 * 1024
BLOCK_BYTES = 1024 * 1024

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_MAGIC = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip archive",
    b"\xfd7zXZ\x00": "an xz file",
    b"BZh": "a bzip2 file",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
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
    """

    data: bytes
    complete: bool

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
        return not self.lines

    def describe(self) -> str:
        """What was seen, for the message that no format fits."""
        for magic, description in _MAGIC.items():
            if self.data.startswith(magic):
                return f"it is {description}"
        if b"\0" in self.data:
            return "it holds binary data (NUL bytes)"
        if self.data.lstrip().startswith(b"["):
            return "it begins with a JSON list"
        return f"its first line is {shortened(self.lines[0], 80)}"


@dataclass(frozen=True, slots=True)
class Block:
    """Some whole lines of a manifest.

    Attributes:
        first_line: Number of the first of them, from 1.
        data: UTF-8 without NUL bytes; lines end with a newline, the file's last one perhaps without.
    """

    first_line: int
    data: bytes


class Source:
    """A manifest's file, plain or compressed by gzip (told by its first bytes, not by its name).

    All that it hands out is checked to be UTF-8 without NUL bytes; a byte order mark is taken off.

    Args:
        path: The file. What is no regular file (a pipe) is read once and kept.

    Raises:
        ManifestError: Missing, a folder, or not to be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: bytes | None = None
        with _explained(path):
            if path.is_dir():
                raise ManifestError(f"{path} is a folder, not a manifest", "Name a file in it.")
            if path.is_char_device() or path.is_block_device():
                raise ManifestError(f"{path} is a device, not a manifest", "Name a file.")
            if not path.is_file():
                self._kept = path.read_bytes()

    @cached_property
    def head(self) -> Head:
        """The first 64 KiB, decompressed. Raises ManifestError where they can't be read."""
        with _explained(self.path), self._open() as stream:
            data = _read_up_to(stream, HEAD_BYTES + 1)
        if data.startswith(_UTF16):
            raise ManifestError(
                f"{self.path} is UTF-16 text; manifests are read as UTF-8",
                "Convert it: iconv -f UTF-16 -t UTF-8.",
            )
        return Head(data[:HEAD_BYTES].removeprefix(_BOM), len(data) <= HEAD_BYTES)

    def content(self) -> bytes:
        """The whole content. Raises ManifestError where it can't be read or is no UTF-8."""
        with _explained(self.path), self._open() as stream:
            data = stream.read()
        text = data.removeprefix(_BOM)
        self._check_text(text, 1, len(data) - len(text))
        return text

    def blocks(self) -> Iterator[Block]:
        """The content as blocks of whole lines, about 1 MiB each, so that a large file is never held whole.

        Raises:
            ManifestError: It can't be read, or is no UTF-8; the message says where.
        """
        line, offset = 1, 0
        for block in self._whole_lines():
            data = block.removeprefix(_BOM) if offset == 0 else block
            self._check_text(data, line, offset + len(block) - len(data))
            yield Block(line, data)
            line += block.count(b"\n")
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
        parts: list[bytes] = []
        with _explained(self.path), self._open() as stream:
            while data := stream.read(BLOCK_BYTES):
                end = data.rfind(b"\n") + 1
                if end:
                    yield b"".join([*parts, data[:end]])
                    parts = []
                parts.append(data[end:])
        if rest := b"".join(parts):
            yield rest

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        with self.path.open("rb") if self._kept is None else io.BytesIO(self._kept) as raw:
            magic = raw.read(2)
            raw.seek(0)
            if magic != _GZIP:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast(BinaryIO, stream)

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


def shortened(value: object, limit: int = 40) -> str:
    """A value as it can stand in a message: its repr, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 2]}…{text[-1]}"


def _read_up_to(stream: BinaryIO, size: int) -> bytes:
    # A gzip stream hands out less than asked for where one of its members ends.
    parts = []
    while size > 0 and (data := stream.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    anew = "Make or fetch the file anew, then try again."
    try:
        yield
    except FileNotFoundError:
        raise ManifestError(f"{path} does not exist", "Check the path of the manifest.") from None
    except EOFError:
        raise ManifestError(f"{path} breaks off in the middle: its gzip data are truncated", anew) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ManifestError(f"{path} is damaged: its gzip data can't be decompressed ({error})", anew) from None
    except PermissionError:
        raise ManifestError(f"{path} can't be read: permission denied", "Ask for the right to read it.") from None
    except OSError as error:
        raise ManifestError(f"{path} can't be read: {error.strerror or error}") from error
