"""One reply of all ranks' replies, made here: what counts of several, and which failure explains the others."""

from typing import Any

import pytest
from msgspec.structs import replace

from batchtune.probe.requests import Prepare, Ran, Ready, Run
from batchtune.probe.verdicts import Ended, Gathered, merged
from batchtune.processes.worker import Failed
from batchtune.results import BatchShape, Device, ProbedWith, RankDevice, Trial

SHAPE = BatchShape(4, 3.0)
RUN = Run(shape=SHAPE, timeout_seconds=15.0)
PREPARE = Prepare(
    workload="w",
    options={},
    settings=ProbedWith(nproc_per_node=2),
    limit_bytes=None,
    examples=0,
    timeout_seconds=60.0,
)
OOM = "RuntimeError: CUDA out of memory"
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
OWN = "ValueError: tokens and labels differ"
# As faulthandler prints them.
HANGS = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/home/me/train.py", line 28 in augment\n'
    '  File "/home/me/train.py", line 12 in step\n'
)
WAITS = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/venv/lib/site-packages/torch/autograd/graph.py", line 865 in _engine_run_backward\n'
    '  File "/home/me/train.py", line 31 in step\n'
)


def ran(outcome: Any = "ok", error: str | None = None, **facts: Any) -> Ran:
    return Ran(trial=Trial.of(SHAPE, outcome, error=error, **facts), stage="step")


def gathered(**parts: Any) -> Gathered:
    return Gathered(2, **parts)


def test_the_worst_of_all_ranks_counts() -> None:
    first = ran(
        step_seconds=0.2,
        peak_bytes=100,
        sm_clock_mhz=1980,
        throttle_reasons=["power cap"],
        parameters_changed=False,
    )
    second = ran(
        step_seconds=0.1,
        peak_bytes=300,
        sm_clock_mhz=1410,
        throttle_reasons=["hardware slowdown"],
        parameters_changed=True,
        rest_bytes=70,
    )
    reply = merged(gathered(replies={1: replace(second, renew=True), 0: first}), RUN)
    assert isinstance(reply, Ran)
    trial = reply.trial
    assert (trial.outcome, trial.step_seconds, trial.peak_bytes) == ("ok", 0.2, 300)
    assert (trial.rank, trial.oom_ranks, trial.rest_bytes) == (1, [], 70)
    assert (trial.sm_clock_mhz, trial.parameters_changed) == (1410, True)
    assert trial.throttle_reasons == ["hardware slowdown", "power cap"]
    assert reply.renew


@pytest.mark.parametrize(
    ("parts", "outcome", "rank", "oom_ranks", "error"),
    [
        (
            {"replies": {0: ran("oom", OOM), 1: ran("oom", OOM)}},
            *("oom", 0, [0, 1], f"rank 0: {OOM}"),
        ),
        # The others' errors follow from it, or show only that they were quicker.
        (
            {"replies": {0: ran("error", GLOO), 1: ran("oom", OOM)}},
            *("oom", 1, [1], f"rank 1: {OOM}"),
        ),
        (
            {"replies": {0: ran("error", OWN), 1: ran("oom", OOM)}},
            *("oom", 1, [1], f"rank 1: {OOM}"),
        ),
        (
            {"replies": {0: ran("error", GLOO), 1: ran("error", OWN)}},
            *("error", 1, [], f"rank 1: {OWN}"),
        ),
        (
            {
                "replies": {0: ran("error", GLOO)},
                "ended": {1: Ended("crash", "was killed by SIGKILL")},
            },
            *("crash", 1, [], "rank 1 was killed by SIGKILL"),
        ),
        (
            {"ended": {1: Ended("oom", "was killed by SIGABRT", "what(): bad_alloc")}},
            *("oom", 1, [1], "rank 1 was killed by SIGABRT: what(): bad_alloc"),
        ),
        (
            {"replies": {0: ran("error", GLOO), 1: ran("error", GLOO)}},
            *("crash", 0, [], f"rank 0: {GLOO}"),
        ),
        (
            {"caught": {1: OOM}},
            *("oom", 1, [1]),
            f"rank 1: caught by the workload, and other ranks waited for that step: {OOM}",
        ),
        (
            {"stacks": {0: WAITS, 1: HANGS}},
            *("timeout", 1, []),
            "no answer within 15 s; rank 1 hangs at train.py, line 28, in augment",
        ),
        (
            {"stacks": {0: WAITS, 1: WAITS}},
            *("timeout", 0, []),
            "no answer within 15 s; ranks 0, 1 hang at train.py, line 31, in step",
        ),
        (
            {"replies": {0: ran()}, "stacks": {1: ""}},
            *("timeout", 1, [], "no answer within 15 s; rank 1 hangs"),
        ),
    ],
)
def test_the_failure_that_explains_the_others_counts(
    parts: dict[str, Any],
    outcome: str,
    rank: int,
    oom_ranks: list[int],
    error: str,
) -> None:
    reply = merged(gathered(**parts), RUN)
    assert isinstance(reply, Ran)
    trial = reply.trial
    assert (trial.outcome, trial.rank, trial.oom_ranks) == (outcome, rank, oom_ranks)
    assert trial.error == error
    assert trial.shape == SHAPE
    assert reply.renew


def device(rank: int, limit_bytes: int, **facts: Any) -> Device:
    own = RankDevice(
        rank=rank,
        host="here",
        name="H100",
        limit_bytes=limit_bytes,
        outside_bytes=facts.get("outside_bytes"),
        base_bytes=rank,
    )
    return Device(
        kind="cuda",
        name="H100",
        total_bytes=1000,
        limit_bytes=limit_bytes,
        driver=None,
        torch="2.13",
        allocator="native",
        ranks=[own],
        world_size=2,
        backend="nccl",
        **{"other_processes": None, **facts},
    )


def test_the_device_is_what_every_rank_has() -> None:
    replies = {
        1: Ready(device=device(1, 700, free_bytes=800, outside_bytes=90)),
        0: Ready(device=device(0, 900, free_bytes=950, outside_bytes=80)),
    }
    reply = merged(gathered(replies=replies), PREPARE)
    assert isinstance(reply, Ready)
    merged_device = reply.device
    assert (merged_device.limit_bytes, merged_device.free_bytes) == (700, 800)
    assert (merged_device.outside_bytes, merged_device.world_size) == (90, 2)
    assert [
        (rank.rank, rank.limit_bytes, rank.outside_bytes, rank.base_bytes)
        for rank in merged_device.ranks
    ] == [(0, 900, 80, 0), (1, 700, 90, 1)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            {
                "replies": {
                    0: Failed(message=GLOO, stage="setup"),
                    1: Failed(message=OWN, stage="step", hint="Fix it."),
                }
            },
            ("error", "step", f"rank 1: {OWN}"),
        ),
        (
            {"replies": {1: Failed(message=OOM, outcome="oom", stage="setup")}},
            ("oom", "setup", f"rank 1: {OOM}"),
        ),
        (
            {"ended": {1: Ended("crash", "ended with exit code 3", "no license\n")}},
            ("crash", "setup", "rank 1 ended with exit code 3: no license"),
        ),
        (
            {"stacks": {0: WAITS, 1: HANGS}},
            (
                *("timeout", "setup"),
                "no answer within 60 s; rank 1 hangs at train.py, line 28, in augment",
            ),
        ),
    ],
)
def test_ranks_that_are_not_ready_fail_as_one(
    parts: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    reply = merged(gathered(**parts), PREPARE)
    assert isinstance(reply, Failed)
    assert (reply.outcome, reply.stage, reply.message) == expected
