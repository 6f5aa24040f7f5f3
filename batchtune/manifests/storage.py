"""Where bytes are stored: in a file of this machine, or in an object behind a URL, read by ranges through fsspec.

A URL is one that fsspec knows: `s3://bucket/shard.tar`, `gs://…`, `https://…`. Credentials are the business of the
library that reads it (s3fs, gcsfs, aiohttp): from the environment, its own files, or the machine's role.
"""

from __future__ import annotations

import functools
import inspect
import io
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast

from batchtune.errors import ManifestError, linked_errors, shortened
from batchtune.units import format_size

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.ASCII)

# Read at once: the headers of a sample's members, the small ones, and the beginning of a large one.
_WINDOW = 6 * 1024
# A byte that is fetched costs more: two headers, and the beginning of an audio file.
_REMOTE_WINDOW = 2 * 1024
_MOST_TOGETHER = 8 * 1024
# An object that is no larger is read whole.
_SMALL_BYTES = 128 * 1024
# Of one reader, among some dozen that share a fast network.
_BYTES_PER_SECOND = 2e6
_LARGEST_GAP = 256 * 1024
_KNOWN_AFTER = 8
_LARGEST_AHEAD = 8 * 1024 * 1024
_ATTEMPTS = 3

# What tells one version of an object from another, the best first, as the libraries name it.
_VERSIONS = ("ETag", "etag", "generation", "Last-Modified", "LastModified", "mtime")
# What to install to read these URLs.
_PACKAGES = {
    "s3": "fsspec s3fs",
    "gs": "fsspec gcsfs",
    "http": "fsspec aiohttp",
    "https": "fsspec aiohttp",
}
_CREDENTIALS = (
    "Credentials are read by the library itself, such as s3fs or gcsfs: from its environment variables (AWS_PROFILE, "
    "GOOGLE_APPLICATION_CREDENTIALS, …), its own files, or the role of the machine."
)


def is_url(name: object) -> bool:
    """Return whether a source's name is a URL."""
    return isinstance(name, str) and _URL.match(name) is not None


@dataclass(slots=True)
class Traffic:
    """What was read over the network so far: the number of requests, and the bytes that they brought."""

    requests: int = 0
    size: int = 0

    def since(self, before: Traffic) -> Traffic:
        """Return what was read later."""
        return Traffic(self.requests - before.requests, self.size - before.size)

    @classmethod
    def total(cls, parts: Iterable[Traffic]) -> Traffic:
        """Return the sum."""
        total = cls()
        for part in parts:
            total.requests += part.requests
            total.size += part.size
        return total


class Latency:
    """The least time that a request took in this process: the others waited for connections or each other."""

    def __init__(self) -> None:
        self._count = 0
        self._least_seconds = math.inf

    def add(self, seconds: float) -> None:
        """Note the time of a request that brought little."""
        self._count += 1
        self._least_seconds = min(self._least_seconds, seconds)

    @property
    def seconds(self) -> float:
        """The latency; 0 as long as it is not known, as the first requests open connections."""
        if self._count < _KNOWN_AFTER:
            return 0.0
        return self._least_seconds


class Listed(NamedTuple):
    """What a listing says about an object: its size in bytes, and its version."""

    size: int
    version: str


class Stored(ABC):
    """The bytes of a source, as they are stored.

    Attributes:
        size: In bytes.
        window: How many bytes are worth reading at once where few are needed.
        path: The file, for readers that map it into memory; None for an object.
    """

    size: int
    window: int = _WINDOW
    path: str | None = None

    @property
    def gap(self) -> int:
        """The most unneeded bytes that are faster to read than to skip by a new request."""
        return 0

    @abstractmethod
    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, fewer only at the end."""

    @abstractmethod
    def stream(self) -> BinaryIO:
        """Return the bytes as a stream from the first on; an object is read further and further ahead."""

    @abstractmethod
    def random_access(self) -> BinaryIO:
        """Return the bytes as a file; of an object only what is asked for is read."""


class LocalFile(Stored):
    """A file of this machine, which is open."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self.path = file.name

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, fewer only at the end."""
        # Not through a memory map: a file that somebody cuts short meanwhile would end the process there.
        data = os.pread(self._file.fileno(), size, offset)
        # A network may hand out less at once.
        while len(data) < min(size, self.size - offset):
            more = os.pread(self._file.fileno(), size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def stream(self) -> BinaryIO:
        """Return the file."""
        return self._file

    random_access = stream


class RemoteFile(Stored):
    """An object behind a URL.

    Raises ManifestError, on opening and reading, if it can't be read, or is not what it was when it was opened.
    """

    window = _REMOTE_WINDOW

    def __init__(self, url: str, traffic: Traffic, listed: Listed | None) -> None:
        self.url = url
        self._traffic = traffic
        self._first = b""
        # What was fetched last, and where it begins: a Parquet file's footer is needed several times.
        self._latest = (0, b"")
        self._requests = 0
        self._files, self._name = filesystem_of(url)
        self._latency = _latency_of(url.partition("://")[0])
        if listed is None:
            listed = self._looked_up()
        self.size = listed.size
        self.version = listed.version

    @property
    def gap(self) -> int:
        """The most unneeded bytes that are faster to read than to skip by a new request: latency × bandwidth."""
        return min(int(self._latency.seconds * _BYTES_PER_SECOND), _LARGEST_GAP)

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, fewer only at the end."""
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        if offset < self.window and not self._first:
            first = self.window
            if self.size <= _SMALL_BYTES:
                first = self.size
            beginning = self._fetched(0, min(self.size, max(first, end)))
            self._first = self._first or beginning
        if end <= len(self._first):
            return self._first[offset:end]
        start, data = self._latest
        if start <= offset and end <= start + len(data):
            return data[offset - start : end - start]
        data = self._fetched(offset, end)
        if len(data) <= _SMALL_BYTES:
            self._latest = (offset, data)
        return data

    def stream(self) -> BinaryIO:
        """Return the bytes as a stream that reads further and further ahead."""
        return cast(BinaryIO, _ReadingAhead(self))

    def random_access(self) -> BinaryIO:
        """Return the bytes as a file that reads only what is asked for."""
        return cast(BinaryIO, RandomAccess(self))

    def check_unchanged(self) -> None:
        """Raise ManifestError if the object was replaced since it was opened; what one request brought is whole."""
        if self._requests > 1 and self._looked_up().version != self.version:
            raise ManifestError(
                f"{self.url} changed while it was read",
                "Run the same command again once nobody writes to it.",
            )

    def _looked_up(self) -> Listed:
        info = self._asked(lambda: self._files.info(self._name))
        if info.get("type") == "directory":
            raise ManifestError(
                f"{self.url} is a folder", "Name its files, or end its name with a /."
            )
        listed = listed_of(info)
        if listed is None:
            raise ManifestError(
                f"{self.url} can't be read by ranges: the server does not say how large it is",
                "Download it, and name the file.",
            )
        return listed

    def _fetched(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end` by one request."""
        began = time.monotonic()
        data: bytes = self._asked(
            lambda: self._files.cat_file(self._name, start=start, end=end)
        )
        seconds = time.monotonic() - began
        self._requests += 1
        self._traffic.size += len(data)
        if end - start <= _MOST_TOGETHER:
            self._latency.add(seconds)
        if len(data) == self.size != end - start:
            # The server ignores ranges: the whole is here, and need not be fetched again.
            self._first = data
            return data[start:end]
        if len(data) != end - start:
            raise ManifestError(
                f"{self.url} changed while it was read: {len(data):,} bytes came instead of {end - start:,}",
                "Run the same command again once nobody writes to it.",
            )
        return data

    def _asked(self, request: Any) -> Any:
        """Return the answer to a request, repeated if the connection breaks. Raises ManifestError."""
        attempt = 1
        while True:
            self._traffic.requests += 1
            try:
                return request()
            except Exception as error:
                if attempt == _ATTEMPTS or not _is_transient(error):
                    raise unreadable(self.url, error) from error
            attempt += 1


class RandomAccess(io.RawIOBase):
    """Stored bytes, or a payload, as a file: no read is larger than the rest."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position, and return it."""
        position = (0, self._position, self._stored.size)[whence] + offset
        if position < 0:
            raise OSError("a position before the beginning")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes, all without a size."""
        left = max(0, self._stored.size - self._position)
        if size is None or not 0 <= size < left:
            size = left
        data: bytes = self._taken(size)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, and return how many they are."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _taken(self, size: int) -> Any:
        return self._stored.read(self._position, size)


class _ReadingAhead(RandomAccess):
    """An object as a stream: twice as much is fetched ahead each time, up to 8 MiB."""

    def __init__(self, stored: Stored) -> None:
        super().__init__(stored)
        self._ahead = 0
        self._held = b""
        self._start = 0

    def _taken(self, size: int) -> bytes:
        index = self._position - self._start
        data = b""
        if index >= 0:
            data = self._held[index : index + size]
        if len(data) < size:
            wanted = max(size - len(data), self._ahead)
            self._ahead = min(2 * wanted, _LARGEST_AHEAD)
            self._start = self._position + len(data)
            self._held = self._stored.read(self._start, wanted)
            data += self._held[: size - len(data)]
        return data


class Window:
    """Stored bytes read here and there, mostly forward; small gaps are read through.

    Attributes:
        end: The number of bytes.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.end = stored.size
        self._data = b""
        self._start = 0
        # What was needed since the last gap: from where, up to where.
        self._first = 0
        self._last = 0
        # How much was needed between two gaps, the last time.
        self._together = 0

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, fewer only at the end."""
        index = offset - self._start
        if not 0 <= index <= len(self._data) - size:
            index = self._refilled(offset, size)
        self._last = offset + size
        return self._data[index : index + size]

    def _refilled(self, offset: int, size: int) -> int:
        """Read on as far as is worth it; return where the offset is in what was read."""
        index = offset - self._start
        size = max(0, min(size, self.end - offset))
        if 0 <= index <= len(self._data) - size:  # at the end
            return index
        wanted = max(size, self._stored.window)
        if self._data and 0 <= index - len(self._data) <= self._stored.gap:
            # What comes next is likely to lie as near.
            wanted = max(wanted, self._stored.gap)
        elif index > len(self._data):
            # And what is needed after a gap, to be as much.
            self._together = min(self._last - self._first, _MOST_TOGETHER)
            self._first = offset
        self._data = self._stored.read(offset, max(wanted, self._together))
        self._start = offset
        return 0


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the object's name in it. Raises ManifestError."""
    protocol = url.partition("://")[0]
    try:
        files = _filesystem(protocol, os.getpid())
        return files, files._strip_protocol(url)
    except ImportError as error:
        problem = f"a package is missing ({error})"
        hint = (
            "Install the package that is named there, or give a local copy of the file."
        )
        if protocol in _PACKAGES or error.name == "fsspec":
            hint = f"Install it: pip install {_PACKAGES.get(protocol, 'fsspec')}."
    except Exception as error:  # each of fsspec's file systems raises its own
        problem = f"fsspec can't open it ({shortened(str(error), 200)})"
        if "::" in url:
            problem = "batchtune reads no chained URLs (a::b)"
        hint = "Give a local copy of the file, or a URL with s3://, gs:// or https://."
    raise ManifestError(f"{url} can't be read: {problem}", hint)


@functools.cache
def _filesystem(protocol: str, process: int) -> Any:
    """Return the one file system of a process that reads such URLs: its connections are shared by all threads."""
    import fsspec

    # A listing that was kept would hide that an object changed.
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("http", "https"):
        users = fsspec.config.conf.get(protocol, {}).get("client_kwargs", {})
        options["client_kwargs"] = {**client_options(), **users}
    # Before an object exists: that of FTP prints a traceback when it is deleted without its host.
    files_class = fsspec.get_filesystem_class(protocol)
    inspect.signature(files_class.__init__).bind(None, **options)
    files, _ = fsspec.url_to_fs(f"{protocol}://", **options)
    return files


def is_folder(url: str) -> bool:
    """Return whether a URL is that of a folder, or of a whole bucket. Raises ManifestError."""
    if url.startswith("http"):
        return False
    files, name = filesystem_of(url)
    try:
        return bool(files.info(name).get("type") == "directory")
    except Exception as error:
        raise unreadable(url, error) from error


def listed_objects(url: str) -> dict[str, Listed | None]:
    """Return the URLs of the objects that a pattern matches, or in a folder and below, with what is known of each.

    They are sorted. Raises ManifestError if they can't be listed.
    """
    files, name = filesystem_of(url)
    try:
        if url.endswith("/"):
            found = files.find(name, detail=True)
        else:
            found = files.glob(name, detail=True)
    except Exception as error:
        raise unreadable(url, error) from error
    listed = {}
    for path, info in sorted(found.items()):
        if info.get("type") == "file":
            listed[files.unstrip_protocol(path)] = listed_of(info)
    return listed


@functools.cache
def _latency_of(protocol: str) -> Latency:
    """Return the latency of all requests of this process over a protocol."""
    return Latency()


def listed_of(info: Mapping[str, Any]) -> Listed | None:
    """Return size and version of an object from what fsspec tells of it; None without a size."""
    if info.get("size") is None:
        return None
    noted = (str(info[name]) for name in _VERSIONS if info.get(name))
    return Listed(int(info["size"]), f"{info['size']} {next(noted, '')}")


def _status_of(error: BaseException) -> int | None:
    """Return the status of the server's answer, as aiohttp's errors name it; None without one."""
    for cause in linked_errors(error, contexts=True):
        status = getattr(cause, "status", None)
        if isinstance(status, int):
            return status
    return None


def _is_transient(error: Exception) -> bool:
    """Return whether a request may succeed a second time: the connection broke, or took too long."""
    if _status_of(error) is not None or isinstance(error, PermissionError):
        return False
    names = {type(cause).__name__ for cause in linked_errors(error, contexts=True)}
    broken = {"ServerDisconnectedError", "ClientOSError", "ClientPayloadError"}
    return isinstance(error, (ConnectionError, TimeoutError)) or bool(names & broken)


def _failed_connection(error: BaseException) -> OSError | None:
    """Return why the server could not be reached: fsspec calls that a file that is not there."""
    for cause in linked_errors(error, contexts=True):
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            return cause
    return None


def unreadable(url: str, error: Exception) -> ManifestError:
    """Return the error for an object, or a listing, that a library of fsspec can't read."""
    reason = shortened(str(error) or type(error).__name__, 200)
    status = _status_of(error)
    connection = _failed_connection(error)
    if isinstance(error, FileNotFoundError) and status is not None:
        reason = f"the server answers with status {status}"
    elif isinstance(error, FileNotFoundError) and connection is not None:
        reason = shortened(str(connection) or type(connection).__name__, 200)
    names = {type(cause).__name__ for cause in linked_errors(error, contexts=True)}
    if "NoSuchBucket" in str(error) or "bucket does not exist" in str(error):
        return ManifestError(
            f"{url} can't be read: there is no such bucket", "Check its name."
        )
    if isinstance(error, PermissionError) or status in (401, 403):
        return ManifestError(f"{url} can't be read: access denied", _CREDENTIALS)
    if names & {"NoCredentialsError", "PartialCredentialsError", "NoAuthTokenError"}:
        return ManifestError(f"{url} can't be read: no credentials", _CREDENTIALS)
    is_missing = status in (404, 410) or (status is None and connection is None)
    if isinstance(error, FileNotFoundError) and is_missing:
        return ManifestError(f"{url} does not exist", "Check the URL.")
    return ManifestError(
        f"{url} can't be read: {reason}",
        "Check the URL and the network; then run the same command again.",
    )


# The answers of web servers are bounded in size and time, and never decompressed on the way.

# Of a server that ignores ranges, which sends an object whole; up to 16 are read at once.
_LARGEST_WHOLE = 128 * 1024 * 1024
_LARGEST_PAGE = 16 * 1024 * 1024
_PIECE_BYTES = 256 * 1024
# A request is made up to three times, and a size asked for in two ways: a server that never answers takes a minute.
_SILENT_SECONDS = 15.0
_LONGEST_SECONDS = 300.0


def client_options() -> dict[str, Any]:
    """Return the options of an aiohttp session, whose answers are read as this module says."""
    import aiohttp

    class Answer(aiohttp.ClientResponse):
        """An answer that is read no further than was asked for. Raises OSError if it holds anything else."""

        async def read(self) -> bytes:
            """Return the body; of an answer with an error, nothing."""
            if self._body is None:
                try:
                    self._body = await self._bounded()
                except BaseException:
                    self.close()
                    raise
            return self._body

        async def _bounded(self) -> bytes:
            if self.status >= 400:
                self.close()
                return b""
            most = _most_bytes(self)
            seen = self.content_length or 0
            body = bytearray()
            while seen <= most and (piece := await self.content.read(_PIECE_BYTES)):
                body += piece
                seen = max(seen, len(body))
            if seen > most:
                raise OSError(
                    f"the server sends more than {format_size(most)} at once, as it ignores ranges or never ends: "
                    "download it, and name the file"
                )
            return bytes(body)

    return {
        "response_class": Answer,
        # A small body could expand to any size. What is compressed itself is recognised by its first bytes.
        "auto_decompress": False,
        "headers": {"Accept-Encoding": "identity"},
        "timeout": aiohttp.ClientTimeout(
            total=_LONGEST_SECONDS,
            sock_connect=_SILENT_SECONDS,
            sock_read=_SILENT_SECONDS,
        ),
    }


def _most_bytes(answer: Any) -> int:
    """Return how many bytes an answer may hold. Raises OSError if they are not those that were asked for."""
    asked = answer.request_info.headers.get("Range")
    if asked is None:
        return _LARGEST_PAGE
    if answer.status != 206:
        return _LARGEST_WHOLE
    first, _, last = asked.removeprefix("bytes=").partition("-")
    if not answer.headers.get("Content-Range", "").startswith(f"bytes {first}-"):
        raise OSError(
            f"the server does not send the bytes that were asked for, {first} to {last}"
        )
    return int(last) + 1 - int(first)
