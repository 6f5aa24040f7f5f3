"""The ranks of one training, each with a socket of its own to the process that leads them.

The sockets are outside the process group, so one rank's failure is known while others wait for it in a collective. A
rank begins with a `Hello`, then answers requests; in the middle of one it may ask what all ranks say (`Vote`). The
number of steps, and whatever else says which collective comes next, is decided like that: decided by each rank for
itself, it would leave one waiting for another forever.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from batchtune.probe.requests import Decision, Hello, Reply, Vote
from batchtune.probe.verdicts import cause_of
from batchtune.processes.nursery import ready
from batchtune.processes.worker import (
    Connection,
    Entrance,
    Failed,
    Message,
    judged_end,
    oom_kills,
    tail,
    without_torchrun,
)
from batchtune.results import MALFORMED
from batchtune.workloads.loading import last_frame, user_stack

# How long other ranks may take to fail too, once one has: what they wait for never comes.
_GRACE_SECONDS = 1.0
# The same after a lost connection: the rank that was lost has a reason, which may take longer to come.
_SECONDARY_SECONDS = 5.0
# How much slower a step may be on other ranks than on one that caught an out-of-memory error in it.
_CAUGHT_SECONDS = 10.0
_POLL_SECONDS = 0.2
# How long ranks that hang may take to print their stacks, and a process that closed its socket to end.
_STACK_SECONDS = 2.0
_PAUSE_SECONDS = 0.1  # within a stack, which is printed at once
_ENDING_SECONDS = 1.0

_PACKAGE = Path(__file__).parents[1]
_INNERMOST_FRAME = re.compile(r'^  File "([^"]+)"', re.MULTILINE)
_decode = msgspec.json.Decoder[Reply | Vote](Reply | Vote).decode


class Ranks:
    """The connections to all ranks.

    They connect to `listener` with this `token`. Without a `world_size` they are as many as the first one says.
    `output` returns the end of what they printed, `oom_kills` is the number of the kernel's OOM kills when they
    started.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        world_size: int | None,
        output: Callable[[], str],
        oom_kills: int | None,
    ) -> None:
        self._listener = listener
        self._token = token
        self.world_size = world_size
        self._output = output
        self._oom_kills = oom_kills
        self._connections: dict[int, Connection] = {}
        self._hellos: dict[int, Hello] = {}

    @property
    def connected(self) -> list[int]:
        """The ranks that have connected."""
        return sorted(self._connections)

    def accept(
        self,
        timeout_seconds: float,
        has_ended: Callable[[], bool],
        apart_seconds: float = math.inf,
    ) -> bool:
        """Wait until every rank has connected, or one of them says, without being asked, why it failed.

        Return False if what starts them ends before, or time is over: in all, or after the first one.
        """
        deadline = time.monotonic() + timeout_seconds
        entrance = Entrance(self._listener)
        with contextlib.closing(entrance):
            while len(self._connections) != self.world_size:
                if has_ended() or time.monotonic() > deadline:
                    return False
                if self._has_failed():
                    return True
                for connection in entrance.greeted(_POLL_SECONDS):
                    if self._welcome(connection):
                        deadline = min(deadline, time.monotonic() + apart_seconds)
                    else:
                        connection.channel.close()
        return True

    def _has_failed(self) -> bool:
        """Return whether a rank has said something already."""
        for connection in self._connections.values():
            if ready([connection.channel], 0):
                connection.receive()
        return any(connection.said for connection in self._connections.values())

    def _welcome(self, connection: Connection) -> bool:
        """Keep the connection of a rank; return whether it is one."""
        hello = connection.introduction(Hello, self._token)
        if hello is None or self.world_size not in (None, hello.world_size):
            return False
        self.world_size = hello.world_size
        self._connections[hello.rank] = connection
        self._hellos[hello.rank] = hello
        return True

    @property
    def missing(self) -> list[int]:
        """The ranks that have not connected."""
        ranks = range(self.world_size or 0)
        return [rank for rank in ranks if rank not in self._connections]

    def send(self, message: Message) -> None:
        """Send all ranks a message."""
        for connection in self._connections.values():
            connection.send(message)

    def gather(
        self, timeout_seconds: float, spent_seconds: float = 0.0
    ) -> dict[int, Reply]:
        """Return all ranks' replies, in the order in which they came; count their votes meanwhile.

        Once one has failed, the others have only a short time left: they wait for it in vain. A rank whose process has
        ended is a failure like any other, and so is one that did not answer in time.
        """
        replies: dict[int, Reply] = {}
        votes: dict[int, Vote] = {}
        deadline = time.monotonic() + timeout_seconds - spent_seconds
        end = deadline
        while True:
            if len(votes) == self.world_size:
                self.send(Decision(value=max(vote.value for vote in votes.values())))
                votes.clear()
                end = deadline
            awaited = self._connections.keys() - votes.keys() - replies.keys()
            seconds = end - time.monotonic()
            if not awaited or seconds <= 0:
                break
            for rank in self._speaking(awaited, min(seconds, _POLL_SECONDS)):
                message = self._message(rank)
                if isinstance(message, Vote):
                    votes[rank] = message
                elif message is not None:
                    replies[rank] = message
                end = min(end, time.monotonic() + _patience(message))
        for rank, vote in votes.items():
            if vote.caught is not None:
                text = f"caught by the workload, and other ranks waited for that step: {vote.caught}"
                replies[rank] = Failed(message=text, outcome="oom")
        if not any(map(cause_of, replies.values())):
            silent = self._connections.keys() - replies.keys()
            replies |= self._hanging(sorted(silent), timeout_seconds)
        return replies

    def _speaking(self, ranks: Iterable[int], seconds: float) -> list[int]:
        """Return those of the ranks that have said something, or ended, within the time."""
        connections = {rank: self._connections[rank] for rank in ranks}
        several = [rank for rank in ranks if b"\n" in connections[rank].said]
        if several:  # lines that came at once
            return several
        numbers = {
            connection.channel.fileno(): rank
            for rank, connection in connections.items()
        }
        return [numbers[number] for number in ready([*numbers], seconds)]

    def _message(self, rank: int) -> Reply | Vote | None:
        """Return what a rank says; None if it is not complete yet."""
        connection = self._connections[rank]
        is_open = b"\n" in connection.said or connection.receive()
        line = connection.line()
        if line is None:
            return None if is_open else self._end_of(rank)
        try:
            message: Reply | Vote = _decode(line)
        except MALFORMED:
            text = f"said {line[:100]!r} over its channel to batchtune: your code writes to files that are not its own"
            return Failed(message=text, outcome="crash")
        return message

    def _end_of(self, rank: int) -> Failed:
        """Judge how a rank's process has ended whose socket is closed; how that of another node did is not known."""
        hello = self._hellos[rank]
        if hello.node_rank > 0 or hello.host != socket.gethostname():
            return Failed(
                message=f"its process on node {hello.node_rank} ({hello.host}) ended",
                outcome="crash",
                hint="The output of that node may say why.",
            )
        process = hello.pid
        code = _exit_code(process)
        others = rf"^\[rank(?!{rank}\])\d+\]:.*\n?"  # as torch marks what they print
        output = re.sub(others, "", self._output(), flags=re.MULTILINE)
        output = without_torchrun(output)
        outcome: Literal["oom", "crash"] = "crash"
        how = "ended"
        if code is not None:
            outcome, how = judged_end(code, output, self._oom_kills)
        elif process is not None and Path(f"/proc/{process}").exists():
            how = "closed its channel to batchtune: your code closes files that are not its own"
        elif self._oom_kills is not None and oom_kills() != self._oom_kills:
            outcome = "oom"  # torchrun has taken its exit code
        message = f"its process {how}"
        if output:
            message += f": {tail(output, lines=3)}"
        return Failed(
            message=message,
            outcome=outcome,
            hint="Its last output may say why. If something outside kills it (a job's or a container's limit), it "
            "needs less memory or time, or a higher limit there.",
            traceback=tail(output, lines=12) or None,
        )

    def _hanging(
        self, ranks: Sequence[int], timeout_seconds: float
    ) -> dict[int, Reply]:
        """Return the failures of ranks that did not answer in time; those that wait for others are left out.

        A rank waits if its innermost frame is torch's, unless all do.
        """
        printed = self._stacks(ranks)
        hanging = [rank for rank in ranks if not _waits(printed[rank])] or ranks
        failures: dict[int, Reply] = {}
        for rank in hanging:
            message = f"no answer within {timeout_seconds:g} s"
            stack = user_stack(printed[rank])
            if _has_left(printed[rank]):
                stack = ""
                message += "; it has left its step, and other ranks have not"
                for other in ranks:
                    other_stack = user_stack(printed[other])
                    if other not in hanging and other_stack:
                        message += f": rank {other} waits at {last_frame(other_stack)}"
                        break
            elif stack:
                message += f"; it hangs at {last_frame(stack)}"
            failures[rank] = Failed(
                message=message,
                outcome="timeout",
                hint="If it needs longer, to download or to compile, allow that with --setup-timeout SECONDS.",
                traceback=stack or None,
            )
        return failures

    def _stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return where these ranks are now, each printed through its own socket by a handler in C."""
        stacks = {}
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._connections[rank].channel.send(b"!", socket.MSG_OOB)
        deadline = time.monotonic() + _STACK_SECONDS
        for rank in ranks:
            connection = self._connections[rank]
            seconds = max(_PAUSE_SECONDS, deadline - time.monotonic())
            while ready([connection.channel], seconds) and connection.receive():
                seconds = _PAUSE_SECONDS
            stacks[rank] = connection.said.decode(errors="replace")
        return stacks

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.channel.close()


def _patience(message: Reply | Vote | None) -> float:
    """Return how long to wait for other ranks after a message, in seconds."""
    if isinstance(message, Vote) and message.caught is not None:
        return _CAUGHT_SECONDS
    if message is None or isinstance(message, Vote):
        return math.inf
    by_cause = {None: math.inf, "secondary": _SECONDARY_SECONDS}
    return by_cause.get(cause_of(message), _GRACE_SECONDS)


def _waits(stack: str) -> bool:
    """Return whether the innermost frame is torch's own, which waits for other ranks or for the device."""
    innermost = _INNERMOST_FRAME.search(stack)
    return innermost is not None and "torch" in Path(innermost[1]).parts


def _has_left(stack: str) -> bool:
    """Return whether the rank is done with its step: it reads what batchtune says over its socket."""
    files = [Path(name) for name in _INNERMOST_FRAME.findall(stack)[:2]]
    if len(files) < 2:
        return False
    reader, caller = files
    return reader.name == "socket.py" and _PACKAGE in caller.parents


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
