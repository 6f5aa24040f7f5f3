"""The worker process of a probe whose workload is a training script: starts the script, and passes messages on to it.

The script's training process connects to a socket when its loop has taken an optimizer step (`scripts.feeding`), and
answers from then on. What starts it (torchrun, accelerate, a shell script) needs to know nothing of that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shlex
import signal
import socket
import struct
import subprocess
import tempfile
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

import msgspec

from batchtune.probe.requests import (
    Describe,
    Identify,
    Prepare,
    Reply,
    Request,
    ScriptRequest,
)
from batchtune.probe.worker import Worker
from batchtune.processes.nursery import ready
from batchtune.processes.worker import Failed, encode, oom_kills, serve
from batchtune.scripts.interposing import environment
from batchtune.scripts.scratch import mirror

_POLL_SECONDS = 0.1
# How long a command may take to end once the process that trained has.
_ENDING_SECONDS = 10.0

_decode = msgspec.json.Decoder[Reply](Reply).decode


def work(channel: int) -> None:
    """Serve requests in a forked process."""
    serve(
        socket.socket(fileno=channel),
        msgspec.json.Decoder[Request](Request).decode,
        Launcher().answer,
    )
    os._exit(0)


class Launcher:
    """A script that was started, and the connection to the process of it that trains."""

    _process: subprocess.Popen[bytes]
    _connection: socket.socket
    _replies: BinaryIO
    _oom_kills: int | None

    def answer(self, request: Request) -> Reply:
        """Pass a request on to the script, which the first one starts; if the script dies, so does this process."""
        if isinstance(request, Identify):
            return Worker().answer(request)
        if isinstance(request, Prepare | Describe):
            assert request.script is not None
            failed = self._start(request.script)
            if failed is not None:
                return failed
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(encode(request) + b"\n")
            line = self._replies.readline()
            if line:
                reply: Reply = _decode(line)
                return reply
        self._end_as_the_script()

    def _start(self, script: ScriptRequest) -> Failed | None:
        """Start the script in a scratch folder, and wait until it trains."""
        folder = Path(tempfile.mkdtemp(dir=script.scratch))
        with socket.socket(socket.AF_UNIX) as listener:
            path = folder / "socket"
            listener.bind(str(path))
            listener.listen()
            working = folder / "work"
            mirror(Path.cwd(), working)
            self._oom_kills = oom_kills()
            options = {"mode": "probe", "socket": str(path), "scratch": str(working)}
            try:
                self._process = subprocess.Popen(
                    script.command,
                    env=environment(options),
                    cwd=working,
                    stdin=subprocess.DEVNULL,
                )
            except OSError as error:
                command = shlex.join(script.command)
                return Failed(
                    stage="import",
                    message=f"{command} can't be started: {error.strerror or error}",
                    hint="Give the command as in a shell, such as -- python train.py --epochs 1.",
                )
            while not ready([listener], _POLL_SECONDS):
                if self._process.poll() is not None:
                    self._end_as_the_script()
            self._connection, _ = listener.accept()
        self._replies = self._connection.makefile("rb")
        self._pass_stacks_on()
        return None

    def _pass_stacks_on(self) -> None:
        """Ask the process that trains for its stack, when this one is asked."""
        credentials = self._connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        process = struct.unpack("3i", credentials)[0]

        def pass_on(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, pass_on)

    def _end_as_the_script(self) -> NoReturn:
        """End with the script's exit code or signal, so that the supervisor sees what became of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_SECONDS)
        if oom_kills() != self._oom_kills:  # torchrun survives, and exits with 1
            os.kill(os.getpid(), signal.SIGKILL)
        code = self._process.poll() or 0
        if code < 0:
            if -code != signal.SIGKILL:  # which has no handler to replace
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
