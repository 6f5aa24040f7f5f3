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
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from batchtune.errors import ManifestError
from batchtune.machine import total_memory
from batchtune.manifests.source import Source
from batchtune.manifests.values import Unreadable

_FLOATS, _UNREADABLE = 1, 2
_SIZE_BYTES = 8
_LARGEST_MESSAGE_BYTES = 1024**3
_ANEW = "Make or fetch the file anew."

# Nothing is imported from the current folder, which may be anybody's.
_BEGIN = """import sys
sys.path[:1] = []
sys.path.append(sys.argv[1])
from batchtune.manifests.reader_process import serve
serve()"""

_idle: dict[int, list[_Process]] = {}


class RemoteTable:
    """A table that is open in the other process; see `tables.TableReader` for what can be asked."""

    def __init__(self, process: _Process, path: Path) -> None:
        self._process = process
        self._path = path

    def ask(self, method: str, *arguments: object) -> Any:
        """What the reader's method returns. Raises ManifestError if it does, or if the process dies of it."""
        try:
            kind, answer = self._process.ask((method, arguments))
        except (EOFError, OSError):
            raise ManifestError(
                f"{self._path}: the process that read it died ({self._process.end()}): the file is damaged, or reading "
                f"it takes more than {total_memory() / 2**31:.1f} GiB, half of this machine's memory",
                _ANEW,
            ) from None
        if kind == "refused":
            raise ManifestError(*answer)
        if kind == "too large":
            raise ManifestError(f"{self._path} stands for more values than can be held at once ({answer})", _ANEW)
        if kind == "failed":
            raise RuntimeError(answer)
        return answer


@contextlib.contextmanager
def opened(source: Source, title: str) -> Iterator[RemoteTable]:
    """Opens a Parquet or Arrow file (`title`) in a process. Raises ManifestError if it is of another format or damaged.

    One idle process is kept for the next file.
    """
    with source.seekable() as stream:
        idle = _idle.setdefault(os.getpid(), [])  # not those of a process that this one was forked from
        process = idle.pop() if idle and idle[-1].runs() else _Process()
        try:
            table = RemoteTable(process, source.path)
            link = f"/proc/{os.getpid()}/fd/{stream.fileno()}"
            table.ask("open", title, link if os.path.exists(link) else os.path.realpath(stream.name), str(source.path))
            yield table
            if process.between_requests:
                table.ask("close")
        finally:
            if process.between_requests and not idle:
                idle.append(process)
            else:
                process.end()


class _Process:
    """The other process, seen from here."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process alone
        )
        self.between_requests = True

    def runs(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, request: object) -> Any:
        """The answer to a request. Raises EOFError or OSError if the process died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.between_requests = False
        _send(self._process.stdin, request)
        answer = _receive(self._process.stdout)
        self.between_requests = True
        return answer

    def end(self) -> str:
        """Ends it, if it has not ended yet, and says how it did."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be about to be ended by the kernel
            self._process.wait(0.2)
        self._process.kill()
        code = self._process.wait()
        self.between_requests = False
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@atexit.register
def _end_idle() -> None:
    for process in _idle.pop(os.getpid(), ()):
        process.end()


def serve() -> None:
    """Answers requests until there are no more: what the process does."""
    from batchtune.manifests.tables import TableReader

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints disturbs nobody
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limit = total_memory() // 2
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader: TableReader | None = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            method, arguments = _receive(sys.stdin.buffer)
            try:
                if method == "open":
                    reader, answer = None, None
                    reader = TableReader(*arguments)
                elif method == "close":
                    reader, answer = None, None
                else:
                    assert reader is not None
                    answer = reader.answer(method, arguments)
                _send(answers, ("done", answer))
            except ManifestError as error:
                _send(answers, ("refused", (error.message, error.hint)))
            except (MemoryError, OverflowError) as error:
                _send(answers, ("too large", str(error)))
            except Exception as error:
                _send(answers, ("failed", f"{type(error).__name__}: {error}"))


def _send(pipe: IO[bytes], message: object) -> None:
    data = msgspec.msgpack.encode(message, enc_hook=_as_extension)
    if len(data) > _LARGEST_MESSAGE_BYTES:
        raise MemoryError(f"{len(data):,} bytes")
    pipe.write(len(data).to_bytes(_SIZE_BYTES, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    size = pipe.read(_SIZE_BYTES)
    if len(size) < _SIZE_BYTES:
        raise EOFError
    data = pipe.read(int.from_bytes(size, "little"))
    if len(data) < int.from_bytes(size, "little"):
        raise EOFError
    return msgspec.msgpack.decode(data, ext_hook=_from_extension)


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
