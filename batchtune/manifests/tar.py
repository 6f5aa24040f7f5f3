"""The files in a tar archive, found by their headers: payloads are passed over, and nothing is extracted.

The headers of ordinary files are read here, after POSIX.1-2008 (pax, "ustar Interchange Format"): shards hold millions
of them. All others are left to Python's `tarfile`, with which WebDataset reads its shards; but a damaged header in the
middle, which ends an archive there in silence, is an error here.
"""

from __future__ import annotations

import contextlib
import functools
import io
import tarfile
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple
from zlib import adler32

from batchtune.errors import ManifestError
from batchtune.manifests.audio import Payload
from batchtune.manifests.source import Source
from batchtune.manifests.storage import RandomAccess, Window

BLOCK = 512

_LARGEST_EXTENSION = 1024 * 1024

_HINT = "Make or fetch the shard again."

_FILE = ord("0")
_PAX = frozenset(b"xX")
# Of the records of a PAX header only these say where a file is; most headers only hold a time, which Python writes so
# if it is not a whole number.
_RECORDS = (b"path=", b"size=", b"GNU.sparse.")


class File(NamedTuple):
    """A file in an archive.

    Attributes:
        name: With bytes that are not UTF-8 as four characters each.
        start: The byte of the (decompressed) archive at which its payload begins.
        size: In bytes.
        is_sparse: Whether its payload is only what stands between its holes.
    """

    name: str
    start: int
    size: int
    is_sparse: bool = False


@contextlib.contextmanager
def open_tar(source: Source) -> Iterator[Tar]:
    """Open an archive; a compressed one is first copied. What goes wrong while it is open becomes a ManifestError."""
    with source.plain_file() as stored:
        yield Tar(source, Window(stored))


def is_header(block: bytes) -> bool:
    """Return whether a block is a member's header, by its checksum: the sum of its bytes, its own as blanks."""
    if len(block) < BLOCK:
        return False
    # Computed ten times faster than the sum: Adler-32, whose lower half is 1 + sum, modulo 65,521.
    return adler32(block) & 0xFFFF == _expected(block[148:156])


@functools.lru_cache(maxsize=65536)
def _expected(field: bytes) -> int:
    """Return the lower half of a header's Adler-32 by its checksum; -1 if that is malformed."""
    try:
        return (
            1 + int(field.split(b"\0", 1)[0], 8) - 8 * ord(" ") + sum(field)
        ) % 65521
    except ValueError:
        return -1


class Tar:
    """An open archive.

    Attributes:
        left_out: Reason → number of members that `members` passed over although they may be meant as files.
    """

    def __init__(self, source: Source, archive: Window) -> None:
        self.left_out: Counter[str] = Counter()
        self._source = source
        self._archive = archive
        self._position = 0
        # Only to read single headers of the archive: it is opened empty.
        self._tarfile = tarfile.TarFile(
            fileobj=io.BytesIO(bytes(2 * BLOCK)),
            encoding="utf-8",
            errors="backslashreplace",
        )
        self._tarfile.fileobj = RandomAccess(Payload(archive.end, self._read_extension))

    def payload(self, file: File) -> Payload:
        """Return the bytes of the last file that `members` yielded."""
        archive = self._archive

        def read(start: int, count: int) -> bytes:
            if start + count > file.size:
                count = max(0, file.size - start)
            return archive.read(file.start + start, count)

        return Payload(file.size, read)

    def report(self) -> None:
        """Report how much is read."""
        self._source.report(min(1.0, self._position / max(1, self._archive.end)))

    def members(self) -> Iterator[File]:
        """Yield the files in their order, once; no folders, devices, pipes and links.

        Raises ManifestError where a header is damaged, or the archive breaks off.
        """
        archive = self._archive
        while True:
            position = self._position
            if position > archive.end:
                raise self._cut(position)
            block = archive.read(position, BLOCK)
            if not is_header(block):
                if block.strip(b"\0"):
                    if len(block) < BLOCK:
                        raise self._cut(position + BLOCK)
                    raise self._damaged(position, "no header")
                return  # what follows is ignored, as by tarfile: it may be a hole of terabytes
            try:
                size = int(block[124:135], 8)
            except ValueError:  # written in another way
                size = -1
            start = position + BLOCK
            self._position = start + size + BLOCK - 1 & -BLOCK
            file: File | None
            if block[156] in _PAX and not self._matters(start, size):
                continue
            if (
                block[156] == _FILE
                and size >= 0
                and block[135] in b"\0 "
                and not block[345]
            ):
                file = File(
                    block[:100].split(b"\0", 1)[0].decode("utf-8", "backslashreplace"),
                    start,
                    size,
                )
            else:
                file = self._special(position)
            if file is not None:
                if file.start + file.size > archive.end and not file.is_sparse:
                    raise self._cut(file.start + file.size)
                yield file

    def _matters(self, start: int, size: int) -> bool:
        """Return whether a PAX header says something of the next member's place."""
        records = self._read_extension(start, size)
        return len(records) != size or any(record in records for record in _RECORDS)

    def _read_extension(self, start: int, size: int) -> bytes:
        if size > _LARGEST_EXTENSION:
            raise self._damaged(self._position, f"an extended header of {size:,} bytes")
        return self._archive.read(start, size)

    def _special(self, position: int) -> File | None:
        """Return a file with extended headers, an old or a sparse one; None for another member, which is counted."""
        archive = self._tarfile
        assert archive.fileobj is not None
        archive.fileobj.seek(position)
        archive.offset = position
        try:
            member = tarfile.TarInfo.fromtarfile(archive)
        except (
            tarfile.HeaderError,
            ValueError,
            ArithmeticError,
            LookupError,
            RecursionError,
        ) as error:
            raise self._damaged(
                position, str(error) or "an extended header without its member"
            ) from None
        if archive.offset <= position or member.size < 0:
            raise self._damaged(position, f"a member of {member.size:,} bytes")
        self._position = archive.offset
        if member.isreg():
            return File(member.name, member.offset_data, member.size, member.issparse())
        if not member.isdir():
            self.left_out["a link, a device or a member of unknown type"] += 1
        return None

    def _damaged(self, position: int, seen: str) -> ManifestError:
        return ManifestError(
            f"{self._source.path} is damaged at byte {position:,}: {seen}", _HINT
        )

    def _cut(self, end: int) -> ManifestError:
        message = f"{self._source.path} breaks off in the middle: its last member goes on up to byte {end:,}"
        return ManifestError(message, _HINT)
