"""The ranks of one training, each with a socket of its own to the process that leads them.

The sockets are outside the process group, so one rank's failure is known while others wait for it in a collective. A
rank begins with a `Hello`, then answers requests; in the middle of one it may ask what all ranks say (`Vote`). The
number of steps, and whatever else says which collective comes next, is decided like that: decided by each rank for
itself, it would leave one waiting for another forever.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from batchtune.probe.requests import Decision, Hello, Reply, Vote
from batchtune.probe.verdicts import Cause, Ended, Gathered, cause_of
from batchtune.processes.nursery import ready
from batchtune.processes.worker import OUTERMOST_FRAME, Message, encode, judged_end

# How long other ranks may take to fail too, once one has: what they wait for never comes.
_GRACE_SECONDS = 1.0
# The same after a lost connection: the rank that was lost has a reason, which may take longer to come.
_SECONDARY_SECONDS = 5.0
# How much slower a step may be on other ranks than on one that caught an out-of-memory error in it.
_CAUGHT_SECONDS = 10.0
_POLL_SECONDS = 0.2
# How long ranks that hang may take to print their stacks, and a process that closed its socket to end.
_STACK_SECONDS = 2.0
_ENDING_SECONDS = 1.0

_decode = msgspec.json.Decoder[Reply | Vote](Reply | Vote).decode
_decode_hello = msgspec.json.Decoder(Hello).decode


class Connection:
    """A socket, and what came through it that no line has taken yet."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.said = b""

    def receive(self) -> bool:
        """Read what has come; return False if the other side has closed it."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.channel.recv(1 << 20)
        self.said += data
        return bool(data)

    def line(self) -> bytes | None:
        """Return the next whole line; None before it is complete."""
        line, newline, rest = self.said.partition(b"\n")
        if not newline:
            return None
        self.said = rest
        return line


class Ranks:
    """The connections to all ranks.

    They connect to `listener` with this `token`. `output` returns the end of what they printed, `oom_kills` is the
    number of the kernel's OOM kills when they started.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        world_size: int,
        output: Callable[[], str],
        oom_kills: int | None,
    ) -> None:
        self._listener = listener
        self._token = token
        self._world_size = world_size
        self._output = output
        self._oom_kills = oom_kills
        self._connections: dict[int, Connection] = {}
        self._hellos: dict[int, Hello] = {}

    def accept(self, timeout_seconds: float, has_ended: Callable[[], bool]) -> bool:
        """Wait until every rank has connected; return False if what starts them ends before, or time is over."""
        deadline = time.monotonic() + timeout_seconds
        strangers: dict[int, Connection] = {}
        while len(self._connections) < self._world_size:
            if has_ended() or time.monotonic() > deadline:
                return False
            for number in ready([self._listener, *strangers], _POLL_SECONDS):
                if number == self._listener.fileno():
                    channel, _ = self._listener.accept()
                    strangers[channel.fileno()] = Connection(channel)
                    continue
                stranger = strangers[number]
                is_open = stranger.receive()
                line = stranger.line()
                if line is not None or not is_open:
                    del strangers[number]
                    self._welcome(stranger, line or b"")
        for stranger in strangers.values():
            stranger.channel.close()
        return True

    def _welcome(self, connection: Connection, line: bytes) -> None:
        """Keep the connection of a rank; close any other."""
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            hello = _decode_hello(line)
            is_ours = hmac.compare_digest(hello.token, self._token)
            if is_ours and hello.world_size == self._world_size:
                if connection.channel.family != socket.AF_UNIX:
                    connection.channel.setsockopt(
                        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
                    )
                self._connections[hello.rank] = connection
                self._hellos[hello.rank] = hello
                return
        connection.channel.close()

    def send(self, message: Message) -> None:
        """Send all ranks a message."""
        line = encode(message) + b"\n"
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # it has ended: `gather` notices
                connection.channel.sendall(line)

    def gather(self, timeout_seconds: float) -> Gathered:
        """Wait for all ranks' replies, and count their votes meanwhile.

        Once one has failed, the others have only a short time left: they wait for it in vain.
        """
        gathered = Gathered(self._world_size)
        votes: dict[int, Vote] = {}
        deadline = time.monotonic() + timeout_seconds
        end = deadline
        while True:
            if len(votes) == self._world_size:
                self.send(Decision(value=max(vote.value for vote in votes.values())))
                votes.clear()
                end = deadline
            awaited = [
                rank
                for rank in range(self._world_size)
                if rank not in (votes | gathered.replies | gathered.ended)
            ]
            seconds = end - time.monotonic()
            if not awaited or seconds <= 0:
                break
            for rank in self._readable(awaited, min(seconds, _POLL_SECONDS)):
                message = self._message(rank)
                if isinstance(message, Vote):
                    votes[rank] = message
                elif isinstance(message, Ended):
                    gathered.ended[rank] = message
                elif message is not None:
                    gathered.replies[rank] = message
                end = min(end, time.monotonic() + _patience(message))
        for rank, vote in votes.items():
            if vote.caught is not None:
                gathered.caught[rank] = vote.caught
        if awaited and not gathered.causes:
            gathered.stacks = self._stacks(awaited)
        return gathered

    def _readable(self, ranks: Iterable[int], seconds: float) -> list[int]:
        """Return those of the ranks that have said something, or ended, within the time."""
        numbers = {
            self._connections[rank].channel.fileno(): rank
            for rank in ranks
            if b"\n" not in self._connections[rank].said
        }
        said = [
            rank for rank in ranks if b"\n" in self._connections[rank].said
        ]  # more than one line came at once
        return said or [numbers[number] for number in ready([*numbers], seconds)]

    def _message(self, rank: int) -> Reply | Vote | Ended | None:
        """Return what a rank says; None if it is not complete yet."""
        connection = self._connections[rank]
        is_open = b"\n" in connection.said or connection.receive()
        line = connection.line()
        if line is not None:
            try:
                message: Reply | Vote = _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return Ended(
                    "crash",
                    f"said {line[:100]!r} over its channel to batchtune: your code writes to files that are not its "
                    "own",
                )
            return message
        return None if is_open else self._end_of(self._hellos[rank].pid)

    def _end_of(self, process: int) -> Ended:
        """Judge how a process has ended whose socket is closed."""
        code = _exit_code(process)
        output = self._output()
        if code is None:
            how = "ended"
            if Path(f"/proc/{process}").exists():
                how = "closed its channel to batchtune: your code closes files that are not its own"
            return Ended("crash", how, output)
        outcome, how = judged_end(code, output, self._oom_kills)
        return Ended(outcome, how, output)

    def _stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return where these ranks are now, each printed through its own socket by a handler in C."""
        stacks = {}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._hellos[rank].pid, signal.SIGUSR2)
        deadline = time.monotonic() + _STACK_SECONDS
        for rank in ranks:
            connection = self._connections[rank]
            while (seconds := deadline - time.monotonic()) > 0:
                if OUTERMOST_FRAME.encode() in connection.said:
                    break
                if ready([connection.channel], seconds) and not connection.receive():
                    break
            stacks[rank] = connection.said.decode(errors="replace")
        return stacks

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.channel.close()


def _patience(message: Reply | Vote | Ended | None) -> float:
    """Return how long to wait for other ranks after a message, in seconds."""
    if isinstance(message, Ended):
        return _GRACE_SECONDS
    if isinstance(message, Vote):
        return float("inf") if message.caught is None else _CAUGHT_SECONDS
    cause: Cause | None = None
    if message is not None:
        cause = cause_of(message)
    if cause is None:
        return float("inf")
    return _SECONDARY_SECONDS if cause == "secondary" else _GRACE_SECONDS


def _exit_code(process: int) -> int | None:
    """Return the exit code of a process that is ending; None if its parent has taken it already (man 5 proc)."""
    deadline = time.monotonic() + _ENDING_SECONDS
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            stat = Path(f"/proc/{process}/stat").read_text()
            fields = stat.rpartition(")")[2].split()
            if fields[0] == "Z":
                return os.waitstatus_to_exitcode(int(fields[-1]))
            time.sleep(0.002)
    return None
