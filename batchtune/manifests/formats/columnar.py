"""Parquet and Arrow, read in a process of their own under a memory limit: what a hostile file does, it does there.

Requests and answers are msgpack, so that nothing that comes from the process is unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from batchtune.errors import ManifestError
from batchtune.lengths import Unit
from batchtune.machine import total_memory
from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Unreadable
from batchtune.processes.pool import die_with_parent
from batchtune.processes.start import command

_FLOATS, _UNREADABLE = 1, 2
_LARGEST_MESSAGE_BYTES = 1024**3
_FETCH = "Make or fetch the file again."


class Columnar(Format):
    """The part of a columnar format that is the same for all; `title` is its name in messages."""

    title: ClassVar[str]
    units: ClassVar[Mapping[str, Unit]] = {
        **dict.fromkeys(("input_ids_count", "token_ids_count", "tokens_count", "labels_count"), "tokens"),
        "input_values_count": "samples",
    }

    @cached_property
    def _described(self) -> Any:
        with opened_table(self.source, self.title) as table:
            return table.ask("described")

    def columns(self) -> Sequence[Column]:
        """Return all columns, those within others under dotted names, and the numbers of items of all lists."""
        return [Column(*fields) for fields in self._described[0]]

    def unit_in(self, column: str) -> Unit | None:
        """Return the unit of a column: by the note of `batchtune scan`, and seconds for spans of time."""
        units: dict[str, Unit] = self._described[1]
        return units.get(column)

    def default_target(self) -> str | None:
        """Return `target_length` for a table that `batchtune scan` wrote with targets."""
        target: str | None = self._described[2]
        return target

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield some ten thousand rows at a time, or fewer if they are large; ids are read in a pass of their own."""
        is_open = True
        with opened_table(self.source, self.title) as table:

            @lru_cache(1)
            def ids(first: int, count: int) -> list[str | None]:
                return table.ask("ids", first, count) if is_open else [None] * count

            def place(first: int, count: int, index: int) -> Place:
                name = None
                with contextlib.suppress(ManifestError):  # a message is being made of something else
                    name = ids(first, count)[index]
                return Place(None, name or f"row {first + index + 1}")

            try:
                table.ask("select", keys)
                while (part := table.ask("next")) is not None:
                    first, count, share, columns = part
                    yield Rows(columns, partial(place, first, count), partial(ids, first, count))
                    self.source.report(share)
            finally:
                is_open = False


class Parquet(Columnar):
    """Parquet, as pandas, Spark, Hugging Face and `batchtune scan` write it."""

    name = "parquet"
    title = "Parquet"
    description = "a Parquet file"
    folder_kind = ("parquet files", (".parquet",))

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins as Parquet does, or as encrypted Parquet."""
        return head.data.startswith((b"PAR1", b"PARE"))


class Arrow(Columnar):
    """Arrow IPC, the file (Feather) and the stream (what `Dataset.save_to_disk` writes)."""

    name = "arrow"
    title = "Arrow"
    description = "an Arrow file or stream, as Feather or Hugging Face's datasets write them"
    folder_kind = ("arrow files", (".arrow",))

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether it begins as a file, or as a stream: with the mark, size and root of a schema's message."""
        size, root = (int.from_bytes(head.data[at : at + 4], "little", signed=True) for at in (4, 8))
        stream = head.data.startswith(b"\xff\xff\xff\xff") and 4 <= root < size and len(head.data) > 12
        return head.data.startswith(b"ARROW1") or stream


class RemoteTable:
    """The reader process, seen from here, and the table that is open in it."""

    def __init__(self) -> None:
        self.path = Path()  # of the table, for messages
        self.ready = True  # neither answering nor dead
        self._pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                command("batchtune.manifests.formats.columnar", theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what a library prints disturbs nobody
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )

    def ask(self, method: str, *arguments: object) -> Any:
        """Return the result of a `TableReader`'s method. Raises ManifestError, too if the process dies of it."""
        self.ready = False
        try:
            _send(self._pipe, (method, arguments))
            kind, answer = _receive(self._pipe)
        except (EOFError, OSError):
            raise ManifestError(
                f"{self.path}: the process that read it died ({self.end()}): the file is damaged, or reading it takes "
                f"more than {total_memory() / 2**31:.1f} GiB, half of this machine's memory",
                _FETCH,
            ) from None
        self.ready = True
        if kind == "refused":
            raise ManifestError(*answer)
        if kind == "failed":
            raise RuntimeError(answer)
        return answer

    def end(self) -> str:
        """End the process, if it has not ended yet, and say how it did."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be about to be ended by the kernel
            self.process.wait(0.2)
        self.process.kill()
        code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# Process id → the idle reader of that process, if any; a fork must not use its parent's.
_idle: dict[int, list[RemoteTable]] = {}


@contextlib.contextmanager
def opened_table(source: Source, title: str) -> Iterator[RemoteTable]:
    """Open a Parquet or Arrow file (`title`) in a process. Raises ManifestError if it is of another format or damaged.

    One idle process is kept for the next file.
    """
    with source.seekable() as stream:
        idle = _idle.setdefault(os.getpid(), [])
        table = idle.pop() if idle and idle[-1].process.poll() is None else RemoteTable()
        table.path = source.path
        try:
            link = f"/proc/{os.getpid()}/fd/{stream.fileno()}"
            table.ask("open", title, link if os.path.exists(link) else os.path.realpath(stream.name), str(source.path))
            yield table
            if table.ready:
                table.ask("close")
        finally:
            if table.ready and not idle:
                idle.append(table)
            else:
                table.end()


@atexit.register
def _end_idle() -> None:
    for table in _idle.pop(os.getpid(), ()):
        table.end()


def main() -> None:
    """Answer requests until there are no more: what the process does."""
    from batchtune.manifests.tables import TableReader

    die_with_parent()  # even in the middle of a long call of Arrow's

    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limit = total_memory() // 2
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader: TableReader | None = None
    path = ""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            method, arguments = _receive(pipe)
            try:
                answer = None
                if method in ("open", "close"):
                    reader = None
                if method == "open":
                    path = arguments[-1]
                    reader = TableReader(*arguments)
                elif reader is not None:
                    answer = reader.answer(method, arguments)
                _send(pipe, ("done", answer))
            except ManifestError as error:
                _send(pipe, ("refused", (error.message, error.hint)))
            except (MemoryError, OverflowError) as error:
                message = f"{path} stands for more values than can be held at once ({error})"
                _send(pipe, ("refused", (message, _FETCH)))
            except Exception as error:
                _send(pipe, ("failed", f"{type(error).__name__}: {error}"))


def _send(pipe: Connection[Any, Any], message: object) -> None:
    data = msgspec.msgpack.encode(message, enc_hook=_as_extension)
    if len(data) > _LARGEST_MESSAGE_BYTES:
        raise MemoryError(f"{len(data):,} bytes")
    pipe.send_bytes(data)


def _receive(pipe: Connection[Any, Any]) -> Any:
    return msgspec.msgpack.decode(pipe.recv_bytes(_LARGEST_MESSAGE_BYTES), ext_hook=_from_extension)


def _as_extension(value: object) -> object:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_FLOATS, np.ascontiguousarray(value, dtype=np.float64).data.cast("B"))
    if isinstance(value, Unreadable):
        return msgspec.msgpack.Ext(_UNREADABLE, msgspec.msgpack.encode((value.reason, value.detail)))
    raise TypeError(f"{type(value).__name__} can't be sent")


def _from_extension(code: int, data: memoryview) -> object:
    if code == _FLOATS:
        return np.frombuffer(data, dtype=np.float64)
    return Unreadable(*msgspec.msgpack.decode(data, type=tuple[str, str]))
