"""One reply of all ranks' replies, made here: what counts of several, and which failure explains the others."""

from functools import partial

import made_trials
import pytest
from made_devices import made_device
from msgspec.structs import replace

from batchtune.probe.failures import message_verdict
from batchtune.probe.ranks import merged
from batchtune.probe.requests import Prepare, Ran, Ready, RunTrial
from batchtune.processes.worker import Failed
from batchtune.results import BatchShape, ProbedWith, RankDevice

SHAPE = BatchShape(4, 3.0)
RUN = RunTrial(shape=SHAPE)
PREPARE = Prepare(
    workload="w",
    options={},
    settings=ProbedWith(),
    limit_bytes=None,
    examples=0,
)
OOM = "RuntimeError: CUDA out of memory"
DISGUISED = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
OWN = "ValueError: tokens and labels differ"


ran = partial(made_trials.ran, SHAPE)


def failed(outcome, message, **facts):
    return Failed(outcome=outcome, message=message, **facts)


def test_the_worst_of_all_ranks_counts():
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
    reply = merged({1: replace(second, renew=True), 0: first}, RUN, 2)
    trial = reply.trial
    assert (trial.outcome, trial.step_seconds, trial.peak_bytes) == ("ok", 0.2, 300)
    assert (trial.rank, trial.oom_ranks, trial.rest_bytes) == (1, [], 70)
    assert (trial.sm_clock_mhz, trial.parameters_changed) == (1410, True)
    assert trial.throttle_reasons == ["hardware slowdown", "power cap"]
    assert reply.renew


PASSED = ran()
OUT = ran("oom", error=OOM)
MISTAKEN = ran("error", error=OWN)
LOST = ran("error", error=GLOO)
KILLED = failed("crash", "its process was killed by SIGKILL")
HANGS = failed("timeout", "no answer within 15 s; it hangs at train.py, line 28")
# What goes wrong on a rank → its reply, the outcome of all, and whether it counts among those out of memory.
FAULTS = {
    "out of memory": (OUT, "oom", True),
    "killed for memory": (failed("oom", "std::bad_alloc"), "oom", True),
    "error": (MISTAKEN, "error", False),
    "killed": (KILLED, "crash", False),
    "hangs": (HANGS, "timeout", False),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "others",
    [
        {},  # none has answered: they wait for it
        {0: PASSED},
        {0: LOST},
    ],
    ids=["waiting", "passed", "lost"],
)
def test_a_fault_of_one_rank_is_the_result_of_all(others, fault):
    """A lost connection follows from another rank's fault, if the other one did not only fail to answer."""
    own, outcome, is_oom = FAULTS[fault]
    reply = merged({**others, 3: own}, RUN, 4)
    trial = reply.trial
    if outcome == "timeout" and LOST in others.values():
        assert (trial.outcome, trial.rank) == ("crash", 0)
        return
    error = own.trial.error if isinstance(own, Ran) else own.message
    assert (trial.outcome, trial.rank) == (outcome, 3)
    assert trial.oom_ranks == ([3] if is_oom else [])
    assert trial.error == f"rank 3: {error}"
    assert trial.shape == SHAPE
    assert reply.renew


@pytest.mark.parametrize(
    ("replies", "outcome", "rank", "error"),
    [
        # The other's own error was only quicker.
        ([MISTAKEN, OUT], "oom", 1, OOM),
        ([KILLED, OUT], "oom", 1, OOM),
        ([KILLED, MISTAKEN], "error", 1, OWN),
        ([HANGS, KILLED], "crash", 1, KILLED.message),
        ([LOST, LOST], "crash", 0, GLOO),
    ],
)
def test_of_several_faults_the_one_that_explains_others_counts(
    replies, outcome, rank, error
):
    reply = merged(dict(enumerate(replies)), RUN, 2)
    assert (reply.trial.outcome, reply.trial.rank) == (outcome, rank)
    assert reply.trial.error == f"rank {rank}: {error}"


def test_of_faults_alike_the_first_counts_and_all_ooms():
    reply = merged(dict.fromkeys([1, 0, 2], ran("oom", error=DISGUISED)), RUN, 3)
    assert (reply.trial.rank, reply.trial.oom_ranks) == (1, [0, 1, 2])
    # It is still in disguise, with the rank's name.
    assert message_verdict(reply.trial.error) == "disguised"


def test_where_a_ranks_error_was_raised_is_kept():
    own = replace(MISTAKEN, stage="make_batch", traceback="train.py, line 3")
    reply = merged({0: LOST, 1: own}, RUN, 2)
    assert (reply.stage, reply.traceback) == ("make_batch", "train.py, line 3")


def device(rank, limit_bytes, **facts):
    own = RankDevice(
        rank=rank,
        host="here",
        name="H100",
        limit_bytes=limit_bytes,
        outside_bytes=facts["outside_bytes"],
        base_bytes=rank,
    )
    return made_device(limit_bytes=limit_bytes, ranks=[own], world_size=2, **facts)


def test_the_device_is_what_every_rank_has():
    less = device(1, 700, free_bytes=800, outside_bytes=90)
    more = device(0, 900, free_bytes=950, outside_bytes=80)
    reply = merged({1: Ready(device=less), 0: Ready(device=more)}, PREPARE, 2)
    assert reply.device == replace(less, ranks=[*more.ranks, *less.ranks])


@pytest.mark.parametrize(
    ("replies", "outcome", "stage", "message"),
    [
        (
            [failed("error", GLOO, stage="setup"), failed("error", OWN, stage="step")],
            "error",
            "step",
            f"rank 1: {OWN}",
        ),
        ([failed("oom", OOM, stage="setup")], "oom", "setup", f"rank 0: {OOM}"),
        ([KILLED], "crash", "setup", f"rank 0: {KILLED.message}"),
        # The same everywhere: a wrong option, a missing file.
        ([failed("error", OWN, stage="import")] * 2, "error", "import", OWN),
    ],
)
def test_ranks_that_are_not_ready_fail_as_one(replies, outcome, stage, message):
    reply = merged(dict(enumerate(replies)), PREPARE, 2)
    assert (reply.outcome, reply.stage, reply.message) == (outcome, stage, message)
