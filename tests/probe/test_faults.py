"""Faults, caused for real: each is told as what it is, and nothing of it stays."""

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from worker_processes import gone, ours, processes_of, supervise, wait_for

from batchtune.errors import WorkloadError
from batchtune.probe.devices import DeviceBusy, DeviceIdentity, lock_device
from batchtune.probe.requests import Identified
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape, DeviceProcess

ONE, TWO, THREE = (BatchShape(size, 3.0) for size in (1, 2, 3))


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    assert not ours()


def test_a_worker_killed_from_outside_is_not_out_of_memory(tmp_path: Path) -> None:
    killer = threading.Thread(
        target=lambda: os.kill(int(wait_for(tmp_path / "pid")), signal.SIGKILL)
    )
    killer.start()
    with supervise("WaitsToBeKilled", folder=str(tmp_path)) as supervisor:
        first = supervisor.measure(ONE, 0).trial
        second = supervisor.measure(ONE, 1).trial
    killer.join()
    assert (first.outcome, first.error) == (
        "crash",
        "the worker process was killed by SIGKILL",
    )
    assert (second.outcome, second.worker) == ("ok", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "outcome"), [(ONE, "ok"), (TWO, "crash"), (THREE, "timeout")]
)
def test_what_the_workload_started_ends_with_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: BatchShape, outcome: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with supervise(
        "StartsDaemons",
        shared=False,
        timeout_seconds=1.0 if outcome == "timeout" else 60.0,
    ) as supervisor:
        supervisor.start()
        assert len(ours()) == 3  # nursery, worker, and the daemon of the setup
        assert supervisor.measure(shape, 0).trial.outcome == outcome
        if outcome == "ok":
            assert len(ours()) > 4
        else:
            assert len(ours()) == 1


def test_nothing_stays_if_the_supervisor_is_killed_in_mid_trial(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]}\n"
        "from worker_processes import supervise\n"
        "from batchtune.results import BatchShape\n"
        "with supervise('StartsDaemons') as supervisor:\n"
        "    supervisor.measure(BatchShape(3, 3.0), 0)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    wait_for(tmp_path / "hanging")
    assert len(processes_of(supervisor.pid)) == 4  # nursery, worker, and two daemons
    supervisor.kill()
    supervisor.wait()
    assert gone(supervisor.pid)


def test_nothing_stays_when_the_nursery_itself_is_killed() -> None:
    with supervise("KillsItsParent") as supervisor:
        trial = supervisor.measure(ONE, 0).trial
        assert not ours()
    assert trial.outcome == "crash"


def test_a_setup_that_never_ends_is_told() -> None:
    with (
        supervise(
            "SlowToSetUp", setup_timeout_seconds=1.0, seconds=1000.0
        ) as supervisor,
        pytest.raises(
            WorkloadError, match="setup took longer than 1 s; it hangs at "
        ) as caught,
    ):
        supervisor.start()
    assert "--setup-timeout" in (caught.value.hint or "")
    assert "line" in (caught.value.traceback or "")


@pytest.mark.parametrize(
    "name",
    [
        "Scribbles",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("Forges", "Repeats", "ClosesDescriptors")
        ),
    ],
)
def test_a_workload_that_meddles_with_the_channel_is_a_crash(name: str) -> None:
    with supervise(name) as supervisor:
        supervisor.step(ONE)
        trial = supervisor.measure(ONE, 0).trial
    assert trial.outcome == "crash"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HungryInNumpy", "HungryInMakeBatch"])
def test_numpy_runs_out_of_memory_as_torch_does(name: str) -> None:
    with supervise(name) as supervisor:
        trials = [
            supervisor.measure(BatchShape(size, 1.0), 0).trial for size in (2, 4, 2)
        ]
    assert [trial.outcome for trial in trials] == ["ok", "oom", "ok"]
    assert "Unable to allocate 1.00 GiB" in (trials[1].error or "")
    assert {trial.worker for trial in trials} == {1}


def test_a_leak_is_reported_as_one() -> None:
    with supervise("Leaks", mib=4.0) as supervisor:
        measured = supervisor.measure(ONE, 0)
        trial = measured.trial
    assert (trial.outcome, trial.error) == (
        "error",
        "the workload leaks: each step leaves about 4 MiB more in use (10 steps in a row)",
    )
    assert ".item() or .detach()" in (measured.hint or "")
    assert (measured.stage, measured.renew) == ("step", True)


@pytest.mark.slow
def test_a_step_of_varying_time_is_repeated_with_its_spread() -> None:
    with supervise("Varies") as supervisor:
        trial = supervisor.measure(ONE, 0).trial
    assert trial.steps > 7  # where it is steady, five timed ones are enough
    assert trial.step_seconds is not None
    assert trial.step_seconds_spread is not None
    assert trial.step_seconds_spread > 0.05 * trial.step_seconds


def test_without_a_byte_left_the_worker_reports_oom_and_lives_on() -> None:
    with supervise("TakesEveryByte", memory_bytes=450 << 20) as supervisor:
        supervisor.start()
        trials = [
            supervisor.measure(BatchShape(2, 1.0), index).trial for index in range(2)
        ]
    assert [trial.outcome for trial in trials] == ["oom", "oom"]
    assert "MemoryError" in (trials[0].error or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outcome", "error"),
    [
        ("Killed", "crash", "SIGKILL"),
        ("Hangs", "timeout", "no answer"),
        ("HungryInNumpy", "oom", "allocate"),
    ],
)
def test_a_single_step_that_fails_is_an_answer(
    name: str, outcome: str, error: str
) -> None:
    with supervise(name, timeout_seconds=2.0) as supervisor:
        supervisor.start()
        stepped = supervisor.step(BatchShape(4, 1.0)).trial
    assert stepped.outcome == outcome
    assert error in (stepped.error or "")


@pytest.mark.slow
def test_a_second_probe_on_the_cpu_knows_of_the_first() -> None:
    with supervise("Good") as first, supervise("Good", shared=False) as second:
        assert first.start().processes is None
        assert second.start().processes == [
            DeviceProcess(pid=os.getpid(), used_bytes=None)
        ]
        first.__exit__(None, None, None)
        assert second.start().processes is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU goes by a GPU's id: another probe of it is then no small matter."""
    ask = Supervisor._ask

    def made(self: Supervisor, request: Any, kind: Any) -> Any:
        return (
            Identified(device=DeviceIdentity("GPU-made", "GPU"))
            if kind is Identified
            else ask(self, request, kind)
        )

    monkeypatch.setattr(Supervisor, "_ask", made)


def test_a_gpu_is_probed_by_one_at_a_time_from_start_to_end(gpu: None) -> None:
    with supervise("Good") as supervisor:
        with lock_device("GPU-made", "GPU"):
            with pytest.raises(
                DeviceBusy,
                match=f"another probe \\(process {os.getpid()}\\) is using GPU",
            ) as caught:
                supervisor.start()
            assert "--wait" in (caught.value.hint or "")
        assert supervisor.start().kind == "cpu"
        supervisor.measure(ONE, 0, fresh=True)
        with pytest.raises(DeviceBusy):
            lock_device("GPU-made", "GPU")
    lock_device("GPU-made", "GPU").close()


def test_a_gpu_in_use_can_be_waited_for(gpu: None) -> None:
    notes: list[str] = []
    lock = lock_device("GPU-made", "GPU")

    def on_note(text: str) -> None:
        notes.append(text)
        lock.close()

    with supervise("Good") as supervisor:
        supervisor._settings = replace(supervisor._settings, wait_seconds=math.inf)
        supervisor._note = on_note
        assert supervisor.start().kind == "cpu"
    assert notes == [
        f"Waiting for it to end: another probe (process {os.getpid()}) is using GPU."
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_setup_that_lowers_the_memory_limit_is_named(fails: bool) -> None:
    named = pytest.raises(
        WorkloadError,
        match="the workload lowers the limit RLIMIT_AS of its process to 64 MiB",
    )
    with supervise("LowersLimit", where="setup", fails=fails) as supervisor, named:
        supervisor.start()


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_lowers_the_memory_limit_is_named(fails: bool) -> None:
    with supervise("LowersLimit", where="step", fails=fails) as supervisor:
        trial = supervisor.measure(ONE, 0).trial
    assert trial.outcome == "error"
    assert "the workload lowers the limit RLIMIT_AS of its process to 64 MiB" in (
        trial.error or ""
    )
