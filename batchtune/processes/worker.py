"""Worker processes as a supervisor sees them: how they start, answer and end."""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
import psutil

from batchtune import processes
from batchtune.errors import BatchtuneError, OptionError, ProbeError, WorkloadError
from batchtune.processes.nursery import ready
from batchtune.results import MALFORMED, LoaderOutcome
from batchtune.workloads import last_frame, user_stack

AnswerT = TypeVar("AnswerT", bound="Message")
IntroductionT = TypeVar("IntroductionT", bound="Introduction")

MARK = "BATCHTUNE_WORKER"
"""Environment variable of the nursery and of everything below it, whatever else a process does to hide."""

# Importing PyTorch from a slow disk takes long; what takes longer is left to the time limit of the next request.
_IMPORTING_SECONDS = 120.0
_CLEARING_SECONDS = 60.0
_KILLING_SECONDS = 5.0
_OUTPUT_KEPT_BYTES = 64 * 1024
_LONGEST_REPLY_BYTES = 16 << 20
# Who have connected and said nothing.
_MOST_STRANGERS = 200
# Of a hello, a greeting, or the end of an output; more of what a stranger says is not read.
_LONGEST_LINE_BYTES = 1 << 20
_POLL_SECONDS = 0.2
# How long a worker whose channel has closed may take to end.
_ENDING_SECONDS = 5.0
# How long a worker that hangs may take to print its stack; the outermost frame is printed last.
_STACK_SECONDS = 2.0
OUTERMOST_FRAME = f'  File "{processes.__file__}", line '
"""Begins the last line of a worker's stack."""


# What torchrun says of the threads of its processes before it starts them, as its logger or `python -m` prints it.
_TORCHRUN_BANNER = re.compile(
    r"^.*torch[./]distributed[./]run(?:\.py:\d+\]|: \[WARNING\]).*\n?"
    r"|^\*{41}\nSetting OMP_NUM_THREADS .*\n\*{41}\n?",
    re.MULTILINE,
)
_TORCHRUN_REPORT = re.compile(
    r"^.*torch[./]distributed[./]elastic.*(?:closing signal|failed \(exitcode)",
    re.MULTILINE,
)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower):
    """Base of the messages between a supervisor and its worker: one JSON document a line, over a socket."""


encode = msgspec.json.Encoder().encode


class Failed(Message, frozen=True):
    """The user's code failed: its own error, or what ended it.

    Attributes:
        outcome: As that of a trial or of a loader's setting.
        traceback: The last lines of the user's own frames.
        stage: What failed; None: what was asked for.
    """

    message: str
    hint: str | None = None
    traceback: str | None = None
    outcome: LoaderOutcome = "error"
    stage: str | None = None

    @classmethod
    def of(cls, error: BatchtuneError, stage: str | None = None) -> Failed:
        """Return an error that says itself what is wrong; a wrong option is its own stage."""
        traceback = None
        if isinstance(error, WorkloadError):
            traceback = error.traceback
        if isinstance(error, OptionError):
            stage = "options"
        return cls(
            stage=stage, message=error.message, hint=error.hint, traceback=traceback
        )

    @property
    def text(self) -> str:
        """The message, the hint and the traceback, each on lines of its own."""
        return "\n".join(
            part for part in (self.message, self.hint, self.traceback) if part
        )


class Introduction(Message, frozen=True):
    """The base of what a process says first; `token` shows that it belongs to those that are waited for."""

    token: str


class Connection:
    """A socket, and what came through it that no line has taken yet."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.said = b""

    def send(self, message: Message) -> None:
        """Send a message; if the other side has gone, reading its answer will show it."""
        with contextlib.suppress(OSError):
            self.channel.sendall(encode(message) + b"\n")

    def receive(self) -> bool:
        """Read what has come; return False if the other side has closed it."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.channel.recv(1 << 20)
        self.said += data
        return bool(data)

    def introduction(
        self, kind: type[IntroductionT], token: str
    ) -> IntroductionT | None:
        """Return the first message; None if it is of another kind, or has another token."""
        try:
            introduction = msgspec.json.decode(self.line() or b"", type=kind)
        except MALFORMED:
            return None
        if not hmac.compare_digest(introduction.token.encode(), token.encode()):
            return None
        return introduction

    def wait_for_line(self, deadline: float | None) -> bytes | None:
        """Return the next line once it is complete; None if the other side closes before, or the time is over."""
        while b"\n" not in self.said:
            seconds = -1.0
            if deadline is not None:
                seconds = max(0.0, deadline - time.monotonic())
            if len(self.said) > _LONGEST_LINE_BYTES or not ready(
                [self.channel], seconds
            ):
                return None
            if not self.receive():
                return None
        return self.line()

    def line(self) -> bytes | None:
        """Return the next whole line; None before it is complete."""
        line, newline, rest = self.said.partition(b"\n")
        if not newline:
            return None
        self.said = rest
        return line


class Entrance:
    """Where processes connect that have not said who they are: one that says nothing keeps no other waiting."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._strangers: dict[int, Connection] = {}

    def greeted(self, seconds: float) -> list[Connection]:
        """Return the connections that have said a line, or have ended, after at most this time."""
        greeted = []
        for number in ready([self._listener, *self._strangers], seconds):
            stranger = self._strangers.get(number)
            if stranger is None:
                channel, _ = self._listener.accept()
                self._strangers[channel.fileno()] = Connection(channel)
                continue
            is_open = stranger.receive()
            said = stranger.said
            if not is_open or b"\n" in said or len(said) > _LONGEST_LINE_BYTES:
                greeted.append(self._strangers.pop(number))
        if len(self._strangers) > _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).channel.close()
        return greeted

    def close(self) -> None:
        """Turn away those who have said nothing."""
        for stranger in self._strangers.values():
            stranger.channel.close()


class WorkerLost(Exception):
    """The worker process did not answer; `str` of it continues "the worker process".

    The outcome is `oom` if the kernel's OOM killer ended it, or an allocation failed where C++ can't raise. `output` is
    the end of what it printed; if it hangs, its stack as `user_stack` writes it.
    """

    def __init__(
        self, outcome: Literal["timeout", "oom", "crash"], how: str, output: str = ""
    ) -> None:
        super().__init__(how)
        self.outcome = outcome
        self.output = output

    @property
    def place(self) -> str:
        """Where it hangs, to end a sentence; empty if that is not known."""
        if not self.output:
            return ""
        return f"; it hangs at {last_frame(self.output)}"


def tail(output: str, lines: int) -> str:
    """Return the last lines of a worker's output; torchrun's own only where there are no others."""
    own = without_torchrun(output) or output.rstrip()
    return "\n".join(own.splitlines()[-lines:])


def without_torchrun(output: str) -> str:
    """Return a worker's output without torchrun's banner, and before its report of the processes that it ended."""
    own = _TORCHRUN_REPORT.split(output, maxsplit=1)[0]
    return _TORCHRUN_BANNER.sub("", own).rstrip()


class Nursery:
    """The worker processes of one supervisor, one at a time, each with its channel and the end of its output.

    They are forked from a process that has PyTorch (`processes.nursery`), which starts with the first worker, and again
    after `close` or if something has killed it. They run `module`, answer with the union of types `replies`, and get
    the variables `environment`. What they need in addition is imported before: `imports`.
    """

    def __init__(
        self,
        module: str,
        replies: Any,
        environment: Mapping[str, str],
        imports: Sequence[str] = ("torch",),
    ) -> None:
        self._module = module
        self._imports = imports
        self._environment = environment
        self._replies = msgspec.json.Decoder(replies)
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_code: int | None = None

    def start_worker(self) -> None:
        """Start a worker, after the last one has ended."""
        if sys.platform != "linux":
            raise ProbeError(
                "measuring needs Linux, to limit the memory of its worker and to end all that the worker starts",
                "Measure on Linux. Other commands run here.",
            )
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._oom_kills = oom_kills()
        self._exit_code = None
        channel, worker_end = socket.socketpair()
        self._connection = Connection(channel)
        output, writing = os.pipe()
        # The worker's, too, wherever the nursery was started.
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        # It was just killed.
        with (
            worker_end,
            contextlib.suppress(BrokenPipeError, ConnectionResetError),
        ):
            socket.send_fds(
                self._control, [b"start"], [worker_end.fileno(), writing, folder]
            )
        os.close(writing)
        os.close(folder)
        self._listen(_IMPORTING_SECONDS)  # it answers `started`
        self._output = bytearray()
        self._reader = threading.Thread(
            target=drain, args=[output, self._output], daemon=True
        )
        self._reader.start()

    def ask(
        self, request: Message, kinds: tuple[type[AnswerT], ...], timeout_seconds: float
    ) -> AnswerT:
        """Send the worker a request, and wait for a reply of these kinds. Raises WorkerLost if none comes in time."""
        connection = self._connection
        if not connection.said and ready([connection.channel], 0):
            connection.receive()
        said = connection.said
        if not said:  # else something came though nothing was asked
            connection.send(request)
            self._wait_for_line(time.monotonic() + timeout_seconds)
            said = connection.line() or connection.said
            with contextlib.suppress(*MALFORMED):
                if isinstance(reply := self._replies.decode(said), kinds):
                    return reply
        raise WorkerLost(
            "crash",
            f"said {said[:100]!r} over its channel to batchtune: your code writes to files that are not its own",
        )

    def output(self) -> str:
        """Return the end of the worker's output."""
        return bytes(self._output).decode(errors="replace")

    def end_worker(self) -> None:
        """Kill the worker and all that it started."""
        self._connection.channel.close()
        if self._ended() is None:
            with contextlib.suppress(OSError):
                self._control.send(b"end")
        if self._ended(_CLEARING_SECONDS) is None:  # it does not even answer
            self._give_up()
        self._reader.join(timeout=1)

    def close(self) -> None:
        """End the process that workers are forked from."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self.close()
        self._control, nursery_end = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        with nursery_end:
            self._process = subprocess.Popen(
                processes.command(
                    "batchtune.processes.nursery",
                    nursery_end.fileno(),
                    os.getpid(),
                    self._module,
                    *self._imports,
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[nursery_end.fileno()],
                env={
                    **os.environ,
                    **self._environment,
                    "PYTHONUNBUFFERED": "1",
                    MARK: self._mark,
                },
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
            )

    def _ended(self, seconds: float = 0.0) -> int | None:
        """Return the worker's exit code, if within the time it has ended, and all that it started."""
        if self._exit_code is None:
            self._listen(seconds)
        return self._exit_code

    def _listen(self, seconds: float) -> None:
        """Handle a message of the nursery, if one comes within the time."""
        if not ready([self._control], seconds):
            return
        said = b""
        with contextlib.suppress(ConnectionResetError):
            said = self._control.recv(64)
        if not said:  # it was killed, and the worker with it
            self._give_up()
        elif said != b"started":
            self._exit_code = int(said)

    def _give_up(self) -> None:
        """Kill the nursery and all processes that carry its mark."""
        self.close()
        self._exit_code = -signal.SIGKILL
        deadline = time.monotonic() + _KILLING_SECONDS
        while time.monotonic() < deadline:
            every = psutil.process_iter(["environ"])
            marked = [
                process
                for process in every
                if (process.info["environ"] or {}).get(MARK) == self._mark
            ]
            if not marked:
                return
            for process in marked:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)

    def _wait_for_line(self, deadline: float) -> None:
        connection = self._connection
        while (
            b"\n" not in connection.said and len(connection.said) < _LONGEST_REPLY_BYTES
        ):
            # First look whether it has ended, then read: its last words are read even then.
            ended = self._ended() is not None
            readable = ready([connection.channel], 0 if ended else _POLL_SECONDS)
            if readable and connection.receive():
                continue
            # A child of the workload's may hold the channel open after the worker has gone.
            if readable or ended:
                self._died()
            if time.monotonic() > deadline:
                raise WorkerLost("timeout", "hangs", self._stack())

    def _stack(self) -> str:
        """Return where the worker is now, printed by a handler in C that needs neither Python's lock nor an answer."""
        printed = self.output().count(OUTERMOST_FRAME)
        if self._ended() is None:
            with contextlib.suppress(OSError):
                self._control.send(b"stack")
        deadline = time.monotonic() + _STACK_SECONDS
        while (
            self.output().count(OUTERMOST_FRAME) == printed
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        return user_stack(self.output())

    def _died(self) -> NoReturn:
        code = self._ended(_ENDING_SECONDS)
        if code is None:
            raise WorkerLost(
                "crash",
                "closed its channel to batchtune: your code closes files that are not its own",
            )
        self._reader.join(timeout=1)
        output = self.output()
        outcome, how = judged_end(code, output, self._oom_kills)
        raise WorkerLost(outcome, how, output)


def judged_end(
    code: int, output: str, oom_kills_before: int | None
) -> tuple[Literal["oom", "crash"], str]:
    """Judge how a process ended: whether it was out of memory, and in words that continue "the worker process".

    `output` is the end of what it printed, `oom_kills_before` what `oom_kills` returned when it started.
    """
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by signal {-code}"
        with contextlib.suppress(ValueError):
            how = f"was killed by {signal.Signals(-code).name}"
    out_of_memory = (
        (
            code == -signal.SIGABRT
            and ("bad_alloc" in output or "annot allocate memory" in output)
        )
        # Python's own last word, where no memory was left even to report the lack of it.
        or (code == 1 and output.rstrip().rpartition("\n")[2].startswith("MemoryError"))
        or (code == -signal.SIGKILL and _has_oom_killed(oom_kills_before))
    )
    return "oom" if out_of_memory else "crash", how


def _has_oom_killed(before: int | None) -> bool:
    """Return whether the OOM killer has struck since; if the kernel does not count, assume it has."""
    now = oom_kills()
    if before is None or now is None:
        return before is now
    return now > before


def drain(stream: int, output: bytearray, copy: int | None = None) -> None:
    """Keep the end of what a worker prints, until it ends; write all of it to the descriptor `copy`, too."""
    while data := os.read(stream, 65536):
        output += data
        del output[:-_OUTPUT_KEPT_BYTES]
        if copy is not None:
            with contextlib.suppress(OSError):
                os.write(copy, data)
    os.close(stream)


def oom_kills() -> int | None:
    """Return how many processes the kernel's OOM killer has ended on this machine, in containers too.

    Only growth means anything; None where the kernel does not count (before Linux 4.13).
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def serve(channel: int, requests: Any, answer: Callable[[Any], Message]) -> NoReturn:
    """Answer requests of this type until the supervisor closes the socket `channel`; then end this process.

    What the user's code prints goes to the standard streams. On SIGUSR2 the process prints its stack. No finalizer runs
    at the end: it may hang, and the nursery ends what is left.
    """
    decode = msgspec.json.Decoder(requests).decode
    connection = socket.socket(fileno=channel)
    connection.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    # To see where it hangs; to a copy of the stream, because the user's code may close or replace the stream.
    faulthandler.register(signal.SIGUSR2, file=os.dup(2), all_threads=False)
    with connection, connection.makefile("rb") as lines:
        for line in lines:
            connection.sendall(encode(answer(decode(line))) + b"\n")
    os._exit(0)
