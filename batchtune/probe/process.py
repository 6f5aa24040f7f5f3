"""One worker process as the supervisor sees it: its channel, the end of what it prints, and how it ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from batchtune.probe import protocol
from batchtune.probe.guards import Nursery
from batchtune.probe.keeper import ready
from batchtune.probe.protocol import Message, Request
from batchtune.workloads.tracebacks import user_stack

Answer = TypeVar("Answer", bound=Message)

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_OUTPUT_KEPT_BYTES = 64 * 1024
_LONGEST_REPLY_BYTES = 16 << 20
_POLL_SECONDS = 0.2
# How long a worker whose channel has closed may take to end, before it is not believed to be ending.
_ENDING_SECONDS = 5.0
# How long a worker that hangs may take to print its stack. The outermost frame is printed last.
_STACK_SECONDS = 2.0
_OUTERMOST_FRAME = " in _run_module_as_main\n"


class WorkerDied(Exception):
    """The worker process ended, or lost its channel, in the middle of a request.

    Args:
        how: In words, to go on after "the worker process".
        output: The end of what it printed.
        out_of_memory: Whether the kernel's OOM killer did it, or an allocation failed where C++ can't raise.
    """

    def __init__(self, how: str, output: str, *, out_of_memory: bool = False) -> None:
        super().__init__(how)
        self.output = output
        self.out_of_memory = out_of_memory


class WorkerHung(Exception):
    """The worker process did not answer in time.

    Args:
        stack: Where it hangs, as `user_stack` writes it; empty where it did not even tell that.
    """

    def __init__(self, stack: str) -> None:
        super().__init__(stack)
        self.stack = stack


class WorkerProcess:
    """One worker process, its channel, and the end of what it prints.

    Args:
        nursery: Starts it.
    """

    def __init__(self, nursery: Nursery) -> None:
        self._oom_kills = oom_kills()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._guard = nursery.start_worker(theirs)
        self._buffer = b""
        self._output: deque[bytes] = deque()
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def ask(self, request: Request, kinds: tuple[type[Answer], ...], timeout_seconds: float) -> Answer:
        """Send a request, and wait for a reply of these kinds.

        Raises:
            WorkerDied: The process ended before it answered, or something else came over its channel.
            WorkerHung: The time ran out.
        """
        if not self._buffer and ready([self._channel], 0):
            self._receive()
        if self._buffer:  # nothing was asked
            self._disturbed(self._buffer)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.sendall(protocol.encode(request) + b"\n")
        line = self._line(time.monotonic() + timeout_seconds)
        try:
            reply = protocol.decode_reply(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._disturbed(line)
        if not isinstance(reply, kinds):
            self._disturbed(line)
        return reply

    def output(self) -> str:
        """Return the end of what the workload printed."""
        return b"".join(self._output).decode(errors="replace")

    def close(self) -> None:
        """End the process and whatever it started."""
        self._channel.close()
        self._guard.end()
        self._reader.join(timeout=1)

    def _line(self, deadline: float) -> bytes:
        """Return the next line from the channel, without its end."""
        while b"\n" not in self._buffer:
            # What the worker said last is still read when it has ended: so first look whether it has, then read.
            ended = self._guard.exit_code() is not None
            if ready([self._channel], 0 if ended else _POLL_SECONDS):
                if not self._receive():
                    self._died()
            elif ended:  # a child of the workload's may hold the channel open after the worker itself has gone
                self._died()
            elif time.monotonic() > deadline:
                raise WorkerHung(self._stack())
            if len(self._buffer) > _LONGEST_REPLY_BYTES:
                self._disturbed(self._buffer)
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _stack(self) -> str:
        """Return where the worker is now, printed by a handler in C that needs neither Python's lock nor an answer."""
        before = self.output().count(_OUTERMOST_FRAME)
        self._guard.ask_for_stack()
        deadline = time.monotonic() + _STACK_SECONDS
        while self.output().count(_OUTERMOST_FRAME) <= before and time.monotonic() < deadline:
            time.sleep(0.02)
        return user_stack(self.output())

    def _receive(self) -> bool:
        """Take what has come over the channel; False where it is closed."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._channel.recv(65536)
        self._buffer += data
        return bool(data)

    def _died(self) -> NoReturn:
        deadline = time.monotonic() + _ENDING_SECONDS
        while (code := self._guard.exit_code()) is None:
            if time.monotonic() > deadline:
                raise WorkerDied("closed its channel to the probe: the workload closes files that are not its own", "")
            time.sleep(0.01)
        self._reader.join(timeout=1)
        output = self.output()
        aborted = code == -signal.SIGABRT and ("bad_alloc" in output or "annot allocate memory" in output)
        # Python's own last word, where there was no memory left even to report the lack of it.
        aborted = aborted or (code == 1 and output.rstrip().rpartition("\n")[2].startswith("MemoryError"))
        raise WorkerDied(
            _death(code), output, out_of_memory=aborted or (code == -signal.SIGKILL and self._oom_killed())
        )

    def _oom_killed(self) -> bool:
        """Return whether the kernel has killed for want of memory since the worker started.

        Where the kernel does not count (before Linux 4.13), nothing else than that is likely.
        """
        now = oom_kills()
        if self._oom_kills is None or now is None:
            return self._oom_kills is now
        return now > self._oom_kills

    def _disturbed(self, said: bytes) -> NoReturn:
        raise WorkerDied(
            f"said {said[:100]!r} over its channel to the probe: the workload writes to files that are not its own", ""
        )

    def _drain(self) -> None:
        stream = self._guard.output
        kept = 0
        while data := os.read(stream, 65536):
            self._output.append(data)
            kept += len(data)
            while kept - len(self._output[0]) > _OUTPUT_KEPT_BYTES:
                kept -= len(self._output.popleft())
        os.close(stream)


def _death(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel's OOM killer has ended, where this process and its children live.

    The control group counts every such killing in it (Linux, cgroup-v2.rst, `memory.events`; in version 1
    `memory.oom_control`). The root group has no counter; the machine's is taken then. Only growth means anything;
    None where the kernel does not count. `root` is where `proc` and `sys` are.
    """
    for path in (*_group_files(root), root / "proc/vmstat"):
        try:
            match = _COUNT.search(path.read_text())
        except (OSError, UnicodeDecodeError):
            continue
        if match:
            return int(match[1])
    return None


def _group_files(root: Path) -> list[Path]:
    """Return where this process's control group may keep its counter; in a container its path may lead nowhere."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    files = []
    for line in lines:
        number, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        elif number == "0" and not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.events"
        else:
            continue
        files += [mount / group.lstrip("/") / name, mount / name]
    return files
