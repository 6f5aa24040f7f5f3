"""The ranks of one training, each with a socket of its own to the process that leads them.

The sockets are outside the process group, so one rank's failure is known while others wait for it
in a collective. A rank begins with a `Hello`, then answers requests; in the middle of one it may
ask what all ranks say (`Vote`). The number of steps, and whatever else says which collective comes
next, is decided like that: if each rank decided for itself, one might wait for another forever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn

import msgspec
from msgspec.structs import replace

from batchtune.probe.devices import backend_for
from batchtune.probe.requests import (
    Decision,
    Describe,
    Described,
    Hello,
    Prepare,
    Ran,
    Ready,
    Reply,
    Request,
    RunTrial,
    Vote,
)
from batchtune.probe.worker import Worker
from batchtune.processes import import_for_good
from batchtune.processes.nursery import ready
from batchtune.processes.pool import die_with_parent, total_memory
from batchtune.processes.worker import (
    Connection,
    Entrance,
    Failed,
    Message,
    encode,
    judged_end,
    oom_kills,
    tail,
    without_torchrun,
)
from batchtune.results import (
    MALFORMED,
    Device,
    Outcome,
    ProbedWith,
    RankDevice,
    Trial,
    Twin,
)
from batchtune.workloads import last_frame, user_stack

if TYPE_CHECKING:
    from batchtune.probe.devices import Meter
    from batchtune.workloads import Workload

# One reply of all ranks' replies: the worst of what they measured, or the failure that explains the others.
#
# When one rank fails, the others fail because of it, or wait for it. By precedence: some rank ran out of memory; some
# rank raised an error of its own; some rank's process ended; a rank lost its connection to another one; one did not
# answer in time. Of several, the first that said so counts.

# Cause of a failure → its outcome, by precedence.
_OUTCOMES: dict[str, Outcome] = {
    "oom": "oom",
    "error": "error",
    "crash": "crash",
    "secondary": "crash",
    "timeout": "timeout",
}
# What a rank says when another one has gone: gloo, NCCL, and the store of the rendezvous.
_SECONDARY = re.compile(
    r"Connection (closed by|reset by|refused)|Broken pipe|Socket closed|Timed out waiting|Application timeout"
    r"|NCCL remote process|ncclRemoteError|unhandled system error|ncclSystemError|DistNetworkError|DistStoreError"
    r"|TCPStore|DistBackendError"
)
# How torch marks the lines of a rank's traceback, and torchrun reports how each rank has ended.
_RANKS_LINE = re.compile(r"^\[rank(\d+)\]: (.*)$", re.MULTILINE)
_RANKS_END = re.compile(r"^ +rank +: (\d+) .*\n +exitcode +: (-?\d+)", re.MULTILINE)
# The largest of any rank counts.
_OF_TRIALS = (
    "step_seconds",
    "mean_step_seconds",
    "step_seconds_spread",
    "peak_bytes",
    "reserved_bytes",
    "alloc_retries",
    "held_bytes",
    "rest_bytes",
    "outside_bytes",
    "steady_peak_bytes",
    "peak_spread_bytes",
    "other_processors",
    "compilations",
    "at_recompile_limit",
)
# Facts about the script's batches that must agree on every rank.
_LEARNED = (
    "batches",
    "per_unit",
    "offset",
    "target_per_unit",
    "target_offset",
    "accumulation",
    "look_ahead",
)
_OF_DEVICES = (
    "outside_bytes",
    "other_processes",
    "load_average",
    "other_processors",
)


def cause_of(reply: Reply) -> str | None:
    """Return why a rank's reply is a failure; None if it is none."""
    if isinstance(reply, Ran):
        outcome: str = reply.trial.outcome
        text = reply.trial.error or ""
    elif isinstance(reply, Failed):
        outcome = reply.outcome
        text = reply.message
    else:
        return None
    if outcome == "error" and _SECONDARY.search(text):
        return "secondary"
    if outcome in _OUTCOMES:
        return outcome
    return None


def first_to_end(output: str) -> tuple[str, str] | None:
    """Return which of several ranks ended first, and the lines that it printed; None if the output does not show it.

    It is the output of a command that has ended before its ranks could say anything else. A rank that lost its
    connection to another one ended later, as did one that torchrun terminated.
    """
    lines_by_rank: dict[str, list[str]] = {}
    for rank, line in _RANKS_LINE.findall(output):
        lines_by_rank.setdefault(rank, []).append(line)
    for rank, lines in lines_by_rank.items():
        text = "\n".join(lines)
        if not _SECONDARY.search(text):
            return f"rank {rank} ended first", text
    for rank, code in _RANKS_END.findall(output):
        if rank not in lines_by_rank and int(code) != -signal.SIGTERM:
            _, how = judged_end(int(code), "", None)
            return f"rank {rank} ended first: its process {how}", output
    return None


def merged(
    replies: Mapping[int, Reply],
    request: Prepare | Describe | RunTrial,
    world_size: int | None,
) -> Reply:
    """Return one reply to a request that all ranks got, of theirs by rank, in the order in which they came."""
    causes: dict[int, str] = {}
    for rank, reply in replies.items():
        cause = cause_of(reply)
        if cause is not None:
            causes[rank] = cause
    if not causes:
        return _passed([replies[rank] for rank in sorted(replies)])
    first = next(cause for cause in _OUTCOMES if cause in causes.values())
    rank = next(rank for rank, cause in causes.items() if cause == first)
    reply = replies[rank]
    outcome = _OUTCOMES[first]
    if not isinstance(request, RunTrial):
        assert isinstance(reply, Failed)
        alike = [other for other in replies.values() if other == reply]
        message = reply.message
        if len(alike) != world_size:
            message = f"rank {rank}: {message}"
        return replace(reply, stage=reply.stage or "setup", message=message)
    if isinstance(reply, Failed):
        reply = Ran(trial=Trial.of(request.shape, outcome, error=reply.message))
    assert isinstance(reply, Ran)
    trial = replace(
        reply.trial,
        outcome=outcome,
        error=f"rank {rank}: {reply.trial.error}",
        rank=rank,
        oom_ranks=sorted(rank for rank in causes if causes[rank] == "oom"),
    )
    return replace(reply, trial=trial, renew=True)


def _passed(replies: Sequence[Reply]) -> Reply:
    """Return the worst of what the ranks measured, or of their devices; or what rank 0 has described or recorded."""
    if isinstance(replies[0], Described):
        return replies[0]
    readies = [reply for reply in replies if isinstance(reply, Ready)]
    if readies:
        devices = [ready.device for ready in readies]
        return _different_scripts(devices) or Ready(
            device=_merged_device(devices), packed=readies[0].packed
        )
    rans = [reply for reply in replies if isinstance(reply, Ran)]
    return Ran(
        trial=_merged_trial([ran.trial for ran in rans]),
        renew=any(ran.renew for ran in rans),
        recorded=rans[0].recorded,
    )


def _different_scripts(devices: Sequence[Device]) -> Failed | None:
    """Return the error if ranks have not learned the same of their batches: they would be given different ones."""
    for rank, device in enumerate(devices):
        for name in _LEARNED:
            here = getattr(devices[0].script, name, None)
            there = getattr(device.script, name, None)
            if here != there:
                return Failed(
                    message=f"rank {rank} has learned something else about the script's batches than rank 0: {name} = "
                    f"{there}, on rank 0 {here}",
                    hint="Each rank learns from its own data set: give all the same examples, or a stream of examples "
                    "that are alike.",
                )
    return None


def _merged_trial(trials: Sequence[Trial]) -> Trial:
    """Return a trial of which no rank was slower or took more."""
    peaks = [trial.peak_bytes or 0 for trial in trials]
    reasons: set[str] = set()
    for trial in trials:
        reasons.update(trial.throttle_reasons or ())
    changes = {trial.parameters_changed for trial in trials}
    changed = True in changes or (None if None in changes else False)
    return replace(
        trials[0],
        **{name: _largest(trials, name) for name in _OF_TRIALS},
        sm_clock_mhz=min(_known(trials, "sm_clock_mhz"), default=None),
        throttle_reasons=trials[0].throttle_reasons and sorted(reasons),
        parameters_changed=changed,
        rank=peaks.index(max(peaks)),
        oom_ranks=[],
    )


def _merged_device(devices: Sequence[Device]) -> Device:
    """Return a device of which every rank has at least as much; each rank's own is in its `ranks`."""
    first = devices[0]
    ranks: list[RankDevice] = []
    twins: list[Twin] = []
    for device in devices:
        ranks += device.ranks
        if device.script is not None:
            twins += device.script.twins
    script = first.script
    if script is not None:
        script = replace(script, twins=twins)
    return replace(
        first,
        **{name: _largest(devices, name) for name in _OF_DEVICES},
        total_bytes=min(device.total_bytes for device in devices),
        limit_bytes=min(device.limit_bytes for device in devices),
        free_bytes=min(_known(devices, "free_bytes"), default=None),
        ranks=ranks,
        nnodes=max(first.nnodes, len({rank.host for rank in ranks})),
        script=script,
    )


def _largest(records: Iterable[Trial | Device], name: str) -> Any:
    return max(_known(records, name), default=None)


def _known(records: Iterable[Trial | Device], name: str) -> list[Any]:
    """Return a field of each record where it is known."""
    values = [getattr(record, name) for record in records]
    return [value for value in values if value is not None]


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

    They connect to `listener` with this `token`. Without a `world_size`, the first rank says how
    many there are. `output` returns the end of what they printed, `oom_kills` is the number of the
    kernel's OOM kills when they started.
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


# One of several ranks, started by torchrun: joins the process group, then answers like a worker that is alone.
#
# It answers over a socket of its own. Where the next collective depends on something, all ranks decide it together.

GANG_VARIABLE = "BATCHTUNE_GANG"
"""Environment variable that says where the ranks connect, and with which token: `HOST,PORT,TOKEN`."""


# Whoever leads the ranks ends them all when their time is over: no collective does that by itself.
_COLLECTIVE_TIMEOUT = timedelta(days=30)
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}

_decode_request = msgspec.json.Decoder[Request | Decision](Request | Decision).decode


def main() -> None:
    """Connect, and serve requests until the other side closes the connection."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    import_for_good("torch", "torch.distributed")
    host, port, token = os.environ.pop(GANG_VARIABLE).split(",")
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    place = RankPlace.connected((host, int(port)), token, rank, world_size)
    place.serve(RankWorker(place))


class RankPlace:
    """This process among the ranks, and its connection to whoever leads them."""

    def __init__(
        self, channel: socket.socket, replies: BinaryIO, rank: int, world_size: int
    ) -> None:
        self.channel = channel
        self._replies = replies
        self.rank = rank
        self.world_size = world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        self.nnodes = self.world_size // self.local_world_size
        self.host = socket.gethostname()

    @classmethod
    def connected(
        cls, address: tuple[str, int], token: str, rank: int, world_size: int
    ) -> RankPlace:
        """Connect this process, and say which rank it is.

        From then on it prints its stack to the channel whenever the other side sends urgent data, to see where it
        hangs: the kernel then sends SIGURG, wherever the other side is.
        """
        channel = socket.create_connection(address)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
        faulthandler.register(signal.SIGURG, file=channel.fileno(), all_threads=False)
        place = cls(channel, channel.makefile("rb"), rank, world_size)
        place.say(place.hello(token))
        return place

    def hello(self, token: str) -> Hello:
        """Return what this rank says first."""
        return Hello(
            token=token,
            rank=self.rank,
            world_size=self.world_size,
            host=self.host,
            pid=os.getpid(),
            node_rank=self.rank // self.local_world_size,
        )

    def say(self, message: Message) -> None:
        """Send a message."""
        self.channel.sendall(encode(message) + b"\n")

    def serve(self, worker: Worker) -> NoReturn:
        """Answer requests until the other side closes the connection; then end this process.

        Nothing else runs: no finalizer, which may hang, and no script's checkpoint, validation or upload.
        """
        for line in self._replies:
            request = _decode_request(line)
            assert not isinstance(request, Decision)
            self.say(worker.answer(request))
        os._exit(0)

    def largest(self, value: int, caught: str | None = None) -> int:
        """Return the largest value that a rank gives, once all have called this."""
        if self.world_size == 1:
            return value
        self.say(Vote(value=value, caught=caught))
        line = self._replies.readline()
        if not line:
            os._exit(0)  # another rank has failed
        decision = _decode_request(line)
        assert isinstance(decision, Decision)
        return decision.value

    def agree(self, wanted: bool, caught: str | None = None) -> bool:
        """Return whether any rank wants it, once all have called this."""
        return self.largest(int(wanted), caught) > 0


class RankWorker(Worker):
    """A worker whose process group exists before its workload is built."""

    _backend: str | None = None  # of the process group; None: there is none

    def __init__(self, place: RankPlace) -> None:
        super().__init__(place.agree)
        self._place = place

    def _open(self, request: Prepare) -> Meter:
        """Open this rank's device, and join the process group."""
        import torch
        from torch import distributed

        device = request.settings.device
        kind = device.partition(":")[0]
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda":
            device = f"cuda:{self._place.local_rank}"
        meter = self._open_device(device, request)
        self._backend = _BACKENDS[kind]
        distributed.init_process_group(self._backend, timeout=_COLLECTIVE_TIMEOUT)
        distributed.all_reduce(torch.ones(1, device=meter.torch_device))
        meter.synchronize()
        return meter

    def _open_device(self, device: str, request: Prepare) -> Meter:
        """Open a device; ranks on the CPU of one machine share its memory, unless each was given a limit."""
        backend = backend_for(device)
        settings = request.settings
        ranks = self._place.local_world_size
        if device == "cpu" and settings.memory_bytes is None and ranks > 1:
            settings = replace(settings, memory_bytes=total_memory() // ranks)
        return backend.open(device, settings, request.limit_bytes)

    def _ready(
        self, workload: Workload, meter: Meter, probed_with: ProbedWith
    ) -> Ready:
        """Settle the limit: the smallest of all ranks is enforced on all."""
        ready = super()._ready(workload, meter, probed_with)
        if self._backend is None:
            return ready
        device = ready.device
        place = self._place
        meter.lower(-place.largest(-device.limit_bytes))
        own = RankDevice(
            rank=place.rank,
            host=place.host,
            name=device.name,
            limit_bytes=device.limit_bytes,
            outside_bytes=device.outside_bytes,
            base_bytes=meter.in_use(),
        )
        return replace(
            ready,
            device=replace(
                device,
                limit_bytes=meter.device.limit_bytes,
                ranks=[own],
                world_size=place.world_size,
                nnodes=place.nnodes,
                backend=self._backend,
            ),
        )
