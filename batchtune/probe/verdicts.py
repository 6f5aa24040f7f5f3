"""One reply of all ranks' replies: the worst of what they measured, or the failure that explains the others.

When one rank fails, the others fail because of it, or wait for it. By precedence: some rank ran out of memory; some
rank raised an error of its own; some rank's process ended; a rank lost its connection to another one; none of them
answered in time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from batchtune.probe.requests import Prepare, Ran, Ready, Reply, Run
from batchtune.processes.worker import Failed, tail
from batchtune.results import Device, DeviceProcess, Outcome, RankDevice, Trial
from batchtune.workloads.loading import last_frame, user_stack

Cause = Literal["oom", "error", "ended", "secondary", "timeout"]

_PRECEDENCE: tuple[Cause, ...] = ("oom", "error", "ended", "secondary", "timeout")
# What a rank says when another one has gone: gloo, NCCL, and the store of the rendezvous.
_SECONDARY = re.compile(
    r"Connection (closed by|reset by|refused)|Broken pipe|Socket closed|Timed out waiting|Application timeout"
    r"|NCCL remote process|ncclRemoteError|unhandled system error|ncclSystemError|DistNetworkError|DistStoreError"
    r"|TCPStore|DistBackendError"
)
# The largest of any rank counts.
_LARGEST = (
    "step_seconds",
    "mean_step_seconds",
    "step_seconds_spread",
    "peak_bytes",
    "reserved_bytes",
    "alloc_retries",
    "rest_bytes",
    "outside_bytes",
    "steady_peak_bytes",
    "peak_spread_bytes",
    "other_processors",
    "compilations",
    "at_recompile_limit",
)


_INNERMOST_FRAME = re.compile(r'^  File "([^"]+)"', re.MULTILINE)
_OUTCOMES: dict[Cause, Outcome] = {"oom": "oom", "error": "error", "timeout": "timeout"}
_HINTS: dict[Cause, str] = {
    "ended": "Its last output may say why. If something outside kills it (a job's or a container's limit), it needs "
    "less memory or time, or a higher limit there.",
    "timeout": "If it needs longer, to download or to compile, allow that with --setup-timeout SECONDS.",
}


class Ended(NamedTuple):
    """The end of a rank's process: `how` continues "rank 1"; `output` is the end of what all ranks printed."""

    outcome: Literal["oom", "crash"]
    how: str
    output: str = ""


@dataclass
class Gathered:
    """What came of one request by rank.

    Attributes:
        caught: Out-of-memory errors that the workload caught, of ranks that then waited for the others in vain.
        stacks: Of the ranks that had not answered when the time was over, as faulthandler prints them.
    """

    world_size: int
    replies: dict[int, Reply] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    caught: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def causes(self) -> dict[int, Cause]:
        """Why ranks failed; ranks that passed, or that only wait for others, are left out."""
        causes: dict[int, Cause] = {}
        for rank in range(self.world_size):
            cause = self._cause(rank)
            if cause is not None:
                causes[rank] = cause
        return causes

    def _cause(self, rank: int) -> Cause | None:
        if rank in self.replies:
            return cause_of(self.replies[rank])
        if rank in self.ended:
            return "oom" if self.ended[rank].outcome == "oom" else "ended"
        if rank in self.caught:
            return "oom"
        if rank in self.stacks:
            return "timeout"
        return None


def cause_of(reply: Reply) -> Cause | None:
    """Return why a rank's reply is a failure; None if it is none."""
    if isinstance(reply, Failed):
        outcome = reply.outcome
        text = reply.message
    elif isinstance(reply, Ran) and reply.trial.outcome != "ok":
        outcome = reply.trial.outcome
        text = reply.trial.error or ""
    else:
        return None
    if outcome == "oom":
        return "oom"
    if _SECONDARY.search(text):
        return "secondary"
    return "error"


def merged(gathered: Gathered, request: Prepare | Run) -> Reply:
    """Return the one reply to a request that all ranks got."""
    causes = gathered.causes
    if not causes and len(gathered.replies) == gathered.world_size:
        return _passed(gathered.replies)
    cause: Cause = "timeout"
    if causes:
        cause = min(causes.values(), key=_PRECEDENCE.index)
    rank = min((rank for rank in causes if causes[rank] == cause), default=0)
    if cause == "timeout":
        rank, error = hanging(gathered.stacks, request.timeout_seconds or 0.0)
    else:
        error = f"rank {rank}{_words(gathered, rank)}"
    reply = gathered.replies.get(rank)
    if isinstance(request, Prepare):
        if isinstance(reply, Failed):
            return replace(reply, message=error)
        return Failed(
            stage="setup",
            outcome=_OUTCOMES.get(cause, "crash"),
            message=error,
            hint=_HINTS.get(cause),
            traceback=_traceback(gathered, rank),
        )
    if not isinstance(reply, Ran):
        reply = Ran(trial=Trial.of(request.shape, "crash"))
    trial = replace(
        reply.trial,
        outcome=_OUTCOMES.get(cause, "crash"),
        error=error,
        rank=rank,
        oom_ranks=[rank for rank in causes if causes[rank] == "oom"],
    )
    return replace(reply, trial=trial, renew=True)


def _words(gathered: Gathered, rank: int) -> str:
    """Describe a rank's failure, to follow its number."""
    if rank in gathered.ended:
        ended = gathered.ended[rank]
        last_words = tail(ended.output, lines=3)
        return f" {ended.how}: {last_words}" if last_words else f" {ended.how}"
    if rank in gathered.caught:
        return f": caught by the workload, and other ranks waited for that step: {gathered.caught[rank]}"
    reply = gathered.replies[rank]
    if isinstance(reply, Ran):
        return f": {reply.trial.error}"
    assert isinstance(reply, Failed)
    return f": {reply.message}"


def _traceback(gathered: Gathered, rank: int) -> str | None:
    """Return what a rank that did not answer left: its last output, or where it hangs."""
    if rank in gathered.ended:
        return tail(gathered.ended[rank].output, lines=12) or None
    return user_stack(gathered.stacks.get(rank, "")) or None


def hanging(stacks: Mapping[int, str], seconds: float) -> tuple[int, str]:
    """Return which rank hangs, and an error that says where, by the stacks of those that did not answer in time.

    A rank whose innermost frame is torch's waits for the others, unless all do.
    """
    culprits = [rank for rank in stacks if not _waits(stacks[rank])] or list(stacks)
    places: dict[str, list[int]] = {}
    for rank in culprits:
        stack = user_stack(stacks[rank])
        place = f" at {last_frame(stack)}" if stack else ""
        places.setdefault(place, []).append(rank)
    hangs = []
    for place, ranks in places.items():
        if len(ranks) == 1:
            hangs.append(f"rank {ranks[0]} hangs{place}")
        else:
            hangs.append(f"ranks {', '.join(map(str, ranks))} hang{place}")
    return min(culprits, default=0), "; ".join(
        [f"no answer within {seconds:g} s", *hangs]
    )


def _waits(stack: str) -> bool:
    """Return whether the innermost frame is torch's own, which waits for other ranks or for the device."""
    innermost = _INNERMOST_FRAME.search(stack)
    return innermost is not None and "torch" in Path(innermost[1]).parts


def _passed(replies: Mapping[int, Reply]) -> Reply:
    """Return the worst of what the ranks measured, or of their devices."""
    ranks = sorted(replies)
    readies = []
    rans = []
    for rank in ranks:
        reply = replies[rank]
        if isinstance(reply, Ready):
            readies.append(reply.device)
        elif isinstance(reply, Ran):
            rans.append(reply)
    if readies:
        return Ready(device=_merged_device(readies))
    return Ran(
        trial=_merged_trial(ranks, [ran.trial for ran in rans]),
        renew=any(ran.renew for ran in rans),
    )


def _merged_trial(ranks: Sequence[int], trials: Sequence[Trial]) -> Trial:
    facts: dict[str, Any] = {
        name: largest(getattr(trial, name) for trial in trials) for name in _LARGEST
    }
    peaks = [trial.peak_bytes or 0 for trial in trials]
    clocks = [trial.sm_clock_mhz for trial in trials if trial.sm_clock_mhz is not None]
    reasons: set[str] | None = None
    for trial in trials:
        if trial.throttle_reasons is not None:
            reasons = {*(reasons or ()), *trial.throttle_reasons}
    return replace(
        trials[0],
        **facts,
        sm_clock_mhz=min(clocks, default=None),
        throttle_reasons=None if reasons is None else sorted(reasons),
        parameters_changed=_any_changed([trial.parameters_changed for trial in trials]),
        rank=ranks[peaks.index(max(peaks))],
        oom_ranks=[],
    )


def _any_changed(changes: Sequence[bool | None]) -> bool | None:
    if True in changes:
        return True
    return None if None in changes else False


def largest(values: Iterable[Any]) -> Any:
    """Return the largest known value; None if none is known."""
    return max((value for value in values if value is not None), default=None)


def _merged_device(devices: Sequence[Device]) -> Device:
    """Return a device of which every rank has at least as much; each rank's own is in its `ranks`."""
    first = devices[0]
    ranks: list[RankDevice] = []
    processes: list[DeviceProcess] = []
    for device in devices:
        ranks += device.ranks
        processes += [
            process for process in device.processes or () if process not in processes
        ]
    free = [device.free_bytes for device in devices if device.free_bytes is not None]
    return replace(
        first,
        total_bytes=min(device.total_bytes for device in devices),
        limit_bytes=min(device.limit_bytes for device in devices),
        free_bytes=min(free, default=None),
        outside_bytes=largest(device.outside_bytes for device in devices),
        other_processes=largest(device.other_processes for device in devices),
        processes=None if first.processes is None else processes,
        load_average=largest(device.load_average for device in devices),
        other_processors=largest(device.other_processors for device in devices),
        ranks=ranks,
    )
