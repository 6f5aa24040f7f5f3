"""Starting a worker so that nothing of it stays when it is over, whatever it did.

On Linux below a keeper process; elsewhere as the head of a group of processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from batchtune.probe import keeper
from batchtune.probe.meters import CPU_ENVIRONMENT

MARK = "BATCHTUNE_PROBE_WORKER"

_CLEARING_SECONDS = 60.0
_KILLING_SECONDS = 5.0


class Guard(Protocol):
    """Starts a worker, tells when it has ended, and sees to it that nothing of it stays."""

    output: int

    def __init__(
        self, worker: list[str], channel: socket.socket, environment: dict[str, str], pipe: tuple[int, int]
    ) -> None: ...

    def exit_code(self) -> int | None:
        """As `subprocess.Popen.returncode`: negative for a signal; None while the worker runs."""

    def ask_for_stack(self) -> None:
        """Has the worker print its stack."""

    def end(self) -> None:
        """Kills the worker and what it started."""


def readable(stream: socket.socket, seconds: float) -> bool:
    """Whether something comes over a socket, or its end, within the time."""
    waiting = select.poll()  # select() knows no descriptor above 1023
    waiting.register(stream, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


_numbers = itertools.count(1)


def start_worker(channel: socket.socket) -> Guard:
    """Starts a worker process that serves a socket."""
    # Every process that the worker starts carries this, too, whatever else it does to hide.
    mark = f"{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
    environment = {**os.environ, **CPU_ENVIRONMENT, "PYTHONUNBUFFERED": "1", MARK: mark}
    worker = [sys.executable, "-m", "batchtune.probe.worker", str(channel.fileno())]
    kind: type[Guard] = _Keeper if sys.platform == "linux" else _Group
    reading, writing = os.pipe()
    try:
        return kind(worker, channel, environment, (reading, writing))
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)


class _Keeper:
    """The worker below a keeper process; see `batchtune.probe.keeper`."""

    def __init__(
        self, worker: list[str], channel: socket.socket, environment: dict[str, str], pipe: tuple[int, int]
    ) -> None:
        self.output = pipe[0]
        self._mark = f"{MARK}={environment[MARK]}".encode()
        self._control, theirs = socket.socketpair()
        self._said = b""
        self._exit_code: int | None = None
        script = [sys.executable, "-I", "-S", keeper.__file__]
        with theirs:
            numbers = [str(theirs.fileno()), str(os.getpid()), str(channel.fileno())]
            self._process = subprocess.Popen(
                [*script, *numbers, *worker],
                stdin=subprocess.DEVNULL,
                stdout=pipe[1],
                stderr=pipe[1],
                pass_fds=[theirs.fileno(), channel.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
            )

    def exit_code(self) -> int | None:
        """Known when all is cleared up."""
        if self._exit_code is None and readable(self._control, 0):
            self._hear()
        return self._exit_code

    def ask_for_stack(self) -> None:
        """Through the keeper, which passes the signal on."""
        self._process.send_signal(keeper.STACK_SIGNAL)

    def end(self) -> None:
        """Has the keeper kill all that it keeps, and waits for it."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _CLEARING_SECONDS
        while self._exit_code is None and (left := deadline - time.monotonic()) > 0:
            if readable(self._control, left):
                self._hear()
        if self._exit_code is None:  # it does not even answer
            self._process.kill()
            _kill_marked(self._mark)
        self._control.close()
        self._process.wait()

    def _hear(self) -> None:
        """The keeper's only word is the worker's exit code, when all is cleared up."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._control.recv(64)
        self._said += data
        if self._said.endswith(b"\n"):
            self._exit_code = int(self._said)
        elif not data:  # killed itself, and the worker with it: what the worker started is left
            self._exit_code = -signal.SIGKILL
            _kill_marked(self._mark)


class _Group:
    """The worker as the head of a group of processes, which dies as one: all that can be done outside Linux."""

    def __init__(
        self, worker: list[str], channel: socket.socket, environment: dict[str, str], pipe: tuple[int, int]
    ) -> None:
        self.output = pipe[0]
        self._process = subprocess.Popen(
            worker,
            stdin=subprocess.DEVNULL,
            stdout=pipe[1],
            stderr=pipe[1],
            pass_fds=[channel.fileno()],
            env=environment,
            start_new_session=True,
        )

    def exit_code(self) -> int | None:
        """The process's own."""
        return self._process.poll()

    def ask_for_stack(self) -> None:
        """By a signal."""
        self._process.send_signal(keeper.STACK_SIGNAL)

    def end(self) -> None:
        """Kills the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _kill_marked(mark: bytes) -> None:
    """Kills every process that carries this in its environment, until none is left."""
    deadline = time.monotonic() + _KILLING_SECONDS
    while time.monotonic() < deadline:
        marked = [pid for pid in _processes() if mark in _environment(pid)]
        if not marked:
            return
        for pid in marked:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """A process's environment as it was when its program started; none for one that has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
