"""Starting a worker so that nothing of it stays when it is over, whatever it did.

On Linux forked from a process that has imported PyTorch, below a keeper; elsewhere as the head of a group of processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

import psutil

from batchtune.probe import keeper
from batchtune.probe.devices import backends

MARK = "BATCHTUNE_PROBE_WORKER"
# Elsewhere, forking a process that has imported PyTorch is not safe (macOS), or can't be done.
FORKS = sys.platform == "linux"

_CLEARING_SECONDS = 60.0
# Importing PyTorch from a slow disk takes long; what takes longer is left to the time limit of what is asked next.
_IMPORTING_SECONDS = 120.0
_KILLING_SECONDS = 5.0


_numbers = itertools.count(1)


class Nursery:
    """Starts the workers of one supervisor: forked from a process that has PyTorch (Linux), or each by itself.

    Close it when no more are wanted. The process starts with the first worker, and again if something has killed it.
    """

    def __init__(self) -> None:
        # Every process that a worker starts carries this, too, whatever else it does to hide.
        self.mark = f"{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def start_worker(self, channel: socket.socket) -> Kept | Grouped:
        """Start a worker process that serves a socket."""
        reading, writing = os.pipe()
        try:
            if not FORKS:
                return Grouped(channel, self._environment(), (reading, writing))
            control, theirs = socket.socketpair()
            with theirs:
                self._ask([theirs.fileno(), channel.fileno(), writing])
            started = Kept(control, reading, self)
            started.wait_until_there(_IMPORTING_SECONDS)
            return started
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)

    def kill_workers(self) -> None:
        """Kill every process that carries the mark, but the nursery's own."""
        _kill_marked(self.mark, self._process.pid if self._process else 0)

    def close(self) -> None:
        """End the process that workers are forked from."""
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._requests = None

    def _environment(self) -> dict[str, str]:
        needed = {name: value for backend in backends() for name, value in backend.WORKER_ENVIRONMENT.items()}
        return {**os.environ, **needed, "PYTHONUNBUFFERED": "1", MARK: self.mark}

    def _ask(self, descriptors: list[int]) -> None:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._requests, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "batchtune.probe.nursery", str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=self._environment(),
                    start_new_session=True,  # Ctrl-C reaches the supervisor alone
                )
        assert self._requests is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was just killed: so was the worker, then
            socket.send_fds(self._requests, [b"worker\n"], descriptors)


class Kept:
    """A worker below its keeper process; see `batchtune.probe.keeper`."""

    def __init__(self, control: socket.socket, output: int, nursery: Nursery) -> None:
        self.output = output
        self._control = control
        self._nursery = nursery
        self._said = b""
        self._pid: int | None = None
        self._exit_code: int | None = None

    def wait_until_there(self, seconds: float) -> None:
        """Wait until the process that has PyTorch is ready, and has forked."""
        deadline = time.monotonic() + seconds
        while self._pid is None and self._exit_code is None and (left := deadline - time.monotonic()) > 0:
            if keeper.ready([self._control], left):
                self._hear()

    def exit_code(self) -> int | None:
        """Known when all is cleared up."""
        if self._exit_code is None and keeper.ready([self._control], 0):
            self._hear()
        return self._exit_code

    def ask_for_stack(self) -> None:
        """Through the keeper, which passes the signal on; not before it is there."""
        if self.exit_code() is None and self._pid is not None:
            os.kill(self._pid, keeper.STACK_SIGNAL)

    def end(self) -> None:
        """Have the keeper kill all that it keeps, and waits for it."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _CLEARING_SECONDS
        while self._exit_code is None and (left := deadline - time.monotonic()) > 0:
            if keeper.ready([self._control], left):
                self._hear()
        if self._exit_code is None:  # it does not even answer
            self._nursery.kill_workers()
        self._control.close()

    def _hear(self) -> None:
        """Take in the keeper's only words: its process id; the worker's exit code, when all is cleared up."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._control.recv(64)
        self._said += data
        words = self._said.split(b"\n")[:-1]
        self._pid = int(words[0]) if words else None
        if len(words) > 1:
            self._exit_code = int(words[1])
        elif not data:  # killed itself, and the worker with it: what the worker started is left
            self._exit_code = -signal.SIGKILL
            self._nursery.kill_workers()


class Grouped:
    """The worker as the head of a group of processes, which dies as one: all that can be done outside Linux."""

    def __init__(self, channel: socket.socket, environment: dict[str, str], pipe: tuple[int, int]) -> None:
        self.output = pipe[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "batchtune.probe.worker", str(channel.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=pipe[1],
            stderr=pipe[1],
            pass_fds=[channel.fileno()],
            env=environment,
            start_new_session=True,
        )

    def exit_code(self) -> int | None:
        """Return the process's own exit code."""
        return self._process.poll()

    def ask_for_stack(self) -> None:
        """Send the signal that asks for it."""
        self._process.send_signal(keeper.STACK_SIGNAL)

    def end(self) -> None:
        """Kill the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _kill_marked(mark: str, spared: int) -> None:
    """Kill every process that carries the mark in its environment, until none but the spared one is left."""
    deadline = time.monotonic() + _KILLING_SECONDS
    while time.monotonic() < deadline:
        marked = [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(MARK) == mark]
        if all(process.pid == spared for process in marked):
            return
        for process in marked:
            if process.pid != spared:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.01)
