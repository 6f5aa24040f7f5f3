"""Faults, caused for real in a worker process: each is reported as what it is, and nothing of it stays."""

import os
import re
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from worker_processes import (
    comes_true,
    gone,
    ours,
    processes_of,
    start_python,
    supervise,
)

from batchtune.errors import WorkloadError
from batchtune.results import BatchShape

ONE, TWO, THREE = (BatchShape(size, 3.0) for size in (1, 2, 3))

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def no_process_stays():
    yield
    assert not ours()


HANGS = r"no answer within 1 s; it hangs at faulty_workload\.py, line \d+, in hang"
CAUGHT = (
    r"caught by the workload, whose step still returned: RuntimeError: .*"
    r"\(faulty_workload\.py, line \d+\)"
)
# Batch size → the outcome, the error, and the worker of the trial.
FAULTS = {
    3: ("oom", r".*Unable to allocate 4\.00 GiB.*", 1),
    4: ("oom", r"RuntimeError: .*can't allocate memory.*", 1),
    5: ("oom", CAUGHT, 1),
    6: ("crash", r"the worker process was killed by SIGSEGV.*", 1),
    7: ("crash", r"the worker process ended with exit code 3", 2),
    8: ("crash", r"the worker process said b'debug: 7.* not its own", 3),
    9: ("timeout", HANGS, 4),
}


def test_each_fault_is_one_result_of_a_probe_that_goes_on():
    """One worker lives on under a real limit after each lack of memory; after each other fault a new one starts."""
    with supervise("Faulty") as supervisor:
        device = supervisor.start()
        before = supervisor.measure(ONE, 0).trial
        for size, (outcome, error, worker) in FAULTS.items():
            limit = 1.0 if size == 9 else 60.0
            supervisor._settings = replace(
                supervisor._settings, trial_timeout_seconds=limit
            )
            trial = supervisor.measure(BatchShape(size, 3.0), size).trial
            assert (trial.outcome, trial.worker) == (outcome, worker), size
            assert re.fullmatch(error, trial.error, re.DOTALL), size
            assert trial.caught == (size == 5)
        after = supervisor.measure(ONE, 10).trial
    assert (before.outcome, before.worker) == ("ok", 1)
    assert device.load_average is not None
    for others in (device.other_processors, before.other_processors):
        # Clocks tick every hundredth of a second.
        assert 0 <= others <= device.processors * 1.2
    assert (after.outcome, after.worker) == ("ok", 5)


@pytest.mark.parametrize("workload", ["TwoLosses", "KeepsItsFeatures"])
def test_a_failure_leaves_no_memory_to_later_trials(workload):
    with supervise(workload, memory_bytes=600 << 20) as supervisor:
        supervisor.start()
        before, failed, after = (
            supervisor.measure(BatchShape(size, 10.0), 0).trial for size in (1, 10, 1)
        )
    assert failed.outcome == "oom"
    assert abs(after.peak_bytes - before.peak_bytes) < 6 << 20


def test_without_a_byte_left_the_worker_reports_oom_and_lives_on():
    with supervise("TakesEveryByte", memory_bytes=450 << 20) as supervisor:
        supervisor.start()
        trials = [
            supervisor.measure(BatchShape(2, 1.0), index).trial for index in range(2)
        ]
    assert [trial.outcome for trial in trials] == ["oom", "oom"]
    assert "MemoryError" in trials[0].error


@pytest.mark.parametrize("fails", [False, True])
def test_a_setup_that_lowers_the_memory_limit_is_named(fails):
    named = pytest.raises(
        WorkloadError,
        match="the workload lowers the limit RLIMIT_AS of its process to 64 MiB",
    )
    with supervise("LowersLimit", where="setup", fails=fails) as supervisor, named:
        supervisor.start()


def test_a_step_that_lowers_the_memory_limit_is_named():
    with supervise("LowersLimit", where="step", fails=True) as supervisor:
        trial = supervisor.measure(ONE, 0).trial
    assert trial.outcome == "error"
    assert "the workload lowers the limit RLIMIT_AS of its process to 64 MiB" in (
        trial.error
    )


def test_what_the_workload_started_ends_with_its_worker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with supervise("StartsDaemons") as supervisor:
        supervisor.start()
        assert len(ours()) == 2  # the worker, and the daemon of the setup
        assert supervisor.measure(ONE, 0).trial.outcome == "ok"
        assert len(ours()) > 3
        assert supervisor.measure(TWO, 1).trial.outcome == "crash"
        assert not ours()
        supervisor._settings = replace(supervisor._settings, trial_timeout_seconds=1.0)
        assert supervisor.measure(THREE, 2).trial.outcome == "timeout"
        assert not ours()


def test_nothing_stays_if_the_supervisor_is_killed_in_mid_trial(tmp_path):
    code = (
        "from worker_processes import supervise\n"
        "from batchtune.results import BatchShape\n"
        "with supervise('StartsDaemons') as supervisor:\n"
        "    supervisor.measure(BatchShape(3, 3.0), 0)\n"
    )
    supervisor = start_python(code, tmp_path)
    assert comes_true((tmp_path / "hanging").exists)
    assert len(processes_of(supervisor.pid)) == 4  # nursery, worker, and two daemons
    supervisor.kill()
    supervisor.wait()
    assert gone(supervisor.pid)


def test_a_killed_nursery_takes_all_with_it_and_is_started_again():
    with supervise("KillsItsParent") as supervisor:
        killed = supervisor.measure(ONE, 0).trial
        assert not ours()
        after = supervisor.measure(TWO, 1).trial
    assert killed.outcome == "crash"
    assert (after.outcome, after.worker) == ("ok", 2)


# As if an import had used CUDA before the fork, after which a forked process can't.
SPOILT = """
import os, torch
importer = os.getpid()
torch._C._cuda_isInBadFork = lambda: os.getpid() != importer
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")
def test_a_worker_that_cant_use_cuda_after_a_fork_starts_alone(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SPOILT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with supervise("Good", shared=False) as supervisor:
        supervisor.start()
        commands = [
            Path(f"/proc/{pid}/cmdline").read_text()
            for pid in processes_of(os.getpid())
        ]
        alone = "processes/__init__.py\0batchtune.probe.worker"
        assert [alone in command for command in commands].count(True) == 1
        assert supervisor.measure(ONE, 0).trial.outcome == "ok"
