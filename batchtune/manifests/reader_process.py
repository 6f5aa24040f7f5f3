"""The process that reads Parquet and Arrow files under a memory limit: what a hostile file does, it does there.

Requests and answers are msgpack, so that nothing that comes from the process is unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from batchtune.errors import ManifestError
from batchtune.machine import total_memory
from batchtune.manifests.source import Source
from batchtune.manifests.values import Unreadable

_FLOATS, _UNREADABLE = 1, 2
_LARGEST_MESSAGE_BYTES = 1024**3
_ANEW = "Make or fetch the file anew."

# Nothing is imported from the current folder, which may be anybody's.
_BEGIN = """import sys
sys.path[:1] = []
sys.path.append(sys.argv[1])
from batchtune.manifests.reader_process import serve
serve(int(sys.argv[2]))"""

_idle: dict[int, list[RemoteTable]] = {}


class RemoteTable:
    """The other process, seen from here, and the table that is open in it.

    Attributes:
        process: The process itself.
        path: Of the table, for messages.
        ready: Whether it can be asked: it is neither answering nor dead.
    """

    def __init__(self) -> None:
        self.path = Path()
        self.ready = True
        self._pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, str(Path(__file__).parents[2]), str(theirs.fileno())],
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
                _ANEW,
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


@contextlib.contextmanager
def opened(source: Source, title: str) -> Iterator[RemoteTable]:
    """Open a Parquet or Arrow file (`title`) in a process. Raises ManifestError if it is of another format or damaged.

    One idle process is kept for the next file.
    """
    with source.seekable() as stream:
        idle = _idle.setdefault(os.getpid(), [])  # not those of a process that this one was forked from
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


def serve(descriptor: int) -> None:
    """Answer requests until there are no more: what the process does."""
    from batchtune.manifests.tables import TableReader

    pipe: Connection[Any, Any] = Connection(descriptor)
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
                _send(pipe, ("refused", (message, _ANEW)))
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
