"""One reply of all ranks' replies: the worst of what they measured, or the failure that explains the others.

When one rank fails, the others fail because of it, or wait for it. By precedence: some rank ran out of memory; some
rank raised an error of its own; some rank's process ended; a rank lost its connection to another one; one did not
answer in time. Of several, the first that said so counts.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from batchtune.probe.requests import (
    Describe,
    Described,
    Prepare,
    Ran,
    Ready,
    Reply,
    RunTrial,
)
from batchtune.processes.worker import Failed, judged_end
from batchtune.results import Device, Outcome, RankDevice, Trial, Twin

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
    """Return the worst of what the ranks measured, or of their devices; or what rank 0 has described."""
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
