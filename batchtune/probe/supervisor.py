"""Drives the worker process: starts it, asks for trials, replaces it when it dies or hangs. Never imports torch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import NoReturn

import msgspec

from batchtune.errors import ProbeError, WorkloadError
from batchtune.probe import protocol
from batchtune.probe.meters import CPU_ENVIRONMENT
from batchtune.probe.protocol import Failed, Measure, Measured, Ready, Reply, Request, Setup
from batchtune.results import Device, Outcome, Trial
from batchtune.shapes import BatchShape

_OUTPUT_KEPT_BYTES = 64 * 1024
_POLL_SECONDS = 0.2


class WorkerDied(Exception):
    """The worker process ended in the middle of a request.

    Args:
        returncode: As `subprocess.Popen.returncode`: negative for a signal.
        output: The end of what it printed.
    """

    def __init__(self, returncode: int, output: str) -> None:
        super().__init__(_death(returncode))
        self.returncode = returncode
        self.output = output

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel's OOM killer did it, or an allocation failed where C++ can't raise."""
        aborted = self.returncode == -signal.SIGABRT and (
            "bad_alloc" in self.output or "annot allocate memory" in self.output
        )
        return self.returncode == -signal.SIGKILL or aborted


class WorkerHung(Exception):
    """The worker process did not answer in time."""


class WorkerProcess:
    """One worker process, its channel, and the end of what it prints."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "batchtune.probe.worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **CPU_ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C reaches the supervisor alone; the group dies as one
            )
        self._channel = ours
        self._buffer = b""
        self._output: deque[bytes] = deque()
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def ask(self, request: Request, timeout_seconds: float) -> Reply:
        """Sends a request and waits for its reply.

        Raises:
            WorkerDied: The process ended before it answered.
            WorkerHung: The time ran out.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.sendall(protocol.encode(request) + b"\n")
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._buffer:
            if not select.select([self._channel], [], [], _POLL_SECONDS)[0]:
                # A child of the workload's may hold the channel open after the worker itself has gone.
                if self._process.poll() is not None:
                    self._died()
                if time.monotonic() > deadline:
                    raise WorkerHung
                continue
            data = b""
            with contextlib.suppress(ConnectionResetError):
                data = self._channel.recv(65536)
            if not data:
                self._died()
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            return protocol.decode_reply(line)
        except msgspec.DecodeError as error:
            raise AssertionError(f"the worker said {line[:200]!r}: {error}") from error

    def output(self) -> str:
        """The end of what the workload printed."""
        return b"".join(self._output).decode(errors="replace")

    def close(self) -> None:
        """Ends the process and whatever it started."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=1)

    def _died(self) -> NoReturn:
        returncode = self._process.wait()
        self._reader.join(timeout=1)
        raise WorkerDied(returncode, self.output())

    def _drain(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        kept = 0
        with stream:
            while data := os.read(stream.fileno(), 16384):
                self._output.append(data)
                kept += len(data)
                while kept - len(self._output[0]) > _OUTPUT_KEPT_BYTES:
                    kept -= len(self._output.popleft())


class Supervisor:
    """Measures batch shapes, with a fresh worker wherever the last one died, hung or was damaged.

    Use as a context manager: no process outlives it.

    Args:
        setup: What to build, and where. The limit that the first worker worked out is kept for all that follow.
        trial_timeout_seconds: Longest that one trial may take.
        setup_timeout_seconds: Longest that building the workload may take.
    """

    def __init__(self, setup: Setup, *, trial_timeout_seconds: float, setup_timeout_seconds: float = 600.0) -> None:
        self._setup = setup
        self._trial_timeout_seconds = trial_timeout_seconds
        self._setup_timeout_seconds = setup_timeout_seconds
        self._worker: WorkerProcess | None = None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._drop()

    def start(self) -> Device:
        """Builds the workload in a new worker.

        Returns:
            The device and the limit that is enforced on it.

        Raises:
            WorkloadError: The workload can't be imported or built.
            ProbeError: The device can't be used, or the workload alone needs more than the limit.
        """
        self._drop()
        self._worker = WorkerProcess()
        try:
            reply = self._worker.ask(self._setup, self._setup_timeout_seconds)
        except WorkerDied as died:
            if died.out_of_memory:
                raise self._too_small(str(died)) from None
            raise WorkloadError(
                f"{self._setup.workload}: the worker process {died} while it built the workload",
                traceback=_tail(died.output),
            ) from None
        except WorkerHung:
            raise WorkloadError(
                f"{self._setup.workload}: setup took longer than {self._setup_timeout_seconds:g} s"
            ) from None
        if isinstance(reply, Failed):
            self._raise(reply)
        assert isinstance(reply, Ready)
        self._setup = msgspec.structs.replace(self._setup, limit_bytes=reply.device.limit_bytes)
        return reply.device

    def measure(self, shape: BatchShape, index: int) -> tuple[Trial, Measured | None]:
        """Runs one trial.

        Returns:
            The trial for the journal, and the worker's own words (None where it died or hung).

        Raises:
            WorkloadError, ProbeError: A new worker was needed and can't be built.
        """
        started = time.monotonic()
        if self._worker is None:
            self.start()
        assert self._worker is not None
        request = Measure(batch_size=shape.batch_size, length=shape.length, target_length=shape.target_length)
        measured: Measured | None = None
        outcome: Outcome
        error: str | None
        try:
            reply = self._worker.ask(request, self._trial_timeout_seconds)
            assert isinstance(reply, Measured)
            measured, outcome, error = reply, reply.outcome, reply.error
            if reply.renew:
                self._drop()
        except WorkerDied as died:
            outcome = "oom" if died.out_of_memory else "crash"
            error = f"the worker process {died}" + (f": {tail}" if (tail := _tail(died.output, lines=3)) else "")
            self._drop()
        except WorkerHung:
            outcome = "timeout"
            error = f"no answer within {self._trial_timeout_seconds:g} s"
            self._drop()
        trial = Trial(
            index=index,
            batch_size=shape.batch_size,
            length=shape.length,
            target_length=shape.target_length,
            outcome=outcome,
            steps=measured.steps if measured else 0,
            step_seconds=measured.step_seconds if measured else None,
            peak_bytes=measured.peak_bytes if measured else None,
            reserved_bytes=measured.reserved_bytes if measured else None,
            alloc_retries=measured.alloc_retries if measured else None,
            error=error,
            elapsed_seconds=round(time.monotonic() - started, 6),
        )
        return trial, measured

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _raise(self, failed: Failed) -> NoReturn:
        if failed.stage == "device":
            raise ProbeError(failed.message, failed.hint)
        if failed.out_of_memory:
            raise self._too_small(failed.message)
        message = failed.message
        if failed.stage == "setup":
            message = f"{self._setup.workload}: its setup failed: {message}"
        raise WorkloadError(message, failed.hint, failed.traceback)

    def _too_small(self, reason: str) -> ProbeError:
        return ProbeError(
            f"the memory limit is too small: {self._setup.workload} ran out of it in its setup, "
            f"before any batch ({reason})",
            "Give more with --memory, or take a smaller model with --set.",
        )


def _death(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _tail(output: str, lines: int = 12) -> str:
    return "\n".join(output.rstrip().splitlines()[-lines:])
