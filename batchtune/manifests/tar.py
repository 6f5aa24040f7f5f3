"""The files in a tar archive, found by their headers: payloads are passed over, and nothing is extracted.

This reads ustar, GNU, PAX and older archives, after POSIX.1-2008 (pax, "ustar Interchange Format" and "pax Extended
Header") and the GNU tar manual ("Basic Tar Format", "Storing Sparse Files"), and in doubt as Python's `tarfile` does,
with which WebDataset reads its shards; but a damaged header in the middle, which ends an archive there in silence, is
an error here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO, TypeAlias
from zlib import adler32

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.headers import Payload
from batchtune.manifests.source import Source, Stream

BLOCK = 512
UNKNOWN_END = sys.maxsize

# Read at once: the headers of a sample's members, the small ones, and the beginning of a large one.
_WINDOW = 6 * 1024
_STREAM_WINDOW = 64 * 1024
_PIECE = 1024 * 1024
_LARGEST_IN_MEMORY = 8 * 1024 * 1024

_HINT = "Make or fetch the shard again."

# Types of members: those that say something of the next one (PAX, Solaris, GNU), files, those without a payload.
_EXTENSIONS = frozenset(b"xXgLK")
_FILES = frozenset(b"0\x007S")
_LINKS = frozenset(b"12")
_DEVICES_AND_FOLDERS = frozenset(b"3456")
_FILE = ord("0")
_OLD_FILE = ord("\0")
_SPARSE = ord("S")
_GLOBAL = ord("g")
_LONG_NAME = ord("L")
_LONG_LINK = ord("K")
_FOLDER = ord("5")

_BEHIND_A_NUMBER = frozenset(b"\0 ")
_RECORD = re.compile(rb"([1-9]\d{0,6}) ")


# A file: its name (bytes that are not UTF-8 as `\xff`); the byte of the (decompressed) archive at which its payload
# begins; its size in bytes; whether it is sparse, with a payload of only the parts between its holes.
_File: TypeAlias = tuple[str, int, int, bool]


class Archive:
    """The bytes of an archive in a file, up to `end` (`UNKNOWN_END` if not known yet), read as they are needed."""

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self.end = os.fstat(self._descriptor).st_size
        self._window = b""
        self.start = 0

    def window(self, offset: int, size: int = _WINDOW) -> bytes:
        """Return `size` bytes from `offset` on, fewer only at the end; those before need not be readable any more."""
        # Not through a memory map: a file that somebody cuts short meanwhile would end the process there.
        data = os.pread(self._descriptor, size, offset)
        while len(data) < min(size, self.end - offset):  # a network may hand out less at once
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        self._window = data
        self.start = offset
        return data

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, which is not before the last window; fewer only at the end."""
        index = offset - self.start
        if not 0 <= index <= len(self._window) - size:
            self.window(offset, max(size, _WINDOW))
            index = 0
        return self._window[index : index + size]


class _StreamedArchive(Archive):
    """An archive that can only be read forward, such as a compressed one: all from the last window on is held."""

    def __init__(self, stream: Stream, held: tempfile.SpooledTemporaryFile[bytes]) -> None:
        self.end = UNKNOWN_END
        self.start = 0
        self._stream = stream
        self._position = 0
        self._held = held

    def window(self, offset: int, size: int = _STREAM_WINDOW) -> bytes:
        self._held.seek(min(offset, self._position) - self.start)
        rest = self._held.read()
        while self._position < offset:
            data = self._stream.read(min(_PIECE, offset - self._position))
            if not data:
                break
            self._position += len(data)
        self._held.seek(0)
        self._held.truncate()
        self._held.write(rest)
        self.start = offset
        return self.read(offset, size)

    def read(self, offset: int, size: int) -> bytes:
        self._held.seek(0, os.SEEK_END)
        while self._position < offset + size:
            data = self._stream.read(min(_PIECE, offset + size - self._position))
            if not data:
                self.end = self._position
                break
            self._held.write(data)
            self._position += len(data)
        self._held.seek(offset - self.start)
        return self._held.read(size)


@contextlib.contextmanager
def open_tar(source: Source) -> Iterator[Tar]:
    """Open an archive, plain or compressed. What goes wrong while it is open becomes a ManifestError."""
    if source.compression is None:
        with source.seekable() as file:
            yield Tar(source, Archive(file))
    else:
        with source.opened() as stream, tempfile.SpooledTemporaryFile(_LARGEST_IN_MEMORY) as held:
            yield Tar(source, _StreamedArchive(stream, held))


def is_header(block: bytes) -> bool:
    """Return whether a block is a member's header, by its checksum: the sum of its bytes, its own as blanks."""
    if len(block) < BLOCK:
        return False
    # Computed ten times faster than the sum: Adler-32, whose lower half is 1 + sum, modulo 65,521.
    if adler32(block) & 0xFFFF == _expected(block[148:156]):
        return True
    with contextlib.suppress(ValueError):  # some old tars summed signed bytes
        signed = (byte - 256 if byte > 127 else byte for byte in block[:148] + block[156:])
        return _octal(block[148:156]) == 8 * ord(" ") + sum(signed)
    return False


@functools.lru_cache(maxsize=65536)
def _expected(field: bytes) -> int:
    """Return the lower half of a header's Adler-32 by its checksum; -1 if that is malformed."""
    try:
        return (1 + _octal(field) - 8 * ord(" ") + sum(field)) % 65521
    except ValueError:
        return -1


def _octal(field: bytes) -> int:
    return int(field.split(b"\0", 1)[0].strip() or b"0", 8)


class Tar:
    """An open archive."""

    def __init__(self, source: Source, archive: Archive) -> None:
        # Reason → number of members that `members` passed over although they may be meant as files.
        self.left_out: Counter[str] = Counter()
        self._archive = archive
        self._source = source
        self._path = source.path
        self._end: int | None = None
        self._extended = False
        self._extensions: dict[bytes, bytes] = {}
        self._globals: dict[bytes, bytes] = {}

    def payload(self, offset: int, size: int) -> Payload:
        """Return the bytes of the last member that `members` yielded."""
        archive = self._archive

        def read(start: int, count: int) -> bytes:
            if start + count > size:
                count = max(0, size - start)
            return archive.read(offset + start, count)

        return Payload(size, read)

    def report(self) -> None:
        """Report how much of a plain archive is read; a compressed one does so itself."""
        if self._archive.end != UNKNOWN_END:
            self._source.report(self._archive.start / max(1, self._archive.end))

    def members(self) -> Iterator[_File]:
        """Yield the files in their order, once; no folders, devices, pipes and links. `check_end` reads on from there.

        Raises ManifestError where a header is damaged, or the archive breaks off.
        """
        window = b""
        window_start = 0
        position = 0
        name = ""
        start = 0
        size = 0
        while True:
            index = position - window_start
            block = window[index : index + BLOCK]
            if len(block) < BLOCK:
                window = self._archive.window(position)
                window_start = position
                block = window[:BLOCK]
            if not is_header(block):
                if position > self._archive.end:
                    raise self._cut(name, start, size)
                self._end_at(block, position)
                return
            kind = block[156]
            start = position + BLOCK
            try:
                size = int(block[124:135], 8)
            except ValueError:
                size = -1
            if size < 0 or block[135] not in _BEHIND_A_NUMBER:
                size = self._size(block[124:136], position)
            if kind in _EXTENSIONS:
                self._extend(kind, start, size)
                position = start + (size + BLOCK - 1 & -BLOCK)
                continue
            name = block[:100].split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
            sparse = False
            self._extended = False
            if kind != _FILE or block[345] or self._extensions or self._globals:
                name, start, size, sparse = self._special(block, name, start, size)
            if start + size > self._archive.end:
                raise self._cut(name, start, size)
            if kind == _FILE or self._is_file(kind, name):
                yield name, start, size, sparse
            position = start + (size + BLOCK - 1 & -BLOCK)

    def check_end(self) -> None:
        """Read on for 1 MiB behind the end, which also checks a compressed file: tar fills up a whole record.

        Raises ManifestError if something else than zeros follows there, such as a second archive. Not all of it is
        read, as it may be a hole of terabytes.
        """
        if self._end is None:
            return
        piece = self._archive.window(self._end, _PIECE)
        rest = piece.lstrip(b"\0")
        if rest:
            offset = self._end + len(piece) - len(rest)
            hint = "Readers stop at the end and would ignore the rest. Join archives with tar --concatenate."
            raise ManifestError(f"{self._path} goes on behind the end of its archive, at byte {offset:,}", hint)
        self.report()

    def _end_at(self, block: bytes, position: int) -> None:
        """End the archive at this block, which is not a header. Raises ManifestError if it is damaged there."""
        if len(block) < BLOCK and (block or self._extended):
            raise self._broken(position + len(block))
        if block.strip(b"\0"):
            raise self._damaged(position, "no header of a member" if position else "no tar header")
        if self._extended:
            raise self._damaged(position, "an extended header without its member")
        self._end = position + BLOCK if block else None

    def _is_file(self, kind: int, name: str) -> bool:
        """Return whether a member of another type is a file too; count those that seem to be meant as one."""
        if kind in _FILES:
            return kind != _OLD_FILE or not name.endswith("/")
        if kind in _LINKS:
            self.left_out["a link"] += 1
        elif kind not in _DEVICES_AND_FOLDERS:
            self.left_out["a member of unknown type"] += 1
        elif kind != _FOLDER:
            self.left_out["a device or pipe"] += 1
        return False

    def _size(self, field: bytes, position: int) -> int:
        """Read a number: octal text, or where that is too short the bytes of the number itself."""
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        with contextlib.suppress(ValueError):
            size = _octal(field)
            if size >= 0:
                return size
        raise self._damaged(position, f"a member of size {shortened(field)}")

    def _extend(self, kind: int, start: int, size: int) -> None:
        """Read an extended header of the next member (or of all that follow). Of two such headers the first wins."""
        if size > 1024 * 1024:
            raise self._damaged(start - BLOCK, f"an extended header of {size:,} bytes")
        data = self._archive.read(start, size)
        if len(data) < size:
            raise self._broken(start + len(data))
        # Most only hold a time, which Python writes so if it is not a whole number.
        matters = b"path=" in data or b"size=" in data or b"GNU.sparse." in data
        if kind == _GLOBAL:
            if matters:
                self._globals.update(self._records(data, start))
            return
        self._extended = True
        if kind == _LONG_NAME:
            self._extensions.setdefault(b"path", data.split(b"\0", 1)[0])
        elif matters and kind != _LONG_LINK:
            self._extensions = {**self._records(data, start), **self._extensions}

    def _records(self, data: bytes, start: int) -> dict[bytes, bytes]:
        r"""Return the records of a PAX header that matter here; each is `length keyword=value\n`."""
        records: dict[bytes, bytes] = {}
        position = 0
        while position < len(data) and data[position]:
            match = _RECORD.match(data, position)
            if match is None:
                raise self._damaged(start + position, "no record of an extended header")
            end = position + int(match[1])
            if end <= match.end() or data[end - 1 : end] != b"\n":
                raise self._damaged(start + position, "no record of an extended header")
            keyword, _, value = data[match.end() : end - 1].partition(b"=")
            if keyword in (b"path", b"size") or keyword.startswith(b"GNU.sparse."):
                records[keyword] = value.rstrip(b"/") if keyword == b"path" else value
            position = end
        return records

    def _special(self, block: bytes, name: str, start: int, size: int) -> _File:
        """Complete a file by the extended headers, which this uses up, and by a header's lesser fields."""
        if block[345] and not block.startswith(b"ustar  ", 257):  # the part of a name that is too long for its field
            prefix = block[345:500].split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
            name = f"{prefix}/{name}"
        extensions = self._extensions
        self._extensions = {}
        records = {**self._globals, **extensions}
        path = records.get(b"GNU.sparse.name") or records.get(b"path")
        if path is not None:
            name = path.decode("utf-8", "backslashreplace")
        digits = records.get(b"size")
        if digits:
            if not digits.isdigit() or len(digits) > 20:
                raise self._damaged(start - BLOCK, f"a member of size {shortened(digits)}")
            size = int(digits)
        kind = block[156]
        if kind in _LINKS or kind in _DEVICES_AND_FOLDERS:
            size = 0
        is_sparse = any(keyword.startswith(b"GNU.sparse.") for keyword in extensions)
        if kind == _SPARSE:
            is_sparse = True
            if block[482]:
                start = self._end_of_sparse_map(start)
        return name, start, size, is_sparse

    def _end_of_sparse_map(self, start: int) -> int:
        """Return the end of an old sparse member's map, which goes on in blocks behind the header."""
        while True:
            block = self._archive.read(start, BLOCK)
            if len(block) < BLOCK:
                raise self._broken(start + len(block))
            start += BLOCK
            if not block[504]:
                return start

    def _damaged(self, position: int, seen: str) -> ManifestError:
        return ManifestError(f"{self._path} is damaged at byte {position:,}: {seen}", _HINT)

    def _broken(self, end: int) -> ManifestError:
        return ManifestError(f"{self._path} breaks off at byte {end:,}, in the middle of a header", _HINT)

    def _cut(self, name: str, offset: int, size: int) -> ManifestError:
        seen = f"{shortened(name)} has {size:,} bytes from byte {offset:,} on"
        if self._archive.end != UNKNOWN_END:
            seen += f", and the archive ends at {self._archive.end:,}"
        return ManifestError(f"{self._path} breaks off in the middle: {seen}", _HINT)
